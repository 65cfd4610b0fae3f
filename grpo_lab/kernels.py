"""The per-row kernels of the chunked head: in Triton (``triton_kernels.py``), beside torch twins (``twins.py``).

``absorb`` adds one slice of the vocabulary to a chunk's running row statistics and can leave softmax numerators in the
logits' place; ``finish`` makes log-probs and entropies of those statistics; ``logits_grad`` turns logits into their
gradient; ``row_stats`` takes whole rows, gradient included where its coefficients are known beforehand; ``put_rows``
scatters rows of dH; ``scaled`` multiplies a finished gradient. All work in fp32 (float64 in the twins for float64
logits) whatever the logits' dtype. The twins run on every device and are the default on a CPU; ``TRITON_INTERPRET=1``
runs the kernels themselves there.

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
    from grpo_lab import triton_kernels as triton
except ImportError:
    triton = None

SLICE = 8192  # columns that one program takes at a time
_WARPS = 8  # of a program over a SLICE
_GRAD_BLOCK = 2048
_LOWEST = -1.0e38  # the first peak: finite, so that no difference is -inf - -inf


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


_compiled = {}


def _launch(kernel, grid, z, out, width, args, constants, warps, also=None):
    """``kernel[grid](...)``, which looks its arguments over for longer than a tile takes: what was compiled for the
    same constants, ``also``, and all that Triton specialises on here is launched directly."""
    aligned = z.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    key = kernel, constants, also, z.dtype, out.dtype, z.stride(0), out.stride(0), width, aligned, z.device
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](z, z.stride(0), out, out.stride(0), width, *args, *constants)
        return
    compiled = kernel[grid](z, z.stride(0), out, out.stride(0), width, *args, *constants, num_warps=warps)
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
        args = ids, state, state.stride(0), first, float(gain), *numbers, *pairs
        constants = numerators is not None, *flags, twins.SLACK, SLICE
        _launch(triton.absorb, (len(z), 1, 1), z, out, width, args, constants, _WARPS)
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
        _launch(triton.logits_grad, grid, z, out, width, (*rows, first, *numbers), constants, 4)
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
        args = ids, state, state.stride(0), state if c is None else c, float(gain), *numbers
        constants = grad is not None, numerators is not None, *flags, twins.SLACK, _LOWEST, SLICE
        _launch(triton.row_stats, (len(z), 1, 1), z, out, z.shape[1], args, constants, _WARPS)
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
        args = at, state, state.stride(0), c, weight, weight.stride(0), ids, float(gain), *numbers
        constants, grid = (numerators_of is not None, has_softcap, 1024), (len(x), -(-x.shape[1] // 1024), 1)
        _launch(triton.put_rows, grid, x, out, x.shape[1], args, constants, 4, weight.dtype)
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


def scaled(x, factor, dtype, *, backend="torch"):
    """The contiguous ``x`` times the 0-dim ``factor`` in ``dtype``, rounded once; in place where x has that dtype."""
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    for part, to in zip(x.view(-1).split(1 << 24), out.view(-1).split(1 << 24), strict=True):
        if backend == "triton":
            _launch(triton.scaled, (-(-len(part) // 4096), 1, 1), part, to, len(part), (factor,), (4096,), 8)
        elif x.dtype.itemsize >= 4:
            part.mul_(factor)
            if dtype != x.dtype:
                to.copy_(part)
        else:  # with a dimension the factor stays in fp32: without, torch would round it to 16 bits first
            torch.mul(part, factor.reshape(1), out=to)
    return out
