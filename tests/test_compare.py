"""Comparison of run folders whose figures are known: two losses with two seeds each, two ranks, one corrupt folder."""

import csv
import io
import math

import pytest

from grpo_lab import cli, plots
from grpo_lab.runs import compare_plots, open_run
from grpo_lab.runs.compare import by_run, collect, differing, grouped, latex, machines, markdown, spread, table

GIB = 2**30


def make_run(root, loss_impl, seed, peaks, speed, passed=True):
    run = open_run("06_x", {"seed": seed, "loss_impl": loss_impl, "steps": 20}, root)
    for step in range(1, 21):
        reward = 0.5 + 0.01 * step + (0.1 if seed else -0.1)
        run.log(step, loss=0.1, reward=reward, num_tokens=1000 * step, step_time=1000 / speed)
        if step % 10 == 0:
            run.log(step, peak_bytes=[int(peak * GIB) - (step == 20) for peak in peaks], peak_of="process")
    errors = {"loss": 1e-5, "d_hidden": 5e-4}
    check = {"case": "on-policy", "against": "trl", "errors": errors, "tolerance": 1e-3, "passed": passed}
    run.write_json("receipt.json", {"passed": passed, "checks": [check]})
    run.finish({"accuracy_after": 0.8 + 0.1 * seed, "note": "x|y"})
    return run.folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "naive", 0, (4, 5), 100)
    make_run(root, "naive", 1, (4, 6), 120)
    make_run(root, "chunked", 0, (2, 3), 140)
    make_run(root, "chunked", 1, (1, 2), 90, passed=False)
    (root / "06_x-corrupt").mkdir()
    (root / "06_x-corrupt" / "status.json").write_text('{"status": "fini')
    (root / "sweep-06_x-1").mkdir()
    return root


@pytest.fixture(scope="module")
def groups(root):
    with pytest.warns(UserWarning, match="left out: .*status.json cannot be read as JSON"):
        return grouped(collect([root]))


def test_groups_differ_in_more_than_the_seed(groups):
    assert {label: sorted(c.seed for c in group) for label, group in groups.items()} == {
        "loss_impl=naive": [0, 1], "loss_impl=chunked": [0, 1]
    }  # fmt: skip
    assert list(groups) == ["loss_impl=chunked", "loss_impl=naive"]
    one = groups["loss_impl=naive"][0]
    assert one.notebook == "06_x" and one.peaks == [4 * GIB, 5 * GIB], "the most of all notes, rank by rank"
    assert one.tokens_per_second == pytest.approx(100) and one.worst_error == pytest.approx(0.5)
    assert one.final("reward") == pytest.approx(0.5 + 0.195 - 0.1), "the last two of 20 steps"
    assert one.final("none") is None


def test_the_table_says_mean_and_deviation_over_seeds(groups):
    frame = table(groups).set_index("runs")
    row = frame.loc["loss_impl=chunked"]
    deviation = 0.2 / math.sqrt(2)
    assert row["reward, last tenth"] == f"0.695 ± {deviation:.2g}" and row["accuracy after"] == "0.85 ± 0.071"
    assert row["peak GiB"] == "3" and row["tokens/s"] == "115 ± 35"
    assert row["receipts passed"] == "1 of 2" and row["worst error / allowed"] == "0.5" and row["seeds"] == 2
    assert spread([]) == "" and spread([None, 2.0]) == "2" and spread([1500.0, 2500.0]) == "2,000 ± 707"


def test_the_table_in_markdown_latex_and_csv(groups):
    frame = table(groups)
    lines = markdown(frame.assign(runs=["a|b", "c"])).splitlines()
    assert lines[1] == "| " + " | ".join(["---"] * frame.shape[1]) + " |" and lines[2].startswith("| a\\|b | 2 | 2 |")
    text = latex(frame)
    assert "\\toprule" in text and "loss\\_impl=naive & 2 & 2 &" in text and text.count("\\\\") == 3
    curves = [curve for group in groups.values() for curve in group]
    rows = list(csv.DictReader(io.StringIO(by_run(curves).to_csv(index=False))))
    assert len(rows) == 4 and {row["parameter.loss_impl"] for row in rows} == {"naive", "chunked"}
    chunked = next(r for r in rows if r["parameter.loss_impl"] == "chunked" and r["parameter.seed"] == "0")
    assert float(chunked["peak_bytes.rank1"]) == 3 * GIB and chunked["summary.accuracy_after"] == "0.8"
    assert float(chunked["tokens_per_second"]) == pytest.approx(140) and chunked["receipt_passed"] == "True"


