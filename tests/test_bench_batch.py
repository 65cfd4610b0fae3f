"""The search for the largest batch: on made-up peaks, on faults, and for real with two processes of a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from grpo_lab.bench import batch as bench_batch
from grpo_lab.bench.batch import batch_tables, launched, search
from grpo_lab.bench.command import main
from grpo_lab.bench.curves import curve_tables, print_rows
from grpo_lab.bench.files import read_table
from grpo_lab.bench.step import TINY
from grpo_lab.launch import LaunchError
from grpo_lab.memory import largest_batch
from grpo_lab.runs import write_json


@pytest.mark.parametrize("fixed", [0, 10, 60])
@pytest.mark.parametrize("slope", [0.05, 0.7, 30, 200])
@pytest.mark.parametrize("bend, holes", [(0, 0), (0, 0.03), (2e-4, 0)])
def test_the_largest_batch_fits_and_one_step_more_does_not(fixed, slope, bend, holes):
    def peak(batch):
        return fixed + slope * batch + bend * batch**2

    def trial(batch):
        tried.append(batch)
        return peak(batch) if peak(batch) * (1 + holes) <= 80 else None

    tried = []
    fits, fails = largest_batch(trial, 80)
    assert fits == 0 or fits in tried
    assert fails in tried and peak(fails) * (1 + holes) > 80 and fails - fits <= max(1, fails / 16)
    assert len(set(tried)) == len(tried) <= 20
    if not bend and not holes and slope == 0.05:
        assert len(tried) <= 5, "two for the line, one or two at the limit, one above"


def test_peaks_that_are_known_save_trials():
    def trial(batch):
        tried.append(batch)
        return 10.0 + batch if 10 + batch <= 40 else None

    tried = []
    assert largest_batch(trial, 40, {4: 14.0, 16: 26.0}) == (30, 31) and tried == [30, 31]
    for guess, trials in ((30, [30, 31]), (31, [31, 30]), (28, [28, 29, 30, 32, 31])):
        tried = []
        assert largest_batch(trial, 40, guess=guess) == (30, 31) and tried == trials


def spec(**changes):
    cells = [("naive", 1), ("chunked", 1)]
    return dict(model="tiny", size=TINY, tuning="full", dtype="float32", seed=0, lengths=(4, 8), cells=cells) | changes


def test_a_trial_that_kills_its_processes_does_not_fit_and_the_search_goes_on(monkeypatch):
    calls = []

    def fake_launch(script, **_):
        journal = Path(script).with_name("journal.jsonl")
        calls.append(journal.read_text().splitlines())
        with journal.open("a") as file:
            if len(calls) == 1:
                file.write(json.dumps({"began": ["naive", 1, 9]}) + "\n")
                raise LaunchError("rank 1 died", 1, 1, ["rank 1: out of memory: 9 GiB", "RuntimeError: Timed out"])
            for provider, card in spec()["cells"]:
                file.write(json.dumps({"row": bench_batch._row(spec(), provider, card, largest_batch=8)}) + "\n")
            file.write(json.dumps({"began": None}) + "\n")  # and these of the turns that follow

    monkeypatch.setattr(bench_batch, "launch", fake_launch)
    assert [row["largest_batch"] for row in launched(spec(), "cpu_2", 2)] == [8, 8]
    assert len(calls) == 2
    died = {"trial": ["naive", 1, 9], "outcome": {"died": "rank 1: out of memory: 9 GiB"}}
    assert [json.loads(line) for line in calls[1]][1:] == [died]


def test_processes_that_do_not_even_begin_are_rows_that_say_so(monkeypatch):
    def fake_launch(script, **_):
        raise LaunchError("accelerate's launcher ended", 1, None, ["ImportError: no such thing"])

    monkeypatch.setattr(bench_batch, "launch", fake_launch)
    rows = launched(spec(), "cpu_2", 2)
    assert [(row["provider"], row["largest_batch"], row["note"]) for row in rows] == [
        ("naive", None, "ImportError: no such thing"),
        ("chunked", None, "ImportError: no such thing"),
    ]


def searched(folder, trials, monkeypatch, **changes):
    """The rows of a search in this process whose steps are ``trials(provider, card, batch)``."""
    write_json(folder / "spec.json", spec(**changes))
    (folder / "journal.jsonl").touch()
    monkeypatch.setattr(bench_batch, "_whole_step", lambda accelerator, spec, *trial: trials(*trial))
    monkeypatch.setattr(bench_batch, "_take_turns", lambda *_: {"chunked": {"peak": 3 << 20, "ms": 2.0}})
    search(folder)
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [entry["row"] for entry in entries if "row" in entry]


def test_an_error_that_is_no_lack_of_memory_ends_the_cell_alone(tmp_path, monkeypatch):
    def trials(provider, card, batch):
        if provider == "naive" and batch > 4:
            raise TypeError("wrong argument")
        if batch > 50:  # the line would reach a card's 1 GiB at 462
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return {"peak": (100 + 2 * batch) << 20}

    naive, chunked = searched(tmp_path, trials, monkeypatch)
    assert "TypeError: wrong argument" in naive["note"] and naive["largest_batch"] is None
    fits, fails = chunked["largest_batch"], chunked["failing_batch"]
    assert fits <= 50 < fails <= fits + 8 and chunked["note"] == ""
    assert chunked["peak_mib"] == 100 + 2 * fits
    assert (chunked["fixed_mib"], chunked["mib_per_sequence"]) == pytest.approx((100, 2))


def test_trials_in_the_journal_are_not_repeated(tmp_path, monkeypatch):
    ran = []

    def trials(provider, card, batch):
        ran.append(batch)
        return {"peak": batch << 30}

    outcome = {"trial": ["chunked", 1, 16], "outcome": {"died": "the system", "spoilt": False}}
    (tmp_path / "journal.jsonl").write_text(json.dumps(outcome) + "\n")
    (row,) = searched(tmp_path, trials, monkeypatch, cells=[("chunked", 1)])
    assert 16 not in ran and 15 in ran and (row["largest_batch"], row["failing_batch"]) == (15, 16)


@pytest.mark.parametrize("others, agreed", [
    ([{"peak": 5, "ms": 2.0, "spoilt": False}], {"peak": 5, "ms": 3.0, "spoilt": False}),
    ([{"spoilt": False}], {"spoilt": True}),  # one rank alone is out of memory
    ([{"peak": 1, "ms": 2.0, "spoilt": True}], {"peak": 4, "ms": 3.0, "spoilt": True}),  # one rank has lost memory
])  # fmt: skip
def test_ranks_whose_outcomes_differ_do_not_go_on(monkeypatch, others, agreed):
    def gather(every, outcome, group):
        every[:] = [outcome, *others]

    monkeypatch.setattr(bench_batch.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(bench_batch.dist, "all_gather_object", gather)
    assert bench_batch._agreed({"peak": 4, "ms": 3.0, "spoilt": False}, "a group") == agreed


def test_the_table_is_asked_for_by_the_command_line_and_written_card_by_card(tmp_path, monkeypatch, capsys):
    def fake_launched(spec, config, processes):
        asked.append((spec["tuning"], spec["dtype"], config, processes))
        found = dict(largest_batch=6, failing_batch=7, peak_mib=900.0, fixed_mib=300.0, mib_per_sequence=100.0)
        return [bench_batch._row(spec, *cell, **found) for cell in spec["cells"]]

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(bench_batch, "launched", fake_launched)
    options = ["--tables", "batch", "--tunings", "lora,full", "--dtypes", "float32", "--cards", "0.5,24"]
    assert main([*options, "--providers", "naive", "chunked", "--out", str(tmp_path)]) == 0
    assert asked == [(tuning, "float32", "cpu_2", None) for tuning in ("lora", "full")]
    rows = read_table(tmp_path / "batch_cpu.csv")
    assert [(row["tuning"], row["card_gb"], row["provider"]) for row in rows[:3]] == [
        ("lora", 0.5, "naive"), ("lora", 0.5, "chunked"), ("lora", 24, "naive")]  # fmt: skip
    assert len(rows) == 8 and rows[0]["torch"] and rows[0]["largest_batch"] == 6
    out = capsys.readouterr().out
    assert "batch: model tiny, tuning lora, dtype float32, checkpointing True, card_gb 0.5" in out
    assert "batch 6: 300 MiB + 100 each" in out


def test_two_processes_find_it_for_real(capsys):
    grid = (["tiny"], ["lora"], ["float32"], [0.02])
    (row,), (bare, turn) = batch_tables(torch.device("cpu"), *grid, "cpu_2", None, ["no head", "chunked"])
    assert row["processes"] == 2 and not row["note"] and 0 < row["largest_batch"] < row["failing_batch"]
    assert 0.5 < row["peak_mib"] / (0.02 * 1024) <= 1 and row["shared_ms"] is None and row["mib_per_sequence"] > 0
    assert turn["shared_batch"] == bare["shared_batch"] == min(32, row["largest_batch"]) and bare["shared_ms"] > 0
    assert turn["shared_peak_mib"] > bare["shared_peak_mib"] > 0 and turn["processes"] == 2
    assert turn["largest_batch"] is bare["largest_batch"] is turn["card_gb"] is bare["card_gb"] is None
    out = capsys.readouterr().out
    assert f"batch {row['largest_batch']}: fits" in out and f"batch {row['failing_batch']}: does not fit" in out


def test_trainings_of_two_processes_draw_their_curves(capsys):
    (rows,) = curve_tables("cpu_2", None, ["float32"], ["chunked"], steps=2)
    assert [(row["provider"], row["step"], row["processes"]) for row in rows] == [("chunked", 1, 2), ("chunked", 2, 2)]
    assert rows[0]["receipt"] is True and 0 < rows[0]["reward"] < 1 and rows[0]["grad_norm"] > 0
    print_rows(rows)
    assert "first 5 steps" in capsys.readouterr().out
