"""The loss head alone: the tables head, zero, off_policy, wide, peaked and frontier.

Providers run interleaved on the same inputs after a warm-up; times are medians, peaks are incremental, errors are
against float64, and what no loss can do without stands beside them: the bare GEMMs of the same shapes and the gradients
alone. A provider that is missing, fails or runs out of memory is a row that says so, and the others go on.
"""

import statistics
from dataclasses import replace

from grpo_lab.bench.measure import elapsed, free, what_failed
from grpo_lab.bench.providers import PROVIDERS, Provider, Shape, make_inputs, ours, trl_fused
from grpo_lab.loss import grpo_loss
from grpo_lab.memory import measure_peak

SLOW_MS = 500  # of a pass slower than this, two say enough
FLOORS = ("bare GEMMs", "gradients alone")
CHUNKED = ("chunked", "chunked, low memory")
# Qwen3's vocabulary; hidden sizes of its 0.6B, 4B and 8B models. The CPU's shapes show that all of it runs.
QWEN3 = Shape(64, 1024, 1024, 151_936, 38_694)
TINY = Shape(8, 32, 128, 4_096, 150, "float32")
SHAPES = {
    "cuda": {
        "head": [QWEN3],
        "zero": [replace(QWEN3, zero_share=share) for share in (0.0, 0.3, 0.5, 0.6)],
        "off_policy": [replace(QWEN3, off_policy=True)],
        "wide": [Shape(32, 1024, hidden, 151_936, 16_384) for hidden in (2560, 4096)],
        "peaked": [Shape(32, 1024, 1024, 151_936, 16_384, peaked=True)],
        "frontier": [QWEN3],
    },
    "cpu": {
        "head": [TINY],
        "zero": [replace(TINY, zero_share=share) for share in (0.0, 0.5)],
        "off_policy": [replace(TINY, off_policy=True)],
        "wide": [replace(TINY, hidden=256)],
        "peaked": [replace(TINY, peaked=True)],
        "frontier": [TINY],
    },
}
MEMBERS = {
    "head": [name for name in PROVIDERS if name != "chunked, fp32 logits"],
    "zero": [*FLOORS, "naive", *CHUNKED, "TRL"],
    "off_policy": [*FLOORS, "naive", *CHUNKED, "TRL"],
    "wide": [*FLOORS, "naive", *CHUNKED, "TRL", "Apple CCE"],
    "peaked": [name for name in PROVIDERS if name != "Liger"],
    "frontier": [*FLOORS, "chunked", "TRL"],
}
OPTIONS = ("zero_share", "peaked", "off_policy")  # of a Shape: what is said only where it is set
TILES = (2048, 4096, 8192, 16_384, 32_768, 65_536, 151_936)  # vocabulary entries of TRL's buffer


def bench(shape: Shape, trainable: bool, device, providers=None, repeats=7, seed=0, exact=None) -> list[dict]:
    """One row per provider; ``exact``: ``float64_gradients`` of this shape and seed, if they are there already.

    ms and min_ms (median and least), peak_mib (beyond the inputs), dh_error and dw_error (against float64, relative),
    active (f, the share of scored tokens with a gradient), and tflops of useful work: the head products that the
    gradient needs, 2 N H V (1 + f) FLOPs or 2 N H V (1 + 2f) where the head trains, over the median time.
    """
    providers = PROVIDERS if providers is None else providers
    runs = [(name, variant, fn) for name, p in providers.items() for variant, fn in p.variants.items()]
    rows = {
        run[:2]: dict(provider=run[0], ms=None, min_ms=None, peak_mib=None, tflops=None, dh_error=None, dw_error=None,
                      lacks=providers[run[0]].lacks, note="")
        for run in runs
    }  # fmt: skip
    times, f, note = {}, None, ""
    try:
        x = make_inputs(shape, device, seed)
        f = ((x["advantages"] != 0)[:, None] & x["mask"].bool()).sum().item() / shape.scored
        x["hidden"].requires_grad_()
        x["weight"].requires_grad_(trainable)
    except Exception as error:  # noqa: BLE001  no provider could run, and all of them say why
        runs, note = [], what_failed(error)
        for row in rows.values():
            row["note"] = note
    if runs and exact is None:
        exact = float64_gradients(shape, device, seed)

    for name, variant, fn in runs:
        row = rows[name, variant]
        try:
            elapsed(lambda fn=fn: _run(fn, x), device)  # compiles and warms up
            _clear(x)  # or the peak would be counted from the last pass's gradients
            row["peak_mib"] = measure_peak(lambda fn=fn: _run(fn, x), device)[1] / 2**20
            if not providers[name].floor:
                row["dh_error"], row["dw_error"] = (_error(x[k].grad, exact.get(k)) for k in ("hidden", "weight"))
                row["note"] = exact.get("note", "")
            times[name, variant] = []
        except Exception as error:  # noqa: BLE001  a provider that fails is a row, and the others go on
            row["note"] = what_failed(error)
            free(device)
        _clear(x)
    for _ in range(repeats):
        for name, variant, fn in runs:
            taken = times.get((name, variant))
            if taken is None or len(taken) >= 2 and taken[-1] > SLOW_MS or providers[name].floor == "memory":
                continue
            try:
                taken.append(elapsed(lambda fn=fn: _run(fn, x), device))
            except Exception as error:  # noqa: BLE001
                del times[name, variant]
                rows[name, variant]["note"] = what_failed(error)
                free(device)
            _clear(x)
    for key, taken in times.items():
        if taken:
            rows[key] |= {"ms": statistics.median(taken), "min_ms": min(taken)}
            flops = 2 * shape.scored * shape.hidden * shape.vocab * (1 + f * (1 + trainable))
            rows[key]["tflops"] = flops / rows[key]["ms"] / 1e9
    about = {"head": "trainable" if trainable else "frozen", **vars(shape), "active": f}
    return [about | _fastest(name, p, rows) for name, p in providers.items()]


