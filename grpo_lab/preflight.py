"""Tokenizer, policy, data and launch that do not fit together: said before training starts, with the repair.

TRL finds most of these at its first step, in a kernel's words, or not at all: it trains zero steps on too few rows, and
past the positions that a policy knows. ``GRPOTrainer`` calls ``check`` at the end of its construction. Left out: what
only a reward function can know, and prompts of streamed or multimodal data sets.
"""

import math
import warnings
from collections.abc import Sized

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from grpo_lab.head import active_adapters

ROWS = 2000  # how many prompts are measured


def check(trainer):
    """Raises ValueError naming the argument that does not fit, and what to do."""
    _check_tokens(trainer)
    _check_rows(trainer)
    _check_reference(trainer)
    avoid_faulty_attention(trainer.accelerator.device)


def avoid_faulty_attention(device):
    """Turns cuDNN's attention off in this process, with a warning, where its backward pass gives NaN.

    It is PyTorch's first choice on Hopper since 2.11. With a mask and 64 tokens, or 64 beyond a multiple of 128, rows
    whose logits are all very negative get NaN gradients (pytorch/pytorch#196678), and so do rows of padding alone,
    which GRPO's prompts have on the left: one such batch ends a training. The other backends are sound.
    """
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled() or _attention_is_sound(device):
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    warnings.warn(
        f"cuDNN {torch.backends.cudnn.version()} gives NaN gradients for padded batches here (pytorch/pytorch#196678): "
        "another attention kernel is used",
        stacklevel=2,
    )


@torch.enable_grad()
def _attention_is_sound(device, length=64, width=64):
    """Whether masked attention has finite gradients in bf16 where every logit is about -120."""
    q, k, v = torch.zeros(3, 1, 1, length, width, dtype=torch.bfloat16, device=device)
    q[..., 0], k[..., 0], v[:] = 1.0, -120 * math.sqrt(width), 1.0
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    q = q.requires_grad_()
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    return bool(q.grad.isfinite().all())


def _check_tokens(trainer):
    tokenizer, config = trainer._tokenizer, trainer.model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"processing_class: the tokenizer has {len(tokenizer):,} tokens and the policy {config.vocab_size:,}: load "
            "the policy's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) first"
        )
    for name, ids in (("eos", trainer.eos_token_ids), ("pad", [tokenizer.pad_token_id])):
        for token in ids:
            if token is None or not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"processing_class: {name}_token_id is {token}, and the policy has tokens 0 to "
                    f"{config.vocab_size - 1:,}: set tokenizer.{name}_token to one of its own, and "
                    f"model.generation_config.{name}_token_id with it"
                )


def _check_rows(trainer):
    data, args = trainer.train_dataset, trainer.args
    if not isinstance(data, Sized):
        return
    prompts = args.generation_batch_size // args.num_generations
    if len(data) < prompts:
        raise ValueError(
            f"train_dataset has {len(data)} rows, and each generation takes {prompts} different ones "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}): add rows, "
            "or lower per_device_train_batch_size or gradient_accumulation_steps"
        )
    if "prompt" not in data[0]:
        raise ValueError(f"train_dataset has the columns {', '.join(data[0])}: name the one with the question 'prompt'")
    config = trainer.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    stretched = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    if positions is None or stretched or not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        return
    rows = sorted(range(min(len(data), ROWS)), key=lambda row: -len(str(data[row]["prompt"])))
    length, row = max((_tokens(trainer, data[row]["prompt"]), row) for row in rows[:8])
    if length + args.max_completion_length > positions:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} after the {length} tokens of train_dataset[{row}]'s "
            f"prompt makes {length + args.max_completion_length}, and the policy knows {positions:,} positions "
            "(max_position_embeddings): lower it, or leave longer prompts out"
        )


def _tokens(trainer, prompt):
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(tokenizer.apply_chat_template(prompt, **options, **trainer.chat_template_kwargs)["input_ids"])


def _check_reference(trainer):
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.ref_model is None or plugin is None or trainer.accelerator.num_processes == 1:
        return
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            f"fsdp_cpu_ram_efficient_loading: true is not supported with beta={trainer.beta}: ranks other than 0 would "
            "have a reference model without weights. Set it to false in accelerate's config file"
        )


def check_adapted_head(model, use_vllm):
    """Raises ValueError for adapters on the output head that cannot be trained or, with vLLM, not be merged."""
    head = model.get_output_embeddings()
    active_adapters(head)
    if use_vllm and head.weight is model.get_input_embeddings().weight:
        raise ValueError(
            "use_vllm=True is not supported with an adapter on an output head tied to the embeddings: vLLM gets merged "
            "weights, and merging changes the embeddings too. Untie them, or take 'lm_head' out of target_modules"
        )
