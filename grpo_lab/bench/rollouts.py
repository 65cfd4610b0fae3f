"""Rollouts by vLLM beside transformers, and GRPO with both losses on GSM8K: the tables ``rollouts``, ``joint``.

rollouts: whole GRPO steps of 64 sequences, each split into its parts (``grpo_lab/split.py``); only who samples differs.
joint: a small pre-trained policy, warmed up on GSM8K's training solutions, then trained by GRPO with accuracy and
format rewards: naive and chunked on the same seeds, then chunked on the questions that take one or two steps. Before
and after, one answer to each of several hundred test questions.

    CUDA_VISIBLE_DEVICES=0 python -m grpo_lab bench --tables rollouts --out results         # the server is on GPU 1
    CUDA_VISIBLE_DEVICES=0 python -m grpo_lab bench --tables joint --policy FOLDER --gsm8k FOLDER --out results
"""

import contextlib
import json
import math
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PrinterCallback, set_seed

from grpo_lab import split, tasks
from grpo_lab.bench.measure import free, what_failed
from grpo_lab.bench.step import COMMON, MODELS, TINY
from grpo_lab.policies import TINY_POLICY
from grpo_lab.preflight import avoid_faulty_attention
from grpo_lab.rewards import accuracy_reward, gsm8k_format_reward
from grpo_lab.runs import read_json
from grpo_lab.serve import ServerError, VllmServer

GROUP = 8  # completions of a prompt
SHAPES = {"cuda": [(64, 128, 128), (64, 128, 256)], "cpu": [(16, 12, 24)]}  # sequences, prompt and completion tokens
# vLLM's own choice (compiled, CUDA graphs), what starts where the compiler does not, and what needs neither
SERVERS = {"compiled, CUDA graphs": (),
           "CUDA graphs": ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'),
           "eager": ("--enforce-eager",)}  # fmt: skip
INSTRUCTION = "\nWrite one step a line, and the answer as the last line: #### number"
JOINT = {  # sizes on a GPU, and on a CPU to see that all of it runs
    "cuda": dict(batch=64, accumulation=2, length=256, test=512, warm_steps=230, warm_batch=64, learning_rate=1e-5),
    "cpu": dict(batch=8, accumulation=2, length=24, test=16, warm_steps=2, warm_batch=4, learning_rate=1e-5),
}
RUNS = [("naive", 0, "all"), ("chunked", 0, "all"), ("naive", 1, "all"), ("chunked", 1, "all"), ("chunked", 0, "short")]


def ways_here(device):
    """The ways to sample that a machine can compare: transformers, and vLLM as it runs there."""
    return ["transformers", "server" if device.type == "cuda" else "colocate"]


def start_server(folder, gpus, length):
    """A running VllmServer and how it computes: the first of SERVERS that starts. Raises the last one's ServerError."""
    for name, options in SERVERS.items():
        server = VllmServer(folder, gpus=gpus, memory=0.5, max_model_len=length, options=options, timeout=240)
        try:
            return server.start(), name
        except ServerError as error:
            print(f"not {name}: {error}", flush=True)
            failure = error
    raise failure


def config_of(folder, way, server, length, **options):
    from grpo_lab import GRPOConfig

    fields = dict(rollouts=way, vllm_max_model_length=length) if server is None else server.config
    settings = dict(num_generations=GROUP, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
                    report_to="none", disable_tqdm=True, lr_scheduler_type="constant")  # fmt: skip
    return GRPOConfig(str(folder), **settings | fields | options)


