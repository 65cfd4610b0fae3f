"""Several processes from a notebook: ``launch("train.py", "--max_steps", 20, config="fsdp_2")``.

accelerate's own launcher starts the script in child processes, with a config file of ``grpo_lab/configs/`` or of your
own. Rank 0's output is shown as it comes; a rank that dies ends all of them and is named in a ``LaunchError``; nothing
outlives an interrupt or the kernel (``guard.py``). From a terminal the same files serve ``accelerate launch
--config_file grpo_lab/configs/fsdp_2.yaml train.py``. Imports neither torch nor accelerate unless the kernel has.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import defaultdict, deque
from pathlib import Path

from grpo_lab import guard
from grpo_lab.doctor import CLONE
from grpo_lab.runs import progress_bar, show_progress

CONFIGS = Path(__file__).with_name("configs")
KEPT = 40  # lines of each rank, for the error
# Variables that a kernel may have from its own trainer or launcher, and that would speak for the children's.
FOREIGN = re.compile("(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC|MASTER)_|((LOCAL_|GROUP_|ROLE_)?RANK|"
                     "((LOCAL|GROUP|ROLE)_)?WORLD_SIZE)$")  # fmt: skip
MARK = "\x1e"  # put before each line of a rank by torchrun, with the rank's number
PROGRESS = re.compile(r"(?:^|\s)step (\d+)/(\d+)\s|\| *(\d+)/(\d+) \[")  # Run.callback's lines, and tqdm's bars
LOGGED = re.compile(r"[WEI]\d{4} .*torch/distributed/")
DIED = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)")
DIED_ALONE = re.compile(r"returned non-zero exit status (\d+)|died with <Signals\.\w+: (\d+)>")
LOST = re.compile("Connection (closed|reset) by peer|Broken pipe|DistNetworkError|remote process exited|"
                  "recvValue failed|watchdog thread terminated|ncclRemoteError|communicator was aborted")  # fmt: skip


class LaunchError(RuntimeError):
    """A launched script that failed. ``exit_code`` is the launcher's; ``rank`` the one that died first and ``lines``
    the last that it wrote, or None and the launcher's own where no rank could be named."""

    def __init__(self, message, exit_code, rank, lines):
        super().__init__("\n".join([message, *("  " + line for line in lines)]))
        self.exit_code, self.rank, self.lines = exit_code, rank, lines


def child_environment():
    """This process's environment for a child: without what speaks of its own launch, and with this very package."""
    env = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return env | {"PYTHONPATH": os.pathsep.join([str(CLONE), *filter(None, [env.get("PYTHONPATH")])])}


def run_command(command, on_line, env=None):
    """Run a command to its end and call ``on_line`` with each line of its output, stderr included, as it comes.

    Returns the exit code. Whatever ends this call early, an interrupt too, ends the command and every process that it
    has started, and so does the death of this process.
    """
    process = guard.start(command, env)
    try:
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        return process.wait()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def launch(script, *arguments, config, processes=None, options=()):
    """Train with several processes: ``accelerate launch`` with this config file, in child processes.

    script: a Python file; arguments: its own; config: the name of a file in grpo_lab/configs (cpu_2, gpu_1, ddp_2,
    ddp_8, fsdp_2, fsdp_8, fsdp_nodes, zero3_2, zero3_8), or the path of one; processes: in place of the file's number;
    options: more options of ``accelerate launch``, such as ("--machine_rank", 1).

    Progress (bars, and lines as ``step 3/20 ...``) is drawn in place, or shown every five seconds where nobody watches.
    Raises ValueError for a config that is not there or asks for more GPUs than there are, and LaunchError when the
    script fails. Warns of GPU memory that this process holds and the children need.
    """
    path, settings = _read_config(config)
    processes = settings["num_processes"] if processes is None else processes
    several = settings.get("num_machines", 1) > 1
    if not settings.get("use_cpu"):
        _check_gpus(processes // settings.get("num_machines", 1), config)
    if not Path(script).is_file():
        raise ValueError(f"script = {str(script)!r}: no such file in {Path.cwd()}")
    env = child_environment() | {"PYTHONUNBUFFERED": "1", "GRPO_LAB_HEADLESS": "1"}
    env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = f"{MARK}${{rank}}{MARK}"
    if settings.get("use_cpu"):
        env |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}  # torch.load cannot resume on its cpu:0
    logs = tempfile.mkdtemp(prefix="grpo_lab-launch-")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, "--num_processes", processes]
    command += ["--tee", 3, "--log_dir", logs, *([] if several else ["--main_process_port", 0]), *options]
    output = _Output(processes)
    try:
        code = run_command([*command, script, *arguments], output.line, env)
    finally:
        output.end()
        shutil.rmtree(logs, ignore_errors=True)
    if code:
        raise output.error(code)


def _read_config(config):
    import yaml

    path = Path(config) if Path(config).suffix else CONFIGS / f"{config}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise ValueError(
            f"config = {str(config)!r}: expected one of {names}, or the path of a config file of accelerate"
        )
    return path, yaml.safe_load(path.read_text(encoding="utf-8"))


