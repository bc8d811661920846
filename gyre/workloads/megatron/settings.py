"""The `megatron` section of the job's `config`, with every default in this one place.

What it does not say is what the torch workloads read too: `optim`, `loss`, `sampling`, `seed`, `threads`,
`collective_timeout_s` (`gyre.workloads.torch.settings`). This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre.errors import ConfigError
from gyre.workloads.settings import read_settings

_DTYPES = ("auto", "float32", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """How the actor's ranks share the model, and in what precision they compute."""

    model_path: str = ""
    """A folder in Hugging Face's layout. Without safetensors in it the weights are drawn from the job's `seed`;
    "" takes the small decoder of `config.model`."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    """The ranks that are left over by the product of the two are data parallel."""
    sequence_parallel: bool = False
    """Norms are sharded over the tensor-parallel ranks too: less memory for activations."""
    distributed_optimizer: bool = True
    """The optimizer's states are sharded over the data-parallel ranks."""
    device: str = "auto"
    """`auto` is `cuda` where there is one."""
    dtype: str = "auto"
    """`auto` is bfloat16 with float32 master weights on GPUs, and float32 on CPUs."""
    pass_tokens: int = 16384
    """Tokens in one forward and backward pass: sequences are packed up to it. A longer one is a pass of its own."""
    recompute: bool = False
    """Activations of each layer are computed again in the backward pass: less memory for a third more work."""
    memory_checkpoint_share: float = 0.0
    """Of the time, what copies of each rank's state to its machine's memory may take: 0 makes none, 1 keeps every
    step's. A rank that is killed goes on from there, without the disk and without training steps again."""
    deterministic: bool = True
    """Kernels that give the same bits each time, so that a replayed step is the step. Off, a replay on GPUs differs
    in last bits."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> MegatronSettings:
        """The settings that `config["megatron"]` asks for, defaults elsewhere. Raises ConfigError."""
        settings = read_settings(cls, config.get("megatron", {}), "config.megatron")
        rules = [
            (
                min(settings.tensor_parallel, settings.pipeline_parallel) >= 1,
                "tensor_parallel and pipeline_parallel must be at least 1",
            ),
            (
                not settings.sequence_parallel or settings.tensor_parallel > 1,
                "sequence_parallel needs a tensor_parallel above 1",
            ),
            (
                0.0 <= settings.memory_checkpoint_share <= 1.0,
                "memory_checkpoint_share must be between 0 and 1",
            ),
            (settings.pass_tokens >= 1, "pass_tokens must be at least 1"),
            (settings.dtype in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}"),
            (settings.device in _DEVICES, f"device must be one of {', '.join(_DEVICES)}"),
        ]
        for holds, sentence in rules:
            if not holds:
                raise ConfigError(f"config.megatron.{sentence}.")
        return settings
