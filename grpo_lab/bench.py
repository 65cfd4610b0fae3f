"""Loss heads side by side: time, peak memory and gradient error of one forward and backward pass.

Providers run interleaved on the same inputs after a warm-up; times are medians, peaks are incremental, and the bare
GEMMs of the same shapes stand beside them as the floor. A provider that is missing or fails is a row that says so.

    python -m grpo_lab.bench --out head.csv          # the head alone: recorded shapes on a GPU, a small one on a CPU
    python -m grpo_lab.bench --step --out step.csv   # a whole training step of a Qwen3-0.6B shape, random weights
"""

import argparse
import csv
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_lab.doctor import describe_environment
from grpo_lab.loss import grpo_loss
from grpo_lab.memory import measure_peak


@dataclass(frozen=True)
class Shape:
    """Head-only problem: B sequences of up to T tokens, lengths spread so that ``scored`` of them count; hidden H,
    vocabulary V."""

    batch: int
    length: int
    hidden: int
    vocab: int
    scored: int
    dtype: str = "bfloat16"


RECORDED = (Shape(64, 1024, 1024, 151_936, 38_694), Shape(32, 512, 1024, 151_936, 16_384))
SMALL = (Shape(8, 64, 128, 8_192, 300, "float32"),)


def make_inputs(shape: Shape, device, seed=0) -> dict:
    """Random inputs of the shape: ragged mask with exactly ``scored`` tokens, advantages normalised in
    groups of 8 where the batch is a multiple of it."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def randn(*size):
        return torch.randn(*size, generator=generator, device=device)

    B, T = shape.batch, shape.length
    share = torch.rand(B, generator=generator, device=device) * 0.8 + 0.2
    lengths = (share / share.sum() * shape.scored).floor().clamp(1, T).long()
    while (left := shape.scored - int(lengths.sum())) > 0:  # hand out what the clamp cut off
        room = (lengths < T).nonzero().squeeze(-1)[:left]
        lengths[room] += 1
    advantages = randn(B).view(-1, math.gcd(B, 8))
    if advantages.shape[1] > 1:
        advantages = (advantages - advantages.mean(1, keepdim=True)) / (advantages.std(1, keepdim=True) + 1e-4)
    return dict(
        hidden=randn(B, T, shape.hidden).to(dtype),
        weight=(randn(shape.vocab, shape.hidden) * shape.hidden**-0.5).to(dtype),
        token_ids=torch.randint(shape.vocab, (B, T), generator=generator, device=device),
        mask=(torch.arange(T, device=device) < lengths[:, None]).long(),
        advantages=advantages.reshape(-1),
    )


def ours(impl, **options) -> Callable:
    return lambda *args, **named: grpo_loss(*args, **named, impl=impl, **options)[0]


def trl_fused(hidden, weight, token_ids, mask, advantages):
    """TRL's fused head as its patched forward calls it, and its on-policy dapo loss on top."""
    from trl.kernels import ChunkedLogProbFunction

    scored = mask.bool()
    logps, *_ = ChunkedLogProbFunction.apply(
        hidden[scored], weight, None, token_ids[scored], 1.0, 32768, None, 1.0, ("log_probs", "entropy")
    )
    logps = logps.new_zeros(scored.shape).masked_scatter(scored, logps)
    ratio = torch.exp(logps - logps.detach())
    losses = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def liger(compiled) -> Callable:
    """Liger's chunked GRPO loss with its defaults, through torch.compile (its default too) or without."""

    def run(hidden, weight, token_ids, mask, advantages):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=compiled)
        return loss(hidden, weight, token_ids, mask, advantages)[0]

    return run


def bare_gemms(hidden, weight, token_ids, mask, advantages):
    """The head's matrix products alone, in chunks of 2048 tokens: logits, dH, and dW where the head trains."""
    states = hidden.detach()[mask.bool()]
    z = torch.empty(2048, len(weight), dtype=states.dtype, device=states.device)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=states.device) if weight.requires_grad else None
    with torch.no_grad():
        for h in states.split(2048):
            out = torch.mm(h, weight.t(), out=z[: len(h)])
            torch.mm(out, weight)
            if d_weight is None:
                continue
            if states.is_cuda and states.dtype != torch.float32:
                torch.addmm(d_weight, out.t(), h, out_dtype=torch.float32, out=d_weight)
            else:
                d_weight.addmm_(out.t().float(), h.float())


PROVIDERS = {
    "bare GEMMs": bare_gemms,
    "naive": ours("naive"),
    "chunked": ours("chunked"),
    "chunked, C 1024": ours("chunked", chunk_tokens=1024),
    "TRL": trl_fused,
    "Liger": liger(compiled=True),
    "Liger, not compiled": liger(compiled=False),
}


def bench(shape: Shape, trainable: bool, device, providers=None, repeats=7, seed=0) -> list[dict]:
    """One row per provider: ms (median), peak_mib (incremental), grad_error (dH against float64, relative), note."""
    providers = PROVIDERS if providers is None else providers
    x = make_inputs(shape, device, seed)
    x["hidden"].requires_grad_()
    x["weight"].requires_grad_(trainable)
    exact = _exact_gradient(x)
    rows, alive = {}, []
    for name, fn in providers.items():
        row = rows[name] = dict(provider=name, ms=None, peak_mib=None, grad_error=None, note="")
        try:
            _elapsed(lambda fn=fn: _run(fn, x), device)  # compiles and warms up
            x["hidden"].grad = x["weight"].grad = None  # or the peak would be counted from the last pass's gradients
            row["peak_mib"] = measure_peak(lambda fn=fn: _run(fn, x), device)[1] / 2**20
            grad = x["hidden"].grad
            row["grad_error"] = None if grad is None else ((grad.double() - exact).norm() / exact.norm()).item()
            alive.append((name, fn, []))
        except Exception as error:  # noqa: BLE001  a provider that fails is a row, and the others go on
            row["note"] = _first_line(error)
        x["hidden"].grad = x["weight"].grad = None
        gc.collect()
    for _ in range(repeats):
        for name, fn, times in alive:
            if len(times) < 2 or times[-1] < 500:  # of a pass this slow, two say enough
                times.append(_elapsed(lambda fn=fn: _run(fn, x), device))
                rows[name]["ms"] = statistics.median(times)
    return [{"head": "trainable" if trainable else "frozen", **vars(shape), **row} for row in rows.values()]


