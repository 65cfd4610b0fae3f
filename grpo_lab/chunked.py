"""The chunked loss head: full logits never exist, and gradients are computed in the forward pass.

cuBLAS fills a buffer with some of the logits, row kernels turn them into log-probs and then into their gradient, and
more GEMMs take that to dH and dW before the next chunk begins. ``loss.py`` holds the public functions, ``plan.py``
chooses the buffer.

Wide: the buffer holds a chunk's whole rows ``(C, V)``. Once a row's log-prob is known, the objective gives its
coefficient and a kernel overwrites the row with its gradient; a coefficient known beforehand needs one kernel, not two.
Narrow: it holds one tile ``(C, SLICE)`` after another.

Where a head is frozen, logits become softmax numerators ``e = exp(logit - peak)`` in one step, as in FlashAttention,
whatever the coefficients will be: dH is ``c ((1 - p) w - sum(e W) / Z)``, w and p the sampled token's own, kept out of
the sums, Z the softmax's denominator. Narrow tiles add up ``e W`` as they come. A head that trains can be treated alike
and then take one more sweep, one vocabulary slice at a time over all tokens: its gradient is written once, in its own
dtype, which takes the least memory.

Routes, by what a token's coefficient depends on (``Objective.coupling``):
  nothing, token   one pass over chunks of packed tokens
  sequence         one pass over chunks of whole sequences, whose last rows stay empty; two phases if a sequence is
                   longer than a chunk
  batch            two phases: all log-probs first, gradients when the backward pass asks for them
An entropy bonus needs rows of gradients: it takes one pass where the plan is wide without slices, else two phases.
GEMMs of head size, f the share of tokens with a gradient: 1 + 2f; frozen 1 + f; with dW in slices 1 + 3f. Two phases
compute f more.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from grpo_lab.kernels import absorb, finish, logits_grad, resolve_backend, row_stats, scaled
from grpo_lab.naive import naive_logps
from grpo_lab.plan import Plan, bins
from grpo_lab.workspace import Workspace, add_products, lies_in_rows


class Head(NamedTuple):
    """The differentiable inputs: logits are ``hidden weight.T + bias + lora_states lora_weight.T``."""

    hidden: torch.Tensor  # (B, T, H)
    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None = None  # (V,)
    lora_states: torch.Tensor | None = None  # (B, T, r)
    lora_weight: torch.Tensor | None = None  # (V, r)

    @property
    def trained(self) -> int:
        """Columns of the head that get a gradient."""
        pairs = (self.weight, self.lora_weight)
        columns = sum(x.shape[1] for x in pairs if x is not None and x.requires_grad)
        return columns or int(self.bias is not None and self.bias.requires_grad)

    @property
    def trained_itemsize(self) -> int | None:
        """Bytes of an element of the gradient of the head."""
        weights = (self.weight, self.lora_weight, self.bias)
        return max((x.dtype.itemsize for x in weights if x is not None and x.requires_grad), default=None)

    def copied(self, numerics) -> int:
        """Bytes of the copies that a call makes: of weights in another dtype, of states that do not lie in rows."""
        weights = [x for x in (self.weight, self.lora_weight) if x is not None]
        states = [x for x in (self.hidden, self.lora_states) if x is not None and not lies_in_rows(x)]
        size = sum(x.numel() for x in weights if x.dtype != numerics.dtype) * numerics.dtype.itemsize
        if numerics.logits_fp32 and not self.weight.is_cuda:  # no product has a wider result than its factors there
            size += 4 * sum(x.numel() for x in weights)
        return size + sum(x.numel() * x.dtype.itemsize for x in states)


def one_pass(sweep, objective, tokens, head, coupling):
    """Loss, log-probs, entropies and diagnostics, with the gradients already computed and attached to the loss.
    ``tokens()`` is called when the first logits are on their way: a GPU is not left waiting for many small launches."""
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head]

    @functools.cache
    def scale_and_known():
        # The logits gradient is rounded to the head's dtype: at its natural size (advantage / N) fp16 would lose it, or
        # overflow. A power of two moves it to about 1 and back without a rounding error.
        t, scale = tokens(), 1.0
        if sweep.numerics.dtype == torch.float16:
            size = t.advantages.abs() * (1.0 if t.importance_ratio is None else t.importance_ratio.abs())
            size = t.weight * size.clamp(min=objective.beta)
            scale = _power_of_two(torch.cat([size, objective.entropy_coef * t.entropy_weight[None]]))
        if coupling != "nothing":
            return scale, None
        zeros = torch.zeros_like(t.weight)
        return scale, objective.coefficients(zeros, zeros, t)[0] / scale

    def coefficients(part, stats):
        scale, known = scale_and_known()
        if known is not None:
            return known[part], None
        c, e = objective.coefficients(stats.logps, stats.entropy, tokens()[part])
        return c / scale, None if e is None else e / scale

    with torch.no_grad():
        if any(needs):
            stats, grads = sweep.learn(head, needs, coefficients, coupling == "nothing", objective.entropy_coef != 0.0)
        else:
            stats = finish(sweep.statistics(head))
        loss, diagnostics = objective.loss(stats.logps, stats.entropy, tokens())
    if any(needs):
        loss = _Precomputed.apply(loss, scale_and_known()[0], grads, sweep.numerics.backend, *head)
    return loss, stats.logps, stats.entropy, diagnostics


class _Precomputed(torch.autograd.Function):
    """A loss whose gradients exist already: the backward pass only scales them."""

    @staticmethod
    def forward(ctx, loss, scale, grads, backend, *head):
        ctx.scale, ctx.grads, ctx.backend = scale, grads, backend
        ctx.dtypes = [None if x is None else x.dtype for x in head]
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        _no_second_derivative()
        if ctx.grads is None:
            raise RuntimeError(
                "the chunked loss was sent backward a second time; it computes gradients once, in the forward pass. "
                "Call grpo_loss again, or use token_logps where a graph must be kept (retain_graph=True)"
            )
        grads, ctx.grads = ctx.grads, None
        return None, None, None, None, *_scaled(grads, grad * ctx.scale, ctx.dtypes, ctx.backend)


class LogProbs(torch.autograd.Function):
    """Log-probs and entropies ``(N,)``; the backward pass recomputes the logits of tokens that have a gradient."""

    @staticmethod
    def forward(ctx, sweep, *head):
        state = sweep.statistics(Head(*head))
        ctx.save_for_backward(state, *head)
        ctx.sweep = sweep
        ctx.set_materialize_grads(False)
        stats = finish(state)
        return stats.logps, stats.entropy

    @staticmethod
    def backward(ctx, c, e):
        _no_second_derivative()
        state, *head = ctx.saved_tensors
        c = torch.zeros_like(state[0]) if c is None else c
        has_grad = c != 0 if e is None else (c != 0) | (e != 0)
        order = has_grad.logical_not().long().argsort(stable=True)[: int(has_grad.sum())]
        c, e = c[order], None if e is None else e[order]
        scale = _power_of_two(c if e is None else torch.cat([c, e]))
        grads = ctx.sweep.subset(order).learn_known(
            Head(*head), ctx.needs_input_grad[1:], finish(state[:, order]), c / scale, None if e is None else e / scale
        )
        dtypes = [None if x is None else x.dtype for x in head]
        return None, *_scaled(grads, scale, dtypes, ctx.sweep.numerics.backend)


def _scaled(grads, factor, dtypes, backend):
    """The gradients times ``factor`` in their tensors' dtypes."""
    pairs = zip(grads, dtypes, strict=True)
    return (g if g is None else scaled(g, factor, dtype, backend=backend) for g, dtype in pairs)


