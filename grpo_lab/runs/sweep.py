"""One notebook with many parameters: ``python -m grpo_lab sweep 06 -g seed 0 1 2 -g loss_impl naive chunked``.

Every set of parameters is a run of its own, as ``python -m grpo_lab run`` makes it: one after another, one on each GPU
(``--gpus``), or as jobs of a Slurm cluster (``--submitit``, which needs the package submitit). The same command goes on
with an interrupted sweep: finished runs are not repeated, others resume. A run that fails stops no other. Left out: any
choice of what to try next, and a scheduler.
"""

import concurrent.futures
import hashlib
import itertools
import os
import queue
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from grpo_lab import guard
from grpo_lab.runs.files import read_json, write_json
from grpo_lab.runs.parameters import merged_parameters, notebook_parameters, read_yaml, refuse_unknown, typed
from grpo_lab.runs.run import executing, find_run, run_folder, run_status

# Of a run's output: progress, and how it ended. The rest stands in its executed notebook
SHOWN = re.compile(r"\bstep \d+/\d+ |^error: |^[\w-]+( has finished|: \w+|  +(accuracy|took))|^  (accuracy|took): ")


class Member(NamedTuple):
    """A run of the sweep: what tells it from the others, its folder, and the command that executes it."""

    label: str
    folder: Path
    command: list

    @property
    def finished(self):
        return run_status(self.folder).get("status") == "finished"

    @property
    def failure(self):
        """Why it has not finished, in a line."""
        status = run_status(self.folder)
        state = status.get("reason", status.get("status", "not begun"))
        if state == "running":
            state = f"executed by {other}" if (other := executing(self.folder)) else "its process ended without a word"
        return f"{state}: {status.get('message', '')}".split("\n")[0].removesuffix(": ")


def parameter_sets(defaults, files=(), pairs=(), grid=(), listed=None):
    """The sets of parameters, each a dict of what differs from the notebook's defaults, in order and none twice.

    files, pairs: what all have in common, as for ``run``; grid: names to values, of which every combination is taken;
    listed: a YAML file with a list of sets, each combined with the grid. Raises ValueError before anything is run.
    """
    common = merged_parameters(defaults, files, pairs)
    sets = [{}] if listed is None else read_yaml(listed, "--list")
    if not isinstance(sets, list) or not all(isinstance(one, dict) for one in sets):
        raise ValueError(f"--list {listed}: expected a list of sets, each of lines `name: value`")
    for one in [*sets, dict(grid)]:
        refuse_unknown(one, defaults)
    axes = [[(name, value) for value in values] for name, values in dict(grid).items()]
    combined = [common | one | dict(point) for one in sets for point in itertools.product(*axes)]
    typed_sets = [{name: typed(name, value, defaults[name]) for name, value in one.items()} for one in combined]
    return [one for i, one in enumerate(typed_sets) if one not in typed_sets[:i]]


def members(path, sets, root):
    """The runs of a sweep, and its own folder, which holds their parameters as files."""
    defaults = notebook_parameters(path)
    differ = [name for name in defaults if len({repr(one.get(name, defaults[name])) for one in sets}) > 1]
    folders = [run_folder(path.stem, defaults | one, root) for one in sets]
    digest = hashlib.sha256(" ".join(folder.name for folder in folders).encode()).hexdigest()[:10]
    home, runs = folders[0].parent / f"sweep-{path.stem}-{digest}", []
    home.mkdir(parents=True, exist_ok=True)
    for one, folder in zip(sets, folders):
        find_run(folder, defaults | one)
        file = home / f"{folder.name}.json"
        write_json(file, one)
        command = [sys.executable, "-m", "grpo_lab", "run", path, "-f", file, "--root", folder.parent]
        label = " ".join(f"{name}={one.get(name, defaults[name])}" for name in differ) or folder.name
        runs.append(Member(label, folder, list(map(str, command))))
    return runs, home


def sweep(path, sets, root="runs", gpus=(), submitit=None, show=print):
    """Execute the notebook at ``path`` with each of the ``parameter_sets``; returns its Members.

    gpus: numbers of GPUs, each of which takes one run at a time; none: one run after another. submitit: options of its
    AutoExecutor, such as slurm_partition or timeout_min, for jobs; cluster="local" runs them here, all at once. An
    interrupt ends what runs here, and leaves jobs in their queue.
    """
    runs, home = members(path, sets, root)
    waiting = [run for run in runs if not run.finished]
    show(f"sweep of {path.stem}: {len(runs)} runs, {len(runs) - len(waiting)} finished already")
    if submitit is not None:
        _as_jobs(waiting, home, dict(submitit), show)
    elif waiting:
        _here(waiting, list(gpus), show)
    failed = [run for run in runs if not run.finished]
    show(
        f"sweep of {path.stem}: {len(runs) - len(failed)} of {len(runs)} runs have finished, in {runs[0].folder.parent}"
    )
    for run in failed:
        show(f"  failed: {run.label}: {run.failure}\n    {run.folder}")
    return runs


def _here(runs, gpus, show):
    """One run at a time on each GPU, or one at all."""
    free, processes = queue.SimpleQueue(), set()
    for gpu in gpus or [None]:
        free.put(gpu)

    def execute(run):
        gpu = free.get()
        env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
        show(f"[{run.label}] begins" + ("" if gpu is None else f" on GPU {gpu}"))
        process = guard.start(run.command, env)
        processes.add(process)
        for line in process.stdout:
            if SHOWN.search(line):
                show(f"[{run.label}] {line.rstrip()}")
        process.wait()
        free.put(gpu)

    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(gpus)))
    try:
        for future in [pool.submit(execute, run) for run in runs]:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


class Job:
    """A run as submitit calls it on the cluster's node; preempted or out of time, it goes back into the queue."""

    def __init__(self, command):
        self.command = command

    def __call__(self):
        from grpo_lab.launch import run_command

        return run_command(self.command, lambda line: print(line, flush=True))

    def checkpoint(self):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _as_jobs(runs, home, options, show):
    """Submit what is not queued since an earlier call, and wait for all of it."""
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise ValueError("submitit = ...: the package is not installed: pip install 'grpo-lab[slurm]'") from None
    try:
        executor = AutoExecutor(home / "jobs", options.pop("cluster", "slurm"))
        executor.update_parameters(name=home.name, **options)
    except (RuntimeError, NameError, TypeError, AssertionError) as error:
        raise ValueError(f"--submitit: {' '.join(str(error).split())}") from error
    known = read_json(home / "jobs.json") or {}
    jobs = {name: executor.job_class(home / "jobs", number) for name, number in known.items()}
    new = [run for run in runs if not _alive(jobs.get(run.folder.name), run)]
    submitted = []
    if new:
        with executor.batch():
            submitted = [executor.submit(Job(run.command)) for run in new]
    jobs |= {run.folder.name: job for run, job in zip(new, submitted)}
    write_json(home / "jobs.json", {name: job.job_id for name, job in jobs.items()})
    for run in runs:
        show(f"[{run.label}] job {jobs[run.folder.name].job_id}")
    while waiting := [run for run in runs if _alive(jobs[run.folder.name], run)]:
        time.sleep(min(5.0, len(waiting)))


def _alive(job, run):
    return bool(job is not None and (not job.done() or executing(run.folder)))
