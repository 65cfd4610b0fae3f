"""An adapter on the output head, which TRL refuses: its logits, its training, its receipt, and what is refused by name.

The reference is TRL's trainer with the textbook in place of its head: the PEFT model's own forward, its full logits and
a log-softmax, so that nothing of ``head.py`` or of the loss is shared.
"""

import functools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
import trl
from heads import read_head, relative
from peft import LoraConfig, get_peft_model
from test_trainer import SIZE, assert_same_training, logged, tiny, trained, trainer  # noqa: F401
from trl.trainer import grpo_trainer

from grpo_lab import GRPOConfig, Objective, grpo_loss, receipt, token_logps
from grpo_lab.preflight import check_adapted_head

BOTH = ["q_proj", "lm_head"]
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of PEFT: it is what is tested


def lora(targets=("lm_head",), **options):
    """Random from the start: a B of zeros would hide what is done with A."""
    return LoraConfig(**dict(r=4, target_modules=list(targets), init_lora_weights=False, lora_alpha=6) | options)


def qwen(tied=False, **more):
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZE, tie_word_embeddings=tied, **more))


def gemma():
    torch.manual_seed(0)
    config = dict(SIZE, final_logit_softcapping=1.0, sliding_window=8, initializer_range=0.3)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))


def phi():
    torch.manual_seed(0)
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**{k: v for k, v in SIZE.items() if k != "head_dim"}))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def two_adapters(model):
    model.add_adapter("second", lora(r=3, lora_alpha=11, use_rslora=True, lora_dropout=0.2))
    model.base_model.set_adapter(["default", "second"])


def only_elsewhere(model):
    model.add_adapter("second", lora(["q_proj"]))
    model.base_model.set_adapter(["second"])


LAYERS = {  # the model, the adapter, what is done to it
    "plain": (qwen, lora(), None),
    "tied": (lambda: qwen(tied=True), lora(), None),
    "backbone-too": (qwen, lora(BOTH), None),
    "rslora": (qwen, lora(use_rslora=True), None),
    "bias": (phi, lora(lora_bias=True), None),
    "bias-of-the-adapter-alone": (qwen, lora(lora_bias=True), None),
    "softcap": (gemma, lora(), None),
    "fan-in-fan-out": (qwen, lora(fan_in_fan_out=True), None),
    "pissa": (qwen, lora(init_lora_weights="pissa"), None),
    "dropout": (qwen, lora(lora_dropout=0.4), None),
    "dropout-in-evaluation": (qwen, lora(lora_dropout=0.4), lambda model: model.eval()),
    "two-adapters": (qwen, lora(BOTH), two_adapters),
    "adapter-elsewhere": (qwen, lora(), only_elsewhere),
    "merged": (qwen, lora(), lambda model: model.merge_adapter()),
    "disabled": (qwen, lora(), lambda model: model.base_model.disable_adapter_layers()),
    "disabled-when-merged": (
        qwen, lora(), lambda model: (model.merge_adapter(), model.base_model.disable_adapter_layers())
    ),
    "saved-copy": (qwen, lora(["q_proj"], modules_to_save=["lm_head"]), None),
}  # fmt: skip


def logits_of(head, hidden):
    z = hidden @ head.weight.T
    z = z if head.bias is None else z + head.bias
    z = z if head.lora is None else z + head.lora[0] @ head.lora[1].T
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


