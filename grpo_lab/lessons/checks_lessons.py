"""The checks of notebooks 01, 04 and 05: bytes counted, coefficients derived by hand, rewards written.

As in ``checks.py``, which collects them; ``grading.py`` compares.
"""

import torch

from grpo_lab.lessons.grading import check, compare, fail, generator


def _numbers(name, got, count):
    """What a function gave for ``count`` cases, as a tensor."""
    if not isinstance(got, (list, tuple)):
        fail(f"{name}: got {'None' if got is None else type(got).__name__}, expected a list of {count} numbers")
    if None in got:
        fail(f"{name}[{list(got).index(None)}]: got None; does the function end with `return`?")
    return torch.tensor([float(x) for x in got], dtype=torch.float64)


def _shapes(count):
    """Random (B, T, H, V), as a list of dicts."""
    draw = torch.rand(count, 4, generator=generator(), dtype=torch.float64)
    low, high = torch.tensor([[2, 64, 256, 1000], [64, 4096, 4096, 256000]], dtype=torch.float64)
    return [dict(zip("BTHV", map(int, row))) for row in low + draw * (high - low)]


def _words(shape):
    return ", ".join(f"{name} = {value}" for name, value in shape.items())


@check
def logits_bytes(function):
    """01: bytes of one copy of the logits, (B, T, V, dtype) -> a whole number."""
    cases = [(shape, dtype) for shape in _shapes(3) for dtype in (torch.float32, torch.bfloat16)]
    got = [function(shape["B"], shape["T"], shape["V"], dtype) for shape, dtype in cases]
    numbers = torch.tensor([s["B"] * s["T"] * s["V"] for s, _ in cases], dtype=torch.float64)
    sizes = torch.tensor([dtype.itemsize for _, dtype in cases], dtype=torch.float64)
    compare("bytes", _numbers("bytes", got, len(cases)), numbers * sizes,
            lambda i: f"{_words(cases[i][0])}, {cases[i][1]}", [
        (numbers, "These are the numbers of the table, not their bytes."),
        (4 * numbers, "A bf16 number takes 2 bytes: the dtype knows, dtype.itemsize."),
        (8 * numbers * sizes, "These are bits: a byte has eight of them."),
        (numbers * sizes / torch.tensor([s["B"] for s, _ in cases]), "Each of the B answers has its own rows."),
    ])  # fmt: skip


@check
def answers_that_fit(function):
    """01: how many answers the naive loss can hold, (card, T, H, V) -> a whole number."""
    cards, told = [gib << 30 for gib in (16, 24, 40, 80)], ()
    while len({tuple(numbers.tolist()) for numbers, _ in told}) < 7:  # until every mistake gives numbers of its own
        shapes = _shapes(4)
        T, H, V = (torch.tensor([s[name] for s in shapes], dtype=torch.float64) for name in "THV")
        card, head, states, logits = torch.tensor(cards, dtype=torch.float64), 2 * V * H, 2 * T * H, 2 * T * V
        exact = (card - head) / (states + 2 * logits)
        told = [
            (exact.floor(), ""),
            (exact, "Half an answer does not fit: round down."),
            (exact.ceil(), "Rounded up, the last answer does not fit: round down."),
            ((card / (states + 2 * logits)).floor(), "The head, V x H numbers, needs its place too."),
            (((card - head) / (states + logits)).floor(), "That is one copy of the logits: the gradient is as large."),
            (((card - head) / (2 * logits)).floor(), "Each answer brings its hidden states too, T x H numbers."),
            (((card - 2 * head) / (2 * states + 4 * logits)).floor(), "A bf16 number takes 2 bytes, not 4."),
        ]
    got = [function(card, s["T"], s["H"], s["V"]) for card, s in zip(cards, shapes)]
    words = [f"a card of {c >> 30} GiB, T = {s['T']}, H = {s['H']}, V = {s['V']}" for c, s in zip(cards, shapes)]
    got = _numbers("answers", got, len(cards))
    compare("answers", got, exact.floor(), lambda i: words[i], told[1:], tolerance=0)


def _tokens(count=9):
    """Log-probs of ``count`` tokens, float64, and of an older policy: ratios inside and outside of 0.8 to 1.2, with
    advantages of both signs at each."""
    rng = generator()
    logps = -3 * torch.rand(count, generator=rng, dtype=torch.float64)
    ratio = torch.tensor([0.5, 0.5, 0.9, 0.9, 1.0, 1.1, 1.1, 1.6, 1.6], dtype=torch.float64)
    ratio += 0.05 * torch.rand(count, generator=rng, dtype=torch.float64)
    sign = torch.tensor([1.0, -1] * count, dtype=torch.float64)[:count]
    return logps, ratio, sign * (0.5 + torch.rand(count, generator=rng, dtype=torch.float64))


