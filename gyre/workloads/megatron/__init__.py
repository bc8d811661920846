"""Megatron-core as the trainer: tensor, pipeline and data parallel, with the distributed optimizer.

The same code runs on GPUs over NCCL and on CPUs over Gloo. It needs the extra `gyre-rl[megatron]`; naming this
package, or the classes that it exports, imports neither torch nor Megatron.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "MegatronActor": "actor",
    "MegatronCritic": "critic",
    "MegatronReference": "reference",
    "MegatronRewardModel": "reward_model",
}

__all__ = ["MegatronActor", "MegatronCritic", "MegatronReference", "MegatronRewardModel"]

__getattr__ = lazy(__name__, _EXPORTS)
