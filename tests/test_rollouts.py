"""Rollouts by vLLM without vLLM: TRL's corrections reach every loss, the mismatch is measured, and what can be wrong is
said. An engine of the tests' own takes vLLM's place, and a small HTTP server its server's; test_vllm.py has vLLM.
"""

import math
import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
import trl.generation.vllm_client as vllm_client
import trl.trainer.grpo_trainer as grpo_trainer
from test_trainer import assert_same_training, distinct_words, logged, tiny, trained, trainer  # noqa: F401

from grpo_lab import GRPOConfig, rollouts, serve, split
from grpo_lab.doctor import explain_failure
from grpo_lab.policies import TINY_POLICY
from grpo_lab.receipt import ReceiptError
from grpo_lab.rollouts import mismatch
from grpo_lab.runs import load_run, open_run, read_json
from grpo_lab.serve import Server, ServerError

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Sampler:
    """Random completions whose log-probs are the policy's with an error, as those of an engine in other precision."""

    def __init__(self, model, max_completion_length, dtype=None, seed=None, error=0.3, **_):
        self.model, self.length, self.error, self.synced = model, max_completion_length, error, 0
        self.random = torch.Generator().manual_seed(0)

    def sync_weights(self):
        self.synced += 1

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        completions, logps = [], []
        for prompt in prompts:
            length = int(torch.randint(1, self.length + 1, (), generator=self.random))
            ids = torch.randint(3, 43, (length,), generator=self.random)
            logits = self.model(torch.cat([torch.tensor(prompt), ids])[None]).logits[0, len(prompt) - 1 : -1]
            logps_T = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
            logps_T += self.error * torch.randn(length, generator=self.random)
            completions.append(ids.tolist())
            logps.append([[logp] for logp in logps_T.tolist()])
        logps[0][0] = [None]  # vLLM could not tell it
        return prompts, completions, logps, None


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.setattr(rollouts, "Engine", Sampler)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Sampler)


def without_ours(t):
    """Forgets what TRL does not log."""
    t.state.log_history = [
        {key: value for key, value in row.items() if "mismatch" not in key} for row in t.state.log_history
    ]
    return t


CORRECTED = [(mode, "dapo", "token") for mode in MODES] + [(mode, "grpo", "sequence") for mode in MODES]
CORRECTED += [
    ("token_truncate", "vespo", "token"),
    ("token_mask", "vespo", "token"),
    ("sequence_mask", "cispo", "token"),
]


@pytest.mark.parametrize(("mode", "loss_type", "level"), CORRECTED)
def test_every_correction_reaches_the_loss_as_in_trl(tiny, tmp_path, sampler, mode, loss_type, level):  # noqa: F811
    options = dict(
        use_vllm=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=0.6, loss_type=loss_type, importance_sampling_level=level, steps=2,
        num_iterations=2, steps_per_generation=2, max_grad_norm=1e9,
    )  # fmt: skip
    reference = trained(tiny, tmp_path, config=trl.GRPOConfig, cls=trl.GRPOTrainer, **options)
    t = trained(tiny, tmp_path, **options)
    assert t.receipt["passed"] and t.vllm_generation.synced
    assert_same_training(without_ours(t), reference)
    ratios = [logged(t)[0][f"sampling/importance_sampling_ratio/{end}"] for end in ("min", "max")]
    assert ratios[0] < 0.9 and ratios[1] > 1.1


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_correction_stops_the_run(tiny, tmp_path, sampler, monkeypatch, mode):  # noqa: F811
    """As a trainer that left the ratios out did in public: its gradient grew a hundredfold, and nothing said so."""
    t = trainer(tiny, tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode)
    loss = t.head_loss

    def without_ratio(hidden, head, inputs, impl):
        return loss(hidden, head, {k: v for k, v in inputs.items() if k != "importance_sampling_ratio"}, impl)

    monkeypatch.setattr(t, "head_loss", without_ratio)
    with pytest.raises(ReceiptError, match="does not agree with trl"):
        t.train()


