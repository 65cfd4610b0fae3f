"""What machine this is and what a failure means: the facts that every recorded figure carries, and a remedy in words.

``describe_environment()`` reads versions without importing the packages; ``explain_failure(error)`` names the kind and
the repair. Neither needs torch.
"""

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
PACKAGES = (
    "grpo-lab torch triton transformers trl peft accelerate datasets math-verify liger-kernel "
    "cut-cross-entropy vllm bitsandbytes deepspeed numpy papermill"
).split()
RESUME = "Run the same cell or command again: it goes on from the last whole checkpoint."


def _command_output(*command):
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=CLONE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def describe_environment():
    """Machine, versions and commit, without importing the packages: what every recorded figure must carry."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    gpus = _command_output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    changes = _command_output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "command": os.environ.get("GRPO_LAB_COMMAND") or " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": model.group(1) if model else platform.processor(),
        "cpu_count": os.cpu_count(),
        "gpu": gpus.split("\n") if gpus else [],
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": versions,
        # a copy on a cluster node, with an older .git or none, is told its commit
        "commit": os.environ.get("GRPO_LAB_COMMIT") or _command_output("git", "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def explain_failure(error, folder="."):
    """``(kind, remedy)`` of an exception, in the words a run's status.json uses."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for error in chain:
        text, name = str(error).lower(), type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            return "interrupted", RESUME
        if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory|not enough memory", text):
            return "out of memory", (
                "Lower per_device_train_batch_size (and raise gradient_accumulation_steps by the same factor), "
                "max_completion_length or chunk_tokens, use loss_impl='chunked' and gradient_checkpointing=True, or "
                "end what else holds the memory. " + RESUME
            )
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "no space left" in text:
            free = shutil.disk_usage(folder).free / 2**20
            return "disk full", (
                f"{free:,.0f} MiB are free where {folder} lies: free some, lower save_total_limit, or set "
                "GRPO_LAB_RUNS to a folder on another disk. " + RESUME
            )
        if isinstance(error, ConnectionError) or name in ("ConnectionError", "ConnectTimeout", "ReadTimeout"):
            return "server unreachable", (
                "Start the vLLM server (`trl vllm-serve --model ...`), check vllm_server_host and vllm_server_port, "
                "and see its log for why it ended. " + RESUME
            )
        if name == "LaunchError":
            return "rank died", "See its last lines in the error; once that is repaired: " + RESUME
    return "error", "See the traceback in the executed notebook; once it is repaired: " + RESUME
