"""Exercises: written from the solved notebooks without drift; every check is passed by its solution and never by the
unfilled exercise; and typical mistakes are told the first wrong number and where it comes from."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mistakes import MISTAKES

from grpo_lab import cli, kernels
from grpo_lab.lessons import checks, exercises, grading, progress

ROOT = Path(__file__).resolve().parents[1]
SOLVED = exercises.solved_notebooks()
EXERCISES = [(path, exercise) for path in SOLVED for exercise in exercises.exercises_of(path)]
each = pytest.mark.parametrize("path, exercise", EXERCISES, ids=[e["check"] for _, e in EXERCISES])
TRITON = kernels.triton is not None
PRELUDE = "import torch\nimport torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint\n"
PRELUDE += "import triton\nimport triton.language as tl\n" if TRITON else "triton = None\n"


def on_kernels(check):
    return check in ("row_max", "row_stats", "logits_grad_", "logps_and_grad_")


@pytest.fixture
def defined(tmp_path):
    """``defined(path, check, code)``: the function that the check tries, after the exercises of the notebook were
    defined with ``code`` in the place of this one's."""

    def load(path, check, code=None):
        sources = [code if e["check"] == check and code else e["code"] for e in exercises.exercises_of(path)]
        file = tmp_path / f"cells_{len(list(tmp_path.iterdir()))}.py"  # Triton reads a kernel's source from its file
        file.write_text("\n".join([PRELUDE, *sources]))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, check)

    return load


def exercise_of(check):
    return next((path, exercise) for path, exercise in EXERCISES if exercise["check"] == check)


def test_the_committed_exercises_are_those_of_the_solved_notebooks():
    """`make exercises` repairs this."""
    folder = ROOT / "notebooks" / "exercises"
    assert [p.name for p in sorted(folder.glob("*.ipynb"))] == [p.name for p in SOLVED] and len(SOLVED) >= 2
    for path in SOLVED:
        written = (folder / path.name).read_text(encoding="utf-8")
        assert written == exercises.as_text(exercises.student_notebook(path)), (
            f"{path.name} has drifted: make exercises"
        )


def test_exercise_notebooks_are_light_and_give_nothing_away():
    import nbformat

    for path in SOLVED:
        text = (ROOT / "notebooks" / "exercises" / path.name).read_text(encoding="utf-8")
        notebook = json.loads(text)
        code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        assert len(text.encode()) < 500_000 and "SOLUTION" not in text and "open_run" not in text
        assert all(c["execution_count"] is None for c in code)
        assert all(set(o["data"]) == {"image/png", "text/plain"} for c in code for o in c["outputs"])
        for cell in code:
            cell["outputs"] = []  # pictures take the validator seconds
        nbformat.validate(nbformat.from_dict(notebook))
        for link in re.findall(r"\]\(([^)#]+\.ipynb)\)", text):
            assert (ROOT / "notebooks" / "exercises" / link).resolve().exists(), link


def test_each_notebook_has_two_to_six_exercises_that_grow_harder():
    for path in SOLVED:
        found = exercises.exercises_of(path)
        assert [int(e["number"]) for e in found] == list(range(1, len(found) + 1))
        dots = [e["dots"].count("●") for e in found]
        assert 2 <= len(found) <= 6 and dots[0] == 1 < max(dots)
        assert all(5 <= int(e["minutes"]) <= 20 and len(e["hint"]) > 40 for e in found)


@each
def test_the_solution_passes_again_and_again(path, exercise, defined, capsys):
    function = defined(path, exercise["check"])
    for _ in range(3):
        getattr(checks, exercise["check"])(function)
    out = capsys.readouterr().out
    assert out.count("not checked here" if on_kernels(exercise["check"]) and not TRITON else ": passed, in") == 3


@each
def test_the_unfilled_exercise_does_not_pass(path, exercise, defined, tmp_path):
    if on_kernels(exercise["check"]) and not TRITON:
        pytest.skip("Triton is not installed")
    notebook = exercises.student_notebook(path)
    stub = next(
        "".join(c["source"]) for c in notebook["cells"] if f"exercise {exercise['number']}:" in "".join(c["source"])
    )
    with pytest.raises(grading.CheckFailed, match="filled in"):
        getattr(checks, exercise["check"])(defined(path, exercise["check"], stub))


@pytest.mark.parametrize("check, right, wrong, said", MISTAKES, ids=[f"{m[0]}-{i}" for i, m in enumerate(MISTAKES)])
def test_a_typical_mistake_is_named(check, right, wrong, said, defined):
    if on_kernels(check) and not TRITON:
        pytest.skip("Triton is not installed")
    path, exercise = exercise_of(check)
    assert exercise["code"].count(right) >= 1, "the solution has changed: this mistake needs other words"
    with pytest.raises(grading.CheckFailed, match=said):
        getattr(checks, check)(defined(path, check, exercise["code"].replace(right, wrong)))


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter runs what a compiler refuses. Compiling needs no GPU, but Triton without its interpreter."""
    (path,) = (path for path in SOLVED if path.name.startswith("03"))
    file = tmp_path / "kernels_of_03.py"
    compile_all = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pointers = dict.fromkeys(("lse_ptr", "logp_ptr", "entropy_ptr", "out_ptr", "c_ptr"), "*fp32")
types = {"z_ptr": "*bf16", "ids_ptr": "*i64", "stride": "i32", "V": "i32", "inv_t": "fp32", "BLOCK": "constexpr"}
for kernel in (row_max_kernel, stats_kernel, grad_kernel, fused_kernel):
    signature = {name: (types | pointers)[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index("BLOCK"),): 1024})
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
"""
    file.write_text("\n".join([PRELUDE, *(e["code"] for e in exercises.exercises_of(path)), compile_all]))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    result = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_students_own_error_keeps_its_traceback():
    def broken(hidden, weight, ids):
        return hidden @ weight

    with pytest.raises(RuntimeError) as caught:
        checks.naive_logps(broken)
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_what_is_no_function_and_a_file_that_cannot_be_written(tmp_path, defined, capsys):
    with pytest.raises(grading.CheckFailed, match="hand in the function itself, .* a Tensor"):
        checks.pack(torch.ones(3))
    try:
        checks.record(tmp_path / "gone" / "progress.jsonl")
        checks.pack(defined(exercise_of("pack")[0], "pack"))
    finally:
        checks.record(None)
    assert re.search(r"not noted: .*No such file.*\n.*pack: passed", capsys.readouterr().out)


