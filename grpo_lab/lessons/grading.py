"""What the exercises' checks (``checks.py``) are made of: comparing, naming the first wrong number, noting the try."""

import functools
import textwrap
import time

import torch

from grpo_lab.lessons import progress

NO_BF16 = "Triton's interpreter has no bf16 arithmetic: write .to(tl.float32) right after each tl.load of logits."
_record = {"path": None}


class CheckFailed(AssertionError):
    """What is wrong with an exercise. A notebook shows the message alone: the traceback would be the check's own."""

    def _render_traceback_(self):
        text = textwrap.fill(f"Not yet. {self}", 100)  # else JupyterLab breaks its lines within words
        return [text.replace("Not yet.", "\033[1mNot yet.\033[0m", 1)]  # bold: red on red is hard to read


def record(path):
    """From now on every try is noted in this file, one JSON line each (None: nowhere, as at the start)."""
    _record["path"] = path


def check(fn):
    """Makes ``fn(students_function)`` a check: says that it passed, or raises CheckFailed, and notes the try."""

    @functools.wraps(fn)
    def run(function):
        name, began, failure = fn.__name__, time.perf_counter(), None
        try:
            if not callable(function):
                fail(f"{name}: hand in the function itself, without calling it; this is a {type(function).__name__}.")
            said = fn(function)
        except NotImplementedError as error:
            failure = CheckFailed(f"{name} is not filled in: {error}")
        except Exception as error:
            failure = CheckFailed(f"{name}: {NO_BF16}") if "get_bf16" in str(error) else error
        if failure is None and said is not None:
            print(f"{name}: not checked here. {said}")
            return
        if _record["path"]:
            text = "" if failure is None else str(failure)
            text = text if isinstance(failure, (CheckFailed, type(None))) else f"{type(failure).__name__}: {text}"
            progress.note(_record["path"], name, failure is None, text[:300])
        if isinstance(failure, CheckFailed):
            raise failure from None
        if failure is not None:
            raise failure
        print(f"{name}: passed, in {time.perf_counter() - began:.1f} s")

    return run


def fail(message):
    raise CheckFailed(message)


def generator():
    """Other numbers at every try: what is right for one set of inputs alone does not pass."""
    made = torch.Generator()
    made.seed()
    return made


class Inputs:
    """Fresh states, head, ids and coefficients, and what the loss makes of them in float64."""

    def __init__(self, tokens, vocab=37, width=4, scale=3.0):
        rng = generator()
        self.hidden = torch.randn(tokens, width, generator=rng)
        self.weight = scale * torch.randn(vocab, width, generator=rng)
        self.ids = torch.randint(vocab, (tokens,), generator=rng)
        self.c = 0.5 + torch.rand(tokens, generator=rng)
        self.c[::2] *= -1
        self.logits = self.hidden.double() @ self.weight.double().T
        self.log_p = self.logits.log_softmax(-1)
        self.size = self.logits.abs().max()  # in fp32 a logit's last bit is 1e-7 of it, and so are errors of log-probs
        self.row = torch.arange(tokens)
        self.logps = self.log_p[self.row, self.ids]
        self.d_logits = -self.c.double()[:, None] * self.log_p.exp()
        self.d_logits[self.row, self.ids] += self.c.double()
        self.d_hidden = self.d_logits @ self.weight.double()
        self.d_weight = self.d_logits.T @ self.hidden.double()

    def leaves(self):
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()

    def token(self, t):
        return f"token {t}, whose id is {self.ids[t]}, of {len(self.ids)}"

    def entry(self, t, v):
        kind = "the sampled token" if v == self.ids[t] else "not the sampled token"
        return f"row {t}, {kind}, c = {self.c[t]:.3g}"


def close(got, expected, tolerance, scale):
    return (got.double() - expected).abs() <= tolerance * (expected.abs() + scale)


def compare(name, got, expected, where=None, mistakes=(), shapes=(), tolerance=1e-5, scale=1.0):
    """Fails naming the first element of ``got`` that is not ``expected`` (float64).

    where: function of an index to words about that place. mistakes: ``(result, explanation)`` of what students write;
    where one gives just what was got, the message explains. shapes: the same for a result's shape. tolerance: share of
    the element and of scale, the size of the numbers that it was computed from.
    """
    if got is None:
        fail(f"{name}: got None; does the function end with `return`?")
    if isinstance(got, (int, float)):
        got = torch.tensor(got)
    if not isinstance(got, torch.Tensor):
        fail(f"{name}: got a {type(got).__name__}, expected a tensor of shape {tuple(expected.shape)}")
    got = got.detach().cpu()
    if got.shape != expected.shape:
        hints = [text for shape, text in shapes if got.shape == shape]
        hint = hints[0] if hints else "Does the function use its arguments alone, and no variables of the notebook?"
        fail(f"{name}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}. {hint}")
    right = close(got, expected, tolerance, scale)
    if right.all():
        return
    index = tuple((~right).nonzero()[0].tolist())
    place = f"[{', '.join(map(str, index))}]" if index else ""
    message = f"{name}{place}: got {got[index]:.5g}, expected {expected[index]:.5g}"
    message += f" ({where(*index)})." if where else "."
    for other, explanation in mistakes:
        if other.shape == got.shape and close(got, other.double(), 10 * tolerance, scale).all():
            fail(f"{message} {explanation}")
    if not got[index].isfinite():
        message += " A number that is not finite: exp of more than 88 overflows fp32; subtract the row's peak first."
    fail(message)
