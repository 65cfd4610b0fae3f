"""A loss that really runs out of memory, in a child process, and the parent that lives to draw it."""

import os

import pytest
import torch

from grpo_lab.lessons import oom, widget_plots
from grpo_lab.lessons.oom import Outcome, run_capped
from grpo_lab.memory import predict_loss_bytes

SHAPE = dict(batch=16, length=32, hidden=32, vocab=32768)


def peak(impl, **options):
    return sum(predict_loss_bytes(**SHAPE, impl=impl, **options).values())


@pytest.mark.skipif(not oom.LIMITS, reason="this system takes a limit on memory and ignores it")
def test_naive_is_refused_memory_and_chunked_survives_under_the_same_cap():
    cap, me = peak("naive") * 3 // 4, os.getpid()
    dead, alive = (run_capped(**SHAPE, impl=impl, cap=cap, chunk_tokens=64) for impl in ("naive", "chunked"))
    assert os.getpid() == me and torch.ones(cap // 4).sum() == cap // 4, "the parent lives and has its memory"
    assert (dead.ended, alive.ended) == ("out of memory", "survived")
    assert "allocate" in dead.message and alive.message == ""
    held = [size for _, size, _ in dead.timeline]
    assert cap - dead.wanted - (4 << 20) < held[-1] <= cap < held[-1] + dead.wanted + (4 << 20)
    assert dead.timeline[-1][2] == "forward" and alive.timeline[-1][2] == "backward"
    most = max(size for _, size, _ in alive.timeline)
    assert most == pytest.approx(peak("chunked", chunk_tokens=64), abs=6 << 20)
    seconds = [second for second, _, _ in alive.timeline]
    assert seconds == sorted(seconds)


def test_where_the_system_sets_no_limit_the_child_is_killed_above_the_cap(monkeypatch):
    monkeypatch.setattr(oom, "LIMITS", False)
    cap = peak("naive") * 3 // 4
    outcome = run_capped(**SHAPE, impl="naive", cap=cap)
    assert outcome.ended == "killed" and outcome.wanted is None
    assert max(size for _, size, _ in outcome.timeline) > cap


@pytest.mark.parametrize(
    "code, line, ended, wanted",
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.25 GiB. GPU 0 has", "out of memory",
         int(9.25 * 2**30)),
        (1, "MemoryError", "out of memory", None),
        (137, "sample 0.5 7 forward", "killed", None),
        (0, "", "survived", None),
    ],
)  # fmt: skip
def test_how_it_ended_is_read_off_its_last_words(monkeypatch, code, line, ended, wanted):
    monkeypatch.setattr(oom, "run_command", lambda command, on_line, env: on_line(line) or code)
    outcome = run_capped(**SHAPE, impl="naive", cap=1 << 30)
    assert (outcome.ended, outcome.wanted) == (ended, wanted)


def test_a_child_that_fails_otherwise_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(oom, "run_command", lambda command, on_line, env: on_line("ValueError: too odd") or 1)
    with pytest.raises(RuntimeError, match="impl = 'naive': the child ended with exit code 1:\nValueError: too odd"):
        run_capped(**SHAPE, impl="naive", cap=1 << 30)


def test_the_timeline_is_drawn_with_its_death_and_its_cap():
    rise = [(0.1 * i, i << 20, "forward") for i in range(5)]
    dead = Outcome("naive", 5 << 20, rise, "out of memory", 3 << 20, "")
    alive = Outcome("chunked", 5 << 20, [*rise, (0.5, 1, "backward")], "survived", None, "")
    (ax,) = widget_plots.capped_figure([dead, alive]).axes
    cross, naive, chunked, cap = ax.lines
    assert list(naive.get_ydata()) == [i << 20 for i in range(5)] and naive.get_color() != chunked.get_color()
    assert cross.get_xdata() == [0.4] and list(cap.get_ydata()) == [5 << 20] * 2
    assert [t.get_text() for t in ax.texts] == ["backward", "cap 5 MiB "]
    label = "naive: out of memory in the forward pass, refused 3 MiB more"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [label, "chunked: survived"]
