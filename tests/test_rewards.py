"""The rewards against what public reports found, the real GSM8K, hostile text, threads, and a seeded fuzz.

The names in brackets are the public threads that a case was learnt from.
"""

import functools
import json
import os
import pickle
import random
import sys
import threading
import time
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_lab import rewards
from grpo_lab.rewards import (
    accuracy_reward,
    answers_match,
    extract_answer,
    format_reward,
    gsm8k_format_reward,
    reward_len,
    soft_overlong_reward,
)

GSM8K = Path(os.environ.get("GRPO_LAB_GSM8K") or Path(__file__).resolve().parents[2] / "shared" / "gsm8k")
needs_gsm8k = pytest.mark.skipif(
    not (GSM8K / "test.jsonl").is_file(), reason="the GSM8K files are absent: set GRPO_LAB_GSM8K to their folder"
)


def score(text, gold):
    return accuracy_reward([text], [gold])[0]


RIGHT = [
    # forms and what surrounds them
    ("#### 72", "72"),
    ("####72", "72"),
    ("##### 72", "72"),
    ("#### **72**", "72"),
    ("**#### 72**", "72"),
    ("#### $72$", "72"),
    ("#### 72.", "72"),
    ("#### 72!", "72"),
    ("#### 72\r\nmore", "72"),
    ("#### 72<|im_end|>", "72"),
    (r"#### \boxed{72}", "72"),
    ("#### x = 72", "72"),
    ("#### 40 + 32 = 72", "72"),
    ("#### The answer is 72", "72"),
    (r"so \boxed{72}.", "72"),
    (r"$\boxed {72}$", "72"),
    (r"\boxed{\boxed{72}}", "72"),
    (r"\boxed{\text{72}}", "72"),
    (r"\boxed{\mathbf{72}}", "72"),
    (r"\boxed{x = 72}", "72"),
    ("<answer>72</answer>", "72"),
    ("<answer>\n  72 \n</answer>", "72"),
    ("<answer>The answer is: $72.</answer>", "72"),
    (r"<answer>So \boxed{72}</answer>", "72"),
    ("<answer>reasons\n#### 72</answer>", "72"),
    ("<answer>72", "72"),  # a stop string ate the tag
    ("<think>\\boxed{5}</think><answer>72</answer>", "72"),
    ("the template opened the thought</think>\n#### 72", "72"),
    # several marks: the last that is well-formed
    ("#### 5\n#### 72", "72"),
    ("#### 72\n#### Note that this is final", "72"),
    (r"\boxed{5} no, \boxed{72}", "72"),
    (r"\boxed{5} no #### 72", "72"),
    (r"#### 5 no, \boxed{72}", "72"),
    ("<answer>5</answer><answer>72</answer>", "72"),
    (r"\boxed{72} as asked, within \boxed{}", "72"),
    # signs [open-instruct 1530, proeval 19]
    ("#### -3", "-3"),
    ("#### +3", "3"),
    ("#### −3", "-3"),
    ("#### -$3", "-3"),
    ("#### $-3", "-3"),
    (r"\boxed{-3}", "-3"),
    ("#### -1,234.5", "-1234.5"),
    ("#### -0", "0"),
    # thousands and currency [opencompass 2426 and 2647, TRICE 2]
    ("#### $80,000", "80000"),
    ("#### 80000", "80,000"),
    (r"\boxed{\$80{,}000}", "80000"),
    (r"\boxed{80,\!000}", "80000"),
    (r"\boxed{80\,000}", "80000"),
    ("#### 80\u202f000", "80000"),
    ("#### 1,000,000", "1000000"),
    ("#### 27,200$", "27200"),
    ("#### €5", "5"),
    ("#### 72 clips, altogether.", "72"),  # [omlx 3484]
    # decimals, fractions, powers
    ("#### 3.0", "3"),
    ("#### 3", "3.00"),
    ("#### .5", "0.5"),
    ("#### 1/2", "0.5"),
    ("#### 0.5", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{\dfrac{2}{4}}", "1/2"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{\frac{-3}{4}}", "-3/4"),
    (r"\boxed{3\frac{1}{2}}", "3.5"),
    ("#### 3 1/2", "3.5"),
    ("#### 1e3", "1000"),
    (r"\boxed{3 \times 10^{3}}", "3000"),
    (r"\boxed{5\cdot10^{-3}}", "0.005"),
    (r"\boxed{2^{10}}", "1024"),
    ("#### 5 million dollars", "5000000"),
    ("#### 80k", "80000"),
    # units and percent: dropped on both sides
    ("#### 18 dollars per day", "18"),
    ("#### 60 km/h", "60"),
    ("#### 5 cm^2", "5"),
    (r"\boxed{5 \text{ cm}^2}", "5"),
    (r"\boxed{72\text{ clips}}", "72"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{5\,km}", "5"),
    (r"\boxed{5\ \text{km}}", "5"),
    ("#### 5", "5 apples"),
    ("#### 50%", "50"),
    ("#### 50", "50%"),
    (r"\boxed{50\%}", "50"),
    ("#### 3%", "3"),
    # the gold column as a number, or as a marked solution
    ("#### 5", 5),
    ("#### 5", 5.0),
    ("#### 5", "2 + 3 = 5\n#### 5"),
    ("#### 5", r"Thus \boxed{5}."),
    # formulas, decided by math-verify
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{\sqrt[3]{2}}", r"$\sqrt[3]{2}$"),
    (r"\boxed{\pi/2}", r"\frac{\pi}{2}"),
    (r"\boxed{x^2-1}", "(x-1)(x+1)"),
    (r"\boxed{y=2x+1}", "y=1+2x"),
    (r"\boxed{\infty}", r"\infty"),
    (r"\boxed{[8.124, 12.852]}", "[8.124,12.852]"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{\begin{pmatrix}0.5\\\frac{4}{2}\end{pmatrix}}", r"\begin{pmatrix}\frac{1}{2}\\2\end{pmatrix}"),
    (r"\boxed{\text{east}}", r"\text{east}"),
]

WRONG = [
    # no answer at all
    ("", "72"),
    ("The result is 72", "72"),
    ("72", "72"),
    ("### 72", "72"),
    ("####\n72", "72"),
    ("#### seventy-two", "72"),
    ("Put your final answer within \\boxed{}.", "72"),  # [lighteval 686]
    (r"\boxed{72", "72"),
    ("<answer></answer>", "72"),  # [Visual-RFT 176]
    ("<answer> \n </answer> #### 72", "72"),
    ("<think>#### 72</think> I do not know", "72"),
    ("<think>so far #### 72", "72"),
    ("#### 72\n#### 5", "72"),
    (r"\boxed{72}\boxed{5}", "72"),
    # part of another number
    ("#### 15", "5"),
    ("#### 5", "15"),
    ("#### 3", "-3"),
    ("#### -3", "3"),
    ("#### 0.5", "5"),
    ("#### 1e999999999", "1"),
    ("#### 10^10^10", "10"),
    ("#### 9**9**9", "9"),
    ("#### 9**9**9", "999"),
    ("#### 12:30", "12"),
    ("#### 5.6.7", "5.6"),
    ("#### 5\u0665", "5"),  # an Arabic-Indic digit
    ("#### \u0665", "5"),
    ("#### 1,00", "1"),
    ("#### 10,00", "1000"),
    ("#### 80 000", "80"),
    # lists are not numbers, and a comma in a list is no thousands separator
    (r"\boxed{[1,000]}", "1000"),
    (r"\boxed{(1,000)}", "1000"),
    ("#### [1,000]", "1000"),
    (r"\boxed{8.124,12.852}", "8.12412852"),
    ("#### 8.124,12.852", "8.124"),
    (r"\boxed{1,2}", "12"),
    ("#### 1000", "[1,000]"),
    # two answers, or a value that goes on
    ("#### 5 or 6", "5"),
    ("#### 5 or perhaps 6", "5"),
    ("#### 5, 6", "5"),
    ("#### 5 and 6", "5"),
    ("#### 5 apples and 6 pears", "5"),
    ("#### 5-6", "5"),
    ("#### 5 to 6", "5"),
    ("#### 50% of 80", "50"),
    (r"\boxed{5 \text{ or } 6}", "5"),
    (r"\boxed{5 or six}", "5"),
    (r"\boxed{\pm 5}", "5"),
    (r"\boxed{5x}", "5"),
    (r"\boxed{5\pi}", "5"),
    (r"\boxed{5\sqrt{2}}", "5"),
    (r"\boxed{5^2}", "5"),
    (r"\boxed{101_2}", "101"),
    (r"\boxed{x>5}", "5"),
    (r"\boxed{5 \pmod 7}", "5"),
    (r"\boxed{5!}", "5"),
    (r"\boxed{5 hundredths}", "5"),
    ("#### 5x", "5"),
    ("#### 5pi", "5"),
    ("#### 5\\sqrt{2}", "5"),
    ("#### 5 million", "5"),
    # work left undone: a policy must not be paid for copying the question's numbers
    ("#### 2+3", "5"),
    (r"\boxed{2+3}", "5"),
    (r"\boxed{8 \times 9}", "72"),
    (r"\boxed{\sqrt{16}}", "4"),
    # percent is a unit, not a division; decimals are exact
    ("#### 50%", "0.5"),
    ("#### 0.5", "50%"),
    ("#### 0.33", "1/3"),
    ("#### 0.333333", "1/3"),
    ("#### 2.9999999999999999999999", "3"),
    (r"\boxed{\frac{64}{400}}", r"\frac{63}{400}"),  # [open-r1 566]
    (r"\boxed{\frac{3}{0}}", "0"),
    # formulas [Math-Verify 14, 41 and 10]
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{2021}", r"\pm 2021"),
    (r"\boxed{1+\frac{1}{e}}", r"1-\frac{1}{e}"),
    (r"\boxed{n=1,2,3}", "n=2,3,4"),
    (r"\boxed{D=(0,1.5)}", "D=(0,1)"),
    (r"\boxed{4\sqrt(2)}", "4"),
    (r"\boxed{3\sqrt{2}}", r"2\sqrt{3}"),
    (r"\boxed{(1,3)}", "[1,3]"),
    (r"\boxed{\text{west}}", r"\text{east}"),
    (r"\boxed{}", r"2\sqrt{3}"),
]

UNREADABLE = [
    "",
    "  ",
    "???",
    "N/A",
    "nan",
    "None",
    "garbage",
    "no number here",
    "#### 5 or 6",
    "1/0",
    "12:00",
    "9^{9^{9}}",
]
UNREADABLE += ["Paris", float("nan"), r"\sum_{k=1}^{999} k", r"\binom{99999999}{9999999}", "99999999!", "7" * 5000]


@pytest.mark.parametrize("text, gold", RIGHT)
def test_right_answers(text, gold):
    assert score(text, gold) == 1.0


@pytest.mark.parametrize("text, gold", WRONG)
def test_wrong_answers(text, gold):
    assert score(text, gold) == 0.0


@pytest.mark.parametrize("gold", UNREADABLE, ids=lambda gold: repr(gold)[:20])
def test_unreadable_gold_is_none_and_says_so(gold):
    """A gold answer that could not be parsed used to pay 1.0 [open-r1 293, cookbook 335]."""
    for text in ("#### 5", r"\boxed{}", f"\\boxed{{{gold}}}", f"<answer>{gold}</answer>", ""):
        with pytest.warns(UserWarning, match="neither a number nor a formula"):
            assert score(text, gold) is None


def test_missing_gold_is_none_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accuracy_reward(["#### 5", "#### 5"], [None, "5"]) == [None, 1.0]


@pytest.mark.parametrize(
    "tail", ["\n" + "and so it is. " * 40, " because the reasoning above confirms it" * 10, "x" * 400]
)
@pytest.mark.parametrize("text", ["#### 42", r"\boxed{42}", "<answer>42</answer>"])
def test_answer_followed_by_much_text(text, tail):
    """A window on the last 300 characters loses such answers [verl 7274]."""
    assert score("20 + 22\n" + text + tail, "42") == 1.0
    assert score("20 + 22\n" + text + tail, "2") == 0.0


def test_extract_answer():
    assert extract_answer("so 2 + 3\n#### $1,080 a day") == "1,080"
    assert extract_answer("#### 50 % off") == "50%"
    assert extract_answer(r"\boxed{\frac{a_{1}}{\{b\}}}") == r"\frac{a_{1}}{\{b\}}"
    assert extract_answer("<answer> blue </answer>") == "blue"
    assert extract_answer("none of the marks") is None
    assert extract_answer("\\boxed{" + "1" * rewards.MAX_ANSWER + "}") == "1" * rewards.MAX_ANSWER
    assert extract_answer("\\boxed{" + "1" * (rewards.MAX_ANSWER + 1) + "}") is None


def test_chat_messages_and_strings_agree():
    texts = ["#### 5", r"\boxed{6}", "<think>a</think><answer>5</answer>", "", "no"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    golds = ["5"] * len(texts)
    assert accuracy_reward(chats, golds) == accuracy_reward(texts, golds) == [1.0, 0.0, 1.0, 0.0, 0.0]
    for reward in (format_reward, gsm8k_format_reward, reward_len):
        assert reward(chats) == reward(texts)
    tools = [{"role": "assistant", "content": "#### 4"}, {"role": "tool", "content": "#### 5"}]
    assert accuracy_reward([tools], ["4"]) == [1.0]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "#### "}, {"type": "text", "text": "5"}]}]
    assert accuracy_reward([parts, [{"role": "assistant", "content": None}], []], ["5"] * 3) == [1.0, 0.0, 0.0]


