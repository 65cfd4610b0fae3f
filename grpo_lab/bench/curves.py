"""Reward curves by who computes the loss: the tiny policy on arithmetic, trained by launched processes.

This is the table ``curves``. Naive, chunked and TRL's loss start from the same weights and seeds, see the same problems
and draw the same answers until a rounding tips one of the draws; from there they are samples of the same thing, if the
losses are equal.
"""

import itertools
import os
import tempfile
from pathlib import Path

import torch

from grpo_lab.launch import launch
from grpo_lab.runs import read_json, write_json

IMPLS = {"naive": "naive", "chunked": "chunked", "TRL": "trl"}  # provider to loss_impl
SEQUENCES = 64  # of a step, all processes together


def curve_tables(config, processes, dtypes, providers=None, steps=30, seed=0):
    """A list of rows for each training, one per optimiser step. dtype: of the arithmetic; the weights are fp32.

    reward: the mean over the step's answers, of which each is right (1) or not; receipt: whether the first batch's loss
    and gradients equalled the naive head's and TRL's (None of TRL's own loss). Raises LaunchError for a training that
    fails.
    """
    names = [name for name in IMPLS if name in (providers or IMPLS)]
    for dtype, provider in itertools.product(dtypes, names):
        with tempfile.TemporaryDirectory(prefix="grpo_lab-curves-") as folder:
            spec = dict(provider=provider, dtype=dtype, seed=seed, steps=steps, config=config)
            write_json(Path(folder, "spec.json"), spec)
            script = Path(folder, "training.py")
            script.write_text(f"from grpo_lab.bench.curves import train\ntrain({folder!r})\n")
            precision = "bf16" if dtype == "bfloat16" else "no"
            launch(script, config=config, processes=processes, options=("--mixed_precision", precision))
            yield read_json(Path(folder, "rows.json"))


def train(folder):
    """What the launched processes run: the training of ``folder/spec.json``; the first writes its rows."""
    from transformers import PrinterCallback

    from grpo_lab import GRPOConfig, GRPOTrainer
    from grpo_lab.policies import TINY_POLICY
    from grpo_lab.rewards import accuracy_reward
    from grpo_lab.tasks import arithmetic_problems

    spec = read_json(Path(folder, "spec.json"))
    args = GRPOConfig(
        folder, loss_impl=IMPLS[spec["provider"]], seed=spec["seed"], bf16=spec["dtype"] == "bfloat16",
        per_device_train_batch_size=SEQUENCES // int(os.environ.get("WORLD_SIZE", 1)), num_generations=8,
        max_completion_length=32, max_steps=spec["steps"], learning_rate=5e-4, lr_scheduler_type="constant",
        dataloader_pin_memory=torch.cuda.is_available(), disable_tqdm=True, logging_steps=1, save_strategy="no",
        report_to="none",
    )  # fmt: skip
    problems = arithmetic_problems(spec["steps"] * SEQUENCES // 8, spec["seed"])
    trainer = GRPOTrainer(str(TINY_POLICY), accuracy_reward, args, problems)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if trainer.accelerator.is_main_process:
        about = {key: spec[key] for key in ("provider", "dtype", "seed", "config")}
        about |= dict(processes=args.world_size, sequences=SEQUENCES)
        receipt = trainer.receipt and trainer.receipt["passed"]
        rows = [about | {key: row[key] for key in ("step", "reward", "grad_norm")} | {"receipt": receipt}
                for row in trainer.state.log_history if "reward" in row]  # fmt: skip
        write_json(Path(folder, "rows.json"), rows)


def print_rows(rows):
    """A line for a training."""
    first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:5], rows[-5:]))
    name, receipt = rows[0]["provider"], rows[0]["receipt"]
    print(f"  {name:10} reward: first 5 steps {first:.3f}, last {last:.3f}; receipt {receipt}", flush=True)
