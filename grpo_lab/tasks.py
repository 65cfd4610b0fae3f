"""Problems with an answer that a program can check: generated word problems, and GSM8K.

`arithmetic_problems` writes one- and two-step word problems with + - * / and their worked solutions in GSM8K's style
(steps, then `#### N`); its held-out split uses operand pairs and partly wordings that no training problem contains.
`demonstrations` writes the mostly wrong solutions that the tiny policy is warm-started on. `gsm8k` reads the real data
set from the hub or from local jsonl files. Nothing here needs torch: `datasets` is loaded when a data set is made.
"""

import json
import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Sam", "Eva", "Max", "Zoe", "Leo")
OBJECTS = ("apples", "books", "cards", "coins", "cups", "eggs", "pens", "shells", "stones", "stamps", "toys", "beads")
HOLDERS = (("bag", "bags"), ("box", "boxes"), ("jar", "jars"), ("basket", "baskets"))
OPERANDS = range(2, 10)  # the second number of a step
LARGEST = 99  # of first numbers and results


def _wordings(*parts):
    """Every combination of one string from each part, as {"train": [...], "heldout": [...]}.

    About a quarter is held out, on a diagonal: each part occurs in training, only not in that combination.
    """
    found = {"train": [], "heldout": []}
    for chosen in product(*(enumerate(part) for part in parts)):
        split = "heldout" if sum(i for i, _ in chosen) % 4 == 3 else "train"
        found[split].append(" ".join(text for _, text in chosen) + ".")
    return found


def _together(*groups):
    return {split: [wording for group in groups for wording in group[split]] for split in ("train", "heldout")}


# {n} owns the things, {m} is another person, {o} the things, {h} and {hs} a holder; {a} and {b} a step's numbers.
_MORE = ("{b} more", "{b} {o}", "{b} more {o}")
_SOME = ("{b}", "{b} {o}", "{b} of them", "{b} of the {o}")
_THEM = ("them", "the {o}", "all of them", "all the {o}")
BEGIN = _wordings(
    ("{n} has", "{n} finds", "{n} buys", "{n} gets", "{n} makes"), ("{a} {o}", "{a} {o} at first", "{a} {o} today")
)
CHANGE = {
    "+": _together(
        _wordings(("{n} buys", "{n} finds", "{n} makes", "{n} gets", "{m} gives {n}"), _MORE),
        _wordings(("{m} buys", "{m} finds", "{m} makes"), _MORE, ("for {n}",)),
        _wordings(("{n} gets", "{n} buys"), _MORE, ("from {m}",)),
    ),
    "-": _together(
        _wordings(("{n} loses", "{n} sells", "{n} uses", "{n} breaks"), _SOME),
        _wordings(("{n} gives", "{n} sells"), _SOME, ("to {m}",)),
        _wordings(("{m} takes",), _SOME, ("from {n}",)),
    ),
}
BEGIN_WITH = {  # a beginning that is itself a step
    "*": _wordings(
        ("{n} has {a} {hs}", "{n} finds {a} {hs}", "{n} buys {a} {hs}"),
        ("with {b} {o}", "and there are {b} {o}"),
        ("in each", "in each {h}", "in every {h}"),
    ),
    "/": _wordings(
        (
            "{a} {o} are for {b} friends.",
            "There are {a} {o} for {b} friends.",
            "{a} {o} are shared between {b} friends.",
        ),
        ("{n} gets an equal share", "{n} takes an equal share", "{n} is one of them", "{n} is one of the friends"),
    ),
}
FINISH = {  # a last step: (who the question is about, wordings)
    "*": [
        (
            "{m}",
            _wordings(
                ("{m} has {b} times as many", "{m} finds {b} times as many", "{m} buys {b} times as many"),
                ("as {n}", "as {n} has", "{o} as {n}", "{o} as {n} has"),
            ),
        )
    ],
    "/": [
        (
            "each friend",
            _together(
                _wordings(("{n} shares",), _THEM, ("equally between {b} friends", "between {b} friends, equally")),
                _wordings(("{n} gives",), _THEM, ("equally to {b} friends", "to {b} friends, equally")),
            ),
        ),
        (
            "each {h}",
            _together(
                _wordings(("{n} puts",), _THEM, ("equally into {b} {hs}", "into {b} {hs}, equally")),
                _wordings(("{n} fills {b} {hs} equally with",), _THEM),
            ),
        ),
    ],
}
LINK = ("", "Then ", "Later ")
ASK = (
    "How many {o} does {who} have?",
    "How many {o} does {who} have now?",
    "How many {o} does {who} have in all?",
    "How many {o} does {who} have then?",
)
NEW_WORDING_SHARE = 0.5  # of the held-out problems; the others have new operands in wordings seen in training
MISREAD_SHARE = 0.3  # of the careless demonstrations; the others have wrong operators