def test_bad_arguments():
    with pytest.raises(ValueError, match="answer has 2 rows, completions has 1"):
        accuracy_reward(["#### 5"], ["5", "6"])
    with pytest.raises(ValueError, match="completions holds 5"):
        accuracy_reward([5], ["5"])
    for lengths in ({"max_completion_len": 0, "cache": 0}, {"max_completion_len": 8, "cache": 9}):
        with pytest.raises(ValueError, match="max_completion_len="):
            soft_overlong_reward([[1]], **lengths)


def test_as_trl_calls_it():
    columns = {
        "prompts": ["p"],
        "completions": ["#### 5"],
        "completion_ids": [[1, 2, 3]],
        "answer": ["5"],
        "solution": [""],
    }
    columns |= {"trainer_state": None, "log_extra": print, "log_metric": print}
    soft = functools.partial(soft_overlong_reward, max_completion_len=4, cache=2)
    for reward in (accuracy_reward, format_reward, gsm8k_format_reward, reward_len, soft):
        assert pickle.loads(pickle.dumps(reward))(**columns) == reward(**columns)
        assert [type(value) for value in reward(**columns)] == [float]


FORMAT = [
    ("<think>a</think><answer>b</answer>", 1.0),
    ("\n <think>\na\n\nb\n</think>\n\n<answer>\nb\n</answer>\n ", 1.0),  # [open-r1 237 and 157, unsloth 1761]
    ("<think>a < b</think>\t<answer>\\boxed{5}</answer>", 1.0),
    ("", 0.0),
    ("a", 0.0),
    ("<think>a</think>b", 0.0),
    ("<think>a</think>and<answer>b</answer>", 0.0),
    ("Well <think>a</think><answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer> bye", 0.0),
    ("<think></think><answer>b</answer>", 0.0),
    ("<think>a</think><answer> \n</answer>", 0.0),
    ("<answer>b</answer><think>a</think>", 0.0),
    ("<think>a<answer>b</answer></think>", 0.0),
    ("<think>a<answer></think>b</answer>", 0.0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0.0),  # [open-r1 359]
    ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer></answer>", 0.0),
    ("<think><think>a</think><answer>b</answer>", 0.0),
]


