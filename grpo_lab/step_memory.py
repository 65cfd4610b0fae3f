"""Memory of a whole training step of a Llama or Qwen model, tensor by tensor, before anything is allocated.

``predict_step_bytes`` follows what autograd keeps of a decoder layer in transformers' code on CUDA with sdpa attention,
and takes the largest of the moments at which most is alive: the loss, the backward pass of the last layer and of the
first, the embedding's gradient, the optimiser's step. ``memory.predict_loss_bytes`` has the loss; ``fitting_batch``
asks what a card holds. Left out: padding, the rests of blocks that the allocator does not split (under 1 %), cuBLAS's
work space (64 MiB on an H200). On the command line:

    python -m grpo_lab predict --model Qwen3-4B --card 80 --processes 2 --batch 48 64
"""

import torch

from grpo_lab.memory import predict_loss_bytes

# GiB that CUDA reports of an RTX 4090, an A100 of 40 GB and one of 80 GB.
CARDS = {24: 23.6, 40: 39.4, 80: 79.1}
OUTSIDE_GIB = 1.0  # of a card: CUDA's context, NCCL's and cuBLAS's buffers
IMPLS, TUNINGS = ("no head", "naive", "chunked"), ("full", "lora")


def predict_step_bytes(
    config, batch, prompt, completion, dtype=torch.bfloat16, impl="chunked", *,
    tuning="full", rank=16, checkpointing=True, processes=1, fused=False,
):  # fmt: skip
    """The tensors that are alive together at the peak of one training step with AdamW, on each GPU, in bytes.

    config: a transformers config of the families Llama, Qwen2, Qwen3. batch: sequences B of a GPU, each of L tokens,
    prompt and completion, all of which count. impl "naive", "chunked", or "no head": nothing in the loss's place.
    tuning "full", or "lora": adapters of ``rank`` on all linear layers but the head, the base frozen. processes: GPUs
    that weights, gradients and optimiser are sharded over by FSDP 2, a unit for each layer. fused: AdamW's fused step,
    which makes no temporary copy.

    In fp32 all is fp32. In bf16 a full training on one GPU has bf16 weights; adapters, and all that FSDP trains, are
    fp32 and computed with in bf16, as PEFT and accelerate have it.

    Returns a dict of name to bytes. Raises ValueError for another impl, tuning, dtype or model, or a number below 1.
    """
    _check("impl", impl, IMPLS)
    _check("tuning", tuning, TUNINGS)
    _check("dtype", dtype, (torch.bfloat16, torch.float32))
    for name, number in dict(batch=batch, completion=completion, rank=rank, processes=processes).items():
        if number < 1:
            raise ValueError(f"{name} = {number}: expected 1 or more")
    if prompt < 0:
        raise ValueError(f"prompt = {prompt}: expected 0 or more")
    H, V, n, s = config.hidden_size, config.vocab_size, config.num_hidden_layers, dtype.itemsize
    full, sharded, length = tuning == "full", processes > 1, prompt + completion
    autocast = s == 2 and (sharded or not full)
    tokens, states = batch * length, batch * length * H * s
    count = count_weights(config, rank)
    weights, adapters = count["embedding"] + count["head"] + count["layers"], 0 if full else count["adapters"]
    trained, size = weights if full else adapters, 4 if autocast else s
    learning = trained - (count["head"] if full and impl == "no head" else 0)  # what a gradient reaches
    layer = (count["layers"] + adapters) // n

    def own(size):
        return -(-size // processes)

    always = {"weights": own((0 if full else weights) * s + trained * size), "AdamW": own(2 * trained * size)}

    def gathered(layers):  # one that is computed with, the next one on its way; of the last one FSDP keeps the buffer
        table = count["head"] or count["embedding"]
        return {"gathered: embedding or head": table * s, "gathered: layers": layers * layer * s} if sharded else {}

    cast = autocast and not sharded  # FSDP gathers adapters in bf16
    kept, moments_of_layer = layer_bytes(config, length, s, full, rank, cast, checkpointing)
    ins, one = "inputs of the layers (n, B, L, H)", {f"a layer's {name}": tokens * x for name, x in kept.items()}
    copies = {"adapters in bf16": cast * adapters * s}  # autocast's, until it ends
    one["adapters in bf16"] = cast * adapters * s // n
    if checkpointing:
        everything, first = {ins: n * states}, one | {ins: states}
        last = everything | one
    else:
        everything = last = {f"{name}, {n} layers": n * tokens * x for name, x in kept.items()} | copies
        first = one
    out = {"last hidden states (B, L, H)": states}
    flow = out | {"their gradient (B, L, H)": states}
    head = {"gradient of the head (V, H)": V * H * s} if full and impl != "no head" else {}

    norm = {"final norm": tokens * (4 * H + 4 + full * s * H)}
    back = {"backward pass of the final norm (6, B, L, H) in fp32": 24 * tokens * H}
    loss = {}
    if impl != "no head":
        scored = batch * completion
        loss = predict_loss_bytes(batch, completion if impl == "naive" else length, H, V, dtype, impl, scored=scored,
                                  trainable_head=full, autocast=cast, device="cuda")  # fmt: skip
    moments = [everything | copies | out | norm | gathered(1) | {f"loss: {k}": x for k, x in loss.items()}]
    moments.append(everything | out | back | head | gathered(1))
    of_layer = (count["layers"] if full else adapters) // n
    for name, per_token, share in moments_of_layer:
        work = {name: tokens * per_token}
        grads = {"gradients of the layer": int(share * of_layer) * (s if sharded else size)}
        summed = {"gradients on their way to their owners": of_layer * s} if sharded else {}
        moments.append(last | flow | head | work | grads | gathered(2))
        before = {"gradients of the layers": own((n - 1) * of_layer * size)}
        moments.append(first | flow | head | work | grads | before | summed | gathered(1))
    gradients = {"gradients": own(learning * size)}
    table = V * H * s if full else 0
    again = sharded + bool(head and config.tie_word_embeddings)  # before it is sent to its owners, or added
    sent = {"gradient of the embedding": again * table + own(table) * sharded}
    moments.append(flow | gradients | sent | gathered(0))
    moments.append(out | gradients | {"AdamW's square roots": 0 if fused else own(learning * size)})
    most = max(moments, key=lambda moment: sum(moment.values()))
    return {name: int(x) for name, x in (always | most).items() if x}


def fitting_batch(config, card, *args, **options):
    """The largest batch of a GPU that is predicted to fit a card of ``card`` GB; 0: not even 1. The arguments are those
    of ``predict_step_bytes`` after ``batch``."""
    if not 0 < card < 1e6:
        raise ValueError(f"card = {card:g}: expected the memory of a GPU in GB, above 0")
    room = (CARDS.get(card, card) - OUTSIDE_GIB) * 2**30

    def fits(batch):
        return sum(predict_step_bytes(config, batch, *args, **options).values()) <= room

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(name, value, known):
    if value not in known:
        raise ValueError(f"{name} = {value!r}: expected one of {', '.join(map(str, known))}")


def sizes(config):
    """Widths H of the states, F of the MLP, A of all queries, K of all keys; heads of both; whether both are normed."""
    _check("config.model_type", config.model_type, ("llama", "qwen2", "qwen3"))
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"config.{name} = {getattr(config, name)}: expected 1 or more")
    H, heads, pairs = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or H // heads
    return H, config.intermediate_size, heads * width, pairs * width, heads, pairs, config.model_type == "qwen3"


