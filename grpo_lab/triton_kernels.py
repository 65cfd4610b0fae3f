"""The per-row kernels in Triton. ``kernels.py`` says what they compute and launches them; nothing else imports this.

One program takes a row, or a slice of one, in blocks of BLOCK columns. The next block is on its way from memory while
one is worked on. A block's sums are the same instructions wherever they are taken, so that a row's log-prob has the
same bits whether its logits arrive whole or slice by slice.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
# Far below any logit, and yet finite, also times log2 e: 0 * -inf is no 0, and the interpreter warns of overflow
_BELOW = tl.constexpr(-2.0e38)


@triton.jit
def _exp(x):
    """tl.exp would take three more instructions for results below 2^-126."""
    return tl.exp2(x * _LOG2E)


@triton.jit
def _load(z_ptr, cols, end):
    """The head's outputs in the columns below end, _BELOW beyond."""
    return tl.load(z_ptr + cols, mask=cols < end, other=_BELOW)


@triton.jit
def _to_logits(z, inside, scale, cap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Logits of the outputs z; ``cap`` is the softcap over the temperature."""
    x = z.to(tl.float32)
    if HAS_SCALE or HAS_SOFTCAP:
        x *= scale
        if HAS_SOFTCAP:
            x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
        x = tl.where(inside, x, _BELOW)
    return x


@triton.jit
def _logit(z_ptr, scale, cap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    return _to_logits(tl.load(z_ptr), True, scale, cap, HAS_SCALE, HAS_SOFTCAP)


@triton.jit
def _absorb_block(x, cols, first, at, peak, total, dot, SLACK: tl.constexpr, BLOCK: tl.constexpr):
    """A row's running statistics after the logits x of BLOCK columns from ``first``, the sampled token ``at`` kept out;
    their numerators; and by what earlier ones shrink."""
    if (at >= first) & (at < first + BLOCK):
        x = tl.where(cols == at, _BELOW, x)
    top = tl.max(x, axis=0)
    new_peak = tl.where(top > peak + SLACK, top, peak)
    shift = x - new_peak
    e = _exp(shift)
    e_dot = tl.sum(e * shift, axis=0)
    if e_dot != e_dot:  # 0 * -inf of a logit that is -inf; of a NaN it stays one
        e_dot = tl.sum(e * tl.maximum(shift, -1e30, propagate_nan=tl.PropagateNan.ALL), axis=0)
    rescale = _exp(peak - new_peak)
    dot = rescale * (dot + (peak - new_peak) * total) + e_dot
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


# Arguments that may be any number, or lie anywhere, without another compilation
_VARYING = ("state_stride", "first", "H", "H2", "weight_stride")
_UNALIGNED = tuple(
    "ids_ptr at_ptr state_ptr sums_ptr sums2_ptr peak_ptr log_norm_ptr rest_ptr entropy_ptr c_ptr bonus_ptr "
    "factor_ptr".split()
)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def absorb(
    z_ptr, z_stride, e_ptr, e_stride, width, ids_ptr, state_ptr, state_stride, first, gain, scale, cap,
    sums_ptr, H, sums2_ptr, H2, NUMERATORS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    z_row = z_ptr + row * z_stride
    x = _to_logits(_load(z_row, cols, width), cols < width, scale, cap, HAS_SCALE, HAS_SOFTCAP)
    at = (tl.load(ids_ptr + row) - first).to(tl.int32)
    state_ptr += row
    peak = tl.load(state_ptr)
    total = tl.load(state_ptr + state_stride)
    dot = tl.load(state_ptr + 2 * state_stride)
    if (at >= 0) & (at < width):
        tl.store(state_ptr + 3 * state_stride, _logit(z_row + at, scale, cap, HAS_SCALE, HAS_SOFTCAP))
    new_peak, total, dot, e, rescale = _absorb_block(x, cols, 0, at, peak, total, dot, SLACK, BLOCK)
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
def row_stats(
    z_ptr, z_stride, g_ptr, g_stride, V, ids_ptr, state_ptr, state_stride, c_ptr, gain, scale, cap,
    GRAD: tl.constexpr, NUMERATORS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SLACK: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * z_stride
    g_row = g_ptr + row * g_stride
    lanes = tl.arange(0, BLOCK)
    at = tl.load(ids_ptr + row).to(tl.int32)
    target = _logit(z_row + at, scale, cap, HAS_SCALE, HAS_SOFTCAP)  # before it is overwritten
    peak = LOWEST
    total = 0.0
    dot = 0.0
    ahead = _load(z_row, lanes, V)
    for first in range(0, V, BLOCK):
        cols = first + lanes
        x = _to_logits(ahead, cols < V, scale, cap, HAS_SCALE, HAS_SOFTCAP)
        ahead = _load(z_row, cols + BLOCK, V)
        new_peak, total, dot, e, rescale = _absorb_block(x, cols, first, at, peak, total, dot, SLACK, BLOCK)
        if NUMERATORS:
            e = _numerators(e, x, cap, gain, HAS_SOFTCAP)
            tl.store(g_row + cols, e.to(g_ptr.dtype.element_ty), mask=cols < V)
            if (new_peak != peak) & (first > 0):
                tl.debug_barrier()  # other threads wrote what is read here
                _rescale_row(g_row, rescale, first, BLOCK)
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
        last = (V - 1) // BLOCK * BLOCK
        ahead = _load(z_row, last + lanes, V)
        for back in range(0, V, BLOCK):  # what was read last is what the cache still has
            first = last - back
            cols = first + lanes
            x = _to_logits(ahead, cols < V, scale, cap, HAS_SCALE, HAS_SOFTCAP)
            ahead = tl.load(z_row + cols - BLOCK, mask=cols >= BLOCK)
            grad = of_others * _exp(x - peak)
            if (at >= first) & (at < first + BLOCK):
                grad = tl.where(cols == at, of_target, grad)
            if HAS_SOFTCAP:
                t = x / cap
                grad *= 1 - t * t
            tl.store(g_row + cols, grad.to(g_ptr.dtype.element_ty), mask=cols < V)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def logits_grad(
    z_ptr, z_stride, g_ptr, g_stride, width, ids_ptr, peak_ptr, log_norm_ptr, rest_ptr, entropy_ptr, c_ptr, bonus_ptr,
    first, scale, cap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _to_logits(_load(z_ptr + row * z_stride, cols, width), cols < width, scale, cap, HAS_SCALE, HAS_SOFTCAP)
    shift = x - tl.load(peak_ptr + row)
    log_norm = tl.load(log_norm_ptr + row)
    c = tl.load(c_ptr + row) * scale
    at = (tl.load(ids_ptr + row) - first).to(tl.int32)
    e = _exp(shift)
    grad = tl.where(cols == at, c * tl.load(rest_ptr + row), -c * tl.exp(-log_norm) * e)
    if HAS_ENTROPY:
        log_p = shift - log_norm
        p = _exp(log_p)
        bonus = tl.load(bonus_ptr + row) * scale * p * (log_p + tl.load(entropy_ptr + row))
        grad -= tl.where(p > 0, bonus, 0.0)
    if HAS_SOFTCAP:
        t = x / cap
        grad = tl.where(e > 0, grad * (1 - t * t), grad)
    tl.store(g_ptr + row * g_stride + cols, grad.to(g_ptr.dtype.element_ty), mask=cols < width)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def put_rows(
    x_ptr, x_stride, out_ptr, out_stride, width, at_ptr, state_ptr, state_stride, c_ptr, weight_ptr, weight_stride,
    ids_ptr, gain, scale, cap, NUMERATORS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < width).to(tl.float32) / gain
    if NUMERATORS:
        state_ptr += row
        target = tl.load(state_ptr + 3 * state_stride)
        log_norm, rest = _normalise(tl.load(state_ptr), tl.load(state_ptr + state_stride), target)
        if HAS_SOFTCAP:
            t = target / cap
            rest *= 1 - t * t
        weight = tl.load(weight_ptr + tl.load(ids_ptr + row) * weight_stride + cols, mask=cols < width).to(tl.float32)
        x = tl.load(c_ptr + row) * scale * (rest * weight - tl.exp(-log_norm) * x)
    out = out_ptr + tl.load(at_ptr + row) * out_stride + cols
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=cols < width)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def scaled(x_ptr, x_stride, out_ptr, out_stride, width, factor_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < width).to(tl.float32) * tl.load(factor_ptr)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < width)
