"""The two per-row kernels of the chunked head, in Triton and as torch twins; nothing else imports triton.

``row_stats`` reads a chunk's logits once for log-prob, log-sum-exp and entropy; ``logits_grad`` turns the logits into
their gradient, in place. Both work in fp32 (float64 in the twins for float64 logits) whatever the logits' dtype.
The twins run on every device and are the default on a CPU; ``TRITON_INTERPRET=1`` runs the kernels themselves there.
"""

import functools
import os
import warnings

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_TWIN_ELEMENTS = 1 << 19  # fp32 temporaries of a twin: 2 MiB each, small enough to stay in a CPU's cache


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


if triton is not None:

    @triton.jit
    def _to_logits(z, logit_scale, softcap, inv_t, HAS_SOFTCAP: tl.constexpr):
        z = z * logit_scale
        if HAS_SOFTCAP:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)  # tanh
        return z * inv_t

    @triton.jit
    def _row_stats_kernel(
        z_ptr, z_stride, ids_ptr, logp_ptr, peak_ptr, log_sum_ptr, entropy_ptr, V, logit_scale, softcap, inv_t,
        HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        z_row = z_ptr + row * z_stride
        # Running max m, s = sum exp(z - m), d = sum exp(z - m) (z - m). A finite start keeps -inf - -inf out.
        m = -3.0e38
        s = 0.0
        d = 0.0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < V
            z = tl.load(z_row + cols, mask=inside, other=0.0).to(tl.float32)
            z = tl.where(inside, _to_logits(z, logit_scale, softcap, inv_t, HAS_SOFTCAP), -float("inf"))
            new_m = tl.maximum(m, tl.max(z, axis=0))
            shift = z - new_m
            e = tl.exp(shift)
            rescale = tl.exp(m - new_m)
            d = rescale * (d + (m - new_m) * s) + tl.sum(tl.where(e > 0, e * shift, 0.0), axis=0)
            s = s * rescale + tl.sum(e, axis=0)
            m = new_m
        z = tl.load(z_row + tl.load(ids_ptr + row)).to(tl.float32)
        log_s = tl.log(s)
        tl.store(logp_ptr + row, _to_logits(z, logit_scale, softcap, inv_t, HAS_SOFTCAP) - m - log_s)
        tl.store(peak_ptr + row, m)
        tl.store(log_sum_ptr + row, log_s)
        tl.store(entropy_ptr + row, log_s - d / s)

    @triton.jit
    def _logits_grad_kernel(
        z_ptr, z_stride, g_ptr, g_stride, ids_ptr, peak_ptr, log_sum_ptr, entropy_ptr, c_ptr, e_ptr, V,
        logit_scale, softcap, inv_t, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < V
        z = tl.load(z_ptr + row * z_stride + cols, mask=inside, other=0.0).to(tl.float32) * logit_scale
        if HAS_SOFTCAP:
            t = 2 * tl.sigmoid(2 * z / softcap) - 1
            z = softcap * t
        log_p = z * inv_t - tl.load(peak_ptr + row) - tl.load(log_sum_ptr + row)
        p = tl.exp(log_p)
        grad = tl.load(c_ptr + row) * (tl.where(cols == tl.load(ids_ptr + row), 1.0, 0.0) - p)
        if HAS_ENTROPY:
            grad -= tl.load(e_ptr + row) * tl.where(p > 0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
        grad = grad * inv_t * logit_scale
        if HAS_SOFTCAP:
            grad = grad * (1 - t * t)
        tl.store(g_ptr + row * g_stride + cols, grad.to(g_ptr.dtype.element_ty), mask=inside)


def _rows(z):
    """Slices of rows whose fp32 temporaries stay small."""
    step = max(1, _TWIN_ELEMENTS // z.shape[1])
    return (slice(a, a + step) for a in range(0, len(z), step))


def row_stats(z, ids, logps, peak, log_sum, entropy, *, logit_scale=1.0, softcap=None, inv_t=1.0, backend="torch"):
    """Fill the ``(R,)`` statistics of tokens ``ids`` from the head's raw outputs ``z`` ``(R, V)``.

    A logit is ``softcap * tanh(z * logit_scale / softcap) * inv_t``, without the tanh for softcap None; ``inv_t`` is
    1 / temperature. The log-sum-exp stays in two parts, the largest logit (``peak``) and the log of the sum relative to
    it: added up in fp32 they would lose the bits that a confident row's probabilities rest on. Entropy in nats.
    """
    if not len(z):
        return
    if backend == "triton":
        _row_stats_kernel[(len(z),)](
            z, z.stride(0), ids, logps, peak, log_sum, entropy, z.shape[1],
            float(logit_scale), float(softcap or 1.0), float(inv_t),
            HAS_SOFTCAP=softcap is not None, BLOCK=4096, num_warps=4,
        )  # fmt: skip
        return
    for rows in _rows(z):
        x = z[rows].to(peak.dtype)
        x = x if logit_scale == 1.0 else x * logit_scale
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        x = x if inv_t == 1.0 else x * inv_t
        m = x.amax(-1)
        x = x - m[:, None]
        e = x.exp()
        s = e.sum(-1)
        log_s = s.log()
        logps[rows] = x.gather(-1, ids[rows, None]).squeeze(-1) - log_s
        peak[rows] = m
        log_sum[rows] = log_s
        entropy[rows] = log_s - e.mul_(x.clamp_(min=-1e4)).sum(-1) / s  # the clamp: 0 * -inf is 0 here


def logits_grad(
    z, out, ids, peak, log_sum, entropy, c, e=None, *, logit_scale=1.0, softcap=None, inv_t=1.0, backend="torch"
):
    """Write ``c * dlogp/dz + e * dentropy/dz`` ``(R, V)`` to ``out``, which may be ``z`` itself.

    The statistics are those of ``row_stats``; ``c`` and ``e`` ``(R,)`` the loss's derivatives by log-prob and entropy,
    ``e=None`` where the entropy earns no gradient. With p the softmax, dlogp/dlogit is ``onehot - p`` and
    dentropy/dlogit ``-p (log p + entropy)``.
    """
    if not len(z):
        return
    if backend == "triton":
        _logits_grad_kernel[(len(z), triton.cdiv(z.shape[1], 2048))](
            z, z.stride(0), out, out.stride(0), ids, peak, log_sum, entropy, c, c if e is None else e, z.shape[1],
            float(logit_scale), float(softcap or 1.0), float(inv_t),
            HAS_SOFTCAP=softcap is not None, HAS_ENTROPY=e is not None, BLOCK=2048, num_warps=4,
        )  # fmt: skip
        return
    for rows in _rows(z):
        x = z[rows].to(peak.dtype)
        x = x if logit_scale == 1.0 else x * logit_scale
        if softcap is not None:
            t = torch.tanh(x / softcap)
            x = softcap * t
        log_p = ((x if inv_t == 1.0 else x * inv_t) - peak[rows, None]).sub_(log_sum[rows, None])
        p = log_p.exp()
        grad = p * -c[rows, None]
        grad.scatter_add_(-1, ids[rows, None], c[rows, None])
        if e is not None:
            grad -= e[rows, None] * p * (log_p.clamp_(min=-1e4) + entropy[rows, None])
        grad *= inv_t * logit_scale
        if softcap is not None:
            grad *= 1 - t * t
        out[rows] = grad
