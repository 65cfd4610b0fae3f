"""What ``skip_zero_advantage`` saves: a training step's time against the share of zero advantages, the table ``skip``.

A policy answers real questions once. Then the trainer's own steps take turns on that batch: without skipping, with it,
and with TRL's loss; with the advantages that the rewards gave, and with those of 0 to all of the groups set to 0. The
learning rate is 0: all steps see the same policy, and the gradient norm shows that skipping leaves the gradient alone.

    python -m grpo_lab bench --tables skip --out results                 # the tiny policy on generated problems
    CUDA_VISIBLE_DEVICES=0 python -m grpo_lab bench --tables skip --policy FOLDER --gsm8k FOLDER --out results

A policy that is given answers GSM8K, warmed up first as for the table ``joint``.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainerCallback

from grpo_lab import split, tasks
from grpo_lab.bench.measure import free, what_failed
from grpo_lab.bench.rollouts import JOINT, config_of, load_policy, questions, warm_up
from grpo_lab.policies import TINY_POLICY
from grpo_lab.rewards import accuracy_reward, gsm8k_format_reward
from grpo_lab.runs import read_json

SIZES = {"cuda": dict(sequences=64, group=8, length=256), "cpu": dict(sequences=16, group=4, length=40)}
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the groups, and so of the sequences
PROVIDERS = {  # to fields of GRPOConfig
    "chunked": dict(loss_impl="chunked", skip_zero_advantage=False),
    "skipping": dict(loss_impl="chunked", skip_zero_advantage=True),
    "TRL": dict(loss_impl="trl", skip_zero_advantage=False),
}
TURNS = [(provider, share) for share in (None, *SHARES) for provider in PROVIDERS]  # None: the rewards' own advantages


def skip_table(device, policy, gsm8k, repeats, seed):
    """A list with a row for each of TURNS. ms, min_ms: median and least of ``repeats`` forward and backward passes; one
    warms up; peak_mib: the device's; zero_share and skipped: of the sequences, skipped as the trainer says."""
    sizes = SIZES[device.type]
    with tempfile.TemporaryDirectory() as folder:
        if policy is None:
            warm, rows = TINY_POLICY, tasks.arithmetic_problems(100, seed)
        else:
            warm, rows = Path(folder, "warm"), questions("train", gsm8k)
            joint = JOINT[device.type]
            warm_up(*load_policy(policy), rows, warm, joint["warm_steps"], joint["warm_batch"], device)
            free(device)
        config = config_of(
            Path(folder, "out"), "transformers", None, None, max_steps=len(TURNS) * (repeats + 1), seed=seed,
            per_device_train_batch_size=sizes["sequences"], num_generations=sizes["group"], learning_rate=0.0,
            max_completion_length=sizes["length"], bf16=device.type == "cuda",
        )  # fmt: skip
        about = dict(policy=Path(policy or TINY_POLICY).stem, dtype="bfloat16" if config.bf16 else "float32")
        yield take_turns(warm, config, rows, about)
    free(device)


def take_turns(policy, config, rows, about):
    from grpo_lab import GRPOTrainer

    trainer = GRPOTrainer(str(policy), [accuracy_reward, gsm8k_format_reward], config, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Peak(trainer))
    batch = {}

    def prepared(inputs):
        """The one batch, as this step's turn wants it; in place of a new one for each step."""
        if not batch:
            batch.update(trainer._generate_and_score_completions(inputs))
        turn, place = divmod(trainer.state.global_step, len(TURNS))
        if place == 0:
            print(f"skip: turn {turn} of {config.max_steps // len(TURNS) - 1}", flush=True)
        provider, share = TURNS[place]
        vars(trainer.args).update(PROVIDERS[provider])
        return batch | {"advantages": with_zeros(batch["advantages"], share)}

    trainer._prepare_inputs = prepared
    split.attach(trainer)
    failed = ""
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  what was measured until then is told
        failed = what_failed(error)
    if batch:
        masks = {"prompt": batch["prompt_mask"], "completion": batch["completion_mask"]}
        about |= {"sequences": config.generation_batch_size, "group": config.num_generations}
        about |= {name: mask.sum(1).double().mean().item() for name, mask in masks.items()}
        about["padded"] = sum(mask.shape[1] for mask in masks.values())
    receipt = read_json(Path(config.output_dir, "receipt.json")) or {}
    steps = [row for row in trainer.state.log_history if "seconds/step" in row]
    table = []
    for place, (provider, share) in enumerate(TURNS):
        mine = steps[place + len(TURNS) :: len(TURNS)]
        zero = (with_zeros(batch["advantages"], share) == 0).double().mean().item() if batch else share
        row = about | dict(provider=provider, setting=f"{'its own: ' * (share is None)}{zero or 0:.0%} zero",
                           own=share is None, zero_share=zero)  # fmt: skip
        row |= dict.fromkeys(("ms", "min_ms", "peak_mib", "skipped", "grad_norm"))
        if mine:
            ms = [1e3 * step["seconds/loss"] for step in mine]
            row |= {"ms": statistics.median(ms), "min_ms": min(ms), "grad_norm": mine[-1]["grad_norm"]}
            row |= {"peak_mib": mine[-1].get("peak_mib"), "skipped": mine[-1].get("skipped_zero_advantage", 0.0)}
        table.append(row | {"receipt": receipt.get("passed"), "note": "" if mine else failed})
    return table


def with_zeros(advantages, share):
    """``advantages`` ``(B,)`` as they are if share is None; else 1 and -1 in turn, and 0 for that share, at the end."""
    if share is None:
        return advantages
    made = torch.ones_like(advantages)
    made[1::2] = -1
    made[len(made) - round(share * len(made)) :] = 0
    return made


class Peak(TrainerCallback):
    """Logs the device's peak of each forward and backward pass as ``peak_mib``; nothing on a CPU."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_pre_optimizer_step(self, *args, **kwargs):
        if torch.cuda.is_available():
            self.trainer._metrics["train"]["peak_mib"].append(torch.cuda.max_memory_allocated() / 2**20)
