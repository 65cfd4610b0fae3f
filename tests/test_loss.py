"""The loss against float64 and the naive head: every option, every route, every kind of bad input."""

import pytest
import torch
from heads import loss_and_grads, objectives, random_inputs, relative
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lab import Objective, chunked, grpo_loss, kernels, token_logps, workspace
from grpo_lab import loss as loss_module
from grpo_lab.objective import LOSS_TYPES
from grpo_lab.plan import Plan

# Chunks of one token, shorter than a sequence, of some, of all; each kind of plan, the head trained and frozen
ROUTES = [
    (Plan(1, True), False), (Plan(8, True), False), (Plan(16, True), False), (Plan(48, True), False),
    (Plan(2, True), True), (Plan(8, True), True), (Plan(8, False), True), (Plan(48, False), True),
    (Plan(8, False, 4), False), (Plan(48, False, 16), False), (Plan(16, True, 16), False),
]  # fmt: skip


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_route_equals_the_naive_head_in_float64(loss_type, seed, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 16)
    for i, objective in enumerate(objectives(loss_type, 60, seed)):
        x = random_inputs(bias=i % 2 == 0, off_policy=i % 3 != 0)
        options = dict(objective=objective, softcap=[None, 3.0][i % 2], logit_scale=[1.0, 0.5][i % 5 == 0])
        expected, expected_grads, expected_stats = loss_and_grads(x, impl="naive", **options)
        for plan, frozen in ROUTES:
            monkeypatch.setattr(loss_module, "choose", lambda *_, plan=plan: plan)
            loss, grads, stats = loss_and_grads(x, impl="chunked", frozen_head=frozen, **options)
            assert abs(loss - expected) < 1e-9 * (1 + abs(expected)), (objective, plan)
            for name in ("hidden",) if frozen else grads:
                assert relative(grads[name], expected_grads[name]) < 1e-9, (name, objective, plan)
            assert stats.metrics() == pytest.approx(expected_stats.metrics(), abs=1e-9, nan_ok=True)
            torch.testing.assert_close(stats.logps, expected_stats.logps)
            torch.testing.assert_close(stats.entropy, expected_stats.entropy)