@pytest.mark.parametrize("text, reward", FORMAT)
def test_format_reward(text, reward):
    assert format_reward([text]) == [reward]


@pytest.mark.parametrize("text", ["#### 5", "why\n  #### -1,080.50\n", "#### $5.", "#### 50%\r\nmore", "####5"])
def test_gsm8k_format(text):
    assert gsm8k_format_reward([text]) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "### 5",
        "##### 5",
        "####",
        "#### five",
        "so #### 5",
        "#### 5 apples",
        "#### 1,00",
        "####\n5",
        "#### 2+3",
    ],
)
def test_gsm8k_format_wrong(text):
    assert gsm8k_format_reward([text]) == [0.0]


def test_reward_len():
    assert reward_len(["", "x" * 20, "x" * 25]) == [-20.0, 0.0, -5.0]


@pytest.mark.parametrize("longest, cache", [(100, 20), (64, 64), (10, 0), (1, 1)])
def test_soft_overlong_equals_trl(longest, cache):
    trl_rewards = pytest.importorskip("trl.rewards")
    ids = [[0] * length for length in range(longest + 5)]
    ours = soft_overlong_reward(ids, max_completion_len=longest, cache=cache)
    assert ours == trl_rewards.get_soft_overlong_punishment(longest, cache)(ids)
    assert ours[0] == 0.0 and ours[-1] == -1.0
    if longest == 100:
        assert ours[80] == 0.0 and ours[90] == -0.5 and ours[100] == -1.0


