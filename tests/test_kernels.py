"""The Triton kernels against float64 and their torch twins: on a GPU, or under Triton's interpreter on a CPU."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from heads import loss_and_grads, random_inputs, relative

from grpo_lab import Objective, kernels, loss
from grpo_lab.plan import Plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# An ulp of the stored type: the interpreter truncates where a GPU rounds
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rows(R, V, dtype, scale=3.0):
    z = (torch.randn(R, V + 3, device=DEVICE) * scale).to(dtype)[:, :V]  # rows that are not contiguous
    return z, torch.randint(0, V, (R,), device=DEVICE)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks without long rows, which the interpreter takes its time over. On a GPU no thread may be without
    columns of its own: threads that share some would read what others have overwritten."""
    monkeypatch.setattr(kernels, "SLICE", 64 if DEVICE == "cpu" else 2048)
    monkeypatch.setattr(kernels, "_GRAD_BLOCK", 32)


def statistics(z, ids, sliced=False, **options):
    """RowStats of whole rows, or of slices one after another."""
    state = kernels.new_state(len(z), torch.promote_types(z.dtype, torch.float32), DEVICE)
    if not sliced:
        kernels.row_stats(z, ids, state, **options)
    for first in range(0, z.shape[1], kernels.SLICE) if sliced else ():
        kernels.absorb(z[:, first : first + kernels.SLICE], ids, first, state, **options)
    return kernels.finish(state)


def poisoned(z, dtype=None):
    return torch.full_like(z, torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [1, 5, 64, 65, 203])
