"""Whole training steps: backbone, loss head, backward pass and AdamW of Qwen3's shapes with random weights, tied head.

All providers take turns on one model and one optimiser, so that their steps differ in the head alone. "no head" is the
same step with nothing in the loss's place: the memory floor. This is the table ``step``.
"""

import statistics

import torch

from grpo_lab.bench.measure import elapsed, free, what_failed
from grpo_lab.bench.providers import PROVIDERS, no_head

MODELS = {
    "Qwen3-0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "Qwen3-1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "Qwen3-4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "Qwen3-8B": dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
                     tie_word_embeddings=False),
}  # fmt: skip
COMMON = dict(num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960)
TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=4_096)  # fmt: skip
# Sequences that leave full logits room on 139 GiB: with checkpointing, without.
BATCHES = {
    ("Qwen3-0.6B", "bfloat16"): (64, 32),
    ("Qwen3-0.6B", "float32"): (64, 16),
    ("Qwen3-1.7B", "bfloat16"): (32, 16),
    ("Qwen3-1.7B", "float32"): (16, 8),
    ("Qwen3-4B", "bfloat16"): (16, 8),
    ("Qwen3-4B", "float32"): (8, 4),
}
STEP_PROVIDERS = ("no head", "naive", "TRL", "chunked")
SLOW_MS = 1500  # of a step slower than this, two say enough


def step_tables(device, models, dtypes, providers=None, repeats=5, seed=0):
    """A list of rows, one per provider, for each model, dtype, and checkpointing on and off. On a CPU one tiny model
    stands for all."""
    names = [name for name in STEP_PROVIDERS if name in (providers or STEP_PROVIDERS)]
    for model in models if device.type == "cuda" else ["tiny"]:
        for dtype in dtypes:
            if device.type == "cuda":
                cells = [(True, BATCHES[model, dtype][0], 128, 512), (False, BATCHES[model, dtype][1], 128, 512)]
            else:
                cells = [(True, 4, 8, 24), (False, 4, 8, 24)]
            size = COMMON | MODELS[model] if model in MODELS else TINY
            yield from bench_steps(model, size, dtype, cells, device, names, repeats, seed)


def bench_steps(model_name, size, dtype, cells, device, names=STEP_PROVIDERS, repeats=5, seed=0):
    """A list of rows, one per provider, for each cell ``(checkpointing, batch, prompt, completion)`` of one model.

    ms is the median step; peak_mib the device's peak with weights, gradients and optimiser (None on a CPU).
    """
    model = optimiser = None
    failed = ""
    try:
        model, optimiser = build(size, dtype, device, seed)
    except Exception as error:  # noqa: BLE001  every provider's row says why
        failed = what_failed(error)
    free(device)
    for checkpointing, batch, prompt, completion in cells:
        about = dict(model=model_name, dtype=dtype, checkpointing=checkpointing, batch=batch, prompt=prompt,
                     completion=completion)  # fmt: skip
        rows = {name: about | dict(provider=name, ms=None, min_ms=None, peak_mib=None, note=failed) for name in names}
        if not failed:
            _take_turns(rows, model, optimiser, about, device, repeats, seed)
        yield list(rows.values())
    del model, optimiser
    free(device)


def build(size, dtype, device, seed, tuning="full"):
    """The model in training mode and the AdamW of what trains in it, whose step is too small to change its cost."""
    model = build_model(size, dtype, device, seed, tuning).train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)


def build_model(size, dtype, device, seed, tuning):
    """Random weights, the head tied unless ``size`` says otherwise; tuning "lora" freezes them and puts adapters
    of rank 16 on all linear layers but the head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**{"tie_word_embeddings": True} | size)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
        if tuning == "lora":
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapters)
            model.enable_input_require_grads()
    return model


def inputs(batch, prompt, completion, vocab, device, seed):
    """Random ids ``(B, L)``, the mask that is 1 where a completion token is predicted, and advantages ``(B,)``."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(vocab, (batch, prompt + completion), generator=generator, device=device)
    mask = torch.zeros_like(ids)
    mask[:, prompt - 1 : -1] = 1
    return ids, mask, torch.randn(batch, generator=generator, device=device)


def head_loss(name, hidden, weight, ids, mask, advantages, prompt):
    """The provider's loss of whole sequences, prompts included; ``mask`` is 1 where a completion token is predicted."""
    targets = ids.roll(-1, 1)
    if name == "naive":  # a mask does not save it the logits of the prompt
        hidden, targets, mask = (x[:, prompt - 1 : -1] for x in (hidden, targets, mask))
    fn = no_head if name == "no head" else PROVIDERS[name].variants[""]
    return fn(hidden, weight, targets, mask, advantages)


def _take_turns(rows, model, optimiser, about, device, repeats, seed):
    shape = about["batch"], about["prompt"], about["completion"]
    ids, mask, advantages = inputs(*shape, model.config.vocab_size, device, seed)
    switch = model.gradient_checkpointing_enable if about["checkpointing"] else model.gradient_checkpointing_disable
    switch()

    def step(name):
        hidden = model.model(ids, use_cache=False).last_hidden_state
        head_loss(name, hidden, model.lm_head.weight, ids, mask, advantages, about["prompt"]).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    times = {name: [] for name in rows}
    for turn in range(repeats + 1):  # the first of each is a warm-up
        for name, taken in times.items():
            if rows[name]["note"] or len(taken) > 2 and taken[-1] > SLOW_MS:
                continue
            try:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                taken.append(elapsed(lambda name=name: step(name), device))
                if device.type == "cuda" and turn:
                    peak = torch.cuda.max_memory_allocated(device) / 2**20
                    rows[name]["peak_mib"] = max(peak, rows[name]["peak_mib"] or 0)
            except Exception as error:  # noqa: BLE001  its row says so, and the others go on
                rows[name] |= {"note": what_failed(error), "peak_mib": None}
                taken.clear()
            if rows[name]["note"]:
                optimiser.zero_grad(set_to_none=True)
                if any("exp_avg_sq" not in state for state in optimiser.state.values()):
                    optimiser.state.clear()  # it ran out of memory while it was made
                free(device)
    for name, (_, *taken) in ((name, taken) for name, taken in times.items() if taken):
        rows[name] |= {"ms": statistics.median(taken), "min_ms": min(taken)}