@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["randn", "confident"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_against_float64_within_eager_pytorch_s_own(dtype, scale, seed):
    for objective in (Objective(), Objective(loss_type="grpo", temperature=0.8, entropy_coef=0.01)):
        loss_errors = []
        for _ in range(8):
            x = random_inputs(B=16, T=24, H=64, V=301, dtype=dtype, scale=scale, off_policy=False)
            exact, exact_grads, exact_stats = loss_and_grads(x, torch.float64, impl="naive", objective=objective)
            eager, eager_grads, eager_stats = loss_and_grads(x, impl="naive", objective=objective)
            loss, grads, stats = loss_and_grads(x, impl="chunked", chunk_tokens=64, objective=objective)
            for name in grads:
                ours, theirs = relative(grads[name], exact_grads[name]), relative(eager_grads[name], exact_grads[name])
                assert ours <= 1.5 * theirs, (name, ours, theirs)
            for name in ("logps", "entropy"):
                ours = relative(getattr(stats, name), getattr(exact_stats, name))
                theirs = relative(getattr(eager_stats, name), getattr(exact_stats, name))
                assert ours <= 1.5 * theirs, (name, ours, theirs)
            loss_errors.append([loss - exact, eager - exact])
        ours, theirs = torch.tensor(loss_errors, dtype=torch.float64).pow(2).mean(0).sqrt()  # one scalar may be lucky
        assert ours <= 1.5 * theirs


def test_fp32_logits_make_confident_log_probs_exact(seed):
    x = random_inputs(B=8, T=16, H=64, V=301, dtype=torch.bfloat16, scale=12.0)
    logits = x["hidden"].double() @ x["weight"].double().T
    x["token_ids"] = logits.argmax(-1)
    exact = torch.log_softmax(logits, -1).amax(-1)
    for impl in ("chunked", "naive"):
        logps, _ = token_logps(x["hidden"], x["weight"], x["token_ids"], x["mask"], impl=impl, logits_fp32=True)
        assert (logps - exact)[x["mask"] == 1].abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probs_are_bitwise_the_same_with_and_without_gradients(dtype, seed):
    x = random_inputs(B=8, T=24, H=64, V=301, dtype=dtype)
    x["advantages"][::2] = 0  # reorders the tokens of the gradient route
    args = [x[k] for k in ("hidden", "weight", "token_ids", "mask")]
    with torch.no_grad():
        expected, _ = token_logps(*args, temperature=0.9, chunk_tokens=32)
    args[0].requires_grad_(), args[1].requires_grad_()
    for objective in (
        Objective(temperature=0.9),
        Objective(temperature=0.9, importance_sampling_level="sequence"),
        Objective(temperature=0.9, top_entropy_quantile=0.5),
    ):
        for old_logps in (None, expected):
            _, stats = grpo_loss(*args, x["advantages"], objective=objective, old_logps=old_logps, chunk_tokens=32)
            assert torch.equal(stats.logps, expected)


def test_two_runs_agree_bit_for_bit(seed):
    x = random_inputs(B=8, T=24, H=64, V=301, dtype=torch.bfloat16)
    for objective in (Objective(beta=0.1), Objective(loss_type="vespo"), Objective(top_entropy_quantile=0.5)):
        first, first_grads, _ = loss_and_grads(x, chunk_tokens=16, objective=objective)
        second, second_grads, _ = loss_and_grads(x, chunk_tokens=16, objective=objective)
        assert torch.equal(first, second) and all(torch.equal(first_grads[k], second_grads[k]) for k in first_grads)


def test_token_logps_pass_gradcheck(seed):
    x = random_inputs(B=3, T=4, H=5, V=7, bias=True)

    def f(hidden, weight, bias):
        return token_logps(
            hidden, weight, x["token_ids"], x["mask"], bias=bias, temperature=0.8, softcap=2.0, logit_scale=0.7,
            chunk_tokens=4,
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, [x[k].requires_grad_() for k in ("hidden", "weight", "bias")])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        if func.__name__.startswith(("mm.", "addmm")):
            a, b = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 2][-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return out


@pytest.mark.parametrize("options", [{}, {"importance_sampling_level": "sequence"}, {"top_entropy_quantile": 0.5}])
def test_full_logits_never_exist(options, seed):
    B, T, H, V, C = 16, 32, 8, 1009, 48
    x = random_inputs(B, T, H, V, dtype=torch.float32)
    with Largest() as chunked_run:
        loss_and_grads(x, objective=Objective(**options), chunk_tokens=C)
    with Largest() as naive_run:
        loss_and_grads(x, objective=Objective(**options), impl="naive")
    assert naive_run.numel == B * T * V
    assert chunked_run.numel == max(C * 1024, B * T * H, V * H)  # rows of 1009 logits are padded to whole cache lines


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gemms_only_for_tokens_with_a_gradient(share, seed):
    B, T, H, V, C = 16, 32, 64, 1009, 64
    x = random_inputs(B, T, H, V, dtype=torch.float32, off_policy=False)
    x["mask"][:], x["advantages"][:] = 1, 1
    x["advantages"][: int(B * (1 - share))] = 0
    head = 2 * B * T * H * V
    for frozen, budget, expected in (
        (False, None, 1 + 2 * share), (True, None, 1 + share), (False, "low", 1 + 3 * share), (True, "low", 1 + share)
    ):  # fmt: skip
        with Largest() as run:
            loss_and_grads(x, frozen_head=frozen, chunk_tokens=C, memory_budget=budget)
        assert run.flops == pytest.approx(expected * head, rel=0.01)


def test_zero_advantages_change_no_gradient(seed):
    x = random_inputs(off_policy=True)
    for objective in (Objective(), Objective(beta=0.1), Objective(loss_type="cispo"), Objective(entropy_coef=0.1)):
        x["advantages"][:] = torch.tensor([0.0, 1.0, 0.0, -2.0, 0.0])
        expected = loss_and_grads(x, impl="naive", objective=objective)
        got = loss_and_grads(x, impl="chunked", chunk_tokens=4, objective=objective)
        assert relative(got[0], expected[0]) < 1e-9 and relative(got[1]["hidden"], expected[1]["hidden"]) < 1e-9


@pytest.mark.parametrize("impl", ["naive", "chunked"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_scored_gives_exact_zeros(loss_type, impl, seed):
    x = random_inputs(dtype=torch.bfloat16, bias=True)
    x["mask"][:] = 0
    x["hidden"][:] = torch.nan
    for options in ({}, {"importance_sampling_level": "sequence"}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.1}):
        objective = Objective(loss_type=loss_type, max_completion_length=9, beta=0.1, **options)
        loss, grads, stats = loss_and_grads(x, impl=impl, objective=objective)
        assert loss == 0 and all(torch.all(g == 0) for g in grads.values())
        assert torch.all(stats.logps == 0)
    x = {k: v[:, :0] if k not in ("weight", "bias", "advantages") else v for k, v in x.items()}  # empty completions
    loss, grads, _ = loss_and_grads(x, impl=impl, objective=Objective(loss_type=loss_type, max_completion_length=9))
    assert loss == 0 and torch.all(grads["weight"] == 0)


@pytest.mark.parametrize("impl", ["naive", "chunked"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_garbage_under_the_mask_has_no_effect(loss_type, impl, seed):
    x = random_inputs()
    objective = Objective(loss_type=loss_type, max_completion_length=9, beta=0.1, off_policy_mask_threshold=0.1)
    expected, expected_grads, _ = loss_and_grads(x, impl=impl, objective=objective)
    padding = x["mask"] == 0
    x["hidden"][padding] = torch.nan
    x["token_ids"][padding] = -100
    x["old_logps"][padding] = -1e30
    x["ref_logps"][padding] = -torch.inf
    x["importance_ratio"][padding] = torch.nan
    loss, grads, _ = loss_and_grads(x, impl=impl, objective=objective)
    assert torch.equal(loss, expected)
    assert torch.equal(grads["weight"], expected_grads["weight"])
    assert torch.equal(grads["hidden"], expected_grads["hidden"])


@pytest.mark.parametrize("impl", ["naive", "chunked"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_hidden_states_are_not_hidden(impl, bad, seed):
    x = random_inputs(off_policy=False)
    x["mask"][3, 2] = 1
    x["hidden"][3, 2] = bad
    loss, _, _ = loss_and_grads(x, impl=impl)
    assert not torch.isfinite(loss)


def test_forbidden_tokens_of_minus_infinity(seed):
    x = random_inputs(bias=True)
    x["bias"][:5] = -torch.inf
    x["token_ids"].clamp_(min=5)
    objective = Objective(entropy_coef=0.1, beta=0.1)
    expected, _, _ = loss_and_grads(x, impl="naive", objective=objective)
    loss, grads, _ = loss_and_grads(x, impl="chunked", chunk_tokens=8, objective=objective)
    assert torch.isfinite(loss) and relative(loss, expected) < 1e-9
    assert all(torch.isfinite(g).all() for g in grads.values()) and torch.all(grads["weight"][:5] == 0)


def test_frozen_heads_and_detached_states(seed):
    x = random_inputs(bias=True)
    _, full, _ = loss_and_grads(x)
    _, frozen, _ = loss_and_grads(x, frozen_head=True)
    assert relative(frozen["hidden"], full["hidden"]) < 1e-12 and frozen["weight"] is None and frozen["bias"] is None
    for budget in (None, "low"):
        weight = x["weight"].clone().requires_grad_()
        args = [weight if k == "weight" else x[k] for k in ("hidden", "weight", "token_ids", "mask", "advantages")]
        rest = {k: v for k, v in x.items() if k in ("bias", "ref_logps", "old_logps", "importance_ratio")}
        grpo_loss(*args, **rest, memory_budget=budget)[0].backward()
        assert relative(weight.grad, full["weight"]) < 1e-12 and x["hidden"].grad is None


def test_tied_embeddings_add_up(seed):
    x = random_inputs(off_policy=False)
    ids, table = torch.randint(0, 37, (5, 9)), x["weight"]
    grads = {}
    for impl in ("naive", "chunked"):
        leaf = table.clone().requires_grad_()
        grpo_loss(leaf[ids], leaf, x["token_ids"], x["mask"], x["advantages"], impl=impl)[0].backward()
        grads[impl] = leaf.grad
    assert relative(grads["chunked"], grads["naive"]) < 1e-9


def test_autocast_and_an_fp32_head(seed):
    x = random_inputs(B=8, T=16, H=64, V=301, dtype=torch.float32, off_policy=False)
    in_bf16 = {k: v.bfloat16() if k in ("hidden", "weight") else v for k, v in x.items()}
    expected = loss_and_grads(in_bf16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grads, stats = loss_and_grads(x)
    assert torch.equal(stats.logps, expected[2].logps) and grads["weight"].dtype == torch.float32
    assert relative(grads["weight"], expected[1]["weight"]) < 3e-3  # the cast of dW to bf16 is all that differs
    half = {**in_bf16, "weight": x["weight"]}
    exact = loss_and_grads({**in_bf16, "weight": x["weight"].double(), "hidden": in_bf16["hidden"].double()})
    loss, grads, _ = loss_and_grads(half)
    assert grads["hidden"].dtype == torch.bfloat16 and relative(grads["weight"], exact[1]["weight"]) < 1e-5
    assert abs(loss - exact[0]) < 1e-5


@pytest.mark.parametrize("impl", ["naive", "chunked"])
def test_fp16_keeps_gradients_that_a_batch_average_makes_tiny(impl, seed):
    x = random_inputs(B=8, T=16, H=64, V=301, dtype=torch.float16, off_policy=False)
    options = dict(impl=impl, num_items=2.0**22, grad_scale=2.0**20)
    _, exact, _ = loss_and_grads(x, torch.float64, **options)
    _, grads, _ = loss_and_grads(x, **options)
    assert relative(grads["hidden"], exact["hidden"]) < 5e-3 and relative(grads["weight"], exact["weight"]) < 5e-3


@pytest.mark.parametrize("budget", [None, "low"])
def test_fp16_has_room_for_large_ratios(budget, seed):
    x = random_inputs(B=4, T=8, H=16, V=200, dtype=torch.float16)
    x["mask"][:], x["advantages"] = 1, -torch.ones(4)
    del x["importance_ratio"], x["ref_logps"]
    _, _, stats = loss_and_grads(x, torch.float64, impl="naive")
    x["old_logps"] = stats.logps.float() - 7  # ratios of 1,100, and nothing clips them
    _, exact, _ = loss_and_grads(x, torch.float64, impl="naive")
    _, grads, _ = loss_and_grads(x, memory_budget=budget)
    assert all(torch.isfinite(g).all() and relative(g, exact[k]) < 2e-3 for k, g in grads.items())


@pytest.mark.parametrize("impl", ["naive", "chunked"])
def test_fp16_has_room_for_large_advantages(impl, seed):
    x = random_inputs(B=8, T=16, H=64, V=301, dtype=torch.float16, off_policy=False)
    x["advantages"] = torch.randn(8) * 1000
    _, exact, _ = loss_and_grads(x, torch.float64)
    _, grads, _ = loss_and_grads(x, impl=impl)
    assert relative(grads["hidden"], exact["hidden"]) < 5e-3 and relative(grads["weight"], exact["weight"]) < 5e-3


def test_many_chunks_do_not_add_up_rounding_errors(seed):
    x = random_inputs(B=16, T=48, H=64, V=301, dtype=torch.bfloat16, off_policy=False)
    _, exact, _ = loss_and_grads(x, torch.float64)
    errors = [relative(loss_and_grads(x, chunk_tokens=C)[1]["weight"], exact["weight"]) for C in (4, 1024)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("factor", [1 / 3, 1 / 7])
def test_bf16_gradients_keep_their_scale(factor, seed):
    x = random_inputs(B=16, T=48, H=64, V=301, dtype=torch.bfloat16, off_policy=False)
    _, exact, _ = loss_and_grads(x, torch.float64, grad_scale=factor)
    _, grads, _ = loss_and_grads(x, grad_scale=factor)
    for name, grad in grads.items():  # the projection on the exact gradient shows a common factor, not the noise
        g, e = grad.double().flatten(), exact[name].double().flatten()
        assert abs((g @ e) / (e @ e) - 1) < 3e-4, name


def test_a_bias_with_fp32_logits(seed):
    x = random_inputs(B=8, T=16, H=64, V=301, dtype=torch.bfloat16, bias=True, off_policy=False)
    _, exact, exact_stats = loss_and_grads(x, torch.float64)
    _, grads, stats = loss_and_grads(x, logits_fp32=True)
    assert relative(stats.logps, exact_stats.logps) < 1e-5
    assert all(relative(grads[name], exact[name]) < 5e-3 for name in grads)


def test_vespo_weighs_ratios_of_zero(seed):
    x = random_inputs()
    x["importance_ratio"][:, ::2] = 0
    objective = Objective(loss_type="vespo")
    expected, got = (loss_and_grads(x, impl=impl, objective=objective) for impl in ("naive", "chunked"))
    assert relative(got[1]["hidden"], expected[1]["hidden"]) < 1e-9


@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("zeros", ["advantages", "importance_ratio"])
def test_sequence_ratios_reach_tokens_whose_own_loss_is_zero(zeros, off_policy, seed):
    x = random_inputs(off_policy=off_policy)
    x["advantages"], x["importance_ratio"] = torch.randn(5, 9), torch.rand(5, 9) + 0.5
    x[zeros][:, ::2] = 0
    for loss_type in ("grpo", "cispo", "sapo", "vespo"):
        objective = Objective(loss_type=loss_type, importance_sampling_level="sequence")
        expected = loss_and_grads(x, impl="naive", objective=objective)[1]
        for C in (4, 64):
            got = loss_and_grads(x, impl="chunked", chunk_tokens=C, objective=objective)[1]
            assert all(relative(got[name], expected[name]) < 1e-9 for name in got), (loss_type, C)


def test_without_gradients(seed):
    x = random_inputs()
    expected, _, _ = loss_and_grads(x)
    for context in (torch.no_grad, torch.inference_mode):
        for objective in (Objective(), Objective(importance_sampling_level="sequence")):
            with context():
                loss, _ = grpo_loss(**x, objective=objective)
            assert not loss.requires_grad and torch.isfinite(loss)
        with context():
            on_policy = {k: v for k, v in x.items() if k not in ("old_logps", "importance_ratio")}
            assert not grpo_loss(**on_policy)[0].requires_grad
            assert torch.equal(grpo_loss(**x)[0], expected)


@pytest.mark.parametrize("options", [{}, {"top_entropy_quantile": 0.5}])
def test_second_derivatives_are_refused(options, seed):
    x = random_inputs(off_policy=False)
    hidden = x["hidden"].requires_grad_()
    loss, _ = grpo_loss(**x, objective=Objective(**options))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_second_backward_pass_raises(seed):
    x = random_inputs(off_policy=False)
    x["hidden"].requires_grad_()
    loss, _ = grpo_loss(*(x[k] for k in ("hidden", "weight", "token_ids", "mask", "advantages")))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_loss_scales_with_what_stands_upstream(seed):
    x = random_inputs()
    third = lambda *a, **k: (lambda loss, stats: (loss / 3, stats))(*grpo_loss(*a, **k))  # noqa: E731
    _, whole, _ = loss_and_grads(x)
    _, part, _ = loss_and_grads(x, loss_fn=third)
    assert relative(part["hidden"] * 3, whole["hidden"]) < 1e-12


def test_entropies_of_all_ranks_set_the_top_quantile(seed):
    x = random_inputs(off_policy=False)
    objective = Objective(top_entropy_quantile=0.5)
    high = lambda entropy: torch.cat([entropy, torch.full_like(entropy, 100.0)])  # noqa: E731
    loss, grads, _ = loss_and_grads(x, objective=objective, gather=high)
    assert loss == 0 and torch.all(grads["hidden"] == 0)  # another rank holds every token of the top half


def test_chunks_of_whole_sequences():
    scored = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    sequences = ((3, True), (1, True), (0, False), (2, False), (4, True))
    position, spans = chunked.whole_sequences(scored, sequences, 4)
    assert spans == [(0, 4, True), (4, 8, True), (8, 10, False)]  # the inactive sequence goes last, by itself
    assert position.tolist() == [16, 17, 18, 19, 0, 1, 2, 4, 12, 13]


def test_states_that_are_slices_of_longer_sequences_are_not_copied(seed):
    x = random_inputs(B=4, T=12, H=16, V=50, dtype=torch.float32, off_policy=False)
    longer = torch.randn(4, 20, 16)
    longer[:, 5:17] = x["hidden"]
    expected = loss_and_grads(x, frozen_head=True)
    longer.requires_grad_()
    loss, _ = grpo_loss(longer[:, 5:17], *(x[k] for k in ("weight", "token_ids", "mask", "advantages")))
    loss.backward()
    assert torch.equal(longer.grad[:, 5:17], expected[1]["hidden"])
    rows, index = workspace._flat(longer[:, 5:17], torch.arange(48))
    assert rows.data_ptr() == longer[:, 5:].data_ptr() and torch.equal(rows[index].view(4, 12, 16), longer[:, 5:17])


def test_the_naive_head_plans_nothing(seed):
    x = random_inputs()
    expected, got = (loss_and_grads(x, impl="naive", **more) for more in ({}, dict(chunk_tokens=4, memory_budget=1)))
    assert torch.equal(expected[0], got[0]) and torch.equal(expected[1]["hidden"], got[1]["hidden"])
    with pytest.raises(ValueError, match="memory_budget=1 bytes"):
        loss_and_grads(x, memory_budget=1)


@pytest.mark.parametrize("plan", [Plan(16, True), Plan(16, False, 16)])
def test_a_transposed_head_in_bf16(plan, seed, monkeypatch):
    x = random_inputs(dtype=torch.bfloat16)
    monkeypatch.setattr(loss_module, "choose", lambda *_: plan)
    expected = loss_and_grads(x)[1]
    transposed = loss_and_grads(x | {"weight": x["weight"].t().contiguous().t()})[1]
    assert all(relative(transposed[name], expected[name]) < 2e-2 for name in expected)


@pytest.mark.parametrize(
    "options", [{}, dict(softcap=3.0), dict(bias=True), dict(logits_fp32=True, dtype=torch.bfloat16)]
)
@pytest.mark.parametrize("frozen", [True, False])
def test_an_adapter_on_the_head(frozen, options, seed, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 16)
    dtype = options.get("dtype", torch.float64)
    x = random_inputs(dtype=dtype, bias="bias" in options, off_policy=False)
    options = {k: v for k, v in options.items() if k not in ("dtype", "bias")}
    states, weight = torch.randn(5, 9, 4).to(dtype), torch.randn(37, 4).mul(0.3).to(dtype)

    def run(**more):
        leaves = [t.clone().requires_grad_() for t in (x["hidden"], states, weight)]
        head = x["weight"].clone().requires_grad_(not frozen)
        arguments = {k: v for k, v in x.items() if k not in ("hidden", "weight")} | options | more
        loss, _ = grpo_loss(leaves[0], head, lora=leaves[1:], **arguments)
        loss.backward()
        return [loss.detach(), *(t.grad for t in leaves), *([] if frozen else [head.grad])]

    expected = run(impl="naive")
    limit = 1e-9 if dtype == torch.float64 else 2e-2
    for objective in (Objective(), Objective(entropy_coef=0.1), Objective(importance_sampling_level="sequence")):
        expected = run(impl="naive", objective=objective)
        for more in ({}, dict(memory_budget="low"), dict(chunk_tokens=8), dict(chunk_tokens=8, memory_budget="low")):
            for got, wanted in zip(run(objective=objective, **more), expected, strict=True):
                assert relative(got, wanted) < limit, (objective, more)


def bad(**change):
    def apply(x):
        return {**x, **{k: v(x) if callable(v) else v for k, v in change.items()}}

    return apply


@pytest.mark.parametrize("impl", ["naive", "chunked"])
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (bad(hidden=lambda x: x["hidden"][0]), {}, "hidden: got shape (9, 16)"),
        (bad(weight=lambda x: x["weight"][:, :-1]), {}, "weight: got shape (37, 15), expected shape (V, 16)"),
        (bad(token_ids=lambda x: x["token_ids"][:, 1:]), {}, "token_ids: got shape (5, 8), expected shape (5, 9)"),
        (bad(token_ids=lambda x: x["token_ids"].float()), {}, "token_ids"),
        (bad(token_ids=lambda x: x["token_ids"] + 37), {}, "outside the vocabulary [0, 37)"),
        (bad(token_ids=lambda x: x["token_ids"] - 37), {}, "outside the vocabulary [0, 37)"),
        (bad(mask=lambda x: x["mask"][:1]), {}, "mask: got shape (1, 9)"),
        (bad(advantages=lambda x: x["advantages"][:-1]), {}, "advantages: got shape (4,)"),
        (bad(old_logps=lambda x: x["old_logps"][:, :1]), {}, "old_logps: got shape (5, 1)"),
        (bad(ref_logps=lambda x: x["ref_logps"].T), {}, "ref_logps: got shape (9, 5)"),
        (bad(ref_logps=None), {"objective": Objective(beta=0.1)}, "ref_logps"),
        (bad(importance_ratio=lambda x: x["importance_ratio"][:, :2]), {}, "importance_ratio: got shape (5, 2)"),
        (bad(bias=lambda x: torch.zeros(36)), {}, "bias: got shape (36,)"),
        (bad(lora=(torch.ones(5, 9, 2),)), {}, "lora: got (tensor("),
        (bad(lora=(torch.ones(()), torch.ones(37, 1))), {}, "lora: got shape (), expected states of shape (5, 9, r)"),
        (bad(lora=(torch.ones(5, 9, 0), torch.ones(37, 0))), {}, "lora: got shape (5, 9, 0)"),
        (bad(lora=(torch.ones(5, 9, 2), torch.ones(37, 2).int())), {}, "lora: got torch.int32"),
        (bad(), {"chunk_tokens": 0}, "chunk_tokens: got 0"),
        (bad(), {"chunk_tokens": 2.5}, "chunk_tokens: got 2.5"),
        (bad(), {"chunk_tokens": "all"}, "chunk_tokens: got 'all'"),
        (bad(), {"backend": "cuda"}, "backend='cuda'"),
        (bad(), {"softcap": 0.0}, "softcap=0.0"),
        (bad(), {"softcap": float("inf")}, "softcap=inf"),
        (bad(), {"logit_scale": None}, "logit_scale=None"),
        (bad(), {"num_items": 0}, "num_items: got 0"),
        (bad(), {"num_items": torch.ones(2)}, "num_items: got shape (2,)"),
        (bad(), {"objective": "grpo"}, "objective: got 'grpo'"),
        (bad(mask=[[1]]), {}, "mask: got [[1]]"),
        (bad(token_ids=lambda x: x["token_ids"].to(torch.uint8)), {}, "token_ids: got torch.uint8"),
        (bad(hidden=lambda x: x["hidden"][:0]), {}, "hidden: got shape (0, 9, 16)"),
    ],
)
def test_bad_input_names_the_argument_and_what_was_expected(change, options, message, impl, seed):
    with pytest.raises(ValueError) as error:
        loss_and_grads(change(random_inputs()), impl=impl, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_type", "gpro"),
        ("importance_sampling_level", "batch"),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("top_entropy_quantile", 0.0),
        ("top_entropy_quantile", 1.5),
        ("delta", 0.0),
        ("epsilon", None),
        ("epsilon", -0.1),
        ("temperature", "1"),
        ("temperature", float("inf")),
        ("beta", float("nan")),
        ("sapo_temperature_neg", 0.0),
    ],
)
def test_bad_objectives_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        Objective(**{field: value})


def test_a_quantised_weight_is_refused(seed):
    x = random_inputs(off_policy=False)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"weight: got {dtype}.*a quantised head cannot be read"):
            grpo_loss(**(x | {"weight": x["weight"].to(dtype)}))


def test_dr_grpo_needs_its_length_and_vespo_its_ratios(seed):
    with pytest.raises(ValueError, match="max_completion_length"):
        Objective(loss_type="dr_grpo")
    x = random_inputs()
    x["importance_ratio"] = x["importance_ratio"][:, :1]
    with pytest.raises(ValueError, match="importance_ratio"):
        loss_and_grads(x, objective=Objective(loss_type="vespo"))
    with pytest.raises(ValueError, match="impl"):
        loss_and_grads(x, impl="fast")
    with pytest.raises(ValueError, match="temperature"):
        token_logps(*(x[k] for k in ("hidden", "weight", "token_ids", "mask")), temperature=0)


def test_options_are_fields_of_the_config():
    from dataclasses import fields

    from trl import GRPOConfig

    config = {f.name: f.default for f in fields(GRPOConfig)}
    ours = {f.name: f.default for f in fields(Objective)}
    assert set(ours) <= set(config)
    differ = {name for name in ours if ours[name] != config[name]}
    assert differ <= {"max_completion_length"}, differ
