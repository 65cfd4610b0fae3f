"""The tiny policy: a Qwen3 of a quarter of a million parameters with its own tokenizer, which reinforcement learning
improves in a minute on two CPU cores.

It is warm-started on demonstrations of which fewer than half are right (`tasks.demonstrations`): it learns to write and
to calculate, but often takes a wrong operator. `python -m grpo_lab.policies --out data/tiny_policy` rebuilds it.
Sampling and evaluation are here too; training is not, only the settings for it (TINY_GRPO).
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch

from grpo_lab import tasks

TINY_POLICY = Path(__file__).resolve().parents[1] / "data" / "tiny_policy"

PAD, UNKNOWN, USER, ASSISTANT, END = "<|pad|>", "<|unknown|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# One digit, one word, a run of #, or one other character, each with the space before it. A new line acts as a space
# does, so that a word has the same token wherever it stands.
PIECE = r"▁?(?:\d|[A-Za-z]+|#+|[^A-Za-z\d#▁])|▁"


def build_tokenizer():
    """A word-level tokenizer for the generated problems, with single digits and a chat template.

    decode(encode(text)) == text for questions and solutions (not for spaces at the ends of lines).
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
        ]
    )
    pieces = {f"{space}{digit}" for digit in range(10) for space in ("", "▁")}
    for split in ("train", "heldout"):
        for problem in tasks.problems(5000, 0, split):
            for text in (problem.question, problem.solution):
                pieces.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    special = [PAD, UNKNOWN, USER, ASSISTANT, END]
    vocabulary = {piece: i for i, piece in enumerate([*special, *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace(Regex("▁?\n▁?"), "\n"),
            decoders.Replace("▁", " "),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer, seed=0, hidden=96, layers=2):
    """A Qwen3 with random weights for `tokenizer`'s vocabulary, fp32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # vLLM has no attention for less
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def load_tiny_policy(path=TINY_POLICY):
    """(model, tokenizer) from `path`, fp32, on the CPU, in evaluation mode. Raises ValueError where there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"path={str(path)!r}: no policy there (config.json is missing). Build one with "
            f"python -m grpo_lab.policies --out {path}"
        )
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def _progress(items, text):
    from tqdm import tqdm  # the plain bar: a notebook's output then holds no widget state

    return tqdm(items, desc=text, leave=False, mininterval=0.2 if sys.stderr.isatty() else 5)


@torch.no_grad()
def sample(model, tokenizer, prompts, n=1, seed=0, *, temperature=1.0, max_new_tokens=48, batch_size=512, progress=""):
    """`n` completions for each of `prompts` (chat message lists): a list of lists of text.

    temperature=0 takes the most likely token (then n should be 1). The same seed gives the same completions on the same
    machine, and torch's global random state is left as it was. `batch_size` counts completions; `progress` names a bar.
    """
    if n < 1 or temperature < 0:
        raise ValueError(f"n={n}, temperature={temperature}: expected n >= 1 and temperature >= 0")
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    repeated = [text for text in texts for _ in range(n)]
    decoding = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    was_training = model.training
    model.eval()
    completions = []
    starts = range(0, len(repeated), batch_size)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in _progress(starts, progress) if progress else starts:
            batch = tokenizer(
                repeated[start : start + batch_size], return_tensors="pt", padding=True, add_special_tokens=False
            ).to(model.device)
            out = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                **decoding,
            )
            completions += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    return [completions[i : i + n] for i in range(0, len(completions), n)]