@dataclass(frozen=True)
class Step:
    """One line of a solution: `who` has `a operator b = result` of `things`."""

    who: str
    a: int
    operator: str
    b: int
    result: int
    things: str

    def __str__(self):
        return f"{self.who} has {self.a} {self.operator} {self.b} = {self.result} {self.things}."


@dataclass(frozen=True)
class Problem:
    """A question, its right steps, and whether its wording is one of the held-out ones."""

    question: str
    steps: tuple[Step, ...]
    new_wording: bool

    @property
    def answer(self):
        return str(self.steps[-1].result)

    @property
    def solution(self):
        return write_solution(self.steps)


def write_solution(steps, marker=True):
    """The steps, one a line, and after them `#### N` unless `marker` is False."""
    lines = [str(step) for step in steps]
    return "\n".join([*lines, f"#### {steps[-1].result}"] if marker else lines)


def is_heldout(a, b):
    """Whether the operand pair {a, b}, in either order, belongs to the held-out split: one pair in seven.

    The rule is a lattice, so that every operand, sum and difference keeps most of its pairs in training.
    """
    return (3 * min(a, b) + 5 * max(a, b)) % 7 == 0


def _result(a, operator, b, pairs):
    """What the step gives, or None unless it is a whole number from 2 to LARGEST and the pair is one of `pairs`:

    "train" or "heldout" ones, "lines" (training pairs, and for * and / all), or "any".
    """
    if pairs != "any" and is_heldout(a, b) != (pairs == "heldout") and not (pairs == "lines" and operator in "*/"):
        return None
    if operator == "/" and a % b:
        return None
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[operator]
    return result if 2 <= result <= LARGEST else None


