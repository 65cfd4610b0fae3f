"""Memory of the loss head: bytes predicted tensor by tensor, and peaks measured on a GPU or in this process.

``predict_loss_bytes`` is the derivation of notebook 01 as code; ``measure_peak`` checks it; ``Watch`` follows the bytes
of tensors operation by operation, and counts matrix products, as notebook 02 draws them. Left out: the model's body,
the optimiser, and what a BLAS library keeps for itself. On Linux and on CUDA a peak is exact to about a megabyte;
elsewhere the process's memory is sampled, so a peak shorter than a few milliseconds can be missed. ``largest_batch``
searches for the largest batch that fits; ``bench/batch.py`` has the trials of whole training steps.
"""

import ctypes
import gc
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_lab.plan import Problem, choose

_PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_
_PICKS = torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.index_put_
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def predict_loss_bytes(
    batch, length, hidden, vocab, dtype=torch.float32, impl="chunked", *,
    chunk_tokens="auto", memory_budget=None, scored=None, trainable_head=True, autocast=False,
    device="cpu",
):  # fmt: skip
    """The tensors that are alive together at the peak of one forward and backward pass of ``grpo_loss``, in bytes.

    Counted beyond the inputs (hidden states, head, ids), as ``measure_peak`` does; the values' sum is the peak. batch B
    sequences of length T, states of width hidden H, vocabulary V; dtype of states and head; scored N: tokens with mask
    1 (default B * T), all of them with a gradient; autocast: the naive softmax is in fp32 whatever dtype is; device
    "cuda" can be predicted on a computer without one. Holds for objectives of one pass, temperature 1, no bias, no
    softcap.

    Returns a dict of name to bytes. Raises ValueError for an unknown impl.
    """
    B, T, H, V = batch, length, hidden, vocab
    N, s = B * T if scored is None else scored, dtype.itemsize
    wide = max(s, 4) if autocast else s
    if impl == "naive":
        moments = [
            {
                "logits (B, T, V)": B * T * V * s,
                "log-softmax, kept for the backward pass (B, T, V)": B * T * V * wide,
                "exp, log and product for the entropy (3, T, V)": 3 * T * V * wide,
                "masked states (B, T, H)": B * T * H * s,
            },
            {
                "gradient of the logits, row by row (B, T, V)": B * T * V * s,
                "gradient of the logits, stacked (B, T, V)": B * T * V * s,
                "masked states (B, T, H)": B * T * H * s,
            },
            {
                "gradient of the logits (B, T, V)": B * T * V * s,
                "dW (V, H)": V * H * s * trainable_head,
                "dH and masked states (2, B, T, H)": 2 * B * T * H * s,
            },
        ]
    elif impl == "chunked":
        problem = Problem(B, T, N, H, V, s, s, H * trainable_head, torch.device(device).type)
        moments = [problem.memory(choose(problem, chunk_tokens, memory_budget))]
    else:
        raise ValueError(f"impl = {impl!r}: expected 'naive' or 'chunked'")
    most = max(moments, key=lambda m: sum(m.values()))
    return {name: size for name, size in most.items() if size}


