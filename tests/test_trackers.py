"""The trackers that users have, by ``report_to``, beside a run's own metrics: each is skipped by name where it is not
installed. Nothing leaves the machine. The training is a process of its own, since trackers read where to write once."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = folder.rglob("events.out.tfevents.*")
    return {row.step: row.value for row in EventAccumulator(str(events)).Reload().Scalars("train/reward")}


def wandb(folder):
    import wandb

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert path.stat().st_size
    return {wandb.run.summary["train/global_step"]: wandb.run.summary["train/reward"]}


def trackio(folder):
    import sqlite3

    (path,) = (folder / "trackio").glob("*.db")
    rows = [json.loads(metrics) for (metrics,) in sqlite3.connect(path).execute("select metrics from metrics")]
    return {row["train/global_step"]: row["train/reward"] for row in rows if "train/reward" in row}


FOUND = {function.__name__: function for function in (tensorboard, wandb, trackio)}


def main(tracker, folder):
    from grpo_lab import GRPOConfig, GRPOTrainer
    from grpo_lab.policies import load_tiny_policy
    from grpo_lab.rewards import accuracy_reward
    from grpo_lab.runs import Run
    from grpo_lab.tasks import arithmetic_problems

    model, tokenizer = load_tiny_policy()
    config = GRPOConfig(
        folder, max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        logging_steps=1, save_steps=2, report_to=tracker, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model, accuracy_reward, config, arithmetic_problems(8, 0), processing_class=tokenizer)
    Run(Path(folder), "launched").attach(trainer)
    trainer.train()
    (Path(folder) / "found.json").write_text(json.dumps(FOUND[tracker](Path(folder))))


@pytest.mark.parametrize("tracker", FOUND)
def test_a_tracker_gets_what_the_run_logs(tmp_path, tracker):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    from grpo_lab.runs import read_metrics

    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment = os.environ | places | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, __file__, tracker, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    own = {row["step"]: row["reward"] for row in read_metrics(tmp_path / "metrics.jsonl") if "reward" in row}
    found = {int(step): value for step, value in json.loads((tmp_path / "found.json").read_text()).items()}
    assert list(own) == [1, 2] and 2 in found
    assert found == pytest.approx({step: own[step] for step in found})


if __name__ == "__main__":
    main(*sys.argv[1:])
