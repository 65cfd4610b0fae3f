"""The chunked loss head: full logits never exist, and gradients are computed in the forward pass.

A chunk's logits live in one reused ``(C, V)`` buffer: cuBLAS fills it, one kernel reads it for log-probs and
entropies, the objective turns those into coefficients, a second kernel overwrites it with the logits gradient, and two
more GEMMs take that to dH and dW before the next chunk begins. ``loss.py`` holds the public functions.

Routes, by what a token's coefficient depends on (``Objective.coupling``):
  nothing, token   one pass over chunks of packed tokens
  sequence         one pass over chunks of whole sequences, whose last rows stay empty; two phases if a sequence is
                   longer than a chunk
  batch            two phases: all log-probs first, gradients when the backward pass asks for them
GEMMs of head size, f the share of tokens with a gradient: 1 + 2f in one pass and 1 + 3f in two phases, f fewer where
the head is frozen.
"""

import math
from dataclasses import dataclass

import torch

from grpo_lab.kernels import logits_grad, resolve_backend, row_stats
from grpo_lab.naive import naive_logps

# Bytes of the logits buffer for chunk_tokens="auto". On a GPU small chunks pay for launches and for the fp32 dW that
# each of them reads and writes; on a CPU large ones leave the cache.
AUTO_BUFFER_BYTES = {"cuda": 640 << 20, "cpu": 32 << 20}
# fp16 rounds what is below 6e-5 to few bits, and 1 / V is below it: probabilities are multiplied by this on their way
# through the gradient GEMMs, which accumulate in fp32.
FP16_HEADROOM = 256.0


