"""Reads a model's output head, and runs a loss on it inside the model's own forward.

A loss that multiplies hidden states by the head's weight has to see the same logits that the model would make: weight,
bias, softcap, scale, and a LoRA adapter on the head. It also has to run where the wrappers (DDP, FSDP) expect the head
to run. ``score_in_forward`` does the second, ``read_head`` the first; a head that it cannot read is refused by name.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

_SUPPORTED = "supported: a plain or FSDP2 nn.Linear, PEFT's modules_to_save or LoRA around one"


class OutputHead(NamedTuple):
    """A logit is ``softcap * tanh(logit_scale * z / softcap)`` with ``z = hidden @ weight.T + bias``, and with
    ``lora_states @ lora_weight.T`` added to z where adapters are on the head."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    logit_scale: float
    lora_states: torch.Tensor | None = None  # (B, L, r) of the hidden states that the head was read for
    lora_weight: torch.Tensor | None = None  # (V, r)

    @property
    def lora(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What ``grpo_loss`` takes under this name."""
        return None if self.lora_states is None else (self.lora_states, self.lora_weight)

    def at(self, rows, positions) -> "OutputHead":
        """The head for ``hidden[rows, positions]``."""
        states = self.lora_states
        return self._replace(lora_states=None if states is None else states[rows, positions])


def read_head(model, hidden: torch.Tensor | None = None) -> OutputHead:
    """The output head of a causal language model. ``hidden`` ``(B, L, H)``, which LoRA adapters on the head need, is
    what it is applied to: their dropout draws once, here. Raises ValueError for a wrapped, quantised or sharded head
    that a loss cannot read, and for an adapter that is no sum of products."""
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: expected a causal language model")
    if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the head and keeps the original beside it
        adapters = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        module = module.modules_to_save[adapters[0]] if adapters else module.original_module
    layer, adapters = module, []
    if is_adapted(layer):
        adapters, module = active_adapters(layer), layer.base_layer
    if not isinstance(module, torch.nn.Linear):
        raise ValueError(f"the output head is a {type(module).__module__}.{type(module).__name__}; {_SUPPORTED}")
    weight, bias = module.weight, module.bias
    if hasattr(weight, "quant_state") or not weight.is_floating_point():
        raise ValueError(f"the output head is quantised ({type(weight).__name__}, {weight.dtype}); {_SUPPORTED}")
    if hasattr(weight, "ds_id") and not weight.numel():
        raise ValueError(f"the output head is sharded by DeepSpeed ZeRO-3; {_SUPPORTED}")
    weight, bias = _whole(weight), _whole(bias)
    lora = (None, None)
    if adapters:
        bias, *lora = _read_lora(layer, adapters, bias, hidden)
    config = model.config.get_text_config()
    softcaps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
    softcap = next((getattr(config, name) for name in softcaps if getattr(config, name, None) is not None), None)
    return OutputHead(weight, bias, softcap, _logit_scale(config), *lora)


def is_adapted(module) -> bool:
    """Whether PEFT put a layer of adapters around the output head."""
    return hasattr(module, "base_layer")


def active_adapters(layer) -> list[str]:
    """Names of the adapters that a LoRA layer adds to its base layer now: none if they are disabled or merged. Raises
    ValueError for another tuner's layer and for a LoRA that adds more than a product."""
    from peft.tuners.lora import Linear
    from torch.distributed.fsdp import FSDPModule

    kind = type(layer).__bases__[1] if isinstance(layer, FSDPModule) else type(layer)  # fully_shard derives a class
    if kind is not Linear:
        raise ValueError(f"the output head is a {kind.__module__}.{kind.__name__}; {_SUPPORTED}")
    if layer.merged and layer.disable_adapters:
        layer.unmerge()  # as the layer's own forward does
    if layer.merged or layer.disable_adapters:
        return []
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    for name in names:
        if name in layer.lora_variant:
            kind = type(layer.lora_variant[name]).__name__
            raise ValueError(
                f"adapter {name!r} on the output head is a {kind}, of use_dora or a like option of LoraConfig: only "
                "a plain LoRA is read. Leave the option out, or 'lm_head' out of target_modules"
            )
    return names


def _read_lora(layer, adapters, bias, hidden):
    """``(bias, states, weight)`` of a LoRA layer, whose adapters lie side by side along r."""
    if hidden is None:
        raise ValueError("hidden: got None, expected the states that the LoRA adapter on the output head reads")
    states, weights = [], []
    for name in adapters:
        a, b, r, scaling = layer.lora_A[name].weight, layer.lora_B[name], layer.r[name], layer.scaling[name]
        if a.shape != (r, layer.in_features) or b.weight.shape != (layer.out_features, r):
            raise ValueError(f"adapter {name!r} on the output head is sharded, by FSDP1 or ZeRO-3; {_SUPPORTED}")
        hidden = layer._cast_input_dtype(hidden, a.dtype)
        # Scaled is the smaller factor. No submodule is called: FSDP2 has made the weights whole, or _whole does.
        states.append(F.linear(layer.lora_dropout[name](hidden), _whole(a)) * scaling)
        weights.append(_whole(b.weight))
        if b.bias is not None:
            own = _whole(b.bias) * scaling
            bias = own if bias is None else bias + own
    return (bias, *(x[0] if len(x) == 1 else torch.cat(x, -1) for x in (states, weights)))


def _whole(x):
    """A tensor, gathered where FSDP2 has it in shards. Ranks have batches of their own: its gradient is their mean."""
    if not hasattr(x, "full_tensor"):
        return x
    from torch.distributed.tensor import Partial

    return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)


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
        hidden = backbone.last_hidden_state
        return ScoredOutput(**score(hidden, read_head(self, hidden)), aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


def _load_balancing_loss(config, router_logits, kwargs):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # every MoE family's own

    return load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
