"""Sweeps of a toy notebook: one after another, over GPUs, as jobs of submitit's local executor; interrupted, failed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_cli import OPEN, PARAMETERS, WORK, clean_environment, notebook  # noqa: F401

from grpo_lab import cli
from grpo_lab.runs import load_run, read_json
from grpo_lab.runs.parameters import assigned
from grpo_lab.runs.sweep import Job, parameter_sets, sweep

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = assigned(PARAMETERS)
FAULT = """import os, time
if name == "bad" and not os.path.exists("repaired"):
    raise MemoryError("no more")
print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"))"""


def test_a_grid_is_every_combination_and_a_list_is_its_sets():
    grid = parameter_sets(DEFAULTS, pairs=[("smoke", "false")], grid={"seed": ["0", "1"], "name": ["a", "b"]})
    assert [(one["seed"], one["name"]) for one in grid] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert all(one["smoke"] is False for one in grid)
    assert parameter_sets(DEFAULTS) == [{}]


def test_a_list_comes_from_a_file_and_no_set_comes_twice(tmp_path):
    path = tmp_path / "sets.yaml"
    path.write_text("- {name: a, learning_rate: 1e-3}\n- {name: b}\n- {name: a, learning_rate: 0.001}\n")
    sets = parameter_sets(DEFAULTS, grid={"seed": [0, 1]}, listed=path)
    assert sets == [{"name": "a", "learning_rate": 1e-3, "seed": 0}, {"name": "a", "learning_rate": 1e-3, "seed": 1},
                    {"name": "b", "seed": 0}, {"name": "b", "seed": 1}]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-g", "sede", "0", "1"], "did you mean seed?"),
        (["-g", "seed", "0", "x"], "seed = 'x': expected int"),
        (["-g", "seed"], "-g seed: expected a name and its values"),
        (["-g", "seed", "0", "-g", "seed", "1"], "-g: a name is given twice"),
        (["-g", "seed", "0", "--gpus", "all"], "--gpus all: nvidia-smi lists none"),
        (["--list", "few.yaml"], "--list few.yaml: expected a list of sets"),
        (["--list", "none.yaml"], "--list none.yaml: cannot be read as YAML"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_before_its_first_run(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "gpu_memory", lambda: [])
    Path("few.yaml").write_text("seed: 3\n")
    path = notebook(tmp_path, OPEN, WORK)
    assert cli.main(["sweep", str(path), *arguments, "--root", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_over_gpus_with_a_failure_and_then_as_jobs(tmp_path):
    path, said = notebook(tmp_path, OPEN, FAULT, WORK), []
    sets = parameter_sets(DEFAULTS, grid={"name": ["bad", "a", "b"]})
    runs = sweep(path, sets, tmp_path / "out", gpus=("4", "6"), show=said.append)
    assert [run.finished for run in runs] == [False, True, True], "a failure stops no other"
    assert said[-2:] == [
        f"sweep of 07_toy: 2 of 3 runs have finished, in {tmp_path / 'out'}",
        f"  failed: name=bad: out of memory: MemoryError: no more\n    {runs[0].folder}",
    ]
    assert {line.partition(" on GPU ")[2] for line in said if "begins" in line} == {"4", "6"}
    assert any(line.startswith("[name=a]   accuracy: 0.25 before") for line in said)
    gpus = [(run.folder / "07_toy.ipynb").read_text().partition("gpu ")[2][0] for run in runs[1:]]
    assert set(gpus) <= {"4", "6"}
    stamps = [(run.folder / "status.json").stat().st_mtime_ns for run in runs[1:]]

    (tmp_path / "repaired").touch()
    options = {"cluster": "local", "timeout_min": 5}
    said.clear()
    again = sweep(path, sets, tmp_path / "out", submitit=options, show=said.append)
    assert all(run.finished for run in again) and said[0] == "sweep of 07_toy: 3 runs, 2 finished already"
    assert [(run.folder / "status.json").stat().st_mtime_ns for run in runs[1:]] == stamps, "not repeated"
    (home,) = (tmp_path / "out").glob("sweep-07_toy-*")
    assert list(read_json(home / "jobs.json")) == [runs[0].folder.name]
    log = next((home / "jobs").glob("*_0_log.out")).read_text()
    assert "07_toy has finished" in log
    said.clear()
    sweep(path, sets, tmp_path / "out", submitit=options, show=said.append)
    assert len(said) == 2, "nothing is left to do"


@pytest.mark.skipif(shutil.which("srun") is not None, reason="there is a Slurm here")
@pytest.mark.parametrize("option, message", [("slurm_partition=x", "srun"), ("cluster=local nonsense=1", "nonsense")])
def test_jobs_that_cannot_be_submitted_are_told_in_a_line(tmp_path, capsys, option, message):
    path = notebook(tmp_path, OPEN, WORK)
    assert cli.main(["sweep", str(path), "--root", str(tmp_path / "out"), "--submitit", *option.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --submitit: ") and message in said and said.count("\n") == 1


def test_a_job_out_of_time_goes_back_into_the_queue(tmp_path):
    from submitit import AutoExecutor

    first = tmp_path / "first"
    script = (
        f"import os, time; p = {str(first)!r}; again = os.path.exists(p); open(p, 'w'); time.sleep(60 - 60 * again)"
    )
    executor = AutoExecutor(tmp_path / "jobs", "local")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(Job([sys.executable, "-c", script]))
    deadline = time.monotonic() + 60
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    (task,) = psutil.Process(int(job.job_id)).children()
    task.send_signal(signal.SIGUSR2)  # what Slurm sends before it takes the node away
    assert job.result() == 0 and time.monotonic() < deadline


def test_an_interrupted_sweep_ends_its_run_and_goes_on(tmp_path):
    wait = "import os, time\nif not os.path.exists('go'):\n    print('step 1/2 ', flush=True); time.sleep(60)"
    path = notebook(tmp_path, OPEN, wait, WORK)
    command = [sys.executable, "-m", "grpo_lab", "sweep", path, "-g", "seed", "0", "1", "--root", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    for line in process.stdout:
        if "step 1/2" in line:
            break
    (folder,) = (tmp_path / "out").glob("07_toy-*")
    kernel = load_run(folder).status["pid"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
    (tmp_path / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs have finished" in done.stdout
