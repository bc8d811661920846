"""What this machine's GPUs have and do, by the driver's library: no torch, and no context on a device.

This module must not know what the memory is for, or whose the work is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"

LOOK_EVERY_S = 5.0
"""The driver's own measure of use is of up to a second, and a look takes a millisecond or two."""

_UUID_BYTES = 96
"""`NVML_DEVICE_UUID_V2_BUFFER_SIZE`."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_v2_t`: bytes. What the driver has reserved no process can have."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sample period, in which a kernel ran, or memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU at one moment: the share of the last second in which some kernel ran on it, whosever it was, and bytes in
    use of those that processes can have."""

    uuid: str
    busy: float
    memory_used_bytes: int
    memory_bytes: int

    def as_dict(self) -> dict[str, float]:
        return {
            "busy": self.busy,
            "memory_used_bytes": self.memory_used_bytes,
            "memory_bytes": self.memory_bytes,
        }


def device_bytes() -> int | None:
    """Of the smallest GPU that this process may use, in whole GiB, so that cards of one kind agree; None where there is
    none, or its driver does not say."""
    with _driver() as nvml:
        if nvml is None:
            return None
        found = [_memory(nvml, handle) for handle in _visible(nvml)]
    known = [one.total - one.reserved for one in found if one is not None]
    return min(known) >> 30 << 30 if known else None


def gpu_use(planned: Sequence[int] = ()) -> list[GpuUse]:
    """Of the GPUs that this process may use; of several, those that are `planned` for it, by number. Empty where there
    is none, or the driver does not say: a part of a GPU (MIG) has no use of its own."""
    with _driver() as nvml:
        if nvml is None:
            return []
        handles = _visible(nvml)
        if planned and len(handles) > len(planned):
            handles = [handles[number] for number in planned if number < len(handles)]
        return [use for handle in handles if (use := _use(nvml, handle)) is not None]


class GpuLook:
    """The newest look at the GPUs of this process, which `begin` has made again and again, on a thread of its own: the
    driver of a broken GPU may keep whoever asks."""

    def __init__(self, look: Callable[[Sequence[int]], list[GpuUse]] = gpu_use) -> None:
        self._look = look
        self.newest: list[GpuUse] = []
        """Empty before the first look, and where there is nothing to see."""
        self._ended = threading.Event()

    def begin(self, planned: Sequence[int]) -> None:
        threading.Thread(target=self._go_on, args=(planned,), name="gyre-gpus", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _go_on(self, planned: Sequence[int]) -> None:
        while not self._ended.is_set():
            self.newest = self._look(planned)
            if not self.newest:
                return  # none, or its driver says nothing: that does not change
            self._ended.wait(LOOK_EVERY_S)


@contextmanager
def _driver() -> Iterator[Any]:
    """The library, ready; None where there is no driver, or it is not well."""
    nvml = _library()
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _library() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:  # no driver
        return None


def _visible(nvml: Any) -> list[ctypes.c_void_p]:
    """The handles of the GPUs that `CUDA_VISIBLE_DEVICES` names, by number or UUID; all, where it is not set."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = (
        [str(number) for number in range(count.value)]
        if named is None
        else [word.strip() for word in named.split(",") if word.strip()]
    )
    found = []
    for word in words:
        handle = ctypes.c_void_p()
        told = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
            if word.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        )
        if told == 0:
            found.append(handle)
    return found


def _memory(nvml: Any, handle: ctypes.c_void_p) -> _Memory | None:
    memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
    return memory if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) == 0 else None


def _use(nvml: Any, handle: ctypes.c_void_p) -> GpuUse | None:
    memory, use = _memory(nvml, handle), _Utilization()
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    if (
        memory is None
        or nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) != 0
        or nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES)) != 0
    ):
        return None
    return GpuUse(
        uuid.value.decode(errors="replace"),
        use.gpu / 100,
        int(memory.used),
        int(memory.total - memory.reserved),
    )
