"""GRPOConfig and GRPOTrainer: TRL's, with the loss head exchanged. ``from grpo_lab import GRPOConfig, GRPOTrainer``.

Rollouts, rewards, advantages, optimiser, logging and checkpoints are TRL's. What changes is ``_compute_loss``: the head
runs inside the model's forward through ``grpo_loss``. The first batch's loss and gradients are compared with the naive
head and with TRL's own loss (``receipt.py``) before anything is trained on.
"""

import atexit
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import trl
from torch.distributed.fsdp import FSDPModule
from transformers.utils import logging
from trl.trainer import grpo_trainer
from trl.trainer.utils import nanmax, nanmin

from grpo_lab import preflight, receipt, rollouts
from grpo_lab.head import is_adapted, score_in_forward
from grpo_lab.loss import grpo_loss, token_logps
from grpo_lab.objective import Objective
from grpo_lab.runs.resuming import Resuming

TRL_VERSION = "1.16"
if ".".join(trl.__version__.split(".")[:2]) != TRL_VERSION:
    raise ImportError(
        f"grpo_lab.trainer is tested with TRL {TRL_VERSION}.x, and trl {trl.__version__} is installed: "
        f"`pip install 'trl=={TRL_VERSION}.*'`. grpo_lab.grpo_loss works without TRL."
    )

