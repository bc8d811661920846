"""A rank's state from its GPU to the machine's memory and back: by the product's copiers, and all of it page-locked.

    python bench/host_memory_gpu.py [--gib 24] [--rounds 3] [--json FILE] [--dry-run]

`ready` is what comes before the first copy: for the copiers the files' space, for the other way its pages made and
locked. `copy` is until the state may be changed again and counts, `beside` the part that matrix products on the device
lost meanwhile, `compared` the reading of all bytes for their checksum, `back` the copy to the device. `gone` is how
long a process that has the state lasts after SIGKILL. Medians of the rounds, in seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from gyre.weights.owned_dirs import default_root  # noqa: E402
from gyre.workloads.gang.host_memory import HostMemory  # noqa: E402
from gyre.workloads.learner.devices import DeviceMemory, page_locked  # noqa: E402

TENSOR_BYTES = 64 << 20
WITHIN_S = 240.0
"""For a way, its process's start included."""

Row = dict[str, Any]
Named = list[tuple[str, torch.Tensor]]


def state_of(size: int, device: torch.device) -> Named:
    """Tensors of `size` bytes together."""
    each = min(TENSOR_BYTES, size)
    generator = torch.Generator(device).manual_seed(1)
    return [
        (f"{number}", torch.randn(each // 4, device=device, generator=generator))
        for number in range(size // each)
    ]


class Work:
    """Matrix products on the device, one after the other, so that what holds them up is seen."""

    def __init__(self, device: torch.device) -> None:
        side = 4096 if device.type == "cuda" else 256
        self._one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self._device = device

    def rate(self, seconds: float) -> float:
        """Products a second, for at least so long."""
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            for _ in range(10):
                self._one @ self._one
            count += 10
            synchronize(self._device)
        return count / (time.monotonic() - began)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def by_copiers(told: Connection, folder: Path, size: int, rounds: int, device: torch.device) -> None:
    state, work = state_of(size, device), Work(device)
    wanted = float(sum(float(one.double().sum()) for _, one in state))
    memory = HostMemory("bench", 0, root=folder, memory=DeviceMemory(device))
    row: Row = {"way": "the copiers"}
    began = time.monotonic()
    memory.make_room(state)
    row["ready"] = time.monotonic() - began
    alone = work.rate(1.0)
    copies, losses = [], []
    for step in range(rounds + 1):
        synchronize(device)
        began = time.monotonic()
        memory.save(state, lineage="one", step=step, book={})
        if step:
            losses.append(1.0 - work.rate(0.2) / alone)
        memory.settle()
        copies.append(time.monotonic() - began)
    row["first"], row["copy"], row["beside"] = (
        copies[0],
        statistics.median(copies[1:]),
        statistics.median(losses),
    )
    (record, *_) = memory.records()
    for _, one in state:
        one.zero_()
    synchronize(device)
    began = time.monotonic()
    right = memory.load(record, state)
    synchronize(device)
    row["back"] = time.monotonic() - began
    found = float(sum(float(one.double().sum()) for _, one in state))
    row["right"] = right and found == wanted
    told.send(row)
    time.sleep(WITHIN_S)  # until it is killed


def by_locked(told: Connection, folder: Path, size: int, rounds: int, device: torch.device) -> None:
    """As states were kept before: two mapped files, all of whose pages are locked."""
    import mmap

    state, work = state_of(size, device), Work(device)
    row: Row = {"way": "two page-locked states"}
    began, views = time.monotonic(), []
    for slot in range(2):
        with (folder / f"{slot}").open("w+b") as file:  # it stays when the process dies, as a state does
            os.posix_fallocate(file.fileno(), 0, size)
            view = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        if device.type == "cuda":
            page_locked(view, device)
        views.append(view)
    row["ready"] = time.monotonic() - began
    alone = work.rate(1.0)
    copies = []
    for step in range(rounds + 1):
        synchronize(device)
        began, at = time.monotonic(), 0
        for _, one in state:
            views[step % 2][at : at + one.nbytes].copy_(one.view(torch.uint8), non_blocking=True)
            at += one.nbytes
        synchronize(device)
        copies.append(time.monotonic() - began)
    row["first"], row["copy"], row["beside"] = copies[0], statistics.median(copies[1:]), None
    began = time.monotonic()
    import xxhash

    xxhash.xxh3_128_hexdigest(views[0].numpy().data)
    row["compared"] = time.monotonic() - began
    began, at = time.monotonic(), 0
    for _, one in state:
        one.view(torch.uint8).copy_(views[0][at : at + one.nbytes], non_blocking=True)
        at += one.nbytes
    synchronize(device)
    row["back"], row["alone"] = time.monotonic() - began, alone
    told.send(row)
    time.sleep(WITHIN_S)


def measured(way: Any, *given: Any) -> Row:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    folder = Path(tempfile.mkdtemp(dir=default_root()))
    process = context.Process(target=way, args=(theirs, folder, *given), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(WITHIN_S):
            return {"way": way.__name__, "error": f"nothing within {WITHIN_S:.0f} s"}
        row: Row = mine.recv()
        began = time.monotonic()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        row["gone"] = time.monotonic() - began
        return row
    except EOFError:
        return {"way": way.__name__, "error": f"it ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join(60)
        shutil.rmtree(folder)


COLUMNS = ("ready", "first", "copy", "beside", "compared", "back", "gone")


def table(rows: list[Row]) -> str:
    lines = ["| way | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [f"{row[name]:.2f}" if row.get(name) is not None else "" for name in COLUMNS]
        lines.append(f"| {row['way']} | " + " | ".join(cells) + " |" + row.get("error", ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="0.1 GiB, on the CPU")
    given = parser.parse_args()
    size = int((0.1 if given.dry_run else given.gib) * 2**30) // TENSOR_BYTES * TENSOR_BYTES
    device = torch.device("cpu" if given.dry_run else "cuda:0")
    rows: list[Row] = []
    for way in (by_copiers, by_locked):
        rows.append(measured(way, size, given.rounds, device))
        if given.json:
            name = "cpu" if given.dry_run else torch.cuda.get_device_name(0)
            machine = {
                "device": name,
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "torch": torch.__version__,
            }
            given.json.write_text(
                json.dumps({"machine": machine, "bytes": size, "rows": rows}, indent=1) + "\n"
            )
    print(table(rows))


if __name__ == "__main__":
    main()
