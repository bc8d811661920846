"""A block that is freed goes back to the system, whatever was freed before: seen in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from gyre.malloc_tuning import give_large_blocks_back

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")]

library = ctypes.CDLL(None)
library.mallinfo.restype = Info
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def on_the_heap(size):
    before = library.mallinfo().hblks
    block = library.malloc(size)
    own = library.mallinfo().hblks - before
    library.free(block)
    return not own

if sys.argv[1] == "steady":
    assert give_large_blocks_back()
first = on_the_heap(4 << 20)
print(first, on_the_heap(2 << 20), on_the_heap(64 << 10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other habits")
@pytest.mark.parametrize(
    ("how", "seen"),
    [("steady", "False False True"), ("as it is", "False True True")],
    ids=["steady", "glibc"],
)
def test_blocks_stay_off_the_heap_after_a_larger_one_was_freed(how: str, seen: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == seen


HOLES = """
import time
from gyre import malloc_tuning

def private_mib():
    rows = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) / 1024

if sys.argv[1] == "trimmed":
    malloc_tuning.TRIM_S = 0.05
    malloc_tuning.stay_small()
kept = [bytes(20_000) for _ in range(5_000)]  # 95 MiB on the heap
del kept[::2], kept[1::2]
until, least = time.monotonic() + float(sys.argv[2]), 1e9
while least > 75 and time.monotonic() < until:
    time.sleep(0.05)
    least = min(least, private_mib())
print(least < 75)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other habits")
@pytest.mark.parametrize(
    ("how", "wait_s", "small"),
    [("trimmed", "30", "True"), ("as it is", "0.5", "False")],
    ids=["trimmed", "glibc"],
)
def test_free_pages_between_blocks_that_stay_are_given_back(how: str, wait_s: str, small: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys" + HOLES, how, wait_s],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == small