def _check_gpus(needed, config):
    """Raises ValueError if fewer GPUs are there than needed; warns of memory that this process holds on them."""
    import torch

    found = torch.cuda.device_count()  # does not initialise CUDA
    if found < needed:
        raise ValueError(f"config = {str(config)!r} needs {needed} GPUs and {found} can be seen here: choose another "
                         "config ('cpu_2' needs none), lower processes, or see CUDA_VISIBLE_DEVICES")  # fmt: skip
    if not torch.cuda.is_initialized():
        return
    torch.cuda.empty_cache()
    held = [torch.cuda.memory_reserved(device) / 2**30 for device in range(needed)]
    if max(held) >= 0.1:
        where = ", ".join(f"{gib:.1f} GiB of GPU {device}" for device, gib in enumerate(held) if gib >= 0.1)
        warnings.warn(
            f"this process holds {where}, which the processes it starts cannot use. Free it first: `del` the models "
            "and tensors, then gc.collect() and torch.cuda.empty_cache(), or restart the kernel",
            stacklevel=3,
        )


class _Output:
    """Shows what rank 0 and the launcher write; keeps each rank's last lines, and the launcher's of a failure."""

    def __init__(self, processes):
        self.processes, self.bar, self.spoke, self.shown = processes, progress_bar(), 0.0, None
        self.ranks = defaultdict(lambda: deque(maxlen=KEPT))
        self.launcher, self.failing, self.held = [], False, None

    def line(self, text):
        own, *marked = re.split(f"{MARK}(\\d+){MARK}", text)
        parts = defaultdict(str)
        for rank, part in zip(marked[::2], marked[1::2]):
            parts[int(rank)] += part
        for rank, part in parts.items():
            self._of_rank(rank, part)
        if own or not marked:
            self._unmarked(own)

    def end(self):
        if self.held is not None:
            self._unmarked("")

    def _unmarked(self, text):
        """A line of the launcher, or of the script where it is run as a single process, without torchrun."""
        alone = self.processes == 1
        if self.held is not None:  # a traceback: the launcher was run with -m, a single process by its path
            held, self.held = self.held, None
            self.failing = not alone or "<frozen runpy>" in text
            self.launcher.append(held) if self.failing else self._of_rank(0, held)
        if self.failing or LOGGED.match(text):
            self.launcher.append(text)
        elif text == "Traceback (most recent call last):":
            self.held = text
        elif alone:
            self._of_rank(0, text)
        else:
            self.launcher.append(text)
            print(text, flush=True)

    def _of_rank(self, rank, text):
        progress = PROGRESS.search(text)
        if text and not (progress and "|" in progress.group()):  # bars would push out what a rank says of its failure
            self.ranks[rank].append(text)
        if rank == 0 and progress:
            self._progress(text, *(int(n) for n in progress.groups() if n))
        elif rank == 0 and text:  # a bar begins with an empty line
            print(text, flush=True)

    def _progress(self, text, step, total):
        wait = 0.3 if self.bar else 5.0
        if (step, total) == self.shown or step < total and time.monotonic() - self.spoke < wait:
            return
        self.spoke, self.shown = time.monotonic(), (step, total)
        if self.bar:
            show_progress(self.bar, step, total, text)
        else:
            print(text, flush=True)

    def error(self, code):
        """The LaunchError that names the rank which died first: those that only lost their connection to it, or were
        ended for it by the launcher, come after it."""
        said = "\n".join(self.launcher)
        died = [(int(rank), int(status)) for rank, status in DIED.findall(said)]
        if not died and self.processes == 1:  # of a file for several, torchrun starts a single one too
            died = [(0, int(status or -int(number))) for status, number in DIED_ALONE.findall(said)]

        def text(rank):
            return "\n".join(self.ranks[rank])

        def followed(failure):
            rank, status = failure
            return bool(LOST.search(text(rank))) or status == -signal.SIGTERM and "Traceback" not in text(rank)

        if not died:
            lines = self.launcher or list(self.ranks[0])
            return LaunchError(f"accelerate's launcher ended with exit code {code}:", code, None, lines[-KEPT:])
        rank, status = min(died, key=followed)
        name = "the process" if self.processes == 1 else f"rank {rank} of {self.processes}"
        if status in (-signal.SIGABRT, -signal.SIGTERM) and "Traceback" in text(rank):
            status = 1  # after its exception gloo aborted it (pytorch/pytorch#179291), or the launcher ended it
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
            how += " (the system does that when memory runs out)" if status == -signal.SIGKILL else ""
        else:
            how = f"ended with exit code {status}"
        if followed((rank, status)):
            how += " because another rank was gone: see the output of the other machines"
        # torchrun passes on both streams of a rank, not in order; torch marks the lines of an exception so
        lines = sorted(self.ranks[rank], key=lambda line: line.startswith(f"[rank{rank}]:"))
        return LaunchError(f"{name} {how}; {'its last lines:' if lines else 'it wrote nothing'}", code, rank, lines)
