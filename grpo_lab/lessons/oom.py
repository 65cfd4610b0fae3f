"""Running out of memory where nothing is lost: a loss in a child process that may take only so much memory.

    >>> run_capped(32, 64, 128, 32768, "naive", cap=400 << 20).ended
    'out of memory'

The child tells its parent how much it holds from moment to moment, so that the timeline is there however it dies. On
Linux the system itself refuses what exceeds the cap, on a GPU torch's allocator does; elsewhere the child is killed
when it is seen above the cap, as a system does that is out of memory. ``widget_plots.capped_figure`` draws
what came back.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from typing import NamedTuple

import psutil
import torch

from grpo_lab.launch import child_environment, run_command

LIMITS = sys.platform == "linux"  # whether the system can refuse memory; macOS takes such a limit and ignores it
INTERVAL = 0.001  # seconds between looks at the memory
SAMPLE = re.compile(r"sample (\S+) (\d+) (\w+)")
WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG]iB|bytes)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Outcome(NamedTuple):
    """How a capped pass went. ``timeline``: (seconds, bytes beyond the inputs, "forward" or "backward"); ``ended``:
    "survived", "out of memory" or "killed"; ``wanted``: bytes of the request that was refused, None where none was;
    ``message``: what the child said last."""

    impl: str
    cap: int
    timeline: list[tuple[float, int, str]]
    ended: str
    wanted: int | None
    message: str


def run_capped(
    batch, length, hidden, vocab, impl, cap, *, dtype=torch.float32, chunk_tokens="auto", device="cpu", seed=0
):
    """One forward and backward pass of ``grpo_loss`` with a trained head, in a child process that may hold ``cap``
    bytes beyond its inputs. Returns an Outcome; raises RuntimeError where the child failed for another reason."""
    spec = dict(batch=batch, length=length, hidden=hidden, vocab=vocab, impl=impl, chunk_tokens=chunk_tokens, seed=seed)
    spec |= dict(cap=cap, dtype=str(dtype).removeprefix("torch."), device=device, limits=LIMITS)
    env = child_environment()
    env |= {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}  # freed is given back
    timeline, said = [], []

    def on_line(line):
        if sample := SAMPLE.fullmatch(line):
            timeline.append((float(sample[1]), int(sample[2]), sample[3]))
        elif line.strip():
            said.append(line)

    code = run_command([sys.executable, "-m", "grpo_lab.lessons.oom", json.dumps(spec)], on_line, env)
    message = said[-1] if said else ""
    wanted = WANTED.search(message)
    if code == 128 + signal.SIGKILL:
        ended = "killed"
    elif code and (wanted or "MemoryError" in message):
        ended = "out of memory"
    elif code:
        raise RuntimeError(f"impl = {impl!r}: the child ended with exit code {code}:\n" + "\n".join(said[-20:]))
    else:
        ended = "survived"
    return Outcome(impl, cap, timeline, ended, wanted and int(float(wanted[1]) * UNITS[wanted[2]]), message)


def _held(device):
    """Bytes that this process holds: tensors on a GPU; else its data, or its resident memory where that is unknown."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    memory = psutil.Process().memory_info()
    return getattr(memory, "data", memory.rss)


def _limit(device, cap):
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + cap) / total))
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_held(device) + cap,) * 2)


def main(spec):
    """The child: warms up, sets its limit, and runs the pass while a thread tells the parent what it holds."""
    from grpo_lab import grpo_loss

    device, cap, H = spec["device"], spec["cap"], spec["hidden"]
    generator = torch.Generator().manual_seed(spec["seed"])
    step, ready, done = "forward", threading.Event(), threading.Event()
    limited = spec["limits"] or device == "cuda"

    def inputs(B, T, V):
        states, head = torch.randn(B, T, H, generator=generator), torch.randn(V, H, generator=generator) / H**0.5
        floats = [x.to(device, getattr(torch, spec["dtype"])).requires_grad_() for x in (states, head)]
        ids = torch.randint(V, (B, T), generator=generator).to(device)
        return *floats, ids, torch.ones_like(ids), torch.randn(B, generator=generator).to(device)

    def forward_and_backward(inputs):
        nonlocal step
        step = "forward"
        loss, _ = grpo_loss(*inputs, impl=spec["impl"], chunk_tokens=spec["chunk_tokens"])
        step = "backward"
        loss.backward()
        loss.item()  # a GPU is waited for

    def watch():
        ready.wait()
        last = None
        while not done.wait(INTERVAL):
            held = _held(device) - before
            if (held, step) != last:
                last = held, step
                print(f"sample {time.perf_counter() - began:.4f} {held} {last[1]}", flush=True)
            if held > cap and not limited:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()  # before memory is counted: it has some of its own
    forward_and_backward(inputs(1, 2, 1000))  # what libraries load and keep at their first use does not count
    batch = inputs(spec["batch"], spec["length"], spec["vocab"])
    if limited:
        _limit(device, cap)
    step, before, began = "forward", _held(device), time.perf_counter()
    ready.set()
    forward_and_backward(batch)
    done.set()
    thread.join()
    print(f"sample {time.perf_counter() - began:.4f} {_held(device) - before} {step}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
