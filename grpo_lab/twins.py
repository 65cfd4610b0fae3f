"""Torch twins of the row kernels: the same arithmetic on every device, and the default on a CPU.

``kernels.py`` describes the arguments. Rows are taken a few at a time, so that their fp32 temporaries stay small.
"""

import torch

SLACK = 5.0  # a row's peak moves only when a logit exceeds it by more: numerators stay below exp(5), fp16 has room
ELEMENTS = 1 << 19  # of a temporary on a CPU: 2 MiB in fp32, small enough to stay in its cache


def _rows(z):
    step = max(1, (ELEMENTS if z.device.type == "cpu" else 1 << 26) // z.shape[1])
    return (slice(a, min(a + step, len(z))) for a in range(0, len(z), step))


def _logits(z, dtype, logit_scale, softcap, inv_t):
    """Logits in dtype, and the derivative of the softcap or None."""
    x = z.to(dtype, copy=True)
    x = x if logit_scale == 1.0 else x.mul_(logit_scale)
    slope = None
    if softcap is not None:
        t = torch.tanh(x / softcap)
        x, slope = softcap * t, 1 - t * t
    return x if inv_t == 1.0 else x.mul_(inv_t), slope


def absorb(z, ids, first, state, numerators, sums, gain, logit_scale, softcap, inv_t):
    width = z.shape[1]
    for rows in _rows(z):
        x, slope = _logits(z[rows], state.dtype, logit_scale, softcap, inv_t)
        peak, total, dot, target = state[:, rows]
        at = ids[rows] - first
        here = (at >= 0) & (at < width)
        at = at.clamp(0, width - 1)[:, None]
        value = x.gather(1, at)
        target.copy_(torch.where(here, value[:, 0], target))
        x.scatter_(1, at, value.masked_fill(here[:, None], -torch.inf))
        top = x.amax(-1)
        new_peak = torch.where(top > peak + SLACK, top, peak)
        x -= new_peak[:, None]
        e = x.exp()
        rescale = (peak - new_peak).exp()
        more = (e * x.clamp_(min=-1e4)).sum(-1)  # the clamp: 0 * -inf is 0 here
        dot.copy_(rescale * (dot + (peak - new_peak) * total) + more)
        total.copy_(total * rescale + e.sum(-1))
        peak.copy_(new_peak)
        if numerators is not None:
            e = e if slope is None else e.mul_(slope)
            numerators[rows] = e if gain == 1.0 else e.mul_(gain)
            for x in sums if first else ():
                x[rows] *= rescale[:, None]


def logits_grad(z, out, ids, first, stats, c, e, logit_scale, softcap, inv_t):
    width = z.shape[1]
    for rows in _rows(z):
        x, slope = _logits(z[rows], stats.peak.dtype, logit_scale, softcap, inv_t)
        s = stats.at(rows)
        log_p = x.sub_(s.peak[:, None]).sub_(s.log_norm[:, None])
        grad = log_p.exp()
        bonus = None if e is None else e[rows, None] * grad * (log_p.clamp_(min=-1e4) + s.entropy[:, None])
        grad *= -c[rows, None]
        at = ids[rows] - first
        here = (at >= 0) & (at < width)
        at = at.clamp(0, width - 1)[:, None]
        grad.scatter_(1, at, torch.where(here[:, None], (c[rows] * s.rest)[:, None], grad.gather(1, at)))
        grad = grad if bonus is None else grad.sub_(bonus)
        grad = grad if inv_t * logit_scale == 1.0 else grad.mul_(inv_t * logit_scale)
        out[rows] = grad if slope is None else grad.mul_(slope)


def put_rows(x, out, at, scale, own, weight, ids):
    for rows in _rows(x):
        value = x[rows] * scale[rows, None]
        value = value if own is None else value.addcmul_(weight[ids[rows]].to(value.dtype), own[rows, None])
        out.index_copy_(0, at[rows], value.to(out.dtype))
