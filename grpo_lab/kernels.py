"""The per-row kernels of the chunked head, in Triton, beside torch twins (``twins.py``); nothing else imports triton.

``absorb`` adds one slice of the vocabulary to a chunk's running row statistics and can leave softmax numerators in the
logits' place; ``finish`` makes log-probs and entropies of those statistics; ``logits_grad`` turns logits into their
gradient; ``row_stats`` takes whole rows, gradient included where its coefficients are known beforehand; ``put_rows``
scatters rows of dH. All work in fp32 (float64 in the twins for float64 logits) whatever the logits' dtype. The twins
run on every device and are the default on a CPU; ``TRITON_INTERPRET=1`` runs the kernels themselves there.

A logit is ``softcap * tanh(z * logit_scale / softcap) * inv_t``, without the tanh for softcap None; ``inv_t`` is
1 / temperature. The sampled token is kept out of a row's sums: a confident row's gradient rests on what is left of the
probability, which ``1 - p`` would lose in fp32.
"""

import functools
import os
import warnings
from typing import NamedTuple

import torch

from grpo_lab import twins

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SLICE = 8192  # columns that one program takes at a time
_WARPS = 8  # of a program over a SLICE
_GRAD_BLOCK = 2048
_LOWEST = -3.0e38  # the first peak: finite, so that no difference is -inf - -inf


@functools.cache
def _warn_once(message):
    warnings.warn(message, stacklevel=4)