@pytest.fixture(scope="module")
def gsm8k():
    rows = [
        json.loads(line) for split in ("train", "test") for line in (GSM8K / f"{split}.jsonl").open(encoding="utf-8")
    ]
    solutions = [row["answer"] for row in rows]
    assert len(solutions) == 8792
    return solutions, [solution.rpartition("####")[2].strip() for solution in solutions]


@needs_gsm8k
@pytest.mark.parametrize("form", ["{0}", "<think>{0}</think>\n<answer>\n{1}\n</answer>", "{0}\nso $\\boxed{{{1}}}$"])
def test_gsm8k_solutions_score_one(gsm8k, form):
    solutions, golds = gsm8k
    texts = [form.format(solution, gold) for solution, gold in zip(solutions, golds, strict=True)]
    assert accuracy_reward(texts, golds) == [1.0] * len(golds)
    assert accuracy_reward(texts, solutions) == [1.0] * len(golds)


@needs_gsm8k
def test_gsm8k_every_other_answer_scores_zero(gsm8k):
    """The whole cross product: a pair's verdict depends on its two strings only, so the distinct ones cover it."""
    solutions, golds = gsm8k
    value = {gold: Decimal(gold.replace(",", "")) for gold in golds}
    found = {extract_answer(solution): gold for solution, gold in zip(solutions, golds, strict=True)}
    assert len(set(value.values())) == 952
    wrong = [
        (pred, gold)
        for pred, own in found.items()
        for gold in value
        if answers_match(pred, gold) != (value[own] == value[gold])
    ]
    assert wrong == []


