"""The benchmark's curves: time against memory and against the share of zero advantages, whole steps, largest batches.

Figures as in ``grpo_lab/plots.py``, which draws the bars of the head table and shows all of them. What failed is left
out of a curve and named in a bar.
"""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from grpo_lab.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, axes, bar_panels, dress

PROVIDER_LOOKS = {  # line colour, marker, hatch of the bench's providers
    "chunked": (BLUE, "o", None),
    "chunked, low memory": (SKY, "^", "\\\\"),
    "skipping": (ORANGE, "^", ".."),
    "TRL": (GREEN, "s", "//"),
    "naive": (RED, "^", "xx"),
    "bare GEMMs": (GREY, None, None),
}


def _panels(title, rows, height, x_label, y_label):
    """A panel with a y axis of its own for a trained and for a frozen head, whichever the rows have."""
    heads = [head for head in ("trainable", "frozen") if any(row["head"] == head for row in rows)]
    figure = Figure(figsize=(9.0 if len(heads) == 2 else 6.6, height), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    panels = dict(zip(heads, figure.subplots(1, len(heads), squeeze=False)[0]))
    for head, ax in panels.items():
        dress(ax, f"{head} head", x_label, y_label)
    return figure, panels


def frontier_figure(rows, title="What memory buys"):
    """Time against peak memory: a curve per provider, its own default filled, and the two floors as dotted lines.

    rows: the bench's table "frontier": provider, head, setting, peak_mib and ms, None where it failed (left out); the
    floors are "bare GEMMs" (ms) and "gradients alone" (peak_mib).
    """
    figure, panels = _panels(title, rows, 3.8, "peak memory beyond the inputs, MiB", "time, ms")
    for head, ax in panels.items():
        here = [r for r in rows if r["head"] == head and r["peak_mib"] is not None]
        curves = {}
        for row in here:
            if row.get("setting") and row["ms"] is not None:
                curves.setdefault(row["provider"], []).append((row["peak_mib"], row["ms"], row["setting"]))
        for provider, points in curves.items():
            colour, marker, _ = PROVIDER_LOOKS.get(provider, (ORANGE, "^", None))
            memory, time, _ = zip(*sorted(points))
            ax.plot(memory, time, "-", color=colour, linewidth=1.8, label=provider)
            ax.plot(memory, time, marker, color=colour, markerfacecolor="white", label=f"_{provider}: measured")
            for m, t, setting in points:
                end, place = setting.split(",")[0], {"color": colour, "fontsize": 8, "textcoords": "offset points"}
                if end == "default":
                    ax.annotate(end, (m, t), (0, 8), ha="center", **place)
                elif end == "low":  # budgets below what it takes end at the same plan, above and below it
                    ax.annotate(end, (m, t), (-8, 0), ha="right", va="center", **place)
        if not curves:
            continue
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        floor = {r["provider"]: r for r in here}
        least = floor.get("gradients alone", {}).get("peak_mib") or 0
        bare = floor.get("bare GEMMs", {}).get("ms")
        left, low = min(left, 0.8 * least or left), min(low, 0.95 * bare if bare else low)
        right, high = 1.1 * right, high + 0.06 * (high - low)
        if least:
            ax.plot([least] * 2, [low, high], "-.", color=GREY, linewidth=1.2, label="gradients alone")
        if bare:
            ax.plot([left, right], [bare] * 2, ":", color=GREY, linewidth=1.4, label="bare GEMMs")
        ax.set_xscale("log", base=2)
        ax.set_xlim(left if left > 0 else None, right)
        ax.set_ylim(low, high)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
        ax.legend(fontsize=8, frameon=False)
    return figure


def zero_advantage_figure(rows, title="Sequences of zero advantage"):
    """Time against the share of sequences whose advantage is zero, a line per provider.

    rows: the bench's table "zero": provider, head, zero_share and ms (None where it failed: left out).
    """
    figure, panels = _panels(title, rows, 4.0, "share of zero-advantage sequences", "time, ms")
    for head, ax in panels.items():
        _against_zero_share(ax, [r for r in rows if r["head"] == head])
        if ax.lines:
            ax.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure


def _against_zero_share(ax, rows):
    rows = [r for r in rows if r["ms"] is not None]
    for provider in dict.fromkeys(r["provider"] for r in rows):
        points = sorted((r["zero_share"], r["ms"]) for r in rows if r["provider"] == provider)
        colour, marker, _ = PROVIDER_LOOKS.get(provider, (ORANGE, "^", None))
        line = ":" if marker is None else "-"
        ax.plot(*zip(*points), line, color=colour, linewidth=1.8, label=provider)
        if marker:
            ax.plot(*zip(*points), marker, color=colour, markerfacecolor="white", label=f"_{provider}: measured")
    ax.set_ylim(0, None)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))


