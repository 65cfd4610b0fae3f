"""Every notebook from start to end as a user runs it: by the command line, with smoke=True, into a run folder."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from test_memory import exact

from grpo_lab.cli import notebook_parameters
from grpo_lab.runs import load_run

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def one_step(summary):
    """00: both implementations agree, right answers gain on wrong ones, and it is quick."""
    assert 0 < summary["share_right"] < 1
    assert summary["loss_difference"] < 1e-6 and summary["gradient_difference"] < 1e-4
    right, wrong = (summary[f"{kind}_logp_after"] - summary[f"{kind}_logp_before"] for kind in ("right", "wrong"))
    assert right > wrong and right > 0
    assert summary["step_seconds"] < 60


def memory_wall(summary):
    """01: predictions hold, naive grows by two copies of the logits for each answer, and the wall moves far."""
    if exact():  # where memory can only be sampled, a short peak may be missed
        assert summary["naive_prediction_error"] < 0.05 and summary["chunked_prediction_error"] < 0.05
        for dtype in ("fp32", "bf16"):
            assert summary[f"{dtype}_copies_per_answer"] == pytest.approx(2, rel=0.1)
            assert summary[f"{dtype}_naive_peak_mib"] > summary[f"{dtype}_chunked_peak_mib"] > 0
    for gib in (24, 40, 80):
        assert summary[f"answers_{gib}_gib_chunked"] > 50 * summary[f"answers_{gib}_gib_naive"] > 0


def chunked_loss(summary):
    """02: each step takes less memory than the one before, with 3, 3, 4 and 3 products; the package agrees."""
    stages = ("naive", "chunked", "recomputed", "gradients_in_forward")
    assert [round(summary[f"{stage}_products"], 2) for stage in (*stages, "package")] == [3, 3, 4, 3, 3]
    if exact():
        peaks = [summary[f"{stage}_peak_mib"] for stage in stages]
        assert peaks == sorted(peaks, reverse=True) and peaks[0] > 3 * peaks[-1]
    assert summary["package_difference"] < 1e-5 and summary["bf16_error"] > 2 * summary["fp32_error"] > 0


def triton_kernel(summary):
    """03: the notebook's kernels agree with the package's; eager PyTorch walks over the table many times."""
    assert max(summary[f"{name}_difference"] for name in ("logps", "entropy", "gradient")) < 1e-4
    assert summary["eager_walks"] > 10
    errors = [value for name, value in summary.items() if name.endswith("error_over_eager")]
    assert len(errors) == 4 and max(errors) < 10


def correctness(summary):
    """04: the chunked loss errs as eager PyTorch does, and both broken losses are caught.

    The notebook's budget of 1.5 is for its several draws; of one draw, as in smoke, the ratio of two errors is noisy.
    """
    assert 0 < summary["worst_error_over_eager"] < 10
    assert summary["broken_losses_caught"] == 2


def verifiable_rewards(summary):
    """05: no check that looks for the number anywhere finds fewer than accuracy; what cheating is takes more steps."""
    for name in ("untrained", "format", "careless", "verified"):
        assert 0 <= summary[f"accuracy_{name}"] <= summary[f"number somewhere_{name}"] <= 1
        assert 0 <= summary[f"format_{name}"] <= 1 and summary[f"characters_{name}"] > 0


def training(summary):
    """06: the receipt passed, and the shares are shares; that the policy improves takes more than smoke's few steps."""
    assert summary["receipt_passed"] is True and summary["training_seconds"] > 0
    for name in ("accuracy", "greedy", "pass_at_k"):
        assert 0 <= summary[f"{name}_before"] <= 1 and 0 <= summary[f"{name}_after"] <= 1


def several_processes(summary):
    """07: two ranks' gradient is one process's, the head is gathered once for any number of chunks, a killed rank is
    named, and the resumed FSDP training is that of one process."""
    assert summary["weights"][0] == summary["weights"][1], "the formula of section 1"
    assert summary["gradient_error"] < 1e-5
    assert summary["gathers"][0] == summary["gathers"][1] > 0
    assert summary["head_inside"] == [120, 96] and sum(summary["head_rows"]) == 120 and max(summary["head_rows"]) < 120
    assert summary["lora_difference_off"] == 0 < summary["lora_difference_on"]
    assert summary["wrapper"] == "FSDP"  # accelerate falls back to DDP in silence
    assert summary["killed_rank"] == 1 and summary["receipt_passed"] is True
    assert summary["same_draws_equal_rewards"] == summary["steps"]
    assert summary["same_draws_norms"] < 1e-5 and summary["same_draws_weights"] < 1e-6


def vllm_rollouts(summary):
    """08: filling places at once wastes fewer, a dead server is named, and the correction removes what bf16 does; the
    engine itself is tested in test_vllm.py."""
    assert summary["rollouts"] == "transformers" and summary["transformers_receipt"] is True
    assert 0 < summary["transformers_rollout_share"] < 1 and summary["transformers_tokens_per_s"] > 0
    assert 0 < summary["share_with_a_token"] <= summary["share_with_a_token_refilled"] <= 1
    assert "exit code 1" in summary["server_died"]
    assert 0 < summary["bf16_mismatch_before"] < 0.05 and summary["bf16_mismatch_after"] < 1e-6
    assert summary["stale_mismatch_before"] > 1e-5


