"""The command ``python -m grpo_lab bench``: its options, its printed lines, and a CSV file for each table."""

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch

from grpo_lab import bench
from grpo_lab.bench import curves, rollouts
from grpo_lab.bench.batch import CARDS, batch_tables
from grpo_lab.bench.files import file_name, provenance, write_table
from grpo_lab.bench.heads import MEMBERS, OPTIONS, SHAPES, SLOW_MS, TINY, both_heads, frontier
from grpo_lab.bench.peak import peak_tables
from grpo_lab.bench.providers import PROVIDERS
from grpo_lab.bench.skip import skip_table
from grpo_lab.bench.step import BATCHES, MODELS, step_tables


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
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab bench",
        description=bench.__doc__.rpartition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    ways = rollouts.ways_here(torch.device("cuda" if on_gpus else "cpu"))
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
    printers = dict.fromkeys(("rollouts", "joint"), rollouts.print_rows) | {"curves": curves.print_rows}
    processes = on_gpus if args.config == "fsdp_2" else None
    for table in chosen["tables"]:
        rows, began = [], time.perf_counter()
        if table == "step":
            models = [name for name in chosen["models"] if (name, "float32") in BATCHES]
            cells = step_tables(device, models, chosen["dtypes"], args.providers, args.repeats, args.seed)
        elif table == "peak":
            grid = (chosen["models"], chosen["tunings"], chosen["dtypes"])
            cells = peak_tables(device, *grid, args.providers, args.seed)
        elif table == "batch":
            grid = (chosen["models"], chosen["tunings"], chosen["dtypes"], cards)
            cells = batch_tables(device, *grid, args.config, processes, args.providers, args.seed)
        elif table == "curves":
            options = (chosen["dtypes"], args.providers, args.steps, args.seed)
            cells = curves.curve_tables(args.config, processes, *options)
        elif table == "skip":
            cells = skip_table(device, args.policy, args.gsm8k, args.repeats, args.seed)
        elif table == "rollouts":
            cells = rollouts.rollout_tables(device, chosen["rollouts"], args.server_gpus, args.repeats, args.seed)
        elif table == "joint":
            options = (args.gsm8k, args.server_gpus, args.steps, args.minutes, args.seed)
            losses = [name for name in ("naive", "chunked") if name in (args.providers or ["naive", "chunked"])]
            cells = rollouts.joint_tables(device, chosen["rollouts"][-1], args.policy, *options, losses)
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