def _numbers(rng, operators, pairs):
    """Operands and results of a chain of steps, [(a, b, result), ...]: redrawn until every step is valid."""
    while True:
        value = rng.randint(2, LARGEST if operators[0] in "-/" else LARGEST // 2)
        chain = []
        for operator in operators:
            b = rng.choice(OPERANDS)
            result = _result(value, operator, b, pairs)
            if result is None:
                break
            chain.append((value, b, result))
            value = result
        else:
            return chain


def _problem(rng, split):
    new_wording = split == "heldout" and rng.random() < NEW_WORDING_SHARE
    words = "heldout" if new_wording else "train"
    operators = [rng.choice("+-*/") for _ in range(rng.choice((1, 2)))]
    owner, *others = rng.sample(NAMES, 3)
    things = rng.choice(OBJECTS)
    holders = rng.sample(HOLDERS, 2)
    who, sentences, steps = owner, [], []
    for i, (operator, (a, b, result)) in enumerate(zip(operators, _numbers(rng, operators, split), strict=True)):
        names = {"n": owner, "m": others[i], "o": things, "h": holders[i][0], "hs": holders[i][1], "a": a, "b": b}
        if i == 0 and operator in BEGIN_WITH and (len(operators) == 2 or rng.random() < 0.5):
            sentences.append(rng.choice(BEGIN_WITH[operator][words]).format(**names))
        else:
            if i == 0:
                sentences.append(rng.choice(BEGIN[words]).format(**names))
            if operator in CHANGE:
                wordings = CHANGE[operator]
            else:
                subject, wordings = rng.choice(FINISH[operator])
                who = subject.format(**names)
            sentences.append(rng.choice(LINK) + rng.choice(wordings[words]).format(**names))
        steps.append(Step(who[0].upper() + who[1:], a, operator, b, result, things))
    sentences.append(rng.choice(ASK).format(o=things, who=who))
    return Problem(" ".join(sentences), tuple(steps), new_wording)


def problems(n, seed, split="train"):
    """`n` `Problem`s; the same for a given (seed, split) on every platform.

    Raises ValueError for n < 1 and for a split other than "train" and "heldout".
    """
    if n < 1:
        raise ValueError(f"n={n}: at least one problem is needed")
    if split not in ("train", "heldout"):
        raise ValueError(f'split={split!r}: expected "train" or "heldout"')
    rng = random.Random(f"{split} {seed}")
    return [_problem(rng, split) for _ in range(n)]


def arithmetic_problems(n, seed, split="train"):
    """`n` generated word problems as a `datasets.Dataset`, the same for a given (seed, split) on every platform.

    Columns: `prompt` (chat messages), `answer` (the number as a string), `solution` (steps, then `#### N`). A step's
    first number and its result go up to 99, its second number from 2 to 9. split="heldout": no training problem and no
    demonstrated problem has any of its operand pairs, in either order, and half of its problems are in wordings that
    none of those has. Raises ValueError for n < 1 and for an unknown split.
    """
    drawn = problems(n, seed, split)
    return _dataset([p.question for p in drawn], answer=[p.answer for p in drawn], solution=[p.solution for p in drawn])


def _careless(rng, steps):
    """The same steps done carelessly; None where that has no valid result.

    Either the numbers are misread or every operator is wrong, mostly + for any other. Each line still calculates
    right, so that the warm start learns to calculate from what the line says. No line has a held-out pair with + or -;
    misread ones practise the whole tables of * and /, as `practice` does.
    """
    if rng.random() < MISREAD_SHARE:
        chain = _numbers(rng, [step.operator for step in steps], "lines")
        return [replace(s, a=a, b=b, result=result) for s, (a, b, result) in zip(steps, chain, strict=True)]
    value, changed = steps[0].a, []
    for step in steps:
        operator = rng.choice([o for o in 12 * "+" + "-*/" if o != step.operator])
        result = _result(value, operator, step.b, "train")
        if result is None:
            return None
        changed.append(replace(step, a=value, operator=operator, result=result))
        value = result
    return changed


def demonstrations(n, seed, right=0.33, unmarked=0.10):
    """`n` solved training problems, most of them wrongly: columns `prompt`, `completion` (text), `answer` (right).

    A share `right` has the right operators and the `#### N` line, a share `unmarked` lacks that line, and the others
    are careless: wrong operators, mostly +, or misread numbers. Unmarked ones are careless in the same proportion.
    Raises ValueError unless right + unmarked lies in 0..1 and n >= 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: at least one demonstration is needed")
    if min(right, unmarked) < 0 or right + unmarked > 1:
        raise ValueError(f"right={right}, unmarked={unmarked}: expected non-negative shares that add to 1 at most")
    rng = random.Random(f"demonstrations {seed}")
    questions, completions, answers = [], [], []
    for _ in range(n):
        marker = rng.random() >= unmarked
        careless = rng.random() * (1 - unmarked) >= right
        steps = None
        while steps is None:
            problem = _problem(rng, "train")
            steps = _careless(rng, problem.steps) if careless else problem.steps
        questions.append(problem.question)
        completions.append(write_solution(steps, marker))
        answers.append(problem.answer)
    return _dataset(questions, completion=completions, answer=answers)


def practice(n, seed):
    """`n` pages of two to six right sums, columns `prompt` and `completion`, to learn to calculate from.

    They spread over all valid sums, held-out pairs too: a small model knows a sum by heart or not at all. What is held
    out is a pair in a problem: no word problem of the warm start or of GRPO has it as its right step.
    """
    rng = random.Random(f"practice {seed}")
    sums = {
        operator: [
            (a, operator, b, result)
            for a in range(2, LARGEST + 1)
            for b in OPERANDS
            if (result := _result(a, operator, b, "any")) is not None
        ]
        for operator in "+-*/"
    }
    pages = [
        [Step(rng.choice(NAMES), *rng.choice(sums[rng.choice("+-*/")]), rng.choice(OBJECTS)) for _ in range(lines)]
        for lines in rng.choices(range(2, 7), k=n)
    ]
    return _dataset(["How many?"] * n, completion=["\n".join(map(str, page)) for page in pages])


def _dataset(questions, **columns):
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions], **columns})


def gsm8k(split="train", path=None):
    """GSM8K's "train" (7,473) or "test" (1,319) problems, columns as in `arithmetic_problems`.

    Read from the hub id `openai/gsm8k` (config "main"), or from `path`: a folder that holds train.jsonl and test.jsonl,
    or one jsonl file, whose lines have "question" and "answer". `answer` is what follows `####`, without thousands
    separators. Raises ValueError for an unknown split, a path or line that does not fit, and ConnectionError when the
    hub cannot be reached. Source: Cobbe et al. 2021, arXiv:2110.14168 (MIT licence).
    """
    if split not in ("train", "test"):
        raise ValueError(f'split={split!r}: GSM8K has "train" and "test"')
    rows = _hub_rows(split) if path is None else _jsonl_rows(Path(path), split)
    answers = []
    for number, row in enumerate(rows, 1):
        if not {"question", "answer"} <= row.keys() or "####" not in row["answer"]:
            raise ValueError(
                f'GSM8K {split}, row {number}: expected "question" and an "answer" with ####, got {row!r:.200}'
            )
        answers.append(row["answer"].rpartition("####")[2].strip().replace(",", ""))
    return _dataset([r["question"] for r in rows], answer=answers, solution=[r["answer"] for r in rows])


def _hub_rows(split):
    from datasets import load_dataset

    try:
        return list(load_dataset("openai/gsm8k", "main", split=split))
    except Exception as error:  # the hub client's errors have no common class below Exception
        raise ConnectionError(
            f"gsm8k(split={split!r}): the hub's openai/gsm8k cannot be read ({type(error).__name__}: {error}). "
            "Without a network pass path=, a folder that holds train.jsonl and test.jsonl (or one such file)."
        ) from error


def _jsonl_rows(path, split):
    file = path / f"{split}.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"path={str(path)!r}: no file {file}. Pass a folder that holds train.jsonl and test.jsonl, or a jsonl "
            "file; without path the hub's openai/gsm8k is read."
        )
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error}); expected one object a line") from error
    return rows
