import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from grpo_lab import cli
from grpo_lab.runs import executing, load_run, run_folder
from grpo_lab.runs.parameters import typed

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

PARAMETERS = """smoke = True  # bool
seed = 0  # int
learning_rate = 3e-4  # float
name = "dapo"  # loss type
limit = None  # int or None"""
OPEN = """from grpo_lab.runs import open_run
run = open_run("07_toy", dict(smoke=smoke, seed=seed, learning_rate=learning_rate, name=name, limit=limit))"""
WORK = """import os
with run:
    print("working in", os.path.basename(os.getcwd()))
    (run.folder / "curve.png").write_bytes(b"")
    run.finish({"accuracy_before": 0.25, "accuracy_after": 0.75, "steps": 10 + seed, "inner": {"a": 1}})"""


def notebook(folder, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, *sources)]
    cells[0].metadata["tags"] = ["parameters"]
    path = folder / "07_toy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("GRPO_LAB_RUNS", "GRPO_LAB_HEADLESS", "GRPO_LAB_COMMAND", "PYDEVD_DISABLE_FILE_VALIDATION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def folder_of(root):
    (folder,) = Path(root).iterdir()
    return folder


def test_run_executes_into_the_folder_that_the_notebook_names_and_shows_it_again(tmp_path, capfd):
    path = notebook(tmp_path, OPEN, WORK)
    yaml = tmp_path / "few.yaml"
    yaml.write_text("seed: 4\nlearning_rate: 1e-3\n")
    command = ["run", str(path), "-f", str(yaml), "-p", "seed", "5", "--root", str(tmp_path / "out")]
    assert cli.main(command) == 0
    out = capfd.readouterr().out
    folder = folder_of(tmp_path / "out")
    record = load_run(folder)
    assert record.parameters == {"smoke": True, "seed": 5, "learning_rate": 1e-3, "name": "dapo", "limit": None}
    assert folder == run_folder("07_toy", record.parameters, tmp_path / "out")
    assert record.environment["command"].startswith("python -m grpo_lab")
    executed = nbformat.read(folder / "07_toy.ipynb", 4)
    assert executed.cells[1].metadata.tags == ["injected-parameters"]
    assert f"working in {tmp_path.name}" in out, "a notebook runs in its own folder, as in JupyterLab"
    for line in ("accuracy: 0.25 before, 0.75 after", "steps: 15", "curve.png", "07_toy.ipynb", "took: "):
        assert line in out
    started = time.perf_counter()
    assert cli.main(command) == 0
    assert "has finished with these parameters" in (out := capfd.readouterr().out) and "steps: 15" in out
    assert time.perf_counter() - started < 1
    assert "its code has changed" not in out
    notebook(tmp_path, OPEN, WORK + "\n1 + 1")
    assert cli.main(command) == 0
    assert "07_toy: its code has changed since these parameters were run; --fresh" in capfd.readouterr().out
    assert cli.main([*command, "--fresh"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [folder.name, "replaced"]


def test_failure_is_one_line_with_its_remedy_and_a_status(tmp_path, capfd):
    fault = 'raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB\\nmore")'
    path = notebook(tmp_path, OPEN, fault)
    assert cli.main(["run", str(path), "--root", str(tmp_path / "out")]) == 1
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("07_toy: ")]
    assert err == ["07_toy: out of memory: RuntimeError: CUDA out of memory. Tried to allocate 9 GiB"]
    folder = folder_of(tmp_path / "out")
    assert load_run(folder).status["reason"] == "out of memory" and (folder / "07_toy.ipynb").exists()


def test_dead_kernel_is_recorded(tmp_path, capfd):
    path = notebook(tmp_path, OPEN, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert cli.main(["run", str(path), "--root", str(tmp_path / "out")]) == 1
    assert "07_toy: kernel died" in capfd.readouterr().err
    assert load_run(folder_of(tmp_path / "out")).status["reason"] == "kernel died"


def test_a_kernel_that_does_not_start_is_recorded(tmp_path, capfd, monkeypatch):
    import papermill

    def execute_notebook(*args, **options):
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(papermill, "execute_notebook", execute_notebook)
    assert cli.main(["run", str(notebook(tmp_path, OPEN, WORK)), "--root", str(tmp_path / "out")]) == 1
    assert "07_toy: no kernel: Kernel died before" in capfd.readouterr().err
    assert load_run(folder_of(tmp_path / "out")).status["reason"] == "no kernel"


def test_notebook_without_a_run_gets_its_folder_all_the_same(tmp_path):
    assert cli.main(["run", str(notebook(tmp_path, "1 + 1")), "--root", str(tmp_path / "out")]) == 0
    assert load_run(folder_of(tmp_path / "out")).status["status"] == "finished"


def test_notebook_that_forgets_a_parameter_is_told(tmp_path, capfd):
    path = notebook(tmp_path, OPEN.replace("seed=seed, ", ""), WORK)
    assert cli.main(["run", str(path), "--root", str(tmp_path / "out")]) == 1
    assert "hand open_run all of its parameters" in capfd.readouterr().err


def test_stop_from_the_keyboard_ends_the_kernel_and_leaves_an_interrupted_run(tmp_path):
    path = notebook(tmp_path, OPEN, "import time; print('asleep', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "grpo_lab", "run", str(path), "--root", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    for line in process.stdout:
        if "asleep" in line:
            break
    folder = folder_of(tmp_path / "out")
    kernel = load_run(folder).status["pid"]
    assert executing(folder).startswith(f"process {kernel} on ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "07_toy: interrupted" in err, err
    assert load_run(folder).status["status"] == "interrupted" and executing(folder) is None
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)


def test_the_command_after_a_killed_one_waits_for_its_kernel_to_end(tmp_path):
    wait = "import os, time\nif not os.path.exists('go'):\n    print('asleep', flush=True); time.sleep(60)"
    path = notebook(tmp_path, OPEN, wait, WORK)
    command = [sys.executable, "-m", "grpo_lab", "run", str(path), "--root", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    for line in process.stdout:
        if "asleep" in line:
            break
    (tmp_path / "go").touch()
    process.kill()
    process.wait()
    assert executing(folder_of(tmp_path / "out")), "the kernel lives on for a moment"
    assert subprocess.run(command, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "sede", "3"], "did you mean seed?"),
        (["-p", "quite_other", "3"], "It has: smoke, seed, learning_rate, name, limit"),
        (["-p", "seed", "three"], "seed = 'three': expected int"),
        (["-p", "seed", "1.5"], "seed = '1.5': expected int"),
        (["-p", "smoke", "1"], "smoke = '1': expected bool"),
        (["-p", "learning_rate", "nan"], "finite"),
        (["-f", "no_such.yaml"], "-f no_such.yaml: cannot be read"),
    ],
)
def test_bad_requests_say_what_to_do(tmp_path, capsys, arguments, message):
    path = notebook(tmp_path, OPEN, WORK)
    assert cli.main(["run", str(path), *arguments, "--root", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "default, text, value",
    [
        (True, "false", False),
        (0, " 12 ", 12),
        (3e-4, "1e-3", 1e-3),
        (3e-4, "1", 1.0),
        ("dapo", "12", "12"),
        (None, "12", 12),
        (None, "none", None),
        (5, -3, -3),
        ([1], "[1, 2]", [1, 2]),
        ([1], [1, 2], [1, 2]),
        (0.5, 1, 1.0),
    ],
)
def test_values_take_the_type_of_the_default(default, text, value):
    found = typed("x", text, default)
    assert found == value and type(found) is type(value)


def test_notebooks_are_found_by_number_name_or_path(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    for name in ("06_train", "07_a", "07_b"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("{}")
    monkeypatch.setattr(cli, "CLONE", tmp_path)
    assert cli.find_notebook("06") == cli.find_notebook("06_train.ipynb") == tmp_path / "notebooks" / "06_train.ipynb"
    for name, message in (
        ("07", "more than one begins so; expected one of 07_a, 07_b"),
        ("09", "expected one of 06_t"),
    ):
        with pytest.raises(ValueError, match=message):
            cli.find_notebook(name)
    monkeypatch.setattr(cli, "CLONE", tmp_path / "site-packages")
    with pytest.raises(ValueError, match="installed without its repository"):
        cli.find_notebook("06")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_every_notebook_hands_open_run_exactly_its_parameters(path):
    """Else the command line and the notebook would name two folders."""
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    trees = [ast.parse(c) for c in code if "open_run(" in c]
    if not trees:
        pytest.skip("opens no run")
    calls = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Call)]
    (call,) = [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", "")) == "open_run"]
    assert ast.literal_eval(call.args[0]) == path.stem
    pairs = call.args[1]
    if isinstance(pairs, ast.Name):
        assigned = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Assign)]
        (pairs,) = [a.value for a in assigned if ast.unparse(a.targets[0]) == pairs.id]
    if isinstance(pairs, ast.Call):
        names = {k.arg: ast.unparse(k.value) for k in pairs.keywords}
    else:
        names = {ast.literal_eval(k): ast.unparse(v) for k, v in zip(pairs.keys, pairs.values)}
    assert names == {name: name for name in cli.notebook_parameters(path)}


@pytest.mark.parametrize("command", ["run 06 --root {}", "sweep 06 -g seed 0 --root {}"])
def test_another_python_than_the_one_of_make_is_told_apart(command, tmp_path):
    command = [sys.executable, "-S", "-m", "grpo_lab", *command.format(tmp_path).split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 2 and ".venv/bin/activate" in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.rglob("*.json")), "no run has begun"
