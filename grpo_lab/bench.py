"""Loss heads side by side: time, peak memory and gradient errors, of the head alone and of whole training steps.

Providers run interleaved on the same inputs after a warm-up; times are medians, peaks are incremental, errors are
against float64, and what no loss can do without stands beside them: the bare GEMMs of the same shapes and the gradients
alone. A provider that is missing, fails or runs out of memory is a row that says so, and the sweep goes on.

    python -m grpo_lab bench --out results                    # every table: real shapes on a GPU, small ones on a CPU
    python -m grpo_lab bench --tables head,frontier --repeats 5 --out results
    python -m grpo_lab bench --tables step --models Qwen3-0.6B --dtypes bfloat16 --out results
    python -m grpo_lab bench --tables batch --cards 24,80 --out results     # on all GPUs, by accelerate's launcher

Each table is a file of its own, ``<table>_<device>.csv``. Tables: head (every provider), zero (shares of zero-advantage
sequences), off_policy (ratios against given log-probs, as with vLLM), wide (larger hidden sizes), peaked (a confident
policy: the errors), frontier (time against memory), step; and, only when they are asked for, peak (of whole steps, with
what was predicted), batch (the largest that trains), curves (rewards by who computes the loss), skip
(``skip_zero_advantage`` on a real batch), rollouts (vLLM beside transformers), joint (GRPO on GSM8K with vLLM's
rollouts). Those are in files of their own, ``bench_<table>.py``.
"""

import argparse
import gc
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from grpo_lab import providers as heads
from grpo_lab.bench_files import file_name, provenance, write_table
from grpo_lab.loss import grpo_loss
from grpo_lab.memory import measure_peak
from grpo_lab.providers import PROVIDERS, Provider, Shape, make_inputs

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
                    fn = heads.ours("chunked", memory_budget=int(budget * 2**20))
                    sweep[f"chunked: budget {budget:,.4g} MiB"] = Provider({"": fn})
        if "TRL" in providers:
            tiles = sorted({min(tile, shape.vocab) for tile in TILES})
            sweep |= {f"TRL: tile {tile:,}": Provider({"": heads.trl_fused(tile)}) for tile in tiles}
        rows = bench(shape, trainable, device, sweep, repeats, seed, exact)
        for row in rows:
            row["provider"], _, row["setting"] = row["provider"].partition(": ")
            if row["setting"] == "tile 32,768":
                row["setting"] = "default, tile 32,768"
        yield rows
        free(device)


def what_failed(error):
    """One line for the column ``note``."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    if isinstance(error, ImportError):
        return f"absent: {line}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return f"out of memory: {line}"
    return f"{type(error).__name__}: {line}"


def free(device):
    """Give back what a failure or a finished cell has left. Not between passes: the next one would pay for it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run(fn, x):
    _clear(x)
    loss = fn(**x)
    if loss is not None:
        loss.backward()


def _clear(x):
    x["hidden"].grad = x["weight"].grad = None


def _error(grad, exact):
    return None if grad is None or exact is None else ((grad.double() - exact).norm() / exact.norm()).item()


def elapsed(fn, device):
    """Milliseconds of ``fn()``."""
    if device.type != "cuda":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def title(row):
    """What the rows of a cell have in common, in words."""
    told = ("head", "model", "tuning", "card_gb", "checkpointing", "rollouts", "loss_impl", "seed", "questions")
    names = [name for name in row if name in (*told, *vars(TINY))]
    return ", ".join(f"{name} {row[name]}" for name in names if row[name] or name not in OPTIONS)


