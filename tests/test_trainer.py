"""The trainer against TRL's own, through whole training runs of a tiny random model; the receipt; refusals by name."""

import dataclasses
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from heads import read_head
from ranks import run_on_two_ranks
from tokenizers import Tokenizer, models, pre_tokenizers

from grpo_lab import GRPOConfig, GRPOTrainer, Objective, receipt

WORDS = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(40)]
SIZE = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=1, pad_token_id=0)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Qwen3 with its tokenizer, saved as a user would have it."""
    folder = tmp_path_factory.mktemp("tiny")
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZE, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


PROMPTS = Dataset.from_dict({"prompt": [f"w{i} w{i * 7 % 40} w3" if i % 2 else f"w{i}" for i in range(40)]})


def distinct_words(completions, **_):
    return [float(len(set(c.split())) % 5) for c in completions]


def trainer(model, tmp_path, steps=3, config=GRPOConfig, cls=GRPOTrainer, reward=distinct_words, more=None, **options):
    settings = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
        max_steps=steps, logging_steps=1, learning_rate=1e-3, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=1,
    )  # fmt: skip
    return cls(str(model) if not isinstance(model, torch.nn.Module) else model, reward, config(**(settings | options)),
               **{"train_dataset": PROMPTS} | (more or {}))  # fmt: skip


def trained(*args, **kwargs):
    t = trainer(*args, **kwargs)
    t.train()
    return t


def logged(t):
    rows = [row for row in t.state.log_history if "loss" in row or "eval_loss" in row]
    timing = ("time", "runtime", "per_second", "flos")
    return [{k: v for k, v in row.items() if not any(word in k for word in timing)} for row in rows]


def assert_same_training(t, reference, tolerance=2e-5):
    for row, expected in zip(logged(t), logged(reference), strict=True):
        assert row == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)
    for (name, p), q in zip(t.model.named_parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5, msg=name)


OPTIONS = {
    "dapo": {},
    "grpo-kl": dict(loss_type="grpo", beta=0.1, num_iterations=2, gradient_accumulation_steps=2),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", num_iterations=2, epsilon=1e-3),
    "cispo-masks": dict(loss_type="cispo", epsilon_high=5.0, top_entropy_quantile=0.5, entropy_coef=0.01),
    "vespo-window": dict(loss_type="vespo", temperature=0.8, steps_per_generation=4, gradient_accumulation_steps=2),
    "luspo-truncated": dict(loss_type="luspo", importance_sampling_level="sequence", mask_truncated_completions=True),
    "sapo-off-policy": dict(loss_type="sapo", off_policy_mask_threshold=1e-5, num_iterations=3),
    "dr_grpo-delta": dict(loss_type="dr_grpo", delta=1.001, epsilon=1e-4, num_iterations=2),
    "bnpo-eval": dict(loss_type="bnpo", eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_trl_s_own(tiny, tmp_path, options):
    more = {"eval_dataset": PROMPTS.select(range(4))} if "eval_strategy" in options else {}
    reference = trained(tiny, tmp_path, config=trl.GRPOConfig, cls=trl.GRPOTrainer, more=more, **options)
    assert any(abs(row["grad_norm"]) > 1e-3 for row in logged(reference) if "grad_norm" in row)
    for impl in ("naive", "chunked", "trl"):
        t = trained(tiny, tmp_path, loss_impl=impl, more=more, **options)
        assert_same_training(t, reference)
        assert (t.receipt is None) == (impl == "trl")


class After(transformers.TrainerCallback):
    """Gives a trainer's attributes (or its args') these values once a number of steps is done."""

    def __init__(self, trainer, steps, values):
        self.trainer, self.steps, self.values = trainer, steps, values

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.steps:
            for name, value in self.values.items():
                setattr(self.trainer if hasattr(self.trainer, name) else args, name, value)


CHANGES = {  # options, and what a callback makes of them
    "kl": (dict(beta=0.1), dict(beta=2.0)),
    "clipping": (dict(epsilon=0.1, delta=1.3), dict(epsilon_low=1e-4, epsilon_high=0.01, delta=1.001)),
    "entropy": (dict(entropy_coef=0.01, top_entropy_quantile=0.3), dict(entropy_coef=0.3, top_entropy_quantile=1.0)),
    "no-entropy": (dict(entropy_coef=0.01), dict(entropy_coef=0.0)),
    "loss": (dict(loss_type="dapo"), dict(loss_type="dr_grpo", importance_sampling_level="sequence",
                                          max_completion_length=6)),
    "masks": (dict(loss_type="sapo", off_policy_mask_threshold=1e-7),
              dict(off_policy_mask_threshold=9.0, sapo_temperature_pos=0.3)),
    "temperature": (dict(temperature=0.9), dict(temperature=1.8)),  # TRL reads it once
}  # fmt: skip


@pytest.mark.parametrize(("options", "values"), CHANGES.values(), ids=CHANGES)
def test_callbacks_change_the_objective_as_they_change_trl_s(tiny, tmp_path, options, values):
    def run(values, **more):
        settings = dict(steps=4, num_iterations=4, learning_rate=0.3, optim="sgd", lr_scheduler_type="constant")
        t = trainer(tiny, tmp_path, **settings, **options, **more)
        t.add_callback(After(t, 1, values))
        t.train()
        return t

    reference = run(values, config=trl.GRPOConfig, cls=trl.GRPOTrainer)
    assert_same_training(run(values), reference)
    for name in values:
        others = {k: v for k, v in values.items() if k != name}
        changed = logged(run(others, config=trl.GRPOConfig, cls=trl.GRPOTrainer)) != logged(reference)
        assert changed == (name != "temperature"), f"{name} made no difference"


def test_a_kl_term_without_a_reference_model_is_refused(tiny, tmp_path):
    t = trainer(tiny, tmp_path)
    t.beta = 0.1
    with pytest.raises(ValueError, match="beta=0.1, set during training, needs a reference model"):
        t.train()
    with pytest.raises(ValueError, match="epsilon=-1"):
        t.beta, t.epsilon_low = 0.0, -1
        t.train()


@pytest.mark.parametrize("modules", [{}, {"modules_to_save": ["lm_head"]}], ids=["frozen-head", "trained-head"])
def test_peft(tiny, tmp_path, modules):
    from peft import LoraConfig

    def more():
        return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **modules)}

    options = dict(beta=0.1, num_iterations=2)  # the disabled adapter is the reference model
    reference = trained(tiny, tmp_path, config=trl.GRPOConfig, cls=trl.GRPOTrainer, more=more(), **options)
    assert_same_training(trained(tiny, tmp_path, more=more(), **options), reference)


def test_bf16_autocast_and_fp32_head(tiny, tmp_path):
    untied = transformers.Qwen3Config(**SIZE, tie_word_embeddings=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    for options in (dict(bf16=True), dict(cast_lm_head_to_fp32=True, bf16=True)):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(untied)
        t = trained(model, tmp_path, more={"processing_class": tokenizer}, **options)
        assert t.receipt["passed"]
        dtypes = {check["case"]: check["dtype"] for check in t.receipt["checks"]}
        first = "float32" if "cast_lm_head_to_fp32" in options else "bfloat16"
        assert dtypes == {"on-policy": first, "off-policy": "float32"}
        assert ("forward" in vars(t.model.lm_head)) == (first == "float32"), "TRL's forward of an fp32 head is back"


ROUNDING = {  # options under which bf16 rounding decides what is clipped, masked or weighted
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
                 steps_per_generation=4),
    "quantile": dict(top_entropy_quantile=0.2),
    "off-policy-mask": dict(off_policy_mask_threshold=1e-3, num_iterations=2),
    "vespo": dict(loss_type="vespo", steps_per_generation=4, max_completion_length=48),
}  # fmt: skip


@pytest.mark.parametrize("options", ROUNDING.values(), ids=ROUNDING)
@pytest.mark.parametrize("loss_impl", ["chunked", "naive"])
def test_receipts_of_bf16_runs_do_not_hang_on_rounding(tiny, tmp_path, loss_impl, options):
    model = {"model_init_kwargs": {"dtype": "bfloat16"}}
    t = trained(tiny, tmp_path, steps=1, loss_impl=loss_impl, bf16=True, **model, **options)
    assert t.receipt["passed"]


def test_an_fp32_head_trains_outside_autocast(tiny, tmp_path, monkeypatch):
    from grpo_lab import chunked

    seen, run = [], chunked.Sweep.learn
    monkeypatch.setattr(chunked.Sweep, "learn", lambda s, *a, **k: seen.append(s.numerics.dtype) or run(s, *a, **k))
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZE, tie_word_embeddings=False))
    more = {"processing_class": transformers.AutoTokenizer.from_pretrained(tiny)}
    options = dict(bf16=True, num_iterations=2, verify_first_batch=False)
    for dtype in (torch.float32, torch.bfloat16):  # as the mixed precision of FSDP and DeepSpeed leaves it
        t = trainer(model, tmp_path, more=more, cast_lm_head_to_fp32=True, **options)
        t.model.lm_head.to(dtype)
        t.train()
        assert seen and set(seen) == {torch.float32}
        seen.clear()
    trained(model, tmp_path, more=more, **options)
    assert set(seen) == {torch.bfloat16}


def test_chunk_size_and_fp32_logits_reach_the_chunk_loop(tiny, tmp_path, monkeypatch):
    from grpo_lab import chunked

    seen = set()
    init = chunked.Workspace.__init__

    def watch(self, sweep, *args, **kwargs):
        seen.add((sweep.plan.C, sweep.numerics.logits_fp32))
        init(self, sweep, *args, **kwargs)

    monkeypatch.setattr(chunked.Workspace, "__init__", watch)
    options = dict(num_iterations=2, bf16=True, verify_first_batch=False, steps=1)
    trained(tiny, tmp_path, chunk_tokens=24, logits_fp32=True, **options)
    assert seen == {(24, True)}


def test_the_memory_budget_reaches_the_planner(tiny, tmp_path, monkeypatch):
    from grpo_lab import loss

    def budgets(**options):
        seen, choose = [], loss.choose
        with monkeypatch.context() as m:
            m.setattr(loss, "choose", lambda p, *a, **k: seen.append((p.itemsize, a[1])) or choose(p, *a, **k))
            trained(tiny, tmp_path, num_iterations=2, steps=2, **options)
        return seen

    # On every call: old log-probs, the loss, and the receipt, whose fp32 case gets as many tensors of twice the bytes.
    assert set(budgets(memory_budget="low")) == {(4, "low")}
    assert set(budgets(memory_budget="123456789", bf16=True)) == {(2, 123456789), (4, 2 * 123456789)}
    assert budgets(memory_budget=10**8, verify_first_batch=False) == [(4, 10**8)] * 3
    with pytest.raises(ValueError, match="memory_budget=100 bytes: the leanest plan"):
        budgets(memory_budget=100)


def test_the_receipt_waits_for_scored_tokens_and_names_bad_states(tiny, tmp_path, monkeypatch):
    t = trained(tiny, tmp_path, mask_truncated_completions=True, max_completion_length=1, steps=1)
    assert t.receipt is None
    t = trainer(tiny, tmp_path)
    monkeypatch.setattr(
        receipt, "_part_that_fits", lambda i, h, head, cut=receipt._part_that_fits: cut(i, h * torch.nan, head)
    )
    with pytest.raises(receipt.ReceiptError, match="hidden states are not finite"):
        t.train()


def test_the_receipt_cuts_what_does_not_fit(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(receipt, "CPU_BYTES", 0)
    monkeypatch.setattr(receipt, "_MIN_TOKENS", 7)
    t = trained(tiny, tmp_path, steps=1, loss_type="grpo")
    assert t.receipt["passed"] and t.receipt["sequences"] == 1 and t.receipt["tokens"] <= 7


def test_a_subclass_with_a_loss_of_its_own(tiny, tmp_path):
    class Regularised(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 1e-3 * sum(p.pow(2).sum() for p in self.model.parameters())

    assert trained(tiny, tmp_path, cls=Regularised).receipt["passed"]


TWO_RANKS = """
from test_trainer import GRPOConfig, GRPOTrainer, logged, trained
import trl, torch


