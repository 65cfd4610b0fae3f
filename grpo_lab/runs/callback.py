"""The TrainerCallback of a run: rows of metrics, progress, and checkpoints that are whole. ``Run.attach`` adds it.

On every rank, since the ranks tell each other when their part of a checkpoint is written and how much memory each took.
"""

import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from grpo_lab.runs import checkpoints, files
from grpo_lab.runs.run import headless, progress_bar, show_progress

SHOWN = {"loss": "loss", "reward": "reward", "rewards/accuracy_reward/mean": "accuracy", "kl": "kl"}


def peak_bytes():
    """The most memory that this process has had: bytes of tensors on its GPU, or on a CPU all of the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except OSError:
        import resource  # on macOS, in bytes

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def on_all_ranks(value):
    """The ranks' values in order, at rank 0 and everywhere else; all have come here when it returns."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class RunCallback(TrainerCallback):
    """``series`` names the curve where one run trains several times; ``every``: seconds between two printed lines."""

    def __init__(self, run, series=None, every=5.0):
        self.run, self.series, self.every = run, series, every
        self.label = {} if series is None else {"series": series}

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = self.spoke = time.monotonic()
        self.first_step = state.global_step
        if state.is_world_process_zero:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            if other := files.lock(args.output_dir, ".training", patience=10.0):  # ranks of a launch that is ending
                raise ValueError(f"output_dir = {args.output_dir}: {other} is training there; wait for it or end it")
            checkpoints.in_order(args.output_dir)
            self.bar = progress_bar()
            self.run.log(resumed_at=state.global_step, **self.label)

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save:
            # sums that are still to be logged would be lost with the process: a row ends at each checkpoint
            control.should_log = control.should_log or args.logging_strategy != "no"
            if state.is_world_process_zero:
                checkpoints.begin(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        peaks = on_all_ranks(peak_bytes())
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            self._log_peaks(state, peaks)
            files.sync(self.run.folder / "metrics.jsonl")
            if checkpoint.exists():
                checkpoints.seal(checkpoint, state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        peaks = on_all_ranks(peak_bytes())
        if state.is_world_process_zero and state.global_step > self.first_step:
            self._log_peaks(state, peaks)

    def _log_peaks(self, state, peaks):
        kind = "tensors on the GPU" if torch.cuda.is_available() else "process"
        self.run.log(state.global_step, peak_bytes=peaks, peak_of=kind, **self.label)

    def on_log(self, args, state, control, logs=None, **kwargs):
        done = state.global_step - self.first_step
        if not state.is_world_process_zero or ("train_runtime" in logs and not done):  # of no step there is no speed
            return
        self.run.log(state.global_step, **self.label, **logs)
        now = time.monotonic()
        last = state.global_step >= state.max_steps
        wait = 0.3 if self.bar else self.every
        if not done or "loss" not in logs or not (last or now - self.spoke >= wait):
            return
        self.spoke, pace = now, (now - self.began) / done
        values = "  ".join(f"{name} {logs[key]:.4g}" for key, name in SHOWN.items() if key in logs)
        left = pace * (state.max_steps - state.global_step)
        where = f"{self.series or ''} step {state.global_step}/{state.max_steps}".strip()
        text = f"{where}  {values}  {pace:.2f} s/step  {left:.0f} s left"
        if self.bar:
            show_progress(self.bar, state.global_step, state.max_steps, text)
        elif headless():
            print(text, flush=True)