def print_rows(rows):
    """One line per row; times also as multiples of the bare GEMMs', peaks also beyond a step without a head."""
    base = {row["provider"]: row for row in rows}
    floor, bare = (base.get(name, {}).get(key) for name, key in (("bare GEMMs", "ms"), ("no head", "peak_mib")))
    for row in rows:
        name = row["provider"] + (f", {row['setting']}" if row.get("setting") else "")
        ms, peak = ("-" if row.get(k) is None else f"{row[k]:,.{d}f}" for k, d in (("ms", 1), ("peak_mib", 0)))
        line = f"  {name:30} {ms:>9} ms {peak:>9} MiB"
        if floor and row.get("ms"):
            line += f"  {row['ms'] / floor:5.2f} x GEMMs  {row['tflops']:7.3g} TFLOP/s"
        if row["peak_mib"] and bare and "largest_batch" not in row:
            line += f"  {row['peak_mib'] - bare:+9,.0f} MiB for the head"
        if row.get("predicted_mib"):
            line += f"  predicted {row['predicted_mib']:,.0f} MiB"
            line += f": {row['predicted_mib'] / row['peak_mib'] - 1:+.1%}" if row["peak_mib"] else ""
        if row.get("shared_ms"):
            line += f"  {row['shared_ms']:,.0f} ms, {row['shared_peak_mib']:,.0f} MiB with {row['shared_batch']} each"
        if row.get("mib_per_sequence"):
            line += f"  batch {row['largest_batch']}: {row['fixed_mib']:,.0f} MiB + {row['mib_per_sequence']:,.3g} each"
        for key, label in (("dh_error", "dH"), ("dw_error", "dW")):
            if row.get(key) is not None:
                line += f"  {label} error {row[key]:.1e}"
        print(line + (f"  {row['note']}" if row["note"] else ""), flush=True)


