"""The largest batch a process can train, of Qwen3's shapes with random weights, by who computes the loss.

This is the table ``batch``. For each model ``launch`` starts processes that search for all providers and card sizes
(``memory.largest_batch``): a trial builds the model, shards it as accelerate's config file says, and takes an optimiser
step with one sequence, which makes the optimiser's state, and then one with the whole batch. A card is emulated: the
allocator may take what such a card has, less what lies outside it here (CUDA's context, NCCL). On a CPU nothing is
capped: a trial fits if the peak that it measures does.

An error in the middle of a step can leave ranks waiting for each other, or memory that nobody finds again. So the ranks
compare notes after each trial, apart from NCCL; where they differ, or memory is missing, the processes end and new ones
go on from the journal. All other trials share a process, since its start takes longer than most of them. In the end the
providers take turns with a batch that all of them can train, beside a step without any head.
"""

import gc
import json
import math
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_lab.bench.measure import what_failed
from grpo_lab.bench.step import COMMON, MODELS, STEP_PROVIDERS, TINY, build_model, head_loss, inputs
from grpo_lab.head import score_in_forward
from grpo_lab.launch import LaunchError, launch
from grpo_lab.memory import largest_batch, measure_peak
from grpo_lab.runs import read_json, write_json
from grpo_lab.step_memory import CARDS, fitting_batch, model_config

LENGTHS = {"cuda": (128, 512), "cpu": (8, 24)}  # tokens of prompt and completion
ALLOCATOR = "expandable_segments:True"  # else up to a fifth of a card is lost in holes, to whom is chance
SHARED = 32  # sequences of a process when the providers take turns, at most
TURNS = 5  # of each provider then; the first is a warm-up
PATIENCE = timedelta(seconds=30)  # with a rank that is still in a trial when another has ended its own


def batch_tables(device, models, tunings, dtypes, cards, config, processes, providers=None, seed=0):
    """A list of rows, one per provider and card, for each model, tuning ("lora": rank 16 on all linear layers, or
    "full") and dtype. On a CPU one tiny model stands for all.

    largest_batch and failing_batch: sequences of a process that fit, and the fewest seen not to; peak_mib: of a process
    with the largest batch; fixed_mib, mib_per_sequence: the line through the peaks. shared_batch, shared_peak_mib,
    shared_ms: of steps of the same batch for all, in rows of their own, without a card.
    """
    names = [name for name in STEP_PROVIDERS if name in (providers or STEP_PROVIDERS)]
    for model in models if device.type == "cuda" else ["tiny"]:
        for tuning in tunings:
            for dtype in dtypes:
                size = (COMMON | MODELS[model]) if model in MODELS else TINY
                spec = dict(model=model, size=size, tuning=tuning, dtype=dtype, seed=seed, lengths=LENGTHS[device.type],
                            cells=[(name, card) for card in cards for name in names if name != "no head"],
                            turns=names)  # fmt: skip
                rows = launched(spec, config, processes)
                yield from ([row for row in rows if row["card_gb"] == card] for card in (*cards, None))


def launched(spec, config, processes):
    """The rows of ``spec``'s cells, searched for by launched processes; ends when each has a row."""
    with tempfile.TemporaryDirectory(prefix="grpo_lab-batch-") as folder:
        folder = Path(folder)
        write_json(folder / "spec.json", spec)
        script, journal = folder / "trials.py", folder / "journal.jsonl"
        setting = f"import os\nos.environ.setdefault('PYTORCH_ALLOC_CONF', {ALLOCATOR!r})"  # read when torch loads
        script.write_text(f"{setting}\nfrom grpo_lab.bench.batch import search\nsearch({str(folder)!r})\n")
        journal.touch()
        precision = "bf16" if spec["dtype"] == "bfloat16" else "no"
        note = ""
        while True:
            before = journal.stat().st_size
            try:
                launch(script, config=config, processes=processes, options=("--mixed_precision", precision))
            except LaunchError as error:
                lines = [line.strip() for line in error.lines]
                note = next((line for line in lines if "out of memory" in line), lines[-1] if lines else "")
                print(f"  {str(error).splitlines()[0]} {note}", flush=True)
            entries = [json.loads(line) for line in journal.read_text().splitlines()]
            rows = [entry["row"] for entry in entries if "row" in entry]
            if entries and "shared" in entries[-1]:
                return rows + [_row(spec, name, None, **found) for name, found in entries[-1]["shared"].items()]
            if entries and "began" in entries[-1]:  # the processes died of this trial, or of the turns
                if entries[-1]["began"] is None:
                    return rows
                with journal.open("a") as file:
                    file.write(json.dumps({"trial": entries[-1]["began"], "outcome": {"died": note}}) + "\n")
            elif journal.stat().st_size == before:  # they do not even begin
                done = [(row["provider"], row["card_gb"]) for row in rows]
                return rows + [_row(spec, *cell, note=note) for cell in spec["cells"] if tuple(cell) not in done]


