"""Checksums of many chunks, on several cores where there are many.

One core hashes some seven gigabytes a second while nothing else uses the memory: half a second of a version of 3.4 GB,
for the publisher as for each receiver, before anybody serves it.

This module must not know whose chunks they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gyre.weights.version.manifest import Chunk

MOST_THREADS = 8
"""And a quarter of the cores: the machine has other work. Four copy and hash 13 GB/s while a trainer and an engine use
the memory, too."""


def hashing_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // 4))


def first_wrong(
    chunks: Iterable[Chunk], is_right: Callable[[Chunk], bool], *, threads: int | None = None
) -> Chunk | None:
    """The first of `chunks` that is not right; None where all are. `is_right` is called on `threads` threads."""
    threads = threads or hashing_threads()
    if threads == 1:
        return next((chunk for chunk in chunks if not is_right(chunk)), None)
    every: Sequence[Chunk] = list(chunks)
    with ThreadPoolExecutor(threads, thread_name_prefix="gyre-hash") as pool:
        answers = zip(every, pool.map(is_right, every), strict=True)
        return next((chunk for chunk, right in answers if not right), None)
