"""Runs a loss on a model's output head, where the model itself would run it.

A loss that multiplies hidden states by the head's weight has to see the same logits that the model would make: weight,
bias, softcap, scale, and a LoRA adapter on the head. It also has to see them where the wrappers (DDP, FSDP, DeepSpeed)
have the parameters whole: inside the forward of the module that owns them. ``in_head`` does both, ``score_in_forward``
gives them a place in the model's own forward; a head that cannot be read is refused by name.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers.utils import ModelOutput

_SUPPORTED = (
    "supported: a plain nn.Linear, PEFT's modules_to_save or LoRA around one, under DDP, FSDP 1 and 2, DeepSpeed ZeRO"
)


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


def in_head(model, hidden: torch.Tensor, score: Callable):
    """``score(hidden, head)``, run as the forward of a causal language model's output head on ``hidden`` ``(B, L, H)``.

    The head's module is called, and each module that holds a part of a LoRA adapter on it, one inside the other. So
    whatever a wrapper does around a module's forward and backward happens here as well, once a call: parameters are
    gathered and cast, hidden states too, gradients are reduced. The adapter's dropout draws once.

    Returns:
        What ``score`` returned, tensors in it as the wrappers' hooks left them.

    Raises:
        ValueError: a quantised, sharded or unknown head that a loss cannot read, an adapter that is no sum of products.
    """
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: expected a causal language model")
    layer = base = _unwrapped(module)
    adapters = []
    if is_adapted(layer):
        adapters, base = active_adapters(layer), _unwrapped(layer.base_layer)
    if not isinstance(base, torch.nn.Linear):
        raise ValueError(f"the output head is a {_name(type(base))}; {_SUPPORTED}")
    config = model.config.get_text_config()

    def in_base(hidden, *products):  # the (states, weight, bias) of the adapters that have been opened
        if len(products) < len(adapters):
            name = adapters[len(products)]
            a, b, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
            x = layer.lora_dropout[name](layer._cast_input_dtype(hidden, a.weight.dtype))

            def in_b(states):
                bias = None if b.bias is None else b.bias * scaling
                return in_base(hidden, *products, (states, _checked(_unwrapped(b)), bias))

            return _call(b, in_b, a(x) * scaling)  # scaled is the smaller factor
        weight, bias = _checked(base), base.bias
        for *_, own in products:
            bias = own if bias is None else bias if own is None else bias + own
        states, weights = ([product[i] for product in products] for i in (0, 1))
        lora = [None if not x else x[0] if len(x) == 1 else torch.cat(x, -1) for x in (states, weights)]
        return score(hidden, OutputHead(weight, bias, _softcap(config), _logit_scale(config), *lora))

    if layer is base:
        return _call(module, in_base, hidden)
    return _call(module, lambda hidden: _call(layer.base_layer, in_base, hidden), hidden)


def _call(module, forward, x):
    """``module(x)`` with its hooks, and with ``forward`` for the forward of what it wraps."""
    inner = _unwrapped(module)
    before = vars(inner).get("forward")
    inner.forward = forward
    try:
        return module(x)
    finally:
        if before is None:
            del inner.forward
        else:
            inner.forward = before


def _unwrapped(module):
    """The module that FSDP1 and PEFT's modules_to_save call, in the end, when ``module`` is called."""
    if isinstance(module, FullyShardedDataParallel):
        return _unwrapped(module.module)
    if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the head and keeps the original beside it
        active, copies = module.active_adapters, module.modules_to_save
        saved = active and not module.disable_adapters and all(name in copies for name in active)
        return _unwrapped(copies[active[0]] if saved else module.original_module)
    return module


def _checked(linear):
    """A linear layer's weight, if it is a whole tensor of numbers."""
    weight, kind = linear.weight, type(linear.weight)
    plain = kind in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
    if not plain or weight.dim() != 2 or weight.numel() != linear.in_features * linear.out_features:
        what = f"a {_name(kind)} of shape {tuple(weight.shape)} and {weight.dtype}"
        if hasattr(weight, "ds_id"):
            what += ", sharded by DeepSpeed ZeRO-3, whose hooks the model lost"
        elif hasattr(weight, "placements"):
            what += f", placed {weight.placements} over {weight.device_mesh}, as by tensor parallelism"
        elif not plain:
            what += ", as of a quantised layer"
        raise ValueError(f"the weight of the output head's {_name(type(linear))} is {what}; {_SUPPORTED}")
    return weight


def _name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def is_adapted(module) -> bool:
    """Whether PEFT put a layer of adapters around the output head."""
    return hasattr(module, "base_layer")


def active_adapters(layer) -> list[str]:
    """Names of the adapters that a LoRA layer adds to its base layer now: none if they are disabled or merged. Raises
    ValueError for another tuner's layer and for a LoRA that adds more than a product."""
    from peft.tuners.lora import Linear

    kind = type(layer).__bases__[1] if isinstance(layer, FSDPModule) else type(layer)  # fully_shard derives a class
    if kind is not Linear:
        raise ValueError(f"the output head is a {_name(kind)}; {_SUPPORTED}")
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


def _softcap(config) -> float | None:
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


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
        return ScoredOutput(**in_head(self, hidden, score), aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


def _load_balancing_loss(config, router_logits, kwargs):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # every MoE family's own

    return load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
