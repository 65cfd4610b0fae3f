"""The bench's table ``skip``: real steps of the trainer, on a CPU with the tiny policy."""

import json

import pytest
import torch

from grpo_lab import cli, plots
from grpo_lab.bench import plots as bench_plots
from grpo_lab.bench import rollouts as bench_rollouts
from grpo_lab.bench import skip as bench_skip
from grpo_lab.bench.command import main
from grpo_lab.bench.files import read_table
from grpo_lab.policies import TINY_POLICY
from grpo_lab.trainer import GRPOTrainer


def by_setting(rows):
    """(own, zero_share) to provider to row."""
    found = {}
    for row in rows:
        found.setdefault((row["own"], row["zero_share"]), {})[row["provider"]] = row
    return found


def test_skipping_shortens_the_step_and_leaves_the_gradient_alone(tmp_path, capsys):
    cli.main(["bench", "--tables", "skip", "--repeats", "2", "--out", str(tmp_path)])
    rows = read_table(tmp_path / "skip_cpu.csv")
    settings = by_setting(rows)
    assert [share for own, share in settings if not own] == list(bench_skip.SHARES) and len(settings) == 6
    for (_, share), row in settings.items():
        assert list(row) == list(bench_skip.PROVIDERS)
        assert row["chunked"]["grad_norm"] == pytest.approx(row["skipping"]["grad_norm"], rel=1e-4)
        assert row["chunked"]["grad_norm"] == pytest.approx(row["TRL"]["grad_norm"], rel=1e-4)
        assert (row["chunked"]["grad_norm"] > 0) == (share < 1)
        assert row["chunked"]["skipped"] == row["TRL"]["skipped"] == 0
        assert row["skipping"]["skipped"] == min(share, 15 / 16)  # of none left, one goes through
        assert all(r["ms"] >= r["min_ms"] > 0 and r["receipt"] is True and not r["note"] for r in row.values())
    assert settings[False, 1.0]["skipping"]["ms"] < 0.6 * settings[False, 1.0]["chunked"]["ms"]
    assert 0 < rows[0]["completion"] <= 40 and rows[0]["prompt"] + rows[0]["completion"] < rows[0]["padded"]
    said = capsys.readouterr().out
    assert "skip: turn 2 of 2" in said and "skipping, 75% zero" in said and "chunked, its own: " in said
    figure = bench_plots.skip_figure(rows)
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["skipping"].get_xdata()) == list(bench_skip.SHARES)
    assert list(lines["this policy's own rewards"].get_xdata()) == [rows[0]["zero_share"]] * 2
    assert len(plots.png(figure)) > 1000 and len(plots.interactive(figure).data) == len(ax.lines)


def test_a_policy_that_is_given_answers_gsm8k_after_a_warm_up(tmp_path, monkeypatch):
    monkeypatch.setitem(bench_skip.SIZES, "cpu", dict(sequences=4, group=2, length=8))
    monkeypatch.setitem(bench_rollouts.JOINT, "cpu", bench_rollouts.JOINT["cpu"] | dict(warm_steps=1))
    problems = [{"question": f"Tom has {i} apples. How many?", "answer": f"Tom has {i}.\n#### {i}"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    options = ["--policy", str(TINY_POLICY), "--gsm8k", str(tmp_path), "--repeats", "1", "--out", str(tmp_path)]
    main(["--tables", "skip", *options])
    rows = read_table(tmp_path / "skip_cpu.csv")
    assert len(rows) == len(bench_skip.TURNS) and all(row["ms"] > 0 for row in rows)
    assert rows[0]["policy"] == "tiny_policy" and rows[0]["sequences"] == 4
    assert f"--policy tiny_policy --gsm8k {tmp_path.name}" in rows[0]["command"]


def test_a_turn_that_fails_leaves_those_before_it(tmp_path, monkeypatch):
    real = GRPOTrainer._compute_loss

    def late(self, model, inputs):
        if self.state.global_step == len(bench_skip.TURNS) + 4:
            raise torch.OutOfMemoryError("of the device")
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", late)
    main(["--tables", "skip", "--repeats", "2", "--out", str(tmp_path)])
    rows = read_table(tmp_path / "skip_cpu.csv")
    assert [bool(row["ms"]) for row in rows] == [True] * 4 + [False] * (len(rows) - 4)
    assert {row["note"] for row in rows} == {None, "out of memory: of the device"}
    assert len(plots.png(bench_plots.skip_figure(rows))) > 1000


def test_whole_groups_lose_their_advantages():
    own = torch.tensor([0.0, 0.0, 2.0, -2.0])
    assert bench_skip.with_zeros(own, None) is own
    for share, made in ((0.0, [1, -1, 1, -1]), (0.5, [1, -1, 0, 0]), (1.0, [0, 0, 0, 0])):
        assert bench_skip.with_zeros(own, share).tolist() == made