def _row(spec, provider, card, **found):
    prompt, completion = spec["lengths"]
    about = dict(model=spec["model"], tuning=spec["tuning"], dtype=spec["dtype"], checkpointing=True, card_gb=card,
                 prompt=prompt, completion=completion, processes=None, provider=provider)  # fmt: skip
    nothing = dict(largest_batch=None, failing_batch=None, peak_mib=None, fixed_mib=None, mib_per_sequence=None,
                   shared_batch=None, shared_peak_mib=None, shared_ms=None, note="")  # fmt: skip
    return about | nothing | found


class _Fault(Exception):
    """An error of a trial that is no lack of memory: the cell's row says what, and the others go on."""


def search(folder):
    """What the launched processes run: the cells of ``folder/spec.json`` that its journal has no row of."""
    from accelerate import Accelerator

    folder = Path(folder)
    spec, entries = read_json(folder / "spec.json"), []
    for line in (folder / "journal.jsonl").read_text().splitlines():
        entries.append(json.loads(line))
    outcomes = {tuple(entry["trial"]): entry["outcome"] for entry in entries if "trial" in entry}
    rows = [entry["row"] for entry in entries if "row" in entry]
    done = [(row["provider"], row["card_gb"]) for row in rows]
    accelerator = Accelerator()
    accelerator.wait_for_everyone()  # NCCL takes its memory now, before that of the cards is reckoned
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if accelerator.num_processes > 1 else None

    def note(**entry):
        if accelerator.is_main_process:
            with (folder / "journal.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    lines = {}  # of each provider: the peaks of the batches that fitted, on any card
    for provider, card in spec["cells"]:
        if (provider, card) in done:
            continue
        if provider not in lines and accelerator.device.type == "cpu":  # what libraries keep at first use is no peak
            _trial(accelerator, spec, provider, math.inf, 1)
        last = {}

        def trial(batch, provider=provider, card=card, last=last):
            key = (provider, card, batch)
            if key not in outcomes:
                note(began=key)
                outcomes[key] = _agreed(_trial(accelerator, spec, *key), group)
                note(trial=key, outcome=outcomes[key])
                if accelerator.is_main_process:
                    print(f"  {provider}, {card} GB, batch {batch}: {_said(outcomes[key])}", flush=True)
                if outcomes[key]["spoilt"]:
                    time.sleep(1.0)  # until every rank has heard of it
                    os._exit(0)  # new processes go on from here; NCCL would wait for ranks that do not come
            last.update({batch: outcomes[key]})
            if "failed" in outcomes[key]:
                raise _Fault(outcomes[key]["failed"])
            return outcomes[key].get("peak")

        found = {"processes": accelerator.num_processes}
        peaks = lines.setdefault(provider, {})
        try:
            fits, fails = largest_batch(trial, _card_bytes(card), peaks, _guess(accelerator, spec, provider, card))
            found |= dict(largest_batch=fits, failing_batch=fails)
            died = last.get(fails, {}).get("died")
            found["note"] = f"{fails}: {died}" if died else ""
            if fits:
                found["peak_mib"] = last[fits]["peak"] / 2**20
        except _Fault as error:
            found["note"] = str(error)
        if len(peaks) > 1:
            low, high = min(peaks), max(peaks)
            slope = (peaks[high] - peaks[low]) / (high - low) / 2**20
            found |= dict(mib_per_sequence=slope, fixed_mib=peaks[low] / 2**20 - slope * low)
        rows.append(_row(spec, provider, card, **found))
        note(row=rows[-1])
    note(began=None)
    batch = min([SHARED, *(row["largest_batch"] for row in rows if row["largest_batch"])])
    shared = {}
    for name, outcome in _take_turns(accelerator, spec, batch).items():
        most = _agreed(outcome, group)
        shared[name] = dict(processes=accelerator.num_processes, shared_batch=batch,
                            shared_peak_mib=most["peak"] / 2**20, shared_ms=most["ms"])  # fmt: skip
    note(shared=shared)


def _guess(accelerator, spec, provider, card):
    """The largest batch by prediction, or None on a CPU; TRL's head needs about what the chunked loss needs."""
    if accelerator.device.type == "cpu":
        return None
    impl, dtype = "naive" if provider == "naive" else "chunked", getattr(torch, spec["dtype"])
    options = dict(tuning=spec["tuning"], processes=accelerator.num_processes, fused=True)
    return fitting_batch(model_config(spec["model"]), card, *spec["lengths"], dtype, impl, **options)


def _said(outcome):
    if "peak" in outcome:
        return f"fits, {outcome['peak'] / 2**30:.2f} GiB"
    return outcome.get("failed", "does not fit")


def _card_bytes(card):
    return CARDS.get(card, card) * 2**30


def _agreed(outcome, group):
    """One outcome for all ranks: the largest peak and time, or that of the first rank where it did not fit. "spoilt":
    the processes must not go on."""
    every = [outcome]
    if group is not None:
        every = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, outcome, group=group)
    bad = [o for o in every if "peak" not in o]
    spoilt = 0 < len(bad) < len(every) or any(o.get("spoilt") for o in every)
    agreed = bad[0] if bad else {key: max(o[key] for o in every) for key in outcome if key != "spoilt"}
    return agreed | {"spoilt": spoilt}


