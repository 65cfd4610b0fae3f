"""The notebooks' figures: one function each, static matplotlib, plus ``show`` that adds an interactive plotly twin.

Each returns a matplotlib Figure and displays nothing by itself. Colours are those of Okabe and Ito, which colour-blind
eyes tell apart; line styles, markers and hatches do so in grey print. Left out: tables, widgets and animations;
``bench/plots.py`` draws the benchmark's curves.
"""

import base64
import io
import itertools
import json
from math import log10

from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

# Okabe and Ito, "Color Universal Design" (2008); their yellow is left out, too pale for lines on white.
BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY = "#0072B2 #E69F00 #009E73 #D55E00 #CC79A7 #56B4E9 #666666".split()
PALETTE = [BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY]
IMPL_COLOURS = {"naive": RED, "chunked": BLUE, "trl": GREEN}


def axes(title, x_label, y_label, size=(6.4, 3.8)):
    """A figure with one plain pair of axes."""
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    ax = figure.add_subplot()
    dress(ax, title, x_label, y_label)
    return figure, ax


def dress(ax, title, x_label, y_label):
    ax.set_title(title, fontsize=11, loc="left")
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def memory_figure(rows, title="Peak memory of the loss, forward and backward"):
    """Peak bytes against batch size: predicted lines, measured points.

    rows: dicts with batch, impl ("naive", "chunked"), dtype (text), predicted (bytes) and measured (bytes, or None).
    """
    figure, ax = axes(title, "sequences in the batch", "peak memory beyond the inputs")
    styles = dict(zip(dict.fromkeys(r["dtype"] for r in rows), itertools.cycle([("-", "o"), ("--", "s"), (":", "^")])))
    for impl, dtype in dict.fromkeys((r["impl"], r["dtype"]) for r in rows):
        chosen = sorted((r for r in rows if (r["impl"], r["dtype"]) == (impl, dtype)), key=lambda r: r["batch"])
        line, marker = styles[dtype]
        colour = IMPL_COLOURS.get(impl, GREY)
        batch = [r["batch"] for r in chosen]
        label = f"{impl}, {dtype}"
        ax.plot(batch, [r["predicted"] for r in chosen], line, color=colour, label=f"{label}: predicted")
        points = [(r["batch"], r["measured"]) for r in chosen if r["measured"] is not None]
        if points:
            ax.plot(*zip(*points), marker, color=colour, label=f"{label}: measured", markerfacecolor="white")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    ax.legend(fontsize=8, frameon=False, ncols=2)
    return figure


def format_bytes(count):
    """``count`` in the largest unit of which it holds one: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def smoothed(values, window):
    """Running mean over the last ``window`` values, over those there are at the start."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1])
            for i in range(len(values))]  # fmt: skip


def curves_figure(runs, key="reward", title="Reward during training", y_label=None, window=1):
    """One logged quantity against the step, several runs laid over one another.

    runs: name to metrics rows (``load_run(folder).metrics`` or ``trainer.state.log_history``); rows without the key, or
    with null, are left out. window: steps of the running mean. Raises ValueError where no run has logged the key.
    """
    figure, ax = axes(title, "step", y_label or key)
    styles = itertools.cycle([("-", 2.6), ("--", 1.8), (":", 1.8), ("-.", 1.4)])
    for (name, rows), colour, (line, width) in zip(runs.items(), itertools.cycle(PALETTE), styles):
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points:
            steps, values = zip(*points)
            colour = IMPL_COLOURS.get(name, colour)
            ax.plot(steps, smoothed(values, window), line, color=colour, linewidth=width, label=name)
    if not ax.lines:
        raise ValueError(f"key = {key!r}: no run has logged it; logged are "
                         f"{sorted({k for rows in runs.values() for row in rows for k in row})}")  # fmt: skip
    if len(runs) > 1:
        ax.legend(fontsize=8, frameon=False)
    return figure