def test_the_mismatch_is_logged_at_every_step(tiny, tmp_path, sampler):  # noqa: F811
    t = trained(tiny, tmp_path, rollouts="colocate", vllm_importance_sampling_mode="token_mask",
                vllm_importance_sampling_clip_max=1.2)  # fmt: skip
    assert t.args.use_vllm and t.args.vllm_mode == "colocate"
    for row in logged(t):
        trl_s, ours = row["sampling/sampling_logp_difference/mean"], row["sampling/mismatch_before"]
        assert (
            ours == pytest.approx(trl_s, rel=0.05) and 0.1 < ours < 0.4
        )  # TRL leaves out the token without a log-prob
        assert row["sampling/mismatch_after"] < 1e-6 and 0.1 < row["sampling/mismatch_masked"] < 0.5


def batch(ratio, difference=((0.5, -0.25, 9.0), (0.0, 2.0, -1.0)), mask=((1, 1, 0), (1, 1, 1))):
    difference = torch.tensor(difference)
    return dict(
        old_per_token_logps=difference - 3.0, sampling_per_token_logps=torch.full_like(difference, -3.0),
        completion_mask=torch.tensor(mask), importance_sampling_ratio=torch.as_tensor(ratio),
    )  # fmt: skip


def test_what_a_correction_leaves():
    d = torch.tensor([[0.5, -0.25, 9.0], [0.0, 2.0, -1.0]])
    found = mismatch(batch(d.exp().clamp(max=math.exp(1.5))))  # cuts 0.5 of one token off
    assert found["mismatch_before"] == pytest.approx((0.5 + 0.25 + 0.0 + 2.0 + 1.0) / 5)
    assert found["mismatch_after"] == pytest.approx(0.5 / 5) and found["mismatch_masked"] == 0
    ratio = d.exp()
    ratio[1, 1] = 0.0  # masked
    found = mismatch(batch(ratio))
    assert found["mismatch_after"] == pytest.approx(0, abs=1e-6) and found["mismatch_masked"] == pytest.approx(1 / 5)
    sums = torch.tensor([[0.25], [1.0]])
    found = mismatch(batch(sums.exp().clamp(max=math.exp(0.7))))
    assert found["mismatch_before"] == pytest.approx((0.25 / 2 + 1.0 / 3) / 2)
    assert found["mismatch_after"] == pytest.approx((0.3 / 3) / 2) and found["mismatch_masked"] == 0


def test_padding_unknown_log_probs_and_tool_tokens_leave_no_trace():
    x = batch(torch.ones(2, 3))
    x["old_per_token_logps"][0, 2] = torch.nan  # padding
    x["sampling_per_token_logps"][1, 1] = torch.nan
    x["tool_mask"] = torch.tensor([[1, 0, 1], [1, 1, 1]])
    found = mismatch(x)
    assert found["mismatch_before"] == pytest.approx((0.5 + 0.0 + 0.0 + 1.0) / 4) == found["mismatch_after"]
    assert mismatch({key: value for key, value in x.items() if key != "importance_sampling_ratio"}) == {}


def test_one_word_sets_trl_s_two_fields(tmp_path):
    def config(**options):
        c = GRPOConfig(str(tmp_path), report_to="none", **options)
        return c.use_vllm, c.vllm_mode

    assert config() == config(rollouts="transformers") == (False, "colocate")
    assert config(rollouts="colocate") == config(rollouts="colocate", use_vllm=True) == (True, "colocate")
    assert config(rollouts="server") == config(use_vllm=True, vllm_mode="server") == (True, "server")
    with pytest.raises(ValueError, match="rollouts='vllm': expected one of transformers, colocate, server"):
        config(rollouts="vllm")
    with pytest.raises(ValueError, match="rollouts='transformers' contradicts use_vllm=True"):
        config(rollouts="transformers", use_vllm=True)
    with pytest.raises(ValueError, match="rollouts='colocate' contradicts .*vllm_mode='server'"):
        config(rollouts="colocate", vllm_mode="server")


