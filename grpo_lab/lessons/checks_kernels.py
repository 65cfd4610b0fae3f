"""The checks of notebook 03: one function in plain PyTorch and four kernels; ``checks.py`` hands them out.

A kernel's logits stand in rows of a wider table, in fp32 and bf16, with and without a temperature: what lies beyond a
row must be neither read nor written. Without Triton its checks say so, and note nothing.
"""

import torch

from grpo_lab import kernels
from grpo_lab.lessons.grading import Inputs, check, compare, fail, generator


@check
def online_logsumexp(function):
    """03: log-sum-exp of one row, block by block, (row, block) -> scalar."""
    rng = generator()
    for length, block, scale in ((12, 4, 3.0), (11, 4, 3.0), (3, 8, 3.0), (40, 8, 200.0)):
        row = scale * torch.randn(length, generator=rng)
        row[-1] = row.max() + 2  # the peak moves in the last block
        x, starts = row.double(), range(0, length, block)
        peaks = [x[: a + block].amax() for a in starts]
        sums = [(x[a : a + block] - peak).exp().sum() for a, peak in zip(starts, peaks)]
        full = length // block * block
        compare(f"{length} numbers in blocks of {block}: log-sum-exp", function(row, block), x.logsumexp(0), None, [
            (peaks[-1] + sum(sums).log(), "Where the peak rises, the total so far shrinks by exp(old peak - new)."),
            (sum(sums).log(), "The total is relative to the peak, and not rescaled: peak + log(total) is wanted."),
            (x.logsumexp(0) - peaks[-1], "The total is relative to the peak: add the peak at the end."),
            (x.logsumexp(0).exp(), "The logarithm is missing."),
            (peaks[-1], "That is the peak alone."),
            (x[:full].logsumexp(0), "The last, shorter block is missing."),
            (x[-(length - len(starts[:-1]) * block) :].logsumexp(0), "That is the last block alone."),
        ])  # fmt: skip


def _rows_of_logits(rows, vocab, dtype, temperature=1.0):
    """Inputs whose logits stand in rows with 7 more columns, which no kernel may touch."""
    x = Inputs(rows, vocab)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = (3 * torch.randn(rows, vocab + 7, generator=generator()) - 20).to(device, dtype)
    memory[0, vocab - 1] = -2  # in the first row the peak moves in the last block
    memory[:, vocab:] += 30  # larger than all logits: whoever reads beyond a row's end notices
    x.beyond = memory[:, vocab:].clone()
    x.memory, x.z, x.raw = memory, memory[:, :vocab], memory[:, :vocab].cpu().double()
    x.logits, x.inv_t = x.raw / temperature, 1 / temperature
    x.log_p, x.size = x.logits.log_softmax(-1), x.logits.abs().max()
    x.logps = x.log_p[x.row, x.ids]
    x.entropy = -(x.log_p.exp() * x.log_p).sum(-1)
    x.d_logits = -x.c.double()[:, None] * x.log_p.exp()
    x.d_logits[x.row, x.ids] += x.c.double()
    x.d_logits /= temperature
    x.tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # the interpreter cuts fp32 to bf16 instead of rounding
    x.name = f"{rows} x {vocab} {str(dtype)[6:]}, temperature {temperature:g}:"
    x.given = x.ids.to(device), x.c.to(device)
    return x


SHAPES = (
    (3, 64, torch.float32, 1.0),
    (4, 150, torch.float32, 0.7),
    (2, 5, torch.float32, 2.0),
    (3, 200, torch.bfloat16, 1.3),
)
MISSING = "Triton is not installed (it needs Linux); PyTorch stands in for the kernel."


def _stored(name, got):
    for x in got if isinstance(got, tuple) else (got,):
        if isinstance(x, torch.Tensor) and x.numel() and x.isnan().all():
            fail(f"{name} every number is nan: nothing is stored (is the kernel filled in?), or -inf - -inf came up "
                 "(start the peak at a finite number, such as -1.0e30).")  # fmt: skip


def _untouched(x):
    changed = (x.memory[:, x.z.shape[1] :] != x.beyond).nonzero()
    if len(changed):
        row, column = changed[0].tolist()
        fail(f"{x.name} row {row}, column {column + x.z.shape[1]} lies beyond the row's end and was overwritten: "
             "give tl.store the mask of the load.")  # fmt: skip


