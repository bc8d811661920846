"""How long other threads of a process stand still while memory is page-locked: by torch's binding, by ctypes, in one
call or in pieces, with pages that the call makes or that were made before. And whether copies may cross the pieces.

    python bench/page_locking_gpu.py --gib 24 --json results.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

BEAT_S = 0.005
MADV_POPULATE_WRITE = 23
GIB = 1 << 30


def cuda_runtime() -> Any:
    torch.cuda.cudart()
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in maps if "/libcudart" in line))
    library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
    return library


class Pulse:
    """A thread that wants to run every few milliseconds, and one that also makes and touches memory."""

    def __init__(self, *, maps: bool) -> None:
        self._maps, self._stop, self.worst_s = maps, False, 0.0
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop:
            before = time.monotonic()
            time.sleep(BEAT_S)
            if self._maps:
                made = mmap.mmap(-1, 1 << 16)
                made[0] = 1
                made.close()
            self.worst_s = max(self.worst_s, time.monotonic() - before - BEAT_S)

    def end(self) -> float:
        self._stop = True
        self._thread.join()
        return self.worst_s


def measured(
    name: str, lock: Callable[[int, int], None], unlock: Callable[[], None], size: int
) -> dict[str, Any]:
    mapped = mmap.mmap(-1, size)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    pulses = [Pulse(maps=False), Pulse(maps=True)]
    began = time.monotonic()
    lock(memory.data_ptr(), size)
    took_s = time.monotonic() - began
    worst = [pulse.end() for pulse in pulses]
    copied = copies(memory)
    unlock()
    return {"by": name, "took_s": took_s, "other_threads_s": worst[0], "with_mmap_s": worst[1], **copied}


def copies(memory: torch.Tensor) -> dict[str, Any]:
    """Copies that cross a multiple of 1 GiB, both ways: whether they are right, and how fast."""
    begin = GIB - (GIB // 4) - 4096
    part = memory[begin : begin + GIB]
    device = torch.arange(GIB // 8, dtype=torch.int64, device="cuda").view(torch.uint8)
    try:
        part.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        began = time.monotonic()
        part.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        out_s = time.monotonic() - began
        back = torch.empty_like(device)
        back.copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        right = bool(torch.equal(back, device))
        return {"crosses": right, "gib_a_s": 1 / out_s, "error": ""}
    except RuntimeError as error:
        return {"crosses": False, "gib_a_s": 0.0, "error": str(error)[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=24)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.zeros(1, device="cuda")
    library, size = cuda_runtime(), asked.gib * GIB
    bound = torch.cuda.cudart()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    rows, locked = [], []

    def by_torch(address: int, size: int) -> None:
        locked[:] = [address]
        assert int(bound.cudaHostRegister(address, size, 0)) == 0

    def by_pieces(piece: int) -> Callable[[int, int], None]:
        def lock(address: int, size: int) -> None:
            locked.clear()
            for offset in range(0, size, piece):
                assert library.cudaHostRegister(address + offset, min(piece, size - offset), 0) == 0
                locked.append(address + offset)

        return lock

    def populated(piece: int, threads: int, then: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def lock(address: int, size: int) -> None:
            began = time.monotonic()
            places = [(address + at, min(piece, size - at)) for at in range(0, size, piece)]
            with ThreadPoolExecutor(threads) as pool:
                assert set(pool.map(lambda place: libc.madvise(*place, MADV_POPULATE_WRITE), places)) == {0}
            print(f"populated by {threads} threads in {time.monotonic() - began:.2f} s", flush=True)
            then(address, size)

        return lock

    def unlock() -> None:
        for address in locked:
            assert library.cudaHostUnregister(address) == 0

    rows.append(measured("torch's binding, one call", by_torch, unlock, size))
    rows.append(measured("ctypes, one call", by_pieces(size), unlock, size))
    for threads in (1, 4):
        for mib in (64, asked.gib << 10):
            name = f"made by {threads} in 64 MiB, then in pieces of {mib} MiB"
            rows.append(measured(name, populated(64 << 20, threads, by_pieces(mib << 20)), unlock, size))
    for mib in (64, 256, 1024):
        rows.append(measured(f"ctypes, pieces of {mib} MiB", by_pieces(mib << 20), unlock, size))
    print("| by | s | others stand still, s | with mmap, s | copies cross pieces | GiB/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['by']} | {row['took_s']:.2f} | {row['other_threads_s']:.3f} | {row['with_mmap_s']:.3f} "
            f"| {row['error'] or row['crosses']} | {row['gib_a_s']:.1f} |"
        )
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(0), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
