"""grpo_lab: a workbench for memory-efficient GRPO (group relative policy optimisation).

The public names load on first use, so that ``import grpo_lab`` costs milliseconds and needs neither torch, Triton,
a GPU nor the notebook packages.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Objective": "objective",
    "grpo_loss": "loss",
    "token_logps": "loss",
    "GRPOConfig": "trainer",
    "GRPOTrainer": "trainer",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name in _HOME:
        return getattr(import_module(f"grpo_lab.{_HOME[name]}"), name)
    raise AttributeError(f"module 'grpo_lab' has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