def _no_second_derivative():
    if torch.is_grad_enabled():
        raise RuntimeError("the chunked loss has no second derivatives (create_graph=True): use impl='naive'")


@dataclass(frozen=True)
class Numerics:
    """In which dtype a head's products are computed, and how they become logits."""

    dtype: torch.dtype
    logits: dict  # logit_scale, softcap, inv_t, backend: what the row kernels need
    logits_fp32: bool
    temperature: float

    @classmethod
    def of(cls, head, temperature, softcap, logit_scale, backend, logits_fp32):
        device = head.hidden.device
        dtype = torch.promote_types(head.hidden.dtype, head.weight.dtype)
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device.type)
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap={softcap!r}: expected None or a number above 0")
        if not isinstance(logit_scale, (int, float)) or not math.isfinite(logit_scale):
            raise ValueError(f"logit_scale={logit_scale!r}: expected a finite number")
        if dtype == torch.float64 and backend == "auto":
            backend = "torch"  # the kernels calculate in fp32
        backend = resolve_backend(backend, device)
        logits = dict(logit_scale=logit_scale, softcap=softcap, inv_t=1.0 / temperature, backend=backend)
        return cls(dtype, logits, logits_fp32 and dtype.itemsize < 4, temperature)

    @property
    def backend(self):
        return self.logits["backend"]

    @property
    def logits_dtype(self):
        return torch.float32 if self.logits_fp32 else self.dtype

    def naive(self, head, token_ids, scored, entropy_grad):
        lora = None if head.lora_states is None else (head.lora_states, head.lora_weight)
        return naive_logps(
            head.hidden, head.weight, token_ids, scored, bias=head.bias, lora=lora, temperature=self.temperature,
            softcap=self.logits["softcap"], logit_scale=self.logits["logit_scale"], logits_fp32=self.logits_fp32,
            entropy_grad=entropy_grad,
        )  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """The loops over chunks. ``spans`` are ``(start, end, active)``: tokens of a chunk, and whether they have a
    gradient."""

    numerics: Numerics
    plan: Plan
    position: torch.Tensor  # (N,) indices into the flattened (B, T)
    ids: torch.Tensor  # (N,)
    spans: list

    def subset(self, index, plan=None):
        """The sweep over these tokens alone, all of them with a gradient."""
        plan, ids = plan or self.plan, self.ids[index]
        return Sweep(self.numerics, plan, self.position[index], ids, cut(len(ids), len(ids), plan.C))

    def statistics(self, head):
        """The kernels' running ``state`` ``(4, N)`` of all tokens."""
        with _no_autocast(head):
            work = Workspace(self, head, wide=self.plan.wide)
            for a, b, _ in self.spans:
                self._logits_and_sums(work, a, b)
            return work.state

    def learn(self, head, needs, coefficients, beforehand, bonus):
        """``(RowStats, gradients)`` in one pass, or two for a head whose gradient comes in slices. ``coefficients(part,
        stats)`` gives ``(c, e)`` of the tokens in the slice ``part``; ``beforehand``: it needs no stats; ``bonus``:
        there is an e."""
        with _no_autocast(head):
            now, later = self._split(needs)
            work = Workspace(self, head, now, self.plan.wide)
            if now[1] or now[2] or now[4] or bonus:
                self._learn_in_place(work, coefficients, beforehand)
                return finish(work.state), work.gradients()
            c = self._learn_rows(work, coefficients, beforehand)
            stats, grads = finish(work.state), work.gradients()
            del work  # its buffers too
            learnt = slice(0, sum(b - a for a, b, active in self.spans if active))
            return stats, self._weight_by_slices(head, later, grads, learnt, stats, c, None)

    def learn_known(self, head, needs, stats, c, e):
        """The gradients, given all statistics (RowStats) and coefficients ``(N,)``."""
        with _no_autocast(head):
            now, later = self._split(needs)
            work = Workspace(self, head, now, self.plan.wide)
            c, e = c * work.gain, None if e is None else e * work.gain
            for a, b, _ in self.spans if any(now) else ():
                work.load(a, b)
                sums = [x[: b - a] for x in work.sums]
                ids, *rest = self._grad_arguments(a, b, stats, c, e)
                for first, z, g, weights in work.tiles():
                    logits_grad(z, g, ids, first, *rest, **self.numerics.logits)
                    if work.wide:
                        work.learn_weight(g, work.grads)
                        sums = work.products(g)
                    else:
                        add_products(sums, g, weights, first)
                work.learn_rows(slice(a, b), sums)
            grads = work.gradients()
            del work
            return self._weight_by_slices(head, later, grads, slice(None), stats, c, e)

    def _split(self, needs):
        """Which gradients the first sweep takes, and which a second one, over slices of the vocabulary."""
        rows, whole = (needs[0], False, False, needs[3], False), (False, needs[1], needs[2], False, needs[4])
        return (rows, whole) if self.plan.slices else (needs, (False,) * 5)

    def _learn_in_place(self, work, coefficients, beforehand):
        """Whole rows of logits become their gradient."""
        logits = self.numerics.logits
        for a, b, active in self.spans:
            if not active:
                self._logits_and_sums(work, a, b)
                continue
            part = slice(a, b)
            work.load(a, b)
            _, z, g, _ = work.tile(0)
            ids, state = self.ids[part], work.state[:, part]
            if beforehand:
                row_stats(z, ids, state, grad=g, c=coefficients(part, None)[0], gain=work.gain, **logits)
            else:
                row_stats(z, ids, state, **logits)
                stats = finish(state)
                c, e = (x if x is None else x * work.gain for x in coefficients(part, stats))
                logits_grad(z, g, ids, 0, stats, c, e, **logits)
            work.learn_weight(g, work.grads)
            work.learn_rows(part, work.products(g))

    def _learn_rows(self, work, coefficients, beforehand):
        """Statistics and dH by way of softmax numerators; if there are slices to come, their coefficients ``(N,)``,
        ``gain`` times too large."""
        all_c = torch.zeros_like(work.state[0])
        active = [(a, b) for a, b, active in self.spans if active]
        if work.wide:
            work.sums = work.new_sums(min(self.plan.together, len(active)))
        for i in range(0, len(active), self.plan.together):
            group = active[i : i + self.plan.together]
            part = slice(group[0][0], group[-1][1])
            for a, b in group:
                self._logits_and_sums(work, a, b, [x[a - part.start : b - part.start] for x in work.sums])
            c, _ = coefficients(part, None if beforehand else finish(work.state[:, part]))
            if self.plan.slices:
                all_c[part] = c
            work.learn_rows(part, [x[: part.stop - part.start] for x in work.sums], c)
        for a, b, _ in self.spans[len(active) :]:
            self._logits_and_sums(work, a, b)
        return all_c.mul_(work.gain)

    def _logits_and_sums(self, work, a, b, sums=()):
        """The statistics of a chunk go to ``work.state``, its ``sum(e W)`` to ``sums`` if there are some."""
        work.load(a, b)
        ids, state, logits = self.ids[a:b], work.state[:, a:b], self.numerics.logits
        for first, z, g, weights in work.tiles():
            if work.wide:
                row_stats(z, ids, state, numerators=g if sums else None, gain=work.gain, **logits)
            else:
                absorb(z, ids, first, state, g if sums else None, sums, work.gain, **logits)
            add_products(sums, g, weights if sums else (), first)

    def _weight_by_slices(self, head, needs, grads, index, stats, c, e):
        """``grads`` and the head's gradient from the tokens in ``index``: one slice of the vocabulary at a time, over
        all of these tokens, so that it is written once, in its own dtype."""
        if not any(needs):
            return grads
        sweep, stats, c = self.subset(index, Plan(self.plan.slices, False)), stats.at(index), c[index]
        work = Workspace(sweep, head, needs)
        chunks = [(a, b, sweep._grad_arguments(a, b, stats, c, e)) for a, b, _ in sweep.spans]
        for first, part in work.weight_slices():
            for a, b, (ids, *rest) in chunks:
                work.load(a, b)
                _, z, g, _ = work.tile(first)
                logits_grad(z, g, ids, first, *rest, **self.numerics.logits)
                work.learn_weight(g, part)
        return [mine if mine is not None else theirs for mine, theirs in zip(work.gradients(), grads, strict=True)]

    def _grad_arguments(self, a, b, stats, c, e):
        """What ``logits_grad`` takes of tokens a to b: views to be made once a chunk, since making them takes the host
        as long as a tile takes the device."""
        part = slice(a, b)
        return self.ids[part], stats.at(part), c[part], None if e is None else e[part]