@check
def row_max(function):
    """03: the largest logit of each row, by a kernel."""
    if kernels.triton is None:
        return MISSING
    for rows, vocab, dtype, _ in SHAPES:
        x = _rows_of_logits(rows, vocab, dtype)
        got = function(x.z)
        _stored(x.name, got)
        top = x.raw.amax(-1)
        compare(f"{x.name} max", got, top, lambda row: f"row {row}", [
            (top.clamp(min=0), "Beyond the row's end the load gives 0, larger than any logit here: other=-inf."),
            (x.memory.cpu().double().amax(-1), "The kernel reads beyond the row's end: mask=cols < V."),
            (x.raw[:, :64].amax(-1), "Those are the first 64 columns alone: the loop goes on to V."),
            (x.memory.cpu().double().view(-1)[: rows * vocab].view(rows, vocab).amax(-1),
             "A row begins `stride` numbers after the one before, not V."),
        ], scale=x.size)  # fmt: skip


def _logps(x, got):
    compare(f"{x.name} logps", got, x.logps, x.token, [
        (x.raw[x.row, x.ids] - x.logits.logsumexp(-1), "The sampled token's logit has not been multiplied by inv_t."),
        (x.logits[x.row, x.ids], "That is the logit: subtract the log-sum-exp."),
        (-x.logps, "The sign is turned round."),
        (x.d_logits[x.row, x.ids] * x.inv_t - x.logits.logsumexp(-1),
         "The sampled token's logit was loaded after the gradient had been written over it."),
    ], scale=x.size)  # fmt: skip


@check
def row_stats(function):
    """03: log-sum-exp, log-prob of ids and entropy of each row, (z, ids, inv_t) -> three (R,)."""
    if kernels.triton is None:
        return MISSING
    for shape in SHAPES:
        x = _rows_of_logits(*shape)
        before = x.z.clone()
        got = function(x.z, x.given[0], x.inv_t)
        if not isinstance(got, tuple) or len(got) != 3:
            fail(f"row_stats: got {'None' if got is None else type(got).__name__}, expected (lse, logps, entropy)")
        _stored(x.name, got)
        lse, logps, entropy = got
        exact, relative = x.logits.logsumexp(-1), x.logits.logsumexp(-1) - x.logits.amax(-1)
        compare(f"{x.name} log-sum-exp", lse, exact, lambda row: f"row {row}", [
            (x.raw.logsumexp(-1), "The temperature is left out: multiply by inv_t."),
            ((x.logits * x.inv_t).logsumexp(-1), "inv_t is in there twice."),
            (relative, "That is relative to the peak: add the peak."),
        ], scale=x.size)  # fmt: skip
        _logps(x, logps)
        compare(f"{x.name} entropy", entropy, x.entropy, lambda row: f"row {row}", [
            (-x.entropy, "The sign is turned round."),
            (x.entropy - relative, "log(total) is missing: log(total) - dot / total."),
            (exact, "That is the log-sum-exp: subtract the mean of x under p."),
        ], scale=x.size)  # fmt: skip
        if not torch.equal(before, x.z):
            fail(f"{x.name} right, but the logits were changed: this kernel only reads them.")


def _gradient(x):
    exact = x.d_logits
    onehot = torch.zeros_like(exact)
    onehot[x.row, x.ids] = x.c.double() * x.inv_t
    compare(f"{x.name} gradient", x.z, exact, x.entry, [
        (x.raw, "These are the logits, unchanged: is the kernel filled in, and does it store?"),
        (-exact, "The sign is turned round."),
        (exact / x.inv_t, "The derivative of z / T by z is 1 / T: multiply by inv_t."),
        (exact * x.inv_t, "inv_t is in there twice."),
        (2 * onehot - exact, "The softmax goes in with a minus: c * (onehot - p)."),
        (exact - onehot, "The onehot is missing: the sampled token's entry gets + c."),
        (exact / x.c.double()[:, None], "The coefficients c are left out."),
        (exact - onehot + onehot / x.c.double()[:, None], "The onehot is not multiplied by c."),
    ], tolerance=x.tolerance)  # fmt: skip
    _untouched(x)


@check
def logits_grad_(function):
    """03: the logits' gradient written over them by a kernel, (z, ids, lse, c, inv_t)."""
    if kernels.triton is None:
        return MISSING
    for shape in SHAPES:
        x = _rows_of_logits(*shape)
        function(x.z, x.given[0], x.logits.logsumexp(-1).float().to(x.z.device), x.given[1], x.inv_t)
        _gradient(x)


@check
def logps_and_grad_(function):
    """03: both in one kernel, (z, ids, c, inv_t) -> logps; z becomes its gradient."""
    if kernels.triton is None:
        return MISSING
    for shape in SHAPES:
        x = _rows_of_logits(*shape)
        got = function(x.z, *x.given, x.inv_t)
        _stored(x.name, got)
        _logps(x, got)
        _gradient(x)