def plan_chunk(n_tokens: int, vocab: int, itemsize: int, device: torch.device, free_bytes: int | None = None) -> int:
    """Rows C of the logits buffer for ``n_tokens`` scored tokens: the fewest equal chunks whose buffer stays within
    ``AUTO_BUFFER_BYTES`` and a quarter of the free device memory."""
    budget = AUTO_BUFFER_BYTES.get(device.type, AUTO_BUFFER_BYTES["cuda"])
    if free_bytes is None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free_bytes = torch.cuda.mem_get_info(device)[0] + cached
    if free_bytes is not None:
        budget = min(budget, free_bytes // 4)
    most = max(64, budget // (vocab * itemsize))
    chunks = max(1, -(-n_tokens // most))
    return -(-max(1, n_tokens) // chunks)


def one_pass(sweep, objective, tokens, hidden, weight, bias, coupling):
    """Loss, log-probs, entropies and diagnostics, with the gradients already computed and attached to the loss."""
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    # The logits gradient is rounded to the head's dtype: at its natural size (advantage / N) fp16 would lose it, or
    # overflow. A power of two moves it to about 1 and back without a rounding error.
    size = tokens.advantages.abs() * (1.0 if tokens.importance_ratio is None else tokens.importance_ratio.abs())
    size = torch.cat(
        [tokens.weight * size.clamp(min=objective.beta), objective.entropy_coef * tokens.entropy_weight[None]]
    )
    scale = _power_of_two(size)
    if any(needs) and coupling == "nothing":
        zeros = torch.zeros_like(tokens.weight)
        known = objective.coefficients(zeros, zeros, tokens)[0] / scale

    def coefficients(part, logps, entropy):
        if coupling == "nothing":
            return known[part], None
        c, e = objective.coefficients(logps[part], entropy[part], tokens[part])
        return c / scale, None if e is None else e / scale

    with torch.no_grad():
        (logps, *_, entropy), grads = sweep(hidden, weight, bias, needs, coefficients if any(needs) else None)
        loss, diagnostics = objective.loss(logps, entropy, tokens)
    if any(needs):
        loss = _Precomputed.apply(loss, scale, grads, hidden, weight, bias)
    return loss, logps, entropy, diagnostics


class _Precomputed(torch.autograd.Function):
    """A loss whose gradients exist already: the backward pass only scales them, in place."""

    @staticmethod
    def forward(ctx, loss, scale, grads, hidden, weight, bias):
        ctx.scale, ctx.grads = scale, grads
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
        return None, None, None, *(None if g is None else _multiply(g, grad * ctx.scale) for g in grads)


def _multiply(x, factor):
    """``x *= factor`` with the factor in fp32: rounded to bf16 it would scale a whole gradient wrongly."""
    if x.dtype.itemsize >= 4:
        return x.mul_(factor)
    for part in x.view(-1).split(1 << 24):
        part.copy_(part.float().mul_(factor))
    return x


def _no_second_derivative():
    if torch.is_grad_enabled():
        raise RuntimeError("the chunked loss has no second derivatives (create_graph=True): use impl='naive'")


class LogProbs(torch.autograd.Function):
    """Log-probs and entropies ``(N,)``; the backward pass recomputes the logits of tokens that have a gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, sweep):
        (logps, *stats), _ = sweep(hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, bias, *stats)
        ctx.sweep = sweep
        ctx.set_materialize_grads(False)
        return logps, stats[-1]

    @staticmethod
    def backward(ctx, c, e):
        _no_second_derivative()
        hidden, weight, bias, *stats = ctx.saved_tensors
        c = torch.zeros_like(stats[-1]) if c is None else c
        has_grad = c != 0 if e is None else (c != 0) | (e != 0)
        order = has_grad.logical_not().long().argsort(stable=True)[: int(has_grad.sum())]
        c, e = c[order], None if e is None else e[order]
        scale = _power_of_two(c if e is None else torch.cat([c, e]))
        c, e = c / scale, None if e is None else e / scale
        _, grads = ctx.sweep.subset(order)(
            hidden,
            weight,
            bias,
            ctx.needs_input_grad[:3],
            lambda part, *_: (c[part], None if e is None else e[part]),
            known=(None, *(x[order] for x in stats)),
        )
        return *(None if g is None else g.mul_(scale.to(g.dtype)) for g in grads), None


@dataclass(frozen=True)
class Numerics:
    """In which dtype a head's products are computed, and how they become logits."""

    dtype: torch.dtype
    logits: dict  # logit_scale, softcap, inv_t, backend: what the row kernels need
    logits_fp32: bool
    temperature: float

    @classmethod
    def of(cls, hidden, weight, bias, temperature, softcap, logit_scale, backend, logits_fp32):
        device = hidden.device.type
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device)
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap={softcap!r}: expected None or a number above 0")
        if not isinstance(logit_scale, (int, float)) or not math.isfinite(logit_scale):
            raise ValueError(f"logit_scale={logit_scale!r}: expected a finite number")
        backend = resolve_backend(backend, hidden.device)
        logits = dict(logit_scale=logit_scale, softcap=softcap, inv_t=1.0 / temperature, backend=backend)
        return cls(dtype, logits, logits_fp32 and dtype.itemsize < 4, temperature)

    @property
    def itemsize(self):
        return 4 if self.logits_fp32 else self.dtype.itemsize

    def naive(self, hidden, weight, bias, token_ids, scored, entropy_grad):
        return naive_logps(
            hidden, weight, token_ids, scored, temperature=self.temperature, bias=bias, softcap=self.logits["softcap"],
            logit_scale=self.logits["logit_scale"], logits_fp32=self.logits_fp32, entropy_grad=entropy_grad,
        )  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """The loop over chunks. ``spans`` are ``(start, end, active)``: the chunk's tokens, of which the first ``active``
    have a gradient."""

    numerics: Numerics
    position: torch.Tensor  # (N,) rows of the flattened hidden states
    ids: torch.Tensor  # (N,)
    spans: list
    C: int

    def subset(self, order):
        """The sweep over these tokens alone, all of them with a gradient."""
        n = len(order)
        spans = [(a, min(a + self.C, n), min(self.C, n - a)) for a in range(0, n, self.C)]
        return Sweep(self.numerics, self.position[order], self.ids[order], spans, self.C)

    def __call__(self, hidden, weight, bias, needs=(False, False, False), coefficients=None, known=None):
        """Returns ``(logps, peak, log_sum, entropy)``, each ``(N,)`` (see ``row_stats``), and the needed gradients of
        (hidden, weight, bias).

        ``coefficients(part, logps, entropy)`` gives ``(c, e)`` of the tokens in the slice ``part``; ``known`` are the
        statistics if an earlier phase has them.
        """
        dtype, C = self.numerics.dtype, self.C
        (V, H), device = weight.shape, hidden.device
        wide = torch.promote_types(dtype, torch.float32)
        states = hidden.detach().reshape(-1, H)
        weight_dtype = weight.dtype
        weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        project = _projection(weight, bias, self.numerics.logits_fp32)
        logps, *stats = known or torch.empty(4, len(self.position), dtype=wide, device=device).unbind()
        z = _aligned_rows(C, V, wide if self.numerics.logits_fp32 else dtype, device)
        g = _aligned_rows(C, V, dtype, device) if self.numerics.logits_fp32 and any(needs) else z
        headroom = FP16_HEADROOM if dtype == torch.float16 else 1.0
        h = torch.zeros(C, H, dtype=dtype, device=device)
        d_states = torch.zeros_like(states) if needs[0] else None
        d_weight = torch.zeros(V, H, dtype=wide, device=device) if needs[1] else None
        d_bias = torch.zeros(V, dtype=wide, device=device) if needs[2] else None

        with torch.autocast(device.type, enabled=False):
            for a, b, active in self.spans:
                h[: b - a] = states[self.position[a:b]]
                # All C rows every time, whatever the buffer's tail holds: with one GEMM shape a token gets the same
                # bits in every call, whoever its neighbours are.
                project(h, z)
                if known is None:
                    part = slice(a, b)
                    row_stats(
                        z[: b - a], self.ids[part], logps[part], *(x[part] for x in stats), **self.numerics.logits
                    )
                if not active or coefficients is None:
                    continue
                part, rows = slice(a, a + active), slice(0, active)
                c, e = (x if x is None else x * headroom for x in coefficients(part, logps, stats[-1]))
                logits_grad(z[rows], g[rows], self.ids[part], *(x[part] for x in stats), c, e, **self.numerics.logits)
                if d_states is not None:
                    d_chunk = _mm_wide(g[rows], weight)
                    d_chunk = d_chunk if headroom == 1.0 else d_chunk.div_(headroom)
                    d_states.index_copy_(0, self.position[part], d_chunk.to(d_states.dtype))
                if d_weight is not None:
                    _addmm_wide(d_weight, g[rows].t(), h[rows])
                if d_bias is not None:
                    d_bias += g[rows].sum(0, dtype=wide)
        del z, g, h  # before dW gets its second copy
        d_hidden = None if d_states is None else d_states.view(hidden.shape)
        if headroom != 1.0:
            for x in filter(torch.is_tensor, (d_weight, d_bias)):
                x.div_(headroom)
        d_head = (x if x is None else x.to(weight_dtype) for x in (d_weight, d_bias))
        return (logps, *stats), (d_hidden, *d_head)


def _aligned_rows(C, V, dtype, device):
    """An uninitialised ``(C, V)`` buffer whose rows begin at multiples of 128 bytes: GEMMs on odd rows are slow."""
    step = 128 // dtype.itemsize
    return torch.empty(C, -(-V // step) * step, dtype=dtype, device=device)[:, :V]


def _projection(weight, bias, fp32):
    """``project(h, out)``: out = h @ weight.T + bias, rounded once."""
    if not fp32:
        if bias is None:
            return lambda h, out: torch.mm(h, weight.t(), out=out)
        return lambda h, out: torch.addmm(bias, h, weight.t(), out=out)
    if weight.is_cuda:
        add_bias = (lambda out: out) if bias is None else (lambda out: out.add_(bias))
        return lambda h, out: add_bias(torch.mm(h, weight.t(), out_dtype=torch.float32, out=out))
    weight, bias = weight.float(), None if bias is None else bias.float()
    return lambda h, out: _projection(weight, bias, False)(h.float(), out)


def _mm_wide(a, b):
    """``a @ b`` in fp32 where the device can: cuBLAS may split a long sum, and would round the parts to bf16."""
    if a.is_cuda and a.dtype.itemsize < 4:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _addmm_wide(total, a, b):
    """``total += a @ b`` in total's fp32, without rounding the product to the factors' dtype first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _power_of_two(x):
    """The power of two below the largest magnitude in x (0-dim tensor, no device sync)."""
    largest = torch.cat([x.detach().abs(), x.new_zeros(1)]).max()
    return torch.exp2(torch.floor(torch.log2(largest.clamp(min=torch.finfo(x.dtype).tiny))))


def packed(scored, active, n, n_active, C):
    """Scored positions, those with a gradient first, and their spans of C tokens."""
    order = torch.where(active, 0, torch.where(scored, 1, 2)).reshape(-1).argsort(stable=True)
    spans = [(a, min(a + C, n), min(max(n_active - a, 0), C)) for a in range(0, n, C)]
    return order[:n], [(a, b, min(active, b - a)) for a, b, active in spans]


def whole_sequences(scored, lengths, actives, C):
    """Scored positions and spans of at most C tokens that cut no sequence: first-fit decreasing, active and inactive
    sequences apart."""
    bins = []  # [tokens, active, sequences]
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        active = actives[i] > 0
        home = next((bin for bin in bins if bin[1] == active and bin[0] + lengths[i] <= C), None)
        if home is None:
            bins.append(home := [0, active, []])
        home[0] += lengths[i]
        home[2].append(i)
    rank = [0] * len(lengths)
    spans, start = [], 0
    for tokens, is_active, sequences in bins:
        spans.append((start, start + tokens, tokens if is_active else 0))
        start += tokens
        for i in sequences:
            rank[i] = len(spans)
    key = torch.tensor(rank, device=scored.device)[:, None].expand(scored.shape)
    return key.masked_fill(~scored, len(spans) + 1).reshape(-1).argsort(stable=True)[:start], spans