def test_a_notebook_shows_the_message_and_no_traceback():
    failure = grading.CheckFailed("logps[3]: got 1, expected 2. " + "A long explanation. " * 9)
    (text,) = failure._render_traceback_()
    assert "logps[3]" in text and max(map(len, text.split("\n"))) < 120, "JupyterLab would break a word"


def test_tries_are_noted_and_become_the_table_of_the_class(tmp_path, defined, capsys):
    path, exercise = exercise_of("naive_logps")
    right = defined(path, "naive_logps")
    files = {
        "anna": tmp_path / "class" / "anna.jsonl",
        "bo": tmp_path / "class" / "bo" / "exercises" / "progress.jsonl",
    }
    try:
        for student, tries in {"anna": (None, right), "bo": (lambda *a: torch.zeros(1),)}.items():
            files[student].parent.mkdir(parents=True, exist_ok=True)
            checks.record(files[student])
            for function in tries:
                try:
                    checks.naive_logps(function or (lambda *a: 1 / 0))
                except (grading.CheckFailed, ZeroDivisionError):
                    pass
    finally:
        checks.record(None)
    with files["bo"].open("a") as file:
        file.write('{"check": "pack", "passed": tr')  # a killed kernel
    rows = [json.loads(line) for line in files["anna"].read_text().splitlines()]
    assert [(r["check"], r["passed"]) for r in rows] == [("naive_logps", False), ("naive_logps", True)]
    assert rows[0]["message"].startswith("ZeroDivisionError")

    command = [sys.executable, "-m", "grpo_lab", "progress", str(tmp_path / "class")]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    header = [f"{path.name[:2]}.{exercise['number']}" for path, exercise in EXERCISES]
    assert lines[0].split()[1 : 1 + len(header)] == header
    tried = dict(zip(header, re.split(r" +", lines[1])[1:])), dict(zip(header, re.split(r" +", lines[2])[1:]))
    assert [row["02.1"] for row in tried] == ["2", "(1)"] and [row["02.2"] for row in tried] == [".", "."]
    assert f" 1/{len(header)} " in lines[1] and f" 0/{len(header)} " in lines[2]
    assert "02.1 naive_logps: 1 of 2 passed" in lines
    assert any("1 stuck, such as: logps: got shape (1,), expected (7,)" in line for line in lines)


def test_the_same_mistake_is_counted_once_whatever_its_numbers():
    def tries(value):
        message = f"logps[{value}]: got -{value}.5e-07, expected 1.25. The sign is turned round."
        return [{"check": "pack", "passed": False, "message": message, "time": f"2026-01-0{value}T10:00:00"}]

    lines = progress.table({f"student {i}": tries(i) for i in range(1, 6)}).splitlines()
    assert [line for line in lines if "stuck" in line] == [
        "     5 stuck, such as: logps[1]: got -1.5e-07, expected 1.25. The sign is turned round."
    ]


def test_a_strange_progress_file_does_not_spoil_the_table(tmp_path):
    rows = [{"check": ["pack"], "passed": "yes", "message": {"a": 1}, "time": 7}, [], 5, None]
    rows.append(
        {"check": "pack", "passed": False, "message": "red \x1b[31m\nand a new line", "time": "2026-01-01T10:00:00"}
    )
    (tmp_path / "eve.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\x00{")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    students = progress.collected([tmp_path, tmp_path / "eve.jsonl"])
    assert list(students) == ["eve"] and len(students["eve"]) == 2
    assert "     1 stuck, such as: red [31m and a new line" in progress.table(students).splitlines()


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        cli, "write_exercises", lambda: [cli.CLONE / "notebooks" / "exercises" / "02_chunked_loss.ipynb"]
    )
    assert cli.main(["exercises"]) == 0
    assert capsys.readouterr().out == "notebooks/exercises/02_chunked_loss.ipynb\n"
    assert cli.main(["progress", str(tmp_path / "nobody")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_progress_of_nothing_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        progress.collected([tmp_path / "nobody"])
    with pytest.raises(ValueError, match="holds no progress.jsonl"):
        progress.collected([tmp_path])


def test_an_exercise_without_hint_or_solution_is_refused_by_name(tmp_path):
    cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {"tags": ["exercise"]},
        "source": "# Exercise 1\n",
        "outputs": [],
    }
    path = tmp_path / "09_new.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match="09_new.ipynb, cell a: an exercise begins with"):
        exercises.exercises_of(path)


def test_a_notebook_that_someone_worked_in_is_not_overwritten(tmp_path):
    for path in SOLVED[:1]:
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (written,) = exercises.write_exercises(tmp_path)
    notebook = json.loads(written.read_text(encoding="utf-8"))
    next(c for c in notebook["cells"] if c["cell_type"] == "code")["execution_count"] = 3
    written.write_text(json.dumps(notebook), encoding="utf-8")
    with pytest.raises(ValueError, match="someone has worked in it"):
        exercises.write_exercises(tmp_path)
