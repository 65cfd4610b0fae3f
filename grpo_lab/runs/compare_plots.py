"""The pictures of a comparison of runs: curves with seed bands, memory against throughput, peak memory of each rank.

Each takes the groups of ``compare.grouped`` and returns a matplotlib Figure, as ``grpo_lab/plots.py`` does.
"""

import itertools
import statistics

from grpo_lab.plots import GREY, IMPL_COLOURS, PALETTE, axes, smoothed


def _literal(label):
    """A label in which matplotlib sees no formula: a parameter's text may hold dollars."""
    return label.replace("$", r"\$")


def looks(groups):
    """Colour, line style and marker of each group."""
    styles = itertools.cycle(zip(("-", "--", ":", "-."), ("o", "s", "^", "o")))
    return {label: (IMPL_COLOURS.get(label.rpartition("=")[2], colour), *style)
            for label, colour, style in zip(groups, itertools.cycle(PALETTE), styles)}  # fmt: skip


def bands_figure(groups, key="reward", window=10, title=None):
    """``key`` against the step: the mean over seeds of the running mean of ``window`` steps, and a band of one standard
    deviation to both sides. A group of one seed is a line. Raises ValueError where no run has logged the key."""
    figure, ax = axes(title or f"{key}: mean over seeds, ± one standard deviation", "step", key)
    for label, (colour, line, _) in looks(groups).items():
        curves = []
        for curve in groups[label]:
            points = {row["step"]: row[key] for row in curve.rows if row.get(key) is not None}
            if points:
                curves.append(dict(zip(points, smoothed(list(points.values()), window))))
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        columns = [[curve[step] for curve in curves] for step in steps]
        means = [statistics.fmean(column) for column in columns]
        ax.plot(steps, means, line, color=colour, linewidth=2, label=_literal(f"{label} ({len(curves)})"))
        if len(curves) > 1:
            spreads = [statistics.stdev(column) for column in columns]
            low, high = ([m + sign * s for m, s in zip(means, spreads)] for sign in (-1, 1))
            ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            for edge in (low, high):
                ax.plot(steps, edge, line, color=colour, linewidth=0.6, alpha=0.5, label=f"_{label}: one deviation")
    if not ax.lines:
        logged = sorted({name for group in groups.values() for curve in group for row in curve.rows for name in row})
        raise ValueError(f"key = {key!r}: no run has logged it; logged are {logged}")
    ax.legend(fontsize=8, frameon=False)
    return figure


def frontier(points):
    """The points (throughput, memory) that no other beats in both, by throughput."""
    best = []
    for speed, memory in sorted(set(points), key=lambda point: (-point[0], point[1])):
        if not best or memory < best[-1][1]:
            best.append((speed, memory))
    return best[::-1]


def frontier_figure(groups, title="Memory against throughput, a point for each run"):
    """Peak memory of the fullest rank against tokens per second; None where no run has both. To the right and below is
    better; the line joins the runs that no other beats in both."""
    figure, ax = axes(title, "tokens per second, all ranks", "peak memory of a rank, GiB")
    every = []
    for label, (colour, _, marker) in looks(groups).items():
        found = [(c.tokens_per_second, max(c.peaks) / 2**30) for c in groups[label] if c.peaks and c.tokens_per_second]
        every += found
        if found:
            ax.plot(*zip(*found), marker, color=colour, label=_literal(label), markerfacecolor="white", markersize=8)
    if not every:
        return None
    ax.plot(*zip(*frontier(every)), ":", color=GREY, linewidth=1.2, label="not beaten in both")
    ax.set_ylim(0, 1.15 * max(memory for _, memory in every))
    ax.legend(fontsize=8, frameon=False)
    return figure


def ranks_figure(groups, title="Peak memory of each rank"):
    """A bar for each rank of each group, the most over seeds; None where no run has noted it."""
    rows = []
    for label, (colour, *_) in looks(groups).items():
        peaks = [curve.peaks for curve in groups[label] if curve.peaks]
        for rank, sizes in enumerate(itertools.zip_longest(*peaks, fillvalue=0)):
            rows.append((_literal(f"{label}, rank {rank}"), max(sizes) / 2**30, colour))
    if not rows:
        return None
    kinds = sorted({curve.peak_of for group in groups.values() for curve in group if curve.peaks})
    figure, ax = axes(title, f"GiB ({' / '.join(kinds)})", "", size=(6.4, 1.2 + 0.32 * len(rows)))
    bars = ax.barh(range(len(rows)), [size for _, size, _ in rows], 0.7, color=[colour for *_, colour in rows])
    ax.bar_label(bars, [f"{size:.2f}" for _, size, _ in rows], fontsize=8, padding=2)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.grid(axis="y", visible=False)
    return figure


def figures(groups, key="reward", window=10):
    """Name to Figure of all that the runs' records allow."""
    made = {"frontier": frontier_figure(groups), "memory": ranks_figure(groups)}
    if any(row.get(key) is not None for group in groups.values() for curve in group for row in curve.rows):
        made["curves"] = bands_figure(groups, key, window)
    return {name: figure for name, figure in made.items() if figure is not None}
