"""The light default integrations, in plain torch: actor, critic, reference, reward model, and rollouts without a plane.

They run the demo, the tests and the chaos suite on CPUs, and are the reference that heavier integrations are
compared with. Exports are resolved on first use, so that naming this package does not import torch.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "TorchActor": "actor",
    "TorchCritic": "critic",
    "TorchReference": "reference",
    "TorchRewardModel": "reward_model",
    "TorchRollout": "rollout",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _EXPORTS)
