"""A device for verl on CPUs, for tests: `VERL_USE_EXTERNAL_MODULES=gyre_verl.testing.cpu` in every process, with
`ENVIRONMENT`, a Ray that feigns GPUs, and the overrides `OVERRIDES`. It is slow, and for nothing else.

verl 0.9.1 has platforms for CUDA and NPUs; its engines are registered for these two, and its resource pools count Ray's
`GPU`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "gyre_verl.testing.cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the engines' names, which run on any device
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

OVERRIDES = (
    "trainer.device=cpu",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
)


class _Device(types.ModuleType):
    """What verl asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("is_available", "is_initialized"):
            return lambda *_, **__: False
        return lambda *_, **__: 0

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def device_count() -> int:
        return 1


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):
    """Answers that are true of no device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("gyre_verl_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        """It goes wherever the number of a device goes: `tensor.to(...)`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Calls return when they are done."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no allocator of its own."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Nothing is profiled."""

    def profiler_stop(self) -> None:
        """Nothing is profiled."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


platform_manager.set_platform(CpuPlatform())


def _gloo_once() -> None:
    """verl asks for `cpu:gloo,cpu:gloo`, which torch refuses: one of the two is enough."""
    init = torch.distributed.init_process_group

    def once(backend: str | None = None, *given: Any, **named: Any) -> Any:
        return init("gloo" if backend and "cpu:gloo" in backend else backend, *given, **named)

    torch.distributed.init_process_group = once


_gloo_once()
