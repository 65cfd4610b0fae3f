"""The package's entry points, ``grpo_loss`` and ``token_logps``: checks, packing, and the choice of a route.

``impl="chunked"`` (what "auto" means) never builds full logits; ``impl="naive"`` runs the textbook head through the
same objective, so that one word switches between them. ``chunked.py``, ``naive.py`` and ``objective.py`` do the work.
"""

import functools
from collections.abc import Callable

import torch

from grpo_lab import chunked
from grpo_lab.objective import Objective, Stats, Tokens, report
from grpo_lab.plan import Plan, Problem, choose

_DEFAULT = Objective()
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def grpo_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    *,
    objective: Objective | None = None,
    bias: torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    sampling_logps: torch.Tensor | None = None,
    importance_ratio: torch.Tensor | None = None,
    num_items: torch.Tensor | float | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    impl: str = "auto",
    backend: str = "auto",
    chunk_tokens: int | str = "auto",
    memory_budget: int | str | None = None,
    logits_fp32: bool = False,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Stats]:
    """The GRPO-family loss of a batch from its hidden states and output head, without its full logits.

    Args:
        hidden: ``(B, T, H)`` states that predict the completion tokens (position t predicts ``token_ids[:, t]``).
        weight: ``(V, H)`` output head; ``bias`` ``(V,)``. lora: states ``(B, T, r)`` and weight ``(V, r)``, whose
            product is added to the logits, as by an adapter on the head.
        token_ids: ``(B, T)`` sampled tokens. mask: ``(B, T)``, nonzero where a token is scored; what lies elsewhere,
            NaN included, has no effect.
        advantages: ``(B,)``, or ``(B, T)`` per token.
        objective: what is optimised, default ``Objective()``.
        old_logps, ref_logps, sampling_logps: ``(B, T)`` log-probs of the policy that ratios are taken against (None:
            on-policy, ratio 1), of the reference model (needed if beta != 0), of the sampler (for the off-policy mask;
            None: old_logps).
        importance_ratio: ``(B, T)`` or ``(B, 1)`` sampler correction that multiplies the policy loss.
        num_items: tokens that dapo, cispo and vespo divide by (None: those scored here).
        softcap, logit_scale: a logit is ``softcap * tanh(logit_scale * z / softcap)``, divided by the temperature.
        impl: "chunked" ("auto" means it) or "naive". backend: who runs the row kernels, "torch", "triton" or "auto".
        chunk_tokens: rows of a chunk's logits buffer, or "auto". memory_budget: bytes that the call may use at its peak
            beyond its inputs, gradients included; "low" asks for little at some cost of time; None: the fastest way
            that fits the device. impl="naive" has neither. logits_fp32: keep logits in fp32.
        gather: collects ``(n,)`` entropies from all ranks where ``top_entropy_quantile`` is to span them.

    Returns:
        The scalar loss, differentiable in hidden, weight, bias and lora, and ``Stats``.

    Raises:
        ValueError: shapes that do not match, scored ids outside the vocabulary, unknown names, an option that the
            inputs do not allow. The message names the argument, its value and what was expected.
    """
    objective = _DEFAULT if objective is None else objective
    _check(isinstance(objective, Objective), "objective", objective, "an Objective or None")
    head = chunked.Head(hidden, weight, bias, *_pair(lora))
    B, T = shape = _check_inputs(head, token_ids, mask, impl, chunk_tokens, memory_budget)
    numerics = chunked.Numerics.of(head, objective.temperature, softcap, logit_scale, backend, logits_fp32)
    counted = isinstance(num_items, (int, float)) and num_items > 0
    counted = counted or isinstance(num_items, torch.Tensor) and num_items.dim() == 0
    _check(num_items is None or counted, "num_items", num_items, "None, a number above 0 or a 0-dim tensor")
    for name, x in (("old_logps", old_logps), ("ref_logps", ref_logps), ("sampling_logps", sampling_logps)):
        _check(x is None or x.shape == shape, name, x, f"shape {tuple(shape)}")
    _check(advantages.shape in ((B,), shape), "advantages", advantages, f"shape {(B,)} or {tuple(shape)}")
    ratio = importance_ratio
    _check(
        ratio is None or ratio.shape in ((B, 1), shape), "importance_ratio", ratio, f"shape {(B, 1)} or {tuple(shape)}"
    )
    if objective.loss_type == "vespo":
        _check(ratio is None or ratio.shape == shape, "importance_ratio", ratio, f"shape {tuple(shape)}: vespo sums it")
    _check(objective.beta == 0.0 or ref_logps is not None, "ref_logps", None, "reference log-probs, since beta != 0")

    advantages_BT = (advantages if advantages.dim() == 2 else advantages[:, None]).expand(shape)
    ratio_BT = None if ratio is None else ratio.expand(shape)
    scored = mask != 0
    active = objective.active(scored, advantages_BT, ratio_BT)
    lengths, actives = _scan(token_ids, scored, active, weight.shape[0])
    coupling = objective.coupling(on_policy=old_logps is None and sampling_logps is None)
    sequences = tuple(zip(lengths, (n > 0 for n in actives), strict=True)) if coupling == "sequence" else None
    n = sum(lengths)
    whole = Plan(max(n, 1), wide=True)
    known = coupling in ("nothing", "batch")  # nothing to find out chunk by chunk
    plan = whole if impl == "naive" else _plan(head, numerics, n, sequences, known, chunk_tokens, memory_budget)
    # Ratios and KL can overflow fp16: two phases scale by the coefficients that they have found
    may_overflow = numerics.dtype == torch.float16 and head.trained and coupling != "nothing"
    in_one_pass = (
        impl != "naive"
        and (coupling in ("nothing", "token") or coupling == "sequence" and max(lengths, default=0) <= plan.C)
        and (objective.entropy_coef == 0.0 or plan.wide and not plan.slices)
        and not may_overflow
    )
    if in_one_pass and coupling == "sequence":
        position, spans = chunked.whole_sequences(scored, sequences, plan.C)
    else:
        position, spans = chunked.packed(scored, active, n, sum(actives), plan.C)

    ids = token_ids.reshape(-1)[position].long()

    @functools.cache
    def tokens():
        dtype = torch.promote_types(numerics.dtype, torch.float32)
        pack = lambda x: None if x is None else x.detach().reshape(-1)[position].to(dtype)  # noqa: E731
        lengths_B = scored.sum(-1).to(dtype)
        return Tokens(
            shape=shape,
            position=position,
            ids=ids,
            lengths=lengths_B,
            advantages=pack(advantages_BT),
            weight=objective.weights(lengths_B, position // T, num_items),
            entropy_weight=1.0 / lengths_B.sum().clamp(min=1.0),
            old_logps=pack(old_logps),
            ref_logps=pack(ref_logps),
            sampling_logps=pack(sampling_logps),
            importance_ratio=pack(ratio_BT),
            gather=gather,
        )

    sweep = chunked.Sweep(numerics, plan, position, ids, spans)
    if in_one_pass:
        loss, logps, entropy, diagnostics = chunked.one_pass(sweep, objective, tokens, head, coupling)
    else:
        if impl == "naive":
            logps, entropy = numerics.naive(head, token_ids.long(), scored, objective.entropy_coef != 0.0)
            logps, entropy = logps.reshape(-1)[position], entropy.reshape(-1)[position]
        else:
            logps, entropy = chunked.LogProbs.apply(sweep, *head)
        loss, diagnostics = objective.loss(logps, entropy, tokens())
    stats = report(objective, tokens(), logps.detach(), entropy.detach(), diagnostics, advantages.dim() == 2)
    return loss, stats


def token_logps(
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
    impl: str = "auto",
    backend: str = "auto",
    chunk_tokens: int | str = "auto",
    memory_budget: int | str | None = None,
    logits_fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies ``(B, T)``, 0 where nothing is scored: the chunked head with any loss on top.

    Arguments, shapes and errors as in ``grpo_loss``. Differentiable; the backward pass computes a chunk's logits again
    instead of keeping them. Bitwise the log-probs that ``grpo_loss`` computes for the same tokens and chunk size.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r}: expected a number above 0")
    head = chunked.Head(hidden, weight, bias, *_pair(lora))
    shape = _check_inputs(head, token_ids, mask, impl, chunk_tokens, memory_budget)
    numerics = chunked.Numerics.of(head, temperature, softcap, logit_scale, backend, logits_fp32)
    scored = mask != 0
    n = sum(_scan(token_ids, scored, scored, weight.shape[0])[0])
    if impl == "naive":
        return numerics.naive(head, token_ids.long(), scored, True)
    plan = _plan(head, numerics, n, None, True, chunk_tokens, memory_budget)
    position, spans = chunked.packed(scored, scored, n, n, plan.C)
    sweep = chunked.Sweep(numerics, plan, position, token_ids.reshape(-1)[position].long(), spans)
    return tuple(
        x.new_zeros(scored.numel()).index_put((position,), x).view(shape) for x in chunked.LogProbs.apply(sweep, *head)
    )


def _scan(token_ids, scored, active, vocab):
    """Scored and active tokens of each sequence, on the host: the call's one device sync, which checks ids too."""
    outside = scored & ((token_ids < 0) | (token_ids >= vocab))
    counts = torch.stack([scored, active, outside]).sum(-1).tolist()
    if any(counts[2]):
        worst = token_ids[outside][0].item()
        raise ValueError(
            f"token_ids: {sum(counts[2])} scored ids, {worst} first, lie outside the vocabulary [0, {vocab})"
        )
    return counts[0], counts[1]


def _plan(head, numerics, n, sequences, known, chunk_tokens, memory_budget):
    device, dtype = head.hidden.device, numerics.dtype
    problem = Problem(
        *head.hidden.shape[:2], n, head.hidden.shape[2], len(head.weight), dtype.itemsize,
        numerics.logits_dtype.itemsize, head.trained, device.type, sequences, head.hidden.dtype.itemsize,
        head.trained_itemsize, head.copied(numerics), known,
    )  # fmt: skip
    plan = choose(problem, chunk_tokens, memory_budget)
    if device.type == "cuda" and memory_budget is None:
        used = torch.cuda.memory_stats_as_nested_dict(device)
        free = used["reserved_bytes"]["all"]["current"] - used["allocated_bytes"]["all"]["current"]
        if problem.peak(plan) > free:  # then only is the driver asked, which takes longer
            there, total = torch.cuda.mem_get_info(device)
            allowed = (
                total * torch.cuda.get_per_process_memory_fraction(device) - used["reserved_bytes"]["all"]["current"]
            )
            plan = choose(problem, chunk_tokens, None, int(free + min(there, allowed)))
    return plan


def _is_count(x):
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _check(ok, name, value, expected):
    if not ok:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}: got {got}, expected {expected}")


