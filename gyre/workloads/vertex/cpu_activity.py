"""What a process did for a moment, by the kernel: whether it is stopped, and how much it ran and waited for a CPU.

Runs on the process's own host.
"""

from __future__ import annotations

import time
from pathlib import Path


def cpu_activity(pid: int, over_s: float) -> tuple[str, float, float] | None:
    """Look twice, `over_s` apart. Returns the state's letter (`R` runs or waits for a CPU, `S` sleeps, `D` waits for a
    disk, `T` is stopped, see proc(5)), and the CPUs that its threads used and those that they waited for on average.
    None if the process is gone or the kernel does not tell."""
    began = time.monotonic()
    try:
        before = _seconds_by_thread(pid)
        time.sleep(over_s)
        after = _seconds_by_thread(pid)
        # The name stands in brackets and may hold any character.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return None
    took_s = time.monotonic() - began
    both = before.keys() & after.keys()
    ran_s = sum(after[thread][0] - before[thread][0] for thread in both)
    waited_s = sum(after[thread][1] - before[thread][1] for thread in both)
    return state, ran_s / took_s, waited_s / took_s


def _seconds_by_thread(pid: int) -> dict[str, tuple[float, float]]:
    """The seconds that each thread ran, and those that it was ready to run and had no CPU."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
        except FileNotFoundError:  # it has ended meanwhile
            continue
        found[thread.name] = (int(ran_ns) * 1e-9, int(waited_ns) * 1e-9)
    return found