def found_version(monkeypatch, *found):
    utils = sys.modules["trl.import_utils"]
    look = utils._is_package_available
    monkeypatch.setattr(
        utils, "_is_package_available", lambda name, *a, **k: found if name == "vllm" else look(name, *a, **k)
    )


def test_vllm_absent_or_of_another_version(tiny, tmp_path, monkeypatch):  # noqa: F811
    found_version(monkeypatch, False, "N/A")
    for make in (lambda: trainer(tiny, tmp_path, rollouts="colocate"), lambda: serve.VllmServer(tiny)):
        with pytest.raises(
            ImportError, match=r"pip install -e '\.\[gpu\]'.*grpo_lab.vllm_cpu.*rollouts='transformers'"
        ):
            make()
    found_version(monkeypatch, True, "0.19.1")
    with pytest.raises(ImportError, match=r"0.22.0 to 0.31.0. You have version 0.19.1 .*pip install 'vllm==0.31.0'"):
        trainer(tiny, tmp_path, rollouts="colocate")


@pytest.fixture
def pretend(monkeypatch):
    """As where a supported vLLM is installed; weights go nowhere."""
    found_version(monkeypatch, True, "0.31.0")
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", lambda self, metadata, params: list(params))


def test_a_policy_that_the_engine_cannot_load(tiny, tmp_path, pretend, monkeypatch):  # noqa: F811
    built = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    more = {"processing_class": transformers.AutoTokenizer.from_pretrained(tiny)}
    for name, message in (
        ("", "built in memory: save_pretrained it"),
        (str(tmp_path / "gone"), "no config.json there"),
    ):
        built.config._name_or_path = built.name_or_path = name
        with pytest.raises(ValueError, match=message):
            trainer(built, tmp_path, rollouts="colocate", more=more)


def test_a_busy_gpu():
    with pytest.raises(ValueError, match="memory = 0.9 asks for 72 GiB, and 10 of 80 GiB of GPU 0 are free: end what"):
        serve.check_free("GPU 0", (10 * 2**30, 80 * 2**30), 0.9, "memory")
    model, cuda = SimpleNamespace(name_or_path=str(TINY_POLICY)), SimpleNamespace(device=torch.device("cuda"))
    engine = SimpleNamespace(model=model, mode="colocate", accelerator=cuda, gpu_memory_utilization=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "check_vllm", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 80 * 2**30))
        with pytest.raises(ValueError, match="vllm_gpu_memory_utilization = 0.3 asks for 24 GiB, and 20 of 80 GiB"):
            rollouts.Engine._init_vllm(engine)


