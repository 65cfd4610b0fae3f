"""Runs in the environment that has vLLM, for test_vllm.py: GRPO on a CPU with the engine in the trainer's process.
``on_vllm.py POLICY FOLDER`` prints a JSON object of what was found, as its last line."""

import json
import sys

import torch

from grpo_lab import GRPOConfig, GRPOTrainer
from grpo_lab.bench.rollouts import varied
from grpo_lab.policies import load_tiny_policy
from grpo_lab.tasks import arithmetic_problems


def main(policy, folder):
    model, tokenizer = load_tiny_policy(policy)
    config = GRPOConfig(
        folder, rollouts="colocate", max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=24, vllm_max_model_length=192, learning_rate=1e-2, lr_scheduler_type="constant",
        logging_steps=1, report_to="none", save_strategy="no", gradient_checkpointing=False,
        vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    data = dict(train_dataset=arithmetic_problems(12, 0), processing_class=tokenizer)
    trainer = GRPOTrainer(model, varied, config, **data)
    engine = trainer.vllm_generation
    before = [p.detach().clone() for p in model.parameters()]
    prompts = [tokenizer.encode("How many apples does Tom have?")] * 4

    @torch.no_grad()
    def differences():
        """Largest difference between the engine's log-probs of what it samples and the model's, in nats."""
        _, completions, logps, _ = engine.generate(prompts, None, 4)
        found = []
        for prompt, ids, told in zip(prompts, completions, logps):
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(-1, torch.tensor(list(ids))[:, None]).squeeze(-1)
            found.append((own - torch.tensor([t[0] for t in told])).abs().max().item())
        return max(found)

    found = {"at first": differences()}
    trainer.train()
    found["change"] = max((p - q).abs().max().item() for p, q in zip(model.parameters(), before))
    found["stale"] = differences()  # the engine's weights are those of the last step's rollouts
    engine.sync_weights()
    found["synced"] = differences()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    found["changed"] = differences()
    engine.sync_weights()
    found["changed and synced"] = differences()
    found["steps"] = [row for row in trainer.state.log_history if "loss" in row]
    found["dtype"] = str(engine.llm.llm_engine.model_config.dtype)
    found["seed"] = engine.llm.llm_engine.model_config.seed
    found["receipt"] = trainer.receipt["passed"]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
