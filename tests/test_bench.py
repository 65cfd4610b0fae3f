"""The bench on a CPU: exact inputs, every provider a row, failures said, errors that are errors, nothing invented."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch

from grpo_lab import cli, plots
from grpo_lab.bench import heads, providers
from grpo_lab.bench import peak as bench_peak
from grpo_lab.bench import plots as bench_plots
from grpo_lab.bench import step as bench_step
from grpo_lab.bench.command import main
from grpo_lab.bench.files import read_table, recorded, write_table
from grpo_lab.bench.providers import PROVIDERS, Provider, Shape, make_inputs

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SHAPE = Shape(8, 16, 8, 101, 70, "float32")
CORE = {name: PROVIDERS[name] for name in ("bare GEMMs", "gradients alone", "naive", "chunked", "TRL")}
MADE = {"device": "X, 1 GiB", "commit": "abcdef0123", "time": "2030-01-01T00:00:00", "command": "make it"}


@pytest.fixture
def budgets(monkeypatch):
    """grpo_loss with the keyword memory_budget, whichever the core understands."""
    seen, real = [], providers.grpo_loss

    def with_budget(*args, memory_budget=None, **options):
        seen.append(memory_budget)
        rows = {None: "auto", "low": 16}.get(memory_budget, 32)
        return real(*args, **{"chunk_tokens": rows} | options)

    monkeypatch.setattr(providers, "grpo_loss", with_budget)
    return seen


@pytest.fixture
def quick(monkeypatch):
    """Peaks of 1 MiB, 2 MiB, ... instead of measured ones, which take a third of a second each."""
    peaks = itertools.count(1)
    monkeypatch.setattr(heads, "measure_peak", lambda fn, device: (fn(), next(peaks) << 20))


@pytest.fixture
def small(monkeypatch, quick):
    """Every table of the command on the test's own shape."""
    tables = {name: [SHAPE] for name in heads.SHAPES["cpu"]}
    monkeypatch.setitem(heads.SHAPES, "cpu", tables | {"zero": [SHAPE, heads.replace(SHAPE, zero_share=0.5)]})


def fails(error):
    def fn(*_, **__):
        raise error

    return Provider({"": fn})


@pytest.mark.parametrize("scored", [8, 70, 128])
def test_inputs_score_exactly_what_the_shape_says(scored):
    x = make_inputs(Shape(8, 16, 8, 101, scored, "float32"), CPU)
    lengths = x["mask"].sum(1)
    assert lengths.sum() == scored and lengths.min() >= 1 and lengths.max() <= 16
    assert torch.equal(x["mask"], (torch.arange(16) < lengths[:, None]).long())
    assert (x["advantages"].view(-1, 4).sum(1).abs() < 1e-5).all() and x["advantages"].all()


@pytest.mark.parametrize("batch", [1, 6, 12, 16])
def test_advantages_of_any_batch(batch):
    x = make_inputs(Shape(batch, 16, 8, 101, 5 * batch, "float32"), CPU)
    assert x["advantages"].shape == (batch,) and torch.isfinite(x["advantages"]).all() and x["advantages"].any()


@pytest.mark.parametrize("share, sequences", [(0.0, 0), (0.3, 20), (0.5, 32), (0.6, 40), (1.0, 64)])
def test_zero_advantages_are_whole_groups_and_all_else_stays(share, sequences):
    shape = Shape(64, 16, 8, 101, 700, "float32")
    plain, x = make_inputs(shape, CPU), make_inputs(heads.replace(shape, zero_share=share), CPU)
    groups = (x["advantages"] == 0).view(-1, 4)
    assert groups.sum() == sequences and torch.equal(groups.any(1), groups.all(1))
    assert all(torch.equal(x[name], plain[name]) for name in x if name != "advantages")


def test_a_confident_policy_is_confident():
    x = make_inputs(Shape(4, 32, 512, 2048, 100, "float32", peaked=True), CPU)
    p = (x["hidden"] @ x["weight"].T).softmax(-1).gather(-1, x["token_ids"][..., None])
    assert p.median() > 0.95 and p.min() > 0.3 and p.max() < 1