def random_model(folder, device, prompt):
    """A Qwen3 with random weights and a word for each of its tokens, in ``folder``; and prompts of as many tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    size = COMMON | MODELS["Qwen3-0.6B"] if device.type == "cuda" else TINY | dict(head_dim=32)
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    words = [*special.values(), *(f"w{i}" for i in range(3, size["vocab_size"]))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**size, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0))
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).save_pretrained(folder)
    drawn = torch.randint(3, len(words), (64, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"prompt": [" ".join(words[i] for i in row) for row in drawn]})


def varied(completion_ids, **_):
    """A reward that costs nothing and differs within a group, whatever the policy writes."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def rollout_tables(device, ways, gpus, repeats, seed):
    """A list of rows, one for each shape, for each way. seconds are medians of ``repeats`` steps after one that warms
    up; tokens_per_s: completion tokens over the rollout's seconds; start_s: of the engine, once."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        prompts = random_model(folder, device, SHAPES[device.type][0][1])
        longest = max(prompt + completion for _, prompt, completion in SHAPES[device.type])
        for way in ways:
            rows, server, engine, began = [], None, None, time.perf_counter()
            about = dict(model="Qwen3-0.6B" if on_gpu else "tiny", dtype="bfloat16" if on_gpu else "float32",
                         rollouts=way, beta=0.04, gpus=1 + (way == "server"))  # fmt: skip
            about |= dict.fromkeys(("sequences", "prompt", "completion"))
            empty = dict.fromkeys(("engine", "start_s", "tokens_per_s", *(f"{p}_s" for p in (*split.PARTS, "step"))))
            try:
                if way == "server":
                    server, engine = start_server(folder, gpus, longest)
                    empty |= {"engine": engine, "start_s": time.perf_counter() - began}
                for sequences, prompt, completion in SHAPES[device.type]:
                    shape = dict(sequences=sequences, prompt=prompt, completion=completion)
                    row = about | shape | empty | {"note": ""}
                    rows.append(row)
                    config = config_of(
                        Path(folder, "out"), way, server, longest, max_steps=repeats + 1, seed=seed,
                        beta=about["beta"], per_device_train_batch_size=sequences, max_completion_length=completion,
                        bf16=on_gpu, learning_rate=1e-6, model_init_kwargs=dict(dtype=about["dtype"]),
                    )  # fmt: skip
                    row |= steps_of(folder, varied, config, prompts, sequences)
            except Exception as error:  # noqa: BLE001  its row says so, and the other way goes on
                rows = rows or [about | empty]
                rows[-1]["note"] = what_failed(error)
            finally:
                if server is not None:
                    server.stop()
            free(device)
            yield rows


def steps_of(policy, rewards, config, prompts, sequences):
    """Trains and returns the medians of its steps' parts, in seconds, and the tokens per second of its rollouts."""
    from grpo_lab import GRPOTrainer

    trainer = GRPOTrainer(str(policy), rewards, config, train_dataset=prompts)
    trainer.remove_callback(PrinterCallback)
    split.attach(trainer)
    trainer.train()
    rows = trainer.state.log_history
    seconds = split.medians(rows)
    tokens = sequences * sum(row["completions/mean_length"] for row in rows if "loss" in row) / config.max_steps
    return {f"{part}_s": value for part, value in seconds.items()} | {"tokens_per_s": tokens / seconds["rollout"]}


