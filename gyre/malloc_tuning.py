"""How a process of the control plane uses memory: when the garbage collector looks, and what goes back to the system.

Large blocks of memory go back to the system when they are freed, however many came and went before.

glibc takes large blocks from the system and gives them back, and small ones from a heap that grows at its end. But
each large block that is freed raises the size from which on a block counts as large, up to 32 MiB. So the tables and
frames of master, trainer and rollout manager come to lie on the heap, between small blocks that stay, and the holes
that they leave are too small for the next ones: the heap grows, with the same amount in use. A limit that is set once
stays as it is. Ranks that compute are left alone: to them a block from the system is a page fault for every 4 KiB.

What lies between small blocks that stay is given back page by page, by glibc's `malloc_trim`, once a minute: the arrays
of samples come and go on many threads, each with a heap of its own, and would leave holes in all of them.

This module must not know what the memory is used for.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable

LARGE_BYTES = 128 << 10
"""glibc's own first limit."""

TRIM_S = 60.0
"""Between two looks for free pages: each takes some milliseconds for 50 MiB, in which other threads wait for memory."""

NEW_OBJECTS = 1000
"""After so many the collector looks through what is new. With a thousand agents' requests open that takes 4 ms, and 50
after twenty times as many (`bench/results/turns.md`)."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def calm_collector() -> None:
    """For a process that runs a manager and little else. What the manager lets go of is freed at once; to look
    through all that it keeps takes a tenth of a second at 16,384 samples, and would find nothing. What is new is looked
    through often, so that each look is short: nothing else is done meanwhile. What was imported stays as long as the
    process, and is not looked through either. Large blocks go back to the system, for thousands of them come and go."""
    give_large_blocks_back()
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 1000, 1000)


def give_large_blocks_back() -> bool:
    """For the whole process, from now on. False where the C library is none that can be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl and macOS have none; their allocators are others
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, LARGE_BYTES))


@functools.cache  # once a process, though a setup may be tried again
def stay_small() -> None:
    """For a process that runs a master or a trainer: what it frees goes back to the system, from now on."""
    if give_large_blocks_back():
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
        threading.Thread(target=_trim_for_ever, args=(trim,), name="gyre-malloc-trim", daemon=True).start()


def _trim_for_ever(trim: Callable[[int], int]) -> None:
    pause = threading.Event()
    while not pause.wait(TRIM_S):
        trim(0)