@pytest.mark.parametrize("trainable", [True, False])
def test_every_provider_is_a_row_and_failures_say_so(trainable, budgets):
    failing = {
        "broken": fails(RuntimeError("no kernel\nfor this device")),
        "silent": fails(ZeroDivisionError()),
        "full": fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")),
        "full, too": fails(torch.cuda.OutOfMemoryError("again")),
        "missing": fails(ModuleNotFoundError("No module named 'x'")),
    }
    chosen = {name: p for name, p in PROVIDERS.items() if trainable or name != "Liger"}  # it compiles for seconds
    rows = heads.bench(SHAPE, trainable, CPU, failing | chosen, repeats=2)
    assert [row["provider"] for row in rows] == [*failing, *chosen]
    rows = {row["provider"]: row for row in rows}
    notes = {name: rows[name]["note"] for name in failing}
    assert notes == {
        "broken": "RuntimeError: no kernel",
        "silent": "ZeroDivisionError: ZeroDivisionError",
        "full": "out of memory: CUDA out of memory. Tried to allocate 9 GiB",
        "full, too": "out of memory: again",
        "missing": "absent: No module named 'x'",
    }
    assert all(rows[name]["ms"] is None and rows[name]["dh_error"] is None for name in failing)
    exact = ["naive", "chunked", "chunked, low memory", "chunked, fp32 logits", "TRL", "PyTorch"]
    if importlib.util.find_spec("liger_kernel"):
        exact.append("Liger, not compiled")
    for row in map(rows.get, exact):
        assert row["ms"] >= row["min_ms"] > 0 and row["peak_mib"] >= 0 and row["note"] == "", row
        assert 0 < row["dh_error"] < 1e-5 and row["head"] == ("trainable" if trainable else "frozen"), row
        assert 0 < row["dw_error"] < 1e-5 if trainable else row["dw_error"] is None, row
        assert row["tflops"] == pytest.approx(2 * 70 * 8 * 101 * (3 if trainable else 2) / row["ms"] / 1e9)
    for name in chosen.keys() - set(exact) - set(heads.FLOORS):  # installed or not, working on this machine or not
        assert rows[name]["ms"] or rows[name]["note"]
    assert "entropy" in rows["Liger, not compiled"]["lacks"] and "entropy" in rows["PyTorch"]["lacks"]
    assert rows["bare GEMMs"]["ms"] > 0 and rows["bare GEMMs"]["note"].startswith("the fastest of C 2048, C 4096: C ")
    assert rows["bare GEMMs"]["dh_error"] is None and rows["gradients alone"]["ms"] is None
    assert "low" in budgets


