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