@contextlib.contextmanager
def _no_autocast(head):
    """And with the head's device as the current one, where Triton launches whatever device its arguments are on."""
    with torch.autocast(head.hidden.device.type, enabled=False), torch.cuda.device_of(head.hidden):
        yield


def _power_of_two(x):
    """The power of two below the largest magnitude in x (0-dim tensor, no device sync)."""
    largest = torch.cat([x.detach().abs(), x.new_zeros(1)]).max()
    return torch.exp2(torch.floor(torch.log2(largest.clamp(min=torch.finfo(x.dtype).tiny))))


def cut(n_active, n, C):
    """Spans of at most C tokens, the first n_active with a gradient, the rest without."""
    parts = ((0, n_active, True), (n_active, n, False))
    return [(a, min(a + C, end), active) for start, end, active in parts for a in range(start, end, C)]


def packed(scored, active, n, n_active, C):
    """Scored positions, those with a gradient first, and their spans."""
    order = (scored.byte() + active).reshape(-1).sort(stable=True, descending=True).indices
    return order[:n], cut(n_active, n, C)


def whole_sequences(scored, sequences, C):
    """Scored positions and spans of at most C tokens that cut no sequence; ``sequences`` as in ``plan.bins``."""
    rank = [0] * len(sequences)
    spans, start = [], 0
    for tokens, is_active, members in sorted(bins(sequences, C), key=lambda bin: not bin[1]):
        spans.append((start, start + tokens, is_active))
        start += tokens
        for i in members:
            rank[i] = len(spans)
    key = torch.tensor(rank, device=scored.device)[:, None].expand(scored.shape)
    return key.masked_fill(~scored, len(spans) + 1).reshape(-1).argsort(stable=True)[:start], spans