def resolve_backend(backend: str, device: torch.device) -> str:
    """``"torch"`` or ``"triton"`` for ``backend`` in torch, triton, auto. Raises ValueError where it cannot run."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "auto":
        if device.type == "cuda" and triton is None:
            _warn_once("triton is not installed: the chunked loss runs its slower torch twins. `pip install triton`")
        return "triton" if device.type == "cuda" and triton is not None else "torch"
    if backend == "triton":
        if triton is None:
            raise ValueError("backend='triton': triton is not installed; `pip install triton` or use backend='torch'")
        if device.type != "cuda" and not interpreted:
            raise ValueError(
                f"backend='triton' on device {device.type!r}: Triton kernels need a GPU, or TRITON_INTERPRET=1 set "
                "before Python starts to run them slowly on a CPU; backend='torch' runs the same arithmetic there"
            )
        return "triton"
    if backend == "torch":
        return "torch"
    raise ValueError(f"backend={backend!r}: expected 'torch', 'triton' or 'auto'")


# Arguments that may be any number, or lie anywhere, without another compilation
_VARYING = ("state_stride", "first")
_UNALIGNED = tuple(
    "ids_ptr at_ptr state_ptr sums_ptr sums2_ptr peak_ptr log_norm_ptr rest_ptr entropy_ptr c_ptr bonus_ptr".split()
)
_compiled = {}

if triton is not None:

    @triton.jit
    def _load_logits(z_ptr, cols, end, scale, cap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
        """Logits of the columns below end, -inf beyond; ``cap`` is the softcap over the temperature."""
        if HAS_SCALE or HAS_SOFTCAP:
            x = tl.load(z_ptr + cols, mask=cols < end, other=0.0).to(tl.float32) * scale
            if HAS_SOFTCAP:
                x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
            return tl.where(cols < end, x, -float("inf"))
        return tl.load(z_ptr + cols, mask=cols < end, other=-float("inf")).to(tl.float32)

    @triton.jit
    def _absorb_block(x, peak, total, dot, SLACK: tl.constexpr):
        """A row's running statistics after the logits x, the block's numerators, and by what earlier ones shrink."""
        top = tl.max(x, axis=0)
        new_peak = tl.where(top > peak + SLACK, top, peak)
        # Not below -1e30, so that e * shift is 0 where x is -inf; a NaN stays one
        shift = tl.maximum(x - new_peak, -1e30, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp(shift)
        rescale = tl.exp(peak - new_peak)
        dot = rescale * (dot + (peak - new_peak) * total) + tl.sum(e * shift, axis=0)
        return new_peak, total * rescale + tl.sum(e, axis=0), dot, e, rescale

    @triton.jit
    def _numerators(e, x, cap, gain, HAS_SOFTCAP: tl.constexpr):
        if HAS_SOFTCAP:
            t = x / cap
            e = tl.where(e > 0, e * (1 - t * t), 0.0)
        return e * gain

    @triton.jit
    def _normalise(peak, total, target):
        """``log_norm`` and ``rest`` of RowStats."""
        log_total = tl.log(total)
        gap = target - peak
        log_norm = tl.maximum(log_total, gap) + tl.log(1 + tl.exp(-tl.abs(log_total - gap)))
        return log_norm, tl.sigmoid(log_total - gap)

    @triton.jit
    def _rescale_row(ptr, factor, H, BLOCK: tl.constexpr):
        for start in range(0, H, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            value = tl.load(ptr + cols, mask=cols < H).to(tl.float32) * factor
            tl.store(ptr + cols, value.to(ptr.dtype.element_ty), mask=cols < H)

    @triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
    def _absorb_kernel(
        z_ptr, z_stride, e_ptr, e_stride, ids_ptr, state_ptr, state_stride, first, width, gain, scale, cap,
        sums_ptr, H, sums2_ptr, H2, NUMERATORS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
        SLACK: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        z_row = z_ptr + row * z_stride
        x = _load_logits(z_row, cols, width, scale, cap, HAS_SCALE, HAS_SOFTCAP)
        at = (tl.load(ids_ptr + row) - first).to(tl.int32)
        state_ptr += row
        peak = tl.load(state_ptr)
        total = tl.load(state_ptr + state_stride)
        dot = tl.load(state_ptr + 2 * state_stride)
        if (at >= 0) & (at < width):
            target = _load_logits(z_row, at, width, scale, cap, HAS_SCALE, HAS_SOFTCAP)
            tl.store(state_ptr + 3 * state_stride, target)
        x = tl.where(cols == at, -float("inf"), x)
        new_peak, total, dot, e, rescale = _absorb_block(x, peak, total, dot, SLACK)
        tl.store(state_ptr, new_peak)
        tl.store(state_ptr + state_stride, total)
        tl.store(state_ptr + 2 * state_stride, dot)
        if NUMERATORS:
            e = _numerators(e, x, cap, gain, HAS_SOFTCAP)
            tl.store(e_ptr + row * e_stride + cols, e.to(e_ptr.dtype.element_ty), mask=cols < width)
            if (new_peak != peak) & (first > 0):
                _rescale_row(sums_ptr + row * H, rescale, H, 1024)
                _rescale_row(sums2_ptr + row * H2, rescale, H2, 1024)

    @triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
    def _row_stats_kernel(
        z_ptr, z_stride, g_ptr, g_stride, ids_ptr, state_ptr, state_stride, c_ptr, V, gain, scale, cap,
        GRAD: tl.constexpr, NUMERATORS: tl.constexpr,
        HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SLACK: tl.constexpr, LOWEST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        z_row = z_ptr + row * z_stride
        at = tl.load(ids_ptr + row).to(tl.int32)
        target = _load_logits(z_row, at, V, scale, cap, HAS_SCALE, HAS_SOFTCAP)  # before it is overwritten
        peak = LOWEST
        total = 0.0
        dot = 0.0
        for first in range(0, V, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            x = _load_logits(z_row, cols, V, scale, cap, HAS_SCALE, HAS_SOFTCAP)
            x = tl.where(cols == at, -float("inf"), x)
            new_peak, total, dot, e, rescale = _absorb_block(x, peak, total, dot, SLACK)
            if NUMERATORS:
                e = _numerators(e, x, cap, gain, HAS_SOFTCAP)
                tl.store(g_ptr + row * g_stride + cols, e.to(g_ptr.dtype.element_ty), mask=cols < V)
                if (new_peak != peak) & (first > 0):
                    tl.debug_barrier()  # other threads wrote what is read here
                    _rescale_row(g_ptr + row * g_stride, rescale, first, BLOCK)
            peak = new_peak
        state_ptr += row
        tl.store(state_ptr, peak)
        tl.store(state_ptr + state_stride, total)
        tl.store(state_ptr + 2 * state_stride, dot)
        tl.store(state_ptr + 3 * state_stride, target)
        if GRAD:
            log_norm, rest = _normalise(peak, total, target)
            c = tl.load(c_ptr + row) * scale * gain
            of_target = c * rest
            of_others = -c * tl.exp(-log_norm)
            for back in range(0, V, BLOCK):  # what was read last is what the cache still has
                cols = (V - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
                x = _load_logits(z_row, cols, V, scale, cap, HAS_SCALE, HAS_SOFTCAP)
                grad = tl.where(cols == at, of_target, of_others * tl.exp(x - peak))
                if HAS_SOFTCAP:
                    t = x / cap
                    grad *= 1 - t * t
                tl.store(g_ptr + row * g_stride + cols, grad.to(g_ptr.dtype.element_ty), mask=cols < V)

    @triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
    def _logits_grad_kernel(
        z_ptr, z_stride, g_ptr, g_stride, ids_ptr, peak_ptr, log_norm_ptr, rest_ptr, entropy_ptr, c_ptr, bonus_ptr,
        first, width, scale, cap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = _load_logits(z_ptr + row * z_stride, cols, width, scale, cap, HAS_SCALE, HAS_SOFTCAP)
        shift = x - tl.load(peak_ptr + row)
        log_norm = tl.load(log_norm_ptr + row)
        c = tl.load(c_ptr + row) * scale
        at = (tl.load(ids_ptr + row) - first).to(tl.int32)
        e = tl.exp(shift)
        grad = tl.where(cols == at, c * tl.load(rest_ptr + row), -c * tl.exp(-log_norm) * e)
        if HAS_ENTROPY:
            log_p = shift - log_norm
            p = tl.exp(log_p)
            bonus = tl.load(bonus_ptr + row) * scale * p * (log_p + tl.load(entropy_ptr + row))
            grad -= tl.where(p > 0, bonus, 0.0)
        if HAS_SOFTCAP:
            t = x / cap
            grad = tl.where(e > 0, grad * (1 - t * t), grad)
        tl.store(g_ptr + row * g_stride + cols, grad.to(g_ptr.dtype.element_ty), mask=cols < width)

    @triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
    def _put_rows_kernel(
        x_ptr, x_stride, out_ptr, out_stride, at_ptr, state_ptr, state_stride, c_ptr, weight_ptr, weight_stride,
        ids_ptr, H, gain, scale, cap, NUMERATORS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < H).to(tl.float32) / gain
        if NUMERATORS:
            state_ptr += row
            target = tl.load(state_ptr + 3 * state_stride)
            log_norm, rest = _normalise(tl.load(state_ptr), tl.load(state_ptr + state_stride), target)
            if HAS_SOFTCAP:
                t = target / cap
                rest *= 1 - t * t
            weight = tl.load(weight_ptr + tl.load(ids_ptr + row) * weight_stride + cols, mask=cols < H).to(tl.float32)
            x = tl.load(c_ptr + row) * scale * (rest * weight - tl.exp(-log_norm) * x)
        out = out_ptr + tl.load(at_ptr + row) * out_stride + cols
        tl.store(out, x.to(out_ptr.dtype.element_ty), mask=cols < H)


def _launch(kernel, grid, z, out, args, constants, warps):
    """``kernel[grid](...)``, which looks its arguments over for longer than a tile takes: what was compiled for the
    same z, out, numbers and constants, all that Triton specialises on here, is launched directly."""
    numbers = tuple((x == 1, x % 16 == 0) for x in args if isinstance(x, int))
    layout = z.dtype, out.dtype, z.stride(0), out.stride(0), z.data_ptr() % 16, out.data_ptr() % 16, z.device
    dtypes = tuple(x.dtype for x in args if isinstance(x, torch.Tensor))
    key = kernel, warps, layout, dtypes, numbers, constants
    args = (z, z.stride(0), out, out.stride(0), *args, *constants)
    if key in _compiled:
        _compiled[key][grid](*args)
    else:
        compiled = kernel[grid](*args, num_warps=warps)
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = compiled


def _logit_args(logit_scale, softcap, inv_t):
    """``(scale, cap), (HAS_SCALE, HAS_SOFTCAP)`` of the kernels."""
    scale = logit_scale * inv_t
    return (float(scale), float((softcap or 1.0) * inv_t)), (scale != 1.0, softcap is not None)


class RowStats(NamedTuple):
    """Of each token ``(N,)``: log-prob; entropy in nats; ``peak``, about the largest logit; ``log_norm``, the
    log-sum-exp relative to it (added up in fp32 they would lose the bits that a confident row rests on); and the
    probability of all other tokens together."""

    logps: torch.Tensor
    entropy: torch.Tensor
    peak: torch.Tensor
    log_norm: torch.Tensor
    rest: torch.Tensor

    def at(self, rows):
        return RowStats(*(x[rows] for x in self))


def new_state(n, dtype, device):
    """Running statistics ``(4, n)`` of rows that have seen no logit: peak; over all columns but the sampled token's,
    the sum of ``e = exp(logit - peak)`` and of ``e * (logit - peak)``; the sampled token's logit."""
    state = torch.zeros(4, n, dtype=dtype, device=device)
    state[0] = _LOWEST
    return state


