"""The bench's tables ``rollouts`` and ``joint``, on a CPU with transformers in vLLM's place (test_vllm.py has vLLM)."""

import json
from pathlib import Path

import pytest
import torch

from grpo_lab import cli, split
from grpo_lab.bench import rollouts as bench_rollouts
from grpo_lab.bench.command import main
from grpo_lab.bench.files import read_table
from grpo_lab.policies import load_tiny_policy

CPU = torch.device("cpu")


def test_each_way_is_a_row_and_one_that_is_absent_says_so(tmp_path, capsys):
    cli.main(["bench", "--tables", "rollouts", "--rollouts", "transformers,server", "--repeats", "1", "--out",
              str(tmp_path)])  # fmt: skip
    plain, server = read_table(tmp_path / "rollouts_cpu.csv")
    assert (plain["rollouts"], plain["gpus"], server["rollouts"], server["gpus"]) == ("transformers", 1, "server", 2)
    assert sum(plain[f"{part}_s"] for part in split.PARTS) == pytest.approx(plain["step_s"])
    assert plain["tokens_per_s"] == pytest.approx(16 * 24 / plain["rollout_s"]) and plain["reference_s"] > 0
    assert server["step_s"] is None and server["note"].startswith("absent: vLLM is not installed")
    said = capsys.readouterr().out
    assert f"24 tokens: {plain['tokens_per_s']:,.0f} tokens/s" in said and "absent: vLLM" in said


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """Problems with solutions of one, two and three lines, and sizes to go with them."""
    sizes = bench_rollouts.JOINT["cpu"] | dict(test=20, warm_steps=1, length=8)
    monkeypatch.setitem(bench_rollouts.JOINT, "cpu", sizes)
    for name, count in (("train", 30), ("test", 18)):
        rows = []
        for i in range(count):
            steps = "\n".join(f"Tom has {i} + {j} = <<{i}+{j}={i + j}>>{i + j} apples." for j in range(1 + i % 3))
            rows.append({"question": f"Tom has {i} apples. How many?", "answer": f"{steps}\n#### {i}"})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_short_questions_take_one_or_two_steps(gsm8k):
    for subset, lines in (("all", {2, 3, 4}), ("short", {2, 3})):
        rows = bench_rollouts.questions("train", gsm8k, subset)
        assert {len(row["solution"].splitlines()) for row in rows} == lines
        assert all(row["prompt"][0]["content"].endswith(bench_rollouts.INSTRUCTION) for row in rows)


def test_both_losses_train_from_one_warm_policy(gsm8k, tmp_path):
    cli.main(["bench", "--tables", "joint", "--rollouts", "transformers", "--steps", "2", "--gsm8k", str(gsm8k),
              "--out", str(tmp_path / "results")])  # fmt: skip
    rows = read_table(tmp_path / "results" / "joint_cpu.csv")
    assert "/" not in rows[0]["command"].partition("bench")[2], "a record does not say where things lie"
    runs = {}
    for row in rows:
        runs.setdefault((row["loss_impl"], row["seed"], row["questions"]), []).append(row)
    assert list(runs) == bench_rollouts.RUNS
    for run in runs.values():
        assert [(row["kind"], row["step"]) for row in run] == [("test", 0), ("train", 1), ("train", 2), ("test", 2)]
        assert all(row["receipt"] is True and 0 <= row["accuracy"] <= 1 and row["answers"] > 0 for row in run)
        assert all(row["rollout_s"] > 0 for row in run[1:3])
        assert run[0]["answers"] == {"all": 18, "short": 12}[run[0]["questions"]] and run[1]["answers"] == 16
    same = [[row[key] for key in ("reward", "completion", "accuracy")] for row in runs["naive", 0, "all"]]
    assert same == [[row[key] for key in ("reward", "completion", "accuracy")] for row in runs["chunked", 0, "all"]]
    norms = [[row["grad_norm"] for row in runs[loss, 0, "all"]][1:3] for loss in ("naive", "chunked")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3, abs=1e-6)


def test_a_training_whose_server_fails_gets_a_new_one(gsm8k, monkeypatch, capsys):
    class Fake:
        config, starts, stops = {}, 1, 0

        def start(self):
            self.starts += 1

        def stop(self):
            self.stops += 1

    server, runs = Fake(), []

    def joint_run(policy, config, train, test, before):
        runs.append(config.loss_impl)
        if len(runs) == 2:
            raise ConnectionError("the server does not answer")
        (Path(config.output_dir) / "receipt.json").parent.mkdir(exist_ok=True)
        (Path(config.output_dir) / "receipt.json").write_text('{"passed": true}')
        return [{"kind": "test"}]

    monkeypatch.setattr(bench_rollouts, "start_server", lambda *_: (server, "CUDA graphs"))
    monkeypatch.setattr(bench_rollouts, "joint_run", joint_run)
    tables = list(bench_rollouts.joint_tables(CPU, "server", bench_rollouts.TINY_POLICY, gsm8k, "1", 2, 60, 0))
    assert [(row["loss_impl"], row["seed"], row["questions"]) for (row,) in tables] == bench_rollouts.RUNS
    assert runs == ["naive", "chunked", "chunked", "naive", "chunked", "chunked"] and tables[0][0]["gpus"] == 2
    assert server.starts == 2 and server.stops == 2, "once for the new one, once at the end"
    assert "ConnectionError: the server does not answer: once more, with a new server" in capsys.readouterr().out


def test_no_training_begins_late(gsm8k, capsys):
    assert list(bench_rollouts.joint_tables(CPU, "transformers", bench_rollouts.TINY_POLICY, gsm8k, "1", 2, 0, 0)) == []
    assert "no time is left for naive, seed 0, all questions" in capsys.readouterr().out


def test_a_policy_from_a_folder_is_left_as_it_is():
    model, tokenizer = bench_rollouts.load_policy(bench_rollouts.TINY_POLICY)
    expected, _ = load_tiny_policy()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.padding_side == "left"


def test_one_gpu_trains(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        main(["--tables", "joint"])
    assert "CUDA_VISIBLE_DEVICES=0 python -m grpo_lab bench" in capsys.readouterr().err


def test_the_server_falls_back_to_what_needs_no_compiler_and_then_to_eager(monkeypatch, capsys):
    class Fake:
        def __init__(self, folder, options, **_):
            self.options = options

        def start(self):
            if self.options != starts:
                raise bench_rollouts.ServerError("it died", 1, ["no compiler"])
            return self

    monkeypatch.setattr(bench_rollouts, "VllmServer", Fake)
    names = list(bench_rollouts.SERVERS)
    for name, starts in bench_rollouts.SERVERS.items():
        server, engine = bench_rollouts.start_server(Path("policy"), "1", 512)
        assert engine == name and server.options == starts
        failed = names[: names.index(name)]
        assert capsys.readouterr().out == "".join(f"not {other}: it died\n  no compiler\n" for other in failed)
    starts = None
    with pytest.raises(bench_rollouts.ServerError, match="it died"):
        bench_rollouts.start_server(Path("policy"), "1", 512)


def test_a_way_that_fails_first_leaves_room_for_the_next(tmp_path):
    options = ["--rollouts", "server,transformers", "--repeats", "1", "--out", str(tmp_path)]
    main(["--tables", "rollouts", *options])
    server, plain = read_table(tmp_path / "rollouts_cpu.csv")
    assert server["note"].startswith("absent: vLLM") and server["completion"] is None
    assert plain["step_s"] > 0 and plain["completion"] == 24
