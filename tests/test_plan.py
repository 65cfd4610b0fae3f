"""The planner: what it chooses by shape, memory and route, and what it says that takes."""

import random
import time

import pytest

from grpo_lab.plan import Plan, Problem, bins, choose


def problem(n=38_694, hidden=1024, vocab=151_936, trains=True, device="cuda", itemsize=2, sequences=None):
    batch = -(-n // 600)
    return Problem(batch, 1024, n, hidden, vocab, itemsize, itemsize, hidden * trains, device, sequences)


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (dict(), Plan(3072, True)),
        (dict(trains=False), Plan(1024, True)),
        (dict(n=256), Plan(256, True)),  # one chunk
        (dict(n=256, trains=False), Plan(256, True)),  # many launches for few rows would take longer
        (dict(n=131_072), Plan(3072, True)),
        (dict(n=16_384, hidden=4096, trains=False), Plan(1024, True)),
        (dict(n=0), Plan(16, True)),
        (dict(n=4_000, vocab=115, device="cpu", itemsize=4), Plan(4000, True)),
        (dict(n=8_192, vocab=32_000, device="cpu", itemsize=4), Plan(256, True)),
        (dict(n=8_192, vocab=32_000, device="cpu", itemsize=4, trains=False), Plan(1024, False)),
    ],
)
def test_choices(options, plan):
    assert choose(problem(**options)) == plan


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_budget_is_kept_and_more_memory_is_never_slower(trains, device):
    p = problem(trains=trains, device=device)
    least = choose(p, memory_budget="low")
    plans = [choose(p, memory_budget=b) for b in range(p.peak(least), 3 << 30, 64 << 20)]
    budgets = range(p.peak(least), 3 << 30, 64 << 20)
    assert all(p.peak(plan) <= budget for plan, budget in zip(plans, budgets, strict=True))
    costs = [p.cost(plan) for plan in plans]
    assert costs == sorted(costs, reverse=True) and (device == "cpu" or len(set(plans)) > 1)
    assert bool(least.slices) == trains and p.peak(least) < p.peak(choose(p))


def test_a_budget_that_nothing_fits_is_refused_with_what_is_needed():
    with pytest.raises(ValueError, match=r"memory_budget=1,000 bytes: the leanest plan for this batch needs \d+,"):
        choose(problem(), memory_budget=1000)


def test_little_free_memory_makes_lean_plans_and_never_an_error():
    p = problem()
    plans = [choose(p, free_bytes=free << 20) for free in (100_000, 1_600, 800, 100)]
    assert [plan.slices > 0 for plan in plans] == [False, False, True, True]
    assert p.peak(plans[1]) < p.peak(plans[0]) and p.peak(plans[2]) <= 0.9 * (800 << 20)


def test_a_chunk_that_is_asked_for_is_used():
    assert choose(problem(), 1000) == Plan(1000, True) and choose(problem(), 1000, "low") == Plan(1000, True, 1000)
    assert choose(problem(trains=False), 1000) == Plan(1000, False)
    assert choose(problem(n=100), 1000) == Plan(112, True)
    assert choose(problem(), 1000, 500 << 20) == Plan(1000, True, 1000)  # dW in fp32 would not fit


def test_chunks_hold_whole_sequences_where_that_costs_nothing():
    long = tuple((3900, True) for _ in range(10))
    assert choose(problem(n=39_000, sequences=long)) == Plan(4096, True)  # 3072 would take two phases
    assert choose(problem(n=39_000, trains=False, sequences=long)).C >= 3900
    half = tuple((1100, True) for _ in range(36))  # one in 2048 rows, three in 4096
    assert choose(problem(n=39_600, sequences=half)).C == 4096


def test_the_low_setting_is_near_the_floor():
    for trains, floor in ((True, 64 * 1024 * 1024 * 2 + 151_936 * 1024 * 2), (False, 64 * 1024 * 1024 * 2)):
        p = Problem(64, 1024, 38_694, 1024, 151_936, 2, 2, 1024 * trains, "cuda")
        assert p.peak(choose(p, memory_budget="low")) < 1.8 * floor
        tile = 2048 * 8192 * 2
        assert p.peak(choose(p, memory_budget=int(1.2 * (floor + tile)))) <= 1.2 * (floor + tile)


def test_an_adapter_on_the_head_takes_no_memory_for_the_frozen_weight():
    p = Problem(2, 32, 64, 512, 40_000, 4, 4, 8, "cpu")
    assert p.peak(choose(p, memory_budget=40 << 20)) <= 40 << 20


def test_bins_hold_every_sequence_once_and_thousands_are_planned_quickly(seed):
    rng = random.Random(seed)
    sequences = tuple((rng.randint(0, 2000), rng.random() < 0.7) for _ in range(4096))
    packed = bins(sequences, 4096)
    assert all(tokens == sum(sequences[i][0] for i in members) <= 4096 for tokens, _, members in packed)
    assert all(sequences[i][1] == active for _, active, members in packed for i in members)
    assert sorted(i for *_, members in packed for i in members) == [i for i, s in enumerate(sequences) if s[0]]
    assert len(packed) <= 1.01 * sum(tokens for tokens, _ in sequences) / 4096 + 2
    start = time.perf_counter()
    choose(problem(n=sum(tokens for tokens, _ in sequences), sequences=sequences))
    assert time.perf_counter() - start < 1.5  # the device has nothing to do meanwhile