def panels_figure(rows, panels, window=10):
    """What one run logged, in small panels two by two: every step in a pale line, the running mean in a strong one.

    rows: metrics rows (``load_run(folder).metrics``); panels: the panel's title to {label: key}. A key that no row
    holds is left out, so that one call serves runs that log different things. window: steps of the running mean.
    """
    figure = Figure(figsize=(9.0, 2.9 * -(-len(panels) // 2)), dpi=100, layout="constrained")
    grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flatten()
    for ax, (title, lines) in zip(grid, panels.items()):
        dress(ax, title, "step", "")
        for (label, key), colour in zip(lines.items(), PALETTE):
            points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
            if points:
                steps, values = zip(*points)
                ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35, label=f"_{label}: each step")
                ax.plot(steps, smoothed(values, window), color=colour, linewidth=2.2, label=label)
        if len(lines) > 1:
            ax.legend(fontsize=8, frameon=False)
    for ax in grid[len(panels) :]:
        ax.remove()
    return figure


def budget_heatmap_figure(rows, budget=1.5, title="Error against float64, in units of eager PyTorch's own"):
    """A cell per setting and quantity: blue where the error is below eager's, red above; bold beyond the budget.

    rows: dicts with name (the setting, a row), column (the quantity) and ratio (error divided by eager's).
    """
    names, columns = (list(dict.fromkeys(r[k] for r in rows)) for k in ("name", "column"))
    ratios = {(r["name"], r["column"]): r["ratio"] for r in rows}
    figure, ax = axes(title, "", "", size=(2.0 + 0.66 * len(columns), 1.1 + 0.21 * len(names)))
    colours = LinearSegmentedColormap.from_list("below_and_above", [BLUE, "#FFFFFF", RED])
    scale = TwoSlopeNorm(vcenter=1, vmin=0, vmax=max(budget, *ratios.values()))
    ax.imshow([[ratios[n, c] for c in columns] for n in names], aspect="auto", cmap=colours, norm=scale)
    for (name, column), ratio in ratios.items():
        weight = "bold" if ratio > budget else "normal"
        pale = abs(ratio - 1) < 0.6
        ax.text(columns.index(column), names.index(name), f"{ratio:.2f}", ha="center", va="center", fontsize=7.5,
                weight=weight, color="black" if pale else "white")  # fmt: skip
    ax.set_xticks(range(len(columns)), columns, fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return figure


def error_budget_figure(rows, budget=1.5, title="Error against float64, in units of eager PyTorch's own"):
    """Bars of a path's error divided by eager's in the same dtype, with the budget as a line.

    rows: dicts with name, error and eager: errors against float64 in one unit. Raises ValueError where eager's is 0.
    """
    if exact := [r["name"] for r in rows if not r["eager"] > 0]:
        raise ValueError(
            f"rows: eager's error is 0 for {exact}; a budget relative to it has no meaning, leave them out"
        )
    figure, ax = axes(title, "error / eager's error", "", size=(6.4, 0.9 + 0.32 * len(rows)))
    names = [r["name"] for r in rows]
    ratios = [r["error"] / r["eager"] for r in rows]
    ax.barh(names, ratios, color=[BLUE if ratio <= budget else RED for ratio in ratios], height=0.6)
    for position, ratio in enumerate(ratios):
        ax.text(ratio, position, f" {ratio:.2f}", va="center", fontsize=8)
    ax.axvline(1, color=GREY, linewidth=1, linestyle=":")
    ax.axvline(budget, color=GREY, linewidth=1.5)
    ax.text(budget, 1.0, " budget", transform=ax.get_xaxis_transform(), fontsize=8, color=GREY)
    ax.set_xlim(0, max(*ratios, budget) * 1.12)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    return figure


def before_after_figure(pairs, title="Held-out problems", y_label="share answered right"):
    """Two bars for each measure, before and after training. pairs: name to (before, after), both from 0 to 1."""
    figure, ax = axes(title, "", y_label, size=(max(3.2, 1.7 * len(pairs) + 1.2), 3.4))
    for offset, label, colour, hatch in ((-0.2, "before", ORANGE, "//"), (0.2, "after", BLUE, None)):
        values = [pair[label == "after"] for pair in pairs.values()]
        bars = ax.bar([i + offset for i in range(len(pairs))], values, 0.38, label=label, color=colour, hatch=hatch,
                      edgecolor="white")  # fmt: skip
        ax.bar_label(bars, [f"{value:.0%}" for value in values], fontsize=9, padding=1)
    ax.set_xticks(range(len(pairs)), pairs)
    ax.set_ylim(0, 1.08)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
    ax.grid(axis="x", visible=False)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def bar_panels(title, x_labels, names):
    """A figure with a panel of horizontal bars for each label; the panels share the names, top to bottom."""
    figure = Figure(figsize=(8.2, 1.2 + 0.32 * len(names)), dpi=100, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    panels = figure.subplots(1, len(x_labels), sharey=True, squeeze=False)[0]
    for ax, label in zip(panels, x_labels):
        ax.set_xlabel(label)
        ax.margins(x=0.2)
        ax.tick_params(axis="y", labelsize=8, length=0)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.grid(color="#DDDDDD", linewidth=0.6, axis="x")
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure, panels


def group_figure(completions, rewards, advantages, changes, title="One step on a group"):
    """Each completion's advantage beside the change of its log-prob: bars that should point the same way.

    All four hold one entry per completion: text, reward (right above 0), advantage, change of the log-prob in nats.
    """
    texts = [text.replace("\n", " ") for text in completions]
    ends = [(text[:22].rsplit(" ", 1)[0], text[-13:].split(" ", 1)[-1]) for text in texts]
    names = [f"{i}: {t if len(t) < 38 else ' … '.join(e)}" for i, (t, e) in enumerate(zip(texts, ends), 1)]
    figure, panels = bar_panels(title, ("advantage", "change of the log-prob, nats"), names)
    for ax, values in zip(panels, (advantages, changes)):
        for kind, colour, hatch in (("right", BLUE, None), ("wrong", RED, "//")):
            places = [i for i, reward in enumerate(rewards) if (reward > 0) == (kind == "right")]
            chosen = [values[i] for i in places]
            bars = ax.barh(places, chosen, 0.6, color=colour, hatch=hatch, edgecolor="white", label=kind)
            ax.bar_label(bars, [f"{value:+.2f}" for value in chosen], fontsize=8, padding=2)
        ax.axvline(0, color=GREY, linewidth=1)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, ncols=2, loc="upper right")
    return figure


def parts_figure(rows, title, x_label="GB"):
    """A bar of stacked parts for each row, and their sum. rows: name to {part: size}, the same parts in each."""
    figure, ax = axes(title, x_label, "", size=(8.6, 1.5 + 0.26 * len(rows)))
    names, ends = list(rows), [0.0] * len(rows)
    colours = (BLUE, SKY, GREEN, GREY, ORANGE, RED, PINK, "#000000")
    hatches = itertools.cycle([None, "//", "..", "\\\\", None, "xx"])
    for part, colour, hatch in zip(next(iter(rows.values())), colours, hatches):
        sizes = [row[part] for row in rows.values()]
        ax.barh(range(len(names)), sizes, 0.8, left=ends, color=colour, hatch=hatch, edgecolor="white", label=part)
        ends = [end + size for end, size in zip(ends, sizes)]
    for place, end in enumerate(ends):
        ax.text(end, place, f" {end:.1f}" if end < 1000 else f" {end:,.0f}", fontsize=8, va="center")
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(axis="y", visible=False)
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    return figure


def heads_figure(rows, title="Loss heads side by side", longest_ms=None):
    """Peak memory and time of each provider, one bar for a head that trains and one for a frozen head.

    rows: as ``heads.bench`` gives them: provider, head ("trainable" or "frozen"), peak_mib and ms, both None where the
    provider failed, ms alone where time means nothing. longest_ms: where the time axis ends; a bar that goes on has its
    value in the bar, with an arrow.
    """
    bars_of = {(r["provider"], r["head"]): r for r in rows}
    providers = list(dict.fromkeys(r["provider"] for r in rows))
    names = [name for provider in providers for name in (provider, "")]
    figure, panels = bar_panels(title, ("peak memory beyond the inputs, MiB", "time, ms"), names)
    for ax, key in zip(panels, ("peak_mib", "ms")):
        for offset, head, colour, hatch in ((0, "trainable", BLUE, None), (1, "frozen", ORANGE, "//")):
            places = [i for i, provider in enumerate(providers) if (provider, head) in bars_of]
            values = [bars_of[providers[i], head][key] for i in places]
            bars = ax.barh([2 * i + 0.9 * offset for i in places], [v or 0 for v in values], 0.84, color=colour,
                           hatch=hatch, edgecolor="white", label=f"{head} head")  # fmt: skip
            cut = [key == "ms" and longest_ms is not None and (v or 0) > longest_ms for v in values]
            failed = [bars_of[providers[i], head]["peak_mib"] is None for i in places]
            labels = ["" if c else f"{v:,.0f}" if v else "failed" * f for v, c, f in zip(values, cut, failed)]
            ax.bar_label(bars, labels, fontsize=8, padding=2)
            for bar, value in ((bar, v) for bar, v, c in zip(bars, values, cut) if c):
                ax.text(longest_ms, bar.get_y() + bar.get_height() / 2, f"{value:,.0f} → ", fontsize=8, ha="right",
                        va="center", backgroundcolor="white")  # fmt: skip
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if longest_ms is not None:
        panels[1].set_xlim(0, longest_ms)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, ncols=2, loc="upper right")
    return figure


def timelines_figure(timelines, title="Bytes of tensors alive, operation by operation"):
    """How memory rises and falls during a pass. timelines: name to bytes after each operation (``memory.Watch``);
    each is stretched to the same width, so that passes of few and of many operations can be compared."""
    figure, ax = axes(title, "operations done", "tensors alive, MiB")
    for (name, line), colour in zip(timelines.items(), itertools.cycle((RED, ORANGE, GREEN, BLUE))):
        share = [round(i / max(1, len(line) - 1), 4) for i in range(len(line))]
        alive = [round(size / 2**20, 2) for size in line]
        ax.plot(share, alive, color=colour, linewidth=1.6, label=name, drawstyle="steps-post")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    ax.set_xlim(0, 1)
    ax.set_ylim(0)
    ax.legend(fontsize=8, frameon=False)
    return figure


def stages_figure(rows, columns, title):
    """Panels of horizontal bars beside each other, one bar for each row. rows: dicts with ``stage`` and the columns;
    columns: key to the panel's label."""
    figure, panels = bar_panels(title, columns.values(), [row["stage"] for row in rows])
    for ax, key, colour in zip(panels, columns, PALETTE):
        values = [row[key] for row in rows]
        bars = ax.barh(range(len(rows)), values, 0.6, color=colour)
        ax.bar_label(bars, [f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in values], fontsize=8,
                     padding=2)  # fmt: skip
    return figure


def lines_figure(x, lines, title, x_label, y_label, log=True):
    """Lines over the same x. lines: name to values; log: both axes are logarithmic."""
    figure, ax = axes(title, x_label, y_label)
    for (name, values), colour, style in zip(lines.items(), PALETTE, itertools.cycle(("-", "--", ":"))):
        ax.plot(x, values, style, color=colour, label=name)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.legend(fontsize=8, frameon=False)
    return figure


def interactive(figure):
    """The plotly twin of a figure of lines: the same points, colours and scales, with values under the pointer."""
    from plotly.subplots import make_subplots

    dashes = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
    symbols = {"o": "circle-open", "s": "square-open", "^": "triangle-up-open"}
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    columns, lines = min(2, len(titles)), -(-len(titles) // 2)
    twin = make_subplots(lines, columns, subplot_titles=titles if len(titles) > 1 else None)
    named = set()  # a name that several panels share stands in the legend once, and switches all of them
    for place, ax in enumerate(figure.axes):
        cell = {"row": place // columns + 1, "col": place % columns + 1}
        for line in ax.lines:
            x, y = (list(map(float, values)) for values in line.get_data())
            colour, dash, name = line.get_color(), dashes.get(line.get_linestyle()), line.get_label()
            if dash:
                shape = "hv" if line.get_drawstyle() == "steps-post" else "linear"
                style = {"mode": "lines", "line": {"color": colour, "dash": dash, "shape": shape}}
            else:
                marker = {"color": colour, "symbol": symbols[line.get_marker()], "size": 8}
                style = {"mode": "markers", "marker": marker}
            in_legend = ax.get_legend() is not None and not name.startswith("_") and name not in named
            named |= {name} if in_legend else set()
            group = name[1:].split(": ")[0] if name.startswith("_") else name
            style |= {"opacity": line.get_alpha() or 1, "showlegend": in_legend, "legendgroup": group}
            if ax.get_yscale() == "log":
                style |= {"text": [ax.format_ydata(value) for value in y], "hovertemplate": "%{x}: %{text}"}
            twin.add_scatter(x=x, y=y, name=name.lstrip("_"), **style, **cell)
        for note in (text for text in ax.texts if hasattr(text, "xyann")):
            at = [log10(v) if axis.get_scale() == "log" else v for v, axis in zip(note.xy, (ax.xaxis, ax.yaxis))]
            side = {"xanchor": note.get_ha(), "yanchor": {"center": "middle"}.get(note.get_va(), "bottom")}
            style = {"xshift": note.xyann[0], "yshift": note.xyann[1], "font_color": note.get_color(), **side}
            twin.add_annotation(x=at[0], y=at[1], text=note.get_text(), showarrow=False, **style, **cell)
        twin.update_xaxes(title=ax.get_xlabel(), **_scale(ax.xaxis, ax.get_xlim()), **cell)
        twin.update_yaxes(title=ax.get_ylabel(), **_scale(ax.yaxis, ax.get_ylim()), **cell)
    title = figure.get_suptitle() or (titles[0] if len(titles) == 1 else None)
    twin.update_layout(title=title, template="simple_white", height=140 + 310 * lines, margin={"t": 80, "b": 40})
    return twin


def _scale(axis, limits):
    """The axis's scale and limits for plotly; with our own ticks where it is logarithmic, since plotly's mark every
    digit, or where their labels are more than numbers."""
    kind, labels = axis.get_scale(), axis.get_major_formatter()
    scale = {"type": kind} if kind == "log" else {"type": kind, "range": list(map(float, limits))}
    if kind == "log" or not isinstance(labels, ScalarFormatter):
        ticks = [float(tick) for tick in axis.get_majorticklocs() if limits[0] <= tick <= limits[1]]
        scale |= {"tickvals": ticks, "ticktext": labels.format_ticks(ticks)}
    return scale


def png(figure):
    """The figure as PNG bytes of 256 colours, some 10 to 60 kB: a quarter of what all colours take."""
    from PIL import Image  # matplotlib brings it

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png")
    Image.open(full).convert("RGB").quantize(256).save(small, format="png", optimize=True)
    return small.getvalue()


def show(figure, path=None, twin=False):
    """Display the figure in a notebook and, with ``path``, save it; ``twin`` adds the interactive plotly version.

    Picture and twin go out as two outputs, so that a page which cannot run plotly still shows the picture, and without
    plotly's own script, which would add megabytes to the notebook.
    """
    from IPython.display import display

    picture = png(figure)
    if path is not None:
        with open(path, "wb") as file:
            file.write(picture)
    display({"image/png": base64.b64encode(picture).decode(), "text/plain": "<picture>"}, raw=True)
    if twin:
        data = json.loads(interactive(figure).to_json())
        data["config"] = {"displaylogo": False}
        display({"application/vnd.plotly.v1+json": data, "text/plain": "<interactive figure>"}, raw=True)
