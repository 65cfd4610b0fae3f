"""Reads a model's output head, and runs a loss on it inside the model's own forward.

A loss that multiplies hidden states by the head's weight has to see the same logits that the model would make: weight,
bias, softcap and scale. It also has to run where the wrappers (DDP, FSDP) expect the head to run. ``score_in_forward``
does the second, ``read_head`` the first; a head that it cannot read is refused by the wrapper's name.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.utils import ModelOutput

_SUPPORTED = "supported: a plain or FSDP2 nn.Linear, PEFT's modules_to_save around one"


class OutputHead(NamedTuple):
    """A logit is ``softcap * tanh(logit_scale * z / softcap)`` with ``z = hidden @ weight.T + bias``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    logit_scale: float


def read_head(model) -> OutputHead:
    """The output head of a causal language model. Raises ValueError for a wrapped, quantised or sharded one that a loss
    cannot read."""
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: expected a causal language model")
    if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the head and keeps the original beside it
        adapters = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        module = module.modules_to_save[adapters[0]] if adapters else module.original_module
    if not isinstance(module, torch.nn.Linear) or hasattr(module, "lora_A"):
        raise ValueError(f"the output head is a {type(module).__module__}.{type(module).__name__}; {_SUPPORTED}")
    weight, bias = module.weight, module.bias
    if hasattr(weight, "quant_state") or not weight.is_floating_point():
        raise ValueError(f"the output head is quantised ({type(weight).__name__}, {weight.dtype}); {_SUPPORTED}")
    if hasattr(weight, "ds_id") and not weight.numel():
        raise ValueError(f"the output head is sharded by DeepSpeed ZeRO-3; {_SUPPORTED}")
    if hasattr(weight, "full_tensor"):
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    config = model.config.get_text_config()
    softcaps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
    softcap = next((getattr(config, name) for name in softcaps if getattr(config, name, None) is not None), None)
    return OutputHead(weight, bias, softcap, _logit_scale(config))


def _logit_scale(config) -> float:
    # Cohere, Muse Glimmer and Falcon-H1 multiply the logits; Granite and MiniCPM3 divide them; HyperCLOVA X, which uses
    # the name of those two, multiplies.
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return scaling if config.model_type == "hyperclovax" else 1.0 / scaling


@dataclass
class ScoredOutput(ModelOutput):
    """What a scoring forward returns: tensors at its top level, where FSDP and DDP look for what to hook."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def score_in_forward(model) -> None:
    """Give ``model.forward`` the argument ``score``: the backbone runs, and ``score(hidden, head)``, called with its
    last hidden states ``(B, L, H)`` and the ``OutputHead``, returns the output's fields. Without it nothing changes."""
    original = model.forward

    @functools.wraps(type(model).forward)  # generate() checks its arguments against this signature
    def forward(self, *args, score: Callable | None = None, **kwargs):
        if score is None:
            return original(*args, **kwargs)
        backbone = self.base_model(*args, use_cache=False, **kwargs)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            aux_loss = _load_balancing_loss(self.config.get_text_config(), backbone.router_logits, kwargs)
        return ScoredOutput(**score(backbone.last_hidden_state, read_head(self)), aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


def _load_balancing_loss(config, router_logits, kwargs):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # every MoE family's own

    return load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
