"""Exercise notebooks, written from the solved ones, which are their single source: ``python -m grpo_lab exercises``.

In a solved notebook a code cell tagged ``exercise`` begins with two comments, ``# Exercise 2 · ●●○○ · 10 minutes`` and
``# Hint: ...`` (which may go on for lines), and holds its solution between ``### BEGIN SOLUTION`` and
``### END SOLUTION``, once or more. The exercise notebook gets the comments as text, the hint folded away, and stubs.
A cell tagged ``check`` calls ``checks.<name>``. Cells tagged ``solved-only`` are left out; of outputs the pictures
stay, as what one should arrive at. A test holds the two together.
"""

import json
import re
from pathlib import Path

from grpo_lab.doctor import CLONE

HEAD = re.compile(
    r"# Exercise (?P<number>\d+) · (?P<dots>●+○*) · (?P<minutes>\d+) minutes\n# Hint: (?P<hint>(?:.*\n)(?:# .*\n)*)"
)
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?=\d\d_\w+\.ipynb\))")


def tags(cell):
    return cell["metadata"].get("tags", [])


def solved_notebooks(folder=CLONE / "notebooks"):
    """The notebooks with exercises, in order."""
    found = sorted(folder.glob("*.ipynb"))
    return [path for path in found if any("exercise" in tags(cell) for cell in _read(path)["cells"])]


def exercises_of(path):
    """The exercises of a solved notebook: number, dots, minutes, hint, code and check (the name in ``checks``)."""
    found, cells = [], _read(path)["cells"]
    for cell in (cell for cell in cells if "exercise" in tags(cell)):
        source = "".join(cell["source"])
        head = HEAD.match(source)
        if head is None or not SOLUTION.search(source) or len(head["dots"]) != 4:
            raise ValueError(
                f"{path.name}, cell {cell.get('id')}: an exercise begins with `# Exercise 1 · ●○○○ · 5 minutes` and "
                "`# Hint: ...`, and holds lines between `### BEGIN SOLUTION` and `### END SOLUTION`"
            )
        hint = " ".join(line.removeprefix("# ") for line in head["hint"].splitlines())
        found.append({**head.groupdict(), "hint": hint, "code": source[head.end() :]})
    checked = [re.search(r"^checks\.(\w+)\(", "".join(c["source"]), re.MULTILINE) for c in cells if "check" in tags(c)]
    if len(checked) != len(found) or None in checked:
        raise ValueError(f"{path.name}: {len(found)} exercises, and {len(checked)} cells tagged `check` with `checks.`")
    return [exercise | {"check": check[1]} for exercise, check in zip(found, checked)]


def student_notebook(path):
    """The exercise notebook of a solved one, as nbformat's JSON."""
    solved, exercises = _read(path), exercises_of(path)
    minutes = sum(int(exercise["minutes"]) for exercise in exercises)
    intro = (
        f"*{len(exercises)} exercises, {minutes} minutes. [{path.stem}](../{path.name}) has the solutions; stuck? "
        "Copy one and go on. Save this notebook under a name of your own, then go down cell by cell. Where a cell is "
        "unfinished, write the missing lines; the check under it says that they are right, or names the first "
        "wrong number. A picture under a cell that has not run shows what to expect. What you pass is noted in "
        "`progress.jsonl` beside the notebook, and nowhere else. (`make exercises` writes this file: change the solved "
        "notebook instead.)*"
    )
    record = 'checks.record("progress.jsonl")  # beside this notebook'
    cells, upcoming = [], iter(exercises)
    for cell in solved["cells"]:
        if "solved-only" in tags(cell):
            continue
        if "exercise" in tags(cell):
            exercise = next(upcoming)
            if exercise is exercises[0]:  # not earlier: importing checks imports Triton, which the notebook prepares
                cells.append(_code({"id": "exercises-record", "metadata": {}}, record))
            cells.append(_markdown(f"{cell['id']}-text", _text(exercise, len(exercises))))
            cell = _code(cell, SOLUTION.sub(r"\g<1>" + _stub(exercise), exercise["code"]))
        elif cell["cell_type"] == "code":
            cell = _code(cell, "".join(cell["source"]))
        else:
            cell = _markdown(cell["id"], LINK.sub("](../", "".join(cell["source"])))
        cells.append(cell)
        if len(cells) == 1:
            cell["source"][0] = cell["source"][0].rstrip() + ": exercises\n"
            cells.append(_markdown("exercises-text", intro))
    return {**solved, "cells": cells}


def write_exercises(folder=CLONE / "notebooks"):
    """Write ``exercises/`` beside the solved notebooks; the paths. Raises ValueError for one that someone worked in."""
    paths = []
    for solved in solved_notebooks(folder):
        path = folder / "exercises" / solved.name
        if path.exists() and any(cell.get("execution_count") for cell in _read(path)["cells"]):
            raise ValueError(f"{path}: cells of it have run, so someone has worked in it; give it another name first")
        path.parent.mkdir(exist_ok=True)
        path.write_text(as_text(student_notebook(solved)), encoding="utf-8")
        paths.append(path)
    return paths


def as_text(notebook):
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _text(exercise, count):
    return (
        f"**Exercise {exercise['number']} of {count}** · {exercise['dots']} · about {exercise['minutes']} minutes\n\n"
        f"<details><summary>Hint</summary>\n\n{exercise['hint']}\n\n</details>"
    )


def _stub(exercise):
    lines = f"exercise {exercise['number']}: your lines go here"
    return f"pass  # {lines}" if "@triton.jit" in exercise["code"] else f'raise NotImplementedError("{lines}")'


def _code(cell, source):
    pictures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    body = {"execution_count": None, "outputs": pictures, "source": source.splitlines(keepends=True)}
    return {"cell_type": "code", "id": cell["id"], "metadata": cell["metadata"], **body}


def _markdown(name, source):
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source.splitlines(keepends=True)}


def _read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))
