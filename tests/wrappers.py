"""The loss under every wrapper, with every way of fine-tuning: two ranks against one rank on the union of their data.

    python tests/wrappers.py                    all rows, on two GPUs through NCCL, or without two on the CPU with gloo
    python tests/wrappers.py zero3 fsdp2/lora   the rows whose names are, or contain, one of these
    python tests/wrappers.py --list             their names

A row is wrapper/adaptation/options. Its ranks hold different numbers of sequences and tokens, and in one micro-batch
one of them has nothing scored. Three optimiser steps are made three times, from the same weights: by the chunked loss
under the wrapper, by a textbook loss on the wrapped model's own logits, and by the chunked loss in one process on the
union of the data. An error is relative to the textbook loss in float64 in one process. It may be FACTOR times that of
the textbook loss under the same wrapper, plus ROUNDING, but no more than LIMIT; so may the difference from one process.
The table shows error, what is allowed, and that difference. Large gathers are all-gathers of the head's size or more:
the loss makes as many as the model's own forward and backward, whatever the number of chunks. A row that fails, or
that hangs for longer than TIMEOUT seconds, is reported, and the others are run by fresh processes.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lab import Objective, grpo_loss, token_logps
from grpo_lab.head import score_in_forward

FACTOR, ROUNDING, LIMIT, TIMEOUT = 2.0, 1e-5, 0.2, 120
GPU = "--cpu" not in sys.argv and torch.cuda.device_count() >= (1 if "--alone" in sys.argv else 2)
SIZES = {
    "tiny": dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8),
    "large": dict(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                  num_key_value_heads=4, head_dim=32),
}  # fmt: skip
LENGTH = {"tiny": 1, "large": 16}  # of sequences
WRAPPERS = ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "fsdp2-parts", "hsdp", "zero2", "zero3")
ADAPTATIONS = ("full", "tied", "lora", "lora-head", "saved-head", "qlora")
REFUSED = {  # what is done to the model, and what the error says
    "ddp/dora-head": "DoraLinearVariant",
    "ddp/quantised-head": "bitsandbytes.nn.modules.Linear4bit",
    "tensor-parallel/full": "placed (Shard(dim=0),) over DeviceMesh",
    "fsdp2/checkpointed-head": "checkpoint_wrapper.CheckpointWrapper",
}
NEEDS = {"zero": "deepspeed", "qlora": "bitsandbytes", "quantised": "bitsandbytes"}


def rows():
    for wrapper in WRAPPERS:
        for adaptation in ADAPTATIONS:
            yield f"{wrapper}/{adaptation}"
        options = ["checkpointing", "sequence", "bf16"]
        if "zero" not in wrapper:  # which has no step between its two micro-batches
            options.append("no_sync")
        if wrapper.startswith("fsdp2") or wrapper == "zero3":
            options.append("offload")
        if wrapper.startswith("fsdp1") and GPU:  # FSDP1 pins what it offloads, and accumulates it without sync alone
            options.append("offload,no_sync")
        for option in options:
            for adaptation in ("full", "lora-head"):
                yield f"{wrapper}/{adaptation}/{option}"
    yield from REFUSED
    for wrapper in ("ddp", "fsdp2", *["fsdp1"] * GPU, "zero2", "zero3"):  # accelerate's FSDP1 needs a GPU
        for adaptation in ("full", "tied", "lora-head", "saved-head"):
            yield f"trainer-{wrapper}/{adaptation}"
        yield f"trainer-{wrapper}/full/bf16"


# ---- the model and its data -----------------------------------------------------------------------------------------


def build(adaptation, size, device):
    """The model, and the causal language model in it; the same on every rank."""
    import peft

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SIZES[size], max_position_embeddings=128, tie_word_embeddings=adaptation == "tied", attention_dropout=0.0
    )
    model = transformers.Qwen3ForCausalLM(config)
    if adaptation in ("qlora", "quantised-head"):
        skip = ["lm_head"] if adaptation == "qlora" else []
        quantisation = transformers.BitsAndBytesConfig(
            load_in_4bit=True, llm_int8_skip_modules=skip, bnb_4bit_quant_storage=torch.float32
        )
        model = transformers.Qwen3ForCausalLM.from_pretrained(
            None, config=config, state_dict=model.state_dict(), quantization_config=quantisation,
            dtype=torch.float32,
        )  # fmt: skip
    if adaptation not in ("full", "tied", "checkpointed-head"):
        head = ["lm_head"] if adaptation in ("lora-head", "dora-head") else []
        saved = ["lm_head"] if adaptation == "saved-head" else None
        lora = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", *head], modules_to_save=saved,
                               init_lora_weights=False, use_dora=adaptation == "dora-head")  # fmt: skip
        model = peft.get_peft_model(model, lora)
    model.to(device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    score_in_forward(base)
    return model, base


def micro_batch(step, part, rank, size, device):
    """Ids ``(B, P + T)``, attention and completion masks, advantages, old log-probs: other shapes on every rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    B, P, T, vocab = 2 + rank, 3, (6 + 5 * rank + step) * LENGTH[size], SIZES[size]["vocab_size"]
    ids = torch.randint(3, vocab, (B, P + T), generator=generator)
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    mask = (torch.arange(T) < lengths).long()
    attention = torch.cat([torch.ones(B, P, dtype=torch.long), mask], 1)
    if part == 1 and rank == step % 2:
        mask.zero_()
    old = -torch.rand(B, T, generator=generator) - torch.tensor(vocab).log()
    advantages = torch.randn(B, generator=generator)
    advantages[0] = 0
    return [x.to(device) for x in (ids, attention, mask, advantages, old)]