logger = logging.get_logger(__name__)
LOSS_IMPLS = ("chunked", "naive", "trl")
_LIVE = (
    "loss_type importance_sampling_level epsilon_high beta max_completion_length top_entropy_quantile entropy_coef "
    "off_policy_mask_threshold"
).split()
_FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's GRPOConfig and nine more fields.

    Raises:
        ValueError: an unknown ``loss_impl``, or an option that the chosen loss cannot honour, by name.
    """

    loss_impl: str = field(
        default="chunked",
        metadata={"help": "Who computes the loss: 'chunked', 'naive' (full logits), or 'trl' (TRL's own, to compare)."},
    )
    use_liger_loss: bool | None = field(
        default=None, metadata={"help": "The flag of 2025: True means loss_impl='chunked', False 'naive'."}
    )
    chunk_tokens: str = field(default="auto", metadata={"help": "Tokens in a chunk of logits, or 'auto'."})
    memory_budget: str | None = field(
        default=None,
        metadata={
            "help": "Bytes that the chunked loss may use beyond its inputs, gradients included, or 'low': little, at "
            "some cost of time. None: the fastest way that fits the device."
        },
    )
    logits_fp32: bool = field(default=False, metadata={"help": "Keep the logits in fp32 whatever the head's dtype."})
    verify_first_batch: bool = field(
        default=True,
        metadata={
            "help": "Compare the first batch's loss and gradients with the naive head's and TRL's; stop if not equal."
        },
    )
    skip_zero_advantage: bool = field(
        default=False,
        metadata={
            "help": "Leave sequences of zero advantage out of the training forward where nothing else needs them. The "
            "gradient is the same and the step shorter; entropy and clip metrics then cover the remaining sequences."
        },
    )
    rollouts: str | None = field(
        default=None, metadata={"help": "'transformers', or vLLM: 'colocate', 'server'. None: as use_vllm says."}
    )
    vllm_dtype: str = field(default="auto", metadata={"help": "Of colocated vLLM; 'auto' on a CPU: the policy's own."})

    def __post_init__(self):
        if not torch.accelerator.is_available() or os.environ.get("ACCELERATE_USE_CPU") == "true":
            self.use_cpu = True  # else accelerate takes each process of a launch on CPUs for a training of its own
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # else it is cpu:0, where torch.load cannot resume
            if self.bf16 is None and not self.fp16:
                self.bf16 = False  # TRL would ask for bf16, which transformers refuses where there is no GPU
        rollouts.apply_word(self)
        try:
            super().__post_init__()
        except ValueError as error:
            if "divisible by num_generations" not in str(error):
                raise
            raise ValueError(
                f"num_generations={self.num_generations}: the batch that is generated at once is no multiple of it: "
                f"{self.generation_batch_size} completions = per_device_train_batch_size "
                f"{self.per_device_train_batch_size} x {self.world_size} processes x steps_per_generation "
                f"{self.steps_per_generation}"
            ) from None
        if self.loss_impl not in LOSS_IMPLS:
            raise ValueError(f"loss_impl={self.loss_impl!r}: expected one of {', '.join(LOSS_IMPLS)}")
        if self.use_liger_loss is not None:
            if self.loss_impl == "trl" or self.use_liger_loss and self.loss_impl == "naive":
                raise ValueError(
                    f"use_liger_loss={self.use_liger_loss} contradicts loss_impl={self.loss_impl!r}: set one of them"
                )
            self.loss_impl = "chunked" if self.use_liger_loss else "naive"
        if self.chunk_tokens != "auto":
            if not str(self.chunk_tokens).isdecimal() or int(self.chunk_tokens) < 1:
                raise ValueError(f"chunk_tokens={self.chunk_tokens!r}: expected 'auto' or a whole number of 1 or more")
            self.chunk_tokens = int(self.chunk_tokens)  # a command line gives text
        if self.memory_budget not in (None, "low"):
            if not str(self.memory_budget).isdecimal() or int(self.memory_budget) < 1:
                raise ValueError(f"memory_budget={self.memory_budget!r}: expected None, 'low' or a number of bytes")
            self.memory_budget = int(self.memory_budget)
        if self.use_adaptive_entropy and self.loss_impl != "trl":
            raise ValueError(
                f"use_adaptive_entropy=True is not supported with loss_impl={self.loss_impl!r}: use entropy_coef, or "
                "loss_impl='trl'"
            )


class GRPOTrainer(Resuming, trl.GRPOTrainer):
    """TRL's GRPOTrainer with the loss that ``args.loss_impl`` names.

    ``receipt`` holds the comparison of the first batch (also in ``output_dir/receipt.json``), None until then.

    Raises:
        ValueError: ``args`` of another class, an option that the loss cannot honour.
        grpo_lab.receipt.ReceiptError: the first batch's loss is not that of the naive head, or not TRL's.
    """

    def __init__(self, model, reward_funcs=None, args=None, *more, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise ValueError(
                f"args is a {type(args).__module__}.{type(args).__name__}: import GRPOConfig from grpo_lab too"
            )
        self._temperature = Objective.from_config(args).temperature  # checks args before a model is loaded
        self.receipt = None
        # TRL refuses adapters on the head: its head and its cast to fp32 would drop them. isinstance(x, ()) is False
        kept = args.loss_impl == "trl" or args.cast_lm_head_to_fp32
        exchanged = {"VLLMGeneration": partial(rollouts.Engine, dtype=args.vllm_dtype, seed=args.seed)}
        with receipt.changed(grpo_trainer, **exchanged | ({} if kept else {"BaseTunerLayer": ()})):
            super().__init__(model, reward_funcs, args, *more, **kwargs)
        if self.accelerator.num_processes > 1:
            atexit.register(_leave_process_group)
        for m in (self.model, self.ref_model):
            if m is not None:
                m = self.accelerator.unwrap_model(m)
                m = m.get_base_model() if hasattr(m, "get_base_model") else m
                if args.loss_impl != "trl" and is_adapted(m.get_output_embeddings()):
                    preflight.check_adapted_head(m, args.use_vllm)
                score_in_forward(m)
        preflight.check(self)

    @property
    def objective(self) -> Objective:
        """What is optimised now. TRL reads it from these attributes and ``args`` at every step, so that a callback may
        change it; the temperature alone it reads once."""
        live = {name: getattr(self, name) for name in _LIVE}
        args = Objective.from_config(self.args)
        return replace(args, temperature=self._temperature, epsilon=self.epsilon_low, **live)

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        scaled = self.accelerator.scaler is not None  # fp16's scaler takes no step on such gradients
        if grad_norm is not None and not scaled and not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of step {self.state.global_step + 1} has the norm {float(grad_norm)}: no step was taken "
                "on it, and the last checkpoint is whole. Look at the rewards and the metrics of the steps before; a "
                "smaller learning_rate or max_grad_norm helps where they ran away"
            )
        return grad_norm

    def _generate_and_score_completions(self, inputs):
        if self.beta != 0.0 and self.ref_model is None and not hasattr(self.model, "peft_config"):
            raise ValueError(
                f"beta={self.beta!r}, set during training, needs a reference model, and beta=0.0 in GRPOConfig loaded "
                "none: start from a beta other than 0"
            )
        batch = super()._generate_and_score_completions(inputs)
        for name, value in rollouts.mismatch(batch).items():
            metrics = self._metrics["train" if self.model.training else "eval"]
            metrics[f"sampling/{name}"].append(self.accelerator.gather(value).nanmean().item())
        return batch

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        inputs = (input_ids, attention_mask, logits_to_keep, *args)
        if self.args.loss_impl == "trl":
            return super()._get_per_token_logps_and_entropies(model, *inputs, **kwargs)

        def scored_model(labels, fused_lm_head, **inputs):  # TRL slices the batch and builds the inputs; we score them
            ids, scored = labels[:, -logits_to_keep:], SimpleNamespace()

            def score(hidden, head):
                part = slice(None), slice(-logits_to_keep - 1, -1)
                hidden, head = self._head_states(hidden[part], head), head.at(*part)
                with self._head_precision(hidden):
                    scored.log_probs, scored.entropy = token_logps(
                        hidden,
                        head.weight,
                        ids,
                        ids != -100,
                        temperature=self._temperature,
                        **self._head_options(head, self.args.loss_impl),
                    )
                return dict(vars(scored))

            model(**inputs, score=score)
            return scored  # not the model's output, which FSDP2 may have cast to bf16

        scores = super()._get_per_token_logps_and_entropies(scored_model, *inputs, **kwargs)
        for module in model.modules():  # PEFT must not enable the gathered copies of what it disabled in shards
            if isinstance(module, FSDPModule):
                module.reshard()
        return scores

    def _compute_loss(self, model, inputs):
        if self.args.loss_impl == "trl":
            return super()._compute_loss(model, inputs)
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1.0
        inputs, share = self._without_zero_advantage(inputs) if training else (inputs, 1.0)
        forward_inputs = {key: inputs[key] for key in _FORWARD_KEYS if key in inputs}
        if self.aux_loss_enabled:
            forward_inputs["output_router_logits"] = True
        stats = exact = None

        def score(hidden, head):
            nonlocal stats, exact
            if training and self.receipt is None and self.args.verify_first_batch and receipt.can_tell(self, inputs):
                self.receipt = receipt.verify(self, inputs, hidden.detach(), head)
            loss, stats = self.head_loss(hidden, head, inputs, self.args.loss_impl)
            loss = self.accumulated(loss) * share
            exact = loss.detach()
            return dict(loss=loss)

        with self.accelerator.autocast():
            output = model(
                input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                score=score,
                **forward_inputs,
            )
        loss = output.loss
        if loss.dtype != exact.dtype:  # FSDP2's output_dtype: the gradient, 1, survived the cast, the value did not
            loss = loss + (exact - loss.detach())
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * output.aux_loss / accumulation
        self._log_stats(stats, loss.detach(), output.aux_loss, accumulation)
        return loss

    def accumulated(self, loss):
        """A batch's part of the loss that the optimiser steps on."""
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1.0)

    def head_loss(self, hidden, head, inputs, impl):
        """``grpo_loss`` of a batch as TRL prepares it, before the division by the accumulation steps.

        ``hidden`` ``(B, P + T, H)`` covers prompt and completion. The chunked head scores the positions that predict
        the completion in place, without a copy; the naive one gets them alone, or it would make logits of the prompt.
        Returns ``(loss, stats)`` with stats of ``(B, P + T)`` or ``(B, T)``.
        """
        T = inputs["completion_ids"].shape[1]
        left, right = hidden.shape[1] - T - 1, 1
        if impl == "naive":
            part = slice(None), slice(left, -1)
            hidden, head, left, right = hidden[part], head.at(*part), 0, 0
        hidden = self._head_states(hidden, head)

        def spread(x):
            return x if x is None or x.shape[1:] != (T,) else F.pad(x, (left, right))

        num_items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:  # num_items_in_batch spans the generation batch, which is trained on in as many parts
            num_items = num_items / self.args.steps_per_generation
        objective = self.objective
        masks_off_policy = objective.off_policy_mask_threshold is not None
        with self._head_precision(hidden):
            return grpo_loss(
                hidden,
                head.weight,
                spread(inputs["completion_ids"]),
                spread(inputs["completion_mask"] * inputs.get("tool_mask", 1)),
                spread(inputs["advantages"]),
                objective=objective,
                old_logps=spread(inputs.get("old_per_token_logps")),
                ref_logps=spread(inputs.get("ref_per_token_logps")),
                sampling_logps=spread(inputs.get("sampling_per_token_logps")) if masks_off_policy else None,
                importance_ratio=spread(inputs.get("importance_sampling_ratio")),
                num_items=num_items,
                gather=self._gather_entropies,
                **self._head_options(head, impl),
            )

    def _head_options(self, head, impl):
        return dict(
            bias=head.bias,
            lora=head.lora,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            impl=impl,
            chunk_tokens=self.args.chunk_tokens,
            memory_budget=self.args.memory_budget,
            logits_fp32=self.args.logits_fp32,
        )

    def _head_precision(self, hidden):
        """An fp32 head (``cast_lm_head_to_fp32``) must not be cast back by autocast."""
        return torch.autocast(hidden.device.type, enabled=False) if self.args.cast_lm_head_to_fp32 else nullcontext()

    def _head_states(self, hidden, head):
        """States that make an fp32 head's logits fp32, also where a wrapper's mixed precision has cast its weight."""
        narrow = self.args.cast_lm_head_to_fp32 and head.weight.dtype.itemsize < 4
        return hidden.float() if narrow else hidden

    def _gather_entropies(self, entropy):
        padded = self.accelerator.pad_across_processes(entropy, dim=0, pad_index=-1.0)  # an entropy is never negative
        gathered = self.accelerator.gather(padded)
        return gathered[gathered >= 0] if self.accelerator.num_processes > 1 else gathered

    def _without_zero_advantage(self, inputs):
        """The batch without zero-advantage sequences, and the factor that gives its loss the whole batch's scale."""
        o, advantages = self.objective, inputs["advantages"]
        needed = o.beta != 0.0 or o.entropy_coef != 0.0 or o.top_entropy_quantile < 1.0 or self.aux_loss_enabled
        if not self.args.skip_zero_advantage or needed or any(key in inputs for key in _FORWARD_KEYS):
            return inputs, 1.0
        B = len(advantages)
        keep = (advantages != 0).reshape(B, -1).any(-1).nonzero().squeeze(-1)
        if not len(keep):
            keep = keep.new_zeros(1)  # the wrappers' hooks need one forward and backward on every rank
        kept = {k: v[keep] if torch.is_tensor(v) and v.dim() and len(v) == B else v for k, v in inputs.items()}
        share = len(keep) / B
        if o.loss_type in ("dapo", "cispo", "vespo"):
            share = 1.0
        elif o.loss_type == "bnpo":
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            share = mask[keep].sum() / mask.sum().clamp(min=1)
        self._metrics["train"]["skipped_zero_advantage"].append(1 - len(keep) / B)
        return kept, share

    def _log_stats(self, stats, loss, aux_loss, accumulation):
        """Log what TRL logs, under its names, with one reduction and one device sync for all of it."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = list(stats.sums)
        totals = torch.stack([torch.stack([total.float(), count.float()]) for total, count in stats.sums.values()])
        totals = self.accelerator.reduce(totals, reduction="sum")
        values = {name: totals[i, 0] / totals[i, 1].clamp(min=1.0) for i, name in enumerate(names)}
        for name, x in stats.extremes.items():
            extreme = nanmin if name.endswith("min") else nanmax
            values[name] = extreme(self.accelerator.gather(extreme(x)))  # ranks may hold different numbers of sequences
        if self._entropy_bonus_enabled or self.entropy_coef != 0.0:
            in_window = self.loss_type in ("dapo", "cispo", "vespo")  # TRL logs these after its accumulation factor
            policy_loss = stats.policy_loss / (accumulation if in_window else 1.0)
            values["policy_loss"] = self.accelerator.gather(policy_loss).nanmean()
            if self.model.training and self.accelerator.sync_gradients:
                metrics["entropy_coef"].append(self.entropy_coef)
        if self.aux_loss_enabled:
            values["aux_loss"] = self.accelerator.gather_for_metrics(aux_loss.detach()).mean()
        *values_list, loss = torch.stack([*(v.float() for v in values.values()), loss.float()]).tolist()
        for name, value in zip(values, values_list, strict=True):
            metrics[name].append(value)
        if not math.isfinite(loss):
            logger.warning(
                f"step {self.state.global_step + 1}: the loss is {loss}. The hidden states or log-probs of this batch "
                "are not finite: lower learning_rate, set max_grad_norm, or try bf16 in place of fp16"
            )


def _leave_process_group():
    """What a script on several processes need not know: gloo's threads free the last tensors that they sent when the
    call has returned, which takes Python; one that comes too late for it aborts the process (pytorch/pytorch#179291).
    Leaving the group does not wait for them where a wrapper still holds it."""
    failed = hasattr(sys, "last_type")  # then NCCL might wait here for ranks that will not come
    if torch.distributed.is_initialized() and not failed:
        torch.distributed.destroy_process_group()
        time.sleep(0.3)
