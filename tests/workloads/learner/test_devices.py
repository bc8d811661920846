"""Memory for a device to copy to."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from gyre.workloads.learner.devices import MADE_AT_ONCE, make_pages


def resident(memory: torch.Tensor) -> int:
    """Bytes of the mapping that begins with this memory that the kernel has made."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    begin = f"{memory.data_ptr():x}-"
    for line in lines:
        if line.startswith(begin):
            return next(int(one.split()[1]) << 10 for one in lines if one.startswith("Rss:"))
    raise AssertionError("the memory is no mapping of its own")


def test_pages_are_made_and_keep_what_they_hold() -> None:
    size = MADE_AT_ONCE + 5 * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory[0], memory[-1] = 7, 9
    assert resident(memory) <= 4 << 20, "two pages are there, or two large ones"
    make_pages(memory.data_ptr(), size)
    assert resident(memory) == size
    assert (int(memory[0]), int(memory[-1]), int(memory.sum())) == (7, 9, 16)


def test_what_is_not_a_whole_page_is_left_to_whoever_uses_it() -> None:
    memory = torch.ones(100, dtype=torch.uint8)
    make_pages(memory.data_ptr(), 100)
    assert int(memory.sum()) == 100