def objective_of(row):
    ratios = dict(importance_sampling_level="sequence", epsilon=0.6, epsilon_high=0.6) if "sequence" in row else {}
    return Objective(loss_type="dapo", beta=0.1 if with_reference(row) else 0.0, **ratios)


def with_reference(row):
    return any(name in row for name in ("lora", "saved-head"))


def textbook(logps, mask, advantages, old, reference, num_items, objective):
    """The objective as its papers print it, on log-probs ``(B, T)``."""
    if objective.importance_sampling_level == "sequence":
        ratio = (((logps - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)).exp()[:, None]
    else:
        ratio = (logps - logps.detach()).exp()
    clipped = ratio.clamp(1 - objective.epsilon, 1 + (objective.epsilon_high or objective.epsilon))
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    if reference is not None:
        loss = loss + objective.beta * ratio * ((reference - logps).exp() - (reference - logps) - 1)
    return (loss * mask).sum() / num_items


def score(impl, model, batch, row, num_items=None, reference=None):
    """The loss of a micro-batch, or without ``num_items`` its log-probs ``(B, T)``: by the chunked head, or by the
    textbook on the model's own logits."""
    ids, attention, mask, advantages, old = batch
    T, objective = mask.shape[1], objective_of(row)
    labels, inputs = ids[:, -T:], dict(input_ids=ids, attention_mask=attention)
    old = old if "sequence" in row else None

    if impl == "textbook":
        logits = model(**inputs).logits[:, -T - 1 : -1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        logps = torch.log_softmax(logits.to(wide), -1).gather(-1, labels[..., None]).squeeze(-1)
        return logps if num_items is None else textbook(logps, mask, advantages, old, reference, num_items, objective)

    def chunked(hidden, head):
        part = slice(None), slice(-T - 1, -1)
        hidden, head = hidden[part], head.at(*part)
        options = dict(bias=head.bias, lora=head.lora, chunk_tokens=4)
        if num_items is None:
            return dict(log_probs=token_logps(hidden, head.weight, labels, mask, **options)[0])
        options |= dict(objective=objective, old_logps=old, ref_logps=reference, num_items=num_items)
        return dict(loss=grpo_loss(hidden, head.weight, labels, mask, advantages, **options)[0])

    output = model(**inputs, score=chunked)
    return output.log_probs if num_items is None else output.loss


def references(impl, model, batches, row):
    """Log-probs of the reference model, which is the model with its adapter disabled; None where it has none. Before
    any gradient is there, as in a trainer: FSDP1 drops those of parameters that stop training."""
    if not with_reference(row):
        return [None] * len(batches)
    tuner = next(m for m in model.modules() if hasattr(m, "disable_adapter"))
    with tuner.disable_adapter(), torch.no_grad():
        logps = [score(impl, model, batch, row) for batch in batches]
        for module in model.modules():  # as the trainer does
            if hasattr(module, "reshard"):
                module.reshard()
    return logps


# ---- the wrappers ---------------------------------------------------------------------------------------------------


class Alone:
    """One process, no wrapper; and what the wrapped ones have in common."""

    def __init__(self, row, model, base):
        self.row, self.model, self.inner, self.base = row, model, model, base
        if "checkpointing" in row:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            base.enable_input_require_grads()
        model.train()
        self.wrap()

    def wrap(self):
        self.optimise()

    def optimise(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-2)  # a small eps would hide a gradient's scale

    def sync(self, wanted):
        return contextlib.nullcontext()

    def precision(self):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named(self):
        for name, p in self.inner.named_parameters():
            if p.requires_grad:
                yield name.replace("_fsdp_wrapped_module.", ""), p

    def grads(self):
        return {name: whole(p.grad) for name, p in self.named()}

    def weights(self):
        return {name: whole(p) for name, p in self.named()}


def whole(x):
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().double().cpu().clone()


class DDP(Alone):
    def wrap(self):
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimise()

    def sync(self, wanted):
        return contextlib.nullcontext() if wanted else self.model.no_sync()

    def precision(self):
        return torch.autocast(device().type, torch.bfloat16, enabled="bf16" in self.row)


class FSDP1(DDP):
    """Layers are units of their own, the head belongs to the root. Flat: the head, or whatever trains beyond the
    layers, is too, as PEFT advises, and the parameters that the model was made of are gone."""

    def wrap(self):
        from torch.distributed import fsdp
        from torch.distributed.fsdp.wrap import CustomPolicy

        flat = "flat" in self.row
        bf16 = dict(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.bfloat16,
            cast_forward_inputs=True,
        )
        layer = type(self.base.model.layers[0])

        def is_unit(m):
            trains = not list(m.children()) and getattr(m, "weight", None) is not None and m.weight.requires_grad
            beyond = self.inner is not self.base and trains or m is self.base.lm_head and "tied" not in self.row
            return isinstance(m, layer) or flat and beyond

        self.model = fsdp.FullyShardedDataParallel(
            self.model, auto_wrap_policy=CustomPolicy(is_unit), use_orig_params=not flat, device_id=device(),
            mixed_precision=fsdp.MixedPrecision(**bf16) if "bf16" in self.row else None,
            cpu_offload=fsdp.CPUOffload("offload" in self.row),
        )  # fmt: skip
        self.optimise()

    def precision(self):
        return contextlib.nullcontext()

    def grads(self):
        if "flat" in self.row or "offload" in self.row:
            return {}  # torch does not gather them
        with self.model.summon_full_params(self.model, with_grads=True, writeback=False):
            return super().grads()

    def weights(self):
        with self.model.summon_full_params(self.model, writeback=False):
            return super().weights()


class FSDP2(Alone):
    """Layers are groups of their own, the head belongs to the root's. Parts: so is the head, with norm and embedding
    where it is tied, or each part of it where it has an adapter. HSDP: so is the head and its adapter together, over a
    mesh that replicates every shard."""

    def wrap(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        mesh = (2, 1) if "hsdp" in self.row else (2,)
        options = dict(mesh=init_device_mesh(device().type, mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :]))
        if "bf16" in self.row:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if "offload" in self.row:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device().type == "cuda")
        head = self.base.lm_head
        for layer in self.base.model.layers:
            fully_shard(layer, **options)
        if "parts" in self.row and "tied" in self.row:
            fully_shard([self.base.model.embed_tokens, self.base.model.norm, head], **options)
        elif "hsdp" in self.row and "tied" not in self.row:
            fully_shard(head, **options)
        elif "parts" in self.row:
            for part in [m for m in head.modules() if isinstance(m, torch.nn.Linear)] or [head]:
                fully_shard(part, **options)
        fully_shard(self.model, **options)
        self.optimise()
        with torch.no_grad():  # the first forward decides on dtypes, by what trains then: not with a disabled adapter
            self.model(torch.ones(1, 1, dtype=torch.long, device=device()))
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def sync(self, wanted):
        self.model.set_requires_gradient_sync(wanted)
        return contextlib.nullcontext()


class Zero(Alone):
    def wrap(self):
        import deepspeed

        self.optimise()
        stage = int(self.row[4])
        zero = dict(stage=stage, stage3_param_persistence_threshold=0)
        if "offload" in self.row:
            zero |= dict(offload_param=dict(device="cpu"), offload_optimizer=dict(device="cpu"))
        config = dict(
            train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=2, zero_optimization=zero,
            bf16=dict(enabled="bf16" in self.row), zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False, gradient_clipping=0.0,
        )  # fmt: skip
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )

    def backward(self, loss):
        self.model.backward(2 * loss)  # it divides by the micro-batches
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()

    def step(self):
        self.model.step()

    def grads(self):
        from deepspeed.utils import safe_get_full_grad

        return {name: whole(safe_get_full_grad(p)) for name, p in self.named()}

    def weights(self):
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: whole(safe_get_full_fp32_param(p)) for name, p in self.named()}


