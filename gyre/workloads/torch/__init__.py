"""The light default integrations, in plain torch: actor, critic, reference, reward model, and rollouts without a plane.

They run the demo, the tests and the chaos suite on CPUs, and are the reference that heavier integrations are
compared with. Exports are resolved on first use, so that naming this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "TorchActor": "actor",
    "TorchCritic": "critic",
    "TorchReference": "reference",
    "TorchRewardModel": "reward_model",
    "TorchRollout": "rollout",
}

__all__ = [
    "TorchActor",
    "TorchCritic",
    "TorchReference",
    "TorchRewardModel",
    "TorchRollout",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
