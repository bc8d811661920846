"""The device of this process, and the precision on it."""

from __future__ import annotations

import os

import torch

from gyre.config.sections import FsdpSettings
from gyre.errors import ConfigError


def device_of(settings: FsdpSettings) -> torch.device:
    """This process's device. `GYRE_DEVICES` is what the plan gave it, by number on its machine; where the process sees
    one device only, it is that one. Raises ConfigError where there is none."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "config.fsdp.device is cuda, but this process sees no CUDA device.",
            hint="Check the driver and CUDA_VISIBLE_DEVICES.",
        )
    planned = os.environ.get("GYRE_DEVICES", "").split(",")[0]
    return torch.device("cuda", int(planned) if planned and torch.cuda.device_count() > 1 else 0)


def dtype_of(settings: FsdpSettings, device: torch.device) -> torch.dtype:
    """The dtype that the model computes in. The optimizer's weights are float32 in any case."""
    name = settings.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    found: torch.dtype = getattr(torch, name)
    return found
