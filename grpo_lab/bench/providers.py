"""Who computes the loss in a benchmark, and on what: loss heads behind one signature, floors, and random inputs.

A provider takes ``(hidden, weight, token_ids, mask, advantages)`` as ``grpo_loss`` does, and ``old_logps`` where there
are some, and returns the dapo loss, temperature 1. Providers that only give log-probs get that loss on top. Packages
are imported when a provider runs: of one that is not installed, the ImportError becomes a row of the table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_lab.loss import grpo_loss, token_logps

GROUP = 4  # completions of one prompt: what shares of zero-advantage sequences are rounded to


@dataclass(frozen=True)
class Shape:
    """B sequences of up to T tokens, lengths spread so that ``scored`` of them count; hidden H, vocabulary V.

    zero_share: the share of the sequences, whole groups, whose advantage is exactly 0. peaked: every scored token has
    a probability of about 0.9 to 0.9999, as a confident policy gives it; else logits are N(0, 1). off_policy: with
    log-probs of another sampler, 0.02 nats off, as with vLLM: no coefficient is known before its log-prob.
    """

    batch: int
    length: int
    hidden: int
    vocab: int
    scored: int
    dtype: str = "bfloat16"
    zero_share: float = 0.0
    peaked: bool = False
    off_policy: bool = False


def make_inputs(shape: Shape, device, seed=0) -> dict:
    """Random inputs of the shape: a ragged mask with exactly ``scored`` tokens, advantages normalised in groups."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def randn(*size):
        return torch.randn(*size, generator=generator, device=device)

    B, T, H, V = shape.batch, shape.length, shape.hidden, shape.vocab
    share = torch.rand(B, generator=generator, device=device) * 0.8 + 0.2
    lengths = (share / share.sum() * shape.scored).floor().clamp(1, T).long()
    while (left := shape.scored - int(lengths.sum())) > 0:  # hand out what the clamp cut off
        room = (lengths < T).nonzero().squeeze(-1)[:left]
        lengths[room] += 1
    advantages = randn(B).view(-1, math.gcd(B, GROUP))
    if advantages.shape[1] > 1:
        advantages = (advantages - advantages.mean(1, keepdim=True)) / (advantages.std(1, keepdim=True) + 1e-4)
    advantages[: round(shape.zero_share * len(advantages))] = 0
    hidden, weight = randn(B, T, H), randn(V, H) * H**-0.5
    token_ids = torch.randint(V, (B, T), generator=generator, device=device)
    if shape.peaked:  # along the token's own row, so that its logit leaves the log-sum of the others by 2 to 10
        lead = math.log(V) + 2.5 + 8 * torch.rand(B, T, generator=generator, device=device)
        rows = weight[token_ids]
        hidden += rows * (lead / rows.square().sum(-1))[..., None]
    mask = (torch.arange(T, device=device) < lengths[:, None]).long()
    inputs = dict(hidden=hidden.to(dtype), weight=weight.to(dtype), token_ids=token_ids, mask=mask)
    if shape.off_policy:
        with torch.no_grad():
            inputs["old_logps"] = token_logps(**inputs)[0] + 0.02 * randn(B, T)
    return inputs | {"advantages": advantages.reshape(-1)}


@dataclass(frozen=True)
class Provider:
    """``variants``: the same thing done in several ways, of which the fastest is reported. ``lacks``: what a trainer
    misses in it. ``floor``: no loss at all, only what every loss has to pay ("time" or "memory")."""

    variants: dict[str, Callable]
    lacks: str = ""
    floor: str = ""


def ours(impl, **options) -> Callable:
    return lambda *args, **named: grpo_loss(*args, **named, impl=impl, **options)[0]


def dapo(logps, mask, advantages, old_logps=None):
    """The loss on log-probs (N,) of the scored tokens, as TRL's trainer computes it."""
    scored = mask.bool()
    logps = logps.new_zeros(scored.shape).masked_scatter(scored, logps)
    ratio = torch.exp(logps - (logps.detach() if old_logps is None else old_logps))
    losses = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def trl_fused(tile=32768) -> Callable:
    """TRL's fused head as its patched forward calls it. Its buffer is 4,096 tokens by ``tile`` vocabulary entries."""

    def run(hidden, weight, token_ids, mask, advantages, old_logps=None):
        from trl.kernels import ChunkedLogProbFunction

        scored = mask.bool()
        logps, *_ = ChunkedLogProbFunction.apply(
            hidden[scored], weight, None, token_ids[scored], 1.0, tile, None, 1.0, ("log_probs", "entropy")
        )
        return dapo(logps, mask, advantages, old_logps)

    return run