def main(argv=None):
    from grpo_lab import bench_curves, bench_rollouts
    from grpo_lab.bench_batch import CARDS, MODELS, batch_tables
    from grpo_lab.bench_peak import peak_tables
    from grpo_lab.bench_skip import skip_table
    from grpo_lab.bench_step import BATCHES, step_tables

    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*MEMBERS, "step", "peak", "batch", "curves", "skip", "rollouts", "joint"]
    default = names[: names.index("peak")] if torch.cuda.is_available() else ["head", "frontier", "step"]
    which = "which, by commas (default: those up to step on a GPU; head,frontier,step on a CPU)"
    parser.add_argument("--tables", default=",".join(default), help=which)
    parser.add_argument("--out", type=Path, help="folder for the CSV files (default: print only)")
    parser.add_argument("--providers", nargs="+", metavar="NAME", help="only these, each in quotes")
    parser.add_argument("--models", default=",".join(MODELS), help="of step, peak and batch, by commas (default: all)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of step, peak, batch and curves (default: both)")
    parser.add_argument("--tunings", help="of peak and batch: lora, full, by commas (default: peak both, batch lora)")
    cards = f"GB of the emulated cards of batch, by commas, or none (default: {max(CARDS)}; on a CPU 0.03)"
    on_gpus = torch.cuda.device_count()
    parser.add_argument("--cards", default=str(max(CARDS) if on_gpus else 0.03), help=cards)
    config = "fsdp_2" if on_gpus > 1 else "gpu_1" if on_gpus else "cpu_2"
    parser.add_argument("--config", default=config, help=f"of batch and curves (default here: {config})")
    ways = bench_rollouts.ways_here(torch.device("cuda" if on_gpus else "cpu"))
    sampled = f"of rollouts and joint, by commas; joint takes the last (default here: {','.join(ways)})"
    parser.add_argument("--rollouts", default=",".join(ways), help=sampled)
    parser.add_argument(
        "--server-gpus", default="1", help="of rollouts and joint: where vLLM's server runs (default: 1)"
    )
    parser.add_argument(
        "--policy", help="of skip and joint: a folder, a hub id or a .gguf file (default: the tiny policy)"
    )
    parser.add_argument(
        "--gsm8k", help="of skip and joint: a folder with train.jsonl and test.jsonl (default: the hub)"
    )
    parser.add_argument("--steps", type=int, default=30, help="of curves and joint, in each training (default: 30)")
    parser.add_argument("--minutes", type=float, default=60, help="of joint: no training begins later (default: 60)")
    repeats = f"timed passes (default: 7 on a GPU, 3 on a CPU); 2 where one takes over {SLOW_MS} ms"
    parser.add_argument("--repeats", type=int, default=7 if torch.cuda.is_available() else 3, help=repeats)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.tunings = args.tunings or ("full,lora" if args.tables == "peak" else "lora")
    chosen = {key: getattr(args, key).split(",") for key in ("tables", "models", "dtypes", "tunings", "rollouts")}
    known = {
        "rollouts": ["transformers", "colocate", "server"],
        "tables": names,
        "models": list(MODELS),
        "dtypes": ["bfloat16", "float32"],
        "tunings": ["lora", "full"],
    }
    for key, allowed in (known | {"providers": [*PROVIDERS, "no head"]}).items():
        for name in chosen.get(key) or args.providers or []:
            if name not in allowed:
                parser.error(f"--{key}: {name!r} is none of {', '.join(allowed)}")
    try:
        cards = [float(card) if "." in card else int(card) for card in args.cards.split(",") if card != "none"]
    except ValueError:
        parser.error(f"--cards: {args.cards!r}, expected numbers by commas, such as 24,80")
    if args.repeats < 1:
        parser.error(f"--repeats: {args.repeats}, expected 1 or more")

    if on_gpus > 1 and {"skip", "rollouts", "joint"} & set(chosen["tables"]):
        parser.error(
            "--tables skip, rollouts and joint train on one GPU: CUDA_VISIBLE_DEVICES=0 python -m grpo_lab bench ..."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a record names folders, and not where they lie on this machine
    said = [Path(part).name if part in (str(args.out), args.policy, args.gsm8k) else part for part in argv]
    where = provenance(shlex.join(["python", "-m", "grpo_lab", "bench", *said]))
    printers = dict.fromkeys(("rollouts", "joint"), bench_rollouts.print_rows) | {"curves": bench_curves.print_rows}
    for table in chosen["tables"]:
        rows, began = [], time.perf_counter()
        if table == "step":
            models = [name for name in chosen["models"] if (name, "float32") in BATCHES]
            cells = step_tables(device, models, chosen["dtypes"], args.providers, args.repeats, args.seed)
        elif table == "peak":
            grid = (chosen["models"], chosen["tunings"], chosen["dtypes"])
            cells = peak_tables(device, *grid, args.providers, args.seed)
        elif table == "batch":
            processes = on_gpus if args.config == "fsdp_2" else None
            grid = (chosen["models"], chosen["tunings"], chosen["dtypes"], cards)
            cells = batch_tables(device, *grid, args.config, processes, args.providers, args.seed)
        elif table == "curves":
            processes = on_gpus if args.config == "fsdp_2" else None
            options = (chosen["dtypes"], args.providers, args.steps, args.seed)
            cells = bench_curves.curve_tables(args.config, processes, *options)
        elif table == "skip":
            cells = skip_table(device, args.policy, args.gsm8k, args.repeats, args.seed)
        elif table == "rollouts":
            cells = bench_rollouts.rollout_tables(device, chosen["rollouts"], args.server_gpus, args.repeats, args.seed)
        elif table == "joint":
            options = (args.gsm8k, args.server_gpus, args.steps, args.minutes, args.seed)
            losses = [name for name in ("naive", "chunked") if name in (args.providers or ["naive", "chunked"])]
            cells = bench_rollouts.joint_tables(device, chosen["rollouts"][-1], args.policy, *options, losses)
        else:
            members = {name: PROVIDERS[name] for name in MEMBERS[table] if name in (args.providers or PROVIDERS)}
            measure = frontier if table == "frontier" else both_heads
            cells = (
                cell
                for shape in SHAPES[device.type][table]
                for cell in measure(shape, device, members, args.repeats, args.seed)
            )
        for cell in cells:
            if not cell:
                continue
            print(f"{table}: {title(cell[0])}")
            printers.get(table, print_rows)(cell)
            rows += [row | where for row in cell]
            if args.out:  # after each cell: a bench that is stopped leaves what it has measured
                write_table(args.out / file_name(table, device, where["device"]), rows)
        print(f"{table}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