@pytest.mark.parametrize("options", [{}, dict(softcap=4.0, logit_scale=0.7, inv_t=1 / 0.9)], ids=["plain", "softcap"])
def test_kernels_agree_with_float64_and_the_twins(V, dtype, options, seed, small_blocks):
    z, ids = rows(5, V, dtype)
    exact = statistics(z.double(), ids, **options)
    c, e = torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    for backend in ("torch", "triton"):
        for sliced in (False, True):
            for got, expected in zip(statistics(z, ids, sliced, backend=backend, **options), exact, strict=True):
                torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for bonus in (None, e):
        expected = poisoned(z, torch.float64)
        kernels.logits_grad(
            z.double(), expected, ids, 0, exact, c.double(), None if bonus is None else e.double(), **options
        )
        for backend in ("torch", "triton"):
            for out in (poisoned(z), z.clone()):  # into a poisoned buffer, and in place
                source = out if not out.isnan().any() else z
                stats = kernels.RowStats(*(x.float() for x in exact))
                half = -(-V // 2)  # as two slices
                for part in (slice(0, half), slice(half, V)) if V > 1 else (slice(0, 1),):
                    kernels.logits_grad(
                        source[:, part], out[:, part], ids, part.start, stats, c, bonus, backend=backend, **options
                    )
                assert ((out.double() - expected).abs() <= ULP[dtype] * expected.abs() + 2e-5).all()
                if bonus is None:  # both kernels in one
                    out, state = poisoned(z), kernels.new_state(5, torch.float32, DEVICE)
                    kernels.row_stats(z, ids, state, grad=out, c=c / 4, gain=4.0, backend=backend, **options)
                    assert ((out.double() - expected).abs() <= ULP[dtype] * expected.abs() + 2e-5).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_numerators_follow_a_peak_that_moves(backend, softcap, seed, monkeypatch):
    R, V, H, width = (6, 96, 7, 16) if DEVICE == "cpu" else (6, 12_288, 7, 2048)  # see small_blocks
    z, ids = rows(R, V, torch.float32)
    z += torch.arange(V, device=DEVICE)[None] * torch.linspace(-2, 2, R, device=DEVICE)[:, None] * (96 / V)
    weight, weight2 = torch.randn(V, H, device=DEVICE), torch.randn(V, 3, device=DEVICE)
    options = dict(softcap=softcap, inv_t=0.5)
    state = kernels.new_state(R, torch.float32, DEVICE)
    sums = [poisoned(torch.empty(R, w.shape[1], device=DEVICE)) for w in (weight, weight2)]
    for first in range(0, V, width):
        part = slice(first, first + width)
        e = poisoned(z[:, part])
        kernels.absorb(z[:, part], ids, first, state, e, sums, 2.0, backend=backend, **options)
        sums = [(x if first else 0) + e @ w[part] for x, w in zip(sums, (weight, weight2), strict=True)]
    stats = kernels.finish(state)
    logits = z.double() if softcap is None else softcap * torch.tanh(z.double() / softcap)
    p = torch.softmax(logits * 0.5, -1)
    slope = 1 - torch.tanh(z.double() / softcap) ** 2 if softcap else 1
    p = (p * slope).scatter(1, ids[:, None], 0.0)
    for got, w in zip(sums, (weight, weight2), strict=True):
        got = got.double() * (-stats.log_norm.double()).exp()[:, None] / 2.0
        torch.testing.assert_close(got, p @ w.double(), rtol=1e-4, atol=1e-6)

    monkeypatch.setattr(kernels, "SLICE", width)  # and the same of whole rows
    state = kernels.new_state(R, torch.float32, DEVICE)
    e = z.clone()  # in place
    kernels.row_stats(e, ids, state, numerators=e, gain=2.0, backend=backend, **options)
    for a, b in zip(kernels.finish(state), stats, strict=True):
        assert torch.equal(a, b)
    got = e.double() * (-stats.log_norm.double()).exp()[:, None] / 2.0
    torch.testing.assert_close(got, p, rtol=1e-4, atol=1e-6)


def test_bits_do_not_depend_on_the_slices(seed, small_blocks):
    z, ids = rows(9, 3 * kernels.SLICE - 7, torch.float32)
    for backend in ("torch", "triton"):
        whole, sliced = (statistics(z, ids, sliced, backend=backend) for sliced in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_a_gradient_is_scaled_and_rounded_once(backend, dtype, to, seed):
    x, factor = torch.randn(3, 5001, device=DEVICE).to(dtype), torch.tensor(0.37, device=DEVICE)
    expected = (x.double() * factor.double()).to(to)
    got = kernels.scaled(x, factor, to, backend=backend)
    assert got.dtype == to and (got is x) == (dtype == to)
    torch.testing.assert_close(got, expected, rtol=2**-7 if to == torch.bfloat16 else 2**-23, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_put_in_their_places(backend, dtype, seed):
    x, at = torch.randn(5, 1030, device=DEVICE), torch.tensor([7, 0, 3, 8, 1], device=DEVICE)
    out = torch.full((9, 1030), 7.0, device=DEVICE, dtype=dtype)
    kernels.put_rows(x, out, at, 3.0, backend=backend)
    assert ((out[at] - x / 3).abs() <= ULP[dtype] * x.abs()).all()
    assert torch.all(out[[2, 4, 5, 6]] == 7)


LAYOUTS = {
    "dense": lambda w: w,
    "transposed": lambda w: w.t().contiguous().t(),
    "strided": lambda w: w.new_empty(len(w), 2 * w.shape[1])[:, ::2].copy_(w),
    "unaligned": lambda w: w.new_empty(w.numel() + 1)[1:].view(w.shape).copy_(w),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, dict(softcap=4.0, logit_scale=0.7, inv_t=1 / 0.9)], ids=["plain", "softcap"])
def test_sums_of_numerators_become_gradients(options, layout, backend, seed):
    (z, ids), at = rows(5, 40, torch.float32), torch.tensor([7, 0, 3, 8, 1], device=DEVICE)
    weight, c = torch.randn(40, 1030, device=DEVICE), torch.randn(5, device=DEVICE)
    state, exact = kernels.new_state(5, torch.float32, DEVICE), kernels.new_state(5, torch.float64, DEVICE)
    e, out = torch.empty_like(z), torch.full((9, 1030), 7.0, device=DEVICE)
    kernels.row_stats(z, ids, state, numerators=e, gain=2.0, backend=backend, **options)
    kernels.put_rows(e @ weight, out, at, 2.0, (state, c, LAYOUTS[layout](weight), ids), backend=backend, **options)
    grad = torch.empty_like(z, dtype=torch.float64)
    kernels.row_stats(z.double(), ids, exact, grad=grad, c=c.double(), **options)
    torch.testing.assert_close(out[at].double(), grad @ weight.double(), rtol=1e-5, atol=1e-5)
    assert torch.all(out[[2, 4, 5, 6]] == 7)


def test_float64_statistics_are_those_of_log_softmax(seed):
    z, ids = rows(7, 50, torch.float64)
    logits = 3 * torch.tanh(z * 0.5 / 3) / 0.8
    logps = torch.log_softmax(logits, -1)
    got = statistics(z, ids, softcap=3.0, logit_scale=0.5, inv_t=1 / 0.8)
    own = logps.gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(got.logps, own)
    torch.testing.assert_close(got.rest, 1 - own.exp())
    torch.testing.assert_close(got.entropy, -(logps.exp() * logps).sum(-1))
    torch.testing.assert_close(got.peak + got.log_norm, logits.logsumexp(-1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_confident_rows_keep_their_bits(backend, seed):
    z, ids = rows(6, 300, torch.float32)
    z.scatter_(1, ids[:, None], torch.linspace(8, 60, 6, device=DEVICE)[:, None])
    exact, got = statistics(z.double(), ids), statistics(z, ids, backend=backend)
    for name in ("logps", "rest", "entropy"):
        torch.testing.assert_close(getattr(got, name).double(), getattr(exact, name), rtol=1e-5, atol=0)
    grads = [torch.empty_like(x) for x in (z.double(), z)]
    one = torch.ones(6, device=DEVICE)
    kernels.logits_grad(z.double(), grads[0], ids, 0, exact, one.double())
    kernels.logits_grad(z, grads[1], ids, 0, got, one, backend=backend)
    torch.testing.assert_close(grads[1].double(), grads[0], rtol=2e-5, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_infinities(backend, seed, small_blocks):
    z, ids = rows(4, 100, torch.float32)
    z[0, :64] = -torch.inf  # a whole block
    z[1, 95], ids[0] = torch.inf, 99
    z[2, 7] = torch.nan
    got, exact = statistics(z, ids, backend=backend), statistics(z.double(), ids)
    fine = [0, 3]
    for a, b in zip((got.logps, got.entropy, got.rest), (exact.logps, exact.entropy, exact.rest), strict=True):
        torch.testing.assert_close(a[fine].double(), b[fine], rtol=1e-5, atol=1e-5)
    assert not torch.isfinite(got.logps[1]) and not torch.isfinite(got.logps[2])
    out = torch.empty_like(z)
    one = torch.ones(4, device=DEVICE)
    kernels.logits_grad(z, out, ids, 0, got, one, one, backend=backend)
    assert torch.isfinite(out[fine]).all() and torch.all(out[0, :64] == 0)


SCHEDULES = [Plan(16, True), Plan(16, False, 16), Plan(16, True, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_every_schedule_on_the_kernels(dtype, softcap, seed, small_blocks, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 16)
    x = random_inputs(dtype=dtype, device=DEVICE, bias=True, off_policy=False)
    x["advantages"][2] = 0
    options = dict(softcap=softcap, logit_scale=0.7)
    exact, exact_grads, _ = loss_and_grads(x, torch.float64, impl="naive", **options)
    _, eager_grads, _ = loss_and_grads(x, impl="naive", **options)
    for frozen in (False, True):
        for more in SCHEDULES:
            monkeypatch.setattr(loss, "choose", lambda *_, plan=more: plan)
            got = loss_and_grads(x, frozen_head=frozen, backend="triton", **options)
            assert relative(got[0], exact) < 1e-5
            for name in ("hidden",) if frozen else got[1]:
                error = relative(got[1][name], exact_grads[name])
                assert error <= 1.5 * relative(eager_grads[name], exact_grads[name]) + 1e-6, (name, frozen, more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_whole_loss_on_the_kernels(dtype, seed, small_blocks):
    for objective in (Objective(), Objective(beta=0.1, entropy_coef=0.1), Objective(top_entropy_quantile=0.5)):
        x = random_inputs(dtype=dtype, device=DEVICE, bias=True)
        exact, exact_grads, _ = loss_and_grads(x, torch.float64, impl="naive", objective=objective)
        _, grads, stats = loss_and_grads(x, backend="triton", chunk_tokens=8, objective=objective)
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


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from grpo_lab import kernels, triton_kernels, twins

LOW = {"c_ptr": "*fp32", "state_ptr": "*fp32", "x_ptr": "*fp32", "z_stride": "i32", "gain": "fp32", "scale": "fp32",
       "cap": "fp32", "ids_ptr": "*i64", "at_ptr": "*i64"}
SET = {"SLACK": twins.SLACK, "LOWEST": kernels._LOWEST}
BLOCKS = {"absorb": kernels.SLICE, "row_stats": kernels.SLICE}
for dtype in ("bf16", "fp32"):
    for name in ("absorb", "row_stats", "logits_grad", "put_rows", "scaled"):
        kernel = getattr(triton_kernels, name)
        flags = [n for n in kernel.arg_names if n.isupper() and n not in SET and n != "BLOCK" and len(n) > 2]
        for on in (False, True):
            constants = SET | dict.fromkeys(flags, on) | {"BLOCK": BLOCKS.get(name, 1024)}
            if on and "GRAD" in flags:
                constants["NUMERATORS"] = False  # the one or the other
            constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
            signature = {n: "constexpr" if n in constants else LOW.get(n) or (
                f"*{dtype}" if n.startswith(("z_", "g_", "e_", "out_", "weight_")) and n.endswith("ptr")
                else "*fp32" if n.endswith("ptr") else "i32") for n in kernel.arg_names}
            at = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
            assert triton.compile(ASTSource(kernel, signature, at), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
            print(name, dtype, on)
"""


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter runs what a compiler refuses. Compiling needs no GPU, but Triton without its interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.count("\n") == 20, run.stderr[-3000:]


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