@pytest.mark.parametrize(("build", "config", "change"), LAYERS.values(), ids=LAYERS)
def test_the_head_that_is_read_makes_the_model_s_own_logits_and_gradients(build, config, change):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out, lora_bias and tied heads: PEFT says what it does with them
        model = get_peft_model(build(), config)
        if change is not None:
            change(model)
    for name, p in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            torch.nn.init.normal_(p)
        p.requires_grad_("lora_" in name or "modules_to_save" in name)
    ids = torch.randint(3, 40, (2, 7))
    cotangent = torch.randn(2, 7, SIZE["vocab_size"])
    base, parameters = model.get_base_model(), [p for p in model.parameters() if p.requires_grad]

    def grads(logits):
        return torch.autograd.grad((logits * cotangent).sum(), parameters, allow_unused=True)

    torch.manual_seed(5)
    hidden = base.base_model(ids).last_hidden_state
    logits = logits_of(read_head(base, hidden), hidden)
    torch.manual_seed(5)
    own = model(ids).logits
    expected = [None] * len(parameters) if not own.requires_grad else grads(own)
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    for g, e in zip(grads(logits) if logits.requires_grad else expected, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["bf16", "bf16-adapter", "autocast"])
def test_dtypes_are_peft_s(case):
    model = qwen() if case == "autocast" else qwen().to(torch.bfloat16)
    model = get_peft_model(model, lora(), autocast_adapter_dtype=case == "bf16")
    base, ids = model.get_base_model(), torch.randint(3, 40, (2, 7))
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        own = model(ids).logits
        hidden = base.base_model(ids).last_hidden_state
        head = read_head(base, hidden)
        layer = base.lm_head
        x = hidden.to(layer.lora_A["default"].weight.dtype)
        expected = layer.lora_A["default"](x) * layer.scaling["default"]
    assert own.dtype == torch.bfloat16 and head.lora_states.dtype == expected.dtype
    assert torch.equal(head.lora_states, expected)
    assert head.lora_weight.dtype == layer.lora_B["default"].weight.dtype
    own = torch.log_softmax(own.double(), -1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        logps, _ = token_logps(hidden, head.weight, ids, torch.ones_like(ids), lora=head.lora)
    torch.testing.assert_close(logps.double(), own.gather(-1, ids[..., None]).squeeze(-1), rtol=0, atol=0.03)


class OwnLogits(trl.GRPOTrainer):
    """TRL's trainer on the full logits of the model's own forward."""

    def __init__(self, *args, **kwargs):
        with receipt.changed(grpo_trainer, BaseTunerLayer=()):
            super().__init__(*args, **kwargs)
        base, temperature = self.model.get_base_model(), self.temperature
        own_forward = type(base).forward

        @functools.wraps(own_forward)  # generate() reads from it that it may ask for the last logits alone
        def forward(*args, fused_lm_head=False, labels=None, **kwargs):
            out = own_forward(base, *args, **kwargs)
            if not fused_lm_head:
                return out
            logps = torch.log_softmax(out.logits[:, :-1].float() / temperature, -1)
            ids, scored = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
            entropy = -(logps.exp() * logps).sum(-1) * scored
            return SimpleNamespace(log_probs=logps.gather(-1, ids[..., None]).squeeze(-1) * scored, entropy=entropy)

        base.forward = forward


def adapted(build, *configs):
    """A PeftModel whose adapters are all active."""
    torch.manual_seed(3)
    model = get_peft_model(build(), configs[0])
    names = ["default"] + [f"adapter{i}" for i in range(1, len(configs))]
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    model.base_model.set_adapter(names)
    return model


RUNS = {  # the adapter, or several; the model; the run's options
    "head-and-backbone": (lora(BOTH), None, {}),
    "head-alone": (lora(), None, {}),
    "from-zero": (lora(BOTH, init_lora_weights=True), None, dict(loss_type="grpo")),
    "kl-to-the-base-model": (lora(BOTH), None, dict(beta=0.1, num_iterations=2)),
    "kl-to-a-copy": ([lora(BOTH)], qwen, dict(beta=0.1, num_iterations=2, loss_type="grpo")),
    "two-adapters": ([lora(BOTH), lora(r=3, lora_alpha=9)], qwen, dict(gradient_accumulation_steps=2)),
    "rslora-and-bias": ([lora(use_rslora=True, lora_bias=True)], phi, {}),
    "softcap": ([lora(BOTH)], gemma, dict(temperature=0.7, entropy_coef=0.01)),
    "dropout": (lora(BOTH, lora_dropout=0.3), None, dict(num_iterations=2)),
    "checkpointing": (lora(BOTH), None, dict(gradient_checkpointing=True)),
    "checkpointing-head-alone": ([lora()], qwen, dict(gradient_checkpointing=True)),
    "sequence-ratios": (lora(BOTH), None, dict(importance_sampling_level="sequence", num_iterations=2)),
    "low-memory": (lora(BOTH), None, dict(memory_budget="low")),
}  # fmt: skip


@pytest.mark.parametrize(("adapter", "build", "options"), RUNS.values(), ids=RUNS)
def test_training_is_that_of_the_model_s_own_logits(tiny, tmp_path, adapter, build, options):  # noqa: F811
    def run(**more):
        torch.manual_seed(7)
        if build is None:
            return trained(tiny, tmp_path, more={"peft_config": adapter}, **(options | more))
        tokenizer = {"processing_class": transformers.AutoTokenizer.from_pretrained(tiny)}
        return trained(adapted(build, *adapter), tmp_path, more=tokenizer, **(options | more))

    settings = dict(config=GRPOConfig, cls=OwnLogits, loss_impl="trl")
    reference = run(**settings)
    start = run(**settings, learning_rate=0.0)
    before = dict(start.model.named_parameters())
    for name, p in reference.model.named_parameters():
        if "lm_head" in name and "lora_" in name and ".ref." not in name:
            assert relative(p, before[name]) > 1e-4, f"{name} did not change"
    for impl, chunk in (("naive", "auto"), ("chunked", 16)):
        t = run(loss_impl=impl, chunk_tokens=chunk)
        assert_same_training(t, reference)
        assert t.receipt["passed"]


def test_dropout_is_drawn_once_a_step_whether_or_not_the_receipt_looks(tiny, tmp_path):  # noqa: F811
    def run(p, **options):
        torch.manual_seed(7)
        return trained(tiny, tmp_path, more={"peft_config": lora(lora_dropout=p)}, **options)

    t, unverified, without = run(0.5), run(0.5, verify_first_batch=False), run(0.0)
    assert_same_training(t, unverified, tolerance=0)
    assert logged(t) != logged(without)


def test_bf16_training(tiny, tmp_path):  # noqa: F811
    for options in (dict(bf16=True), dict(model_init_kwargs={"dtype": "bfloat16"}, bf16=True)):
        runs = []
        for impl in ("naive", "chunked"):
            torch.manual_seed(7)
            more = {"peft_config": lora(BOTH, lora_dropout=0.1)}
            t = trained(tiny, tmp_path, loss_impl=impl, chunk_tokens=16, more=more, **options)
            assert t.receipt["passed"]
            runs.append([row["grad_norm"] for row in logged(t)])
        assert runs[0] == pytest.approx(runs[1], rel=0.02)


def test_the_receipt_compares_what_trains_with_naive_and_with_trl(tiny, tmp_path, monkeypatch):  # noqa: F811
    config = lora(BOTH, lora_dropout=0.3)
    t = trained(tiny, tmp_path, steps=1, more={"peft_config": config})
    cases = {(check["case"], check["against"]) for check in t.receipt["checks"]}
    assert cases == {(case, ref) for case in ("on-policy", "off-policy") for ref in ("naive", "trl")}
    compared = {"loss", "d_hidden", "d_lora_states", "d_lora_weight"}
    assert all(set(check["errors"]) == compared for check in t.receipt["checks"])
    assert max(e for check in t.receipt["checks"] for e in check["errors"].values()) > 0

    from grpo_lab import trainer as module

    right = module.grpo_loss

    def other_adapter(*args, lora, impl, **options):
        return right(*args, lora=lora if impl == "naive" else (lora[0] * 1.5, lora[1]), impl=impl, **options)

    def half_gradient_of_b(*args, lora, impl, **options):
        half = lora[1] * 0.5 + lora[1].detach() * 0.5
        return right(*args, lora=lora if impl == "naive" else (lora[0], half), impl=impl, **options)

    for wrong, worst in ((other_adapter, "does not agree"), (half_gradient_of_b, "d_lora_weight is 5.00e-01")):
        monkeypatch.setattr(module, "grpo_loss", wrong)
        with pytest.raises(receipt.ReceiptError, match=worst):
            trained(tiny, tmp_path, steps=1, more={"peft_config": config})


def test_the_receipt_cuts_the_adapter_s_states_as_it_cuts_the_hidden_states(tiny, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(receipt, "CPU_BYTES", 0)
    monkeypatch.setattr(receipt, "_MIN_TOKENS", 20)
    seen, cut = [], receipt._part_that_fits
    monkeypatch.setattr(receipt, "_part_that_fits", lambda *args: seen.append(cut(*args)) or seen[-1])
    t = trained(tiny, tmp_path, steps=1, more={"peft_config": lora()}, learning_rate=0.0)
    _, hidden, head = seen[0]
    layer = t.model.get_base_model().lm_head
    expected = hidden @ layer.lora_A["default"].weight.T * layer.scaling["default"]
    assert t.receipt["passed"] and t.receipt["sequences"] == len(hidden) == 1
    torch.testing.assert_close(head.lora_states, expected, rtol=1e-5, atol=1e-6)


REFUSED = {
    "dora": (lora(use_dora=True), "adapter 'default' on the output head is a DoraLinearVariant"),
    "ia3": (peft.IA3Config(target_modules=BOTH, feedforward_modules=[]), "peft.tuners.ia3.layer.Linear"),
    "vera": (peft.VeraConfig(r=4, target_modules=["lm_head"]), "peft.tuners.vera.layer.Linear"),
    "loha": (peft.LoHaConfig(r=4, target_modules=BOTH), "peft.tuners.loha.layer"),
    "adalora": (peft.AdaLoraConfig(init_r=4, target_modules=BOTH, total_step=9), "peft.tuners.adalora.layer.SVDLinear"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_are_no_plain_lora_are_named(tiny, tmp_path, config, message):  # noqa: F811
    with pytest.raises(ValueError, match="output head is a") as error:
        trainer(tiny, tmp_path, more={"peft_config": config})
    assert message in str(error.value)


def test_what_an_adapter_on_the_head_excludes_is_named(tiny, tmp_path):  # noqa: F811
    more = {"peft_config": lora()}
    for options in (dict(loss_impl="trl"), dict(cast_lm_head_to_fp32=True)):
        with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):  # TRL's own
            trainer(tiny, tmp_path, more=more, **options)
    trainer(tiny, tmp_path, more=more)
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):  # TRL refuses it afterwards too
        trainer(tiny, tmp_path, more=more, config=trl.GRPOConfig, cls=trl.GRPOTrainer)
    for tied in (True, False):
        model = get_peft_model(qwen(tied), lora()).get_base_model()
        refused = pytest.raises(ValueError, match="use_vllm=True is not supported with an adapter on an output head")
        with refused if tied else nullcontext():
            check_adapted_head(model, use_vllm=True)


def random_adapted_head(frozen, bias, B=4, T=7, H=12, V=37, r=3):
    make = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    leaves = dict(hidden=make(B, T, H), a=make(r, H) * 0.3, b=make(V, r) * 0.5, weight=make(V, H) * 0.3)
    if bias:
        leaves["bias"] = make(V)
    for name, x in leaves.items():
        x.requires_grad_(not (frozen and name in ("weight", "bias")))
    mask = (torch.rand(B, T) > 0.3).long()
    mask[1] = 0
    ids, advantages = torch.randint(0, V, (B, T)), make(B)
    advantages[0] = 0
    return leaves, (ids, mask), advantages


OBJECTIVES = {
    "on-policy": Objective(),
    "clipped-and-warm": Objective(loss_type="grpo", epsilon=0.1, temperature=0.7),
    "sequence-ratios": Objective(importance_sampling_level="sequence", epsilon=0.5, epsilon_high=1.0),
    "entropy": Objective(entropy_coef=0.1, top_entropy_quantile=0.6),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_loss_of_an_adapted_head_is_that_of_the_folded_weight(frozen, bias, softcap, objective, seed):
    leaves, batch, advantages = random_adapted_head(frozen, bias)
    old_logps = None
    if objective != Objective():
        with torch.no_grad():
            folded = leaves["weight"] + leaves["b"] @ leaves["a"]
            old_logps, _ = token_logps(leaves["hidden"], folded, *batch, impl="naive")
            old_logps += 0.2 * torch.randn(batch[0].shape, dtype=torch.float64)

    def run(folded=False, fn=grpo_loss, **options):
        hidden, a, b, weight = (leaves[k] for k in ("hidden", "a", "b", "weight"))
        adapter = dict(lora=(hidden @ a.T, b))
        if folded:
            weight, adapter = weight + b @ a, {}
        options = dict(bias=leaves.get("bias"), softcap=softcap, **adapter, **options)
        if fn is grpo_loss:
            loss, stats = grpo_loss(
                hidden, weight, *batch, advantages, objective=objective, old_logps=old_logps, **options
            )
            outputs = [loss, stats.logps]
        else:
            logps, entropy = token_logps(hidden, weight, *batch, temperature=objective.temperature, **options)
            loss, outputs = (logps * cotangent).sum() + (entropy * cotangent.flip(0)).sum(), [logps, entropy]
        trained = {k: x for k, x in leaves.items() if x.requires_grad}
        return [*outputs, *torch.autograd.grad(loss, list(trained.values()))]

    cotangent = torch.randn(batch[0].shape, dtype=torch.float64)
    ways = [dict(impl="naive"), *(dict(chunk_tokens=C) for C in (1, 5, 16, "auto")), dict(memory_budget="low"),
            dict(memory_budget="low", chunk_tokens=4), dict(memory_budget=10**6)]  # fmt: skip
    for fn in (grpo_loss, token_logps):
        expected = run(folded=True, fn=fn, impl="naive")
        assert expected[-1].abs().max() > 1e-6
        for way in ways:
            for x, e in zip(run(fn=fn, **way), expected, strict=True):
                torch.testing.assert_close(x, e, rtol=1e-8, atol=1e-10, msg=lambda m: f"{way}: {m}")  # noqa: B023
