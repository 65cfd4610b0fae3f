"""Where a training step's time goes: ``split.attach(trainer)`` before ``trainer.train()``.

Each part is logged with what TRL logs, as ``seconds/rollout`` and so on, and together they are ``seconds/step``. A GPU
works on behind the host's back, so it is waited for where a part begins and ends: that costs little, since most parts
end with numbers on the host anyway. On several processes: the first one's times.
"""

import statistics
import time

import torch
from transformers import TrainerCallback

PARTS = {
    "rollout": "prompts in, completions out",
    "sync": "the policy's weights to vLLM",
    "reward": "the reward functions",
    "old": "log-probs of the policy that is trained, where sampler and trainer may differ",
    "reference": "log-probs of the reference model, with a KL term",
    "loss": "forward and backward pass",
    "optimiser": "clipping and the update",
    "other": "data, tokenising, advantages, logging",
}


def attach(trainer):
    """Add a Split to a trainer of TRL's or ours."""
    trainer.add_callback(Split(trainer))


def _now():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Split(TrainerCallback):
    """Times a trainer's own methods, between ``on_train_begin`` and ``on_train_end``."""

    def __init__(self, trainer):
        self.trainer, self.spent, self.wrapped, self.preparing = trainer, {}, [], False

    def on_train_begin(self, *args, **kwargs):
        timed = {"_generate": "rollout", "_calculate_rewards": "reward", "_prepare_inputs": "prepare"}
        for name, part in (timed | {"_get_per_token_logps_and_entropies": "log-probs"}).items():
            self._time(self.trainer, name, part)
        if self.trainer.use_vllm:
            self._time(self.trainer.vllm_generation, "sync_weights", "sync")

    def on_train_end(self, *args, **kwargs):
        for owner, name in self.wrapped:
            delattr(owner, name)
        self.wrapped.clear()

    def _time(self, owner, name, part):
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            if part == "log-probs" and not self.preparing:  # of the loss, which TRL computes by the same method
                return method(*args, **kwargs)
            self.preparing |= part == "prepare"
            began = _now()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent.setdefault(part, []).append(_now() - began)
                self.preparing &= part != "prepare"

        setattr(owner, name, timed)
        self.wrapped.append((owner, name))

    def on_step_begin(self, *args, **kwargs):
        self.spent, self.began = {}, _now()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.computed = _now()

    def on_optimizer_step(self, *args, **kwargs):
        self.stepped = _now()

    def on_step_end(self, *args, **kwargs):
        total = {part: sum(times) for part, times in self.spent.items()}
        scored, generations = self.spent.get("log-probs", []), len(self.spent.get("rollout", []))
        each = len(scored) // max(1, generations)  # of a generated batch, TRL asks for the reference's last
        reference = scored[each - 1 :: each] if each and self.trainer.beta != 0.0 else []
        part = dict.fromkeys(PARTS, 0.0) | {name: total.get(name, 0.0) for name in ("sync", "reward")}
        part["rollout"] = total.get("rollout", 0.0) - part["sync"]
        part["reference"], part["old"] = sum(reference), sum(scored) - sum(reference)
        part["optimiser"] = self.stepped - self.computed
        part["loss"] = self.computed - self.began - total.get("prepare", 0.0)
        step = _now() - self.began
        part["other"] = step - sum(part.values())
        for name, seconds in (part | {"step": step}).items():
            self.trainer._metrics["train"][f"seconds/{name}"].append(seconds)


def medians(rows, skip=1):
    """Part to the median seconds of a run's logged rows, the first ``skip`` steps left out: they warm up. The parts'
    medians add up to the median step but for what varies from step to step."""
    rows = [row for row in rows if "seconds/step" in row]
    rows = rows[skip:] or rows
    return {name: statistics.median(row[f"seconds/{name}"] for row in rows) for name in (*PARTS, "step")}