def often_equal(completions, **_):
    return [float("w7" in c or "w8" in c) for c in completions]


def run(**options):
    t = trained(sys.argv[1], sys.argv[2], reward=often_equal, per_device_train_batch_size=4, **options)
    return [row["grad_norm"] for row in logged(t)], t

for options in (dict(loss_type="grpo", steps=4), dict(loss_type="cispo", top_entropy_quantile=0.5, steps=3)):
    expected, _ = run(config=trl.GRPOConfig, cls=trl.GRPOTrainer, **options)
    for skip in (False, True):
        norms, t = run(skip_zero_advantage=skip, **options)
        assert all(abs(a - b) < 1e-4 * max(1, b) for a, b in zip(norms, expected)), (norms, expected)
        assert t.receipt["passed"]
print("two ranks agree", expected)
"""


def test_two_processes(tiny, tmp_path):
    assert run_on_two_ranks(TWO_RANKS, tmp_path, tiny, tmp_path / "out").count("two ranks agree") == 2


SCRIPT = """
from datasets import load_dataset
from grpo_lab import GRPOConfig, GRPOTrainer

train_dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
training_args = GRPOConfig(output_dir="out", use_liger_loss=True, max_steps=2, max_completion_length=16)


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="MODEL",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=train_dataset,
)
trainer.train()
"""


def test_the_published_script_runs_with_its_import_line_changed(tiny, tmp_path):
    PROMPTS.to_json(tmp_path / "prompts.jsonl")
    (tmp_path / "train.py").write_text(SCRIPT.replace("MODEL", str(tiny)))
    run = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["passed"]
    assert "'train_loss'" in run.stdout


def test_receipt_of_a_right_loss(tiny, tmp_path):
    t = trained(tiny, tmp_path, steps=1, loss_type="grpo", beta=0.05)
    assert t.receipt["passed"] and t.receipt["step"] == 1 and t.receipt["loss_impl"] == "chunked"
    cases = {(check["case"], check["against"]) for check in t.receipt["checks"]}
    assert cases == {(case, ref) for case in ("on-policy", "off-policy") for ref in ("naive", "trl")}
    assert all(set(check["errors"]) == {"loss", "d_hidden", "d_weight"} for check in t.receipt["checks"])
    assert json.loads((tmp_path / "receipt.json").read_text()) == t.receipt
    for key in ("entropy", "clip_ratio/low_mean"):
        assert key in logged(t)[0], "the comparison's own metrics must not be logged"


def test_a_launch_on_cpus_holds_on_a_computer_with_an_accelerator_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # what launch says to the processes of cpu_2
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    config = GRPOConfig(str(tmp_path), report_to="none")
    assert config.use_cpu and not config.bf16 and config.device.type == "cpu"


def test_a_first_batch_without_advantages_is_no_mismatch(tiny, tmp_path):
    """The gradient of the KL to itself is rounding errors in one implementation and 0 in another."""
    t = trained(tiny, tmp_path, steps=1, beta=0.05, reward=lambda completions, **_: [1.0] * len(completions))
    assert t.receipt["passed"] and {check["case"] for check in t.receipt["checks"]} == {"on-policy", "off-policy"}
    assert all(check["errors"]["d_hidden"] > 0 for check in t.receipt["checks"]), "other advantages stand in for 0"


def wrong(field):
    """A fault in the objective or its inputs that ``Objective.loss`` would not show by itself."""
    original = Objective.loss

    def loss(self, logps, entropy, tokens):
        change = {field: None} if field in ("old_logps",) else {field: getattr(tokens, field) * 1.1}
        return original(self, logps, entropy, dataclasses.replace(tokens, **change))

    return loss


@pytest.mark.parametrize("field", ["old_logps", "advantages", "weight"])
def test_a_wrong_objective_stops_the_run(tiny, tmp_path, monkeypatch, field):
    t = trainer(tiny, tmp_path)
    before = [p.clone() for p in t.model.parameters()]
    monkeypatch.setattr(Objective, "loss", wrong(field))
    with pytest.raises(receipt.ReceiptError, match="does not agree with trl"):
        t.train()
    assert all(torch.equal(p, q) for p, q in zip(before, t.model.parameters(), strict=True)), "nothing was trained"
    assert not json.loads((tmp_path / "receipt.json").read_text())["passed"]


def test_a_wrong_kernel_stops_the_run(tiny, tmp_path, monkeypatch):
    from grpo_lab import chunked

    def one_row_wrong(z, ids, state, grad=None, **kwargs):
        kernel(z, ids, state, grad=grad, **kwargs)
        if grad is not None:
            grad[0] *= 1.5

    kernel = chunked.row_stats
    monkeypatch.setattr(chunked, "row_stats", one_row_wrong)
    with pytest.raises(receipt.ReceiptError, match="does not agree with naive"):
        trained(tiny, tmp_path)


def drop(what, monkeypatch):
    """Leave a part out of the trainer's loss, whoever computes it."""
    from grpo_lab import trainer as module

    if what == "accumulation":
        return monkeypatch.setattr(GRPOTrainer, "accumulated", lambda self, loss: loss)
    original = module.grpo_loss

    def without(hidden, weight, ids, mask, *args, objective, **kwargs):
        if what == "temperature":
            objective = dataclasses.replace(objective, temperature=1.0)
        else:
            mask = torch.ones_like(mask)
        return original(hidden, weight, ids, mask, *args, objective=objective, **kwargs)

    monkeypatch.setattr(module, "grpo_loss", without)