def normalise(state):
    """Of rows that have seen all their logits: ``log_norm`` and ``rest`` of RowStats, the log-odds against the sampled
    token, and ``log(1 + exp(-|log-odds|))``."""
    peak, total, _, target = state
    log_total, gap = total.log(), target - peak
    odds = log_total - gap
    # Not torch.logaddexp: on a CPU its last bit depends on where in memory an element lies
    small = torch.log1p((-odds.abs()).exp())
    return torch.maximum(log_total, gap) + small, torch.sigmoid(odds), odds, small


def finish(state) -> RowStats:
    """The statistics of rows that have seen all their logits."""
    peak, total, dot, _ = state
    log_norm, rest, odds, small = normalise(state)
    logps = -(odds.clamp(min=0.0) + small)
    of_target = logps.exp() * -logps.clamp(min=-1e30)  # 0 * -inf is 0 here
    entropy = of_target + (-log_norm).exp() * (total * log_norm - dot)
    return RowStats(logps, entropy, peak, log_norm, rest)


def absorb(
    z, ids, first, state, numerators=None, sums=(), gain=1.0, *, logit_scale=1.0, softcap=None, inv_t=1.0,
    backend="torch",
):  # fmt: skip
    """Add the logits of vocabulary entries ``[first, first + width)`` to the running statistics ``state`` ``(4, R)``.

    ``z`` ``(R, width)``, at most ``SLICE`` wide, holds the head's raw outputs. ``numerators`` ``(R, width)``, which may
    be z itself, gets ``gain * exp(logit - peak)``, times the softcap's derivative, and 0 at the sampled token;
    ``sums``, up to two ``(R, H)`` fp32 tensors of products with earlier numerators, follow the peak where it moves.
    """
    if not len(z):
        return
    if backend == "triton":
        width = z.shape[1]
        out = z if numerators is None else numerators
        numbers, flags = _logit_args(logit_scale, softcap, inv_t)
        pairs = [y for x in sums for y in (x, x.shape[1])] + [state, 0] * (2 - len(sums))
        args = ids, state, state.stride(0), first, width, float(gain), *numbers, *pairs
        constants = numerators is not None, *flags, twins.SLACK, SLICE
        _launch(_absorb_kernel, (len(z), 1, 1), z, out, args, constants, _WARPS)
        return
    twins.absorb(z, ids, first, state, numerators, sums, gain, logit_scale, softcap, inv_t)