def measure_peak(fn, device="cpu"):
    """``(fn(), peak)``: the most bytes alive at once during ``fn()`` beyond those alive before it.

    On CUDA tensors' bytes (``max_memory_allocated``); on a CPU the process's resident memory, for which large blocks go
    straight back to the system while this runs: exact, and slower, so time elsewhere. Call fn once before: what a
    library loads and keeps at its first use counts too, 10 MiB for a matrix product.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = fn()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with _returning_heap():
        try:
            _CLEAR.write_text("5")  # resets the high-water mark VmHWM
        except OSError:
            return _sampled(fn)
        before = _status_bytes("VmRSS")
        result = fn()
        return result, max(0, _status_bytes("VmHWM") - before)


class Watch(TorchDispatchMode):
    """``with Watch() as watch:`` follows every tensor that PyTorch makes, on any device, in the backward pass too.

    ``timeline``: bytes of the new tensors alive after each operation; ``products``: multiplications of each matrix
    product; ``largest``: elements of the largest new tensor; ``moved``: bytes of the tensors that operations read and
    write. What an operation takes and frees within itself, and what a Triton kernel does, is not seen.
    """

    def __init__(self):
        super().__init__()
        self.timeline, self.products, self.largest, self.moved = [0], [], 0, 0
        self._alive, self._bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        old = {id(x.untyped_storage()) for x in given}
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not func.is_view:
            picked = given[0].untyped_storage() if func.overloadpacket in _PICKS else None  # of it, a few elements only
            touched = (x for x in given + made if x.untyped_storage() is not picked)
            self.moved += sum(x.numel() * x.dtype.itemsize for x in touched)
        for x in made:
            if id(x.untyped_storage()) not in old | self._alive.keys():
                self._follow(x.untyped_storage())
                self.largest = max(self.largest, x.numel())
        self.timeline.append(self._bytes)
        if func.overloadpacket in _PRODUCTS:
            a, b = given[-3:-1] if "out" in (kwargs or {}) else given[-2:]
            self.products.append(a.shape[0] * a.shape[1] * b.shape[1])
        return out

    def _follow(self, storage):
        key, size = id(storage), storage.nbytes()

        def freed(_):
            del self._alive[key]
            self._bytes -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._bytes += size


def largest_batch(trial, limit, peaks=None, guess=None):
    """``(fits, fails)``: the largest batch that was seen to fit and the smallest that was seen not to, about a
    thirty-second part of it apart; fits is 0 where not even 1 does.

    ``trial(batch)`` returns its peak in bytes, or None where it did not fit within ``limit`` bytes. A peak grows with
    the batch along a straight line, so that two small batches tell where the limit lies, and trials there and one step
    above settle it: four or five trials in place of the ten and more of doubling and bisection, which step in where the
    line is wrong. ``peaks``: batches and their peaks that are known already, under another limit for example; new ones
    are added. ``guess``: where to begin, in place of small batches.
    """
    peaks = {} if peaks is None else peaks
    low, high, stride = 0, None, 0
    while True:
        aim = _where_the_line_meets(limit, peaks) or guess
        grain = 1 << max(0, ((aim or low) // 32).bit_length() - 1)
        if high is not None and high - low <= grain:
            return low, high
        aim = aim and aim // grain * grain
        if aim is not None and low < aim < (high or aim + 1):
            batch = aim
        elif high is None and aim is None:
            batch = 4 * low or 16
        elif high is None:  # beyond the line: further and further
            stride = 2 * stride or grain
            batch = low + stride
        else:
            stride = 2 * stride or grain
            batch = max(high - stride, (low + high) // 2)
        peak = trial(batch)
        if peak is None:
            stride = stride if high is not None else 0
            high = batch
        else:
            stride = stride if high is None else 0
            low = batch
            peaks[batch] = peak


def _where_the_line_meets(limit, peaks):
    """The batch at which the line through the peaks of the two largest known batches reaches ``limit``, or None."""
    known = sorted(peaks)[-2:]
    if len(known) < 2 or peaks[known[1]] <= peaks[known[0]]:
        return None
    slope = (peaks[known[1]] - peaks[known[0]]) / (known[1] - known[0])
    return max(0, int(known[1] + (limit - peaks[known[1]]) / slope))


def _status_bytes(name):
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@contextmanager
def _returning_heap(block=64 << 10):
    """Make every block of ``block`` bytes or more come from the system and go back to it when it is freed.

    glibc keeps freed blocks of up to 32 MiB for later, so that a second peak would not show. A low mmap threshold stops
    that for new blocks; the holes that earlier ones left are filled with blocks that nobody touches.
    """
    libc = ctypes.CDLL(None) if _STATUS.exists() else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, IS_MMAPPED = -1, -3, 2
    libc.mallopt(M_MMAP_THRESHOLD, block)
    libc.malloc_trim(0)
    filled, size = [], 32 << 20
    while size >= block:
        pointer = libc.malloc(size)
        if ctypes.c_size_t.from_address(pointer - ctypes.sizeof(ctypes.c_size_t)).value & IS_MMAPPED:  # no hole left
            libc.free(pointer)
            size //= 2
        else:
            filled.append(pointer)
    try:
        yield
    finally:  # the limits are those that glibc's own adaptive ones rise to
        for pointer in filled:
            libc.free(pointer)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)


def _sampled(fn, interval=0.001):
    import psutil

    process, done, most = psutil.Process(), threading.Event(), 0
    before = process.memory_info().rss

    def watch():
        nonlocal most
        while not done.wait(interval):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = fn()
        most = max(most, process.memory_info().rss)
    finally:
        done.set()
        thread.join()
    return result, max(0, most - before)
