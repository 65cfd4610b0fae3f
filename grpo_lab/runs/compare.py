"""Runs beside each other: ``python -m grpo_lab compare runs/06_train_single_gpu-*`` or ``compare runs``.

A *group* is all runs whose parameters differ in the seed alone; what is said of it is a mean over seeds with the
standard deviation. Printed and written: what the runs' parameters and machines differ in, a table to paste into a paper
(Markdown, LaTeX), a CSV with a line for each run, and three pictures (``compare_plots.py``). Run folders are only read.
"""

import math
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.runs.files import plain, read_json
from grpo_lab.runs.run import RunRecord, canonical, load_run

SHARE = 0.1  # of a run's steps, the last, over which its final value is taken


@dataclass(frozen=True)
class Curve:
    """One training of a run. ``rows``: its logged steps; ``peaks``: bytes of each rank, or []; ``peak_of``: of what;
    ``tokens_per_second``: prompts and completions of all ranks per second of training, from the second row on, or
    None; ``receipt``: as ``receipt.json``, or None."""

    record: RunRecord
    series: str | None
    rows: list
    peaks: list
    peak_of: str
    tokens_per_second: float | None
    receipt: dict | None

    @property
    def notebook(self):
        name = self.record.folder.resolve().name
        return name.rpartition("-")[0] or name

    @property
    def seed(self):
        return self.record.parameters.get("seed")

    def final(self, key):
        """The mean of ``key`` over the last tenth of the rows that hold it; None without any."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return statistics.fmean(values[-max(1, round(SHARE * len(values))) :]) if values else None

    @property
    def worst_error(self):
        """The receipt's largest error, in units of what is allowed; None without a receipt."""
        checks = self.receipt["checks"] if self.receipt else []
        errors = [(e, check["tolerance"]) for check in checks for e in check["errors"].values()]
        return max((math.inf if e is None else abs(e) / allowed for e, allowed in errors), default=None)


def curves_of(folder):
    """The Curves of one run folder; one without rows where nothing was trained. Raises ValueError for what is none."""
    record = load_run(folder)
    found = []
    for series in dict.fromkeys(row.get("series") for row in record.metrics if row["step"] is not None) or [None]:
        mine = [row for row in record.metrics if row.get("series") == series and row["step"] is not None]
        peaks = [row for row in mine if (p := row.get("peak_bytes")) and isinstance(p, list) and all(map(_number, p))]
        rows = [{name: x for name, x in row.items() if _number(x)} for row in mine if "loss" in row or "reward" in row]
        receipt = read_json(Path(folder) / (series or ".") / "receipt.json")
        most = [max(values) for values in zip(*(row["peak_bytes"] for row in peaks))]
        kind = peaks[-1].get("peak_of", "") if peaks else ""
        found.append(Curve(record, series, rows, most, kind, _throughput(rows), receipt))
        try:
            _ = receipt is None or (receipt["passed"], found[-1].worst_error)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{folder}: its receipt.json is no receipt: {str(receipt)[:60]}") from None
    return found


def _number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def _throughput(rows):
    timed = [row for row in rows if row.get("num_tokens") and row.get("step_time")]
    steps = [b["step"] - a["step"] for a, b in zip(timed, timed[1:])]
    seconds = sum(n * row["step_time"] for n, row in zip(steps, timed[1:]))
    return (timed[-1]["num_tokens"] - timed[0]["num_tokens"]) / seconds if seconds > 0 else None


def collect(paths):
    """The Curves of run folders, and of all runs in folders that hold some, where a corrupt one is warned of and left
    out. Raises ValueError for a path that is neither, and for a corrupt run that is named itself."""
    found = {}
    for path in map(Path, paths):
        if (path / "status.json").exists() or (path / "parameters.json").exists():
            found[path.resolve()] = curves_of(path)
            continue
        inside = sorted(status.parent for status in path.glob("*/status.json"))
        if not inside:
            raise ValueError(f"{path}: no run folder, and none in it; runs are made by python -m grpo_lab run")
        for folder in inside:
            try:
                found[folder.resolve()] = curves_of(folder)
            except (ValueError, OSError) as error:
                warnings.warn(f"left out: {error}", stacklevel=2)
    return [curve for curves in found.values() for curve in curves]


def grouped(curves):
    """Label to Curves that differ in the seed alone. A label names what tells the group from the notebook's others."""
    known = {}
    for curve in curves:
        rest = {k: v for k, v in curve.record.parameters.items() if k != "seed"}
        known.setdefault((curve.notebook, curve.series, canonical(rest)), []).append(curve)
    given = {}
    for (notebook, _, _), group in known.items():
        given.setdefault(notebook, []).append(group[0].record.parameters)
    differ = {notebook: list(differing(dicts, without=("seed",))) for notebook, dicts in given.items()}

    def order(item):
        (notebook, _, _), group = item
        values = [group[0].record.parameters.get(name) for name in differ[notebook]]
        return notebook, [(type(v).__name__, v if isinstance(v, (int, float, str)) else str(v)) for v in values]

    labels = {}
    for (notebook, series, _), group in sorted(known.items(), key=order):
        names = differ[notebook]
        parts = [notebook] if len(differ) > 1 or not names and series is None else []
        parts += [series] if series else []
        parts += [f"{n}={_short(group[0].record.parameters[n])}" for n in names if n in group[0].record.parameters]
        label = " ".join(parts)
        while label in labels:
            label += "'"
        labels[label] = sorted(group, key=lambda curve: str(curve.seed).zfill(20))
    return labels