def test_bands_are_the_mean_and_one_deviation(groups):
    figure = compare_plots.bands_figure(groups, window=1)
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["loss_impl=naive (2)"][0] == pytest.approx(0.51)
    edges = [line for line in figure.axes[0].lines if line.get_label() == "_loss_impl=naive: one deviation"]
    low, high = (edge.get_ydata()[0] for edge in edges)
    assert (high - low) / 2 == pytest.approx(0.2 / math.sqrt(2)) and len(figure.axes[0].collections) == 2
    assert len(plots.interactive(figure).data) == 6, "the twin shows the bands' edges"
    with pytest.raises(ValueError, match="key = 'rewards': no run has logged it; logged are .*'reward'"):
        compare_plots.bands_figure(groups, "rewards")


def test_the_frontier_joins_what_no_other_run_beats_in_both(groups):
    assert compare_plots.frontier([(100, 5), (120, 6), (140, 3), (90, 2), (80, 4)]) == [(90, 2), (140, 3)]
    figure = compare_plots.frontier_figure(groups)
    (best,) = [line for line in figure.axes[0].lines if line.get_label() == "not beaten in both"]
    assert [round(x) for x in best.get_xdata()] == [90, 140] and list(best.get_ydata()) == [2, 3]


def test_each_rank_has_its_bar(groups):
    ax = compare_plots.ranks_figure(groups).axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    sizes = dict(zip(labels, [bar.get_width() for bar in ax.patches]))
    assert sizes["loss_impl=naive, rank 1"] == 6 and sizes["loss_impl=chunked, rank 0"] == 2 and len(sizes) == 4


def test_several_series_of_a_run_are_curves_of_their_own(tmp_path):
    run = open_run("07_y", {"seed": 0}, tmp_path)
    for name in ("one", "several"):
        for step in (1, 2):
            run.log(step, series=name, loss=0.1, reward=0.5, peak_bytes=[GIB] * (1 if name == "one" else 2))
    (run.folder / "several").mkdir()
    run.write_json("several/receipt.json", {"passed": True, "checks": []})
    groups = grouped(collect([run.folder]))
    assert list(groups) == ["one", "several"]
    assert len(groups["several"][0].peaks) == 2 and groups["several"][0].receipt and not groups["one"][0].receipt


def test_runs_of_two_notebooks_do_not_name_what_only_one_of_them_has(tmp_path):
    for name, params in (("06_x", {"steps": 2}), ("06_x", {"steps": 3}), ("08_y", {"steps": 4, "server": 1})):
        run = open_run(name, params, tmp_path)
        run.log(1, reward=1.0)
        run.finish({})
    assert list(grouped(collect([tmp_path]))) == ["06_x steps=2", "06_x steps=3", "08_y"]


def test_a_renamed_run_has_its_own_name(tmp_path, monkeypatch):
    run = open_run("00_z", {"seed": 0}, tmp_path)
    run.finish({})
    monkeypatch.chdir(run.folder.rename(tmp_path / "best"))
    assert list(grouped(collect(["."]))) == ["best"]


def test_a_run_that_trains_nothing_still_has_its_line(tmp_path):
    run = open_run("00_z", {"seed": 0}, tmp_path)
    run.finish({"loss_difference": 0.5})
    frame = table(grouped(collect([run.folder])))
    assert list(frame.columns) == ["runs", "seeds", "finished", "receipts passed"] and frame["runs"][0] == "00_z"


def test_what_machines_differ_in_is_told(groups):
    curves = [curve for group in groups.values() for curve in group]
    assert machines(curves) == []
    curves[0].record.environment["commit"] = "0" * 40
    assert machines(curves)[0].startswith("commit: 000000000000... in 1, ") and machines(curves)[0].endswith(" in 3")
    assert differing([{"a": 1}, {"a": 1.0, "b": [2]}]) == {"a": [1, 1.0], "b": [None, [2]]}


