"""Widgets for the notebooks: a memory calculator and a token microscope; ``dashboard.py`` has the one for training.

A widget explores and never gates: ``show`` leaves a picture of its first view, which is all that a headless run, GitHub
or a page without a kernel gets. Each is drawn as HTML that takes its text colour from the page, so that light and dark
themes both fit, and says with hatches, lines and numbers what it says with the colours of Okabe and Ito. plotly's
FigureWidget is left out: it knows no theme, and sends megabytes of script for a few bars.
"""

import base64
import html
import itertools
import math
from typing import NamedTuple

import torch

from grpo_lab import plots
from grpo_lab.memory import predict_loss_bytes
from grpo_lab.objective import Tokens
from grpo_lab.plots import BLUE, RED, format_bytes
from grpo_lab.runs import headless

MODELS = {  # width of the hidden states, vocabulary
    "Qwen3-0.6B": (1024, 151936),
    "Qwen3-4B": (2560, 151936),
    "Llama 3.2 1B": (2048, 128256),
    "Gemma 2 2B": (2304, 256000),
    "GPT-2": (768, 50257),
}
VOCABULARIES = (8192, 32000, 50257, 65536, 100352, 128256, 151936, 200064, 256000)
CARDS = (8, 16, 24, 40, 80, 141)  # GiB
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HATCHES = ("0deg, #0000, #0000", "45deg, #fff9 0 2px, #0000 2px 7px", "90deg, #fff9 0 2px, #0000 2px 7px",
           "135deg, #0009 0 2px, #0000 2px 7px", "0deg, #0009 0 2px, #0000 2px 7px")  # fmt: skip


def picture(figure):
    """The figure as the data of a display."""
    return {"image/png": base64.b64encode(plots.png(figure)).decode(), "text/plain": "<picture>"}


def show(make, figure):
    """Display ``figure``, the picture of the widget's first view, and where a person can use it, in its place the
    widget that ``make()`` builds: an output of its own, since JupyterLab draws no picture for a widget that is gone."""
    from IPython.display import display

    display(picture(figure), raw=True)
    if not headless():
        live(make())


def live(widget, **options):
    """Display a widget, and what stands in its place where a saved notebook is opened without its kernel."""
    from IPython.display import display

    display({"text/html": GONE_STYLE, "text/plain": ""}, raw=True)
    return display(widget._repr_mimebundle_() | {"text/plain": GONE}, raw=True, **options)


class Bar(NamedTuple):
    """One way to compute the loss: its tensors at the peak, inputs included, in bytes; ``measured``: bytes recorded for
    this very shape, None where it is not recorded."""

    name: str
    tensors: dict[str, int]
    measured: float | None

    @property
    def total(self):
        return sum(self.tensors.values())


