"""The stacks of a process, seen from outside on its own host: for one that cannot report by itself, because it is
stopped or stuck.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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
