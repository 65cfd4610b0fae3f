"""What tests/test_launch.py launches: GRPO of the tiny policy as any script does it, with a fault if one is asked for.

Arguments: the run folder, optimiser steps, and words: kill-5 (rank 1 dies in step 5), fsdp (on a CPU).
"""

import atexit
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerCallback

from grpo_lab import GRPOConfig, GRPOTrainer
from grpo_lab.policies import load_tiny_policy
from grpo_lab.runs import Run
from grpo_lab.tasks import arithmetic_problems

atexit.register(lambda: print(f"in a group at the end: {dist.is_initialized()}"))  # first in, last out
folder, steps, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if "fsdp" in words:
    from ranks import fsdp_on_a_cpu

    fsdp_on_a_cpu()


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in message["content"])) for (message,) in completions]


class Fault(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and f"kill-{state.global_step}" in words:
            os.kill(os.getpid(), signal.SIGKILL)


model, tokenizer = load_tiny_policy()
config = GRPOConfig(
    folder,
    max_steps=steps,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    beta=0.04,
    bf16=False,
    logging_steps=1,
    save_steps=2,
    report_to="none",
)
trainer = GRPOTrainer(
    model, digits, config, arithmetic_problems(64, 0), processing_class=tokenizer, callbacks=[Fault()]
)
run = Run(Path(folder), "launched")
run.attach(trainer)
print(f"{trainer.accelerator.num_processes} processes, from {run.last_checkpoint()}")
trainer.train(resume_from_checkpoint=run.last_checkpoint())
trainer.save_model(f"{folder}/policy")
