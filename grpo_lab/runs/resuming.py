"""What TRL's GRPOTrainer forgets when it resumes, as a mixin of ours: with it a resumed run equals an unbroken one.

A checkpoint in the middle of a generated batch (``num_iterations`` or ``steps_per_generation`` above one step) loses
the completions that are still to be trained on; the order of the data in a later epoch begins anew; and a run that
ended before it could say so would take one step too many.
"""

from pathlib import Path

import torch


class Resuming:
    """For a subclass of TRL's GRPOTrainer, before it among the bases."""

    def _rollouts(self, checkpoint):
        return Path(checkpoint) / f"rollouts_{self.args.process_index}.pt"

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            torch.save({"step": self._step, "inputs": self._buffered_inputs}, self._rollouts(output_dir))

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (path := self._rollouts(checkpoint)).exists():
            kept = torch.load(path, map_location=self.args.device, weights_only=True)
            self._step, self._buffered_inputs = kept["step"], kept["inputs"]

    def _get_train_sampler(self, dataset=None):
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _run_epoch(self, *, epoch, epochs_trained, **rest):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        sampler = getattr(self, "_sampler", None)
        if epoch == epochs_trained and hasattr(sampler, "generator"):
            for _ in range(epochs_trained):  # each epoch has drawn its order from the same generator
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        super()._run_epoch(epoch=epoch, epochs_trained=epochs_trained, **rest)