def differing(dicts, without=()):
    """Name to the values of each dict, for the names whose values are not the same in all; a missing one is None."""
    names = dict.fromkeys(name for one in dicts for name in one if name not in without)
    columns = {name: [one.get(name) for one in dicts] for name in names}
    return {name: values for name, values in columns.items() if len({repr(plain(v)) for v in values}) > 1}


def machines(curves):
    """What the runs' environments differ in, a line each: commit, changes, packages, GPUs, processor."""
    seen = {curve.record.folder: curve.record.environment or {} for curve in curves}
    flat = [{k: v for k, v in one.items() if k not in ("time", "command", "packages")} | one.get("packages", {})
            for one in seen.values()]  # fmt: skip
    lines = []
    for name, values in differing(flat).items():
        counts = {}
        for value in values:
            counts[_short(value)] = counts.get(_short(value), 0) + 1
        lines.append(f"{name}: " + ", ".join(f"{value} in {count}" for value, count in counts.items()))
    return lines


def _short(value):
    text = f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\\n")
    return text if len(text) <= 32 else text[:12] + "..."


def spread(values):
    """``mean`` and standard deviation over seeds, as text: "0.71 ± 0.02"; the value alone of one seed, "" of none."""
    values = [value for value in values if _number(value)]
    if not values:
        return ""
    centre = statistics.fmean(values)
    whole = abs(centre) >= 1000
    deviation = f" ± {statistics.stdev(values):{',.0f' if whole else '.2g'}}" if len(values) > 1 else ""
    return f"{centre:{',.0f' if whole else '.3g'}}{deviation}"


def table(groups, key="reward"):
    """A row for each group, as a DataFrame of text."""
    import pandas as pd

    rows = []
    for label, group in groups.items():
        summaries = [curve.record.summary or {} for curve in group]
        states = [curve.record.status["status"] for curve in group]
        peaks = [max(curve.peaks) / 2**30 for curve in group if curve.peaks]
        worst = max((e for curve in group if (e := curve.worst_error) is not None), default=None)
        passed = sum(curve.receipt is not None and curve.receipt["passed"] is True for curve in group)
        rows.append({
            "runs": label, "seeds": len(group), "finished": states.count("finished"),
            f"{key}, last tenth": spread(curve.final(key) for curve in group),
            "accuracy after": spread(summary.get("accuracy_after") for summary in summaries),
            "peak GiB": spread([max(peaks)] if peaks else []),
            "tokens/s": spread(curve.tokens_per_second for curve in group),
            "receipts passed": f"{passed} of {len(group)}", "worst error / allowed": spread([worst]),
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame.drop(columns=[name for name in frame.columns if not frame[name].astype(str).str.len().any()])


def markdown(frame):
    """The table in Markdown."""
    cells = [list(map(str, frame.columns)), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def latex(frame):
    """The table in LaTeX, for the package booktabs."""
    return frame.to_latex(index=False, escape=True)


def by_run(curves, key="reward"):
    """A row for each training, unrounded: parameters, what its summary says, memory, throughput, receipt, commit."""
    import pandas as pd

    rows = []
    for curve in curves:
        summary = {k: v for k, v in (curve.record.summary or {}).items() if isinstance(v, (str, int, float))}
        row = {"run": curve.record.folder.name, "series": curve.series, "status": curve.record.status["status"]}
        row |= {f"parameter.{name}": value for name, value in curve.record.parameters.items()}
        row |= {f"{key}_last_tenth": curve.final(key), "steps": curve.rows[-1]["step"] if curve.rows else 0}
        row |= {f"summary.{name}": value for name, value in summary.items()}
        row |= {f"peak_bytes.rank{rank}": size for rank, size in enumerate(curve.peaks)}
        row |= {"peak_of": curve.peak_of, "tokens_per_second": curve.tokens_per_second}
        row |= {"receipt_passed": curve.receipt and curve.receipt["passed"], "receipt_worst": curve.worst_error}
        rows.append(row | {"commit": (curve.record.environment or {}).get("commit")})
    return pd.DataFrame(rows)


def compare(paths, out, key="reward", window=10):
    """Write the comparison of the runs in ``paths`` to the folder ``out``, and print it. Returns the table."""
    from grpo_lab import plots
    from grpo_lab.runs import compare_plots

    curves = collect(paths)
    logged = {name for curve in curves for row in curve.rows for name in row}
    if logged and key not in logged:
        raise ValueError(f"--key {key}: no run has logged it; logged are {', '.join(sorted(logged))}")
    groups = grouped(curves)
    frame = table(groups, key)
    out = Path(out)
    pictures = compare_plots.figures(groups, key, window)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in (("table.md", markdown(frame)), ("table.tex", latex(frame))):
            (out / name).write_text(text, encoding="utf-8")
        by_run(curves, key).to_csv(out / "runs.csv", index=False)
        for name in ("frontier", "memory", "curves"):  # one of an earlier comparison must not pass for this one's
            (out / f"{name}.png").unlink(missing_ok=True)
        for name, figure in pictures.items():
            (out / f"{name}.png").write_bytes(plots.png(figure))
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written: {error.strerror}") from error
    print(markdown(frame))
    changed = differing([group[0].record.parameters for group in groups.values()], without=("seed",))
    for name, values in changed.items():
        print(f"{name}: {', '.join(dict.fromkeys(map(_short, values)))}")
    for label, group in groups.items():
        ends = sorted({curve.rows[-1]["step"] for curve in group if curve.rows})
        if len(ends) > 1:
            print(f"{label}: ends at steps {', '.join(map(str, ends))}; its curve has the steps that all have logged")
    written = ["runs.csv", "table.md", "table.tex", *(f"{name}.png" for name in pictures)]
    print(*machines(curves), *(out / name for name in sorted(written)), sep="\n")
    return frame