def logits_grad(
    z, out, ids, first, stats, c, e=None, *, logit_scale=1.0, softcap=None, inv_t=1.0, backend="torch"
):  # fmt: skip
    """Write ``c * dlogp/dz + e * dentropy/dz`` ``(R, width)`` to ``out``, which may be ``z`` itself.

    ``z`` holds the head's outputs for vocabulary entries ``[first, first + width)``; ``stats`` are the rows' RowStats;
    ``c`` and ``e`` ``(R,)`` the loss's derivatives by log-prob and entropy, ``e=None`` where the entropy earns no
    gradient. With p the softmax, dlogp/dlogit is ``onehot - p`` and dentropy/dlogit ``-p (log p + entropy)``.
    """
    if not len(z):
        return
    if backend == "triton":
        width = z.shape[1]
        numbers, flags = _logit_args(logit_scale, softcap, inv_t)
        rows = ids, stats.peak, stats.log_norm, stats.rest, stats.entropy, c, c if e is None else e
        constants = *flags, e is not None, _GRAD_BLOCK
        grid = len(z), -(-width // _GRAD_BLOCK), 1
        _launch(_logits_grad_kernel, grid, z, out, (*rows, first, width, *numbers), constants, 4)
        return
    twins.logits_grad(z, out, ids, first, stats, c, e, logit_scale, softcap, inv_t)


def row_stats(
    z, ids, state, *, grad=None, c=None, numerators=None, gain=1.0, logit_scale=1.0, softcap=None, inv_t=1.0,
    backend="torch",
):  # fmt: skip
    """``absorb`` over all of ``z`` ``(R, V)``, into a new ``state`` ``(4, R)``. With ``grad`` ``(R, V)``, which may be
    z itself, ``gain`` times ``logits_grad`` too, for a ``c`` ``(R,)`` that does not depend on the logits; with
    ``numerators`` instead, likewise, ``gain`` times the softmax's numerators, all relative to the row's last peak."""
    if not len(z):
        return
    if backend == "triton":
        out = grad if grad is not None else z if numerators is None else numerators
        numbers, flags = _logit_args(logit_scale, softcap, inv_t)
        args = ids, state, state.stride(0), state if c is None else c, z.shape[1], float(gain), *numbers
        constants = grad is not None, numerators is not None, *flags, twins.SLACK, _LOWEST, SLICE
        _launch(_row_stats_kernel, (len(z), 1, 1), z, out, args, constants, _WARPS)
        return
    logits = dict(logit_scale=logit_scale, softcap=softcap, inv_t=inv_t, backend=backend)
    for first in range(0, z.shape[1], SLICE):
        out = None if numerators is None else numerators[:, first : first + SLICE]
        earlier = [] if numerators is None else [numerators[:, :first]]
        absorb(z[:, first : first + SLICE], ids, first, state, out, earlier, gain, **logits)
    if grad is not None:
        logits_grad(z, grad, ids, 0, finish(state), c * gain, **logits)


def put_rows(
    x, out, at, gain=1.0, numerators_of=None, *, logit_scale=1.0, softcap=None, inv_t=1.0, backend="torch"
):  # fmt: skip
    """``out[at] = x / gain``, rounded once: ``x`` ``(R, H)``, ``out`` ``(M, H)`` with distinct rows ``at``.

    With ``numerators_of = (state, c, weight, ids)`` x is ``numerators @ weight``, and what is put is ``c`` ``(R,)``
    times the derivative of the log-prob of ``ids`` by the head's input.
    """
    if not len(x):
        return
    if backend == "triton":
        state, c, weight, ids = numerators_of or (x, x, x, at)
        if numerators_of and (weight.stride(1) != 1 or weight.data_ptr() % 16):  # it reads aligned, dense rows
            weight, ids = weight[ids].contiguous(), torch.arange(len(ids), device=ids.device)
        numbers, (_, has_softcap) = _logit_args(logit_scale, softcap, inv_t)
        args = at, state, state.stride(0), c, weight, weight.stride(0), ids, x.shape[1], float(gain), *numbers
        constants = numerators_of is not None, has_softcap, 1024
        _launch(_put_rows_kernel, (len(x), -(-x.shape[1] // 1024), 1), x, out, args, constants, 4)
        return
    scale, own, weight, ids = x.new_full((len(x),), 1.0 / gain), None, None, None
    if numerators_of is not None:
        state, c, weight, ids = numerators_of
        log_norm, rest, *_ = normalise(state)
        c = c * (logit_scale * inv_t)
        scale, own = (-log_norm).exp() * c * (-1.0 / gain), c * rest
        if softcap is not None:
            capped = state[3] / (softcap * inv_t)
            own = own * (1 - capped * capped)
    twins.put_rows(x, out, at, scale, own, weight, ids)
