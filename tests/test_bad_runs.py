"""Bad input of a run, by the command line and in a notebook: one clear line, nothing lost, nothing overwritten."""

import json
import os
import time
from pathlib import Path

import nbformat
import pytest
from test_cli import OPEN, WORK, clean_environment, notebook  # noqa: F401

from grpo_lab import cli
from grpo_lab.runs import executing, load_run, open_run, run_folder, set_aside
from grpo_lab.runs.parameters import notebook_parameters

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
        ("false", "expected lines `name: value`, found a bool"),
        ("name:", "name = None: expected str, as its default 'dapo'"),
        ("seed: 1\nname: grpo\nseed: 2", "few.yaml: seed is given twice"),
        ("name: no", "name = False: expected str"),
        ("name: [dapo, grpo]", r"name = \['dapo', 'grpo'\]: expected str"),
        ("seed: 3\n\tsmoke: true", "cannot be read as YAML: .*line 2"),
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


@pytest.mark.parametrize("line", ["seed = ", "seed, smoke = 0, True", "seed = 2 * smoke", "%load_ext x"])
def test_a_parameters_cell_that_is_not_plain_is_named(tmp_path, capsys, line):
    path = notebook(tmp_path, OPEN, WORK)
    nb = nbformat.read(path, 4)
    nb.cells[0].source = "smoke = True\n" + line
    nbformat.write(nb, path)
    assert cli.main(["run", str(path), "--root", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: parameters cell, line 2: expected `name = literal`, such as `seed = 0`\n"
    nb.cells[0].source = "smoke: bool = True\nseed: int = 0"
    nbformat.write(nb, path)
    assert notebook_parameters(path) == {"smoke": True, "seed": 0}


SHOWING = """with run:
    if run.status != "finished":
        run.log(1, loss=1.0)
        run.finish({"accuracy_after": 0.75})
print("shown")"""


def test_a_run_that_was_killed_while_its_notebook_was_saved_gets_it_again(tmp_path, capfd):
    path, command = notebook(tmp_path, OPEN, SHOWING), ["run", str(tmp_path / "07_toy.ipynb"), "--root", str(tmp_path)]
    assert cli.main(command) == 0
    folder = run_folder("07_toy", PARAMS, tmp_path)
    executed, html, metrics = (folder / f"{name}" for name in ("07_toy.ipynb", "07_toy.html", "metrics.jsonl"))
    rows, whole = metrics.read_text(), executed.read_text()
    executed.write_text(whole[: len(whole) // 2])
    html.unlink()  # it is gone until the notebook is whole
    capfd.readouterr()
    assert cli.main(command) == 0 and "finished, but for its executed notebook" in capfd.readouterr().out
    assert "shown" in html.read_text() and nbformat.read(executed, 4).cells[-1].outputs[0].text == "shown\n"
    assert metrics.read_text() == rows and path.exists(), "nothing was trained again"
    assert cli.main(command) == 0 and "has finished with these parameters" in capfd.readouterr().out


def test_a_disk_that_fills_under_the_executed_notebook_is_told_in_few_lines(tmp_path, capfd, monkeypatch):
    import papermill

    def execute_notebook(path, output, *args, **options):
        Path(output).write_text("{half")
        raise OSError(28, "No space left on device")

    path = notebook(tmp_path, OPEN, WORK)
    monkeypatch.setattr(papermill, "execute_notebook", execute_notebook)
    assert cli.main(["run", str(path), "--root", str(tmp_path / "out")]) == 1
    said = capfd.readouterr().err
    assert "07_toy: disk full: " in said and "no HTML copy: " in said and said.count("\n") == 4
    assert load_run(run_folder("07_toy", PARAMS, tmp_path / "out")).status["reason"] == "disk full"


def test_a_file_system_that_refuses_is_named_in_a_line(tmp_path, capsys):
    path = notebook(tmp_path, OPEN, WORK)
    run = open_run("07_toy", PARAMS, tmp_path)
    run.finish({})
    (tmp_path / "replaced").write_text("mine")
    assert cli.main(["run", str(path), "--root", str(tmp_path), "--fresh"]) == 2
    assert cli.main(["sweep", str(path), "--root", str(tmp_path / "replaced")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("error: ") and "replaced" in line for line in said)
    assert run.folder.exists() and (tmp_path / "replaced").read_text() == "mine"


def test_a_summary_that_is_none_is_refused_before_the_run_is_called_finished(tmp_path):
    run = open_run("07_toy", PARAMS, tmp_path)
    with pytest.raises(ValueError, match="summary = .*expected a dict"):
        run.finish([1])
    assert load_run(run.folder).status["status"] == "running"


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
