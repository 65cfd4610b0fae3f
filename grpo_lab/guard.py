"""Runs a command of which nothing outlives the process that asked for it: ``guard.py PARENT_PID COMMAND...``.

torchrun and vLLM start their workers in sessions of their own, which neither an interrupt nor the death of a notebook's
kernel reaches. This process stands between: when it is told to end (SIGTERM), when the parent is gone, and when the
command has ended, it ends whatever the command has started. ``start`` runs a command so; this file imports nothing of
the package.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

GRACE = 5.0  # seconds between SIGTERM and SIGKILL: what a rank has to save lies in its last checkpoint
POLL = 0.1


def start(command, env=None):
    """The running process (``subprocess.Popen``) of a command under guard: its output, stderr included, is text in
    ``stdout``; ``terminate()`` ends all of it."""
    guarded = [sys.executable, "-P", __file__, str(os.getpid()), *map(str, command)]
    options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    return subprocess.Popen(guarded, env=env, text=True, encoding="utf-8", errors="replace", **options)


def end_descendants():
    """Ends every process below this one: those that SIGTERM does not end within GRACE are killed."""
    me, deadline = psutil.Process(), time.monotonic() + GRACE
    told = set()
    while found := set(me.children(recursive=True)):
        for process in found if time.monotonic() > deadline else found - told:
            try:
                process.kill() if time.monotonic() > deadline else process.terminate()
            except psutil.NoSuchProcess:
                pass
        told |= found
        psutil.wait_procs(found, timeout=POLL)  # reaps those that are this process's own by now


def main(parent, *command):
    if sys.platform == "linux":  # a process whose own parent has died becomes a child of this one, and is found
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told_to_end = False

    def end(*_):
        nonlocal told_to_end
        told_to_end = True

    signal.signal(signal.SIGTERM, end)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while child.poll() is None and not told_to_end and os.getppid() == int(parent):
        time.sleep(POLL)
    code = child.returncode
    end_descendants()
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
