"""Training that is ended at random moments, in every way that ends one, and goes on: does it end as an unbroken one?

    python tests/crashes.py --crashes 30                # one process
    python tests/crashes.py --crashes 30 --ranks 2      # two, through grpo_lab.launch

Faults: ``kill`` (kill -9), ``memory`` (the system gives no more), ``disk`` (no file may grow beyond some size), and
``power`` (kill -9, and of what was not fsynced a random part is gone, or zeros). Checkpoints lie in the middle of
generated batches and in two epochs, and every second step is logged. Compared are all rows of metrics without times,
the weights and the random states, with ==. Linux, CPU. One process is forked from one that has imported everything.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from grpo_lab import GRPOConfig, GRPOTrainer
from grpo_lab.launch import LaunchError, launch
from grpo_lab.policies import load_tiny_policy
from grpo_lab.runs import Run, load_run, open_run, read_json, read_metrics
from grpo_lab.runs.checkpoints import last_checkpoint
from grpo_lab.tasks import arithmetic_problems

STEPS = 14
FAULTS = ("kill", "power", "memory", "disk")
PARAMS = {"steps": STEPS}


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in message["content"])) for (message,) in completions]


def train(run):
    """One attempt: resume from the last whole checkpoint of the run, and train to the end."""
    logging.disable_progress_bar()
    model, tokenizer = load_tiny_policy()
    config = GRPOConfig(
        str(run.folder), max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, steps_per_generation=2,
        num_iterations=2, max_completion_length=8, learning_rate=1e-3, lr_scheduler_type="linear", beta=0.04,
        temperature=1.2, bf16=False, logging_steps=2, save_steps=1, save_total_limit=2, report_to="none",
    )  # fmt: skip
    trainer = GRPOTrainer(model, digits, config, arithmetic_problems(10, 0), processing_class=tokenizer)
    run.attach(trainer)
    trainer.train(resume_from_checkpoint=run.last_checkpoint())


def note_syncs(log):
    """Write down what this process fsyncs, for ``lose_power``: inode, size and time of the file."""
    fsync = os.fsync

    def noting(handle):
        fsync(handle)
        stat = os.fstat(handle)
        log.write(f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}\n")
        log.flush()

    os.fsync = noting


def lose_power(folder, log, chance):
    """What a power cut may do to files that were not fsynced since they were written last."""
    notes = (line.split() for line in log.read_text().splitlines())  # the last may be half a line
    synced = {int(note[0]): (int(note[1]), int(note[2])) for note in notes if len(note) == 3}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        safe, when = synced.get(stat.st_ino, (0, -1))
        if when == stat.st_mtime_ns:
            continue
        cut = chance.randint(min(safe, stat.st_size), stat.st_size)
        fate = chance.choice(("kept", "cut", "zeros", "gone" if not safe else "cut"))
        if fate == "gone":
            path.unlink()
        elif fate != "kept":
            os.truncate(path, cut)
            if fate == "zeros":
                os.truncate(path, stat.st_size)


def attempt(root):
    """Open the run and train, in this process."""
    run = open_run("06_crashes", PARAMS, root)
    if run.status != "finished":
        with run:
            train(run)
            run.finish({})


def attempt_on_two(root):
    run = open_run("06_crashes", PARAMS, root)
    with run:
        launch(__file__, "--rank-of", run.folder, config="cpu_2")
        run.finish({})


def fork(work, root, log):
    """The number of a child process that does ``work``, in silence."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.setsid()
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    os.environ["GRPO_LAB_HEADLESS"] = "1"
    code = 1
    try:
        note_syncs(log)
        work(root)
        code = 0
    except (Exception, LaunchError):
        pass
    finally:
        os._exit(code)


def family(pid):
    """The process, the launcher's processes below it, and the ranks."""
    main, ranks = psutil.Process(pid), []
    below = main.children(recursive=True)
    for child in below:
        with contextlib.suppress(psutil.Error):
            if any(Path(word).name == Path(__file__).name for word in child.cmdline()[1:3]):
                ranks.append(child)
    return main, below, ranks or [main]


