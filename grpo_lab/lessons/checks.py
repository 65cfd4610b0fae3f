"""The exercises' checks: ``checks.chunked_logps(chunked_logps)`` tries a student's function on fresh random inputs.

A check takes a second or less. It passes and says so, or names the first wrong number and what it should be, and what
many get wrong it knows by name. ``record(path)`` notes the tries in a file (``progress.py``). ``grading.py`` compares,
``checks_kernels.py`` has the checks of notebook 03, ``checks_lessons.py`` those of 01, 04 and 05.
"""

import torch

from grpo_lab.lessons.checks_kernels import logits_grad_, logps_and_grad_, online_logsumexp, row_max, row_stats  # noqa: F401
from grpo_lab.lessons.checks_lessons import (  # noqa: F401
    answers_that_fit,
    brief,
    clipped_coefficients,
    kl_coefficients,
    logits_bytes,
    marked_reward,
)  # fmt: skip
from grpo_lab.lessons.grading import Inputs, check, compare, fail, generator, record  # noqa: F401
from grpo_lab.memory import Watch


def _logps(name, x, got, chunk=None):
    N, V = x.log_p.shape
    mistakes = [
        (x.logps.exp(), "These are probabilities: the logarithm is missing."),
        (-x.logps, "The sign is turned round."),
        (x.logits[x.row, x.ids], "These are the logits themselves, not normalised: log-softmax is missing."),
        (x.log_p.amax(-1), "These are the log-probs of the likeliest tokens: take those of `ids`."),
        (x.log_p[torch.arange(N), x.ids.roll(1)], "Each row has its neighbour's id."),
    ]
    shapes = [
        ((N, V), "Of each row only the sampled token's entry is wanted: gather it."),
        ((N, 1), "Remove the last dimension: `[:, 0]`."),
        ((N, N), "That is every row's entry for every id; of a row only the entry for its own is wanted: gather it."),
        ((), "The log-probs of all tokens are wanted, not their sum or mean."),
    ]
    if chunk is not None:
        again = torch.cat([x.log_p[a : a + chunk].gather(1, x.ids[: len(x.log_p[a : a + chunk]), None])[:, 0]
                           for a in range(0, N, chunk)])  # fmt: skip
        mistakes.append((again, "Every chunk has the ids of the first: slice `ids` as well."))
        shapes.append(((N // chunk * chunk,), f"The last chunk is missing: {N} is no multiple of {chunk}."))
        shapes.append(((min(chunk, N),), "That is one chunk: collect all of them."))
        last = N - (N - 1) // chunk * chunk
        shapes.append(((last,), "That is the last chunk alone: collect all of them."))
    compare(name, got, x.logps, x.token, mistakes, shapes, scale=x.size)


def _gradients(name, x, d_hidden, d_weight, factor=1.0, chunk=None):
    def where(row, column):
        return f"token {row}" if row < len(x.hidden) else ""

    signs = "The sign is turned round."
    wanted = factor * x.d_hidden
    if d_hidden is None or d_weight is None:
        fail(f"{name}: {'d_hidden' if d_hidden is None else 'd_weight'} is None: no gradient arrives there. "
             "Was something detached, or computed under no_grad?")  # fmt: skip
    compare(f"{name} d_hidden", d_hidden, wanted, where, [
        (-wanted, signs),
        (x.d_hidden, f"The backward pass leaves out the incoming gradient, here {factor:g}."),
        (factor * x.d_logits.div(x.c.double()[:, None]) @ x.weight.double(), "The coefficients c are left out."),
    ], scale=x.size * x.weight.abs().max())  # fmt: skip
    wanted = factor * x.d_weight
    mistakes = [(-wanted, signs), (x.d_weight, f"The backward pass leaves out the incoming gradient, here {factor:g}.")]
    if chunk is not None:
        last = slice((len(x.hidden) - 1) // chunk * chunk, None)
        mistakes.append((factor * x.d_logits[last].T @ x.hidden[last].double(),
                         "That is the last chunk's share alone: dW is a sum over all chunks."))  # fmt: skip
    compare(f"{name} d_weight", d_weight, wanted, lambda v, h: f"vocabulary entry {v}", mistakes,
            scale=x.size * x.hidden.abs().max())  # fmt: skip


def _rows(name, watch, x, chunk):
    rows = watch.largest // len(x.weight)
    if rows > max(chunk, x.weight.shape[1]):
        fail(f"{name}: right so far, but a table of {rows} rows x {len(x.weight)} was made for {len(x.ids)} tokens; "
             f"a chunk has {chunk} rows, and no table may have more.")  # fmt: skip


@check
def naive_logps(function):
    """02: log-probs through full logits, (hidden, weight, ids) -> (N,)."""
    for tokens, scale in ((7, 3.0), (1, 3.0), (12, 80.0)):
        x = Inputs(tokens, scale=scale)
        _logps("logps", x, function(x.hidden, x.weight, x.ids))


@check
def chunked_logps(function):
    """02: the same, at most C rows of logits in one table."""
    for tokens, chunk, scale in ((11, 4, 3.0), (12, 4, 3.0), (3, 8, 3.0), (1, 5, 3.0), (13, 5, 80.0)):
        x = Inputs(tokens, scale=scale)
        hidden, weight = x.leaves()
        with Watch() as watch:
            got = function(hidden, weight, x.ids, chunk)
        _logps(f"{tokens} tokens, C = {chunk}: logps", x, got, chunk)
        _rows(f"{tokens} tokens, C = {chunk}", watch, x, chunk)
        if not got.requires_grad:
            fail("logps: right, but autograd cannot go back through them: was something detached?")
        (got * x.c).sum().backward()
        _gradients(f"{tokens} tokens, C = {chunk}:", x, hidden.grad, weight.grad)


@check
def recomputed_logps(function):
    """02: the same, and autograd keeps nothing of the size of a chunk's logits."""
    for tokens, chunk in ((11, 4), (12, 6), (3, 8)):
        x = Inputs(tokens)
        hidden, weight = x.leaves()
        inputs = {hidden.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
        kept = []

        def pack(saved, inputs=inputs, kept=kept):
            if saved.untyped_storage().data_ptr() not in inputs:
                kept.append(saved.numel())
            return saved

        with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            got = function(hidden, weight, x.ids, chunk)
        _logps(f"{tokens} tokens, C = {chunk}: logps", x, got, chunk)
        _rows(f"{tokens} tokens, C = {chunk}", watch, x, chunk)
        most = max(kept, default=0)
        if most >= len(x.weight):
            fail(f"logps: right, but autograd keeps a table of {most // len(x.weight)} rows x {len(x.weight)} for the "
                 "backward pass. Let checkpoint() call the function that makes the logits.")  # fmt: skip
        with Watch() as watch:
            (got * x.c).sum().backward()
        _rows(f"{tokens} tokens, C = {chunk}, backward", watch, x, chunk)
        _gradients(f"{tokens} tokens, C = {chunk}:", x, hidden.grad, weight.grad)


@check
def logits_grad(function):
    """02: the logits' gradient c (onehot - p) in the logits' place, (logits, ids, c) -> (C, V)."""
    for tokens, scale in ((5, 3.0), (1, 3.0), (9, 80.0)):
        x = Inputs(tokens, scale=scale)
        table = x.logits.float()
        got = function(table, x.ids, x.c)
        c = x.c.double()[:, None]
        onehot = torch.zeros_like(x.log_p)
        onehot[x.row, x.ids] = c[:, 0]
        compare("gradient", got, x.d_logits, x.entry, [
            (-x.d_logits, "The sign is turned round: the loss is the sum of c * log-prob, not its negative."),
            (x.d_logits / c, "The coefficients c are left out."),
            (x.d_logits * c, "The coefficients c are in there twice."),
            (2 * onehot - x.d_logits, "The softmax goes in with a minus: c * (onehot - p)."),
            (x.d_logits - onehot, "The onehot is missing: the sampled token's entry gets + c."),
            (x.d_logits - onehot + onehot / c, "The onehot is not multiplied by c."),
            (x.log_p.exp(), "That is the softmax."),
        ], scale=x.size)  # fmt: skip
        if got.data_ptr() != table.data_ptr():
            fail("gradient: right, but in a second table of the same size. Write it over the logits: torch's functions "
                 "that end in _ do.")  # fmt: skip


@check
def GradientsInForward(function):  # noqa: N802  named like the class
    """02: the loss as an autograd.Function, .apply(hidden, weight, ids, c, C)."""
    for tokens, chunk, factor in ((11, 4, 1.0), (12, 4, 3.0), (3, 8, 3.0), (9, 5, 0.5)):
        x, name = Inputs(tokens), f"{tokens} tokens, C = {chunk}:"
        hidden, weight = x.leaves()
        with Watch() as forward:
            loss = function.apply(hidden, weight, x.ids, x.c, chunk)
        exact = (x.c.double() * x.logps).sum()
        last = slice((tokens - 1) // chunk * chunk, None)
        compare(f"{name} loss", loss, exact, None, [
            (-exact, "The sign is turned round: the loss is the sum of c * log-prob."),
            (x.logps.sum(), "The coefficients c are left out."),
            (exact / tokens, "c holds the division by the number of tokens already: do not take the mean."),
            ((x.c.double() * x.logps)[last].sum(), "That is the last chunk's share alone: add up all chunks."),
        ], scale=tokens * x.size)  # fmt: skip
        with Watch() as backward:
            (factor * loss).backward()
        _gradients(name, x, hidden.grad, weight.grad, factor, chunk)
        _rows(name, forward, x, chunk)
        chunks = -(-tokens // chunk)
        if backward.products or len(forward.products) > 3 * chunks:
            fail(f"{name} right, with {len(forward.products)} matrix products forward, over {chunks} chunks, and "
                 f"{len(backward.products)} backward: 3 a chunk will do, and none backward.")  # fmt: skip


@check
def pack(function):
    """02: places of the scored tokens, those with a gradient first, and how many these are."""
    rng = generator()
    for B, T in ((3, 5), (1, 6), (4, 4)):
        mask = torch.rand(B, T, generator=rng) < 0.6
        mask[0, :2] = torch.tensor([False, True])
        advantages = torch.randn(B, generator=rng)
        advantages[1::2] = 0
        place = torch.arange(B * T).view(B, T)
        active = mask & (advantages != 0)[:, None]
        order = torch.cat([place[active], place[mask & ~active]])
        got = function(mask, advantages)
        if not isinstance(got, tuple) or len(got) != 2:
            fail(f"pack: got {'None' if got is None else type(got).__name__}, expected a tuple (order, active)")

        def where(i, order=order, T=T, active=active):
            b, t = divmod(order[i].item(), T)
            return f"which is sequence {b}, position {t}, {'with' if active[b, t] else 'without'} a gradient"

        everything = torch.cat(
            [place[(advantages != 0)[:, None].expand(B, T)], place[(advantages == 0)[:, None].expand(B, T)]]
        )
        mistakes = [
            (place[mask], "These are the scored tokens, but those with advantage 0 do not stand last."),
            (torch.cat([place[mask & ~active], place[active]]), "Tokens without a gradient go last, not first."),
        ]
        shapes = [
            (everything.shape, "The mask is ignored: padding is packed too."),
            (place[active].shape, "Scored tokens with advantage 0 belong in there too, behind the others."),
        ]
        compare("order", got[0], order.double(), where, mistakes, shapes)
        compare("active", got[1], active.sum().double(), None, [
            (torch.tensor(float(len(order))), "That counts all scored tokens; with advantage 0 there is no gradient."),
        ])  # fmt: skip
