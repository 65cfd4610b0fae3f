"""The textbook loss head: full logits ``(B, T, V)``, then a selective log-softmax row by row.

This is TRL's default of May 2025 and the "before" of every lesson: no needless copy, no needless upcast, and all of the
memory that the chunked head does without. It is also the reference that the fast path is compared with.
"""

import torch
import torch.nn.functional as F


def naive_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    mask: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_fp32: bool = False,
    entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of ``token_ids`` and entropies, both ``(B, T)`` fp32 (float64 for float64 inputs), through full logits.

    Shapes: hidden ``(B, T, H)``, weight ``(V, H)``, bias ``(V,)``, token_ids and boolean mask ``(B, T)``; lora, states
    ``(B, T, r)`` and weight ``(V, r)``, adds their product to the logits. What lies under the mask has no effect.
    ``entropy_grad=False`` leaves the entropy out of the graph, which saves its memory.
    """
    token_ids = token_ids.masked_fill(~mask, 0)
    device, unscored = hidden.device.type, ~mask
    autocast = torch.is_autocast_enabled(device) and not logits_fp32
    dtype = torch.float32 if logits_fp32 else torch.promote_types(hidden.dtype, weight.dtype)

    def cast(x):
        return x if x is None or autocast else x.to(dtype)

    def masked(states):  # NaN under the mask would reach dW as 0 * NaN
        return cast(states.masked_fill(unscored[..., None], 0))

    with torch.autocast(device, enabled=autocast):
        logits = F.linear(masked(hidden), cast(weight), cast(bias))
        if lora is not None:
            logits = logits + F.linear(masked(lora[0]), cast(lora[1]))
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature

    logps, entropies = [], []
    for row, ids in zip(logits, token_ids, strict=True):  # one (T, V) temporary at a time
        row_logps = F.log_softmax(row, dim=-1)
        logps.append(row_logps.gather(-1, ids[:, None]).squeeze(-1))
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            # p log p is 0 at p = 0: a clamped log keeps 0 * -inf, and its gradient, out
            clamped = row_logps.clamp(min=torch.finfo(row.dtype).min / 2)
            entropies.append(-(row_logps.exp() * clamped).sum(-1))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return tuple(torch.stack(x).to(dtype).masked_fill(unscored, 0) for x in (logps, entropies))
