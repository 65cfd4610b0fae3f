"""A training that was ended and goes on is the unbroken one: rows, weights and random states are compared with ==.

``python tests/crashes.py`` is the long version, and the one for two processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import crashes
import pytest

from grpo_lab.runs import load_run, open_run
from grpo_lab.runs.callback import RunCallback

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's limits of another process")


def test_crashes_at_random_moments_leave_no_trace():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "tests" / "crashes.py", "--crashes", "3"]
    soaked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert soaked.returncode == 0, soaked.stdout + soaked.stderr[-3000:]
    assert "ended as the unbroken one" in soaked.stdout and soaked.stdout.strip().splitlines()[-1].startswith("Counter")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    root = tmp_path_factory.mktemp("unbroken")
    crashes.attempt(root)
    return crashes.outcome(crashes.finished(root)[0])


MOMENTS = {8: "after an epoch", 11: "in a generated batch", 14: "after the last step"}


@pytest.mark.parametrize("step", MOMENTS, ids=MOMENTS.get)
def test_what_trl_forgets_is_kept(tmp_path, monkeypatch, unbroken, step):
    """The order of the data in a later epoch; completions still to be trained on; that nothing is left to do."""
    on_save = RunCallback.on_save

    def ends(self, args, state, control, **kwargs):
        on_save(self, args, state, control, **kwargs)
        if state.global_step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunCallback, "on_save", ends)
    with pytest.raises(KeyboardInterrupt):
        crashes.attempt(tmp_path)
    monkeypatch.setattr(RunCallback, "on_save", on_save)
    folder, record = crashes.finished(tmp_path)
    assert record.status["reason"] == "interrupted"
    run = open_run("06_crashes", crashes.PARAMS, tmp_path)
    assert Path(run.last_checkpoint()).name == f"checkpoint-{step}"
    crashes.attempt(tmp_path)
    assert crashes.outcome(folder) == unbroken
    record = load_run(folder)
    assert record.status["status"] == "finished"
    speeds = [row for row in record.metrics if "train_runtime" in row]
    assert len(speeds) == (step != 14), "none of an attempt that had no step left to take"
    peaks = [row for row in record.metrics if "peak_bytes" in row]
    assert all(len(row["peak_bytes"]) == 1 and row["peak_bytes"][0] > 10**8 for row in peaks) and len(peaks) >= 14