@check
def clipped_coefficients(function):
    """04: dL/dlogp of the clipped loss, (logps, old_logps, advantages, epsilon) -> (N,)."""
    for epsilon in (0.2, 0.3):
        logps, ratio, A = _tokens()
        N, leaf = len(logps), logps.clone().requires_grad_()
        r = (leaf - (logps - ratio.log())).exp()
        loss = -torch.min(r * A, r.clamp(1 - epsilon, 1 + epsilon) * A).mean()
        (exact,) = torch.autograd.grad(loss, leaf)
        inside = (ratio > 1 - epsilon) & (ratio < 1 + epsilon)
        compare("c", function(logps, logps - ratio.log(), A, epsilon), exact,
                lambda i, ratio=ratio, A=A: f"ratio {ratio[i]:.2f}, advantage {A[i]:+.2f}", [
            (-exact, "The sign is turned round: the loss is minus what is to grow."),
            (exact * N, "The loss is a mean over the N tokens."),
            (-A * ratio / N, "No token is clipped: outside of 1 ± epsilon c can be 0."),
            (-A * ratio * inside / N, "min() takes the clipped term only where it is the smaller one: that depends on "
                                      "the advantage's sign."),
            (-A * (exact != 0) / N, "The derivative of exp(x) is exp(x): the ratio stays in there."),
            (-A * ratio * (exact == 0) / N, "Turned round: the clipped tokens are those that get 0."),
        ])  # fmt: skip


@check
def kl_coefficients(function):
    """04: d/dlogp of the KL term, (logps, ref_logps, beta) -> (N,)."""
    for beta in (0.04, 0.5):
        logps, ratio, _ = _tokens()
        N, leaf, ref = len(logps), logps.clone().requires_grad_(), logps + ratio.log()
        term = beta * ((ref - leaf).exp() - (ref - leaf) - 1).mean()
        (exact,) = torch.autograd.grad(term, leaf)
        compare("c", function(logps, ref, beta), exact, lambda i, ratio=ratio: f"ref / policy {ratio[i]:.2f}", [
            (-exact, "The sign is turned round: d is ref - logp, so its derivative by logp is -1."),
            (exact * N, "The term is a mean over the N tokens."),
            (exact / beta, "beta is left out."),
            (beta * (1 - 1 / ratio) / N, "d is ref - logp, not logp - ref."),
            (beta * (ratio - ratio.log() - 1) / N, "That is the term itself: take its derivative by logp."),
            (-beta * ratio / N, "The middle part, -d, has a derivative too."),
        ])  # fmt: skip


@check
def brief(function):
    """05: minus a hundredth for each token, (completion_ids, **kwargs) -> a number for each completion."""
    rng = generator()
    lengths = [0, 1, *torch.randint(2, 60, (4,), generator=rng).tolist()]
    ids = [torch.randint(100, (n,), generator=rng).tolist() for n in lengths]
    got = _numbers("rewards", function(completions=["Tom has 2."] * len(ids), completion_ids=ids), len(ids))
    tokens = torch.tensor(lengths, dtype=torch.float64)
    compare("rewards", got, -tokens / 100, lambda i: f"{lengths[i]} tokens", [
        (tokens / 100, "The sign is turned round: this would pay for length."),
        (-tokens, "A hundredth for each token, so that an answer of 40 tokens costs 0.4."),
    ])  # fmt: skip


@check
def marked_reward(function):
    """05: 1 where the number behind the last mark is right, (completions, answer, **kwargs) -> a number for each."""
    rng = generator()
    for _ in range(3):
        n, m, k = (10 + torch.randperm(90, generator=rng)[:3]).tolist()
        cases = [
            (f"Tom has {n} eggs.\n#### {n}", 1, "an honest answer"),
            (f"Tom has {m} eggs.\n#### {m}", 0, "another number"),
            (f"Tom has {n} eggs.", 0, "nothing is marked, so nothing is answered"),
            (f"Tom has {n} eggs.\n#### {m}", 0, "the number stands somewhere, the answer is another"),
            (f"#### {n}{k}", 0, "a longer number that only begins with the right one"),
            (f"#### {k}{n}", 0, "a longer number that only ends with the right one"),
            (f"#### -{n}", 0, "a sign counts"),
            (f"#### {n} or {m}", 0, "a hedge: nothing else may stand behind the mark"),
            (f"#### {m} {n}", 0, "a hedge: nothing else may stand behind the mark"),
            (f"#### {n}\n#### {m}", 0, "the last mark counts, and it is wrong"),
            (f"#### {m}, no:\n#### {n}", 1, "the last mark counts: it corrects itself"),
            (f"####{n}\n", 1, "space around the number does no harm, nor does its lack"),
            ("", 0, "an empty completion"),
        ]
        texts, wanted, reasons = zip(*cases)
        got = function(completions=list(texts), answer=[str(n)] * len(texts))
        compare("rewards", _numbers("rewards", got, len(texts)), torch.tensor(wanted).double(),
                lambda i, n=n, texts=texts, reasons=reasons: f"{texts[i]!r}, right is {n}: {reasons[i]}")  # fmt: skip