def _trial(accelerator, spec, provider, card, batch):
    """``{"peak": bytes}``; without it where the batch did not fit, with "failed" where another error came; "spoilt"
    where memory is still taken after it."""
    device, outcome = accelerator.device, {}
    try:
        outcome = _whole_step(accelerator, spec, provider, card, batch)
    except Exception as error:  # noqa: BLE001  of whatever kind: the ranks compare notes on it
        said = what_failed(error)
        print(f"    rank {accelerator.process_index}: {said}", flush=True)  # should the others not hear of it
        if "out of memory" not in said:
            outcome = {"failed": said}
    accelerator.free_memory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        outcome["spoilt"] = torch.cuda.memory_allocated(device) > 256 << 20
    return outcome


def _whole_step(accelerator, spec, provider, card, batch):
    device, limit = accelerator.device, _card_bytes(card)
    model, optimiser = _prepared(accelerator, spec)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - outside) / total), device)
    steps = [_stepper(accelerator, spec, model, optimiser, size) for size in (1, batch)]
    peak = _measured(lambda: [step(provider) for step in steps], model, device)[1]
    return {"peak": peak} if device.type == "cuda" or peak <= limit else {}


def _take_turns(accelerator, spec, batch):
    """``{provider: {"peak": bytes, "ms": median}}`` of steps on one model, which differ in the head alone."""
    device = accelerator.device
    model, optimiser = _prepared(accelerator, spec)
    step = _stepper(accelerator, spec, model, optimiser, batch)
    peaks, times = ({name: [] for name in spec["turns"]} for _ in range(2))
    for _ in range(TURNS):
        for name in spec["turns"]:
            ms, peak = _measured(lambda name=name: step(name), model, device)
            times[name].append(ms)
            peaks[name].append(peak)
    return {name: {"peak": max(peaks[name][1:]), "ms": statistics.median(times[name][1:])} for name in times}


def _measured(fn, model, device):
    """``(fn(), peak)``, with the bytes that are alive before it, of which a CPU knows the model's alone."""
    on_gpu = device.type == "cuda"
    standing = torch.cuda.memory_allocated(device) if on_gpu else sum(p.nbytes for p in model.parameters())
    result, peak = measure_peak(fn, device)
    return result, peak + standing


def _stepper(accelerator, spec, model, optimiser, batch):
    """``step(provider)``: an optimiser step on ``batch`` random sequences; returns its milliseconds."""
    device, (prompt, completion) = accelerator.device, spec["lengths"]
    ids, mask, advantages = inputs(batch, prompt, completion, spec["size"]["vocab_size"], device, spec["seed"])

    def step(provider):
        began = time.perf_counter()
        output = model(
            input_ids=ids,
            score=lambda hidden, head: dict(
                loss=head_loss(provider, hidden, head.weight, ids, mask, advantages, prompt)
            ),
        )
        accelerator.backward(output.loss)
        optimiser.step()
        optimiser.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) * 1e3

    return step


def _prepared(accelerator, spec):
    """Model and AdamW as the trainer has them: built whole on the device, which takes a second, then sharded."""
    model = build_model(spec["size"], spec["dtype"], accelerator.device, spec["seed"], spec["tuning"])
    base = model.get_base_model() if spec["tuning"] == "lora" else model
    base.gradient_checkpointing_enable()
    score_in_forward(base)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-6, fused=accelerator.device.type == "cuda")
    return accelerator.prepare(model.train(), optimiser)
