"""The trainer's loss against TRL 1.16's own ``_compute_loss``: loss, gradients and every logged metric.

Every option of the objective and every kind of batch, with each loss type and ratio level, on each route. TRL's formula
in float64 on the textbook head is the reference: a float64 run must agree to the rounding of its fp32 counts, and an
fp32 run as well as TRL's own does.
"""

import random

import pytest
import torch
from heads import loss_and_grads, objectives, random_inputs, relative, step_loss, trl_loss

from grpo_lab import Objective
from grpo_lab.objective import LOSS_TYPES

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
IN_WINDOW = ("dapo", "cispo", "vespo")
# Chunks of 1 to 8 tokens split the longest sequence, chunks of 16 hold whole ones, "auto" is one chunk of everything.
ROUTES = [dict(chunk_tokens=C, frozen_head=frozen) for C in (1, 8, 16, "auto") for frozen in (False, True)]
ROUTES += [dict(impl="naive")]


def batch():
    """Twelve ragged sequences, one empty, one of zero advantage, that drifted apart enough to move sequence ratios; the
    sampler could not tell every log-prob."""
    x = random_inputs(B=12, T=12, dtype=torch.float32)
    x["old_logps"] += 0.5 * torch.randn(12, 1)
    x["tool_mask"] = (torch.rand(12, 12) > 0.3).long()
    x["mask"][2] = 1
    x["sampling_logps"] = x["old_logps"] + 0.1 * torch.randn(12, 12)
    x["sampling_logps"][:, ::3] = torch.nan
    x["importance_ratio"] = x["importance_ratio"].masked_fill(x["mask"] * x["tool_mask"] == 0, 1.0)  # as TRL's
    return x


def o(**fields):
    return dict(objective=fields)


WINDOW = dict(accumulation=3, generation_batches=6, objective=dict(entropy_coef=0.05))  # logs the policy loss too
CASES = {  # options, inputs beside old and reference log-probs, loss types on which that makes a difference
    "on-policy": ({}, lambda x: {"old_logps": None}, LOSS_TYPES),
    "epsilon": (o(epsilon=0.05), None, CLIPPED),
    "epsilon_high": (o(epsilon_high=0.7), None, (*CLIPPED, "cispo")),
    "delta": (o(delta=1.1), None, CLIPPED),
    "kl": (o(beta=0.1, use_bias_correction_kl=False), None, LOSS_TYPES),
    "kl-corrected": (o(beta=0.1), None, LOSS_TYPES),
    "temperature": (o(temperature=0.7), None, LOSS_TYPES),
    "quantile": (o(top_entropy_quantile=0.37), None, LOSS_TYPES),
    "entropy": (o(entropy_coef=0.05), None, LOSS_TYPES),
    "quantile-entropy": (o(entropy_coef=0.05, top_entropy_quantile=0.37), None, LOSS_TYPES),
    "off-policy": (o(off_policy_mask_threshold=-0.3), None, LOSS_TYPES),
    "off-policy-sampler": (o(off_policy_mask_threshold=-0.3), ["sampling_logps"], LOSS_TYPES),
    "importance-token": ({}, ["importance_ratio"], LOSS_TYPES),
    "importance-sequence": ({}, lambda x: {"importance_ratio": x["importance_ratio"][:, :1]}, LOSS_TYPES),
    "sapo": (o(sapo_temperature_neg=2.0, sapo_temperature_pos=0.5), None, ["sapo"]),
    "vespo": (o(vespo_k_pos=1.0, vespo_lambda_pos=1.5, vespo_k_neg=0.5, vespo_lambda_neg=0.7), None, ["vespo"]),
    "max_completion_length": (o(max_completion_length=20), None, ["dr_grpo"]),
    "token-advantages": ({}, lambda x: {"advantages": torch.randn(x["mask"].shape)}, LOSS_TYPES),
    "tool-mask": ({}, ["tool_mask"], LOSS_TYPES),
    "num_items": (dict(num_items=77.0), None, IN_WINDOW),
    "accumulation": (WINDOW, None, LOSS_TYPES),
    "eval": (dict(WINDOW, training=False), None, LOSS_TYPES),
    "head": (dict(softcap=2.0, logit_scale=0.5), lambda x: {"bias": torch.randn(37)}, LOSS_TYPES),
}  # fmt: skip


def without_empty(metrics, x, objective):
    """TRL's means over sequences count one without tokens, as a ratio of 1; ours leave it out."""
    by_sequence = objective.importance_sampling_level == "sequence" or objective.loss_type == "vespo"
    if not by_sequence or x["advantages"].dim() == 2:
        return metrics
    empty = ~(x["mask"] * x.get("tool_mask", 1)).any(-1)
    epsilon_high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    counted = {"vespo/phi_seq_mean": empty.sum(), "cispo_clip_ratio": (empty & (x["advantages"] > 0)).sum()}
    counted["cispo_clip_ratio"] = counted["cispo_clip_ratio"] * (epsilon_high < 1)
    names = ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", *counted]
    B, n = len(empty), len(empty) - empty.sum()
    return metrics | {k: ((metrics[k] * B - counted.get(k, 0)) / n).item() for k in names if k in metrics}


def assert_equal(got, expected, x, options):
    loss, grads, metrics = got
    expected_loss, expected_grads, expected_metrics = expected
    assert abs(loss - expected_loss) <= 1e-6 * (1 + abs(expected_loss)), options
    for name, grad in grads.items():
        if grad is not None:
            assert relative(grad, expected_grads[name]) <= 1e-6, (name, options)
    expected_metrics = without_empty(expected_metrics, x, options["objective"])
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-6, nan_ok=True), options