def crash(pid, fault, chance):
    """Do it to one process of the run, where power fails to all; return what they were."""
    main, below, ranks = family(pid)
    victim, size = chance.choice(ranks), chance.choice((1_000, 50_000, 400_000))
    with contextlib.suppress(psutil.Error, ProcessLookupError):  # it may have ended just now
        if fault == "power":
            for process in (main, *below):
                process.kill()
        elif fault == "kill":
            chance.choice((main, victim)).kill()
        elif fault == "memory":
            resource.prlimit(victim.pid, resource.RLIMIT_AS, (victim.memory_info().vms,) * 2)
        else:
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (size, size))
    return below


def finished(root):
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return folder, load_run(folder)


def outcome(folder):
    """What must be the same: rows of metrics without times and memory, weights, and random states of all ranks."""
    rows = []
    for row in read_metrics(folder / "metrics.jsonl"):
        values = {
            k: v for k, v in row.items() if not any(word in k for word in ("time", "per_second", "bytes", "flos"))
        }
        if "loss" in values:
            rows.append(values)
    last = folder / f"checkpoint-{STEPS}"
    states = [torch.load(path, weights_only=False) for path in sorted(last.glob("rng_state*.pth"))]
    weights = {name: tensor.tolist() for name, tensor in load_file(last / "model.safetensors").items()}
    return {"rows": rows, "weights": weights, "states": [state["cpu"].tolist() for state in states]}


def ended(pid, seconds, until=lambda: False):
    """The exit status of a child, or None if it still runs after so many seconds, or when ``until()`` is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return status
        time.sleep(0.01)
    return None


def crashed(pid, root, seconds, fault, chance):
    """Let the run in ``root`` train for a random part of ``seconds``, then crash it; its exit status, 0 if it ended."""

    def rows():
        return [path.stat().st_size for path in root.glob("*/metrics.jsonl")]

    before = rows()
    from_the_start = chance.random() < 0.2  # else from the first row on
    status = None if from_the_start else ended(pid, 100, lambda: rows() != before)
    if status is None and (status := ended(pid, chance.uniform(0, seconds))) is None:
        below = crash(pid, fault, chance)
        status = os.waitpid(pid, 0)[1]
        assert not psutil.wait_procs(below, timeout=30)[1], "nothing outlives the run"
        return status
    assert status == 0, [path.read_text() for path in root.glob("*/status.json")]
    return 0


def soak(crashes, ranks, seed, folder, faults=FAULTS, say=print):
    """Crash a training ``crashes`` times; returns how often in which way, and how many runs were finished so."""
    chance, seen, runs = random.Random(seed), collections.Counter(), 0
    work, notes = attempt if ranks == 1 else attempt_on_two, folder / "syncs"
    os.environ["CRASHES_LOG"] = str(notes)
    log = open(notes, "a")
    assert os.waitpid(fork(work, folder / "unbroken", log), 0)[1] == 0
    unbroken, record = finished(folder / "unbroken")
    seconds = record.metrics[-1]["time"] - record.metrics[0]["time"]
    expected = outcome(unbroken)
    assert len(expected["rows"]) == STEPS, "a row at each checkpoint"
    while sum(seen.values()) < crashes:
        root = folder / f"run{runs}"
        root.mkdir()
        while sum(seen.values()) < crashes:
            fault = chance.choice(faults)
            if crashed(fork(work, root, log), root, seconds, fault, chance) == 0:
                break
            seen[fault] += 1
            for found in root.iterdir():
                if fault == "power":
                    lose_power(found, notes, chance)
                why = (read_json(found / "status.json") or {}).get("reason", "")
                say(f"{sum(seen.values()):3} {fault:6} {(last_checkpoint(found) or found).name}  {why}", flush=True)
        else:
            assert os.waitpid(fork(work, root, log), 0)[1] == 0
        found, record = finished(root)
        assert record.status["status"] == "finished"
        assert json.dumps(outcome(found)) == json.dumps(expected), f"{found} differs from the unbroken run"
        runs += 1
        say(f"run {runs} ended as the unbroken one", flush=True)
    return seen, runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--crashes", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank-of", type=Path)
    arguments = parser.parse_args()
    if arguments.rank_of:
        note_syncs(open(os.environ["CRASHES_LOG"], "a"))
        train(Run(arguments.rank_of, "launched"))
    else:
        with tempfile.TemporaryDirectory() as place:
            torch.set_num_threads(1)
            print(*soak(arguments.crashes, arguments.ranks, arguments.seed, Path(place)))
