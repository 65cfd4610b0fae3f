"""What a run folder is written with: JSON files that are whole or not there, rows of metrics, and the lock of a folder.

Left out: what the files mean (``run.py``) and checkpoints (``checkpoints.py``). Imports nothing beyond Python's own.
"""

import json
import os
import socket
import time
import warnings
from pathlib import Path

_locks = {}  # lock file -> the open file that holds it for this process


def _of_the_parent_alone():
    """A forked process, such as a data loader's worker, must not keep its parent's locks when that has died."""
    for file in _locks.values():
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_the_parent_alone)


def plain(value):
    """``value`` as JSON can hold it: tensors and arrays as lists, paths as strings, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def write_json(path, value):
    """Write ``value`` to ``path`` so that a reader sees the old file or the new one whole, even after a power cut."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path):
    """The file's value, or None where there is no such file. Raises ValueError that names a file which is no JSON."""
    path = Path(path)
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def read_metrics(path):
    """The rows of a metrics.jsonl in order, without those of an earlier attempt that lie beyond the step from which a
    later attempt resumed. A line that is no row is left out: in silence where a kill or a power cut explains it (a
    half-written last line, or one before an attempt that resumed), otherwise with a warning that quotes it."""
    rows, broken = [], []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n") if Path(path).exists() else [""]
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is still being written
        try:
            row = json.loads(line)
            step, since = row["step"], row.get("resumed_at", 0)
            if not (isinstance(step, (int, type(None))) and isinstance(since, int)):
                raise TypeError
            hash(row.get("series"))
        except (ValueError, KeyError, TypeError):
            broken.append((number, line))
            continue
        if "resumed_at" in row:
            series, broken = row.get("series"), []
            rows = [r for r in rows if r.get("series") != series or r["step"] is None or r["step"] <= since]
        elif "began_again" in row:
            rows, broken = [], []
        else:
            rows.append(row)
    for number, line in broken:
        warnings.warn(f"{path}, line {number} is no row of metrics and is left out: {line[:60]!r}", stacklevel=2)
    return rows


def append_to(path):
    """The file open for another row; half a line that a killed process left is cut, or the next would join it."""
    path = Path(path)
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return open(path, "a", encoding="utf-8")


def sync(path):
    """Return when the file's or the folder's content lies on the disk, where a power cut leaves it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(folder, name=".lock", patience=0.5):
    """Keep ``folder`` for this process until ``unlock`` or its end, however it ends: the system drops the lock then.

    Returns None, or who holds it and kept it for ``patience`` seconds: "process 4711 on host". File systems without
    locks, and Windows, keep nobody out. The lock (flock) works over NFS, and hangs on no clock and no process number.
    """
    path = Path(folder).resolve() / name
    held = _locks.get(path)
    if held and path.exists() and os.path.samestat(os.fstat(held.fileno()), path.stat()):
        return None
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    deadline = time.monotonic() + patience  # ``holder`` takes it for a moment
    while not _take(file):
        if time.monotonic() > deadline:
            with file:
                return _named(file)
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks[path] = file


def unlock(folder):
    file = _locks.pop(Path(folder).resolve() / ".lock", None)
    if file is not None:
        file.close()


def holder(folder):
    """The other process that holds ``folder``, as ``lock`` names it, or None."""
    path = Path(folder).resolve() / ".lock"
    if path in _locks:
        return None
    try:
        with open(path, "r+", encoding="utf-8") as file:
            return None if _take(file) else _named(file)
    except OSError:
        return None  # not there, or in a folder that cannot be written


def _named(file):
    file.seek(0)
    return file.read().strip() or "another process"


def _take(file):
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):
        return True
    return True
