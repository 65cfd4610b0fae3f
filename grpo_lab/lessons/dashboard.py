"""A training run while it happens: ``dashboard.attach(trainer)`` before ``trainer.train()``, as ``run.attach``.

Curves of what TRL logs, memory, where each step's time went as the host sees it, and the newest completions with their
rewards. It draws at most ten times a second and waits fifty times as long as a drawing took, so that all of it costs
about 2 % of the training's time. Where nobody watches nothing is drawn before the end, which leaves one picture. Left
out: what other processes than the first hold, and everything that needs a server.
"""

import html
import math
import time
from collections import defaultdict

import psutil
import torch
from transformers import TrainerCallback

from grpo_lab import plots
from grpo_lab.lessons import widgets
from grpo_lab.runs import headless

PANELS = {  # title to the lines' labels and keys; what no row holds is left out
    "Reward": {"reward": "reward"},
    "Held-out accuracy (share)": {"accuracy": "eval_rewards/accuracy_reward/mean"},
    "KL to the reference (nats a token)": {"KL": "kl"},
    "Entropy (nats a token)": {"entropy": "entropy"},
    "Clipped tokens (share)": {"clipped": "clip_ratio/region_mean"},
    "Groups of zero advantage (share)": {"zero": "frac_reward_zero_std"},
    "Memory (GiB)": {"memory": "memory_gib"},
    "Seconds of a step": {"rollouts": "rollout_s", "loss": "loss_s", "optimiser": "optimiser_s"},
}
KEYS = {key for lines in PANELS.values() for key in lines.values()}
DASHES = ("", "6 3", "2 2")
WIDTH, HEIGHT, POINTS = 300, 84, 150
SHOWN = 4  # of the newest completions, spread over their problems
STYLE = """<style>
.gd { display: flex; flex-wrap: wrap; gap: .4em 1.6em }
.gd svg { display: block; border-left: 1px solid; border-bottom: 1px solid; overflow: visible }
.gd figure { margin: 0; line-height: 1.5 } .gd figure div { font-size: 85% }
.gd small { display: flex; justify-content: space-between }
.gd-texts { line-height: 1.3; border-spacing: 0 .6em }
.gd-texts th, .gd-texts td { text-align: left !important; vertical-align: top; white-space: pre-wrap;
  padding: 0 1.2em 0 0 }
</style>"""


def attach(trainer):
    """Add a Dashboard to a trainer of TRL's or ours, and return it."""
    dashboard = Dashboard(trainer)
    trainer.add_callback(dashboard)
    return dashboard


class Dashboard(TrainerCallback):
    """``rows``: what was logged, with memory_gib, rollout_s, loss_s and optimiser_s; ``view``: the ipywidgets HTML, or
    None where nobody watches; ``drawings``: how often it was drawn."""

    def __init__(self, trainer):
        self.trainer, self.rows, self.view, self.drawings = trainer, [], None, 0
        self._points = defaultdict(list)  # (step, value) by key
        self._times = dict.fromkeys(("rollout_s", "loss_s", "optimiser_s"), 0.0)
        self._next = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        generate = self._generate = self.trainer._generate_and_score_completions

        def timed(inputs):
            began = time.perf_counter()
            try:
                return generate(inputs)
            finally:
                self._times["rollout_s"] += time.perf_counter() - began

        self.trainer._generate_and_score_completions = timed
        if not headless():
            from ipywidgets import HTML

            self.view = HTML("<p>The dashboard waits for the first step.</p>")
            self._output = widgets.live(self.view, display_id=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self._times = dict.fromkeys(self._times, 0.0)
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._computed = time.perf_counter()
        self._times["loss_s"] = self._computed - self._began - self._times["rollout_s"]

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._times["optimiser_s"] = time.perf_counter() - self._computed

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        row = {"step": state.global_step, **logs}
        if "reward" in logs:
            on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            held = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
            row |= {"memory_gib": held / 2**30, **self._times}
        self.rows.append(row)
        for key, value in row.items():
            if key in KEYS and value is not None:
                self._points[key].append((state.global_step, value))
        now = time.perf_counter()
        if self.view is not None and now >= self._next:
            self._draw()
            done = time.perf_counter()
            self._next = done + max(0.09, 50 * (done - now))

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self.trainer._generate_and_score_completions = self._generate
        if not self._points:
            return
        figure = plots.panels_figure(self.rows, self._filled())
        if self.view is None:
            plots.show(figure)
        else:
            self._draw()
            last = {"text/html": self.view.value}  # a widget would be gone from the saved notebook
            self._output.update(last | widgets.picture(figure), raw=True)
            self.view.close()

    def _filled(self):
        return {title: lines for title, lines in PANELS.items() if any(key in self._points for key in lines.values())}

    def _draw(self):
        parts = []
        for title, lines in self._filled().items():
            parts.append(panel_svg(title, {label: self._points.get(key, []) for label, key in lines.items()}))
        logs = self.trainer._logs
        texts = completions_html(logs["completion"], logs["rewards"], logs["advantages"])
        self.view.value = f'{STYLE}<div class="gd">{"".join(parts)}</div>{texts}'
        self.drawings += 1


def panel_svg(title, curves):
    """One panel: a line for each label's (step, value) points, told apart by colour and dashes, and the newest.
    What is not finite is left out of a line, and said where it is the newest."""
    curves = {label: points[:: 1 + len(points) // POINTS] + points[-1:] for label, points in curves.items() if points}
    steps = [x for points in curves.values() for x, _ in points]
    values = [y for points in curves.values() for _, y in points if math.isfinite(y)] or [0.0]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    across, up = WIDTH / max(1, last - first), HEIGHT / (high - low or 1)
    drawn, now = [], []
    for (label, points), colour, dash in zip(curves.items(), plots.PALETTE, DASHES):
        finite = [point for point in points if math.isfinite(point[1])]
        path = " ".join(f"{(x - first) * across:.1f},{HEIGHT - (y - low) * up:.1f}" for x, y in finite)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        drawn.append(f'<polyline points="{path}" {style}/>')
        key = f'<svg width="22" height="8" style="display:inline;border:0"><path d="M0 5H22" {style}/></svg> '
        now.append(f"{key if len(curves) > 1 else ''}{label} {points[-1][1]:.3g}")
    said = f"{title}: {', '.join(f'{label} {points[-1][1]:.3g}' for label, points in curves.items())} at step {last}"
    text = f"<b>{title}</b><div>{' &nbsp; '.join(now)}</div>"
    text += f'<svg role="img" aria-label="{said}" width="{WIDTH}" height="{HEIGHT}">{"".join(drawn)}</svg>'
    text += f'<small style="width:{WIDTH}px"><span>{low:.3g} to {high:.3g}</span><span>step {last}</span></small>'
    return f"<figure>{text}</figure>"


def completions_html(completions, rewards, advantages):
    """A table of the newest completions, escaped, with their rewards and advantages."""
    names = list(rewards)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (*names, "advantage"))
    rows = []
    for i in range(0, len(completions), -(-len(completions) // SHOWN) or 1):
        text = completions[i]
        text = text if isinstance(text, str) else "\n".join(str(message["content"]) for message in text)
        values = [*(rewards[name][i] for name in names), advantages[i]]
        cells = "".join("<td>none</td>" if value is None else f"<td>{value:.3g}</td>" for value in values)
        rows.append(f'<tr>{cells}<td dir="auto">{html.escape(text[:600])}</td></tr>')
    return f'<table class="gd-texts"><tr>{head}<th>newest completions</th></tr>{"".join(rows)}</table>'
