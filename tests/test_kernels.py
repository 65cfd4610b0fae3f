"""The Triton kernels against float64 and their torch twins: on a GPU, or under Triton's interpreter on a CPU."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from heads import loss_and_grads, random_inputs, relative

from grpo_lab import Objective, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# An ulp of the stored type: the interpreter truncates where a GPU rounds
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rows(R, V, dtype, scale=3.0):
    z = (torch.randn(R, V + 3, device=DEVICE) * scale).to(dtype)[:, :V]  # rows that are not contiguous
    return z, torch.randint(0, V, (R,), device=DEVICE)


def statistics(z, ids, **options):
    out = torch.full((4, len(z)), torch.nan, dtype=torch.promote_types(z.dtype, torch.float32), device=DEVICE)
    kernels.row_stats(z, ids, *out, **options)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 5, 115, 4096, 4097, 10007])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_kernels_agree_with_float64_and_the_twins(V, dtype, softcap, seed):
    z, ids = rows(5, V, dtype)
    options = dict(softcap=softcap, logit_scale=0.7, inv_t=1 / 0.9)
    exact = statistics(z.double(), ids, **options)
    for backend in ("torch", "triton"):
        got = statistics(z, ids, backend=backend, **options)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    c, e = torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    for entropy_grad in (None, e):
        poison = torch.full_like(z, torch.nan, dtype=torch.float64)
        kernels.logits_grad(
            z.double(), poison, ids, *exact[1:], c.double(), None if entropy_grad is None else e.double(), **options
        )
        for backend in ("torch", "triton"):
            for out in (torch.full_like(z, torch.nan), z.clone()):  # into a poisoned buffer, and in place
                source = out if not out.isnan().any() else z
                stats = exact[1:].float()
                kernels.logits_grad(source, out, ids, *stats, c, entropy_grad, backend=backend, **options)
                error = (out.double() - poison).abs()
                assert (error <= ULP[dtype] * poison.abs() + 2e-5).all()


def test_float64_statistics_are_those_of_log_softmax(seed):
    z, ids = rows(7, 50, torch.float64)
    logps = torch.log_softmax(3 * torch.tanh(z * 0.5 / 3) / 0.8, -1)
    got, peak, log_sum, entropy = statistics(z, ids, softcap=3.0, logit_scale=0.5, inv_t=1 / 0.8)
    torch.testing.assert_close(got, logps.gather(-1, ids[:, None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(logps.exp() * logps).sum(-1))
    torch.testing.assert_close(peak + log_sum, (3 * torch.tanh(z * 0.5 / 3) / 0.8).logsumexp(-1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_infinities(backend, seed):
    z, ids = rows(4, 5000, torch.float32)
    z[0, :4096] = -torch.inf  # a whole block
    z[1, 4500], ids[0] = torch.inf, 4999
    z[2, 7] = torch.nan
    logps, peak, log_sum, entropy = got = statistics(z, ids, backend=backend)
    torch.testing.assert_close(got[:, [0, 3]].double(), statistics(z.double(), ids)[:, [0, 3]], rtol=1e-5, atol=1e-5)
    assert not torch.isfinite(logps[1]) and not torch.isfinite(logps[2])
    out = torch.empty_like(z)
    one = torch.ones(4, device=DEVICE)
    kernels.logits_grad(z, out, ids, peak, log_sum, entropy, one, one, backend=backend)
    assert torch.isfinite(out[[0, 3]]).all() and torch.all(out[0, :4096] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_loss_on_the_kernels(dtype, seed):
    for objective in (Objective(), Objective(beta=0.1, entropy_coef=0.1), Objective(top_entropy_quantile=0.5)):
        x = random_inputs(dtype=dtype, device=DEVICE, bias=True)
        exact, exact_grads, _ = loss_and_grads(x, torch.float64, impl="naive", objective=objective)
        loss, grads, stats = loss_and_grads(x, backend="triton", chunk_tokens=8, objective=objective)
        twin, twin_grads, twin_stats = loss_and_grads(x, backend="torch", chunk_tokens=8, objective=objective)
        torch.testing.assert_close(stats.logps, twin_stats.logps, rtol=1e-5, atol=1e-5)
        for name in grads:
            limit = 2.0 * relative(twin_grads[name], exact_grads[name]) + 1e-5
            assert relative(grads[name], exact_grads[name]) <= limit, (name, objective)


def test_kernels_without_a_gpu_need_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.resolve_backend("triton", torch.device("cpu"))
    assert kernels.resolve_backend("auto", torch.device("cpu")) == "torch"


def test_without_triton_the_twins_run_and_say_so():
    code = """
import sys, warnings; sys.modules["triton"] = None
import torch
from grpo_lab import kernels
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert [kernels.resolve_backend("auto", torch.device("cuda")) for _ in range(2)] == ["torch", "torch"]
assert len(caught) == 1 and "pip install triton" in str(caught[0].message), caught
try: kernels.resolve_backend("triton", torch.device("cuda"))
except ValueError as error: assert "not installed" in str(error)
else: raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
