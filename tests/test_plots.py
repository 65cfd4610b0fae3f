import json
import math

import pytest

from grpo_lab import plots
from grpo_lab.bench import plots as bench_plots

MEMORY = [
    {
        "batch": b,
        "impl": impl,
        "dtype": dtype,
        "predicted": size * b**power,
        "measured": size * b**power if b < 8 else None,
    }
    for impl, size, power in (("naive", 3e7, 1), ("chunked", 6e7, 0.1))
    for dtype, size in (("fp32", size), ("bf16", size / 2))
    for b in (8, 1, 2, 4)
]
RUNS = {
    "chunked": [{"step": s, "reward": s / 10, "kl": 0.1} for s in range(1, 9)],
    "naive": [{"step": s, "reward": s / 11} for s in range(1, 9)] + [{"step": 9, "reward": None}, {"step": 9}],
}


def test_memory_figure_draws_lines_in_order_and_the_points_that_were_measured():
    (ax,) = plots.memory_figure(MEMORY).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert len(lines) == 8
    assert list(lines["naive, fp32: predicted"].get_xdata()) == [1, 2, 4, 8]
    assert list(lines["naive, fp32: measured"].get_xdata()) == [1, 2, 4]
    assert list(lines["chunked, bf16: measured"].get_ydata()) == [3e7 * b**0.1 for b in (1, 2, 4)]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(looks) == 8, "each series can be told from the others"


def test_memory_figure_without_a_measurement():
    rows = [r | {"measured": None} for r in MEMORY]
    assert len(plots.memory_figure(rows).axes[0].lines) == 4