def test_a_package_that_is_not_there_is_said_to_be_absent(monkeypatch, quick):
    for name in ("liger_kernel.chunked_loss", "cut_cross_entropy", "trl.kernels"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    names = ("Liger", "Apple CCE", "TRL", "PyTorch")
    rows = heads.bench(SHAPE, False, CPU, {name: PROVIDERS[name] for name in names}, repeats=1)
    assert all(row["note"].startswith("absent: ") and row["ms"] is None for row in rows), rows


def test_a_failure_in_a_later_pass_is_a_row_too(quick):
    calls = []

    def third_time(**x):
        calls.append(1)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("fragmented")
        return providers.grpo_loss(**x)[0]

    rows = heads.bench(SHAPE, True, CPU, {"late": Provider({"": third_time}), "naive": PROVIDERS["naive"]}, repeats=3)
    assert rows[0]["note"] == "out of memory: fragmented" and rows[0]["ms"] is None and len(calls) == 3
    assert rows[1]["ms"] > 0


def test_no_room_for_inputs_or_reference_is_said(monkeypatch, quick):
    def full(*_, **__):
        raise torch.OutOfMemoryError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(heads, "grpo_loss", full)  # the reference's alone: providers have their own name for it
        rows = {row["provider"]: row for row in heads.bench(SHAPE, True, CPU, CORE, repeats=1)}
    assert rows["TRL"]["ms"] > 0 and rows["TRL"]["dh_error"] is None
    assert rows["TRL"]["note"] == "no float64 reference: out of memory: too large"
    monkeypatch.setattr(heads, "make_inputs", full)
    rows = heads.bench(SHAPE, True, CPU, CORE, repeats=1)
    assert [row["note"] for row in rows] == ["out of memory: too large"] * len(CORE)


@pytest.mark.parametrize("option", [{}, dict(zero_share=0.5), dict(peaked=True), dict(off_policy=True)])
def test_the_reference_is_the_float64_gradient(option):
    shape = heads.replace(SHAPE, **option)
    x = make_inputs(shape, CPU)
    x |= {name: x[name].double().requires_grad_() for name in ("hidden", "weight")}
    logps = torch.log_softmax(x["hidden"] @ x["weight"].T, -1).gather(-1, x["token_ids"][..., None]).squeeze(-1)
    ratio = torch.exp(logps - x.get("old_logps", logps.detach()))
    assert (ratio[x["mask"] == 1] - 1).abs().max() < 0.19, "nothing is clipped"
    loss = -(ratio * x["advantages"][:, None] * x["mask"]).sum() / x["mask"].sum()
    loss.backward()
    exact = heads.float64_gradients(shape, CPU)
    for name in ("hidden", "weight"):
        assert (exact[name] - x[name].grad).norm() < 1e-10 * x[name].grad.norm()


def test_a_wrong_gradient_has_a_larger_error(quick):
    def off_by(factor):
        return Provider({"": lambda **x: factor * providers.grpo_loss(**x)[0]})

    rows = heads.bench(SHAPE, True, CPU, {"right": off_by(1.0), "wrong": off_by(1.01)}, repeats=1)
    for key in ("dh_error", "dw_error"):
        assert rows[0][key] < 1e-5 and rows[1][key] == pytest.approx(0.01, rel=0.01)


def test_useful_work_shrinks_with_zero_advantages(quick):
    (row,) = heads.bench(heads.replace(SHAPE, zero_share=0.5), True, CPU, {"chunked": PROVIDERS["chunked"]}, repeats=1)
    x = make_inputs(SHAPE, CPU)
    assert row["active"] == pytest.approx(x["mask"][4:].sum().item() / 70) and 0 < row["active"] < 1
    assert row["tflops"] == pytest.approx(2 * 70 * 8 * 101 * (1 + 2 * row["active"]) / row["ms"] / 1e9)


@pytest.mark.parametrize("zero_share", [0.0, 0.5, 1.0])
def test_bare_products_are_the_ones_the_gradient_needs(zero_share, monkeypatch):
    x = make_inputs(heads.replace(SHAPE, zero_share=zero_share), CPU)
    x["weight"].requires_grad_()
    counted, real = [0, 0], torch.mm

    def mm(a, b, **options):
        counted["out" not in options] += len(a)
        return real(a, b, **options)

    monkeypatch.setattr(torch, "mm", mm)
    PROVIDERS["bare GEMMs"].variants["C 2048"](**x)
    assert counted == [70, (x["mask"].sum(1) * (x["advantages"] != 0)).sum()]


def test_frontier_has_both_curves_and_its_ends(budgets, monkeypatch, quick):
    monkeypatch.setattr(heads, "TILES", (512, 4096))
    members = {name: PROVIDERS[name] for name in heads.MEMBERS["frontier"]}
    cells = list(heads.frontier(Shape(8, 32, 64, 3000, 200, "float32"), CPU, members, 1, 0, steps=1))
    assert [{row["head"] for row in cell} for cell in cells] == [{"trainable"}, {"frozen"}]
    settings = [(row["provider"], row["setting"].split(" ")[0]) for row in cells[0]]
    assert settings[:4] == [("bare GEMMs", ""), ("gradients alone", ""), ("chunked", "default"), ("chunked", "low")]
    assert ("TRL", "tile") in settings and ("chunked", "budget") in settings
    assert "low" in budgets and any(isinstance(budget, int) for budget in budgets)
    figure = bench_plots.frontier_figure([row for cell in cells for row in cell])
    assert {"chunked", "TRL", "bare GEMMs"} <= {line.get_label() for line in figure.axes[0].lines}
    assert len(plots.interactive(figure).data) == sum(len(ax.lines) for ax in figure.axes)


def test_a_loss_without_budgets_leaves_rows_that_say_so(monkeypatch, quick):
    monkeypatch.setattr(providers, "grpo_loss", lambda *args, **options: heads.grpo_loss(*args, **options))
    monkeypatch.setitem(PROVIDERS, "chunked, low memory", fails(TypeError("no memory_budget")))
    cell = next(heads.frontier(SHAPE, CPU, {"chunked": PROVIDERS["chunked"]}, 1, 0))
    assert [row["setting"] for row in cell] == ["default", "low"] and cell[1]["note"] == "TypeError: no memory_budget"


def test_whole_steps_take_turns_on_one_model_and_failures_are_rows(monkeypatch):
    built, real = [], bench_step.build
    monkeypatch.setattr(bench_step, "build", lambda *args: built.append(real(*args)) or built[-1])
    monkeypatch.setitem(PROVIDERS, "naive", fails(torch.OutOfMemoryError("too large")))
    cells = [(True, 2, 4, 6), (False, 2, 4, 6)]
    tables = list(bench_step.bench_steps("tiny", bench_step.TINY, "float32", cells, CPU, repeats=1))
    assert len(built) == 1 and [rows[0]["checkpointing"] for rows in tables] == [True, False]
    for rows in tables:
        assert [row["provider"] for row in rows] == ["no head", "naive", "TRL", "chunked"]
        assert [bool(row["ms"]) for row in rows] == [True, False, True, True]
        assert rows[1]["note"] == "out of memory: too large" and not rows[2]["note"]
    monkeypatch.setattr(bench_step, "build", lambda *_: fails(torch.OutOfMemoryError("no room")).variants[""]())
    tables = list(bench_step.bench_steps("tiny", bench_step.TINY, "float32", cells, CPU, repeats=1))
    assert [row["note"] for rows in tables for row in rows] == ["out of memory: no room"] * 8


def test_an_optimiser_that_ran_out_of_memory_starts_again(monkeypatch):
    model, optimiser = bench_step.build(bench_step.TINY, "float32", CPU, 0)
    real, calls = optimiser.step, []

    def step():
        calls.append(1)
        if len(calls) == 1:
            optimiser.state[next(model.parameters())]["step"] = torch.tensor(0.0)
            raise torch.OutOfMemoryError("exp_avg")
        real()

    optimiser.step = step
    monkeypatch.setattr(bench_step, "build", lambda *_: (model, optimiser))
    (rows,) = bench_step.bench_steps("tiny", bench_step.TINY, "float32", [(True, 2, 4, 6)], CPU, repeats=1)
    assert rows[0]["note"] == "out of memory: exp_avg" and all(row["ms"] for row in rows[1:])


def test_peaks_are_taken_on_one_model_and_what_has_no_room_is_not_tried(monkeypatch):
    built, stepped, real = [], [], bench_peak.build

    def step(model, optimiser, name, batch, *_):
        stepped.append((name, batch))
        if (name, batch) == ("chunked", 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch << 20

    monkeypatch.setattr(bench_peak, "build", lambda *args: built.append(args) or real(*args))
    monkeypatch.setattr(bench_peak, "_step", step)
    monkeypatch.setattr(bench_peak, "ROOM_GIB", 1)
    tiny = "tiny", bench_step.TINY, "float32", "lora"
    first, *_ = cells = list(bench_peak.measured_peaks(*tiny, (2, 4, 16_384), CPU))
    assert len(built) == 1 and stepped[0] == ("chunked", 1), "the optimiser's state is made once, on one sequence"
    assert [(rows[0]["checkpointing"], rows[0]["batch"]) for rows in cells] == [
        (checkpointing, batch) for checkpointing in (True, False) for batch in (2, 4, 16_384)
    ]
    assert [row["provider"] for row in first] == list(bench_peak.PEAK_PROVIDERS)
    assert all(row["peak_mib"] == 2 and row["predicted_mib"] > 0 and not row["note"] for row in first)
    assert [row["note"] for row in cells[1]] == ["", "", "out of memory: CUDA out of memory"]
    assert all(row["note"] == "not tried: predicted beyond 1 GiB" and row["peak_mib"] is None for row in cells[2])


def test_a_model_that_cannot_be_built_is_said_in_each_peak_row(monkeypatch):
    monkeypatch.setattr(bench_peak, "build", lambda *_: fails(torch.OutOfMemoryError("no room")).variants[""]())
    cells = bench_peak.measured_peaks("tiny", bench_step.TINY, "float32", "full", (2,), CPU)
    assert {row["note"] for rows in cells for row in rows} == {"out of memory: no room"}


def test_the_peak_table_runs_whole_steps(tmp_path, capsys):
    options = ["--tables", "peak", "--dtypes", "bfloat16", "--out", str(tmp_path)]
    assert cli.main(["bench", *options]) == 0
    rows = read_table(tmp_path / "peak_cpu.csv")
    assert len(rows) == 2 * 2 * 3 and not any(row["note"] for row in rows)
    assert {(row["tuning"], row["checkpointing"]) for row in rows} == {
        (tuning, checkpointing) for tuning in ("full", "lora") for checkpointing in (True, False)
    }
    assert "peak: model tiny, tuning lora, dtype bfloat16, checkpointing False, batch 2" in capsys.readouterr().out


def test_one_command_writes_every_table_and_each_can_be_drawn(small, budgets, tmp_path, capsys):
    names = ["naive", "chunked", "chunked, low memory", "TRL", "bare GEMMs", "gradients alone"]
    options = ["--tables", "head,zero,off_policy,wide,peaked,frontier,step", "--providers", *names, "no head"]
    assert cli.main(["bench", *options, "--repeats", "1", "--dtypes", "float32", "--out", str(tmp_path)]) == 0
    tables = {path.stem.removesuffix("_cpu"): read_table(path) for path in tmp_path.iterdir()}
    assert set(tables) == {"head", "zero", "off_policy", "wide", "peaked", "frontier", "step"}
    for rows in tables.values():
        assert all(row["torch"] == torch.__version__ and row["commit"] and row["device"] for row in rows)
        assert all(row["command"].startswith("python -m grpo_lab bench --tables head,") for row in rows)
        assert all(row["command"].endswith(f" --out {tmp_path.name}") for row in rows)
        assert not any(row["note"] for row in rows if row["provider"] != "bare GEMMs")
    assert [row["provider"] for row in tables["step"]] == ["no head", "naive", "TRL", "chunked"] * 2
    assert {row["checkpointing"] for row in tables["step"]} == {True, False}
    figures = {
        "head": plots.heads_figure,
        "wide": plots.heads_figure,
        "peaked": plots.heads_figure,
        "zero": bench_plots.zero_advantage_figure,
        "frontier": bench_plots.frontier_figure,
        "step": bench_plots.steps_figure,
    }
    for name, draw in figures.items():
        assert len(plots.png(draw(tables[name]))) > 1000
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("zero: head frozen, ")][1:]
    assert "zero_share 0.5" in line


def test_a_sweep_that_is_stopped_leaves_what_it_has_measured(small, tmp_path, monkeypatch):
    real, calls = heads.bench, []

    def second_time(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(heads, "bench", second_time)
    with pytest.raises(KeyboardInterrupt):
        main(["--tables", "head", "--providers", "naive", "--repeats", "1", "--out", str(tmp_path)])
    (row,) = read_table(tmp_path / "head_cpu.csv")
    assert row["provider"] == "naive" and row["head"] == "trainable" and row["ms"] > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tables", "heads"], "--tables: 'heads' is none of head, zero"),
        (["--providers", "Liger", "chunk"], "--providers: 'chunk' is none of bare GEMMs"),
        (["--models", "Qwen3-9B"], "--models: 'Qwen3-9B' is none of Qwen3-0.6B"),
        (["--dtypes", "int8"], "--dtypes: 'int8' is none of bfloat16"),
        (["--repeats", "0"], "--repeats: 0, expected 1 or more"),
        (["--tunings", "dora"], "--tunings: 'dora' is none of lora, full"),
        (["--cards", "big"], "--cards: 'big', expected numbers by commas"),
    ],
)
def test_bad_requests_say_what_to_do(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *options])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_tables_come_back_as_they_were_written(tmp_path):
    rows = [
        {"provider": "a, b", "ms": 1.5, "peak_mib": None, "batch": 64, "peaked": False, "note": "x\ny"} | MADE,
        {"provider": "1", "ms": None, "peak_mib": 3e9, "batch": 8, "peaked": True, "note": None}
        | MADE
        | {"commit": "1e5"},
    ]  # fmt: skip
    write_table(tmp_path / "deep" / "head_x.csv", rows)
    assert read_table(tmp_path / "deep" / "head_x.csv") == rows


