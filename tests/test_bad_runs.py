"""Bad input of a run, by the command line and in a notebook: one clear line, nothing lost, nothing overwritten."""

import json
import os
import time

import pytest
from test_cli import OPEN, WORK, clean_environment, notebook  # noqa: F401

from grpo_lab import cli
from grpo_lab.runs import executing, load_run, open_run, run_folder, set_aside

PARAMS = {"smoke": True, "seed": 0, "learning_rate": 3e-4, "name": "dapo", "limit": None}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FOREIGN = {
    "half a status": ("status.json", '{"status": "run', "status.json cannot be read as JSON"),
    "another status": ("status.json", '["someone", "else"]', "its status.json is no run's"),
    "a state that is none": ("status.json", '{"status": "perhaps"}', "its status.json is no run's"),
    "binary parameters": ("parameters.json", "\0\1\2", "parameters.json cannot be read as JSON"),
    "other parameters": ("parameters.json", json.dumps(PARAMS | {"seed": 1}), "is a run of other parameters: {.*seed"),
}


@pytest.mark.parametrize("file, text, message", FOREIGN.values(), ids=FOREIGN)
def test_a_corrupt_or_foreign_run_folder_is_named_and_left_alone(tmp_path, capsys, file, text, message):
    path, root = notebook(tmp_path, OPEN, WORK), tmp_path / "out"
    folder = open_run("07_toy", PARAMS, root).folder
    (folder / "07_toy.ipynb").write_text("executed before")
    (folder / file).write_text(text)
    before = contents(folder)
    with pytest.raises(ValueError, match=message):
        open_run("07_toy", PARAMS, root)
    assert cli.main(["run", str(path), "--root", str(root)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(folder) in said and "run with --fresh" in said
    assert contents(folder) == before
    aside = set_aside(folder)
    assert contents(aside) == before and open_run("07_toy", PARAMS, root).status == "new"


def test_a_root_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    path = notebook(tmp_path, OPEN, WORK)
    (tmp_path / "file").write_text("mine")
    assert cli.main(["run", str(path), "--root", str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "07_toy-" in said and "cannot be written" in said and "GRPO_LAB_RUNS" in said
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        open_run("07_toy", PARAMS, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)  # root may write everywhere
    with pytest.raises(ValueError, match="cannot be written: Permission denied"):
        open_run("07_toy", PARAMS, tmp_path / "out")


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed: [1]", r"seed = \[1\]: expected int, as its default 0"),
        ("seed: true", "seed = True: expected int"),
        ("smoke: 1", "smoke = 1: expected bool"),
        ("learning_rate: fast", "learning_rate = 'fast': expected float"),
        ("- seed", "expected lines `name: value`, found a list"),
        ("just words", "expected lines `name: value`, found a str"),
        ("a: b: c", "cannot be read as YAML: mapping values are not allowed here"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (None, "cannot be read as YAML: .*Is a directory"),
    ],
)
def test_a_parameter_file_of_the_wrong_kind_is_refused(tmp_path, capsys, text, message):
    import re

    path, file = notebook(tmp_path, OPEN, WORK), tmp_path / "few.yaml"
    file.mkdir() if text is None else file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["run", str(path), "-f", str(file), "--root", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_file_that_is_no_notebook_is_refused(tmp_path, capsys):
    (tmp_path / "a.ipynb").write_text("{")
    assert cli.main(["run", str(tmp_path / "a.ipynb"), "--root", str(tmp_path / "out")]) == 2
    assert "is no notebook" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_clock_that_went_back_harms_nothing(tmp_path, monkeypatch):
    run = open_run("07_toy", PARAMS, tmp_path)
    run.log(1, loss=1.0)
    now, stamp = time.time(), time.strftime
    monkeypatch.setattr(time, "time", lambda: now - 10**6)
    monkeypatch.setattr(time, "strftime", lambda form, *_: stamp(form, time.gmtime(now - 10**6)))
    run.log(2, loss=2.0)
    child = os.fork()
    if not child:  # the lock holds, whatever a process's start is said to have been
        os._exit(int("process" not in (executing(run.folder) or "")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run.finish({})
    record = load_run(run.folder)
    assert record.status["seconds"] >= 0 and [row["step"] for row in record.metrics] == [1, 2]
    assert open_run("07_toy", PARAMS, tmp_path).status == "finished"
    kept = []
    for _ in range(2):  # in the same second
        kept.append(set_aside(run.folder))
        open_run("07_toy", PARAMS, tmp_path)
    assert len(set(kept)) == 2 and all((path / "status.json").exists() for path in kept)


def test_an_attempt_that_begins_again_keeps_the_rows_of_the_first(tmp_path):
    run = open_run("07_toy", PARAMS, tmp_path)
    run.log(1, loss=1.0)
    run.log(None, note="made before training")
    run.fail("interrupted", "", "")
    again = open_run("07_toy", PARAMS, tmp_path)
    again.log(1, loss=3.0)
    assert [row["loss"] for row in load_run(run.folder).metrics] == [3.0]
    assert '"loss": 1.0' in (run.folder / "metrics.jsonl").read_text(), "in the file they stay"


def test_what_ran_before_a_change_of_the_machine_is_kept(tmp_path, monkeypatch):
    from grpo_lab.runs import run as runs

    describe = runs.describe_environment
    run = open_run("07_toy", PARAMS, tmp_path)
    run.fail("interrupted", "", "")
    open_run("07_toy", PARAMS, tmp_path).fail("interrupted", "", "")
    assert not list(run.folder.glob("environment-*")), "the same machine and code"
    monkeypatch.setattr(runs, "describe_environment", lambda: describe() | {"commit": "f" * 40})
    monkeypatch.setattr(runs, "uncommitted", lambda: "diff --git a b")
    open_run("07_toy", PARAMS, tmp_path)
    assert (run.folder / "changes.diff").read_text() == "diff --git a b"
    first, second = (json.loads((run.folder / f"environment{n}.json").read_text())["commit"] for n in ("-1", ""))
    assert first != second == "f" * 40


def test_the_uncommitted_changes_are_a_patch(tmp_path):
    import subprocess

    from grpo_lab.doctor import CLONE, uncommitted

    patch = uncommitted()
    changed = subprocess.run(["git", "diff", "HEAD", "--stat"], cwd=CLONE, capture_output=True, text=True).stdout
    assert bool(patch) == bool(changed)
    if patch:
        check = ["git", "apply", "--check", "--reverse", "-"]
        assert subprocess.run(check, cwd=CLONE, input=patch, text=True).returncode == 0


def test_two_kernels_cannot_execute_one_run(tmp_path, capsys):
    path, root = notebook(tmp_path, OPEN, WORK), tmp_path / "out"
    open_run("07_toy", PARAMS, root)
    folder = run_folder("07_toy", PARAMS, root)
    before = contents(folder)
    child = os.fork()
    if not child:
        os._exit(cli.main(["run", str(path), "--root", str(root)]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2 and contents(folder) == before
