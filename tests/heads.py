"""Random loss inputs, and on them the loss of TRL's trainer and of ours: what the loss tests share."""

import random
from collections import defaultdict
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator
from trl.kernels import ChunkedLogProbFunction

from grpo_lab import GRPOTrainer, Objective, grpo_loss
from grpo_lab.head import OutputHead, ScoredOutput, in_head


def random_inputs(B=5, T=9, H=16, V=37, dtype=torch.float64, device="cpu", scale=1.0, bias=False, off_policy=True):
    """Ragged batch with an empty sequence and a zero advantage; log-probs near the policy's so that ratios matter."""
    make = lambda *s: torch.randn(*s, dtype=torch.float64, device=device)  # noqa: E731
    x = dict(
        hidden=(make(B, T, H) * scale).to(dtype),
        weight=(make(V, H) * H**-0.5).to(dtype),
        token_ids=torch.randint(0, V, (B, T), device=device),
        mask=(torch.rand(B, T, device=device) > 0.3).long(),
        advantages=make(B).to(torch.float32),
        ref_logps=(make(B, T) * 0.3).to(torch.float32),
    )
    if B > 2:
        x["mask"][1], x["advantages"][0] = 0, 0
    if bias:
        x["bias"] = make(V).to(dtype)
    if off_policy:
        x["old_logps"] = (make(B, T) * 0.3).to(torch.float32)
        x["importance_ratio"] = torch.rand(B, T, device=device) + 0.5
    logps = torch.log_softmax(x["hidden"].double() @ x["weight"].double().T, -1)
    logps = logps.gather(-1, x["token_ids"][..., None]).squeeze(-1)
    for name in ("ref_logps", "old_logps"):
        if name in x:
            x[name] = (x[name] + logps).to(torch.float32)
    return x


def loss_and_grads(x, dtype=None, frozen_head=False, loss_fn=grpo_loss, grad_scale=1.0, **options):
    """``(loss, {leaf: gradient}, stats or metrics)`` of the inputs, cast to dtype where one is given. ``grad_scale``
    multiplies the gradients, as GradScaler does for fp16."""
    x = dict(x)
    leaves = [k for k in ("hidden", "weight", "bias") if k in x]
    for k in leaves:
        x[k] = x[k].detach().to(dtype or x[k].dtype, copy=True)
        x[k].requires_grad_(not (frozen_head and k != "hidden"))
    args = [x.pop(k) for k in ("hidden", "weight", "token_ids", "mask", "advantages")]
    loss, stats = loss_fn(*args, **x, **options)
    (loss * grad_scale).backward()
    return loss.detach(), {k: v.grad for k, v in zip(("hidden", "weight"), args)} | (
        {"bias": x["bias"].grad} if "bias" in x else {}
    ), stats  # fmt: skip


def objectives(loss_type, n, seed):
    """n random objectives of a loss type: every option, alone and together."""
    rng = random.Random(seed)
    for _ in range(n):
        yield Objective(
            loss_type=loss_type,
            importance_sampling_level=rng.choice(["token", "sequence"]),
            epsilon=rng.choice([0.1, 0.2]),
            epsilon_high=rng.choice([None, 0.3, 2.0]),
            delta=rng.choice([None, None, 1.5]),
            beta=rng.choice([0.0, 0.1]),
            use_bias_correction_kl=rng.random() < 0.5,
            temperature=rng.choice([1.0, 0.7, 1.3]),
            max_completion_length=12,
            top_entropy_quantile=rng.choice([1.0, 1.0, 0.37]),  # no token lies on the threshold, which TRL rounds
            entropy_coef=rng.choice([0.0, 0.05]),
            off_policy_mask_threshold=rng.choice([None, 0.05, -0.3]),
        )


