"""FSDP2 as the trainer: a causal language model of transformers, its parameters, gradient and optimizer sharded over
the ranks.

The same code runs on GPUs over NCCL and on CPUs over Gloo. It needs the extra `gyre-rl[fsdp]`; naming this package, or
the classes that it exports, imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "FsdpActor": "actor",
    "FsdpCritic": "critic",
    "FsdpReference": "reference",
    "FsdpRewardModel": "reward_model",
}

__all__ = ["FsdpActor", "FsdpCritic", "FsdpReference", "FsdpRewardModel"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