def skip_figure(rows, title="A training step and its sequences of zero advantage"):
    """Forward and backward of a step against the share of sequences whose advantage is zero, a line per provider.

    rows: the bench's table "skip": provider, zero_share, ms (None where it failed: left out) and own, True where the
    share is what the policy's own rewards gave: a dotted line says where.
    """
    figure, ax = axes(title, "share of zero-advantage sequences", "forward and backward, ms")
    _against_zero_share(ax, [r for r in rows if not r["own"]])
    share = next((r["zero_share"] for r in rows if r["own"]), None)
    if share is not None:
        label = "this policy's own rewards"
        ax.plot([share] * 2, ax.get_ylim(), ":", color=GREY, linewidth=1.4, label=label, scaley=False)
    ax.legend(fontsize=8, frameon=False)
    return figure


def batch_figure(rows, title="The largest batch that trains"):
    """A bar per model and provider: sequences of a GPU, on the card, tuning and dtype that the rows have in common.

    rows: the bench's table "batch"; those without a largest_batch ("no head", what failed) are left out.
    """
    rows = [row for row in rows if row["largest_batch"] is not None]
    first = {row["model"]: row for row in reversed(rows)}
    names = [f"{r['model']}: {r['provider']}" if r is first[r["model"]] else r["provider"] for r in rows]
    figure, (ax,) = bar_panels(title, ("sequences of a GPU",), names)
    for place, row in enumerate(rows):
        colour, _, hatch = PROVIDER_LOOKS[row["provider"]]
        ax.barh(place, row["largest_batch"], 0.8, color=colour, hatch=hatch, edgecolor="white")
        ax.text(row["largest_batch"], place, f" {row['largest_batch']:,}", fontsize=8, va="center")
    return figure


def steps_figure(rows, title="Whole training steps: what the loss head adds"):
    """A bar per setting and provider, peak memory and time: grey is the same step without a head, coloured the head.

    rows: the bench's table "step": provider ("no head" among them), dtype, batch, peak_mib and ms, both None where the
    step failed; model and checkpointing where there is more than one.
    """

    def setting(row):
        name = f"{row.get('model') or 'Qwen3-0.6B'}, {row['dtype']}, {row['batch']} sequences"
        return name if row.get("checkpointing") in (None, True) else f"{name}, no checkpointing"

    settings = list(dict.fromkeys(map(setting, rows)))
    providers = [name for name in dict.fromkeys(r["provider"] for r in rows) if name != "no head"]
    cell = {(setting(r), r["provider"]): r for r in rows}
    names = [f"{s}: {p}" if i == 0 else p for s in settings for i, p in enumerate(providers)]
    figure, panels = bar_panels(title, ("peak memory of the device, GiB", "time of a step, s"), names)
    figure.set_size_inches(9.4, 1.2 + 0.24 * len(names))
    for ax, key, unit in zip(panels, ("peak_mib", "ms"), (1024, 1000)):
        ax.margins(x=0.45)  # room for the labels
        for j, provider in enumerate(providers):
            colour, _, hatch = PROVIDER_LOOKS.get(provider, (ORANGE, None, ".."))
            for i, s in enumerate(settings):
                row, without = cell.get((s, provider)), cell.get((s, "no head"))
                place, whole = i * len(providers) + j, row and row[key]
                if row is None:
                    continue
                if whole is None:  # on a CPU no step has a peak
                    failed = "out of memory" if "out of memory" in (row.get("note") or "") else "failed"
                    ax.text(0, place, f" {failed if row.get('note') else '-'}", fontsize=8, va="center")
                    continue
                base = min(whole, (without and without[key]) or 0)
                ax.barh(place, base / unit, 0.8, color="#CCCCCC", edgecolor="white", label="no head")
                bars = ax.barh(place, (whole - base) / unit, 0.8, left=base / unit, color=colour, hatch=hatch,
                               edgecolor="white", label=provider)  # fmt: skip
                ax.bar_label(bars, [f"{whole / unit:.2f} (+{(whole - base) / unit:.2f})"], fontsize=8, padding=2)
    labels = {}
    for ax in panels:
        labels |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(labels.values(), labels, fontsize=8, frameon=False, ncols=4, loc="upper right")
    return figure