PAIRS = [(case, loss_type) for case in CASES for loss_type in LOSS_TYPES]
PAIRS.remove(("importance-sequence", "vespo"))  # refused by TRL, and by us (test_loss.py): vespo sums token ratios


@pytest.mark.parametrize(("case", "loss_type"), PAIRS)
def test_every_option_on_every_route(case, loss_type, seed):
    _, extra, affected = CASES[case]
    full = batch()
    base = {k: full[k] for k in ("hidden", "weight", "token_ids", "mask", "advantages", "old_logps", "ref_logps")}
    x = base | (extra(full) if callable(extra) else {k: full[k] for k in extra or ()})
    default = dict(loss_type=loss_type, max_completion_length=12)
    if loss_type == "cispo":
        default["epsilon_high"] = 1.2  # its bound is the ratio itself
    differs = False
    for level in ("token", "sequence"):
        default["importance_sampling_level"] = level
        options = CASES[case][0] | {"objective": Objective(**default | CASES[case][0].get("objective", {}))}
        expected = loss_and_grads(x, torch.float64, loss_fn=trl_loss, **options)
        for route in ROUTES:
            got = loss_and_grads(x, torch.float64, loss_fn=step_loss, **options, **route)
            assert_equal(got, expected, x, options | route)
        eager = loss_and_grads(x, loss_fn=trl_loss, **options)
        loss, grads, _ = loss_and_grads(x, loss_fn=step_loss, chunk_tokens=8, **options)
        for name, grad in grads.items():
            # vespo raises the sum of a sequence's log-ratios to powers: an ulp of one log-prob grows tenfold
            allowed = 1.5 * relative(eager[1][name], expected[1][name]) + (5e-6 if loss_type == "vespo" else 1e-6)
            assert relative(grad, expected[1][name]) <= allowed, (name, options)
        assert abs(loss - expected[0]) <= 1.5 * abs(eager[0] - expected[0]) + 1e-6, options
        without = loss_and_grads(base, torch.float64, loss_fn=trl_loss, objective=Objective(**default))
        differs |= relative(without[1]["hidden"], expected[1]["hidden"]) > 1e-4
    assert differs == (loss_type in affected), f"{case} makes {'a' if differs else 'no'} difference to {loss_type}"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_options_together(loss_type, seed):
    rng = random.Random(seed)
    for objective in objectives(loss_type, 60, seed):
        full = batch()
        leave = [k for k in ("old_logps", "tool_mask", "sampling_logps", "importance_ratio") if rng.random() < 0.3]
        x = {k: v for k, v in full.items() if k not in leave}
        if rng.random() < 0.3:
            x["advantages"] = torch.randn(x["mask"].shape)
        if rng.random() < 0.3 and loss_type != "vespo" and "importance_ratio" in x:
            x["importance_ratio"] = x["importance_ratio"][:, :1].clone()
        if rng.random() < 0.5:
            x["bias"] = torch.randn(37)
        options = dict(objective=objective, num_items=rng.choice([None, 77.0]), softcap=rng.choice([None, 3.0]),
                       accumulation=rng.choice([1, 2]), generation_batches=rng.choice([1, 4]),
                       training=rng.random() < 0.7)  # fmt: skip
        expected = loss_and_grads(x, torch.float64, loss_fn=trl_loss, **options)
        for route in rng.sample(ROUTES, 2):
            got = loss_and_grads(x, torch.float64, loss_fn=step_loss, **options, **route)
            assert_equal(got, expected, x, options | route)


EXTREMES = {  # log ratios of a sequence's two tokens and its importance ratios: what vespo's clamps are there for
    "token above 20": ([25.0, -19.0], [1.0, 1.0]),
    "token below -20": ([-25.0, 19.0], [1.0, 1.0]),
    "sequence above 20": ([19.0, 19.0], [1.0, 1.0]),
    "sequence below log 1e-8": ([-19.0, -19.0], [1.0, 1.0]),
    "importance of 0": ([17.0, 0.0], [0.0, 1.0]),
    "importance above e^20": ([-19.5, 0.0], [2e9, 1.0]),
    "largest weight": ([13.3, 0.0], [1.0, 1.0]),
    "ordinary": ([0.2, -0.5], [0.8, 1.1]),
}


# A small power keeps the lower end from vanishing, a large one the upper end, where others overflow; a rate counts as
# 1e-4 or more.
@pytest.mark.parametrize(("power", "rate"), [(2.0, 3.0), (0.1, 0.0), (60.0, 0.0), (2430.0, 0.0)])
def test_vespo_s_clamps(power, rate, seed):
    drifts, ratios = (torch.tensor(x, dtype=torch.float64).repeat(2, 1) for x in zip(*EXTREMES.values()))
    B = len(drifts)
    x = random_inputs(B=B, T=2, off_policy=False)
    x["mask"][:] = 1
    x["advantages"] = torch.tensor([1.0, -1.0]).repeat_interleave(B // 2)
    logps = torch.log_softmax(x["hidden"] @ x["weight"].T, -1).gather(-1, x["token_ids"][..., None]).squeeze(-1)
    x |= {"old_logps": logps - drifts, "importance_ratio": ratios}
    gamma = dict(vespo_k_pos=power, vespo_lambda_pos=rate, vespo_k_neg=power, vespo_lambda_neg=rate)
    options = dict(objective=Objective(loss_type="vespo", **gamma))
    _, expected, expected_metrics = loss_and_grads(x, loss_fn=trl_loss, **options)
    _, grads, metrics = loss_and_grads(x, loss_fn=step_loss, chunk_tokens=8, **options)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    for name, grad, expected_grad in zip([*EXTREMES, *EXTREMES], grads["hidden"], expected["hidden"], strict=True):
        assert relative(grad, expected_grad) < 1e-6, name