def evaluate(model, tokenizer, dataset, *, samples=8, seed=0, max_new_tokens=48, batch_size=512, progress=True):
    """How often the policy is right on `dataset` (columns `prompt` and `answer`), by `rewards.accuracy_reward`.

    Returns a dict: `accuracy` (mean over `samples` completions at temperature 1), `standard_error` of it (over
    problems), `greedy` (accuracy at temperature 0), `pass_at_k` (share of problems with at least one right completion
    among k), `k` (= samples) and `n` (problems).
    """
    from grpo_lab.rewards import accuracy_reward

    prompts, answers = list(dataset["prompt"]), list(dataset["answer"])
    options = {"seed": seed, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    label = "evaluating: sampled" if progress else ""
    groups = sample(model, tokenizer, prompts, samples, progress=label, **options)
    flat = accuracy_reward([c for group in groups for c in group], [a for a in answers for _ in range(samples)])
    right = torch.tensor(flat, dtype=torch.float64).view(len(prompts), samples)
    label = "evaluating: greedy" if progress else ""
    greedy = sample(model, tokenizer, prompts, temperature=0, progress=label, **options)
    return {
        "accuracy": right.mean().item(),
        "standard_error": right.mean(1).std(unbiased=True).item() / math.sqrt(len(prompts)),
        "greedy": sum(accuracy_reward([group[0] for group in greedy], answers)) / len(prompts),
        "pass_at_k": (right > 0).any(1).double().mean().item(),
        "k": samples,
        "n": len(prompts),
    }


def _batches_of_like_length(lengths, batch_size, generator, window=20):
    """One shuffled epoch as lists of indices; within a window of batches, rows of like length go together."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), window * batch_size):
        block = sorted(order[start : start + window * batch_size], key=lengths.__getitem__)
        batches += [block[i : i + batch_size] for i in range(0, len(block) - batch_size + 1, batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


# fmt: off
WARM_START = dict(
    demonstrations=200_000, right=0.33, unmarked=0.10, pages=100_000,
    steps=3600, batch_size=144, learning_rate=3e-3, weight_decay=0.1,
)
# fmt: on


def warm_start(
    model, tokenizer, seed, *, demonstrations, right, unmarked, pages, steps, batch_size, learning_rate, weight_decay
):
    """Trains `model` on mostly wrong demonstrations and on pages of right sums (`tasks.practice`), mixed.

    Cross-entropy over their completions, AdamW, warm-up and cosine schedule; a line of progress every 5 s.
    """
    from datasets import concatenate_datasets

    demos = tasks.demonstrations(demonstrations, seed, right, unmarked).remove_columns("answer")
    rows = concatenate_datasets([demos, tasks.practice(pages, seed)])
    prompts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in rows["prompt"]]
    heads = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    tails = tokenizer([text + END for text in rows["completion"]], add_special_tokens=False)["input_ids"]
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 50, 0.5 * (1 + math.cos(math.pi * s / steps)) + 0.01)
    )
    lengths = [len(head) + len(tail) for head, tail in zip(heads, tails, strict=True)]
    model.train()
    began, said, batches = time.monotonic(), 0.0, []
    for step in range(steps):
        if not batches:
            batches = _batches_of_like_length(lengths, batch_size, order)
        picked = batches.pop()
        width = max(lengths[i] for i in picked)
        ids = torch.full((batch_size, width), tokenizer.pad_token_id)
        labels = torch.full((batch_size, width), -100)
        for row, i in enumerate(picked):
            ids[row, : lengths[i]] = torch.tensor(heads[i] + tails[i])
            labels[row, len(heads[i]) : lengths[i]] = torch.tensor(tails[i])
        # right padding under a causal mask: no scored token sees it, so no attention mask is needed
        ids, labels = ids.to(model.device), labels.to(model.device)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if time.monotonic() - said > 5 or step == steps - 1:
            said = time.monotonic()
            print(f"warm start: step {step + 1}/{steps}, loss {loss.item():.3f}, {said - began:.0f} s", flush=True)
    return model.eval()


# fmt: off
TINY_GRPO = dict(
    learning_rate=3e-4, lr_scheduler_type="constant", max_steps=150,
    per_device_train_batch_size=128, num_generations=8, max_completion_length=32,
    loss_type="dapo", beta=0.0, bf16=False, gradient_checkpointing=False,
)
# fmt: on


def main():
    parser = argparse.ArgumentParser(prog="python -m grpo_lab.policies", description="Rebuild the tiny policy.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder that the model and the tokenizer are written to"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU; another number rounds differently")
    parser.add_argument("--device", default="cpu", help="cpu (a quarter of an hour on 2 cores) or cuda (two minutes)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    model = warm_start(build_model(tokenizer, args.seed).to(args.device), tokenizer, args.seed, **WARM_START).cpu()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for split in ("train", "heldout"):
        result = evaluate(model, tokenizer, tasks.arithmetic_problems(400, args.seed, split))
        print(f"{split}:", ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