def _fastest(name, provider, rows):
    """The provider's row, of its fastest variant."""
    found = {variant: rows[name, variant] for variant in provider.variants}
    best = min(found, key=lambda variant: found[variant]["ms"] or float("inf"))
    if len(found) > 1 and not found[best]["note"]:
        found[best]["note"] = f"the fastest of {', '.join(found)}: {best}"
    return found[best]


def float64_gradients(shape, device, seed=0):
    """dH and dW of the shape's inputs in float64, chunk by chunk; {"note": why} where they cannot be had."""
    try:
        x = make_inputs(shape, device, seed)
        x |= {k: x[k].double().requires_grad_() for k in ("hidden", "weight")}
        loss, _ = grpo_loss(**x, impl="chunked", backend="torch", chunk_tokens=256)
        loss.backward()
        return {k: x[k].grad for k in ("hidden", "weight")}
    except Exception as error:  # noqa: BLE001
        return {"note": f"no float64 reference: {what_failed(error)}"}
    finally:
        free(device)


def both_heads(shape, device, providers, repeats, seed):
    """``bench`` for a trained and for a frozen head, which share the float64 reference."""
    exact = float64_gradients(shape, device, seed)
    for trainable in (True, False):
        yield bench(shape, trainable, device, providers, repeats, seed, exact)
        free(device)


def frontier(shape, device, providers, repeats, seed, steps=6):
    """Time against memory: the chunked loss from its least memory to twice what it takes by itself, and TRL's tiles.

    The column ``setting`` says where on its curve a provider stands: "default", "low", a memory budget, a tile."""
    exact = float64_gradients(shape, device, seed)
    for trainable in (True, False):
        sweep = {name: p for name, p in providers.items() if p.floor}
        if "chunked" in providers:
            ends = {name: PROVIDERS[name] for name in CHUNKED}
            most, least = (row["peak_mib"] for row in bench(shape, trainable, device, ends, 0, seed, exact))
            sweep |= {"chunked: default": ends["chunked"], "chunked: low": ends["chunked, low memory"]}
            if most and least:
                between = [least * (most / least) ** (i / steps) for i in range(1, steps + 1)]
                for budget in sorted({round(mib, 3) for mib in [*between, 2 * most]}):
                    fn = ours("chunked", memory_budget=int(budget * 2**20))
                    sweep[f"chunked: budget {budget:,.4g} MiB"] = Provider({"": fn})
        if "TRL" in providers:
            tiles = sorted({min(tile, shape.vocab) for tile in TILES})
            sweep |= {f"TRL: tile {tile:,}": Provider({"": trl_fused(tile)}) for tile in tiles}
        rows = bench(shape, trainable, device, sweep, repeats, seed, exact)
        for row in rows:
            row["provider"], _, row["setting"] = row["provider"].partition(": ")
            if row["setting"] == "tile 32,768":
                row["setting"] = "default, tile 32,768"
        yield rows
        free(device)


def _run(fn, x):
    _clear(x)
    loss = fn(**x)
    if loss is not None:
        loss.backward()


def _clear(x):
    x["hidden"].grad = x["weight"].grad = None


def _error(grad, exact):
    return None if grad is None or exact is None else ((grad.double() - exact).norm() / exact.norm()).item()