def liger(compiled) -> Callable:
    """Liger's chunked GRPO loss with its defaults, through torch.compile (its default too) or without."""

    def run(hidden, weight, token_ids, mask, advantages):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=compiled)
        return loss(hidden, weight, token_ids, mask, advantages)[0]

    return run


def apple_cce(**options) -> Callable:
    """Cut cross-entropy: fused Triton kernels whose logits never leave the chip."""

    def run(hidden, weight, token_ids, mask, advantages):
        from cut_cross_entropy import linear_cross_entropy

        scored = mask.bool()
        nll = linear_cross_entropy(hidden[scored], weight, token_ids[scored], reduction="none", **options)
        return dapo(-nll, mask, advantages)

    return run


def torch_linear_cross_entropy(hidden, weight, token_ids, mask, advantages):
    """PyTorch's own, with its chunked path switched on."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    options, scored = torch.nn.LinearCrossEntropyOptions(), mask.bool()
    nll = torch.nn.functional.linear_cross_entropy(
        hidden[scored], weight, token_ids[scored], reduction="none", options=options
    )
    return dapo(-nll, mask, advantages)


def bare_gemms(chunk) -> Callable:
    """The head's matrix products alone, ``chunk`` tokens at a time: logits of all scored tokens, and for those with a
    gradient dH and, where the head trains, dW."""

    def run(hidden, weight, token_ids, mask, advantages, old_logps=None):
        scored, active = mask.bool(), (advantages != 0)[:, None]
        states, idle = (hidden.detach()[scored & chosen] for chosen in (active, ~active))
        z = torch.empty(chunk, len(weight), dtype=states.dtype, device=states.device)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        with torch.no_grad():
            for h in idle.split(chunk):
                torch.mm(h, weight.t(), out=z[: len(h)])
            for h in states.split(chunk):
                out = torch.mm(h, weight.t(), out=z[: len(h)])
                torch.mm(out, weight)
                if d_weight is None:
                    continue
                if states.is_cuda and states.dtype != torch.float32:
                    torch.addmm(d_weight, out.t(), h, out_dtype=torch.float32, out=d_weight)
                else:
                    d_weight.addmm_(out.t().float(), h.float())

    return run


def gradients_alone(hidden, weight, token_ids, mask, advantages, old_logps=None):
    """dH and dW as the optimiser wants them, and nothing else: no loss can end with less."""
    for x in (hidden, weight):
        x.grad = torch.zeros_like(x) if x.requires_grad else None


def no_head(hidden, weight, token_ids, mask, advantages):
    """Nothing in the head's place: what the rest of a training step takes."""
    return hidden.mean()


ONLY_LOGPS = "log-probs alone: no entropy, softcap is all that it adds to the logits"
PROVIDERS = {
    "bare GEMMs": Provider({f"C {c}": bare_gemms(c) for c in (2048, 4096)}, floor="time"),
    "gradients alone": Provider({"": gradients_alone}, floor="memory"),
    "naive": Provider({"": ours("naive")}),
    "chunked": Provider({"": ours("chunked")}),
    "chunked, low memory": Provider({"": ours("chunked", memory_budget="low")}),
    "chunked, fp32 logits": Provider({"": ours("chunked", logits_fp32=True)}),
    "TRL": Provider({"": trl_fused()}),
    "Liger": Provider({"": liger(compiled=True)}, "no entropy, no log-probs"),
    "Liger, not compiled": Provider({"": liger(compiled=False)}, "no entropy, no log-probs"),
    "Apple CCE": Provider({"": apple_cce()}, ONLY_LOGPS + "; leaves small gradients out; no fp32"),
    "Apple CCE, unfiltered": Provider({"": apple_cce(filter_eps=None)}, ONLY_LOGPS + "; no fp32"),
    "PyTorch": Provider({"": torch_linear_cross_entropy}, "log-probs alone: no entropy, no softcap"),
}
