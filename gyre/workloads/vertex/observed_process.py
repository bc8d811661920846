"""A process seen from outside, on its own host: its stacks, whether it is stopped, and how much it ran and waited for a
CPU. For one that cannot report by itself, because it is stopped or stuck.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path


def describe_process(pid: int, timeout_s: float = 5.0) -> str:
    """Its state by the kernel, and the Python stack of its threads by py-spy. Runs on the process's own host.

    Where a part cannot be had, the text says why; nothing is raised, for evidence must not hold up a repair.
    """
    status = _status(pid)
    if status.startswith("gone"):
        return f"process {pid}: {status}"
    return f"process {pid}: {status}\n{_stack(pid, timeout_s)}"


def _status(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "gone"
    wanted = ("State", "VmRSS", "Threads")
    rows = (line.partition(":") for line in text.splitlines())
    return ", ".join(f"{key} {' '.join(value.split())}" for key, _, value in rows if key in wanted)


def _stack(pid: int, timeout_s: float) -> str:
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        # Without pausing the process: one that is already stopped must not be waited for.
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stack: {error})"
    return done.stdout.strip() or f"(no stack: {done.stderr.strip()[:300]})"


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