@pytest.mark.parametrize("what", ["temperature", "mask", "accumulation"])
def test_a_loss_without_a_part_stops_the_run(tiny, tmp_path, monkeypatch, what):
    """The ratio, and a row's gradient, are dropped above."""
    drop(what, monkeypatch)
    with pytest.raises(receipt.ReceiptError, match="does not agree with (trl|naive)"):
        trained(tiny, tmp_path, temperature=0.7, gradient_accumulation_steps=2, loss_type="grpo")
    assert not json.loads((tmp_path / "receipt.json").read_text())["passed"]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_skipped_sequences_change_no_gradient(tiny, tmp_path, loss_type):
    def often_equal(completions, **_):  # whole groups of zero advantage
        return [float("w7" in c or "w8" in c) for c in completions]

    options = dict(loss_type=loss_type, reward=often_equal, gradient_accumulation_steps=2, max_grad_norm=1e9)
    whole = trained(tiny, tmp_path, **options)
    skipping = trained(tiny, tmp_path, skip_zero_advantage=True, **options)
    shares = [row["skipped_zero_advantage"] for row in logged(skipping)]
    assert any(0 < share < 1 for share in shares), shares
    for row, expected in zip(logged(skipping), logged(whole), strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    for p, q in zip(skipping.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_with_a_kl_term_no_sequence_is_skipped(tiny, tmp_path):
    """A sequence of zero advantage is still pulled to the reference."""

    def often_equal(completions, **_):
        return [float("w7" in c or "w8" in c) for c in completions]

    options = dict(reward=often_equal, beta=0.1, gradient_accumulation_steps=2)
    whole, skipping = (trained(tiny, tmp_path, skip_zero_advantage=skip, **options) for skip in (False, True))
    assert any(0 < row["frac_reward_zero_std"] for row in logged(whole))
    for row, expected in zip(logged(skipping), logged(whole), strict=True):
        assert row["grad_norm"] == expected["grad_norm"] and "skipped_zero_advantage" not in row
    assert all(torch.equal(p, q) for p, q in zip(skipping.model.parameters(), whole.model.parameters(), strict=True))


def test_all_advantages_zero_is_a_step_of_no_gradient(tiny, tmp_path):
    for skip in (False, True):
        t = trained(tiny, tmp_path, reward=lambda completions, **_: [1.0] * len(completions), skip_zero_advantage=skip)
        assert [row["grad_norm"] for row in logged(t)] == [0, 0, 0]
        assert [row["loss"] for row in logged(t)] == [0, 0, 0]


def test_a_loss_that_is_not_finite_names_the_step_and_none_is_taken_on_it(tiny, tmp_path, monkeypatch, caplog):
    t = trainer(tiny, tmp_path, verify_first_batch=False, steps=2)
    loss = t.head_loss

    def nan_in_step_two(hidden, *args):
        return loss(hidden * torch.nan if t.state.global_step == 1 else hidden, *args)

    monkeypatch.setattr(t, "head_loss", nan_in_step_two)
    transformers.utils.logging.enable_propagation()
    with pytest.raises(FloatingPointError, match="the gradient of step 2 has the norm nan: no step was taken on it"):
        t.train()
    assert [r.message for r in caplog.records if "the loss is nan" in r.message and "step 2" in r.message]
    assert t.state.global_step == 1 and all(p.isfinite().all() for p in t.model.parameters())


def test_old_log_probs_make_the_first_ratio_exactly_one(tiny, tmp_path, monkeypatch):
    t = trainer(tiny, tmp_path, num_iterations=2, steps=1, verify_first_batch=False)
    seen = []
    loss = t.head_loss

    def watched(hidden, head, inputs, impl):
        value, stats = loss(hidden, head, inputs, impl)
        T = inputs["completion_ids"].shape[1]
        seen.append((stats.logps[:, -T - 1 : -1], inputs["old_per_token_logps"] * inputs["completion_mask"]))
        return value, stats

    monkeypatch.setattr(t, "head_loss", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the model's own products depend on a sequence's place in the batch
    try:
        t.train()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*seen[0])


def test_flags_of_2025(tmp_path):
    assert GRPOConfig(str(tmp_path)).loss_impl == "chunked"
    assert GRPOConfig(str(tmp_path), use_liger_loss=True).loss_impl == "chunked"
    assert GRPOConfig(str(tmp_path), use_liger_loss=False).loss_impl == "naive"
    assert GRPOConfig(str(tmp_path), chunk_tokens="512").chunk_tokens == 512
    assert GRPOConfig(str(tmp_path)).memory_budget is None
    assert GRPOConfig(str(tmp_path), memory_budget="low").memory_budget == "low"
    parser = transformers.HfArgumentParser(GRPOConfig)
    (config,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--memory_budget", "2000000000"])
    assert config.memory_budget == 2 * 10**9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss_impl="fast"), "loss_impl='fast'"),
        (dict(loss_impl="trl", use_liger_loss=True), "use_liger_loss=True contradicts"),
        (dict(loss_impl="naive", use_liger_loss=True), "use_liger_loss=True contradicts"),
        (dict(use_adaptive_entropy=True), "use_adaptive_entropy=True"),
        (dict(chunk_tokens="many"), "chunk_tokens='many'"),
        (dict(chunk_tokens=0), "chunk_tokens=0"),
        (dict(memory_budget="high"), "memory_budget='high'"),
        (dict(memory_budget=0), "memory_budget=0"),
        (dict(memory_budget="-1"), "memory_budget='-1'"),
        (dict(memory_budget=1e9), "memory_budget=1000000000.0"),
        (dict(memory_budget=True), "memory_budget=True"),
    ],
)
def test_options_that_cannot_be_honoured(tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        GRPOConfig(str(tmp_path), **options)
    assert message in str(error.value)


def test_objectives_are_checked_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="loss_type='gpro'"):
        trainer("no-such-model", tmp_path, loss_type="gpro")
    with pytest.raises(ValueError, match="import GRPOConfig from grpo_lab"):
        trainer("no-such-model", tmp_path, config=trl.GRPOConfig)


