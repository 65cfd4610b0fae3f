"""The measured clock: the README's ladder says what was measured, of the notebooks as they are."""

import re

import nbformat
import pytest

from grpo_lab.doctor import CLONE
from grpo_lab.lessons import clock
from grpo_lab.runs import read_json

NOTEBOOKS = sorted((CLONE / "notebooks").glob("[0-9]*.ipynb"))
RECORD = read_json(clock.RECORD)
STALE = "measure it: python -m grpo_lab clock, on a machine that does nothing else"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_was_measured_as_it_is(path):
    figures = RECORD["notebooks"].get(path.stem)
    assert figures is not None and figures["code"] == clock.digest(path), STALE
    assert figures["measured"][0] < 180


def test_the_ladder_holds_the_recorded_figures_and_every_notebook(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(clock.README.read_text())
    clock.write_ladder(RECORD, readme)
    assert readme.read_text() == clock.README.read_text(), "python -m grpo_lab clock writes it"
    assert {match[1] for match in clock._ROW.finditer(readme.read_text())} == {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_says_of_itself_is_what_was_measured(path):
    """Within a factor of 1.5 both ways."""
    first = nbformat.read(path, 4).cells[0].source
    gb, number, unit = re.search(
        r"([\d.]+) GB of memory;\s+takes\s+about\s+(\d+)\s+(seconds?|minutes?)", first
    ).groups()
    said = float(number) * (60 if unit.startswith("minute") else 1)
    seconds, size = RECORD["notebooks"][path.stem]["measured"]
    assert said / 1.5 <= seconds <= said * 1.5 and float(gb) / 1.5 <= size / 1e9 <= float(gb) * 1.5


def test_a_run_is_measured(tmp_path):
    work = "import time\nblock = bytearray(300_000_000)\ntime.sleep(1.5)"
    cells = [nbformat.v4.new_code_cell(source) for source in ("smoke = False", work)]
    cells[0].metadata["tags"] = ["parameters"]
    path = tmp_path / "42_toy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    seconds, size = clock.measure(path)
    assert seconds > 1.5 and 0.35e9 < size < 1.5e9
    before = clock.digest(path)
    cells[1].source += "\nraise ValueError('no')"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert clock.digest(path) != before
    with pytest.raises(RuntimeError, match="42_toy failed"):
        clock.measure(path)


def test_figures_in_words():
    assert clock.told(2.4, 4e8) == ("5 s", "0.4 GB") and clock.told(43.9, 1.26e9) == ("45 s", "1.3 GB")
    assert clock.told(58, 1e9)[0] == "1 min" and clock.told(100, 1e9)[0] == "1.5 min"