def test_recorded_tables_say_where_they_come_from_or_that_there_is_none(tmp_path, capsys):
    assert recorded("head", "x", tmp_path) == [] and "head_x.csv is not recorded yet" in capsys.readouterr().out
    row = {"provider": "naive", "ms": 1.0} | MADE | {"torch": "2.11.0", "trl": None}
    for commit, said in (("abcdef0123", "abcdef0"), ("abcdef0123-dirty", "abcdef0 with changes (see data/README.md)")):
        write_table(tmp_path / "head_x.csv", [row | {"commit": commit}])
        assert recorded("head", "x", tmp_path)[0]["torch"] == "2.11.0"
        assert capsys.readouterr().out == (f"head_x.csv: recorded on one X, 2030-01-01, commit {said}\ntorch 2.11.0\n")


def test_the_committed_records_can_be_read_and_drawn():
    assert {row["head"] for row in recorded("head")} == {"trainable", "frozen"}
    for name, draw in (("frontier", bench_plots.frontier_figure), ("zero", bench_plots.zero_advantage_figure)):
        if rows := recorded(name):
            assert len(plots.png(draw(rows))) > 1000
    memory, time = bench_plots.steps_figure(recorded("step")).axes
    assert any(text.get_text().endswith(")") for text in memory.texts) and time.patches
    rows = recorded("batch")
    (bars,) = bench_plots.batch_figure(rows).axes
    assert [bar.get_width() for bar in bars.patches] == [row["largest_batch"] for row in rows if row["largest_batch"]]


