"""The prediction of whole training steps: the recorded peaks within 5 %; weights, kept tensors and peaks on a CPU."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from grpo_lab import cli
from grpo_lab.bench.files import read_table
from grpo_lab.bench.step import build_model
from grpo_lab.memory import Watch
from grpo_lab.step_memory import (
    CARDS,
    IMPLS,
    OUTSIDE_GIB,
    count_weights,
    fitting_batch,
    layer_bytes,
    model_config,
    predict_step_bytes,
)

RECORDED = Path(__file__).resolve().parents[1] / "data" / "benchmarks"
SIZE = dict(hidden_size=128, intermediate_size=384, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
            vocab_size=512)  # fmt: skip
KINDS = [("bfloat16", "full"), ("float32", "full"), ("bfloat16", "lora"), ("float32", "lora")]


@pytest.mark.parametrize("table", ["step", "peak", "batch"])
def test_within_5_percent_of_the_recorded_peaks(table):
    path = RECORDED / f"{table}_h200.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not recorded")
    checked = 0
    for row in read_table(path):
        peak, batch = row["peak_mib"], row.get("batch") or row.get("largest_batch")
        if row.get("shared_batch"):
            peak, batch = row["shared_peak_mib"], row["shared_batch"]
        if row["provider"] not in IMPLS or not peak:
            continue
        shape = row["prompt"], row["completion"], getattr(torch, row["dtype"]), row["provider"]
        processes = row.get("processes") or 1
        options = dict(tuning=row.get("tuning", "full"), checkpointing=row["checkpointing"], processes=processes)
        parts = predict_step_bytes(model_config(row["model"]), batch, *shape, **options, fused=table == "batch")
        assert sum(parts.values()) / 2**20 == pytest.approx(peak, rel=0.05), (row, parts)
        checked += 1
    assert checked >= 12


@pytest.mark.parametrize(
    "config, tied", [(Qwen3Config, True), (Qwen3Config, False), (Qwen2Config, False), (LlamaConfig, True)]
)
def test_weights_are_the_models_own(config, tied):
    config = config(**SIZE, num_hidden_layers=3, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = count_weights(config)
    assert counted["embedding"] + counted["head"] + counted["layers"] == sum(p.numel() for p in model.parameters())


def test_adapters_are_pefts_own():
    model = build_model(SIZE | {"num_hidden_layers": 3}, "float32", "meta", 0, "lora")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_weights(model.config)["adapters"] == trained


def body(dtype, tuning, layers, B, T, checkpointing=False):
    """A model and its forward pass."""
    model = build_model(SIZE | {"num_hidden_layers": layers}, dtype, "cpu", 0, tuning).train()
    base = model.get_base_model() if tuning == "lora" else model
    (base.gradient_checkpointing_enable if checkpointing else base.gradient_checkpointing_disable)()
    ids = torch.randint(SIZE["vocab_size"], (B, T))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16" and tuning == "lora"):
            return base.model(ids, use_cache=False).last_hidden_state

    return model, forward


def attention(dtype):
    """As CUDA has it: fp32 scores are whole, bf16 ones are never."""
    return sdpa_kernel(SDPBackend.MATH if dtype == "float32" else SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("dtype, tuning", KINDS)
def test_a_layer_keeps_what_autograd_keeps(dtype, tuning):
    B, T, found = 3, 50, []
    for layers in (1, 2):
        model, forward = body(dtype, tuning, layers, B, T)
        weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(x, weights=weights, kept=kept):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights and x.numel() % (B * T) == 0:  # no adapter that autocast has rounded
                kept[storage.data_ptr()] = storage
            return x

        with attention(dtype), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            forward()
        found.append(sum(storage.nbytes() for storage in kept.values()))
    itemsize, cast = getattr(torch, dtype).itemsize, (dtype, tuning) == ("bfloat16", "lora")
    told, _ = layer_bytes(Qwen3Config(**SIZE), T, itemsize, tuning == "full", cast=cast)
    assert sum(told.values()) * B * T == found[1] - found[0]


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype, tuning", KINDS)
def test_the_peak_is_that_of_the_body(dtype, tuning, checkpointing):
    """Nothing in the loss's place, and the standing state apart. What a fused operation takes within itself, softmax
    above all, a CPU does not show: there the prediction is the higher one."""
    B, T, layers = 8, 256, 4
    model, forward = body(dtype, tuning, layers, B, T, checkpointing)
    with attention(dtype), Watch() as watch:
        hidden = forward()
        hidden.mean().backward()
    config = Qwen3Config(**SIZE, num_hidden_layers=layers, tie_word_embeddings=True)
    options = dict(tuning=tuning, checkpointing=checkpointing, fused=True)
    parts = predict_step_bytes(config, B, T // 2, T // 2, getattr(torch, dtype), "no head", **options)
    beyond = sum(size for name, size in parts.items() if name not in ("weights", "AdamW"))
    seen = max(watch.timeline)
    assert 0.97 * seen < beyond < (1.35 if dtype == "float32" else 1.03) * seen, parts


def test_shards_divide_what_stands_and_nothing_else():
    config, shape = model_config("Qwen3-4B"), (16, 128, 512, torch.bfloat16, "chunked")
    one, two, four = (predict_step_bytes(config, *shape, tuning="lora", processes=n) for n in (1, 2, 4))
    assert two["weights"] == pytest.approx(2 * four["weights"]) == pytest.approx(one["weights"] / 2)
    assert {name for name in two if two[name] != four.get(name)} <= {"weights", "AdamW", "gradients of the layers"}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("processes, tuning", [(1, "full"), (2, "full"), (2, "lora")])
def test_one_sequence_more_than_fits_does_not(impl, processes, tuning):
    config, shape = model_config("Qwen3-1.7B"), (128, 512, torch.bfloat16, impl)
    options = dict(tuning=tuning, processes=processes)
    most = fitting_batch(config, 80, *shape, **options)
    room = (CARDS[80] - OUTSIDE_GIB) * 2**30
    under, over = (sum(predict_step_bytes(config, most + i, *shape, **options).values()) for i in (0, 1))
    assert most > 0 and under <= room < over
    assert fitting_batch(config, 2, *shape, **options) == 0


def test_the_command_says_what_fits(capsys):
    given = "predict --model Qwen3-4B --impl naive --card 80 --processes 2 --batch 48"
    assert cli.main([*given.split(), "512"]) == 0
    out = capsys.readouterr().out
    assert "fits 2 x 80 GB at batch 48, not at 512; the largest batch of a GPU is " in out
    assert "GiB  loss: logits (B, T, V)" in out


@pytest.mark.parametrize(
    "given, said",
    [
        ("--batch 0", "batch = 0: expected 1 or more"),
        ("--batch 64 -3", "batch = -3: expected 1 or more"),
        ("--prompt -600", "prompt = -600: expected 0 or more"),
        ("--card -1", "card = -1: expected the memory of a GPU"),
        ("--card nan", "card = nan"),
        ("--card inf", "card = inf"),
        ("--processes 0", "processes = 0"),
        ("--model none", "model = 'none'"),
    ],
)
def test_what_cannot_be_predicted_is_said(given, said, capsys):
    assert cli.main(["predict", *given.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    config = model_config("Qwen3-4B")
    for name, value in (("impl", "TRL"), ("tuning", "qlora"), ("dtype", torch.float16)):
        with pytest.raises(ValueError, match=f"{name} = .*: expected one of"):
            predict_step_bytes(config, 1, 1, 1, **{name: value})


BROKEN = ["[1]", '{"model_type": "qwen3", "hid', '{"model_type": "qwen3", "hidden_size": "x"}', '{"hidden_size": 8}',
          '{"model_type": "llama", "num_hidden_layers": 0}', '{"model_type": "gemma2"}']  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_folder_of_no_model_that_is_known_is_named_in_a_line(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["predict", "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(("error: model = ", "error: config.")) and err.count("\n") == 1 and not out