class TensorParallel(Alone):
    def wrap(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh(device().type, (2,))
        parallelize_module(self.base, mesh, {"lm_head": ColwiseParallel()})


KINDS = {"ddp": DDP, "fsdp1": FSDP1, "fsdp2": FSDP2, "hsdp": FSDP2, "zero2": Zero, "zero3": Zero,
         "tensor": TensorParallel}  # fmt: skip


# ---- a row ----------------------------------------------------------------------------------------------------------


@functools.cache
def device():
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")


class Gathers(TorchDispatchMode):
    """Counts the elements that are all-gathered, and the gathers of ``large`` elements or more."""

    def __init__(self, large):
        super().__init__()
        self.large, self.elements, self.count = large, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and "allgather" in func.__name__.replace("_", ""):
            leaves = [torch.utils._pytree.tree_leaves(x) for x in (args[0], out)]
            numel = max(sum(x.numel() for x in part if isinstance(x, torch.Tensor)) for part in leaves)
            self.elements += numel
            self.count += numel >= self.large
        return out


def three_steps(kind, impl, row, size, dtype=None):
    """Losses, gradients of the first step and what became of the weights, by name; and the first gathers."""
    adaptation = row.split("/")[1]
    model, base = build(adaptation, size, device())
    world = dist.get_world_size()
    wrapped = kind(row, model if dtype is None else model.to(dtype), base)
    before = wrapped.weights()
    ranks = range(world) if kind is Alone else [dist.get_rank()]
    losses, grads, gathers = [], None, Gathers(SIZES[size]["vocab_size"] * SIZES[size]["hidden_size"])
    for step in range(3):
        parts = [[micro_batch(step, part, r, size, device()) for r in range(world)] for part in range(2)]
        num_items = sum(batch[2].sum() for part in parts for batch in part) / (1 if kind is Alone else world)
        mine = [(part, batches[r]) for part, batches in enumerate(parts) for r in ranks]
        with wrapped.precision():
            known = references(impl, wrapped.model, [batch for _, batch in mine], row)
        total = 0.0
        for (part, batch), reference in zip(mine, known):
            counted = gathers if step == part == 0 else contextlib.nullcontext()
            with wrapped.sync(part == 1 or "no_sync" not in row), counted:
                with wrapped.precision():
                    loss = score(impl, wrapped.model, batch, row, num_items, reference)
                wrapped.backward(loss)
            total = total + loss.detach().double().cpu()
        if kind is not Alone:
            dist.all_reduce(total := total.to(device()))
            total = total.cpu() / world
        losses.append(total)
        grads = wrapped.grads() if step == 0 else grads
        wrapped.step()
    moved = {name: x - before[name] for name, x in wrapped.weights().items()}
    return dict(loss=dict(loss=torch.stack(losses)), grads=grads, weights=moved), gathers


def worst(x, expected):
    """The largest relative error of a dict's tensors, small ones as part of the largest."""
    sizes = {k: e.norm() for k, e in expected.items() if k in x}
    floor = 1e-3 * max(sizes.values(), default=torch.tensor(0.0))
    return max(((x[k] - expected[k]).norm() / torch.maximum(sizes[k], floor)).item() for k in sizes) if sizes else 0.0


def compare(row, size):
    """The row's figures, and what is wrong with them."""
    kind = KINDS[row.split("/")[0].split("-")[0]]
    truth, _ = three_steps(Alone, "textbook", row, size, None if "qlora" in row else torch.float64)
    alone, _ = three_steps(Alone, "chunked", row, size)
    own, own_gathers = three_steps(kind, "textbook", row, size)
    ours, gathers = three_steps(kind, "chunked", row, size)
    figures, wrong = {}, []
    for name, x in ours.items():
        error, union = worst(x, truth[name]), worst(x, alone[name])
        allowed = min(FACTOR * worst(own[name], truth[name]) + ROUNDING, LIMIT)
        figures[name] = (error, allowed, union)
        if not max(error, union) <= allowed or x.keys() != own[name].keys():
            wrong.append(f"{name}: {max(error, union):.1e} > {allowed:.1e}")
    figures["gathers"] = f"{gathers.count}/{own_gathers.count}"
    if gathers.count > own_gathers.count or gathers.elements > own_gathers.elements:
        wrong.append(f"gathers of {gathers.elements} > {own_gathers.elements} elements")
    return figures, "; ".join(wrong) or "ok"


def refuse(row, size):
    """The row's verdict: whether the head is refused by the right name."""
    wrapper, adaptation = row.split("/")
    model, base = build(adaptation, size, device())
    if adaptation == "checkpointed-head":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        base.lm_head = checkpoint_wrapper(base.lm_head)
    wrapped = KINDS[wrapper.split("-")[0]](row, model, base)
    try:
        score("chunked", wrapped.model, micro_batch(0, 0, 0, size, device()), row)
    except ValueError as error:
        if REFUSED[row] in str(error):
            return {}, "ok"
        return {}, f"refused with another message: {error}"
    return {}, "not refused"


# ---- the trainer ----------------------------------------------------------------------------------------------------


def train(row, size, folder):
    """A run of the real trainer: its logged metrics, and what became of the weights. Completions follow from the
    prompts alone, so that one process gets the union of what two ranks get; those of some prompts are all cut off at
    their maximal length, and masked out, so that at times one rank has nothing scored; those of others earn the same
    reward, and are skipped."""
    import accelerate
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    from grpo_lab import GRPOConfig, GRPOTrainer

    wrapper, adaptation = row.split("/")[0].removeprefix("trainer-"), row.split("/")[1]
    alone = "RANK" not in os.environ
    adapted = adaptation in ("lora-head", "saved-head")
    model, base = build(adaptation, size, torch.device("cpu"))
    del base.forward  # the trainer gives it its own
    words = {
        w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(3, base.config.vocab_size)])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, *more):
            completions = []
            for i, prompt in enumerate(prompt_ids):
                draw = torch.Generator().manual_seed(7 * sum(prompt) + i % num_generations)
                length = 12 if sum(prompt) % 5 == 0 else 2 + i % num_generations
                ids = torch.randint(3, len(words), (length,), generator=draw).tolist()
                completions.append(ids if length == 12 else [*ids, 1])
            return completions, None

    def reward(prompts, completion_ids, **_):
        return [0.0 if len(p) % 3 == 1 else float(sum(ids) % 5) for p, ids in zip(prompts, completion_ids)]

    bf16, cpu = "bf16" in row, device().type == "cpu"
    # Bitwise the same log-probs, clipped at once where they are not; on a GPU, other lengths are rounded otherwise
    epsilon = 1e-6 if bf16 and cpu else 0.2
    options = dict(
        output_dir=folder, per_device_train_batch_size=8 if alone else 4, num_generations=4, max_completion_length=12,
        max_steps=3, gradient_accumulation_steps=2, num_iterations=2 if bf16 else 1, epsilon=epsilon,
        beta=0.1 if adapted else 0.0, mask_truncated_completions=True, skip_zero_advantage=True, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, bf16=bf16, gradient_checkpointing="lora" not in row, seed=1, max_grad_norm=1e9,
    )  # fmt: skip
    if "fsdp" in wrapper and not alone:
        options["fsdp"] = True
        options["fsdp_config"] = dict(version=int(wrapper[4]), auto_wrap_policy="TRANSFORMER_BASED_WRAP",
                                      transformer_layer_cls_to_wrap=["Qwen3DecoderLayer"],
                                      state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
                                      sync_module_states=False)  # fmt: skip
    elif "zero" in wrapper and not alone:
        options["deepspeed"] = dict(
            zero_optimization=dict(stage=int(wrapper[4]), stage3_param_persistence_threshold=0,
                                   stage3_gather_16bit_weights_on_model_save=True),
            bf16=dict(enabled="auto"), train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto",
            gradient_clipping="auto", zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False,
        )  # fmt: skip
    args = GRPOConfig(use_cpu=cpu, **options)
    if cpu and "fsdp" in options:  # which accelerate has for no CPU
        accelerate.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    prompts = [" ".join(f"w{3 + (i * k) % 200}" for k in range(1, 2 + i % 4)) for i in range(40)]
    before = {name: whole(p) for name, p in model.named_parameters()}
    trainer = Scripted(model, reward, args, train_dataset=Dataset.from_dict({"prompt": prompts}),
                       processing_class=tokenizer)  # fmt: skip
    trainer.train()
    if not trainer.receipt["passed"]:
        raise AssertionError(trainer.receipt)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    if logged[0]["clip_ratio/region_mean"] != 0:
        raise AssertionError("the first ratios are not 1: log-probs were rounded on their way")
    metrics = {k: torch.tensor([entry[k] for entry in logged]).double() for k in ("loss", "grad_norm")}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    moved = {n: whole(x) - before[n] for n, x in (state or {}).items() if n in before}
    if "zero" in wrapper and bf16:
        moved = {}  # what is gathered is rounded to bf16
    return dict(loss=metrics, weights=moved)