def no_head(hidden, weight, token_ids, mask, advantages):
    """Nothing in the head's place: what the rest of a training step takes."""
    return hidden.float().mean()


def bench_step(dtype: str, device, batch=64, prompt=128, completion=512, small=False, repeats=3, seed=0) -> list[dict]:
    """One row per provider for a whole step: backbone with gradient checkpointing, head, backward, AdamW, tied head.

    ms is the median step, peak_mib the device's peak (weights, gradients and optimiser included)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, head_dim=128)
    size |= dict(num_key_value_heads=8, vocab_size=151_936, max_position_embeddings=40_960)
    if small:
        size |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
        size |= dict(num_key_value_heads=2, vocab_size=4_096)
    rows = []
    for name, fn in {"no head": no_head, **{k: PROVIDERS[k] for k in ("naive", "TRL", "chunked")}}.items():
        row = dict(provider=name, ms=None, peak_mib=None, note="")
        model = optimiser = None
        try:
            torch.manual_seed(seed)
            with torch.device(device):
                model = (
                    Qwen3ForCausalLM(Qwen3Config(**size, tie_word_embeddings=True)).to(getattr(torch, dtype)).train()
                )
                ids = torch.randint(model.config.vocab_size, (batch, prompt + completion))
                advantages = torch.randn(batch)
            model.gradient_checkpointing_enable()
            optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
            mask = torch.zeros_like(ids)
            mask[:, prompt - 1 : -1] = 1

            def step(model=model, optimiser=optimiser, ids=ids, mask=mask, advantages=advantages, fn=fn):
                hidden, targets, scored = model.model(ids, use_cache=False).last_hidden_state, ids.roll(-1, 1), mask
                if fn is PROVIDERS["naive"]:  # a mask does not save it the logits of the prompt
                    hidden, targets, scored = (x[:, prompt - 1 : -1] for x in (hidden, targets, scored))
                fn(hidden, model.lm_head.weight, targets, scored, advantages).backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)

            step()
            if device.type == "cuda":
                base = torch.cuda.memory_allocated(device)
                row["peak_mib"] = (base + measure_peak(step, device)[1]) / 2**20
            row["ms"] = statistics.median(_elapsed(step, device) for _ in range(repeats))
        except Exception as error:  # noqa: BLE001
            row["note"] = _first_line(error)
        rows.append(dict(dtype=dtype, batch=batch, prompt=prompt, completion=completion) | row)
        del model, optimiser
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _first_line(error):
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:120]}"


def _exact_gradient(x):
    """dH in float64, chunk by chunk."""
    hidden = x["hidden"].detach().double().requires_grad_()
    rest = {k: v.detach() for k, v in x.items() if k != "hidden"}
    loss, _ = grpo_loss(hidden, **(rest | {"weight": rest["weight"].double()}), backend="torch", chunk_tokens=256)
    loss.backward()
    return hidden.grad


def _run(fn, x):
    x["hidden"].grad = x["weight"].grad = None
    loss = fn(**x)
    if loss is not None:
        loss.backward()


def _elapsed(fn, device):
    """Milliseconds of ``fn()``."""
    if device.type != "cuda":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m grpo_lab.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--step", action="store_true", help="whole training steps instead of the head alone")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = describe_environment()
    where = {"device": about["gpu"][0] if about["gpu"] else f"{about['cpu']}, {torch.get_num_threads()} threads"}
    where |= {name: about["packages"].get(name) for name in ("torch", "triton", "trl", "liger-kernel")}
    command = "python -m grpo_lab.bench" + " --step" * args.step + f" --repeats {args.repeats}"
    where |= {"commit": about["commit"], "time": about["time"], "command": command}
    on_gpu = device.type == "cuda"
    if args.step:
        sizes = {} if on_gpu else dict(batch=4, prompt=8, completion=24, small=True)
        tables = ((f"step, {d}", bench_step(d, device, **sizes)) for d in ("bfloat16", "float32"))
    else:
        tables = (
            (
                f"{shape}, {'trainable' if trainable else 'frozen'} head",
                bench(shape, trainable, device, repeats=args.repeats),
            )
            for shape in (RECORDED if on_gpu else SMALL)
            for trainable in (True, False)
        )
    rows = []
    for title, table in tables:
        print(title)
        for row in table:
            ms, peak, error = (row.get(k) for k in ("ms", "peak_mib", "grad_error"))
            ms, peak = "-" if ms is None else f"{ms:,.1f}", "-" if peak is None else f"{peak:,.0f}"
            error = "" if error is None else f"dH error {error:.1e}"
            print(f"  {row['provider']:20} {ms:>9} ms {peak:>9} MiB  {error}  {row['note']}", flush=True)
        rows += table
        if args.out:  # after each table: a bench that is stopped leaves what it has measured
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, [*rows[0], *where])
                writer.writeheader()
                writer.writerows(row | where for row in rows)


if __name__ == "__main__":
    main()
