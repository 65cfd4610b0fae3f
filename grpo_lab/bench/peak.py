"""Peaks of whole training steps on one device, beside what ``step_memory`` predicts: Qwen3's shapes, random weights.

Of each model, dtype and tuning one build makes one step on a single sequence, which makes the optimiser's state, and
then one measured step per checkpointing, batch and provider: peaks do not vary from step to step. What is predicted not
to fit is not tried, and its row says so. Full: every weight trains in ``dtype``, as in the table step. LoRA: PEFT's
adapters in fp32 on a frozen base, under autocast where that is bf16, as a trainer has it. This is the table ``peak``.
"""

import torch

from grpo_lab.bench.batch import LENGTHS
from grpo_lab.bench.measure import free, what_failed
from grpo_lab.bench.step import COMMON, MODELS, TINY, build, head_loss, inputs
from grpo_lab.step_memory import predict_step_bytes

PEAK_PROVIDERS = ("no head", "naive", "chunked")
BATCHES = {"bfloat16": (8, 16, 32, 64), "float32": (8,)}  # fp32 is slow: the smallest model alone goes on to 32
ROOM_GIB = 130  # of the 139 that an H200 has


def peak_tables(device, models, tunings, dtypes, providers=None, seed=0):
    """A list of rows, one per provider, for each model, dtype, tuning, checkpointing and batch. On a CPU one tiny model
    stands for all, and nothing is measured."""
    names = [name for name in PEAK_PROVIDERS if name in (providers or PEAK_PROVIDERS)]
    for model in models if device.type == "cuda" else ["tiny"]:
        size = COMMON | MODELS[model] if model in MODELS else TINY
        for dtype in dtypes:
            batches = BATCHES[dtype] if model in MODELS else (2,)
            batches += (16, 32) if model == "Qwen3-0.6B" and dtype == "float32" else ()
            for tuning in tunings:
                yield from measured_peaks(model, size, dtype, tuning, batches, device, names, seed)


def measured_peaks(model_name, size, dtype, tuning, batches, device, names=PEAK_PROVIDERS, seed=0):
    """A list of rows, one per provider, for each checkpointing and batch of one model: peak_mib measured (None on a
    CPU), predicted_mib beside it. The model is built when the first cell is found to have room."""
    from transformers import Qwen3Config

    config = Qwen3Config(**{"tie_word_embeddings": True} | size)
    prompt, completion = LENGTHS[device.type]
    autocast = dtype == "bfloat16" and tuning == "lora"
    built = failed = None
    for checkpointing in (True, False):
        for batch in batches:
            about = dict(model=model_name, tuning=tuning, dtype=dtype, checkpointing=checkpointing, batch=batch,
                         prompt=prompt, completion=completion, processes=1)  # fmt: skip
            rows = []
            for name in names:
                shape = batch, prompt, completion, getattr(torch, dtype), name
                parts = predict_step_bytes(config, *shape, tuning=tuning, checkpointing=checkpointing)
                predicted = sum(parts.values())
                rows.append(about | dict(provider=name, peak_mib=None, predicted_mib=predicted / 2**20, note=""))
                if predicted > ROOM_GIB * 2**30:
                    rows[-1]["note"] = f"not tried: predicted beyond {ROOM_GIB} GiB"
                    continue
                try:
                    if failed:
                        raise failed
                    if built is None:
                        built = build(size, dtype, device, seed, tuning)
                        _step(*built, "chunked", 1, prompt, completion, True, autocast, device, seed)
                    peak = _step(*built, name, batch, prompt, completion, checkpointing, autocast, device, seed)
                    rows[-1]["peak_mib"] = peak and peak / 2**20
                except Exception as error:  # noqa: BLE001  its row says so, and the others go on
                    rows[-1]["note"] = what_failed(error)
                    if built is None:
                        failed = error.with_traceback(None)
                    else:
                        built[1].zero_grad(set_to_none=True)
                free(device)
            yield rows
    del built
    free(device)


def _step(model, optimiser, name, batch, prompt, completion, checkpointing, autocast, device, seed):
    """The device's peak in bytes during one step, None on a CPU."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    (base.gradient_checkpointing_enable if checkpointing else base.gradient_checkpointing_disable)()
    ids, mask, advantages = inputs(batch, prompt, completion, base.config.vocab_size, device, seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = base.model(ids, use_cache=False).last_hidden_state
        loss = head_loss(name, hidden, base.lm_head.weight, ids, mask, advantages, prompt)
    loss.backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
