"""The loss on a real GPU against float64: real head sizes, three dtypes, from one token to more than 65,536.

python -m pytest tests/test_gpu.py -s          # prints the errors
"""

import pytest
import torch
from heads import loss_and_grads, random_inputs, relative

from grpo_lab import Objective, grpo_loss, token_logps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def long_inputs(B, T, H, V, dtype, share=0.6):
    torch.cuda.empty_cache()
    hidden = torch.randn(B, T, H, device="cuda").to(dtype)
    weight = (torch.randn(V, H, device="cuda") * H**-0.5).to(dtype)
    ids = torch.randint(V, (B, T), device="cuda")
    mask = (torch.rand(B, T, device="cuda") < share).long()
    mask[:, 0] = 1
    return dict(hidden=hidden, weight=weight, token_ids=ids, mask=mask, advantages=torch.randn(B, device="cuda"))


def grad_scale(x):
    """What GradScaler would settle on: fp16 has no room for gradients of size 1 / N."""
    return float(x["mask"].sum()) if x["hidden"].dtype == torch.float16 else 1.0


def exact(x, **options):
    """The loss in float64, through the torch twins, which the CPU tests hold to the naive head."""
    return loss_and_grads(x, torch.float64, impl="chunked", backend="torch", chunk_tokens=256, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [1024, 4096])
@pytest.mark.parametrize("V", [151_936, 50_023])  # 50,023 is a prime: no block size divides it
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (4, 75), (8, 512)])
def test_errors_stay_within_eager_pytorch_s(B, T, V, H, dtype, seed):
    x = long_inputs(B, T, H, V, dtype)
    objective = Objective(loss_type="grpo", beta=0.05, temperature=0.9)
    x["ref_logps"] = torch.full((B, T), -11.0, device="cuda")
    options = dict(objective=objective, grad_scale=grad_scale(x))
    _, expected, expected_stats = exact(x, **options)
    _, eager, eager_stats = loss_and_grads(x, impl="naive", **options)
    _, ours, stats = loss_and_grads(x, impl="chunked", **options)
    line = f"B {B} T {T} V {V} H {H} {dtype}:"
    for name in ours:
        got, allowed = relative(ours[name], expected[name]), relative(eager[name], expected[name])
        line += f" d_{name} {got:.1e} (eager {allowed:.1e})"
        assert got <= 1.5 * allowed + 1e-7, line
    got, allowed = relative(stats.logps, expected_stats.logps), relative(eager_stats.logps, expected_stats.logps)
    print(line, f"logps {got:.1e} (eager {allowed:.1e})")
    assert got <= 1.5 * allowed + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "V"), [(1024, 151_936), (4096, 50_023)])
@pytest.mark.parametrize(("B", "T", "share"), [(1, 70_000, 1.0), (64, 1024, 0.59), (2, 66_000, 0.5)])
def test_long_batches(B, T, share, H, V, dtype, seed):
    x = long_inputs(B, T, H, V, dtype, share)
    limit = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}[dtype]
    _, expected, stats = exact(x, grad_scale=grad_scale(x))
    _, ours, got = loss_and_grads(x, grad_scale=grad_scale(x))
    errors = {name: relative(ours[name], expected[name]) for name in ours}
    print(f"N {int(x['mask'].sum())} H {H} V {V} {dtype}:", {k: f"{v:.1e}" for k, v in errors.items()})
    assert all(e < limit for e in errors.values()), errors
    assert relative(got.logps, stats.logps) < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_are_bitwise_the_same_with_and_without_gradients(dtype, seed):
    x = long_inputs(16, 512, 1024, 151_936, dtype)
    x["advantages"][::2] = 0
    args = [x[k] for k in ("hidden", "weight", "token_ids", "mask")]
    with torch.no_grad():
        expected, _ = token_logps(*args)
    args[0].requires_grad_(), args[1].requires_grad_()
    for objective in (Objective(), Objective(importance_sampling_level="sequence")):
        for old_logps in (None, expected):
            _, stats = grpo_loss(*args, x["advantages"], objective=objective, old_logps=old_logps)
            assert torch.equal(stats.logps, expected)


def test_two_runs_agree_bit_for_bit(seed):
    x = long_inputs(16, 512, 1024, 50_023, torch.bfloat16)
    x["old_logps"] = torch.full((16, 512), -10.8, device="cuda")
    for objective in (
        Objective(),
        Objective(loss_type="vespo"),
        Objective(top_entropy_quantile=0.4, entropy_coef=0.01),
    ):
        first, second = (loss_and_grads(x, objective=objective) for _ in range(2))
        assert torch.equal(first[0], second[0])
        assert all(torch.equal(first[1][k], second[1][k]) for k in first[1])


@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo", "vespo"])
def test_every_route_agrees_with_the_naive_head(loss_type, seed):
    for level in ("token", "sequence"):
        for options in ({}, {"beta": 0.1, "entropy_coef": 0.02}, {"top_entropy_quantile": 0.4}):
            objective = Objective(loss_type=loss_type, importance_sampling_level=level, temperature=0.8, **options)
            x = random_inputs(B=6, T=40, H=64, V=1009, dtype=torch.float32, device="cuda", bias=True)
            expected, expected_grads, _ = loss_and_grads(x, impl="naive", objective=objective)
            for chunk_tokens in (16, 64, "auto"):
                loss, grads, _ = loss_and_grads(x, objective=objective, chunk_tokens=chunk_tokens)
                assert abs(loss - expected) < 1e-5 * (1 + abs(expected))
                assert all(relative(grads[k], expected_grads[k]) < 1e-4 for k in grads), (objective, chunk_tokens)


def test_no_device_sync_inside_the_chunk_loop(seed):
    x = long_inputs(16, 128, 256, 50_023, torch.bfloat16)
    x["hidden"].requires_grad_()
    loss, _ = grpo_loss(**x, chunk_tokens=64)
    from grpo_lab import chunked

    calls = []
    run = chunked.Sweep.__call__

    def watched(self, *args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls.append(len(self.spans))
            return run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    chunked.Sweep.__call__ = watched
    try:
        for objective in (Objective(), Objective(beta=0.1, entropy_coef=0.1)):
            grpo_loss(**x, chunk_tokens=64, objective=objective, ref_logps=torch.zeros(16, 128, device="cuda"))
    finally:
        chunked.Sweep.__call__ = run
    assert calls and min(calls) > 4


@pytest.mark.parametrize("loss_impl", ["chunked", "naive"])
def test_trainer_with_a_real_head(loss_impl, tmp_path):
    import transformers
    from test_trainer import PROMPTS, SIZE, WORDS, Tokenizer, models, pre_tokenizers

    from grpo_lab import GRPOConfig, GRPOTrainer

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    size = SIZE | dict(vocab_size=151_936, hidden_size=1024, intermediate_size=1024)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "model")  # beta != 0 loads it again as the reference

    config = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=64, max_steps=3,
        num_iterations=2, beta=0.05, logging_steps=1, report_to=[], save_strategy="no", loss_impl=loss_impl,
    )  # fmt: skip
    odd = lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids]  # noqa: E731
    trainer = GRPOTrainer(str(tmp_path / "model"), odd, config, train_dataset=PROMPTS, processing_class=tokenizer)
    trainer.train()
    print([(c["case"], c["against"], c["dtype"], c["errors"]) for c in trainer.receipt["checks"]])
    assert trainer.receipt["passed"]
    assert all(0 < row["grad_norm"] < 100 for row in trainer.state.log_history if "grad_norm" in row)
