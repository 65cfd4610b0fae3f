"""Checkpoints that one can rely on: which is the newest whole one, whether it fits a model, and what makes it whole.

transformers writes a checkpoint's files one by one, each rank its own, and leaves it to the system when they reach the
disk. ``begin`` and ``seal`` stand around that (``callback.py`` calls them): a sealed checkpoint lists its files, which
lay on the disk before the seal did. One that a script wrote without them is judged by its files alone.
"""

import contextlib
import json
import os
import re
from pathlib import Path

from grpo_lab.runs.files import read_json, sync, write_json

SEAL = "whole.json"


def begin(checkpoint):
    """Note that the files of a checkpoint are about to be written: until ``seal`` it is none."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_json(checkpoint / SEAL, {"files": None})


def seal(checkpoint, step):
    """Note that all ranks have written the checkpoint of ``step``, once that is true on the disk too."""
    files = {path: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file() and path.name != SEAL}
    for path in [*files, *{path.parent for path in files}, checkpoint.parent]:
        sync(path)
    write_json(checkpoint / SEAL, {"files": {str(path.relative_to(checkpoint)): size for path, size in files.items()}})
    os.utime(checkpoint, (step, step))  # as ``in_order`` has it


def _all(folder):
    """The ``checkpoint-N`` of a folder, newest first, with their steps."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name[11:].isdecimal()]
    return sorted(((int(path.name[11:]), path) for path in found), reverse=True)


def in_order(folder):
    """Give each checkpoint its step for a time: transformers deletes the one of the oldest time first, which would be
    the newest after a clock went back, or in a folder that was copied."""
    for step, path in _all(folder):
        with contextlib.suppress(OSError):  # another user's
            os.utime(path, (step, step))


def last_checkpoint(folder):
    """The newest whole ``checkpoint-N`` of a folder, or None."""
    return next((path for _, path in _all(folder) if is_whole(path)), None)


def is_whole(checkpoint):
    """Whether a Trainer can resume from it: as its seal says, else state written last and no weight file cut short."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if sealed := read_json(checkpoint / SEAL):
            sizes = sealed["files"] or {"": None}
            return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
        if (shards := checkpoint / "pytorch_model_fsdp_0").is_dir():  # FSDP's SHARDED_STATE_DICT: .metadata comes last
            return (shards / ".metadata").exists() and (checkpoint / "optimizer_0" / ".metadata").exists()
        return bool(weights(checkpoint))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def weights(checkpoint):
    """Name to shape of the tensors in a checkpoint's safetensors files, {} where it has none; reads their headers.

    Raises OSError or ValueError for a file that is not there or cut short."""
    index, shapes = read_json(checkpoint / "model.safetensors.index.json"), {}
    names = set(index["weight_map"].values()) if index else ["model.safetensors", "adapter_model.safetensors"]
    for path in (checkpoint / name for name in names if index or (checkpoint / name).exists()):
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_bytes, path.stat().st_size)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if path.stat().st_size != 8 + header_bytes + end:
            raise ValueError(f"{path} is cut short")
        shapes |= {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    return shapes


def check_model(checkpoint, model):
    """Raises ValueError where a checkpoint holds the weights of a model of other shapes than ``model``."""
    own = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))  # ZeRO-3's
        own[re.sub(r"\.modules_to_save|\.default", "", name)] = shape  # PEFT's
    theirs = weights(Path(checkpoint))
    adapters = any("lora_" in name for name in theirs) and any(name in own for name in theirs)
    for name, shape in theirs.items():
        if own.get(name) != shape and not (adapters and name not in own):  # PEFT has more ways to save its weights
            here = f"has it as {own[name]}" if name in own else "has no such weight"
            raise ValueError(f"{checkpoint} is of another model: its {name} is {shape}, and this model {here}. Nothing "
                             "was changed: move the run folder away, or run with --fresh, which does")  # fmt: skip
