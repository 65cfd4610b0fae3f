"""The pictures of the widgets' first views, for a headless run, GitHub and print, and of a pass under a cap on memory.

Figures as in ``grpo_lab/plots.py``.
"""

import itertools
import math

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MultipleLocator

from grpo_lab.lessons.widgets import signed, tensor_looks
from grpo_lab.plots import BLUE, GREY, IMPL_COLOURS, RED, axes, format_bytes

HATCHES = (None, "//", "||", "\\\\", "..")


def bars_figure(bars, card, title="The loss of a trained head against a card's memory"):
    """Stacked tensors of each Bar (``widgets.head_bars``), the card's size in GiB, a diamond at what was recorded."""
    figure, ax = axes(title, "memory at the peak, states and head included", "", size=(8.2, 1.5 + 0.75 * len(bars)))
    whole = max(card << 30, *(max(bar.total, bar.measured or 0) for bar in bars))
    looks, keys = tensor_looks(bars), {}
    for row, bar in enumerate(bars):
        left = 0
        for name, size in bar.tensors.items():
            colour, hatch = looks[name]
            look = {"facecolor": colour, "hatch": HATCHES[hatch], "edgecolor": "white"}
            ax.barh(row, size, 0.5, left, linewidth=0, **look)
            if size > 0.02 * whole:
                keys.setdefault(name, Patch(label=f"{name}: {format_bytes(size)}", **look))
            left += size
        text = f"  {format_bytes(bar.total)}" + (" does not fit" if bar.total > card << 30 else "")
        ax.text(0, row - 0.3, text, fontsize=8.5, va="bottom")
        if bar.measured is not None:
            ax.plot(bar.measured, row, "D", color="white", markeredgecolor="black", markersize=7)
    ax.axvline(card << 30, color=GREY, linestyle="--", linewidth=2)
    marks = [Patch(facecolor="white", edgecolor=GREY, linestyle="--", label=f"a card of {card} GiB")]
    marks += ax.plot([], [], "D", color="white", markeredgecolor="black", label="recorded on an H200")
    figure.legend(handles=[*keys.values(), *marks], fontsize=8, frameon=False, loc="outside lower left", ncols=2)
    ax.set_yticks(range(len(bars)), [bar.name for bar in bars])
    ax.set_ylim(len(bars) - 0.5, -0.75)
    ax.xaxis.set_major_locator(MultipleLocator(max(1, card // 5) << 30))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    ax.grid(axis="y", visible=False)
    return figure


def tokens_figure(completions, name, values, clipped, labels=None, columns=84):
    """Completions token by token, in the colours and lines of ``widgets.tokens_html``, the number under each token.

    completions: token texts of each; values and clipped: a number and a truth for each token, by completion.
    """
    cells, row = [], 0
    for i, tokens in enumerate(completions):
        if labels:
            cells.append((row, 0, f"{labels[i]}", None))
            row += 0.8
        column = 0
        for token, value, height, cut in zip(tokens, values[i], signed(name, values[i]), clipped[i]):
            text = token.replace("\n", "↵")
            width = max(len(text), 6)
            if column + width > columns:
                row, column = row + 1.5, 0
            cells.append((row, column, text, (width, value, height, cut)))
            column += width + 0.4
        row += 1.9
    figure = Figure(figsize=(8.2, 0.4 + 0.27 * row), dpi=100, layout="constrained")
    ax = figure.add_subplot()
    ax.set_axis_off()
    for row_of, column, text, token in cells:
        if token is None:
            ax.text(column, row_of + 0.5, text, fontsize=9, va="center", weight="bold")
            continue
        width, value, height, cut = token
        colour, line = (BLUE, "-") if height >= 0 else (RED, "--")
        edge = "black" if cut else "none"
        box = Rectangle((column, row_of), width, 0.8, facecolor=to_rgba(colour, 0.55 * abs(height)), edgecolor=edge)
        ax.add_patch(box)
        ax.plot([column, column + width], [row_of + 0.84] * 2, line, color=colour, linewidth=0.6 + 2.4 * abs(height))
        middle = column + width / 2
        ax.text(middle, row_of + 0.42, text, fontsize=8.5, family="monospace", ha="center", va="center")
        ax.text(middle, row_of + 1.12, f"{value:.2g}", fontsize=6.5, color=GREY, ha="center", va="center")
    ax.set_xlim(0, columns)
    ax.set_ylim(row, 0)
    title = (
        f"{name} of each token: blue, solid line above {1 if name == 'ratio' else 0}; red, dashed below; boxed: clipped"
    )
    ax.set_title(title, fontsize=10, loc="left")
    return figure


def capped_figure(outcomes, title="One pass under a cap on memory"):
    """What each capped pass held from moment to moment; a cross where it died. outcomes: of ``oom.run_capped``."""
    figure, ax = axes(title, "seconds since the pass began", "memory beyond the inputs")
    for outcome, line in zip(outcomes, itertools.cycle(["-", "--"])):
        seconds, held, steps = zip(*outcome.timeline)
        style = {"color": IMPL_COLOURS.get(outcome.impl, GREY)}
        label = f"{outcome.impl}: {outcome.ended}"
        if outcome.ended != "survived":
            label += f" in the {steps[-1]} pass"
            label += f", refused {format_bytes(outcome.wanted)} more" if outcome.wanted else ""
            ax.plot(seconds[-1], held[-1], "X", markersize=11, label="_death", **style)
        if "backward" in steps:
            at = steps.index("backward")
            ax.annotate("backward", (seconds[at], held[at]), (0, 14), textcoords="offset points", fontsize=9,
                        ha="right", **style)  # fmt: skip
        ax.plot(seconds, held, line, linewidth=2, drawstyle="steps-post", label=label, **style)
    for cap in dict.fromkeys(outcome.cap for outcome in outcomes):
        ax.axhline(cap, color=GREY, linestyle=":", linewidth=1.5)
        ax.text(1, cap, f"cap {format_bytes(cap)} ", transform=ax.get_yaxis_transform(), ha="right", va="bottom",
                fontsize=9, color=GREY)  # fmt: skip
    most = max(max(o.cap, *(held for _, held, _ in o.timeline)) for o in outcomes)
    ax.set_ylim(0, 1.12 * most)
    ax.yaxis.set_major_locator(MultipleLocator(2 ** int(math.log2(most / 3))))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_bytes(y)))
    ax.legend(fontsize=8, frameon=False, loc="center right")
    return figure