def alone_file(row, folder):
    return Path(folder, row.split("/", 1)[1].replace("/", "-")).with_suffix(".pt")


def train_alone(chosen, size, folder):
    """In one process, what the chosen rows are compared with."""
    for row in chosen:
        if row.startswith("trainer-") and not alone_file(row, folder).exists():
            torch.save(train(row, size, folder), alone_file(row, folder))


def compare_trainers(row, size, folder):
    """The row's figures, and what is wrong with them: its run against that of one process."""
    ours = train(row, size, folder)
    alone = torch.load(alone_file(row, folder))
    figures, wrong = {}, []
    allowed = LIMIT if "bf16" in row else 1e-3
    for name, x in ours.items():
        error = worst(x, alone[name])
        figures[name] = (error, allowed, error)
        if not error <= allowed:
            wrong.append(f"{name}: {error:.1e} > {allowed:.1e}")
    return figures, "; ".join(wrong) or "ok"


def worker(chosen, size, folder):
    """Runs rows on this rank, and leaves a line of JSON for each in ``folder``. Ends at the first failure: the other
    ranks are then out of step with this one."""
    if GPU:
        torch.cuda.set_device(device())
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", timeout=timedelta(seconds=TIMEOUT))
    for row in chosen:
        start, environment = time.perf_counter(), dict(os.environ)
        try:
            if row.startswith("trainer-"):
                figures, verdict = compare_trainers(row, size, folder)
            else:
                figures, verdict = (refuse if row in REFUSED else compare)(row, size)
        except Exception:
            figures, verdict = {}, traceback.format_exc()
        os.environ.clear()  # accelerate leaves its wrapper's name there
        os.environ.update(environment)
        failed = "Traceback" in verdict
        everyone = [verdict] * dist.get_world_size()
        if not failed:
            dist.all_gather_object(everyone, verdict)
        if dist.get_rank() == 0 or failed:
            verdict = next((v for v in everyone if v != "ok"), "ok")
            line = dict(row=row, figures=figures, verdict=verdict, seconds=time.perf_counter() - start)
            with Path(folder, "results").open("a") as file:
                file.write(json.dumps(line) + "\n")
        if failed:
            os._exit(1)
    dist.destroy_process_group()
    time.sleep(0.3)  # for gloo's threads, as the trainer's exit does


