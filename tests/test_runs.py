import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_lab.doctor import describe_environment, explain_failure
from grpo_lab.runs import canonical, load_run, open_run, plain, read_metrics, run_folder, set_aside, write_json

PARAMS = {"smoke": True, "seed": 3, "learning_rate": 3e-4}


def test_folder_is_named_by_the_parameters_alone(tmp_path):
    one = run_folder("06_train", {"a": 1, "b": [1.0, None]}, tmp_path)
    assert one == run_folder("06_train", {"b": (1, None), "a": 1.0}, tmp_path)
    assert one.name.startswith("06_train-") and len(one.name) == len("06_train-") + 10
    others = [{"a": 2, "b": [1, None]}, {"a": 1, "b": [1]}, {"a": "1", "b": [1, None]}, {"a": 1}]
    assert len({one, *(run_folder("06_train", o, tmp_path) for o in others)}) == 5
    assert run_folder("x", {"a": True}, tmp_path) != run_folder("x", {"a": 1}, tmp_path)


def test_relative_root_lies_in_the_clone_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_LAB_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run_folder("x", {}).parent == Path(__file__).resolve().parents[1] / "runs"
    monkeypatch.setenv("GRPO_LAB_RUNS", str(tmp_path))
    assert run_folder("x", {}).parent == tmp_path


@pytest.mark.parametrize("bad", [math.nan, math.inf, object(), {1, 2}])
def test_parameters_that_cannot_name_a_run_are_refused(bad):
    with pytest.raises(ValueError, match=r"params: params\.x\.y"):
        canonical({"x": {"y": bad}})


@pytest.mark.parametrize("bad", ["../06", "06.ipynb", ""])
def test_notebook_names_stay_inside_the_root(bad, tmp_path):
    with pytest.raises(ValueError, match="notebook ="):
        run_folder(bad, {}, tmp_path)


def test_plain_turns_everything_into_json():
    import numpy as np
    import torch

    value = {"t": torch.tensor([1.0, math.nan]), "n": np.float32(2), "p": Path("a"), 3: (math.inf, True, None)}
    assert plain(value) == {"t": [1.0, None], "n": 2.0, "p": "a", "3": [None, True, None]}


def test_new_finished_and_shown_again(tmp_path):
    run = open_run("06_train", PARAMS, tmp_path)
    assert run.status == "new" and "new" in repr(run)
    assert load_run(run.folder).status["status"] == "running"
    with run:
        run.log(1, loss=math.nan, reward=0.5)
        run.write_json("receipt.json", {"passed": True})
        run.finish({"accuracy_before": 0.3, "accuracy_after": 0.9, "bad": math.inf})
    before = {p.name: p.read_bytes() for p in run.folder.iterdir()}
    again = open_run("06_train", dict(reversed(PARAMS.items())), tmp_path)
    assert again.status == "finished" and again.folder == run.folder
    assert before == {p.name: p.read_bytes() for p in run.folder.iterdir()}, "a finished run is not touched"
    record = load_run(run.folder)
    assert record.parameters == PARAMS and record.receipt == {"passed": True}
    assert record.summary == {"accuracy_before": 0.3, "accuracy_after": 0.9, "bad": None}
    assert record.metrics[0]["loss"] is None and record.metrics[0]["step"] == 1 and record.metrics[0]["time"] > 1e9
    assert open_run("06_train", PARAMS | {"seed": 4}, tmp_path).status == "new"


def test_set_aside_makes_room_and_deletes_nothing(tmp_path):
    run = open_run("06_train", PARAMS, tmp_path)
    run.finish({"x": 1})
    moved = set_aside(run.folder)
    assert load_run(moved).summary == {"x": 1}
    assert open_run("06_train", PARAMS, tmp_path).status == "new"


def test_environment_tells_versions_without_importing_the_packages():
    code = "import json, sys; from grpo_lab.doctor import describe_environment as d; e = d(); " + (
        "print(json.dumps([e, [m for m in ('torch', 'transformers', 'trl') if m in sys.modules]]))"
    )
    environment, loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert loaded == []
    assert {"torch", "transformers", "trl"} <= set(environment["packages"])
    assert environment["cpu_count"] == os.cpu_count() and environment["python"] and environment["platform"]
    assert environment["commit"] is None or len(environment["commit"]) == 40
    assert isinstance(describe_environment()["gpu"], list)