def head_bars(records=(), *, batch=64, length=1024, hidden=1024, vocab=151936, scored=59, dtype="bf16", chunk="auto"):
    """Naive, chunked and low-memory Bars of a trained head on a GPU. scored: per cent of the positions that count;
    records: rows of the bench's table "head" or "wide", of which those of this very shape become ``measured``."""
    shape = dict(batch=batch, length=length, hidden=hidden, vocab=vocab)
    s, tokens = DTYPES[dtype].itemsize, max(1, batch * length * scored // 100)
    inputs = {"states (B, T, H)": batch * length * hidden * s, "head (V, H)": vocab * hidden * s}
    ways = {"naive": dict(impl="naive"), "chunked": dict(chunk_tokens=chunk)}
    ways |= {"chunked, low memory": dict(memory_budget="low")}
    bars = []
    for name, options in ways.items():
        tensors = predict_loss_bytes(**shape, dtype=DTYPES[dtype], scored=tokens, device="cuda", **options)
        same = shape | {"provider": name, "head": "trainable", "dtype": str(DTYPES[dtype]).removeprefix("torch.")}
        peaks = [
            row["peak_mib"] * 2**20 + sum(inputs.values())
            for row in records
            if same.items() <= row.items() and round(100 * row["scored"] / (batch * length)) == scored
        ]
        bars.append(Bar(name, inputs | tensors, peaks[0] if peaks and (name != "chunked" or chunk == "auto") else None))
    return bars


def bars_html(bars, card):
    """Bars as HTML: stacked tensors against the card's size, a diamond at what was measured, and a list of tensors."""
    whole = 1.04 * max(card << 30, *(max(bar.total, bar.measured or 0) for bar in bars))
    looks, rows, lists = tensor_looks(bars), [], []
    for bar in bars:
        fits = "fits" if bar.total <= card << 30 else "does not fit"
        text = f"{bar.name}: {format_bytes(bar.total)} predicted, {fits}"
        mark = ""
        if bar.measured is not None:
            text += f"; {format_bytes(bar.measured)} recorded on an H200"
            mark = f'<i class="gl-mark" style="left:{100 * bar.measured / whole:.2f}%">◆</i>'
        parts, items = [], []
        for name, size in bar.tensors.items():
            colour, hatch = looks[name]
            look = f"background:repeating-linear-gradient({HATCHES[hatch]}),{colour}"
            title = f"{html.escape(name)}: {format_bytes(size)}"
            parts.append(f'<span style="width:{100 * size / whole:.3f}%;{look}" title="{title}"></span>')
            items.append(f'<li><span class="gl-key" style="{look}"></span>{title}</li>')
        limit = f'<i class="gl-card" style="left:{100 * (card << 30) / whole:.2f}%"></i>'
        rows.append(f'<div>{text}</div><div class="gl-bar" role="img" aria-label="{text}">{"".join(parts)}{limit}{mark}'
                    "</div>")  # fmt: skip
        lists.append(f"<div><b>{bar.name}</b><ul>{''.join(items)}</ul></div>")
    about = (
        f"<p>Dashed line: a card of {card} GiB. ◆: recorded on an H200. The loss alone, states and head included.</p>"
    )
    return f'{STYLE}<div class="gl">{"".join(rows)}{about}<div class="gl-lists">{"".join(lists)}</div></div>'


def tensor_looks(bars):
    """Colour and number of the hatch for each tensor's name, no two alike."""
    names = dict.fromkeys(name for bar in bars for name in bar.tensors)
    return dict(zip(names, zip(itertools.cycle(plots.PALETTE), itertools.cycle(range(len(HATCHES))))))


def memory_calculator(records=(), card=24):
    """Sliders for the shape of the loss, and its memory. Returns an ipywidgets VBox whose first view is
    ``head_bars(records)``; ``.controls`` holds the controls by name, ``.view`` the HTML."""
    import ipywidgets as w

    wide = {"style": {"description_width": "9em"}, "layout": {"width": "26em"}}
    chunks = ["auto", *(2**k for k in range(6, 15))]
    controls = {
        "model": w.Dropdown(options=[*MODELS], description="model", **wide),
        "batch": w.SelectionSlider(options=[2**k for k in range(11)], value=64, description="answers B", **wide),
        "length": w.SelectionSlider(
            options=[2**k for k in range(5, 16)], value=1024, description="tokens each T", **wide
        ),
        "scored": w.IntSlider(59, 1, 100, description="% of them scored", **wide),
        "vocab": w.SelectionSlider(options=VOCABULARIES, value=151936, description="vocabulary V", **wide),
        "dtype": w.Dropdown(options=[*DTYPES], description="dtype", **wide),
        "chunk": w.SelectionSlider(options=chunks, description="rows in a chunk C", **wide),
        "card": w.Dropdown(options=[(f"{size} GiB", size) for size in CARDS], value=card, description="card", **wide),
    }
    view = w.HTML()

    def draw(change=None):
        values = {name: control.value for name, control in controls.items()}
        hidden, vocab = MODELS[values.pop("model")]
        if change is not None and change["owner"] is controls["model"] and values["vocab"] != vocab:
            controls["vocab"].value = vocab  # which draws
            return
        card = values.pop("card")
        view.value = bars_html(head_bars(records, hidden=hidden, **values), card)

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    grid = {"grid_template_columns": "repeat(auto-fill, 26em)"}
    about = w.HTML(f"{KEYS}Tab goes from one control to the next, the arrow keys move it.")
    box = w.VBox([w.GridBox([*controls.values()], layout=grid), about, view])
    box.controls, box.view = controls, view
    return box


def token_values(logps, old_logps, mask, advantages, objective, ref_logps=None):
    """What ``token_microscope`` shows of a batch: ``(quantities, clipped)``.

    logps, old_logps, mask, ref_logps: (B, T), as for ``grpo_loss``; advantages: (B,). The ratio is the token's own,
    also where the objective takes the sequence's.
    """
    position = mask.reshape(-1).nonzero().squeeze(-1)
    lengths = mask.sum(-1).to(logps.dtype)

    def pack(x):
        return None if x is None else x.detach().reshape(-1)[position]

    tokens = Tokens(
        shape=mask.shape, position=position, ids=None, lengths=lengths,
        advantages=pack(advantages[:, None].expand(mask.shape)),
        weight=objective.weights(lengths, position // mask.shape[1], None), entropy_weight=1 / lengths.sum(),
        old_logps=pack(old_logps), ref_logps=pack(ref_logps),
    )  # fmt: skip
    entropy = torch.zeros_like(pack(logps))
    coefficients, _ = objective.coefficients(pack(logps), entropy, tokens)
    _, found = objective.loss(pack(logps), entropy, tokens)
    names = ("clip_ratio/low", "clip_ratio/high", "cispo_clip_ratio")
    clipped = sum((found[name] for name in names if name in found), torch.zeros_like(entropy))
    quantities = {"ratio": (logps - old_logps).exp(), "log-prob": logps, "coefficient": tokens.pad(coefficients)}
    return {name: x.tolist() for name, x in quantities.items()}, tokens.pad(clipped).bool().tolist()


def signed(name, values):
    """What colour and line say of ``values``, -1 to 1: a ratio by its logarithm, others as they are, over the largest
    of them."""
    heights = [math.log(max(v, 1e-9)) if name == "ratio" else v for v in values]
    heights = [max(-1e3, min(1e3, height)) for height in heights]  # what is not finite too, nan as 1e3
    largest = max(map(abs, heights), default=0) or 1
    return [height / largest for height in heights]


def tokens_html(tokens, name, values, clipped):
    """The tokens of one completion, coloured and underlined by ``values``: blue and solid above 0 (a ratio: 1), red and
    dashed below, thicker the further. A clipped token stands in a box. Focus or pointer shows the number."""
    spans = []
    for token, value, height, cut in zip(tokens, values, signed(name, values), clipped):
        colour, line = (BLUE, "solid") if height >= 0 else (RED, "dashed")
        tip = html.escape(f"{token!r}: {name} {value:.4g}{', clipped' if cut else ''}", quote=True)
        text = html.escape(token).replace("\n", "↵")
        style = f"background:{colour}{round(0x8C * abs(height)):02x};"
        style += f"border-bottom:{1 + round(4 * abs(height))}px {line} {colour}"
        kind = "gl-token gl-cut" if cut else "gl-token"
        said = f'tabindex="0" role="note" aria-label="{tip}" data-tip="{tip}"'
        spans.append(f'<span class="{kind}" {said} style="{style}">{text}</span>')
        if token.endswith("\n"):
            spans.append("<br>")
    return f'{STYLE}<div class="gl gl-text">{"".join(spans)}</div>'


def token_texts(tokenizer, ids):
    """The text of each token, which make up the whole text: decoded alone, a token may lose the space before it."""
    texts = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in itertools.pairwise(texts)]


def token_microscope(completions, quantities, clipped, labels=None):
    """Looks at one completion's tokens. Returns an ipywidgets VBox with ``.controls`` ("completion", "shown") and
    ``.view``; ``tokens_figure`` draws its first view.

    completions: token texts of each of B completions; quantities: name ("log-prob", "ratio", "coefficient") to numbers
    (B, T); clipped: (B, T), true where the ratio was clipped (``token_values`` gives both). labels:
    a name for each completion.
    """
    import ipywidgets as w

    names = labels or [f"completion {i}" for i in range(1, len(completions) + 1)]
    controls = {
        "completion": w.Dropdown(options=[(name, i) for i, name in enumerate(names)], description="completion"),
        "shown": w.ToggleButtons(options=[*quantities]),
    }
    view = w.HTML()

    def draw(_=None):
        i, name = controls["completion"].value, controls["shown"].value
        count = len(completions[i])
        view.value = tokens_html(
            completions[i], name, [float(v) for v in quantities[name][i]][:count], [*map(bool, clipped[i])][:count]
        )

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    about = w.HTML(f"{KEYS}Blue with a solid line: above 0 (a ratio: above 1). Red with a dashed line: below. In a "
                   "box: clipped. Point at a token, or reach it with Tab, for its number.")  # fmt: skip
    box = w.VBox([w.HBox([*controls.values()], layout={"flex_flow": "row wrap"}), view, about])
    box.controls, box.view = controls, view
    return box


# Of a widget whose kernel has ended a saved notebook has only the name, for which JupyterLab shows an error
GONE = "What was live here went with its kernel. Run this cell and those before it to have it back."
GONE_STYLE = f"""<style>
.jp-OutputArea-child:has(+ * + * .gl) {{ display: none }}
.jp-OutputArea-output.jupyter-widgets:not(:has(*)) {{ font-size: 0 }}
.jp-OutputArea-output.jupyter-widgets:not(:has(*))::after {{ content: "{GONE}";
  font-size: var(--jp-content-font-size1) }}
</style>"""
# Keys pressed on what has this attribute are its own; else JupyterLab goes from cell to cell with a control's arrows
KEYS = """<style onload="this.closest('.widget-vbox').addEventListener('focusin',
    event => event.target.setAttribute('data-lm-suppress-shortcuts', ''))"></style>"""
STYLE = """<style>
.gl { color: inherit; line-height: 1.5; max-width: 60em }
.gl-bar { position: relative; display: flex; height: 1.8em; margin: 0 0 .6em; border: 1px solid currentColor }
.gl-bar span { height: 100% }
.gl-card { position: absolute; top: -3px; bottom: -3px; border-left: 3px dashed currentColor }
.gl-mark { position: absolute; transform: translateX(-50%); font-style: normal; font-size: 120%; line-height: 1.45;
  color: #fff; text-shadow: 0 0 3px #000, 0 0 3px #000 }
.gl-lists { display: flex; flex-wrap: wrap; gap: 0 2em; font-size: 90% }
.gl-lists ul { margin: 0; padding: 0; list-style: none }
.gl-key { display: inline-block; width: 1.1em; height: .9em; margin-right: .5em }
.gl-text { position: relative; white-space: pre-wrap; font-family: monospace; font-size: 110%; line-height: 2.2;
  padding-bottom: 2.4em }
.gl-token { unicode-bidi: isolate; padding: 2px 0 }
.gl-cut { outline: 2px solid currentColor; outline-offset: -1px }
.gl-token:focus { outline: 3px dotted currentColor; outline-offset: 2px }
.gl-token:hover::after, .gl-text:not(:has(.gl-token:hover)) .gl-token:focus::after { content: attr(data-tip);
  position: absolute; left: 0; bottom: 0; padding: 0 .5em; color: var(--jp-ui-inverse-font-color1, Canvas);
  background: var(--jp-inverse-layout-color1, CanvasText) }
</style>"""