@needs_gsm8k
@pytest.mark.parametrize("seed", [0, 1])
def test_gsm8k_random_pairs_through_the_reward(gsm8k, seed):
    solutions, golds = gsm8k
    draw = random.Random(seed)
    pairs = [(draw.randrange(len(golds)), draw.randrange(len(golds))) for _ in range(5000)]
    got = accuracy_reward([solutions[i] for i, _ in pairs], [golds[j] for _, j in pairs])
    assert got == [float(golds[i].replace(",", "") == golds[j].replace(",", "")) for i, j in pairs]


SIZE = 100_000


def hostile():
    fill = lambda unit, end="": (unit * (SIZE // len(unit) + 1))[: SIZE - len(end)] + end  # noqa: E731
    repeated = "<think> </think> <answer> </answer> </think><answer> #### ####\t ####1+ #### 1 \n####".split(" ")
    repeated += [
        r"\boxed{",
        r"\boxed{1}",
        r"\boxed{{",
        r"\frac{",
        r"\text{",
        "\\",
        "$",
        "**",
        "{",
        "}",
        "1,",
        "9^",
        "\0",
        "٣",
    ]
    repeated += [
        "\n  #### 1x",
        "\n   ",
        " ",
        "#",
        "<",
        "1",
        "-",
        ".",
        "😀",
        "\u0301",
        "#### 1 or ",
        "1,000,",
        "½",
        "10^",
    ]
    yield from (fill(unit) for unit in repeated)
    yield from (
        fill(unit, end)
        for unit in ("#### ", r"\boxed{", "{", "7", "<answer>", "1,")
        for end in ("#### 5", "}", "</answer>")
    )
    yield from (
        "#### " + fill(unit)
        for unit in ("7", "1,", ",000", "1+", "-", "٣", " ", " a", "9**", ".", "1e9", "$", "\u0301", "1/")
    )
    yield from (r"\boxed{" + fill(unit, "}") for unit in ("7", "{", "1,", "(", "²", "\\", "1^", r"\sqrt{", "x+"))
    short = [
        "10^10^10",
        "9**9**9",
        "9^{9^{9}}",
        "1e999999999",
        "9^999999999",
        "999999999!",
        r"\binom{99999999}{9999999}",
    ]
    short += [
        "(" * 90 + "1" + ")" * 90,
        "{" * 90 + "}" * 90,
        "-" * 190,
        "1/" * 90 + "1",
        r"\sqrt{" * 20 + "2" + "}" * 20,
    ]
    short += [
        r"\sum_{k=1}^{999999} k",
        r"\int x dx",
        r"((2^{99})^{99})^{99}",
        r"e^{e^{e^{9}}}",
        r"\exp(\exp(\exp(10)))",
    ]
    yield from (
        fill("wait, ", mark % evil) for evil in short for mark in ("#### %s", r"\boxed{%s}", "<answer>%s</answer>")
    )


@pytest.mark.parametrize("gold", ["72", r"2\sqrt{3}", "[8.124,12.852]"])
def test_hostile_text_is_cheap(gold):
    score(r"\boxed{2\sqrt{5}}", gold)  # sympy is imported and the parser's tables are built
    slow = []
    for text in hostile():
        for reward in (accuracy_reward, format_reward, gsm8k_format_reward, reward_len):
            start = time.thread_time()  # other processes do not count
            reward([text], answer=[gold])
            spent = time.thread_time() - start
            if spent > 0.05:
                slow.append((reward.__name__, text[:20], text[-20:], spent))
        assert score(text, gold) == 0.0
    assert slow == []


def test_hostile_gold_is_cheap():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gold in hostile():
            start = time.thread_time()
            assert score("#### 123457", gold) in (0.0, None)
            assert time.thread_time() - start < 0.05


def test_budget_stops_what_would_not_end(monkeypatch):
    gold, hard = "x^2+y^2=7", r"\boxed{(a+b)(c+d)(e+f)(g+h)(i+j)(k+l)(m+n)(o+p)(q+r)(s+t)=z^9}"
    assert score(hard, gold) == 0.0
    assert rewards._same_formula.cache_clear() is None
    monkeypatch.setattr(rewards, "MAX_CALLS", 100_000)

    def endless():
        while True:
            abs(1)

    assert rewards._within_budget(endless) is None
    assert sys.getprofile() is None
    assert rewards._within_budget(lambda: 5) == 5
    assert score(hard, gold) == 0.0


def test_a_running_profiler_keeps_its_hook():
    seen = []
    sys.setprofile(lambda *event: seen.append(event))
    try:
        assert score(r"\boxed{5\sqrt{7}}", r"\sqrt{175}") == 1.0
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert seen


def test_in_threads(caplog, capfd):
    """math-verify's own timeouts are signals: off the main thread they raised, or scored 0 [trl 5281, verl 5635]."""
    texts = [f"\\boxed{{\\sqrt{{{3 * n * n}}}}}" for n in range(2, 10)] + ["#### 5"] * 8
    golds = [f"{n}\\sqrt{{3}}" for n in range(2, 10)] + ["5"] * 4 + ["6"] * 4
    results = []
    threads = [threading.Thread(target=lambda: results.append(accuracy_reward(texts, golds))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0] * 12 + [0.0] * 4] * 4
    assert not caplog.records and capfd.readouterr().err == ""


def written(draw, value):
    """``value`` as some model might write it, and in one of the three forms."""
    size = abs(value)
    spellings = [f"{size.numerator}/{size.denominator}", rf"\frac{{{size.numerator}}}{{{size.denominator}}}"]
    if size.denominator == 1:
        spellings = [
            f"{size.numerator}",
            f"{size.numerator:,}",
            f"{size.numerator}.0",
            f"{size.numerator:,}".replace(",", "{,}"),
        ]
    elif 10**6 % size.denominator == 0:
        spellings += [f"{Decimal(size.numerator) / Decimal(size.denominator):f}"]
    sign = "-" if value < 0 else draw.choice(["", "", "+"])
    text = draw.choice(["", "$", r"\$", "€"]) + draw.choice(spellings)
    text = sign + text + draw.choice(["", "", ".", " dollars", "%", r"\%", r" \text{ km}", " per hour"])
    form = draw.choice(
        ["#### {}", "#### {}\nThat is all.", r"so \boxed{{{}}}", "<answer>\n{}\n</answer>", "#### {} 😀"]
    )
    return form.format(text)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_numbers_match_exactly_when_equal(seed):
    draw = random.Random(seed)
    for _ in range(1500):
        below = draw.choice([1, 1, 1, 2, 3, 4, 7, 8, 10, 100, 1000])
        pred = Fraction(draw.randint(-(10 ** draw.randint(1, 9)), 10 ** draw.randint(1, 9)), below)
        near = [pred, -pred, pred * 10, pred / 100, pred + 1, pred * 1000, pred + Fraction(1, 1000), abs(pred) % 1000]
        gold = draw.choice([pred, *near])
        text, gold_text = written(draw, pred), extract_answer(written(draw, gold))
        assert score(text, gold_text) == float(pred == gold), (seed, text, gold_text)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_garbage_never_raises_and_never_pays(seed):
    draw = random.Random(seed)
    tokens = (
        r"#### \boxed{ } { <answer> </answer> <think> </think> \frac{ \sqrt{ \text{ \$ \% $ % ^ _ , . + - * / = ( ) [ ]"
    )
    tokens = [*tokens.split(), *"\n 07xeEk\\٣½−\0😀\u0301", "12", "999", "or", "and", "million"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            text = "".join(draw.choice(tokens) for _ in range(draw.randint(1, 40)))
            for reward in (format_reward, gsm8k_format_reward):
                assert reward([text])[0] in (0.0, 1.0)
            for gold in ("86753.09", r"5\sqrt{86753}"):
                assert score(text, gold) == 0.0, (seed, text)
            answer = extract_answer(text)
            assert answer is None or len(answer) <= rewards.MAX_ANSWER
            assert score("#### 86753.09", text) in (0.0, None), (seed, text)