def test_half_written_line_is_tolerated_and_cut_before_the_next_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1]
    run = open_run("06_train", PARAMS, tmp_path)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    run.log(2, loss=1)
    assert [r["step"] for r in read_metrics(run.folder / "metrics.jsonl")] == [1, 2]
    path.write_text('{"step": 1\n{"step": 2}\n[3]\n')
    with pytest.warns(UserWarning) as said:
        assert read_metrics(path) == [{"step": 2}]
    assert [str(w.message).rpartition("/")[2] for w in said] == [
        f"metrics.jsonl, line {n} is no row of metrics and is left out: {text!r}"
        for n, text in ((1, '{"step": 1'), (3, "[3]"))
    ]
    path.write_text('{"step": 1}\n\0\0\0\n{"step": null, "resumed_at": 1}\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}], "what a power cut left is of no attempt"
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_rows_beyond_a_resumed_step_are_replaced_series_by_series(tmp_path):
    rows = [{"step": 1}, {"step": 1, "series": "a"}, {"step": None, "x": 1}, {"step": 2, "old": 1}, {"resumed_at": 1}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": None} | r) + "\n" for r in [*rows, {"step": 2, "new": 1}]))
    assert [r for r in read_metrics(path) if r["step"] == 2] == [{"step": 2, "new": 1}]
    assert len(read_metrics(path)) == 4


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "error, state, reason, remedy",
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate"),
            "failed",
            "out of memory",
            "per_device_train_batch_size",
        ),
        (MemoryError(), "failed", "out of memory", "chunk_tokens"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed", "disk full", "GRPO_LAB_RUNS"),
        (ConnectionError("The vLLM server can't be reached"), "failed", "server unreachable", "VllmServer"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "failed", "pipe closed", "such as head"),
        (KeyboardInterrupt(), "interrupted", "interrupted", "last whole checkpoint"),
        (KeyError("x"), "failed", "error", "traceback"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else None,
)
def test_exception_is_recorded_with_its_remedy_and_raised_on(tmp_path, error, state, reason, remedy):
    run = open_run("06_train", PARAMS, tmp_path)
    with pytest.raises(type(error)), run:
        raise error
    status = load_run(run.folder).status
    assert (status["status"], status["reason"]) == (state, reason) and remedy in status["remedy"]
    again = open_run("06_train", PARAMS, tmp_path)
    assert again.status == "interrupted" and again.why == reason


def test_a_cause_behind_another_exception_is_found():
    import requests

    error = RuntimeError("generation failed")
    error.__cause__ = requests.exceptions.ConnectionError("refused")
    assert explain_failure(error)[0] == "server unreachable"
    error.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    assert explain_failure(error)[0] == "out of memory"


def test_full_disk_is_recorded_in_the_blocks_that_are_there(tmp_path, monkeypatch):
    run = open_run("06_train", PARAMS, tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError), run:
        run.write_json("receipt.json", {})
    monkeypatch.undo()
    assert load_run(run.folder).status["reason"] == "disk full"


def safetensors(path, broken=False):
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(100)}, path)
    if broken:
        os.truncate(path, path.stat().st_size - 1)


