"""Run folders: what was run, where, how it went and how it ended, under ``runs/<notebook>-<hash of the parameters>/``.

``open_run(notebook, params)`` gives the folder of these parameters: new, interrupted (resume from
``last_checkpoint()``) or finished (show it). ``load_run(folder)`` reads one back. Left out: comparing runs, and
runs that several processes write together. Only ``callback()`` imports transformers, and nothing torch.
"""

import contextlib
import hashlib
import html
import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.doctor import CLONE, describe_environment, explain_failure


def plain(value):
    """``value`` as JSON can hold it: tensors and arrays as lists, paths as strings, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


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


def write_json(path, value):
    """Write ``value`` to ``path`` so that a reader sees the old file or the new one whole, even after a power cut."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path):
    """The file's value, or None where there is no such file."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_metrics(path):
    """The rows of a metrics.jsonl in order; a half-written last line is left out, and so are the rows of an earlier
    attempt that lie beyond the step from which a later attempt resumed."""
    rows = []
    lines = Path(path).read_text(encoding="utf-8").split("\n") if Path(path).exists() else [""]
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is still being written
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from error
        if "resumed_at" in row:
            series, step = row.get("series"), row["resumed_at"]
            rows = [r for r in rows if r.get("series") != series or r["step"] is None or r["step"] <= step]
        else:
            rows.append(row)
    return rows


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


def _whole(checkpoint):
    """Whether a Trainer checkpoint can be resumed: state written last, every weight file there and not cut short."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if (shards := checkpoint / "pytorch_model_fsdp_0").is_dir():  # FSDP's SHARDED_STATE_DICT: .metadata comes last
            return (shards / ".metadata").exists() and (checkpoint / "optimizer_0" / ".metadata").exists()
        index = read_json(checkpoint / "model.safetensors.index.json")
        names = set(index["weight_map"].values()) if index else ["model.safetensors", "adapter_model.safetensors"]
        files = [checkpoint / name for name in names if index or (checkpoint / name).exists()]
        for file in files:
            with open(file, "rb") as opened:
                header_bytes = int.from_bytes(opened.read(8), "little")
                if header_bytes > file.stat().st_size:
                    return False
                header = json.loads(opened.read(header_bytes))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
            if file.stat().st_size != 8 + header_bytes + end:
                return False
        return bool(files)
    except (OSError, ValueError, KeyError):
        return False


def executing(folder):
    """The number of another live process that executes the run in ``folder``, else None."""
    import psutil

    status = read_json(Path(folder) / "status.json") or {}
    if status.get("status") != "running" or status["host"] != socket.gethostname() or status["pid"] == os.getpid():
        return None
    try:
        process = psutil.Process(status["pid"])
        same = abs(process.create_time() - status["process_started"]) < 2  # numbers are used again
        return process.pid if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