# ---- the driver -----------------------------------------------------------------------------------------------------


def run(chosen, size, cpu):
    """Yields a result for each row, from as few pairs of processes as failures allow."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    launcher += ["--rdzv_endpoint=localhost:0"]
    with tempfile.TemporaryDirectory() as folder:
        script = [__file__, "--size", size, "--folder", folder, *["--cpu"] * cpu]
        if any(row.startswith("trainer-") for row in chosen):
            one = {"CUDA_VISIBLE_DEVICES": "" if cpu else "0"}
            one_process = subprocess.run(
                [sys.executable, *script, "--alone", *chosen],
                env=environment | one,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if one_process.returncode != 0:
                raise RuntimeError(one_process.stdout.decode())
        results, log = Path(folder, "results"), Path(folder, "log")
        left = list(chosen)
        while left:
            results.write_text("")
            with log.open("w") as file:
                ranks = subprocess.Popen(
                    [*launcher, *script, *left], env=environment, stdout=file, stderr=file, start_new_session=True
                )
            seen, last, running = 0, time.monotonic(), True
            while running:
                running = ranks.poll() is None and time.monotonic() - last < TIMEOUT + 60
                time.sleep(0.1)
                for line in results.read_text().splitlines()[seen:]:
                    result = json.loads(line)
                    seen, last = seen + 1, time.monotonic()
                    if result["row"] in left:  # or both ranks failed
                        left.remove(result["row"])
                        yield result
            if ranks.poll() is None:
                os.killpg(ranks.pid, 9)
            if ranks.wait() != 0 and left and not seen:  # these processes ended in their first row
                why = f"crashed or hung: {log.read_text()[-2000:]}"
                yield dict(row=left.pop(0), figures={}, verdict=why, seconds=0.0)


def table(result):
    f = result["figures"]
    cells = [" ".join(f"{x:.0e}" for x in f[name]) if name in f else "" for name in ("loss", "grads", "weights")]
    cells += [f.get("gathers", ""), f"{result['seconds']:.1f} s", result["verdict"].strip().splitlines()[-1]]
    return " | ".join([f"{result['row']:36}", *(f"{cell:>17}" for cell in cells)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of the rows to run")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="gloo, whatever the machine has")
    parser.add_argument("--size", choices=SIZES, default="large" if GPU else "tiny")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return (train_alone if options.alone else worker)(options.names, options.size, options.folder)
    known = list(rows())
    wanted = [row for row in known if any(name == row or name not in known and name in row for name in options.names)]
    chosen = wanted if options.names else known
    if options.list:
        return print(*chosen, sep="\n")
    lacks = {
        row: [package for part, package in NEEDS.items() if part in row and not find_spec(package)] for row in chosen
    }
    print(" | ".join([f"{'row':36}", *(f"{c:>17}" for c in ("loss", "gradients", "weights", "large gathers", "time"))]))
    failed = 0
    for result in run([row for row in chosen if not lacks[row]], options.size, not GPU):
        failed += result["verdict"] != "ok"
        print(table(result), flush=True)
        if result["verdict"].strip().count("\n"):
            print(result["verdict"], file=sys.stderr, flush=True)
    for row in chosen:
        if lacks[row]:
            print(f"{row:36} | skipped: {', '.join(lacks[row])} is not installed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