def relative(x, expected):
    x, expected = x.double(), expected.double()
    return ((x - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def read_head(model, hidden):
    """The ``OutputHead`` that a score gets."""
    return in_head(model, hidden, lambda hidden, head: head)


class _Step:
    """What ``_compute_loss`` reads of a trainer. Its model gives ``hidden``, and NaN where nothing may be read."""

    def __init__(self, objective, head, vllm, accumulation, generation_batches, training, **settings):
        self.args = SimpleNamespace(**vars(objective), steps_per_generation=generation_batches, **settings)
        for name in ("loss_type", "importance_sampling_level", "beta", "top_entropy_quantile", "entropy_coef",
                     "off_policy_mask_threshold", "max_completion_length", "temperature"):  # fmt: skip
            setattr(self, name, getattr(objective, name))
        self._temperature, self.epsilon_low = objective.temperature, objective.epsilon
        self.epsilon_high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
        self.head, self.accelerator, self.model = head, _ACCELERATOR, SimpleNamespace(training=training)
        self.use_vllm = self.vllm_importance_sampling_correction = vllm
        self.current_gradient_accumulation_steps = accumulation
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = objective.entropy_coef != 0.0
        self.receipt = {}
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def forward(self, input_ids, attention_mask, score=None, labels=None, **_):
        hidden, weight, bias, softcap, logit_scale = self.head
        junk = torch.full_like(hidden[:, :1], torch.nan)  # the first prompt token, the last completion token
        hidden = torch.cat([junk, hidden, junk], dim=1)
        if score is not None:
            return ScoredOutput(**score(hidden, OutputHead(weight, bias, softcap, logit_scale)))
        scored = labels[:, 1:] != -100
        hidden, ids = hidden[:, :-1][scored], labels[:, 1:][scored]
        if hidden.dtype == torch.float64:  # TRL's kernel accumulates in fp32: the textbook head takes its place
            z = hidden @ weight.T * logit_scale if bias is None else (hidden @ weight.T + bias) * logit_scale
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            logps = torch.log_softmax(z / self.temperature, -1)
            entropy = -(logps.exp() * logps).sum(-1)
            logps = logps.gather(-1, ids[:, None]).squeeze(-1)
        else:
            logps, entropy, *_ = ChunkedLogProbFunction.apply(
                hidden, weight, bias, ids, self.temperature, 32768, softcap, logit_scale, ("log_probs", "entropy")
            )
        spread = [x.new_zeros(scored.shape).masked_scatter(scored, x) for x in (logps, entropy)]
        return SimpleNamespace(log_probs=spread[0], entropy=spread[1])


class _Trl(_Step, trl.GRPOTrainer):
    pass


class _Ours(_Step, GRPOTrainer):
    pass


_ACCELERATOR = Accelerator(cpu=not torch.cuda.is_available())
_KEYS = dict(
    old_logps="old_per_token_logps",
    ref_logps="ref_per_token_logps",
    sampling_logps="sampling_per_token_logps",
    importance_ratio="importance_sampling_ratio",
    tool_mask="tool_mask",
)


def _compute_loss(cls, hidden, weight, token_ids, mask, advantages, *, objective, bias=None, softcap=None,
                  logit_scale=1.0, num_items=None, accumulation=1, generation_batches=1, training=True, settings=None,
                  **per_token):  # fmt: skip
    vllm = per_token.get("importance_ratio") is not None
    trainer = cls(objective, (hidden, weight, bias, softcap, logit_scale), vllm, accumulation, generation_batches,
                  training, **(settings or {}))  # fmt: skip
    prompt = token_ids[:, :1].repeat(1, 2)
    inputs = dict(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt),
        completion_ids=token_ids,
        completion_mask=mask,
        advantages=advantages,
        num_items_in_batch=mask.sum() if num_items is None else torch.as_tensor(num_items),
        **{_KEYS[k]: v for k, v in per_token.items() if v is not None},
    )
    loss = trainer._compute_loss(trainer.forward, inputs)
    return loss, {k: v[0] for k, v in trainer._metrics["train" if training else "eval"].items()}


def trl_loss(*args, **options):
    """``(loss, logged metrics)`` from TRL's ``_compute_loss``, with the arguments of ``grpo_loss`` and those of a step.
    On TRL's kernel, or where the inputs are float64 on the textbook head in float64."""
    return _compute_loss(_Trl, *args, **options)


def step_loss(*args, impl="chunked", chunk_tokens="auto", **options):
    """The same from this package's ``_compute_loss``."""
    settings = dict(loss_impl=impl, chunk_tokens=chunk_tokens, memory_budget=None, logits_fp32=False,
                    cast_lm_head_to_fp32=False, skip_zero_advantage=False)  # fmt: skip
    return _compute_loss(_Ours, *args, **options, settings=settings)
