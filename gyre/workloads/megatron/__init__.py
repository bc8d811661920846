"""Megatron-core as the trainer: tensor, pipeline and data parallel, with the distributed optimizer.

The same code runs on GPUs over NCCL and on CPUs over Gloo. It needs the extra `gyre-rl[megatron]`; naming this
package, or the classes that it exports, imports neither torch nor Megatron.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "MegatronActor": "actor",
    "MegatronCritic": "critic",
    "MegatronReference": "reference",
    "MegatronRewardModel": "reward_model",
}

__all__ = ["MegatronActor", "MegatronCritic", "MegatronReference", "MegatronRewardModel"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
