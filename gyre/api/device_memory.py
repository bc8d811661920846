"""How much memory this machine's GPUs have, by the driver's library: no torch, and no context on a device.

This module must not know what the memory is for.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """`nvmlMemory_v2_t`: bytes. What the driver has reserved no process can have."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def device_bytes() -> int | None:
    """Of the smallest GPU that this process may use, in whole GiB, so that cards of one kind agree; None where there is
    none, or its driver does not say."""
    try:
        nvml: Any = ctypes.CDLL(_LIBRARY)
    except OSError:  # no driver
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        found = [_total(nvml, index) for index in _visible(nvml)]
    finally:
        nvml.nvmlShutdown()
    known = [one for one in found if one]
    return min(known) >> 30 << 30 if known else None


def _visible(nvml: Any) -> list[int]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = list(range(count.value))
    if named is None:
        return every
    words = [word.strip() for word in named.split(",") if word.strip()]
    numbers = [int(word) for word in words if word.isdigit()]
    # By UUID they are not looked up: then it is the smallest of all.
    return [one for one in numbers if one < count.value] if len(numbers) == len(words) else every


def _total(nvml: Any, index: int) -> int:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return 0
    memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
    if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) != 0:
        return 0
    return int(memory.total - memory.reserved)
