"""How long each notebook takes and how much memory: measured on this machine, and written into the README's ladder.

    python -m grpo_lab clock            # every notebook that has changed since it was last measured here
    python -m grpo_lab clock 05 07      # these

A notebook is run with its default parameters, as ``python -m grpo_lab run`` does it, in a run folder of its own. Time
is that of the whole command; memory the most that its processes held together, pages they share counted once. Run it
while the machine does nothing else. ``data/clock.json`` keeps the figures with machine, date and what was measured.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import psutil

from grpo_lab.doctor import CLONE, describe_environment
from grpo_lab.runs import read_json, write_json

RECORD, README = CLONE / "data" / "clock.json", CLONE / "README.md"
_ROW = re.compile(r"^\| `(\w+)` \|(.*)\| [^|]* \| [^|]* \|$", re.MULTILINE)


def digest(path):
    """Names a notebook's code: what stands in its cells, and not what they printed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def measure(path):
    """``(seconds, bytes)`` of one run. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "grpo_lab", "run", str(path), "--root", root]
        with tempfile.TemporaryFile("w+") as output:
            began = time.perf_counter()
            process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            most = 0
            while process.poll() is None:
                most = max(most, _memory(process))
                time.sleep(0.1)
            seconds = time.perf_counter() - began
            output.seek(0)
            if process.returncode:
                raise RuntimeError(f"{path.stem} failed:\n{output.read()[-2000:]}")
    return seconds, most


def _memory(process):
    """Bytes of a process and of all below it: on Linux a page that several share counts once."""
    total = 0
    for one in [process, *_children(process)]:
        try:
            info = one.memory_full_info()
            total += getattr(info, "pss", info.rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _children(process):
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def told(seconds, size):
    """The two cells of the ladder, as a person would say them."""
    length = f"{5 * max(1, round(seconds / 5))} s" if seconds < 57 else f"{max(2, round(seconds / 30)) / 2:g} min"
    return length, f"{max(0.1, size / 1e9):.1f} GB"


def write_ladder(record, path=README):
    """Put the recorded figures into the last two columns of the README's rows."""

    def row(match):
        figures = record["notebooks"].get(match[1])
        return (
            match[0] if figures is None else f"| `{match[1]}` |{match[2]}| {' | '.join(told(*figures['measured']))} |"
        )

    path.write_text(_ROW.sub(row, path.read_text(encoding="utf-8")), encoding="utf-8")


def main(names):
    """Measure the notebooks named so, or all that have changed, and write record and ladder."""
    about = describe_environment()
    here = {"machine": about["gpu"] or f"{about['cpu']}, {os.cpu_count()} cores, no GPU", "python": about["python"]}
    record = read_json(RECORD) or {}
    if {key: record.get(key) for key in here} != here:
        record = here | {"notebooks": {}}  # of another machine: nothing in it holds here
    for path in sorted((CLONE / "notebooks").glob("[0-9]*.ipynb")):
        code, known = digest(path), record["notebooks"].get(path.stem, {})
        if path.stem[:2] not in names if names else known.get("code") == code:
            continue
        print(f"{path.stem} ...", end=" ", flush=True)
        seconds, size = measure(path)
        print(*told(seconds, size), f"({seconds:.1f} s)", flush=True)
        measured = {"measured": [round(seconds, 1), size], "code": code, "date": time.strftime("%Y-%m-%d")}
        record["notebooks"][path.stem] = measured
        write_json(RECORD, record)
    write_ladder(record)
    return 0