def test_the_readme_quotes_what_was_recorded():
    text = (ROOT / "README.md").read_text().split("## What it costs")[1].split("\n## ")[0]
    quoted = {
        "naive (full logits)": "naive",
        "TRL 1.16's fused head": "TRL",
        "Liger's GRPO loss": "Liger",
        "Apple's CCE": "Apple CCE",
        "grpo_lab, chunked": "chunked",
        'grpo_lab, `memory_budget="low"`': "chunked, low memory",
        "floor: bare matrix products": "bare GEMMs",
        "floor: gradients alone": "gradients alone",
    }
    rows = {(row["provider"], row["head"]): row for row in recorded("head")}
    found = {}
    for line in (line for line in text.splitlines() if line.startswith("| ") and "head | |" not in line):
        label, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        found[label] = cells
        for cell, (head, key) in zip(
            cells, itertools.product(("trainable", "frozen"), ("ms", "peak_mib")), strict=True
        ):
            value = rows[quoted[label], head][key]
            unit = {"ms": "ms", "peak_mib": "MiB"}[key]
            assert cell in (f"{value or 0:,.0f} {unit}", "" if label.startswith("floor") else None), (label, head, key)
    assert found.keys() == quoted.keys()
    every = [row[key] for row in [*rows.values(), *recorded("frontier")] for key in ("ms", "min_ms", "peak_mib")]
    every = {f"{value:,.0f}" for value in every if value} | {row["setting"] or "" for row in recorded("frontier")}
    for row in recorded("batch"):
        said = str(row["largest_batch"] or f"{row['shared_ms'] / 1000:.2f}")
        assert re.search(rf"\b{said}\b", text), row
    for value, unit in re.findall(r"([\d,]+)\s(ms|MiB)", text):
        assert value in every or f"budget {value} {unit}" in every, f"{value} {unit}"


def test_steps_figure_names_what_failed():
    row = {"dtype": "bfloat16", "batch": 8, "model": "M", "checkpointing": False, "note": None}
    rows = [row | dict(provider=p, peak_mib=m, ms=t) for p, m, t in (("no head", 1024, 500), ("TRL", 2048, 750))]
    rows.append(row | dict(provider="naive", peak_mib=None, ms=None, note="out of memory: 9 GiB"))
    memory, _ = bench_plots.steps_figure(rows).axes
    assert [bar.get_width() for bar in memory.patches] == [1, 1]
    assert {text.get_text().strip() for text in memory.texts} == {"2.00 (+1.00)", "out of memory"}
    assert [tick.get_text() for tick in memory.get_yticklabels()][
        0
    ] == "M, bfloat16, 8 sequences, no checkpointing: TRL"