def test_last_checkpoint_is_the_newest_whole_one(tmp_path):
    run = open_run("06_train", PARAMS, tmp_path)
    assert run.last_checkpoint() is None
    for step in (9, 10, 20, 30, 40, 50):
        (run.folder / f"checkpoint-{step}").mkdir()
    (run.folder / "checkpoint-final").mkdir()
    for step in (9, 10, 20, 30, 40):
        (run.folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (run.folder / "checkpoint-40" / "trainer_state.json").write_text('{"cut')
    for step, broken in ((9, False), (10, False), (30, True), (40, False), (50, False)):
        safetensors(run.folder / f"checkpoint-{step}" / "model.safetensors", broken)
    # 50 has no trainer state, 40 a cut one, 30 cut weights, 20 none
    assert run.last_checkpoint() == str(run.folder / "checkpoint-10")
    safetensors(run.folder / "checkpoint-20" / "adapter_model.safetensors")
    assert run.last_checkpoint() == str(run.folder / "checkpoint-20")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (run.folder / "checkpoint-30" / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors(run.folder / "checkpoint-30" / "model-1.safetensors")
    assert run.last_checkpoint() == str(run.folder / "checkpoint-20"), "a shard is missing"
    safetensors(run.folder / "checkpoint-30" / "model-2.safetensors")
    assert run.last_checkpoint() == str(run.folder / "checkpoint-30")


def test_a_checkpoint_in_shards_is_whole_once_both_parts_have_their_metadata(tmp_path):
    run = open_run("06_train", PARAMS, tmp_path)
    checkpoint = run.folder / "checkpoint-7"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert run.last_checkpoint() is None
        (checkpoint / part).mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text("{}")
        (checkpoint / part / ".metadata").touch()
    assert run.last_checkpoint() == str(checkpoint)


TRAINING = """
import os, signal, sys, torch
from transformers import Trainer, TrainingArguments, TrainerCallback
from grpo_lab.runs import open_run

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        loss = ((self.w(x) - labels) ** 2).mean()
        return {"loss": loss, "logits": loss[None]}

class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

run = open_run("06_train", {"seed": 1}, sys.argv[1])
print("STATUS", run.status, run.last_checkpoint(), flush=True)
torch.manual_seed(0)
data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(24)]
args = TrainingArguments(output_dir=str(run.folder), max_steps=6, logging_steps=1, save_steps=2, use_cpu=True,
                         per_device_train_batch_size=4, report_to="none", save_total_limit=2, disable_tqdm=True)
with run:
    trainer = Trainer(Net(), args, train_dataset=data, callbacks=[Killer()])
    run.attach(trainer)
    trainer.train(resume_from_checkpoint=run.last_checkpoint())
    run.finish({"steps": trainer.state.global_step, "w": trainer.model.w.weight})
"""


def train(root, kill_at):
    script = textwrap.dedent(TRAINING)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPO_LAB_HEADLESS": "1"}
    command = [sys.executable, "-c", script, str(root), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])


def test_a_killed_training_resumes_and_ends_where_an_unbroken_one_does(tmp_path):
    killed = train(tmp_path / "a", kill_at=5)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (folder,) = (tmp_path / "a").iterdir()
    assert load_run(folder).status["status"] == "running" and load_run(folder).metrics[-1]["step"] >= 4
    resumed = train(tmp_path / "a", kill_at=0)
    assert resumed.returncode == 0, resumed.stderr
    assert f"STATUS interrupted {folder}/checkpoint-4" in resumed.stdout
    unbroken = train(tmp_path / "b", kill_at=0)
    (other,) = (tmp_path / "b").iterdir()
    one, two = load_run(folder), load_run(other)
    assert one.summary == two.summary and one.status["status"] == "finished"
    losses = [[(r["step"], r["loss"]) for r in record.metrics if "loss" in r] for record in (one, two)]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [1, 2, 3, 4, 5, 6]
    progress = [line for line in unbroken.stdout.splitlines() if line.startswith("step ")]
    assert progress and progress[-1].startswith("step 6/6  loss ")
    assert "{'loss'" not in unbroken.stdout, "the trainer's own rows give way"


def test_a_run_that_another_process_executes_is_refused(tmp_path):
    code = f"open_run('06_train', {PARAMS}, {str(tmp_path)!r}); print(1, flush=True); input()"
    code = "from grpo_lab.runs import open_run; " + code
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "1\n"
        before = {p.name: p.read_bytes() for p in run_folder("06_train", PARAMS, tmp_path).iterdir()}
        with pytest.raises(ValueError, match=f"process {child.pid} on .* is executing this run"):
            open_run("06_train", PARAMS, tmp_path)
        assert before == {p.name: p.read_bytes() for p in run_folder("06_train", PARAMS, tmp_path).iterdir()}
    finally:
        child.kill()
        child.communicate()
    assert open_run("06_train", PARAMS, tmp_path).status == "interrupted"
    assert open_run("06_train", PARAMS, tmp_path).status == "interrupted", "the same process may open its own run again"


def test_load_run_names_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="folder = .* is no run"):
        load_run(tmp_path)