# What TRL asks of vLLM's server: python server.py PORT TOKENIZER ROLLOUTS_UNTIL_DEATH
SERVER = """
import http.server, json, os, random, sys
from tokenizers import Tokenizer

port, left = int(sys.argv[1]), int(sys.argv[3])
tokenizer = Tokenizer.from_file(sys.argv[2])

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, value=None):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value or {}).encode())
    def do_GET(self):
        config = {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}
        self.answer({"data": [{"id": "tiny"}], "vllm_config": config})
    def do_POST(self):
        global left
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/tokenize":
            return self.answer({"tokens": tokenizer.encode(asked["prompt"], add_special_tokens=False).ids})
        if self.path != "/v1/completions":
            return self.answer()
        if not left:
            print("EngineDeadError: the engine core has died", flush=True)
            os._exit(7)
        left -= 1
        choices = []
        for prompt in asked["prompt"]:
            for _ in range(asked["n"]):
                ids = [random.randrange(3, 43) for _ in range(asked["max_tokens"])]
                logprobs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-3.7] * len(ids)}
                logprobs["top_logprobs"] = [None] * len(ids)
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        self.answer({"choices": choices})
    def log_message(self, *args): pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path, pretend):
    script, started = tmp_path / "server.py", []
    script.write_text(SERVER)

    def make(folder, rollouts=1000):
        port = serve._free_port("127.0.0.1")
        command = [sys.executable, script, port, folder / "tokenizer.json", rollouts]
        started.append(Server(command, f"http://127.0.0.1:{port}"))
        return started[-1]

    yield make
    for one in started:
        one.stop()


def test_a_server_killed_in_the_middle_leaves_a_run_that_resumes(tiny, tmp_path, server):  # noqa: F811
    def go_on(server):
        with server, open_run("08_toy", {}, tmp_path / "runs") as run:
            options = dict(rollouts="server", vllm_server_base_url=server.url, save_strategy="steps", save_steps=1)
            t = trainer(tiny, run.folder, steps=4, **options)
            run.attach(t)
            t.train(resume_from_checkpoint=run.last_checkpoint())
            run.finish({"reward": 1.0})
        return run

    with pytest.raises(ServerError, match="died during the run, exit code 7") as error:
        go_on(server(tiny, rollouts=2))
    assert error.value.lines[-1] == "EngineDeadError: the engine core has died"
    assert "does not answer any more" in str(error.value.__cause__)
    run = open_run("08_toy", {}, tmp_path / "runs")
    assert run.why == "server unreachable" and run.last_checkpoint().endswith("checkpoint-2")
    run = go_on(server(tiny))
    record = load_run(run.folder)
    assert record.status["status"] == "finished" and [r["step"] for r in record.metrics if "loss" in r] == [1, 2, 3, 4]
    assert all(r["sampling/mismatch_before"] > 0 for r in record.metrics if "loss" in r)
    assert read_json(run.folder / "receipt.json")["passed"]


def test_a_server_with_another_tokenizer(tiny, tmp_path, server):  # noqa: F811
    with server(TINY_POLICY) as other:
        with pytest.raises(ValueError, match="the vLLM server at .* has another tokenizer .*Serve the model that is"):
            trainer(tiny, tmp_path, rollouts="server", vllm_server_base_url=other.url)


def test_no_server_there(tiny, tmp_path, pretend):  # noqa: F811
    options = dict(vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=0.1)
    with pytest.raises(
        ConnectionError, match="can't be reached at http://127.0.0.1:9 .*VllmServer starts one"
    ) as error:
        trainer(tiny, tmp_path, rollouts="server", **options)
    kind, remedy = explain_failure(error.value)
    assert kind == "server unreachable" and "grpo_lab.serve.VllmServer" in remedy


@pytest.mark.parametrize(("beta", "use_vllm"), [(0.0, False), (0.1, False), (0.0, True), (0.1, True)])
def test_the_parts_of_a_step_are_its_time(tiny, tmp_path, sampler, monkeypatch, beta, use_vllm):  # noqa: F811
    def slow(completions, **_):
        time.sleep(0.05)
        return distinct_words(completions)

    t = trainer(tiny, tmp_path, reward=slow, beta=beta, use_vllm=use_vllm)
    if use_vllm:
        t.vllm_generation.sync_weights = lambda: time.sleep(0.02)
    split.attach(t)
    t.train()
    assert "_generate" not in vars(t), "its methods are its own again"
    for row in logged_times(t):
        assert sum(row[part] for part in split.PARTS) == pytest.approx(row["step"]) and min(row.values()) >= 0
        assert 0.05 < row["reward"] < 0.1 and row["rollout"] > 0.001 and row["loss"] > 0.001 < row["optimiser"] * 10
        assert row["step"] < 1.2 * row["logged"] + 0.05
        assert (row["sync"] > 0.02) == (row["old"] > 0) == use_vllm and (row["reference"] > 0) == (beta > 0)
    found = split.medians(t.state.log_history)
    assert found["reward"] == statistics.median(row["reward"] for row in logged_times(t)[1:])


def logged_times(t):
    rows = [row for row in t.state.log_history if "seconds/step" in row]
    times = [{key[8:]: value for key, value in row.items() if key.startswith("seconds/")} for row in rows]
    return [seconds | {"logged": row["step_time"]} for seconds, row in zip(times, rows)]
