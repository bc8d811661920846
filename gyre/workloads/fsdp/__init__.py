"""FSDP2 as the trainer: a causal language model of transformers, its parameters, gradient and optimizer sharded over
the ranks.

The same code runs on GPUs over NCCL and on CPUs over Gloo. It needs the extra `gyre-rl[fsdp]`; naming this package, or
the classes that it exports, imports neither torch nor transformers.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "FsdpActor": "actor",
    "FsdpCritic": "critic",
    "FsdpReference": "reference",
    "FsdpRewardModel": "reward_model",
}

__all__ = ["FsdpActor", "FsdpCritic", "FsdpReference", "FsdpRewardModel"]

__getattr__ = lazy(__name__, _EXPORTS)
