"""What the bench's tables share: the time of a pass, memory given back, and a failure in one line."""

import gc
import time

import torch


def what_failed(error):
    """One line for the column ``note``."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    if isinstance(error, ImportError):
        return f"absent: {line}"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return f"out of memory: {line}"
    return f"{type(error).__name__}: {line}"


def free(device):
    """Give back what a failure or a finished cell has left. Not between passes: the next one would pay for it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def elapsed(fn, device):
    """Milliseconds of ``fn()``."""
    if device.type != "cuda":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)