def _pair(lora):
    fits = lora is None or len(lora) == 2 and all(isinstance(x, torch.Tensor) for x in lora)
    _check(fits, "lora", lora, "None or two tensors, states (B, T, r) and weight (V, r)")
    return lora or (None, None)


def _check_inputs(head, token_ids, mask, impl, chunk_tokens, memory_budget):
    hidden, weight, bias, lora_states, lora_weight = head
    _check(impl in ("auto", "naive", "chunked"), "impl", impl, "'naive', 'chunked' or 'auto'")
    fits = chunk_tokens == "auto" or _is_count(chunk_tokens)
    _check(fits, "chunk_tokens", chunk_tokens, "'auto' or a whole number >= 1")
    fits = memory_budget in (None, "low") or _is_count(memory_budget)
    _check(fits, "memory_budget", memory_budget, "None, 'low' or a number of bytes")
    tensors = {"hidden": hidden, "weight": weight, "token_ids": token_ids, "mask": mask}
    for name, x in tensors.items():
        _check(isinstance(x, torch.Tensor), name, x, "a tensor")
    _check(hidden.dim() == 3 and hidden.shape[0] > 0, "hidden", hidden, "states (B, T, H) of one sequence or more")
    B, T, H = hidden.shape
    _check(hidden.dtype in _DTYPES, "hidden", hidden.dtype, f"one of {_DTYPES}")
    _check(weight.dtype in _DTYPES, "weight", weight.dtype, f"one of {_DTYPES}: a quantised head cannot be read")
    _check(weight.dim() == 2 and weight.shape[1] == H, "weight", weight, f"shape (V, {H})")
    _check(bias is None or bias.shape == weight.shape[:1], "bias", bias, f"shape ({len(weight)},)")
    if lora_states is not None:
        rank = lora_states.shape[-1] if lora_states.dim() else 0
        _check(lora_states.shape == (B, T, rank) and rank, "lora", lora_states, f"states of shape ({B}, {T}, r)")
        for x in (lora_states, lora_weight):
            _check(x.dtype in _DTYPES, "lora", x.dtype, f"one of {_DTYPES}")
        _check(
            lora_weight.shape == (len(weight), rank), "lora", lora_weight, f"a weight of shape ({len(weight)}, {rank})"
        )
    _check(token_ids.shape == (B, T), "token_ids", token_ids, f"shape {(B, T)}")
    _check(token_ids.dtype in (torch.int64, torch.int32), "token_ids", token_ids.dtype, "torch.int64 or torch.int32")
    _check(mask.shape == (B, T), "mask", mask, f"shape {(B, T)}")
    return hidden.shape[:2]
