"""The bench on a CPU: exact inputs, every provider a row, failures said, nothing invented."""

import csv

import pytest
import torch

from grpo_lab import bench

CPU = torch.device("cpu")
SHAPE = bench.Shape(8, 16, 8, 101, 70, "float32")


@pytest.mark.parametrize("scored", [8, 70, 128])
def test_inputs_score_exactly_what_the_shape_says(scored):
    x = bench.make_inputs(bench.Shape(8, 16, 8, 101, scored, "float32"), CPU)
    lengths = x["mask"].sum(1)
    assert lengths.sum() == scored and lengths.min() >= 1 and lengths.max() <= 16
    assert torch.equal(x["mask"], (torch.arange(16) < lengths[:, None]).long())
    assert abs(x["advantages"].sum()) < 1e-5  # groups of 8


@pytest.mark.parametrize("batch", [1, 6, 12, 16])
def test_advantages_of_any_batch(batch):
    x = bench.make_inputs(bench.Shape(batch, 16, 8, 101, 5 * batch, "float32"), CPU)
    assert x["advantages"].shape == (batch,) and torch.isfinite(x["advantages"]).all() and x["advantages"].any()


@pytest.mark.parametrize("trainable", [True, False])
def test_every_provider_is_a_row_and_failures_say_so(trainable):
    def broken(**_):
        raise RuntimeError("no kernel\nfor this device")

    def missing(**_):
        import liger_kernel_that_is_not_installed  # noqa: F401

    providers = {k: bench.PROVIDERS[k] for k in ("bare GEMMs", "naive", "chunked", "TRL")}
    rows = bench.bench(SHAPE, trainable, CPU, providers | {"broken": broken, "missing": missing}, repeats=2)
    rows = {row["provider"]: row for row in rows}
    for name in ("naive", "chunked", "TRL"):
        assert rows[name]["ms"] > 0 and rows[name]["peak_mib"] >= 0 and 0 < rows[name]["grad_error"] < 1e-5
        assert rows[name]["head"] == ("trainable" if trainable else "frozen")
    assert rows["bare GEMMs"]["ms"] > 0 and rows["bare GEMMs"]["grad_error"] is None
    assert rows["broken"]["note"] == "RuntimeError: no kernel" and rows["broken"]["ms"] is None
    assert rows["missing"]["note"].startswith("ModuleNotFoundError: No module named")


def test_a_whole_step_and_the_file(tmp_path, monkeypatch, capsys):
    tiny = dict(batch=2, prompt=4, completion=6, small=True, repeats=1)
    monkeypatch.setattr(
        bench, "bench_step", lambda dtype, device, step=bench.bench_step, **_: step(dtype, device, **tiny)
    )
    bench.main(["--step", "--out", str(tmp_path / "step.csv")])
    with open(tmp_path / "step.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == ["no head", "naive", "TRL", "chunked"] * 2
    assert all(float(row["ms"]) > 0 and not row["note"] for row in rows)
    assert all(row["torch"] == torch.__version__ and row["command"] and row["device"] for row in rows)
    assert "chunked" in capsys.readouterr().out