def count_weights(config, rank=16):
    """Weights of the "embedding", the "head" (0 where it is tied) and all "layers" with the final norm; those of
    "adapters" of ``rank`` on all linear layers but the head."""
    H, F, A, K, heads, _, normed = sizes(config)
    linear = [(H, A), (H, K), (H, K), (A, H), (H, F), (H, F), (F, H)]
    layer = sum(i * o for i, o in linear) + 2 * H + normed * 2 * (A // heads)
    biased = config.model_type == "qwen2" or getattr(config, "attention_bias", False)
    layer += biased * (A + 2 * K + H * (config.model_type != "qwen2")) + getattr(config, "mlp_bias", False) * (
        2 * F + H
    )
    return {
        "embedding": config.vocab_size * H,
        "head": 0 if config.tie_word_embeddings else config.vocab_size * H,
        "layers": config.num_hidden_layers * layer + H,
        "adapters": config.num_hidden_layers * rank * sum(i + o for i, o in linear),
    }


def layer_bytes(config, length, s, full=True, rank=16, cast=False, checkpointing=False):
    """What autograd keeps of a decoder layer, a dict of name to bytes a token, and when the layer has most beside it:
    a list of ``(name, bytes a token, share of the layer's gradients that are there)``.

    length: tokens of a sequence; s: bytes of an element; full: the base trains; cast: adapters in fp32 under autocast,
    each of which keeps an input of its own; checkpointing: the layer's input is not counted.
    """
    H, F, A, K, heads, pairs, normed = sizes(config)
    fp32 = s == 4
    kept = {
        "inputs of the norms in fp32": 8 * H
        + 8
        + normed * 4 * (A + K + heads + pairs)
        - 4 * H * (fp32 and checkpointing),
        "normed states": full * s * (2 * H + normed * (A + K)),
        "inputs of the linear layers": s * (2 * H + A + F) + cast * s * (3 * H + A),
        "attention": 3 * s * A + s * heads * length if fp32 else s * (A + 2 * K) + 4 * heads,
        "MLP": 3 * s * F,
        "adapters": 0 if full else 7 * s * rank,
    }
    moments = [("gradients in the MLP (2, B, L, F)", 2 * s * F, F * H / (3 * F * H + 2 * A * H + 2 * K * H) * full)]
    if cast:
        moments.append(("input of the last adapter, in fp32 too (B, L, F)", (s + 4) * F + 4 * s * H, 0))
    if fp32:
        # Flash attention takes no fp32, and PyTorch's memory-efficient one no shared keys: scores are built whole, and
        # softmax makes its result, a mask of what is -inf, and a copy in which rows of nothing else are 0
        later = s * A + 4 * H + 4 + (1 + full) * s * H + 4 * s * F
        scores = 2 * s * heads * length + heads * length + s * (3 * A + 2 * K) - later
        moments.append(("scores twice, their mask, and factors, instead of the MLP", scores, 0))
    return kept, moments


def model_config(name):
    """The config of one of the bench's models, of a folder or of a hub id. Raises ValueError where there is none."""
    from transformers import AutoConfig, Qwen3Config

    from grpo_lab.bench.step import COMMON, MODELS

    if name in MODELS:
        return Qwen3Config(**{"tie_word_embeddings": True} | COMMON | MODELS[name])
    try:
        return AutoConfig.from_pretrained(name).get_text_config()
    except Exception as error:  # what a broken file makes transformers raise
        known = ", ".join(MODELS)
        raise ValueError(f"model = {name!r}: expected {known}, a folder with a config.json or a hub id") from error


def report(model, batches, card, dtype, impl, prompt, completion, **options):
    """Print the tensors of the first of ``batches``, and which batches fit a card of ``card`` GB. AdamW is fused, as in
    transformers' trainer."""
    config, shape = model_config(model), (prompt, completion, getattr(torch, dtype), impl)
    options["fused"] = True
    if min(batches) < 1:
        raise ValueError(f"batch = {min(batches)}: expected 1 or more")
    parts = predict_step_bytes(config, batches[0], *shape, **options)
    most, cards = fitting_batch(config, card, *shape, **options), f"{options['processes']} x {card:g} GB"
    for name, size in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"{size / 2**30:9.2f} GiB  {name}")
    print(f"{sum(parts.values()) / 2**30:9.2f} GiB  together, on each GPU, at batch {batches[0]}")
    fit, not_fit = (" and ".join(str(b) for b in batches if (b <= most) == wanted) for wanted in (True, False))
    fits = f"fits {cards} at batch {fit}" + f", not at {not_fit}" * bool(not_fit)
    print(f"{fits if fit else f'does not fit {cards} at batch {not_fit}'}; the largest batch of a GPU is {most}")
