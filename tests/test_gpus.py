"""What the driver's library says of GPUs: of a recorded answer, and, where there is a GPU, of the real one."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import gyre.gpus as gpus
from gyre.gpus import GpuLook, GpuUse, device_bytes, gpu_use

GIB = 1 << 30
RECORDED = (
    ("GPU-5e1c9a2e-0b7f-4c4c-9a53-1d8d2c0f6a11", 143771 << 20, 661 << 20, 98123 << 20, 87),
    ("GPU-0d7b9f4e-7d4a-4e2c-8f0e-9b5a3c1d2e33", 143771 << 20, 661 << 20, 3 << 20, 0),
)
"""Of two H200: UUID, total, reserved and used bytes, and percent of use."""


class RecordedDriver:
    """Answers as `libnvidia-ml` does, by writing to the addresses that it is given."""

    def __init__(self, *, refuses: Sequence[str] = ()) -> None:
        self.refuses = refuses
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.refuses:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            return int(getattr(self, f"_{name}")(*arguments))

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(RECORDED)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if index.value < len(RECORDED) else 2

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        names = [one[0].encode() for one in RECORDED]
        if uuid not in names:
            return 6
        handle._obj.value = names.index(uuid) + 1
        return 0

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        assert memory._obj.version == ctypes.sizeof(memory._obj) | 2 << 24
        _, total, reserved, used, _ = RECORDED[handle.value - 1]
        memory._obj.total, memory._obj.reserved, memory._obj.used = total, reserved, used
        return 0

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        use._obj.gpu = RECORDED[handle.value - 1][4]
        return 0

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        assert len(buffer) == size.value
        buffer.value = RECORDED[handle.value - 1][0].encode()
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordedDriver:
    made = RecordedDriver()
    monkeypatch.setattr(gpus, "_library", lambda: made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_use_and_memory_are_those_of_the_driver(driver: RecordedDriver) -> None:
    first, second = gpu_use()
    assert first == GpuUse(RECORDED[0][0], 0.87, 98123 << 20, (143771 - 661) << 20)
    assert second.as_dict() == {
        "busy": 0.0,
        "memory_used_bytes": 3 << 20,
        "memory_bytes": (143771 - 661) << 20,
    }
    assert device_bytes() == 139 * GIB
    assert driver.open == 0


@pytest.mark.parametrize(
    ("visible", "planned", "expected"),
    [
        (None, (1,), [1]),
        ("1", (1,), [1]),  # Ray lets the process see its own alone
        ("1,0", (0,), [1]),
        (RECORDED[1][0], (), [1]),
        ("", (), []),
        ("7", (), []),
        (None, (), [0, 1]),
    ],
)
def test_the_gpus_are_those_of_the_process(
    driver: RecordedDriver,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    planned: tuple[int, ...],
    expected: list[int],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one.uuid for one in gpu_use(planned)] == [RECORDED[number][0] for number in expected]


def test_what_the_driver_does_not_say_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for refused in ("nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUtilizationRates"):
        driver = RecordedDriver(refuses=[refused])
        monkeypatch.setattr(gpus, "_library", lambda driver=driver: driver)
        assert gpu_use() == []
        assert driver.open == 0
    monkeypatch.setattr(gpus, "_library", lambda: None)
    assert (gpu_use(), device_bytes()) == ([], None)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_look_goes_on_and_ends_where_there_is_nothing() -> None:
    seen = threading.Event()
    use = GpuUse("GPU-a", 0.5, 1, 2)
    looks: list[Sequence[int]] = []

    def look(planned: Sequence[int]) -> list[GpuUse]:
        looks.append(planned)
        seen.set()
        return [use] if planned else []

    some, none = GpuLook(look), GpuLook(look)
    some.begin([3])
    assert seen.wait(5.0)
    until(lambda: some.newest == [use])
    some.end()
    none.begin([])
    until(lambda: [] in looks)
    assert none.newest == []


def test_the_real_driver_keeps_the_contract() -> None:
    """Where there is a GPU: what the library says is what torch's context on the device sees."""
    found = gpu_use()
    if not found:
        pytest.skip("needs a GPU")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    before = found[0]
    assert before.uuid.startswith("GPU-")
    assert 0.0 <= before.busy <= 1.0
    assert 0 <= before.memory_used_bytes <= before.memory_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(before.memory_bytes - total) < GIB
    held = torch.zeros(GIB, dtype=torch.uint8, device="cuda:0")
    assert gpu_use()[0].memory_used_bytes - before.memory_used_bytes >= 0.9 * GIB
    del held
