"""Memory of a whole training step of a Llama or Qwen model, tensor by tensor, before anything is allocated.

``predict_step_bytes`` follows what autograd keeps of a decoder layer in transformers' code on CUDA with sdpa attention,
and takes the largest of the moments at which most is alive: the loss, the backward pass of the last layer and of the
first, the embedding's gradient, the optimiser's step. ``memory.predict_loss_bytes`` has the loss. Left out: cuBLAS's
work space (64 MiB on an H200) and the rests of blocks that the allocator does not split, together 1 % and less; padding.
"""

import torch

from grpo_lab.memory import predict_loss_bytes


def predict_step_bytes(
    config, batch, prompt, completion, dtype=torch.bfloat16, impl="chunked", *,
    tuning="full", rank=16, checkpointing=True, autocast=False, processes=1, fused=False,
):  # fmt: skip
    """The tensors that are alive together at the peak of one training step with AdamW, on each GPU, in bytes.

    config: a transformers config of the families Llama, Qwen2, Qwen3. batch: sequences B of a GPU, each of L tokens,
    prompt and completion, all of which count; dtype of weights and activations. impl "naive", "chunked", or "no head":
    nothing in the loss's place. tuning "full", or "lora": adapters of ``rank`` on all linear layers but the head, in fp32
    as PEFT makes them, the base frozen. autocast: products in bf16 whatever the weights are. fused: AdamW's fused step,
    which needs no temporary copy.

    Returns a dict of name to bytes. Raises ValueError for an unknown impl or tuning.
    """
    if tuning not in ("full", "lora"):
        raise ValueError(f"tuning = {tuning!r}: expected 'full' or 'lora'")
    if impl not in ("no head", "naive", "chunked"):
        raise ValueError(f"impl = {impl!r}: expected 'no head', 'naive' or 'chunked'")
    H, V, n = config.hidden_size, config.vocab_size, config.num_hidden_layers
    full, s, tokens = tuning == "full", 2 if autocast else dtype.itemsize, batch * (prompt + completion)
    counted = count_weights(config, rank)
    weights = sum(counted[name] for name in ("embedding", "head", "layers"))
    trained, size = (weights, dtype.itemsize) if full else (counted["adapters"], 4)
    layer = counted["layers"] // n if full else counted["adapters"] // n
    standing = {
        "weights": weights * dtype.itemsize + (0 if full else trained * size),
        "AdamW's two averages": 2 * trained * size,
    }
    kept, during = layer_bytes(config, prompt + completion, s, full, rank, autocast and not full, checkpointing)
    last_norm = {"final norm": tokens * (4 * H + 4 + full * s * H), "last hidden states (B, L, H)": tokens * s * H}
    inputs = "inputs of the layers (n, B, L, H)"
    before = {inputs: n * tokens * s * H} if checkpointing else {
        f"activations of {n} layers": n * tokens * sum(kept.values())}  # fmt: skip
    one = {f"layer: {name}": tokens * x for name, x in kept.items()} if checkpointing else {}
    flow = {"last hidden states and their gradient (2, B, L, H)": 2 * tokens * s * H}
    head = {"gradient of the head": V * H * size} if full and impl != "no head" else {}
    gradients = {"gradients": trained * size}
    first = {inputs: tokens * s * H} if checkpointing else {"activations of a layer": tokens * sum(kept.values())}
    backward = {"last hidden states": tokens * s * H, "backward pass of the final norm": tokens * 24 * H}
    moments = [standing | before | last_norm, standing | before | backward | head]
    if impl != "no head":
        loss = predict_loss_bytes(batch, completion if impl == "naive" else prompt + completion, H, V,
                                  torch.bfloat16 if autocast else dtype, impl, scored=batch * completion,
                                  trainable_head=full, device="cuda")  # fmt: skip
        moments[0] |= {f"loss: {name}": x for name, x in loss.items()}
    for name, per_token, products in during:
        work = {name: tokens * per_token, "gradients of the layer": products * layer * size}
        moments.append(standing | before | one | flow | head | work)
        moments.append(standing | first | one | flow | gradients | {name: tokens * per_token})
    again = (
        {"gradient of the embedding, before it is added": V * H * size} if head and config.tie_word_embeddings else {}
    )
    moments.append(standing | flow | gradients | again)
    temporary = {} if fused else {"AdamW's square roots": trained * size}
    moments.append(standing | gradients | temporary | {"last hidden states (B, L, H)": tokens * s * H})
    most = max(moments, key=lambda moment: sum(moment.values()))
    return {name: int(x) for name, x in most.items() if x}


