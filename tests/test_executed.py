"""What papermill does, also by itself: parameters that the notebook lacks, and copies that open without a network."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from test_cli import OPEN, PARAMETERS, WORK, notebook

from grpo_lab.runs import load_run
from grpo_lab.runs.executed import FORMULA, check_injected, to_html

ROOT = Path(__file__).resolve().parents[1]


def papermill(folder, *arguments):
    """Plain papermill, as a user calls it: with a relative output, from a folder of his own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRPO_LAB_RUNS": str(folder / "runs"), "PWD": str(folder)}
    environment.pop("GRPO_LAB_COMMAND", None)
    command = [sys.executable, "-m", "papermill", "07_toy.ipynb", "out.ipynb", "-k", "python3", "-l", "python"]
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_plain_papermill_makes_the_same_run_folder(tmp_path):
    notebook(tmp_path, OPEN, WORK)
    (tmp_path / "few.yaml").write_text("seed: 4\nlearning_rate: 1.0e-3\n")
    done = papermill(tmp_path, "-f", "few.yaml", "-p", "smoke", "False")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    record = load_run(folder)
    assert record.status["status"] == "finished"
    assert record.parameters == {"smoke": False, "seed": 4, "learning_rate": 1e-3, "name": "dapo", "limit": None}
    deadline = time.monotonic() + 60  # a process of its own makes the copies when the kernel has ended
    while not (folder / "07_toy.html").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    copy = nbformat.read(folder / "07_toy.ipynb", 4)
    assert "working in" in copy.cells[-1].outputs[0].text and "working in" in (folder / "07_toy.html").read_text()


def test_a_misspelt_parameter_ends_plain_papermill_before_there_is_a_run(tmp_path):
    notebook(tmp_path, OPEN, WORK)
    done = papermill(tmp_path, "-p", "sede", "3")
    said = "parameter sede: the notebook has none of this name; did you mean seed? It has: smoke, seed,"
    assert done.returncode and said in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "injected, message",
    [
        ("quite_other = 1", "parameter quite_other: the notebook has none of this name; It has: smoke"),
        ('smoke = "false"', "smoke = 'false' is text: expected bool. papermill takes True, not true"),
        ('learning_rate = "1e-4"', "learning_rate = '1e-4' is text: expected float.*1.0e-6, not 1e-6"),
        ("seed = [1]", r"seed = \[1\]: expected int, as its default 0"),
        ('seed = 3\nname = "grpo"\nlimit = "12"\nlearning_rate = 1', None),
    ],
)
def test_injected_parameters_have_the_notebook_s_names_and_types(monkeypatch, injected, message):
    import IPython

    cells = ["", PARAMETERS, f"# Parameters\n{injected}\n", "open_run()"]
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(user_ns={"In": cells}))
    params = dict.fromkeys(("smoke", "seed", "learning_rate", "name", "limit"))
    if message is None:
        return check_injected(params)
    with pytest.raises(ValueError, match=message) as error:
        check_injected(params)
    assert "\n" not in str(error.value)


def test_the_html_copy_fetches_nothing_and_shows_formulas_and_pictures(tmp_path):
    v4 = nbformat.v4
    plotly = v4.new_output("display_data", {"application/vnd.plotly.v1+json": {"data": []}, "text/plain": "<inter>"})
    picture = v4.new_output("display_data", {"image/png": "aGVsbG8=", "text/plain": "<picture>"})
    cells = [
        v4.new_markdown_cell(
            "# Title\n\nThe loss $\\frac{a_i}{2}$, and\n$$x^2$$\ncosts $5 or $6. [link](https://x.org)"
        ),
        v4.new_code_cell("'<script>'", outputs=[picture, plotly], execution_count=1),
    ]
    path = tmp_path / "06_x.ipynb"
    nbformat.write(v4.new_notebook(cells=cells, metadata={"widgets": {"a": {}}}), path)
    page = to_html(path)
    assert page == tmp_path / "06_x.html"
    text = page.read_text()
    assert "<mfrac>" in text and text.count("<math") == 2 and "costs $5 or $6." in text
    assert "data:image/png;base64,aGVsbG8=" in text and "inter" not in re.sub(
        r"<style.*?</style>", "", text, flags=re.S
    )
    assert not re.findall(r"<script|<link|<iframe|@import|url\(\s*['\"]?(?!data:|['\"]?data:)[^)]", text)
    fetched = [address for address in re.findall(r"\bsrc=[\"']([^\"']*)", text) if not address.startswith("data:")]
    assert fetched == [] and 'href="https://x.org"' in text


@pytest.mark.parametrize("text, found", [("a $x$ b", ["x"]), ("$5 and $6", []), ("$ x $", []), ("\\$x$", []),
                                         ("$a\nb$", ["a\nb"]), ("$a\n\nb$", [])])  # fmt: skip
def test_dollars_that_are_formulas(text, found):
    assert [match[2] for match in FORMULA.finditer(text)] == found
