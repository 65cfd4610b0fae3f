"""Run folders: what was run, where, how it went and how it ended, under ``runs/<notebook>-<hash of the parameters>/``.

``open_run(notebook, params)`` gives the folder of these parameters: new, interrupted (resume from
``last_checkpoint()``) or finished (show it). ``load_run(folder)`` reads one back. Left out: comparing runs
(``compare.py``), and several runs after one another (``sweep.py``). Only ``callback()`` and ``attach()`` import torch
and transformers.
"""

import contextlib
import hashlib
import html
import itertools
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.doctor import CLONE, describe_environment, explain_failure, uncommitted
from grpo_lab.runs import checkpoints, executed, files
from grpo_lab.runs.files import plain, read_json, read_metrics, write_json

STATES = ("running", "finished", "failed", "interrupted")


def canonical(params):
    """The text that names a run: sorted JSON in which 1.0 and 1 are the same number.

    Raises ValueError for a parameter that is no plain value, since two runs with it could not be told apart.
    """

    def check(name, value):
        if isinstance(value, dict):
            return {str(k): check(f"{name}.{k}", v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [check(name, v) for v in value]
        if isinstance(value, os.PathLike):
            return str(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and abs(value) < float("inf")):
            return value
        raise ValueError(f"params: {name} = {value!r} ({type(value).__name__}); a run's parameters are plain, finite "
                         "values: str, int, float, bool, None, lists and dicts of them")  # fmt: skip

    return json.dumps(check("params", params), sort_keys=True, separators=(",", ":"))


def run_folder(notebook, params, root="runs"):
    """Where the run of these parameters lies.

    A relative ``root`` is taken from the clone (the current directory where there is none), and the environment
    variable GRPO_LAB_RUNS replaces the default, so that JupyterLab, papermill and the command line meet in one folder.
    """
    if root == "runs":
        root = os.environ.get("GRPO_LAB_RUNS", root)
    base = CLONE if (CLONE / "pyproject.toml").is_file() else Path.cwd()
    if not re.fullmatch(r"[\w-]+", notebook):
        raise ValueError(f"notebook = {notebook!r}: give the file's name without folder and .ipynb, as 06_train")
    digest = hashlib.sha256(canonical(params).encode()).hexdigest()[:10]
    return base / root / f"{notebook}-{digest}"


def headless():
    """Whether nobody watches: no Jupyter server started this kernel and standard output is no terminal."""
    if os.environ.get("GRPO_LAB_HEADLESS"):
        return True
    front_ends = ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG")  # what they set in their kernels
    return not (any(name in os.environ for name in front_ends) or sys.stdout.isatty())


def progress_bar():
    """An output for ``show_progress`` where a person watches a notebook; else None."""
    if headless() or "ipykernel" not in sys.modules:
        return None
    from IPython.display import HTML, display

    return display(HTML(""), display_id=True)


def show_progress(bar, step, total, text):
    """Draw ``step`` of ``total`` and the line ``text`` in an output of ``progress_bar()``, in place."""
    content = f'<progress value="{step}" max="{total}"></progress> {html.escape(text).replace("  ", " &nbsp; ")}'
    bar.update({"text/html": content, "text/plain": text}, raw=True)


def executing(folder):
    """Who else executes the run in ``folder``, "process 4711 on host", or None."""
    return files.holder(folder)


class Run:
    """One folder of ``runs/``. ``with run: ...`` records an exception and its remedy in status.json, and raises it on.

    ``status`` is what was found on opening ("new", "interrupted" or "finished") until ``finish()``; ``why`` tells what
    ended an interrupted run.
    """

    def __init__(self, folder, status, why=None):
        self.folder, self.status, self.why = folder, status, why
        self._metrics = None
        self._start = time.monotonic()
        self._ended = False

    def __repr__(self):
        checkpoint = self.last_checkpoint()
        details = [self.status, self.why, checkpoint and f"last checkpoint {Path(checkpoint).name}"]
        return f"<run {self.folder.name}: {'; '.join(d for d in details if d)}>"

    def __enter__(self):
        if self._ended and self.status != "finished":  # the cell that failed is run again
            self._lock()
            self._set_status("running")
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.fail(*explain_failure(error, self.folder), f"{kind.__name__}: {error}")

    def write_json(self, name, value):
        """Write ``folder/name`` whole or not at all; NaN and infinities become null."""
        write_json(self.folder / name, value)

    def log(self, step=None, **values):
        """Append one row to metrics.jsonl, with the time in seconds since 1970. It outlives this process; a power cut
        may take the rows since the last checkpoint, which are made again."""
        if self._metrics is None:
            self._metrics = files.append_to(self.folder / "metrics.jsonl")
        row = plain({"step": step, "time": round(time.time(), 3), **values})
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()

    def last_checkpoint(self):
        """Path of the newest whole ``checkpoint-N`` in the folder, or None: what ``resume_from_checkpoint`` wants."""
        found = checkpoints.last_checkpoint(self.folder)
        return found and str(found)

    def callback(self, series=None):
        """A TrainerCallback: each of the trainer's logs becomes a row of metrics.jsonl, each checkpoint is whole.

        ``series`` names the curve where one run trains several times. A person who watches a notebook sees a bar;
        where nobody watches, a line is printed, at most one in five seconds.
        """
        from grpo_lab.runs.callback import RunCallback

        return RunCallback(self, series)

    def attach(self, trainer, series=None):
        """Add ``callback()`` to a trainer, on every rank; but for a terminal, the trainer's own bar, table or rows give
        way. Raises ValueError where the checkpoint to resume from holds a model of other shapes."""
        on_terminal = not headless() and "ipykernel" not in sys.modules
        for callback in [] if on_terminal else list(trainer.callback_handler.callbacks):
            if any(word in type(callback).__name__ for word in ("Progress", "Printer")):
                trainer.remove_callback(callback)
        if checkpoint := checkpoints.last_checkpoint(trainer.args.output_dir):
            checkpoints.check_model(checkpoint, trainer.model)
        trainer.add_callback(self.callback(series))

    def finish(self, summary):
        """Write summary.json and mark the run finished; the same parameters show it from now on.

        Raises ValueError for a summary that is no dict of names to what was found."""
        if not isinstance(summary, dict):
            raise ValueError(f"summary = {str(summary)[:60]}: expected a dict of names to what was found")
        self.write_json("summary.json", summary)
        if (metrics := self.folder / "metrics.jsonl").exists():
            files.sync(metrics)
        self._set_status("finished", seconds=round(time.monotonic() - self._start, 1))
        self.status = "finished"

    def fail(self, reason, remedy, message=""):
        """Record in status.json that the run ended early, why, and what to do."""
        state = "interrupted" if reason == "interrupted" else "failed"
        more = {"reason": reason, "remedy": remedy, "message": message[:1000]}
        try:
            self._set_status(state, **more)
        except OSError:  # a full disk has no room for a new file, but the blocks of the old one are there
            with contextlib.suppress(OSError), open(self.folder / "status.json", "r+", encoding="utf-8") as file:
                file.truncate(file.write(json.dumps({"status": state, **more})))

    def _lock(self):
        if other := files.lock(self.folder):
            raise ValueError(f"params: {other} is executing this run in {self.folder}; wait for it, end it, or change "
                             "a parameter, such as seed")  # fmt: skip

    def _set_status(self, state, **more):
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # its last row may be what filled the disk
                self._metrics.close()
            self._metrics = None
        me = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self._ended = state != "running"
        try:
            self.write_json("status.json", {"status": state, **me, **more})
        finally:
            if self._ended:
                files.unlock(self.folder)

    def _describe(self, params):
        """Write what runs, and where; of an earlier attempt that ran something else, keep what was written."""
        about, changes = describe_environment(), uncommitted()
        names = ("environment.json", "changes.diff")
        before, patch = read_json(self.folder / names[0]), self.folder / names[1]
        fleeting = dict.fromkeys(("time", "command"))
        patched = patch.read_text(encoding="utf-8") if patch.exists() else ""
        if before and (before | fleeting != plain(about) | fleeting or patched != changes):
            number = next(n for n in itertools.count(1) if not (self.folder / f"environment-{n}.json").exists())
            for name in filter(lambda name: (self.folder / name).exists(), names):
                (self.folder / name).rename(self.folder / name.replace(".", f"-{number}."))
        self.write_json("parameters.json", params)
        self.write_json("environment.json", about)
        if changes:
            patch.write_text(changes, encoding="utf-8")


def run_status(folder):
    """The run folder's status.json, {} where there is none. Raises ValueError for one that no run has written."""
    found = read_json(Path(folder) / "status.json")
    if found is not None and not (isinstance(found, dict) and found.get("status") in STATES):
        raise ValueError(f"{folder}: its status.json is no run's: {str(found)[:60]}")
    return found or {}


def find_run(folder, params):
    """``run_status`` of the folder for these parameters. Raises ValueError, in one line, for a folder of something
    else."""
    try:
        found, theirs = run_status(folder), read_json(folder / "parameters.json")
        if theirs is not None and canonical(theirs) != canonical(params):
            raise ValueError(f"{folder} is a run of other parameters: {json.dumps(theirs)[:200]}")
    except ValueError as error:
        raise ValueError(f"{error}. Nothing was changed: move the folder away, or run with --fresh") from None
    return found


def make_folder(folder):
    """Make a run folder. Raises ValueError, in one line, where no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ".written", {})
        (folder / ".written").unlink()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}. Name another root, or set GRPO_LAB_RUNS to "
                         "one") from error  # fmt: skip


def open_run(notebook, params, root="runs"):
    """The run of these parameters: a new folder, an interrupted run to go on with, or a finished one to show.

    notebook: its file name without ``.ipynb``; params: every parameter of the notebook, plain values. A finished run is
    left untouched. Raises ValueError, and changes nothing, for parameters that are no plain values or that papermill
    was given and the notebook lacks, for a folder that cannot be written or read or is another run's, and while
    another process executes the run.
    """
    executed.check_injected(params)
    folder = run_folder(notebook, params, root)
    found = find_run(folder, params)
    if found.get("status") == "finished":
        return Run(folder, "finished")
    metrics = folder / "metrics.jsonl"
    run = Run(folder, "new")
    if found or metrics.exists():
        run = Run(folder, "interrupted", found.get("reason") or "its process ended without a word")
    make_folder(folder)
    run._lock()
    run._describe(params)
    run._set_status("running")
    if metrics.exists() and not any(folder.glob("**/checkpoint-*")):
        run.log(began_again=True)  # or its first rows would stand there twice
    executed.keep_at_exit(folder)
    return run


def set_aside(folder):
    """Move a run folder to ``replaced/`` beside it, so that its parameters can run anew; returns where it lies."""
    folder = Path(folder)
    (folder.parent / "replaced").mkdir(exist_ok=True)
    names = (f"{folder.name}-{n}" for n in itertools.count(1))
    return folder.rename(next(p for name in names if not (p := folder.parent / "replaced" / name).exists()))


@dataclass(frozen=True)
class RunRecord:
    """A run folder as read back; a file that is not there (yet) is None, metrics an empty list."""

    folder: Path
    parameters: dict
    status: dict
    environment: dict | None
    metrics: list
    receipt: dict | None
    summary: dict | None


def load_run(folder):
    """Read a run folder, running or ended. Raises ValueError where there is none, or a file of it is corrupt."""
    folder = Path(folder)
    parameters, status = read_json(folder / "parameters.json"), run_status(folder)
    if not isinstance(parameters, dict) or not status:
        raise ValueError(f"folder = {folder} is no run: parameters.json or status.json is missing; a run folder lies "
                         "under runs/ and is made by open_run")  # fmt: skip
    found = {name: read_json(folder / f"{name}.json") for name in ("environment", "receipt", "summary")}
    for name, value in found.items():
        if not isinstance(value, (dict, type(None))):
            raise ValueError(f"{folder}: its {name}.json is no run's: {str(value)[:60]}")
    metrics = read_metrics(folder / "metrics.jsonl")
    return RunRecord(folder, parameters, status, metrics=metrics, **found)
