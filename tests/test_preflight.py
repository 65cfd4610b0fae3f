"""What does not fit together is said before training starts, by the argument's name and with the repair."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_lab import GRPOConfig, GRPOTrainer, preflight
from grpo_lab.policies import load_tiny_policy
from grpo_lab.tasks import arithmetic_problems

PROBLEMS = arithmetic_problems(16, 0)
SUMS = Dataset.from_dict({"prompt": ["1+1"] * 7 + ["1+" * 70]})


def trainer(folder, tokenizer=None, data=PROBLEMS, vocab_size=None, positions=128, **options):
    tokenizer = tokenizer or load_tiny_policy()[1]
    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    size |= dict(head_dim=8, vocab_size=vocab_size or len(tokenizer), max_position_embeddings=positions)
    model = Qwen3ForCausalLM(Qwen3Config(**size, pad_token_id=0, eos_token_id=1))
    options = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8) | options
    config = GRPOConfig(str(folder), report_to="none", **options)
    return GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, data, None, tokenizer)


def test_what_fits_is_left_alone(tmp_path):
    trainer(tmp_path)
    trainer(tmp_path, vocab_size=500)
    trainer(tmp_path, data=PROBLEMS.to_iterable_dataset(), positions=16, max_steps=1)  # streamed: not looked at


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(vocab_size=30), "processing_class: the tokenizer has 120 tokens and the policy 30: load"),
        (dict(data=PROBLEMS.select([])), "train_dataset has 0 rows, and each generation takes 2 different ones"),
        (dict(data=PROBLEMS, gradient_accumulation_steps=16), "train_dataset has 16 rows.* takes 32 different ones"),
        (dict(data=PROBLEMS.rename_column("prompt", "q")), "has the columns q, answer, solution: name the one"),
        (dict(positions=32), r"max_completion_length=8 after the \d\d tokens of train_dataset\[\d+\]'s prompt"),
        (dict(data=SUMS), r"max_completion_length=8 after the 140 tokens of train_dataset\[7\]"),
        (dict(per_device_train_batch_size=6), "num_generations=4: .* 6 x 1 processes x steps_per_generation 1"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


def test_special_tokens_outside_the_policy_are_named(tmp_path):
    tokenizer = load_tiny_policy()[1]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"eos_token_id is None, and the policy has tokens 0 to 119: set"):
        trainer(tmp_path, tokenizer)


@pytest.mark.parametrize("version, loading, refused", [(2, True, True), (2, False, False), (1, True, False)])
def test_a_reference_model_that_ranks_would_lack_is_refused(version, loading, refused):
    """accelerate sends rank 0's weights to the other ranks' policies alone."""
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=loading)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), num_processes=2)
    fake = SimpleNamespace(accelerator=accelerator, ref_model=object(), beta=0.1)
    if not refused:
        return preflight._check_reference(fake)
    with pytest.raises(ValueError, match="fsdp_cpu_ram_efficient_loading: true is not supported with beta=0.1"):
        preflight._check_reference(fake)


def test_attention_whose_gradients_are_nan_is_not_used(monkeypatch):
    asked, cuda = [], SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    preflight.avoid_faulty_attention(torch.device("cpu"))
    monkeypatch.setattr(preflight, "_attention_is_sound", lambda device: True)
    preflight.avoid_faulty_attention(cuda)
    assert asked == []
    monkeypatch.setattr(preflight, "_attention_is_sound", lambda device: False)
    with pytest.warns(UserWarning, match="NaN gradients for padded batches here .pytorch/pytorch#196678.: another"):
        preflight.avoid_faulty_attention(cuda)
    assert asked == [False]


def test_sound_attention_is_seen_to_be(monkeypatch):
    with torch.no_grad():
        assert preflight._attention_is_sound(torch.device("cpu"))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, attn_mask: q * float("nan"))
    assert not preflight._attention_is_sound(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [64, 192, 200])
def test_gradients_of_left_padded_batches_are_finite_on_this_gpu(length):
    used = torch.backends.cuda.cudnn_sdp_enabled()
    preflight.avoid_faulty_attention(torch.device("cuda"))
    q, k, v = torch.randn(3, 4, 4, length, 32, device="cuda", dtype=torch.bfloat16)
    q.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril().repeat(4, 1, 1, 1)
    mask[1, :, :, :20] = False
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    torch.backends.cuda.enable_cudnn_sdp(used)
    assert q.grad.isfinite().all()
