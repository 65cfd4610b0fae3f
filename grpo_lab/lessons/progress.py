"""Who has passed which exercise: a JSON line for each try in a file beside the notebook, and the table of a class.

``python -m grpo_lab progress FOLDER...`` prints the table from the files that a teacher has collected. Nothing leaves
the computer.
"""

import json
import re
import time
from pathlib import Path

from grpo_lab.lessons.exercises import exercises_of, solved_notebooks

PROGRESS = "progress.jsonl"
GENERAL = ("progress", "exercises", "notebooks")  # names that tell no student from another


def note(path, check, passed, message):
    """Append one try to the student's file; where it cannot be written, say so: the check counts all the same."""
    row = {"check": check, "passed": passed, "message": message, "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"(This try is not noted: {error})")


def read(path):
    """The tries in a student's file, in order; lines that are none (a half-written last one) are left out."""
    tries = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            check, passed, message, when = (row[name] for name in ("check", "passed", "message", "time"))
        except (ValueError, KeyError, TypeError):
            continue
        text = "".join(
            c for c in " ".join(str(message).split()) if c.isprintable()
        )  # it goes to the teacher's terminal
        tries.append({"check": check, "passed": passed is True, "message": text, "time": str(when)[:19]})
    return tries


def collected(paths):
    """Student's name to tries. The name is the file's, or else the nearest folder's that tells one: ``anna.jsonl`` and
    ``anna/notebooks/exercises/progress.jsonl`` are both anna's."""
    tries = {}
    for given in map(Path, paths):
        if not given.exists():
            raise ValueError(f"{given}: no such file or folder")
        files = [given] if given.is_file() else sorted(path for path in given.rglob("*.jsonl") if path.is_file())
        found = {file.resolve(): read(file) for file in files}
        if not any(found.values()):
            raise ValueError(f"{given}: holds no {PROGRESS} as the exercises' checks write it")
        tries |= found
    students = {}
    for file, rows in tries.items():
        if rows:  # other .jsonl files may lie about
            names = (name for name in (file.stem, *(p.name for p in file.parents)) if name not in GENERAL)
            students.setdefault(next(names), []).extend(rows)
    return students


def table(students):
    """The class as text: a row for each student, a column for each exercise, then how each exercise went."""
    columns = {}  # check -> "02.1"
    for path in solved_notebooks():
        columns |= {e["check"]: f"{path.stem[:2]}.{e['number']}" for e in exercises_of(path)}
    width = max(map(len, ("student", *students)))
    lines = [f"{'student':{width}}  " + " ".join(f"{c:>4}" for c in columns.values()) + "  passed  last try"]
    stuck = {check: [] for check in columns}
    passes = dict.fromkeys(columns, 0)
    for student, tries in sorted(students.items()):
        cells = []
        for check in columns:
            mine = [row for row in tries if row["check"] == check]
            until = next((i for i, row in enumerate(mine, 1) if row["passed"]), None)
            passes[check] += until is not None
            if mine and until is None:
                stuck[check].append(mine[-1]["message"])
            cells.append(str(until) if until else f"({len(mine)})" if mine else ".")
        done = sum(cell.isdigit() for cell in cells)
        last = max((row["time"] for row in tries), default="").replace("T", " ")
        lines.append(
            f"{student:{width}}  " + " ".join(f"{c:>4}" for c in cells) + f"  {done:>3}/{len(columns)}  {last}"
        )
    lines += ["", "3: passed at the third try; (3): three tries, not passed yet; .: not tried", ""]
    for check, column in columns.items():
        lines.append(f"{column} {check}: {passes[check]} of {len(students)} passed")
        kinds = {}  # messages that differ in their numbers alone
        for message in stuck[check]:
            kinds.setdefault(re.sub(r"[\d.,+-]*\d", "#", message), []).append(message)
        for messages in sorted(kinds.values(), key=len, reverse=True):
            lines.append(f"     {len(messages)} stuck, such as: {messages[0]}")
    return "\n".join(lines)