def test_other_versions_of_trl_are_refused_by_name():
    code = "import trl; trl.__version__ = '1.15.2'; import grpo_lab; grpo_lab.GRPOTrainer"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "trl 1.15.2 is installed" in run.stderr and "pip install 'trl==1.16.*'" in run.stderr


def test_heads_that_cannot_be_read_are_named():
    def read(head):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
        model = SimpleNamespace(get_output_embeddings=lambda: head, config=config)
        return read_head(model, torch.zeros(1, 1, 4))

    class Linear4bit(torch.nn.Linear):
        pass

    quantised = Linear4bit(4, 8)
    quantised.weight = torch.nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="Linear4bit is a torch.nn.parameter.Parameter of shape .*, as of a quantised"):
        read(quantised)
    with pytest.raises(ValueError, match="torch.nn.modules.linear.Bilinear; supported: a plain nn.Linear"):
        read(torch.nn.Bilinear(4, 4, 8))
    sharded = torch.nn.Linear(4, 8)
    sharded.weight = torch.nn.Parameter(torch.empty(0))
    sharded.weight.ds_id = 0
    with pytest.raises(ValueError, match="sharded by DeepSpeed ZeRO-3"):
        read(sharded)
    assert "forward" not in vars(sharded), "the head's own forward is back"
    with pytest.raises(ValueError, match="no output embeddings"):
        read(None)


def test_metrics_are_finite_or_missing(tiny, tmp_path):
    t = trained(tiny, tmp_path, mask_truncated_completions=True, max_completion_length=1)  # nothing is scored
    for row in logged(t):
        assert row["loss"] == 0 and math.isfinite(row["entropy"])
