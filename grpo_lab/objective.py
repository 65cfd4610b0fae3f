"""The GRPO family as mathematics on per-token vectors: ratios, clipping, KL, masks and normalisers, written once.

Every loss type of the family is the same sum, ``sum_t weight_t * loss_t``: the types differ in the token's loss and in
the weight that normalises it. The naive, chunked and Triton paths all call this module and get the coefficients
``dL/dlogp`` and ``dL/dentropy`` from autograd over its ``(N,)`` vectors. It knows nothing of hidden states or heads.

Shapes, here and in the whole package: B sequences, T completion positions, N scored tokens (mask 1) packed into
vectors, H hidden, V vocabulary, C tokens in a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


@dataclass(frozen=True)
class Objective:
    """What GRPO optimises. Field names and defaults are those of TRL 1.16's ``GRPOConfig``.

    Raises:
        ValueError: naming the field, its value and what is accepted.

    Sources: GRPO (DeepSeekMath), DAPO, Dr. GRPO, CISPO (MiniMax-M1), SAPO, LUSPO, VESPO, GSPO (sequence-level ratios),
    two-sided clipping with ``delta`` (INTELLECT-2), ``top_entropy_quantile`` (Beyond the 80/20 Rule), off-policy
    sequence masking and the bias-corrected KL (DeepSeek-V3.2).
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    temperature: float = 1.0
    max_completion_length: int | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self):
        def require(ok, name, expected):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, float) or (f.default is None and value is not None):
                number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                require(number, f.name, "a finite number")
        require(self.epsilon >= 0, "epsilon", "a number of 0 or more")
        require(self.sapo_temperature_neg > 0, "sapo_temperature_neg", "a number above 0")
        require(self.sapo_temperature_pos > 0, "sapo_temperature_pos", "a number above 0")
        require(self.loss_type in LOSS_TYPES, "loss_type", f"one of {', '.join(LOSS_TYPES)}")
        require(
            self.importance_sampling_level in ("token", "sequence"), "importance_sampling_level", "token or sequence"
        )
        require(self.temperature > 0, "temperature", "a number above 0")
        require(0.0 < self.top_entropy_quantile <= 1.0, "top_entropy_quantile", "a share in (0, 1]")
        require(self.delta is None or self.delta > 0, "delta", "None or a number above 0")
        if self.loss_type == "dr_grpo":
            length = self.max_completion_length
            require(
                length is not None and length > 0, "max_completion_length", "a positive length: dr_grpo divides by it"
            )

    @classmethod
    def from_config(cls, config) -> "Objective":
        """The objective that a TRL ``GRPOConfig`` describes."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def coupling(self, on_policy: bool) -> str:
        """What a token's coefficient depends on: ``"nothing"`` (it is known before any logit is computed, as on-policy
        without KL and entropy terms), its own ``"token"``, its ``"sequence"``, or the whole ``"batch"``. On-policy
        means neither old nor sampling log-probs: every ratio is 1 by construction."""
        if self.top_entropy_quantile < 1.0:
            return "batch"
        if on_policy and self.beta == 0.0 and self.entropy_coef == 0.0:
            return "nothing"
        by_sequence = (
            self.importance_sampling_level == "sequence"
            or self.loss_type == "vespo"
            or (self.off_policy_mask_threshold is not None and not on_policy)
        )
        return "sequence" if by_sequence else "token"

    def active(self, scored, advantages: torch.Tensor, importance_ratio: torch.Tensor | None) -> torch.Tensor:
        """Of the tokens ``scored`` ``(B, T)`` those whose coefficient may differ from 0, as far as it is known before
        the log-probs are."""
        if self.beta != 0.0 or self.entropy_coef != 0.0:
            return scored
        active = scored & (advantages != 0)
        if importance_ratio is not None and self.loss_type != "vespo":
            active &= importance_ratio != 0
        if self.importance_sampling_level == "sequence":  # the ratio of one token's loss is the log-prob of all
            active = scored & active.any(-1, keepdim=True)
        return active

    def weights(self, lengths_B: torch.Tensor, seq_N: torch.Tensor, num_items: torch.Tensor | float | None):
        """Each scored token's share ``(N,)`` in the loss. ``num_items`` is the token count that dapo, cispo and vespo
        divide by; None means this batch's, and 1 where that is 0."""
        if self.loss_type in ("grpo", "sapo"):
            return 1.0 / (lengths_B[seq_N] * len(lengths_B))
        total = lengths_B.sum().clamp(min=1.0)
        if self.loss_type in ("dapo", "cispo", "vespo"):
            total = total if num_items is None else torch.as_tensor(num_items, device=total.device)
        elif self.loss_type == "dr_grpo":
            total = torch.full_like(total, len(lengths_B) * self.max_completion_length)
        elif self.loss_type == "luspo":
            total = torch.full_like(total, len(lengths_B))
        return (1.0 / total.to(lengths_B.dtype)).expand(len(seq_N))

    def loss(self, logps: torch.Tensor, entropy: torch.Tensor, tokens: "Tokens") -> tuple[torch.Tensor, dict]:
        """The loss of ``tokens`` given their log-probs and entropies ``(N,)``, and detached per-token diagnostics.

        Differentiable in ``logps`` and ``entropy``. ``tokens`` may be a part of the batch as long as it holds all that
        its coefficients depend on (see ``coupling``): parts add up to the whole.
        """
        advantages = tokens.advantages
        old_logps = logps.detach() if tokens.old_logps is None else tokens.old_logps
        log_ratio = logps - old_logps
        if self.importance_sampling_level == "sequence":
            ratio = tokens.mean_of_sequence(log_ratio).exp()
        else:
            ratio = log_ratio.exp()
        diagnostics = {}

        if self.beta != 0.0:  # the k3 estimator of KL(policy || reference), http://joschu.net/blog/kl-approx.html
            log_r = tokens.ref_logps - logps
            kl = log_r.exp() - log_r - 1
            kl = kl * ratio if self.use_bias_correction_kl else kl
            diagnostics["kl"] = kl

        epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.loss_type == "cispo":
            losses = -ratio.clamp(max=epsilon_high).detach() * advantages * logps
            diagnostics["cispo_clip_ratio"] = (ratio > epsilon_high) & (advantages > 0)
        elif self.loss_type == "sapo":
            tau = torch.where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg)
            losses = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
        elif self.loss_type == "vespo":
            phi = self._vespo_weight(log_ratio.detach(), tokens)
            losses = -phi * advantages * logps
            diagnostics["vespo/phi_seq_mean"] = phi
        else:
            clipped = ratio.clamp(1 - self.epsilon, 1 + epsilon_high)
            ratio = ratio if self.delta is None else ratio.clamp(max=self.delta)
            losses = -torch.min(ratio * advantages, clipped * advantages)
            diagnostics["clip_ratio/low"] = (ratio < 1 - self.epsilon) & (advantages < 0)
            diagnostics["clip_ratio/high"] = (ratio > 1 + epsilon_high) & (advantages > 0)

        if self.off_policy_mask_threshold is not None:
            sampling_logps = old_logps if tokens.sampling_logps is None else tokens.sampling_logps
            drift = tokens.mean_of_sequence((sampling_logps - logps.detach()).nan_to_num(nan=0.0))
            losses = losses * ((advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        entropy_weight = tokens.entropy_weight
        if self.top_entropy_quantile < 1.0:
            top = self._top_entropy(entropy.detach(), tokens.gather)
            losses = losses * top
            entropy_weight = top / top.sum().clamp(min=1.0)
        if tokens.importance_ratio is not None and self.loss_type != "vespo":
            losses = losses * tokens.importance_ratio
        if self.beta != 0.0:
            losses = losses + self.beta * kl

        loss = policy_loss = (losses * tokens.weight).sum()
        if self.entropy_coef != 0.0:
            loss = loss - self.entropy_coef * (entropy * entropy_weight).sum()
        diagnostics["policy_loss"] = policy_loss
        return loss, {name: value.detach() for name, value in diagnostics.items()}

    def coefficients(self, logps: torch.Tensor, entropy: torch.Tensor, tokens: "Tokens"):
        """``(dL/dlogp, dL/dentropy)``, each ``(N,)``; the second is None without an entropy bonus."""
        with torch.enable_grad():
            inputs = [logps.detach().requires_grad_()]
            if self.entropy_coef != 0.0:
                inputs.append(entropy.detach().requires_grad_())
            loss, _ = self.loss(inputs[0], inputs[-1], tokens)
            grads = torch.autograd.grad(loss, inputs)
        return grads[0], grads[1] if len(grads) == 2 else None

    def _vespo_weight(self, log_ratio, tokens):
        """VESPO's detached gamma weight ``e^l w^k e^(-l w)`` of the sequence-level ratio w, in log space."""
        floor = math.log(1e-8)
        log_w = log_ratio.clamp(-20.0, 20.0)
        if tokens.importance_ratio is not None:
            log_w = log_w + tokens.importance_ratio.log().clamp(floor, 20.0)
        log_w = tokens.sum_of_sequence(log_w).clamp(floor, 20.0)
        positive = tokens.advantages >= 0
        k = torch.where(positive, self.vespo_k_pos, self.vespo_k_neg)
        lam = torch.where(positive, self.vespo_lambda_pos, self.vespo_lambda_neg).clamp(min=1e-4)
        return (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _top_entropy(self, entropy, gather):
        pool = entropy if gather is None else gather(entropy)
        if pool.numel() == 0:
            return torch.zeros_like(entropy, dtype=torch.bool)
        return entropy >= torch.quantile(pool, 1.0 - self.top_entropy_quantile)


@dataclass(frozen=True)
class Tokens:
    """The scored tokens of a batch as packed vectors ``(N,)``; padding is gone and costs nothing from here on."""

    shape: tuple[int, int]  # (B, T)
    position: torch.Tensor  # index of each token in the flattened (B, T)
    ids: torch.Tensor
    lengths: torch.Tensor  # (B,) scored tokens of each sequence, float
    advantages: torch.Tensor
    weight: torch.Tensor
    entropy_weight: torch.Tensor  # scalar: 1 / N
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampling_logps: torch.Tensor | None = None
    importance_ratio: torch.Tensor | None = None
    gather: Callable | None = None  # collects (n,) entropies from all ranks

    def __len__(self):
        return len(self.position)

    def __getitem__(self, part: slice) -> "Tokens":
        names = (
            "position",
            "ids",
            "advantages",
            "weight",
            "old_logps",
            "ref_logps",
            "sampling_logps",
            "importance_ratio",
        )
        return replace(self, **{n: v[part] for n in names if (v := getattr(self, n)) is not None})

    def pad(self, x_N: torch.Tensor) -> torch.Tensor:
        """Back to ``(B, T)``, 0 where nothing is scored. Differentiable, and deterministic: positions are unique."""
        B, T = self.shape
        return x_N.new_zeros(B * T).index_put((self.position,), x_N).view(B, T)

    def sum_of_sequence(self, x_N: torch.Tensor) -> torch.Tensor:
        """Each token gets the sum over its sequence ``(N,)``."""
        return self.pad(x_N).sum(-1)[self.position // self.shape[1]]

    def mean_of_sequence(self, x_N: torch.Tensor) -> torch.Tensor:
        return self.sum_of_sequence(x_N) / self.lengths[self.position // self.shape[1]]


@dataclass(frozen=True)
class Stats:
    """What a loss call reports, all detached; the names are those that TRL logs.

    logps, entropy: ``(B, T)``, 0 where nothing is scored. policy_loss: the loss without the entropy bonus.
    sums: name -> ``(sum, count)``, to be added up over ranks before the division. extremes: name -> means of the
    sequences ``(B,)``, whose NaN-aware minimum ("..._min") or maximum ("..._max") over all ranks is the metric.
    """

    logps: torch.Tensor
    entropy: torch.Tensor
    policy_loss: torch.Tensor
    sums: dict = field(default_factory=dict)
    extremes: dict = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """This process's metrics as floats, with one device sync. Without scored tokens a minimum or maximum is NaN."""
        values = [total / count.clamp(min=1.0) for total, count in self.sums.values()]
        for name, x in self.extremes.items():
            low = name.endswith("min")
            x = torch.where(x.isnan(), torch.inf if low else -torch.inf, x)
            x = x.min() if low else x.max()
            values.append(torch.where(x.isinf(), torch.nan, x))
        names = (*self.sums, *self.extremes)
        return dict(zip(names, torch.stack([v.float() for v in values]).tolist(), strict=True))


def report(
    objective: Objective, tokens: Tokens, logps, entropy, diagnostics: dict, per_token_advantages: bool
) -> Stats:
    """``Stats`` from packed log-probs, entropies and the diagnostics of ``Objective.loss``."""
    n = tokens.lengths.sum()
    stats = Stats(tokens.pad(logps), tokens.pad(entropy), diagnostics["policy_loss"])
    stats.sums["entropy"] = (entropy.sum(), n)
    if "kl" in diagnostics:
        stats.sums["kl"] = (diagnostics["kl"].sum(), n)

    by_sequence = objective.importance_sampling_level == "sequence" or objective.loss_type == "vespo"
    by_sequence = by_sequence and not per_token_advantages

    def sequence_means(x):  # NaN where a sequence has no tokens; TRL counts such a one as a ratio of 1, we leave it out
        return tokens.pad(x.to(logps.dtype)).sum(-1) / tokens.lengths

    def add(name, x):
        if by_sequence:
            stats.sums[name] = (sequence_means(x).nansum(), (tokens.lengths > 0).sum())
        else:
            stats.sums[name] = (x.sum(), n)

    if "clip_ratio/low" in diagnostics:
        low, high = diagnostics["clip_ratio/low"], diagnostics["clip_ratio/high"]
        for name, x in (("low", low), ("high", high), ("region", low | high)):
            add(f"clip_ratio/{name}_mean", x)
        stats.extremes["clip_ratio/low_min"] = sequence_means(low)
        stats.extremes["clip_ratio/high_max"] = sequence_means(high)
    for name in ("cispo_clip_ratio", "vespo/phi_seq_mean"):
        if name in diagnostics:
            add(name, diagnostics[name])
    return stats
