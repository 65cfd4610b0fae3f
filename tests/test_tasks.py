"""Generated word problems are right, reproducible and split without overlap; GSM8K is read whole."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from conftest import FRESH_SEED

from grpo_lab import tasks

GSM8K = Path(os.environ.get("GRPO_LAB_GSM8K", Path(__file__).resolve().parents[2] / "shared" / "gsm8k"))
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K's jsonl files are not at {GSM8K}")
SEEDS = [3, FRESH_SEED]  # pytest prints them in the test's name
LINE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def value(a, operator, b):
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator]


def lines(text):
    return [(int(a), op, int(b), int(result)) for a, op, b, result in LINE.findall(text)]


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("seed", SEEDS)
def test_solutions_are_right_and_end_in_the_answer(seed, split):
    problems = tasks.arithmetic_problems(500, seed, split)
    assert problems.column_names == ["prompt", "answer", "solution"]
    for row in problems:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        steps = lines(row["solution"])
        assert len(steps) in (1, 2)
        assert all(value(a, op, b) == result for a, op, b, result in steps)
        assert all(first[3] == second[0] for first, second in zip(steps, steps[1:], strict=False))
        assert row["solution"].endswith(f"\n#### {row['answer']}") and int(row["answer"]) == steps[-1][3]
        assert all(2 <= b <= 9 and max(a, result) <= tasks.LARGEST for a, _, b, result in steps)
        numbers = sorted(int(x) for x in re.findall(r"\d+", row["prompt"][0]["content"]))
        assert numbers == sorted([steps[0][0], *(step[2] for step in steps)])


@pytest.mark.parametrize("seed", SEEDS)
def test_both_splits_hold_every_operator_and_both_lengths(seed):
    for split in ("train", "heldout"):
        kinds = {"".join(s.operator for s in p.steps) for p in tasks.problems(2000, seed, split)}
        assert kinds == {*"+-*/", *(a + b for a in "+-*/" for b in "+-*/")}


@pytest.mark.parametrize("seed", SEEDS)
def test_heldout_operand_pairs_are_in_no_training_problem_or_demonstration(seed):
    def pairs(texts, operators="+-*/"):
        return {(min(a, b), max(a, b)) for text in texts for a, op, b, _ in lines(text) if op in operators}

    def first_two(prompt):
        return [int(x) for x in re.findall(r"\d+", prompt[0]["content"])][:2]

    heldout = tasks.problems(3000, seed, "heldout")
    new = pairs(p.solution for p in heldout)
    assert len(new) > 80
    assert not new & pairs(p.solution for p in tasks.problems(3000, seed, "train"))
    demos = tasks.demonstrations(3000, seed)
    assert not new & {(min(n), max(n)) for n in map(first_two, demos["prompt"])}
    assert not pairs((p.solution for p in heldout), "+-") & pairs(demos["completion"], "+-")


@pytest.mark.parametrize("seed", SEEDS)
def test_practice_is_right_and_covers_the_tables(seed):
    pages = tasks.practice(3000, seed)["completion"]
    sums = [line for page in pages for line in lines(page)]
    assert all(value(a, op, b) == result for a, op, b, result in sums)
    assert {len(lines(page)) for page in pages} == {2, 3, 4, 5, 6}
    products = {(a, b) for a, op, b, _ in sums if op == "*"}
    assert products == {(a, b) for a in range(2, 50) for b in range(2, 10) if a * b <= tasks.LARGEST}


@pytest.mark.parametrize("seed", SEEDS)
def test_new_wordings_make_half_of_the_heldout_split_and_bring_no_new_word(seed):
    heldout = tasks.problems(2000, seed, "heldout")
    assert 0.45 < sum(p.new_wording for p in heldout) / 2000 < 0.55
    assert not any(p.new_wording for p in tasks.problems(500, seed, "train"))

    def words(problems):
        return {word for p in problems for word in re.findall(r"[A-Za-z]+", p.question)}

    def wordings(problems):  # with names, things and numbers blanked
        blank = "|".join([*tasks.NAMES, *tasks.OBJECTS, *(h for pair in tasks.HOLDERS for h in pair), r"\d+"])
        return {re.sub(rf"\b({blank})\b", "_", p.question) for p in problems}

    train = tasks.problems(5000, seed, "train")
    new = [p for p in heldout if p.new_wording]
    assert words(new) <= words(train)
    assert not wordings(new) & wordings(train)


def test_the_same_seed_gives_the_same_problems_on_every_platform():
    rows = tasks.arithmetic_problems(200, 7, "heldout").to_list()
    assert rows == tasks.arithmetic_problems(200, 7, "heldout").to_list()
    assert rows != tasks.arithmetic_problems(200, 8, "heldout").to_list()
    demos = tasks.demonstrations(200, 7).to_list()
    digest = hashlib.sha256(json.dumps([rows, demos], sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "cc065b55f8effd7f"


@pytest.mark.parametrize("seed", SEEDS)
def test_demonstrations_are_right_as_often_as_asked_and_always_calculate_right(seed):
    n, right, unmarked = 3000, 0.3, 0.2
    rows = tasks.demonstrations(n, seed, right=right, unmarked=unmarked)
    assert all(value(a, op, b) == result for text in rows["completion"] for a, op, b, result in lines(text))
    assert sum("####" not in text for text in rows["completion"]) / n == pytest.approx(unmarked, abs=0.04)
    got = sum(text.endswith(f"#### {gold}") for text, gold in zip(rows["completion"], rows["answer"], strict=True)) / n
    assert got == pytest.approx(right, abs=0.04)


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: tasks.arithmetic_problems(0, 1), "n=0"),
        (lambda: tasks.arithmetic_problems(5, 1, "test"), "split='test'"),
        (lambda: tasks.demonstrations(5, 1, right=0.8, unmarked=0.3), "unmarked=0.3"),
        (lambda: tasks.gsm8k("validation"), "split='validation'"),
        (lambda: tasks.gsm8k("test", path="no/such/folder"), "no/such/folder"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call()


def test_gsm8k_without_a_hub_says_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConnectionError, match=r"openai/gsm8k.*no route to host.*path="):
        tasks.gsm8k("test")


def test_gsm8k_reads_the_hub_rows_and_one_file_alike(monkeypatch, tmp_path):
    import datasets

    rows = [{"question": "How much?", "answer": "2 * 600 = 1,200 coins\n#### 1,200"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: rows)
    (tmp_path / "mine.jsonl").write_text(json.dumps(rows[0]) + "\n")
    expected = [{"prompt": [{"role": "user", "content": "How much?"}], "answer": "1200", "solution": rows[0]["answer"]}]
    assert tasks.gsm8k("train").to_list() == tasks.gsm8k("train", path=tmp_path / "mine.jsonl").to_list() == expected


def test_gsm8k_names_the_row_that_has_no_answer(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "2"}\n')
    with pytest.raises(ValueError, match="row 2"):
        tasks.gsm8k("train", path=tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "#### 1"}\nnot json\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        tasks.gsm8k("train", path=tmp_path)


@needs_gsm8k
@pytest.mark.parametrize("split, count", [("train", 7473), ("test", 1319)])
def test_gsm8k_local_files(split, count):
    rows = tasks.gsm8k(split, path=GSM8K)
    assert len(rows) == count and rows.column_names == ["prompt", "answer", "solution"]
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", answer) for answer in rows["answer"])
