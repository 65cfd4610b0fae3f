"""One call's buffers on the device, the matrix products that fill them, and the gradients that they add up to.

Nothing is rounded to 16 bits that is still to be added to: sums are fp32 (float64 for float64), and so are the products
that go into them, which cuBLAS would otherwise round where it splits a long sum.
"""

import torch

from grpo_lab import kernels

# fp16 rounds what is below 6e-5 to few bits, and 1 / V is below it: probabilities are multiplied by this on their way
# through the gradient GEMMs.
_FP16_HEADROOM = 256.0
_ROWS = 1024


class Workspace:
    """``load`` gathers a chunk's hidden states; ``tiles`` computes its logits, one slice of the vocabulary after
    another; ``learn_rows`` and ``learn_weight`` take gradients.

    ``needs`` says which tensors of ``head`` (chunked.Head) get one; ``wide`` makes one slice of the whole vocabulary.
    ``z`` are the logits, ``g`` their gradient, in the same memory unless logits are fp32.
    """

    def __init__(self, sweep, head, needs=(False,) * 5, wide=False):
        numerics, C = sweep.numerics, sweep.plan.C
        self.dtype, self.sum_dtype = numerics.dtype, torch.promote_types(numerics.dtype, torch.float32)
        self.gain = _FP16_HEADROOM if self.dtype == torch.float16 else 1.0
        self.sweep, self.head, self.needs, self.wide = sweep, head, needs, wide
        self.single = sum(active for *_, active in sweep.spans) <= 1
        V, device = len(head.weight), head.weight.device
        states = [x.detach() for x in (head.hidden, head.lora_states) if x is not None]
        weights = [x.detach().to(self.dtype) for x in (head.weight, head.lora_weight) if x is not None]
        bias = None if head.bias is None else head.bias.detach().to(self.dtype)

        self.state = kernels.new_state(len(sweep.ids), self.sum_dtype, device)
        self.states = [_flat(x, sweep.position) for x in states]
        self._h = [torch.empty(C, x.shape[-1], dtype=self.dtype, device=device) for x in states]
        self.h = list(self._h)
        self._width = width = V if wide else min(V, kernels.SLICE)
        self.z = self.g = _aligned_rows(C, width, numerics.logits_dtype, device)
        if numerics.logits_fp32 and any(needs):
            self.g = _aligned_rows(C, width, self.dtype, device)
        self.row_fields = [k for k, x in ((0, head.hidden), (3, head.lora_states)) if x is not None and needs[k]]
        self.row_weights = [weights[k // 3] for k in self.row_fields]
        self.grads = {k: self._zeros(k) for k in self.row_fields}
        self.sums = [] if wide else self.new_sums(1)  # where narrow tiles add up the gradients of a chunk's rows
        self._weights, self._bias = weights, bias
        self._slices, self._views, self._n = {}, {}, 0

    def new_sums(self, chunks):
        """``(chunks C, H)`` in fp32 for each wanted gradient of rows."""
        rows, device = chunks * self.sweep.plan.C, self.z.device
        return [torch.empty(rows, w.shape[1], dtype=self.sum_dtype, device=device) for w in self.row_weights]

    def load(self, a, b):
        """Gather the states of tokens a to b. The GEMMs run on ``rows`` rows, multiples of 1024 where a chunk has more,
        whatever the last of them hold: a product of few rows may be summed in another order, and a token's log-prob is
        to have the same bits whatever chunk it is in."""
        if b - a != self._n:
            self._n, self._views = b - a, {}
        rows = min(-(-(b - a) // _ROWS) * _ROWS, len(self.z))
        for i, (states, index) in enumerate(self.states):
            h = self._h[i][: b - a]
            if states.dtype == h.dtype:
                torch.index_select(states, 0, index[a:b], out=h)
            else:
                h.copy_(states[index[a:b]])
            self.h[i] = self._h[i][:rows]

    def tiles(self):
        """``(first column, z, g, weights of the wanted row gradients)`` of each slice, its logits just computed; one
        slice of the whole vocabulary if wide."""
        return (self.tile(first) for first in range(0, len(self.head.weight), self._width))

    def tile(self, first):
        if first not in self._slices:  # views are made once: making them costs as much as a launch
            columns = slice(first, first + self._width)
            factors = [w[columns].t() for w in self._weights]
            if self.z.dtype != self.dtype and not self.z.is_cuda:  # no product has a wider result than its factors
                factors = [w.float() for w in factors]
            bias = None if self._bias is None else self._bias[columns]
            self._slices[first] = factors, bias, [w[columns] for w in self.row_weights]
        factors, bias, row_weights = self._slices[first]
        if first not in self._views:
            width = factors[0].shape[1]
            self._views[first] = (
                self.z[: len(self.h[0]), :width], self.z[: self._n, :width], self.g[: self._n, :width]
            )  # fmt: skip
        full, z, g = self._views[first]
        h = self.h[0]
        if full.dtype == h.dtype:
            torch.mm(h, factors[0], out=full) if bias is None else torch.addmm(bias, h, factors[0], out=full)
        else:
            _product(h, factors[0], out=full)
            bias is None or full.add_(bias)
        for h, w in zip(self.h[1:], factors[1:], strict=True):
            _add_product(full, h, w)
        return first, z, g, row_weights

    def products(self, g):
        return [_product(g, w) for w in self.row_weights]

    def learn_rows(self, part, values, c=None):
        """Gradients of the hidden states of the tokens in ``part``: ``values`` ``(R, H)`` themselves, or, with ``c``
        ``(R,)``, what these sums of softmax numerators come to; both are ``gain`` times too large."""
        at, ids, logits = self.sweep.position[part], self.sweep.ids[part], self.sweep.numerics.logits
        for k, value, weight in zip(self.row_fields, values, self.row_weights, strict=True):
            out = self.grads[k].view(-1, value.shape[1])
            numerators_of = None if c is None else (self.state[:, part], c, weight, ids)
            kernels.put_rows(value, out, at, self.gain, numerators_of, **logits)

    def learn_weight(self, g, grads):
        """Add a chunk's ``(R, width)`` gradient of the logits, ``gain`` times too large, to the head's in ``grads``."""
        for k, h in zip((1, 4), self.h):  # noqa: B905  no second one without LoRA
            if not self.needs[k]:
                continue
            if k in grads:
                _add_product(grads[k], g.t(), h[: len(g)])
            elif self.single and self.gain == 1.0:  # nothing will be added to it: it may be rounded at once
                grads[k] = torch.mm(g.t(), h[: len(g)])
            else:
                grads[k] = _product(g.t(), h[: len(g)])
        if self.needs[2]:
            d_bias = g.sum(0, dtype=self.sum_dtype)
            grads[2] = d_bias if 2 not in grads else grads[2].add_(d_bias)

    def weight_slices(self):
        """``(first column, grads)`` of each slice of the vocabulary: what ``learn_weight`` leaves in ``grads`` goes to
        its place, in the head's dtype."""
        for k in (1, 2, 4):
            if self.needs[k]:
                self.grads[k] = self._zeros(k)
        for first in range(0, len(self.head.weight), self._width):
            grads = {}
            yield first, grads
            for k, grad in grads.items():
                self.grads[k][first : first + len(grad)] = grad if self.gain == 1.0 else grad.div_(self.gain)
                del grad  # or it would stay beside the next one

    def gradients(self):
        """In the order of ``head``, None where none is needed; sums may still be in fp32."""
        if self.wide and self.gain != 1.0:
            for k in (1, 2, 4):
                if k in self.grads:
                    self.grads[k].div_(self.gain)
        for k, need in enumerate(self.needs):
            if need and k not in self.grads:
                self.grads[k] = self._zeros(k)
        return [self.grads.get(k) for k in range(len(self.head))]

    def _zeros(self, k):  # zeros_like would keep the strides of a transposed tensor
        return torch.zeros(self.head[k].shape, dtype=self.head[k].dtype, device=self.head[k].device)


def add_products(sums, g, weights, first):
    """``sums += g @ weights``, each; the first slice of the vocabulary overwrites."""
    for total, w in zip(sums, weights, strict=True):
        _add_product(total, g, w) if first else _product(g, w, out=total)


def lies_in_rows(states):
    """Whether states ``(B, T, H)`` are dense, or at the same places of longer sequences that are."""
    _, T, H = states.shape
    sequence, row, column = states.stride()
    return bool(T) and column == 1 and row == H and sequence % H == 0 and sequence >= T * H


def _flat(states, position):
    """``(rows, index)``: the states ``(B, T, H)`` as rows, without a copy where T is a slice of longer sequences, and
    the row of each token."""
    B, T, H = states.shape
    sequence = states.stride(0)
    if lies_in_rows(states):
        rows = states.as_strided(((B - 1) * (sequence // H) + T, H), (H, 1))
        return rows, position if sequence == T * H else position // T * (sequence // H) + position % T
    return states.reshape(-1, H), position


def _aligned_rows(C, V, dtype, device):
    """An uninitialised ``(C, V)`` buffer whose rows begin at multiples of 128 bytes: GEMMs on odd rows are slow."""
    step = 128 // dtype.itemsize
    return torch.empty(C, -(-V // step) * step, dtype=dtype, device=device)[:, :V]


def _product(a, b, out=None):
    """``a @ b``, in fp32 at least."""
    if a.dtype.itemsize >= 4:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32) if out is None else torch.mm(a, b, torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def _add_product(total, a, b):
    """``total += a @ b`` in total's dtype, without rounding the product to the factors' dtype first."""
    if total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
