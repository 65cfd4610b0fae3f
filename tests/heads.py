"""Random loss inputs, and TRL's own loss on them: what the loss tests share."""

from collections import defaultdict
from types import SimpleNamespace

import torch
import trl
from accelerate import Accelerator
from trl.kernels import ChunkedLogProbFunction

from grpo_lab import Objective, grpo_loss


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


def relative(x, expected):
    x, expected = x.double(), expected.double()
    return ((x - expected).norm() / expected.norm().clamp(min=1e-30)).item()


class _Trl(trl.GRPOTrainer):
    """TRL's ``_compute_loss`` without a model: it reads its log-probs from TRL's fused head on given hidden states."""

    def __init__(self, objective: Objective, head, vllm):
        o = objective
        self.objective, self.head = o, head
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(steps_per_generation=1, **vars(o))
        self.epsilon_low, self.epsilon_high = o.epsilon, o.epsilon if o.epsilon_high is None else o.epsilon_high
        for name in ("loss_type", "importance_sampling_level", "beta", "top_entropy_quantile", "entropy_coef"):
            setattr(self, name, getattr(o, name))
        self.off_policy_mask_threshold, self.max_completion_length = (
            o.off_policy_mask_threshold,
            o.max_completion_length,
        )
        self.use_vllm = self.vllm_importance_sampling_correction = vllm
        self.current_gradient_accumulation_steps = 1
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = o.entropy_coef != 0.0
        self._metrics = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **_):
        hidden, weight, bias, softcap, logit_scale, scored = self.head
        logps, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden[scored], weight, bias, input_ids[:, 1:][scored], self.objective.temperature, 32768,
            softcap, logit_scale, ("log_probs", "entropy"),
        )  # fmt: skip
        return *(x.new_zeros(scored.shape).masked_scatter(scored, x) for x in (logps, entropy)), None


def trl_loss(hidden, weight, token_ids, mask, advantages, *, objective, bias=None, softcap=None, logit_scale=1.0,
             num_items=None, **per_token):  # fmt: skip
    """``grpo_loss``'s signature and returns, computed by TRL: ``(loss, metrics)``."""
    vllm = per_token.get("importance_ratio") is not None
    trainer = _Trl(objective, (hidden, weight, bias, softcap, logit_scale, mask.bool()), vllm)
    names = dict(
        old_logps="old_per_token_logps",
        ref_logps="ref_per_token_logps",
        sampling_logps="sampling_per_token_logps",
        importance_ratio="importance_sampling_ratio",
    )
    inputs = dict(
        prompt_ids=token_ids[:, :1],
        prompt_mask=torch.ones_like(mask[:, :1]),
        completion_ids=token_ids,
        completion_mask=mask,
        advantages=advantages,
        num_items_in_batch=mask.sum() if num_items is None else torch.as_tensor(num_items),
        **{names[k]: v for k, v in per_token.items() if v is not None},
    )
    loss = trainer._compute_loss(None, inputs)
    return loss, {k: v[0] for k, v in trainer._metrics["train"].items()}