class Run:
    """One folder of ``runs/``. ``with run: ...`` records an exception and its remedy in status.json, and raises it on.

    ``status`` is what was found on opening ("new", "interrupted" or "finished") until ``finish()``; ``why`` tells what
    ended an interrupted run.
    """

    def __init__(self, folder, status, why=None):
        self.folder, self.status, self.why = folder, status, why
        self._metrics = None
        self._start = time.time()

    def __repr__(self):
        checkpoint = self.last_checkpoint()
        details = [self.status, self.why, checkpoint and f"last checkpoint {Path(checkpoint).name}"]
        return f"<run {self.folder.name}: {'; '.join(d for d in details if d)}>"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.fail(*explain_failure(error, self.folder), f"{kind.__name__}: {error}")

    def write_json(self, name, value):
        """Write ``folder/name`` whole or not at all; NaN and infinities become null."""
        write_json(self.folder / name, value)

    def log(self, step=None, **values):
        """Append one row to metrics.jsonl, with the time in seconds since 1970; on disk before this returns."""
        if self._metrics is None:
            path = self.folder / "metrics.jsonl"
            if path.exists():  # a killed process may have left half a line: cut it, or the next row would join it
                whole = path.read_bytes().rfind(b"\n") + 1
                os.truncate(path, whole)
            self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115
        row = plain({"step": step, "time": round(time.time(), 3), **values})
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()

    def last_checkpoint(self):
        """Path of the newest whole ``checkpoint-N`` in the folder, or None: what ``resume_from_checkpoint`` wants."""
        found = [p for p in self.folder.glob("checkpoint-*") if p.name[11:].isdigit()]
        whole = (str(p) for p in sorted(found, key=lambda p: -int(p.name[11:])) if _whole(p))
        return next(whole, None)

    def callback(self, series=None, every=5.0):
        """A TrainerCallback: each of the trainer's logs becomes a row of metrics.jsonl.

        ``series`` names the curve where one run trains several times. A person who watches a notebook sees a bar;
        where nobody watches, a line is printed, at most one in ``every`` seconds.
        """
        from transformers import TrainerCallback

        run, label = self, {} if series is None else {"series": series}
        shown = {"loss": "loss", "reward": "reward", "rewards/accuracy_reward/mean": "accuracy", "kl": "kl"}

        class RunCallback(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                self.began = self.spoke = time.monotonic()
                self.first_step = state.global_step
                if state.is_world_process_zero:
                    self.bar = progress_bar()
                    run.log(resumed_at=state.global_step, **label)

            def on_log(self, args, state, control, logs=None, **kwargs):
                if not state.is_world_process_zero:
                    return
                run.log(state.global_step, **label, **logs)
                now, done = time.monotonic(), state.global_step - self.first_step
                last = state.global_step >= state.max_steps
                wait = 0.3 if self.bar else every
                if not done or "loss" not in logs or not (last or now - self.spoke >= wait):
                    return
                self.spoke, pace = now, (now - self.began) / done
                values = "  ".join(f"{name} {logs[key]:.4g}" for key, name in shown.items() if key in logs)
                left = pace * (state.max_steps - state.global_step)
                where = f"{series or ''} step {state.global_step}/{state.max_steps}".strip()
                text = f"{where}  {values}  {pace:.2f} s/step  {left:.0f} s left"
                if self.bar:
                    show_progress(self.bar, state.global_step, state.max_steps, text)
                elif headless():
                    print(text, flush=True)

        return RunCallback()

    def attach(self, trainer, series=None):
        """Add ``callback()`` to a trainer; but for a terminal, the trainer's own bar, table or rows give way."""
        on_terminal = not headless() and "ipykernel" not in sys.modules
        for callback in [] if on_terminal else list(trainer.callback_handler.callbacks):
            if any(word in type(callback).__name__ for word in ("Progress", "Printer")):
                trainer.remove_callback(callback)
        trainer.add_callback(self.callback(series))

    def finish(self, summary):
        """Write summary.json and mark the run finished; the same parameters show it from now on."""
        self.write_json("summary.json", summary)
        self._set_status("finished", seconds=round(time.time() - self._start, 1))
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

    def _set_status(self, state, **more):
        import psutil

        if self._metrics is not None:
            with contextlib.suppress(OSError):  # its last row may be what filled the disk
                self._metrics.close()
            self._metrics = None
        me = {"pid": os.getpid(), "process_started": psutil.Process().create_time(), "host": socket.gethostname()}
        self.write_json("status.json", {"status": state, **me, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more})


def open_run(notebook, params, root="runs"):
    """The run of these parameters: a new folder, an interrupted run to go on with, or a finished one to show.

    notebook: its file name without ``.ipynb``; params: every parameter of the notebook, plain values. A finished run is
    left untouched. Raises ValueError for parameters that are no plain values, and while another process executes it.
    """
    folder = run_folder(notebook, params, root)
    found = read_json(folder / "status.json")
    if found is None:
        run = Run(folder, "new")
    elif found["status"] == "finished":
        return Run(folder, "finished")
    elif executing(folder):
        raise ValueError(f"params: process {found['pid']} is executing this run in {folder}; wait for it, end it, or "
                         "change a parameter, such as seed")  # fmt: skip
    else:
        run = Run(folder, "interrupted", found.get("reason") or "its process ended without a word")
        if not any(folder.glob("**/checkpoint-*")):  # it begins again, so its first rows would stand there twice
            (folder / "metrics.jsonl").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    run.write_json("parameters.json", params)
    run.write_json("environment.json", describe_environment())
    run._set_status("running")
    return run


def set_aside(folder):
    """Move a run folder to ``replaced/`` beside it, so that its parameters can run anew; returns where it lies."""
    folder = Path(folder)
    target = folder.parent / "replaced" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    target.parent.mkdir(exist_ok=True)
    return folder.rename(target)


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
    """Read a run folder, running or ended. Raises ValueError where there is none."""
    folder = Path(folder)
    parameters, status = read_json(folder / "parameters.json"), read_json(folder / "status.json")
    if parameters is None or status is None:
        raise ValueError(f"folder = {folder} is no run: parameters.json or status.json is missing; a run folder lies "
                         "under runs/ and is made by open_run")  # fmt: skip
    environment, receipt, summary = (read_json(folder / f"{n}.json") for n in ("environment", "receipt", "summary"))
    metrics = read_metrics(folder / "metrics.jsonl")
    return RunRecord(folder, parameters, status, environment, metrics, receipt, summary)