def load_policy(path):
    """(model in fp32, tokenizer) of a folder, of a hub id, or of a .gguf file, for which transformers needs the package
    gguf; a tokenizer.json beside such a file is taken in place of its own, which takes a minute to convert."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, packed = str(path), {}
    if path.endswith(".gguf"):
        path, packed = str(Path(path).parent), {"gguf_file": Path(path).name}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **packed)
    beside = {} if Path(path, "tokenizer.json").exists() else packed
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **beside)
    if packed:  # a model that remembers that it was quantised can be neither saved nor trained
        del model.config.quantization_config
        plain = type(model)(model.config)
        plain.load_state_dict(model.state_dict())
        model = plain
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)  # SmolLM2's file names another
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def questions(split_name, path, subset="all"):
    """GSM8K with the instruction; ``subset`` "short": those whose solution has one or two lines before the answer."""
    rows = tasks.gsm8k(split_name, path)
    if subset == "short":
        rows = rows.filter(lambda row: len(row["solution"].strip().splitlines()) <= 3)
    return rows.map(lambda row: {"prompt": [row["prompt"][0] | {"content": row["prompt"][0]["content"] + INSTRUCTION}]})


def warm_up(model, tokenizer, rows, folder, steps, batch, device):
    """Supervised training on the solutions, without GSM8K's <<...>> notes; the policy is saved in ``folder``."""
    import re

    from trl import SFTConfig, SFTTrainer

    def solved(row):
        return {"completion": [{"role": "assistant", "content": re.sub("<<.*?>>", "", row["solution"])}]}

    on_gpu = device.type == "cuda"
    config = SFTConfig(
        str(folder), max_steps=steps, per_device_train_batch_size=batch, learning_rate=1e-4, warmup_steps=steps // 20,
        lr_scheduler_type="cosine", bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False, max_length=512,
        logging_steps=max(1, steps // 5), save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = rows.map(solved).remove_columns(["answer", "solution"])
    avoid_faulty_attention(device)
    SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def joint_tables(device, way, policy, gsm8k, gpus, steps, minutes, seed, losses=("naive", "chunked")):
    """A list of rows for each of RUNS: one for each step, of kind "train", and two of kind "test", before and after.

    policy: as load_policy takes it, None for the tiny one. minutes: no run begins later than this. seed is added to the
    runs' own.
    """
    policy = policy or TINY_POLICY
    sizes, began, before = JOINT[device.type], time.perf_counter(), {}
    length = sizes["length"] + 512
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        raw, warm = Path(folder, "raw"), Path(folder, "warm")
        model, tokenizer = load_policy(policy)
        model.save_pretrained(raw)
        tokenizer.save_pretrained(raw)
        length = min(length, model.config.max_position_embeddings)
        train, test = ({kind: questions(part, gsm8k, kind) for kind in ("all", "short")} for part in ("train", "test"))
        test = {kind: rows.select(range(min(sizes["test"], len(rows)))) for kind, rows in test.items()}
        threads, server = stack.enter_context(ThreadPoolExecutor()), None
        starting = threads.submit(start_server, raw, gpus, length) if way == "server" else None
        warm_up(model, tokenizer, train["all"], warm, sizes["warm_steps"], sizes["warm_batch"], device)
        del model
        free(device)
        if starting:
            server, engine = starting.result()
            stack.callback(server.stop)
            print(f"joint: the server runs {engine}", flush=True)

        def train_once(loss, run_seed, kind):
            config = config_of(
                Path(folder, "out"), way, server, length, max_steps=steps, seed=seed + run_seed, loss_impl=loss,
                per_device_train_batch_size=sizes["batch"], gradient_accumulation_steps=sizes["accumulation"],
                max_completion_length=sizes["length"], learning_rate=sizes["learning_rate"],
                bf16=device.type == "cuda", num_generations_eval=1, per_device_eval_batch_size=min(256, sizes["test"]),
            )  # fmt: skip
            rows = joint_run(warm, config, train[kind], test[kind], before.get(kind))
            before[kind] = rows[0]
            about = dict(policy=Path(policy).stem, loss_impl=loss, seed=config.seed, questions=kind, rollouts=way,
                         gpus=1 + (way == "server"), sequences=config.generation_batch_size,
                         learning_rate=config.learning_rate)  # fmt: skip
            receipt = read_json(Path(config.output_dir, "receipt.json"))["passed"]
            return [about | row | {"receipt": receipt} for row in rows]

        for run in (run for run in RUNS if run[0] in losses):
            if time.perf_counter() - began > 60 * minutes:
                print(f"joint: no time is left for {run[0]}, seed {run[1]}, {run[2]} questions", flush=True)
                continue
            try:
                rows = train_once(*run)
            except Exception as error:  # noqa: BLE001
                if server is None:
                    raise
                print(f"joint: {what_failed(error)}: once more, with a new server", flush=True)
                server.stop()
                free(device)
                server.start()
                rows = train_once(*run)
            yield rows
            free(device)


KEYS = {  # column to what TRL and this package log
    "reward": "reward", "accuracy": "rewards/accuracy_reward/mean", "format": "rewards/gsm8k_format_reward/mean",
    "zero_groups": "frac_reward_zero_std", "completion": "completions/mean_length", "entropy": "entropy",
    "grad_norm": "grad_norm",
    "mismatch_before": "sampling/mismatch_before", "mismatch_after": "sampling/mismatch_after",
    "mismatch_masked": "sampling/mismatch_masked", "mismatch_largest": "sampling/sampling_logp_difference/max",
    "ratio_min": "sampling/importance_sampling_ratio/min", "ratio_max": "sampling/importance_sampling_ratio/max",
} | {f"{part}_s": f"seconds/{part}" for part in (*split.PARTS, "step")}  # fmt: skip


def joint_run(policy, config, train, test, before):
    """The rows of one training; ``before``: the test row of the policy as it is, measured here where it is None."""
    from grpo_lab import GRPOTrainer

    rewards = [accuracy_reward, gsm8k_format_reward]
    trainer = GRPOTrainer(str(policy), rewards, config, train_dataset=train, eval_dataset=test)
    trainer.remove_callback(PrinterCallback)
    split.attach(trainer)

    def tested():
        found = trainer.evaluate()
        return joint_row("test", {name.removeprefix("eval_"): value for name, value in found.items()}, len(test))

    first = before or tested()
    trainer.state.log_history.clear()
    set_seed(config.seed)  # what the test has drawn does not tell one loss from the other
    trainer.train()
    steps = [joint_row("train", row, config.generation_batch_size) for row in trainer.state.log_history
             if "seconds/step" in row]  # fmt: skip
    return [first | {"step": 0}, *steps, tested() | {"step": config.max_steps}]


def joint_row(kind, logged, answers):
    row = {"kind": kind, "step": logged.get("step"), "answers": answers}
    row |= {name: logged.get(key) for name, key in KEYS.items()}
    p = row["accuracy"]
    return row | {"accuracy_error": math.sqrt(p * (1 - p) / answers)}  # of independent answers: those of "test" are


def print_rows(rows):
    """A line for each shape and way; of a training, its two tests and the mean of its first and last steps."""
    if "kind" not in rows[0]:
        for row in rows:
            parts = ", ".join(f"{part} {row[f'{part}_s']:.3g}" for part in split.PARTS if row.get(f"{part}_s"))
            speed = f"{row['tokens_per_s'] or 0:,.0f} tokens/s, step {row['step_s'] or 0:.3g} s"
            print(
                f"  {row.get('completion')} tokens: {speed} ({parts}) {row['engine'] or ''} {row['note']}", flush=True
            )
        return
    first, *steps, last = rows
    fifth = max(1, len(steps) // 5)
    for name in ("reward", "accuracy", "format", "mismatch_before", "mismatch_after", "step_s"):
        values = [row[name] for row in steps if row[name] is not None]
        if values:
            ends = [sum(part) / len(part) for part in (values[:fifth], values[-fifth:])]
            print(f"  {name}: first {fifth} steps {ends[0]:.4g}, last {ends[1]:.4g}", flush=True)
    tests = [f"{row['accuracy']:.3f} ± {row['accuracy_error']:.3f}" for row in (first, last)]
    print(f"  test questions: {tests[0]} before, {tests[1]} after; receipt {json.dumps(last['receipt'])}", flush=True)
