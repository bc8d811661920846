"""The device of this process, the precision on it, and what makes its results repeatable.

This module must not import Megatron.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from gyre.config.sections import FsdpSettings, MegatronSettings
from gyre.errors import ConfigError
from gyre.workloads.gang.machine_memory import MachineMemory


def device_of(settings: MegatronSettings | FsdpSettings) -> torch.device:
    """This process's device, as the back end's section says. `GYRE_DEVICES` is what the plan gave it, by number on its
    machine; where the process sees one device only, it is that one. Raises ConfigError where there is none."""
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"config.{settings.KEY}.device is cuda, but this process sees no CUDA device.",
            hint="Check the driver and CUDA_VISIBLE_DEVICES.",
        )
    planned = os.environ.get("GYRE_DEVICES", "").split(",")[0]
    return torch.device("cuda", int(planned) if planned and torch.cuda.device_count() > 1 else 0)


def dtype_of(settings: MegatronSettings | FsdpSettings, device: torch.device) -> torch.dtype:
    """The dtype that the model computes in. The optimizer's own are float32 in any case."""
    name = settings.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    found: torch.dtype = getattr(torch, name)
    return found


def device_bytes(device: torch.device) -> int | None:
    """The memory of a GPU, in whole GiB, so that cards of one kind agree; None of a CPU."""
    if device.type != "cuda":
        return None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return total >> 30 << 30


MADE_AT_ONCE = 64 << 20
"""Bytes of memory that one call to the kernel makes. While it does, whoever else in the process maps memory waits."""
MAKERS = 4
"""Threads that make memory beside each other: with four it takes 0.4 of the time of one."""
_MADV_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14; an older kernel refuses it, and makes the memory where it is first used."""


class DeviceMemory(MachineMemory):
    """Of a machine whose states are on this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        return page_locked(memory, self._device) if self._device.type == "cuda" else super().pin(memory)


def page_locked(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Have CUDA page-lock this host memory, on whatever thread: `device` then copies to and from it without a detour
    through a buffer of the driver's. What is returned undoes it. Where CUDA refuses, copies take the detour, and
    nothing else is lost.

    One call locks all of it, for no copy may cross from one locked piece to another. During that call no other thread
    of the process can map memory: for 13 s where the kernel makes 24 GiB meanwhile, for 0.5 s where they are there
    already (`bench/page_locking_gpu.py`). So they are made first, piece by piece."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    make_pages(address, size)
    with torch.cuda.device(device):  # a thread's own device is the machine's first one
        status = int(cuda.cudaHostRegister(address, size, 0))
        if status:
            with contextlib.suppress(RuntimeError):  # the next kernel would be told of it, whosever it is
                torch.zeros(1, device=device)
    if status:
        print(f"{size} bytes of host memory are not page-locked: CUDA error {status}", flush=True)
        return lambda: None
    return lambda: cuda.cudaHostUnregister(address)


def make_pages(address: int, size: int) -> None:
    """Have the kernel make the memory's pages now, as if each had been written to. What they hold stays."""
    libc = ctypes.CDLL(None)
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    with ThreadPoolExecutor(MAKERS, "gyre-make-memory") as pool:
        for piece in range(begin, end, MADE_AT_ONCE):
            length = min(MADE_AT_ONCE, end - piece) // mmap.PAGESIZE * mmap.PAGESIZE
            pool.submit(libc.madvise, ctypes.c_void_p(piece), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def make_deterministic() -> None:
    """Kernels that give the same bits each time; what has none raises. Before the first product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not `warn_only`: with it the backward pass of flash attention stays as it is, and warns.
    torch.use_deterministic_algorithms(True)
    # Else each new tensor is filled first, which costs a pass over it and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_everything(seed: int) -> None:
    """Nothing here draws at random after the first weights; what a user's loss may draw is then the same, too."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