def test_the_command_writes_all_and_only_reads_the_runs(root, tmp_path, capsys):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="left out"):
        assert cli.main(["compare", str(root), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| runs | seeds |") and "loss_impl: chunked, naive" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "curves.png", "frontier.png", "memory.png", "runs.csv", "table.md", "table.tex"
    ]  # fmt: skip
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("what", ["empty", "none", "06_x-corrupt"])
def test_what_is_no_run_is_named_in_a_line(root, tmp_path, capsys, what):
    (tmp_path / "empty").mkdir()
    path = root / what if what.startswith("06") else tmp_path / what
    assert cli.main(["compare", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and not (tmp_path / "out").exists()


RUBBISH = {"environment.json": '"x"', "summary.json": "3", "receipt.json": "{}", "parameters.json": "[]"}


@pytest.mark.parametrize("name, text", [*RUBBISH.items(), ("receipt.json", '{"passed": true, "checks": [3]}')])
def test_a_file_of_another_shape_leaves_its_run_out(tmp_path, name, text):
    make_run(tmp_path, "naive", 0, (4, 5), 100)
    other = make_run(tmp_path, "naive", 1, (4, 5), 100)
    (other / name).write_text(text)
    with pytest.warns(UserWarning, match=f"left out: .*{other.name}"):
        assert [curve.seed for curve in collect([tmp_path])] == [0]
    with pytest.raises(ValueError, match=other.name):
        collect([other])


ROWS = ['{"step": "5", "loss": 1}', '{"step": [1], "reward": 1}', '{"step": 5, "series": ["a"], "reward": 1}',
        '{"step": null, "resumed_at": null}', '{"step": 5, "reward": "x"}', '{"step": 5, "reward": NaN}',
        '{"step": 5, "peak_bytes": [null]}', '{"step": 5, "peak_bytes": 7, "loss": 1}',
        '{"step": 5, "num_tokens": "x", "step_time": 1, "reward": 1}']  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is no row of metrics")
def test_rows_that_no_trainer_writes_do_no_harm(tmp_path):
    run = make_run(tmp_path / "runs", "naive", 0, (4, 5), 100)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("\n".join(ROWS) + "\n")
    make_run(tmp_path / "runs", "naive", 1, (4, 5), 100)
    assert cli.main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0


def test_a_misspelt_key_is_refused_before_anything_is_written(root, tmp_path, capsys):
    with pytest.warns(UserWarning, match="left out"):
        assert cli.main(["compare", str(root), "--key", "rewrd", "--out", str(tmp_path / "out")]) == 2
    assert "--key rewrd: no run has logged it; logged are loss, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_in_parameters_breaks_no_table_and_no_picture(tmp_path, capsys):
    texts = ["Put $5 in $\\boxed{}$.", "first\nsecond | third", "50%_off & #1 ~^{}"]
    for text in texts:
        run = open_run("06_x", {"instruction": text, "seed": 0}, tmp_path / "runs")
        run.log(1, loss=0.1, reward=0.5, num_tokens=1, step_time=1.0, peak_bytes=[GIB])
        run.log(2, loss=0.1, reward=0.5, num_tokens=2, step_time=1.0)
        run.finish({})
    out = tmp_path / "out"
    assert cli.main(["compare", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert (out / "curves.png").exists() and len((out / "table.md").read_text().splitlines()) == 2 + len(texts)
    text = (out / "table.tex").read_text()
    assert "Put \\$5 in \\$\\textbackslash boxed" in text and "50\\%\\_off \\& \\#1" in text
    assert text.count("\\\\\n") == 1 + len(texts), "a line for each row"
    capsys.readouterr()


def test_what_ends_early_and_pictures_of_an_earlier_comparison_are_told_apart(tmp_path, capsys):
    for seed, steps in ((0, 20), (1, 7)):
        run = open_run("06_x", {"seed": seed}, tmp_path / "runs")
        for step in range(1, steps + 1):
            run.log(step, reward=0.5)
    (tmp_path / "frontier.png").write_bytes(b"of other runs")
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "06_x: ends at steps 7, 20; its curve has the steps that all have logged" in out
    assert "curves.png" in out and "mine.txt" not in out
    assert not (tmp_path / "frontier.png").exists() and (tmp_path / "mine.txt").exists()
