import pytest
import torch

from grpo_lab import grpo_loss, kernels, memory
from grpo_lab import loss as loss_module
from grpo_lab import plan as plan_module
from grpo_lab.memory import measure_peak, predict_loss_bytes
from grpo_lab.plan import Plan

MIB = 2**20


@pytest.fixture(autouse=True)
def two_threads():
    """More of them take less of the twins' work space at a time than is predicted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, 2))
    yield
    torch.set_num_threads(threads)


def test_watch_follows_bytes_products_and_tables():
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16)
    with memory.Watch() as watch:
        c = (a @ b).exp()
        c.sum().backward()
        del c
        a.detach() + 0
    assert watch.products == [4 * 8 * 16, 4 * 16 * 8] and watch.largest == 4 * 16
    assert max(watch.timeline) >= 2 * 4 * 16 * 4 and watch.timeline[-1] <= 2 * 4 * 8 * 4 + 4
    with memory.Watch() as watch:
        b[:, 0].view(2, 4)  # views move nothing
        b.gather(1, torch.zeros(8, 1, dtype=torch.long))  # what is gathered, not what it is gathered from
    assert watch.moved == 8 * 8 + 8 * 4 + 8 * 8


def exact():
    try:
        memory._CLEAR.write_text("5")
    except OSError:
        return False
    return hasattr(memory.ctypes.CDLL(None), "mallopt")


needs_exact = pytest.mark.skipif(not exact(), reason="exact process peaks need Linux's clear_refs and glibc")


@needs_exact
@pytest.mark.parametrize("blocks", [1, 7, 100, 1000])
def test_two_hundred_megabytes_are_measured_twice_in_a_row(blocks):
    def fn():
        return len([torch.ones(50_000_000 // blocks) for _ in range(blocks)])

    dirty = [torch.ones(n) for n in (1_000_000, 7_000_000, 30_000, 4_000_000)] * 2
    del dirty  # what earlier cells leave in the heap
    for _ in range(2):
        result, peak = measure_peak(fn)
        assert result == blocks
        assert peak == pytest.approx(200e6, rel=0.05)


@needs_exact
def test_what_is_kept_counts_and_what_was_there_does_not():
    before = torch.ones(25_000_000)
    kept, peak = measure_peak(lambda: torch.ones(10_000_000))
    assert peak == pytest.approx(40e6, rel=0.05) and len(before) > len(kept)
    assert measure_peak(lambda: None)[1] < MIB


@needs_exact
def test_an_error_passes_through_and_measuring_goes_on():
    with pytest.raises(RuntimeError, match="stop"):
        measure_peak(lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert measure_peak(lambda: torch.ones(10_000_000).sum())[1] == pytest.approx(40e6, rel=0.05)


def test_sampling_stands_in_where_the_kernel_gives_no_high_water_mark(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "clear_refs")

    def fn():
        blocks = [torch.ones(25_000_000) for _ in range(2)]
        for _ in range(20):
            blocks[0] += blocks[1]

    _, peak = measure_peak(fn)
    assert peak == pytest.approx(200e6, rel=0.1)


@needs_exact
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    "impl, chunk, budget",
    [("naive", "auto", None), ("chunked", "auto", None), ("chunked", 64, None), ("chunked", "auto", "low")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_prediction_agrees_with_the_measured_peak(dtype, impl, chunk, budget, trainable):
    B, T, H, V = 6, 48, 192, 16384
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).mul(0.05).to(dtype).requires_grad_(trainable)
    ids = torch.randint(V, (B, T), generator=generator)
    advantages = torch.randn(B, generator=generator)

    def fn():
        hidden.grad = weight.grad = None
        plan = dict(chunk_tokens=chunk, memory_budget=budget)
        grpo_loss(hidden, weight, ids, torch.ones(B, T), advantages, impl=impl, **plan)[0].backward()

    fn()
    hidden.grad = weight.grad = None
    predicted = predict_loss_bytes(
        B, T, H, V, dtype, impl, chunk_tokens=chunk, memory_budget=budget, trainable_head=trainable
    )
    _, peak = measure_peak(fn)
    assert sum(predicted.values()) == pytest.approx(peak, rel=0.05), {k: v / MIB for k, v in predicted.items()}


@needs_exact
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("sequences", [4, 16])
def test_a_plan_counts_the_chunks_that_wait_for_their_coefficients(sequences, off_policy, monkeypatch):
    T, H, V, C = 256, 8192, 256, 512
    hidden, weight = torch.randn(sequences, T, H).requires_grad_(), torch.randn(V, H).mul(0.01)
    ids, advantages = torch.randint(V, (sequences, T)), torch.randn(sequences)
    old_logps = torch.full((sequences, T), -5.5) if off_policy else None
    predicted = []

    def choose(problem, *_):
        predicted.append(problem.peak(Plan(C, True)))
        return Plan(C, True)

    monkeypatch.setattr(loss_module, "choose", choose)

    def fn():
        hidden.grad = None
        grpo_loss(hidden, weight, ids, torch.ones(sequences, T), advantages, old_logps=old_logps)[0].backward()

    fn()
    hidden.grad = None
    assert predicted[-1] == pytest.approx(measure_peak(fn)[1], rel=0.08)  # put_rows's twin: two times 2 MiB


@needs_exact
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    ("states", "head", "autocast", "budget"),
    [
        (torch.float32, torch.bfloat16, False, None),  # the head is copied to fp32
        (torch.float32, torch.float32, True, None),  # and here to bf16, while gradients are fp32
        (torch.float32, torch.float32, False, "low"),  # dW is there before the only chunk's kernels run
    ],
)
def test_a_plan_counts_what_other_dtypes_copy(states, head, autocast, budget, trainable, monkeypatch):
    B, T, H, V = 4, 64, 256, 16384
    hidden = torch.randn(T, B, H).to(states).transpose(0, 1).requires_grad_()
    weight = torch.randn(V, H).mul(0.05).to(head).requires_grad_(trainable)
    ids, advantages, mask = torch.randint(V, (B, T)), torch.randn(B), torch.ones(B, T)
    predicted = []

    def choose(problem, *args):
        plan = plan_module.choose(problem, *args)
        predicted.append(problem.peak(plan))
        return plan

    monkeypatch.setattr(loss_module, "choose", choose)

    def fn():
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = grpo_loss(hidden, weight, ids, mask, advantages, memory_budget=budget)
        loss.backward()

    fn()
    hidden.grad = weight.grad = None
    _, peak = measure_peak(fn)
    assert peak <= 1.05 * predicted[0] and predicted[0] <= 1.2 * peak


def test_prediction_by_hand():
    """The baseline's shape: 64 sequences of 1,024 tokens, Qwen3-0.6B's head, bf16."""
    naive = predict_loss_bytes(64, 1024, 1024, 151936, torch.bfloat16, "naive", device="cuda")
    logits = 64 * 1024 * 151936 * 2
    assert sum(naive.values()) == 2 * logits + 3 * logits // 64 + 64 * 1024 * 1024 * 2
    fixed = dict(chunk_tokens=1024, device="cuda")
    one, two = (
        predict_loss_bytes(B, 1024, 1024, 151936, torch.bfloat16, "chunked", **fixed, trainable_head=False)
        for B in (64, 128)
    )
    vectors = (96 + 26) * 64 * 1024
    assert sum(two.values()) - sum(one.values()) == 64 * 1024 * 1024 * 2 + vectors, (
        "dH grows with the batch, and vectors"
    )
    assert sum(one.values()) < sum(naive.values()) / 80
    trained = predict_loss_bytes(64, 1024, 1024, 151936, torch.bfloat16, "chunked", **fixed)
    assert predict_loss_bytes(64, 1024, 1024, 151936, torch.bfloat16, device="cuda"), "on a computer without a GPU too"
    chunk = {True: 151936, False: kernels.SLICE}  # whole rows where the head trains
    expected = 151936 * 1024 * 4 + 1024 * 2 * (chunk[True] - chunk[False])
    assert sum(trained.values()) - sum(one.values()) == expected, "dW in fp32; rounded when the logits are gone"


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl = 'liger'"):
        predict_loss_bytes(1, 1, 1, 1, impl="liger")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("impl", "budget"), [("naive", None), ("chunked", None), ("chunked", "low")])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_prediction_agrees_on_a_gpu(impl, budget, trainable):
    B, T, H, V = 16, 512, 1024, 65536
    hidden = torch.randn(B, T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device="cuda").mul(0.05).bfloat16().requires_grad_(trainable)
    ids, advantages = torch.randint(V, (B, T), device="cuda"), torch.randn(B, device="cuda")

    def fn():
        hidden.grad = weight.grad = None
        mask = torch.ones(B, T, device="cuda")
        grpo_loss(hidden, weight, ids, mask, advantages, impl=impl, memory_budget=budget)[0].backward()

    fn()
    hidden.grad = weight.grad = None
    options = dict(memory_budget=budget, trainable_head=trainable, device="cuda")
    predicted = predict_loss_bytes(B, T, H, V, torch.bfloat16, impl, **options)
    assert sum(predicted.values()) == pytest.approx(measure_peak(fn, "cuda")[1], rel=0.1)