def comparison(summary):
    """09: two runs of its own, in two groups, each with its receipt, memory and throughput."""
    assert (summary["runs"], summary["groups"], summary["receipts_passed"]) == (2, 2, 2)
    assert 0 <= summary["ahead"] <= 1 and summary["peak_gib"] > 0.1 and summary["tokens_per_second"] > 0


FACTS = {
    "00_start_here": one_step,
    "01_memory_wall": memory_wall,
    "02_chunked_loss": chunked_loss,
    "03_triton_kernel": triton_kernel,
    "04_correctness": correctness,
    "05_verifiable_rewards": verifiable_rewards,
    "06_train_single_gpu": training,
    "07_fsdp_peft_multi_gpu": several_processes,
    "08_vllm_rollouts": vllm_rollouts,
    "09_compare_runs": comparison,
}


def outputs(path):
    notebook = nbformat.read(path, 4)
    return [(c, o) for c in notebook.cells if c.cell_type == "code" for o in c.outputs]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda p: p.stem)
def executed(request, tmp_path_factory):
    """(notebook, its run folder) after ``python -m grpo_lab run <notebook> -p smoke true``."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "grpo_lab", "run", str(request.param), "-p", "smoke", "true", "--root", str(root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRPO_LAB_RUNS": ""}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    (folder,) = root.iterdir()
    return request.param, folder


def test_it_runs_without_an_error_or_a_warning(executed):
    notebook, folder = executed
    cells = [c for c in nbformat.read(folder / notebook.name, 4).cells if c.cell_type == "code"]
    assert all(c.execution_count for c in cells)
    for cell, output in outputs(folder / notebook.name):
        assert output.output_type != "error", cell.source
        if output.output_type == "stream" and output.name == "stderr":
            assert "Warning" not in output.text, output.text


def test_the_run_folder_holds_what_was_run_and_found(executed):
    notebook, folder = executed
    record = load_run(folder)
    assert record.parameters == notebook_parameters(notebook) | {"smoke": True}
    assert record.status["status"] == "finished"
    assert record.environment["packages"]["torch"] and record.environment["command"].startswith(
        "python -m grpo_lab run"
    )
    assert record.metrics and record.summary
    pictures = list(folder.glob("*.png"))
    assert pictures and all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)


def test_what_it_found_holds(executed):
    notebook, folder = executed
    assert notebook.stem in FACTS, "say here what a run of this notebook must find"
    FACTS[notebook.stem](load_run(folder).summary)


def test_all_cells_run_again_on_a_finished_run_and_leave_it_alone(executed, tmp_path, monkeypatch):
    """As in JupyterLab, where nothing stands between the user and the cells."""
    notebook, folder = executed
    kept = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    for name, value in {"GRPO_LAB_RUNS": str(folder.parent), "GRPO_LAB_HEADLESS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    options = {"kernel_name": "python3", "cwd": notebook.parent, "progress_bar": False}
    papermill.execute_notebook(notebook, tmp_path / "again.ipynb", {"smoke": True}, **options)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == kept


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_committed_outputs_are_of_one_whole_default_run(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and "papermill" not in notebook.metadata
    assert notebook_parameters(path)["smoke"] is False
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    assert not any("papermill" in c.metadata or "injected-parameters" in c.metadata.get("tags", []) for c in cells)
    assert any("image/png" in o.get("data", {}) for _, o in outputs(path)), "a notebook shows a picture"
    assert str(ROOT) not in json.dumps(notebook)


def test_the_readme_shows_what_notebook_06_shows():
    data = [o.data for _, o in outputs(ROOT / "notebooks" / "06_train_single_gpu.ipynb") if "data" in o]
    pictures = [base64.b64decode(d["image/png"]) for d in data if "image/png" in d]
    assert (ROOT / "data" / "pictures" / "training.png").read_bytes() in pictures
    (record,) = (d["text/plain"] for d in data if "accuracy_before" in d["text/plain"])
    found, readme = dict(re.findall(r"(\w+) +([\d.]+)", record)), (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("accuracy", "greedy", "pass_at_k"):
        before, after = (float(found[f"{name}_{when}"]) for when in ("before", "after"))
        assert f"{name}: {before:.3g} before, {after:.3g} after" in readme


@pytest.mark.parametrize("number", ["06", "08"])
def test_trl_s_own_loss_trains_there_too_without_a_receipt(number, tmp_path):
    command = [sys.executable, "-m", "grpo_lab", "run", number, "-p", "smoke", "true", "-p", "loss_impl", "trl"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRPO_LAB_RUNS": ""}
    result = subprocess.run([*command, "--root", str(tmp_path)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    (folder,) = tmp_path.iterdir()
    receipts = [value for name, value in load_run(folder).summary.items() if "receipt" in name]
    assert receipts and not any(receipts)
