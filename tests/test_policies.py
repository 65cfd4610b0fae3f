"""The tokenizer round-trips, the committed policy is small and mostly wrong, sampling is seeded, evaluation adds up."""

import json
import random
from types import SimpleNamespace

import pytest
from conftest import FRESH_SEED

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from grpo_lab import policies, tasks  # noqa: E402

SEEDS = [5, FRESH_SEED]


@pytest.fixture(scope="module")
def tiny():
    return policies.load_tiny_policy()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", SEEDS)
def test_text_round_trips_and_digits_are_single_tokens(tiny, seed):
    _, tokenizer = tiny
    for split in ("train", "heldout"):
        for problem in tasks.problems(300, seed, split):
            for text in (problem.question, problem.solution):
                ids = tokenizer(text)["input_ids"]
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == text
    for text in tasks.demonstrations(100, seed)["completion"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    number = str(random.Random(seed).randrange(100, 1000))
    ids = tokenizer(f"#### {number}")["input_ids"]
    assert len(ids) == 4 and tokenizer.decode(ids) == f"#### {number}"


def test_the_committed_tokenizer_is_what_the_code_builds(tiny):
    _, tokenizer = tiny
    built = policies.build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template
    text = tasks.problems(1, 1)[0].question
    assert built(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_chat_template_and_special_tokens(tiny):
    _, tokenizer = tiny
    messages = [{"role": "user", "content": "How many"}, {"role": "assistant", "content": "#### 4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|user|>How many<|end|><|assistant|>#### 4<|end|>"
    )
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>How many<|end|><|assistant|>"
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == ids[-2]


def test_the_policy_is_small(tiny):
    model, tokenizer = tiny
    assert model.num_parameters() < 500_000 and model.dtype == torch.float32
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    assert sum(f.stat().st_size for f in policies.TINY_POLICY.iterdir()) < 2 * 2**20
    assert not model.training


def test_no_policy_at_the_path_says_how_to_build_one(tmp_path):
    with pytest.raises(ValueError, match="python -m grpo_lab.policies --out"):
        policies.load_tiny_policy(tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_warm_start_writes_the_form_and_is_mostly_wrong(tiny, seed):
    """What reinforcement learning needs: fewer than half right, and right once in eight for nearly every problem."""
    result = policies.evaluate(*tiny, tasks.arithmetic_problems(150, seed, "heldout"), seed=seed, progress=False)
    assert 0.2 < result["accuracy"] < 0.5
    assert result["pass_at_k"] > 0.8
    assert result["n"] == 150 and result["k"] == 8 and 0 < result["standard_error"] < 0.05


def test_sampling_is_seeded_and_leaves_the_random_state_alone(tiny, one_thread):
    prompts = tasks.arithmetic_problems(6, 1)["prompt"]
    state = torch.get_rng_state()
    first = policies.sample(*tiny, prompts, 3, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert [len(group) for group in first] == [3] * 6
    assert first == policies.sample(*tiny, prompts, 3, seed=1)
    assert first != policies.sample(*tiny, prompts, 3, seed=2)
    assert policies.sample(*tiny, prompts, seed=1, temperature=0) == policies.sample(
        *tiny, prompts, seed=2, temperature=0
    )


def test_greedy_completions_do_not_depend_on_the_batch(tiny):
    prompts = tasks.arithmetic_problems(40, 2)["prompt"]
    whole = policies.sample(*tiny, prompts, temperature=0)
    assert whole == policies.sample(*tiny, prompts, temperature=0, batch_size=7)


def test_sample_names_bad_arguments(tiny):
    with pytest.raises(ValueError, match="n=0"):
        policies.sample(*tiny, [], 0)
    with pytest.raises(ValueError, match="temperature=-1"):
        policies.sample(*tiny, [], 1, temperature=-1)


def test_evaluate_counts_what_the_reward_says(monkeypatch):
    """Four problems, two completions each: 2, 1, 0 and 0 of them right, and greedily one problem of four."""
    said = {"a": ["#### 1", "#### 1"], "b": ["#### 2", "no"], "c": ["no", "no"], "d": ["#### 9", "#### 8"]}

    def fake(model, tokenizer, prompts, n=1, seed=0, *, temperature=1.0, **options):
        return [said[p][:n] if temperature else ["#### 2"] for p in prompts]

    monkeypatch.setattr(policies, "sample", fake)
    dataset = {"prompt": ["a", "b", "c", "d"], "answer": ["1", "2", "3", "4"]}
    result = policies.evaluate(SimpleNamespace(), None, dataset, samples=2, progress=False)
    assert result["accuracy"] == pytest.approx(3 / 8) and result["pass_at_k"] == pytest.approx(2 / 4)
    assert result["greedy"] == pytest.approx(1 / 4)
    assert result["standard_error"] == pytest.approx(torch.tensor([1, 0.5, 0, 0]).std().item() / 2)


def test_a_short_warm_start_lowers_the_loss_and_repeats_exactly(one_thread, capsys):
    tokenizer = policies.build_tokenizer()
    settings = policies.WARM_START | {"demonstrations": 400, "pages": 100, "steps": 12, "batch_size": 32}
    weights = []
    for _ in range(2):
        model = policies.build_model(tokenizer, seed=3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        policies.warm_start(model, tokenizer, 3, **settings)
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_cover_an_epoch_once_and_are_alike_in_length(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(10, 80) for _ in range(1000)]
    batches = policies._batches_of_like_length(lengths, 20, torch.Generator().manual_seed(seed))
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    assert sum(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches) / len(batches) < 20


def test_settings_make_a_trl_config(tmp_path):
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(output_dir=str(tmp_path), **policies.TINY_GRPO)
    assert config.per_device_train_batch_size % config.num_generations == 0
    json.dumps(policies.TINY_GRPO)  # what a run folder writes down