def sizes(config):
    """Widths H of the states, F of the MLP, A of all heads' queries, K of their keys; heads, heads of keys; both normed."""
    H, heads = config.hidden_size, config.num_attention_heads
    pairs = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or H // heads
    return H, config.intermediate_size, heads * width, pairs * width, heads, pairs, config.model_type == "qwen3"


def count_weights(config, rank=16):
    """Weights of the "embedding", the "head" (0 where it is tied) and all "layers" with the final norm; those of
    "adapters" of ``rank`` on all linear layers but the head."""
    H, F, A, K, heads, pairs, normed = sizes(config)
    linear = [(H, A), (H, K), (H, K), (A, H), (H, F), (H, F), (F, H)]
    layer = sum(i * o for i, o in linear) + 2 * H + normed * (A // heads + K // pairs)
    if config.model_type == "qwen2" or getattr(config, "attention_bias", False):
        layer += A + 2 * K + (H if config.model_type != "qwen2" else 0)
    if getattr(config, "mlp_bias", False):
        layer += 2 * F + H
    table = config.vocab_size * H
    return {
        "embedding": table,
        "head": 0 if config.tie_word_embeddings else table,
        "layers": config.num_hidden_layers * layer + H,
        "adapters": config.num_hidden_layers * rank * sum(i + o for i, o in linear),
    }


def layer_bytes(config, length, s, full, rank=16, cast=False, checkpointing=True):
    """What autograd keeps of a decoder layer, bytes a token by name, and the moments at which the layer has most beside
    it: ``(name, bytes a token, share of the layer's gradients that are there)``.

    s: bytes of an element; full: the base trains; cast: adapters are fp32 under autocast, so that each linear layer
    keeps an input of its own.
    """
    H, F, A, K, heads, pairs, normed = sizes(config)
    fp32 = s == 4
    kept = {
        "fp32 inputs of the norms": 8 * H + 8 + normed * (4 * (A + K) + 4 * (heads + pairs)),
        "normed states": full * s * (2 * H + normed * (A + K)),
        "inputs of the linear layers": s * (2 * H + A + F) + cast * s * 3 * H,
        "attention": 3 * s * A + s * heads * length if fp32 else s * (A + 2 * K) + 4 * heads + cast * s * A,
        "MLP": 3 * s * F,
        "adapters": 0 if full else 7 * s * rank,
    }
    if fp32 and checkpointing:
        kept["fp32 inputs of the norms"] -= 4 * H  # the layer's input itself
    share = F * H / (3 * F * H + 2 * A * H + 2 * K * H)
    during = [("gradients in the MLP", 2 * s * F, share)]
    if cast:
        during.append(("an adapter's input in fp32", (s + 4) * F + 3 * s * H, 0))
    if fp32:
        # flash attention takes no fp32, and PyTorch's memory-efficient one no shared keys: scores are built whole, and
        # softmax makes its result, what of it is -inf, and a copy with those rows at 0
        later = s * A + 4 * H + 4 + (1 + full) * s * H + 4 * s * F
        during.append(("scores, softmax", 2 * s * heads * length + heads * length + s * (3 * A + 2 * K) - later, 0))
    return kept, during
