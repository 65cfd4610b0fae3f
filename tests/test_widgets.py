"""The widgets, driven through their controls without a browser, and the pictures of their first views."""

import re
from types import SimpleNamespace

import pytest
import torch

from grpo_lab import Objective, grpo_loss, plots
from grpo_lab.bench.files import recorded
from grpo_lab.lessons import dashboard, widget_plots, widgets
from grpo_lab.memory import predict_loss_bytes
from grpo_lab.plots import format_bytes
from grpo_lab.policies import load_tiny_policy

HOSTILE = "<script>alert('x')</script>\" onmouseover=\"alert(1) &lt;"


@pytest.fixture(scope="module")
def records():
    return recorded("head") + recorded("wide")


def widths(view):
    return [sum(map(float, re.findall(r'<span style="width:([\d.]+)%', bar))) for bar in view.split('role="img"')[1:]]


def test_bars_are_the_predictions_and_diamonds_the_records(records):
    naive, chunked, low = bars = widgets.head_bars(records)
    inputs = 2 * 1024 * (64 * 1024 + 151936)
    shape = (64, 1024, 1024, 151936, torch.bfloat16)
    predicted = predict_loss_bytes(*shape, "naive", scored=64 * 1024 * 59 // 100, device="cuda")
    assert naive.total == inputs + sum(predicted.values())
    for bar in bars:
        assert bar.measured == pytest.approx(bar.total, rel=0.05), bar.name
    assert naive.measured > 15 * chunked.measured > 15 * low.measured
    assert all(bar.measured is None for bar in widgets.head_bars(records, batch=32))
    assert widgets.head_bars(records, chunk=256)[1].measured is None, "recorded was the planner's choice"
    assert widgets.head_bars(records, batch=32, hidden=2560, scored=50)[0].measured is not None


def test_a_control_that_moves_redraws_the_bars(records):
    calculator = widgets.memory_calculator(records)
    first = calculator.view.value
    assert "naive: 38.5 GiB predicted, does not fit; 38.5 GiB recorded on an H200" in first
    calculator.controls["batch"].value = 16
    second = calculator.view.value
    total = widgets.head_bars(batch=16)[0].total
    assert f"naive: {format_bytes(total)} predicted, fits" in second and "recorded on an H200</div>" not in second
    assert widths(second) != pytest.approx(widths(first))
    assert widths(second)[0] == pytest.approx(100 * total / (1.04 * (24 << 30)), abs=0.01)
    calculator.controls["model"].value = "GPT-2"
    assert calculator.controls["vocab"].value == 50257
    total = widgets.head_bars(batch=16, hidden=768, vocab=50257)[0].total
    assert f"naive: {format_bytes(total)} predicted" in calculator.view.value
    for name, value in {"chunk": 256, "dtype": "fp32", "card": 8, "scored": 7, "length": 32, "vocab": 256000}.items():
        before = calculator.view.value
        calculator.controls[name].value = value
        assert calculator.view.value != before, name
    assert all(widgets.MODELS[model][1] in widgets.VOCABULARIES for model in widgets.MODELS)


def test_tensors_look_different_whoever_holds_them(records):
    looks = widgets.tensor_looks(widgets.head_bars(records))
    assert len(looks) > 10 and len(set(looks.values())) == len(looks)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_token_values_are_those_of_the_loss(loss_type, seed):
    B, T, H, V = 3, 5, 8, 11
    hidden, weight = torch.randn(B, T, H), torch.randn(V, H, requires_grad=True)
    ids, mask = torch.randint(V, (B, T)), torch.ones(B, T, dtype=torch.long)
    mask[0, 3:] = 0
    advantages, options = torch.tensor([1.0, -1.0, 0.5]), dict(objective=Objective(loss_type=loss_type))
    _, stats = grpo_loss(hidden, weight, ids, mask, advantages, **options)
    old = (stats.logps + 0.5 * torch.randn(B, T)) * mask
    loss, stats = grpo_loss(hidden, weight, ids, mask, advantages, old_logps=old, **options)
    loss.backward()
    values, clipped = widgets.token_values(stats.logps, old, mask, advantages, **options)
    name = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
    assert sum(map(sum, clipped)) / mask.sum().item() == pytest.approx(stats.metrics()[name])
    logps = torch.log_softmax(hidden @ weight.T, -1)
    logps = logps.gather(-1, ids[..., None])[..., 0]
    (gradient,) = torch.autograd.grad((logps * torch.tensor(values["coefficient"])).sum(), weight)
    torch.testing.assert_close(gradient, weight.grad)
    assert values["coefficient"][0][3:] == [0, 0] and not any(clipped[0][3:])


def test_the_texts_of_tokens_keep_their_spaces():
    tokenizer = load_tiny_policy()[1]
    text = "Ben has 43 + 7 = 50 pens.\n#### 50"
    ids = tokenizer(text).input_ids
    pieces = widgets.token_texts(tokenizer, ids)
    assert "".join(pieces) == text and len(pieces) == len(ids) and pieces[1:4] == [" has", " 4", "3"]


def test_the_microscope_follows_its_controls_and_trusts_no_token():
    completions = [["Tom", " has", HOSTILE, "\n"], ["6"]]
    values = {"ratio": [[1.0, 2.0, 0.25, 1.0], [1.5, 0, 0, 0]], "log-prob": [[-0.1, -2.0, -3.0, 0.0], [-1.0, 0, 0, 0]]}
    clipped = [[False, True, False, False], [False] * 4]
    microscope = widgets.token_microscope(completions, values, clipped, ["first", "second"])
    view = microscope.view.value
    tokens = re.findall(r'<span class="([\w -]+)" tabindex="0" role="note" aria-label="([^"]*)"', view)
    assert [kind for kind, _ in tokens] == ["gl-token", "gl-token gl-cut", "gl-token", "gl-token"]
    assert tokens[1][1] == "&#x27; has&#x27;: ratio 2, clipped" and "<br>" in view
    assert "<script" not in view and 'onmouseover="' not in view
    assert re.findall(r"border-bottom:\d+px (\w+)", view) == ["solid", "solid", "dashed", "solid"], (
        "not by colour alone"
    )
    microscope.controls["shown"].value = "log-prob"
    assert "&#x27; has&#x27;: log-prob -2" in microscope.view.value
    microscope.controls["completion"].value = 1
    assert microscope.view.value.count("tabindex") == 1 and "&#x27;6&#x27;: log-prob -1" in microscope.view.value
    assert widgets.signed("ratio", [2, 0.25, 1]) == pytest.approx([0.5, -1, 0])
    assert widgets.signed("coefficient", [0.0, 0.0]) == [0, 0]
    assert widgets.signed("ratio", [float("inf"), float("nan"), 0.0])[:2] == [1, 1]
    assert widgets.signed("log-prob", [-float("inf"), 0.0]) == [-1, 0]


def test_pictures_show_the_first_views(records):
    (ax,) = widget_plots.bars_figure(widgets.head_bars(records), card=24).axes
    totals = [bar.total for bar in widgets.head_bars(records)]
    assert sum(patch.get_width() for patch in ax.patches) == sum(totals)
    assert {t.get_text().strip() for t in ax.texts} == {"38.5 GiB does not fit", *map(format_bytes, totals[1:])}
    (ax,) = widget_plots.tokens_figure([["a", "\n"]], "ratio", [[2.0, 1.0]], [[True, False]], ["one"]).axes
    assert [t.get_text() for t in ax.texts] == ["one", "a", "2", "↵", "1"]
    assert ax.patches[0].get_edgecolor()[3] == 1 and ax.patches[1].get_edgecolor()[3] == 0


def test_a_widget_is_built_only_where_a_person_watches(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    figure, _ = plots.axes("", "", "")
    monkeypatch.setattr(widgets, "headless", lambda: True)
    widgets.show(lambda: pytest.fail("built for nobody"), figure)
    monkeypatch.setattr(widgets, "headless", lambda: False)
    widgets.show(lambda: widgets.memory_calculator(), figure)
    view = "application/vnd.jupyter.widget-view+json"
    assert [[*data] for data in shown[:2]] == 2 * [["image/png", "text/plain"]] and view in shown[-1]
    assert not any(view in data and "image/png" in data for data in shown), "gone, it would hide the picture"


def test_the_dashboard_draws_what_is_logged_and_no_more_often_than_it_may(monkeypatch):
    class Trainer:
        _logs = {"completion": [HOSTILE, "fine"], "rewards": {"right": [None, 1.0]}, "advantages": [-1.0, 1.0]}

        def _generate_and_score_completions(self, inputs):
            return inputs

    trainer, state = Trainer(), SimpleNamespace(global_step=0, is_world_process_zero=True)
    monkeypatch.setattr(dashboard, "headless", lambda: False)
    shown, updated = [], []
    output = SimpleNamespace(update=lambda data, raw: updated.append(data))
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data) or output)
    live = dashboard.Dashboard(trainer)
    live.on_train_begin(None, state, None)
    live.on_train_end(None, state, None)
    assert not updated, "nothing was logged, nothing is drawn"
    shown.clear()
    live.on_train_begin(None, state, None)
    for step in range(1, 301):
        state.global_step = step
        live.on_step_begin(None, state, None)
        assert trainer._generate_and_score_completions(step) == step
        live.on_pre_optimizer_step(None, state, None)
        live.on_optimizer_step(None, state, None)
        live.on_log(
            None, state, None, logs={"loss": 1.0, "reward": step / 300, "kl": None, "frac_reward_zero_std": 0.0}
        )
    assert 1 <= live.drawings < 20, "300 updates within a moment are not 300 drawings"
    live.on_train_end(None, state, None)
    view = live.view.value
    assert 'aria-label="Reward: reward 1 at step 300"' in view and "KL" not in view and "Held-out" not in view
    assert all(name in view for name in ("Memory (GiB)", "rollouts", "optimiser", "Groups of zero advantage"))
    assert "<script" not in view and "&lt;script&gt;" in view and "<td>none</td>" in view
    assert len(re.search(r'points="([^"]*)"', view)[1].split()) <= dashboard.POINTS + 1
    assert live.rows[-1]["loss_s"] >= 0 and live.rows[-1]["memory_gib"] > 0.01
    assert updated[0]["text/html"] == view and "image/png" in updated[0] and len(shown) == 2
    assert not any("widget" in mime for mime in updated[0]), "without the kernel it would be gone"
    assert trainer._generate_and_score_completions.__name__ == "_generate_and_score_completions", "unhooked"


def test_a_training_that_diverges_keeps_the_curve_that_it_had():
    nan, inf = float("nan"), float("inf")
    view = dashboard.panel_svg("KL", {"KL": [(1, 0.0), (2, 1.0), (3, inf), (4, nan)]})
    assert re.search(r'points="([^"]*)"', view)[1] == "0.0,84.0 100.0,0.0"
    assert 'aria-label="KL: KL nan at step 4"' in view
    assert "at step 2" in dashboard.panel_svg("KL", {"KL": [(1, nan), (2, nan)]})