@pytest.mark.parametrize(
    "count, text", [(512, "512 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (3 * 2**40, "3.07e+03 GiB")]
)
def test_bytes_are_written_in_binary_units(count, text):
    assert plots.format_bytes(count) == text


def test_curves_leave_out_what_was_not_logged():
    (ax,) = plots.curves_figure(RUNS, window=2).axes
    one, two = ax.lines
    assert list(one.get_ydata()) == pytest.approx([0.1] + [(2 * s - 1) / 20 for s in range(2, 9)])
    assert len(two.get_xdata()) == 8 and one.get_linestyle() != two.get_linestyle()
    assert len(plots.curves_figure(RUNS, "kl").axes[0].lines) == 1
    with pytest.raises(
        ValueError, match=r"key = 'rewards': no run has logged it; logged are \['kl', 'reward', 'step'\]"
    ):
        plots.curves_figure(RUNS, "rewards")


def test_error_budget_marks_what_exceeds_it():
    rows = [{"name": "loss", "error": 1e-7, "eager": 2e-7}, {"name": "dW", "error": 4e-3, "eager": 2e-3}]
    (ax,) = plots.error_budget_figure(rows).axes
    assert [bar.get_width() for bar in ax.patches] == [0.5, 2.0]
    colours = [bar.get_facecolor()[:3] for bar in ax.patches]
    assert colours[0] != colours[1]
    with pytest.raises(ValueError, match="eager's error is 0 for"):
        plots.error_budget_figure([{"name": "x", "error": 0.0, "eager": 0.0}])


def test_before_and_after_stand_side_by_side():
    (ax,) = plots.before_after_figure({"sampled": (0.35, 0.9), "greedy": (0.5, 0.95)}).axes
    assert [bar.get_height() for bar in ax.patches] == [0.35, 0.5, 0.9, 0.95]
    assert {text.get_text() for text in ax.texts} == {"35%", "50%", "90%", "95%"}


def test_the_plotly_twin_shows_the_same_points():
    figure = plots.memory_figure(MEMORY)
    twin = plots.interactive(figure)
    assert [t.name for t in twin.data] == [line.get_label() for line in figure.axes[0].lines]
    for trace, line in zip(twin.data, figure.axes[0].lines):
        assert list(trace.x) == list(line.get_xdata()) and list(trace.y) == list(line.get_ydata())
        assert (trace.line.color or trace.marker.color) == line.get_color()
    assert twin.layout.xaxis.type == "log" and twin.layout.yaxis.title.text == "peak memory beyond the inputs"
    assert twin.layout.xaxis.ticktext == ("1", "2", "4", "8") and "128 MiB" in twin.layout.yaxis.ticktext
    assert twin.data[0].text[0] == plots.format_bytes(3e7)


def test_show_gives_a_small_picture_and_the_twin_without_plotly_itself(tmp_path, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    plots.show(plots.curves_figure(RUNS), tmp_path / "curves.png", twin=True)
    picture, twin = shown
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "image/png" in picture and set(twin) == {"application/vnd.plotly.v1+json", "text/plain"}
    assert len(json.dumps(shown)) < 100_000


def test_panels_draw_each_step_and_the_mean_and_their_twin_follows():
    figure = plots.panels_figure(RUNS["chunked"], {"Reward": {"all": "reward", "none": "absent"}, "KL": {"k": "kl"}}, 2)
    one, two = figure.axes
    assert [line.get_label() for line in one.lines] == ["_all: each step", "all"] and len(two.lines) == 2
    twin = plots.interactive(figure)
    assert [t.showlegend for t in twin.data] == [False, True, False, False]
    assert list(twin.data[2].y) == list(two.lines[0].get_ydata()) and twin.data[2].xaxis == "x2"


def test_the_twin_names_a_provider_once_and_keeps_limits_and_per_cent():
    rows = [
        {"provider": p, "head": head, "zero_share": share, "ms": 10 - 5 * share}
        for p in ("chunked", "TRL") for head in ("trainable", "frozen") for share in (0.0, 0.5)
    ]  # fmt: skip
    twin = plots.interactive(bench_plots.zero_advantage_figure(rows))
    assert [t.name for t in twin.data if t.showlegend] == ["chunked", "TRL"]
    assert [t.legendgroup for t in twin.data] == ["chunked", "chunked", "TRL", "TRL"] * 2
    assert twin.layout.yaxis.range[0] == 0 and "50%" in twin.layout.xaxis2.ticktext


def test_the_twin_has_the_title_and_the_words_beside_the_points():
    rows = [
        {"provider": "chunked", "head": "trainable", "peak_mib": m, "ms": 80 - m / 64, "setting": s}
        for m, s in ((1024, "low, 1"), (2048, "default"))
    ]
    twin = plots.interactive(bench_plots.frontier_figure(rows, "Time against memory"))
    assert twin.layout.title.text == "Time against memory"
    places = {note.text: (note.x, note.y) for note in twin.layout.annotations if note.xref == "x"}
    assert [note.xanchor for note in twin.layout.annotations if note.xref == "x"] == ["right", "center"]
    assert places == {"low": (10 * math.log10(2), 64.0), "default": (11 * math.log10(2), 48.0)}


def test_budget_heatmap_prints_every_ratio_and_bolds_what_exceeds_the_budget():
    rows = [{"name": n, "column": c, "ratio": r} for n, c, r in (("a", "dH", 0.5), ("a", "dW", 1.0), ("b", "dH", 1.7))]
    (ax,) = plots.budget_heatmap_figure([*rows, {"name": "b", "column": "dW", "ratio": 1.4}]).axes
    assert [(t.get_text(), t.get_weight()) for t in ax.texts] == [
        ("0.50", "normal"), ("1.00", "normal"), ("1.70", "bold"), ("1.40", "normal")
    ]  # fmt: skip


def test_group_figure_tells_right_from_wrong_and_keeps_the_end_of_a_long_answer():
    texts = ["Mia has 3 + 4 = 7 pens.\n#### 7", "Mia has 3 * 4 = 12 pens.\nMia has 12 - 2 = 10 pens.\n#### 10"]
    left, right = plots.group_figure(texts, [1.0, 0.0], [0.7, -0.7], [0.25, -0.5]).axes
    assert [bar.get_width() for bar in left.patches] == [0.7, -0.7]
    assert [bar.get_width() for bar in right.patches] == [0.25, -0.5]
    assert left.patches[0].get_facecolor() != left.patches[1].get_facecolor()
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["1: Mia has 3 + 4 = 7 pens. #### 7", "2: Mia has 3 * 4 = 12 … #### 10"]


def test_timelines_are_stretched_to_one_width_in_mebibytes():
    (ax,) = plots.timelines_figure({"naive": [0, 3 * 2**20, 0], "chunked": [0, 2**20, 0, 2**20, 0]}).axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 0.5, 1], [0, 0.25, 0.5, 0.75, 1]]
    assert list(ax.lines[0].get_ydata()) == [0, 3, 0]
    assert [(t.name, t.line.shape) for t in plots.interactive(ax.figure).data] == [("naive", "hv"), ("chunked", "hv")]


def test_stages_and_plain_lines():
    rows = [{"stage": "naive", "mib": 192.0, "products": 3.0}, {"stage": "chunked", "mib": 80.0, "products": 3.5}]
    left, right = plots.stages_figure(rows, {"mib": "MiB", "products": "products"}, "stages").axes
    assert [bar.get_width() for bar in left.patches] == [192, 80] and left.texts[0].get_text() == "192"
    assert [text.get_text() for text in right.texts] == ["3", "3.5"]
    (ax,) = plots.lines_figure([1, 2, 4], {"a": [1, 2, 3], "b": [3, 2, 1]}, "t", "x", "y").axes
    assert ax.get_xscale() == "log" and [line.get_linestyle() for line in ax.lines] == ["-", "--"]
    assert plots.lines_figure([1, 2], {"a": [1, 2]}, "t", "x", "y", log=False).axes[0].get_xscale() == "linear"


def test_heads_figure_says_which_provider_failed():
    rows = [
        {"provider": p, "head": h, "peak_mib": m, "ms": t}
        for p, h, m, t in (("naive", "trainable", 300, 9), ("naive", "frozen", 250, 7), ("Liger", "frozen", None, None))
    ]
    memory, time = plots.heads_figure(rows).axes
    assert [bar.get_width() for bar in memory.patches] == [300, 250, 0]
    assert [bar.get_width() for bar in time.patches] == [9, 7, 0]
    assert [text.get_text() for text in time.texts] == ["9", "7", "failed"]
    _, time = plots.heads_figure(rows, longest_ms=8).axes
    assert time.get_xlim() == (0, 8) and {text.get_text() for text in time.texts} == {"", "7", "failed", "9 → "}


def test_parts_figure_stacks_the_parts_of_each_row_and_says_their_sum():
    rows = {"one": {"a": 1.0, "b": 2.0, "c": 0.5}, "two": {"a": 0.0, "b": 4.0, "c": 1.0}}
    (ax,) = plots.parts_figure(rows, "parts").axes
    assert [[(bar.get_x(), bar.get_width()) for bar in bars] for bars in ax.containers] == [
        [(0.0, 1.0), (0.0, 0.0)],
        [(1.0, 2.0), (0.0, 4.0)],
        [(3.0, 0.5), (4.0, 1.0)],
    ]
    assert [text.get_text().strip() for text in ax.texts] == ["3.5", "5.0"]
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in ax.containers}
    assert len(looks) == 3
