"""The stacks of a process, seen from outside on its own host: for one that cannot report by itself, because it is
stopped or stuck.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def describe_process(pid: int, timeout_s: float = 5.0) -> str:
    """Its state by the kernel, and the stacks of its threads by py-spy, with the native frames where they can be had: a
    call into C is seen by them alone. Runs on the process's own host.

    Where a part cannot be had, the text says why; nothing is raised, for evidence must not hold up a repair.
    """
    status = _status(pid)
    if status.startswith("gone"):
        return f"process {pid}: {status}"
    # With native frames it is paused for a moment, and one that is stopped already would be waited for.
    modes = ["--nonblocking"] if "stopped" in status else ["--native", "--nonblocking"]
    return f"process {pid}: {status}\n{_stack(pid, modes, timeout_s / len(modes))}"


def _status(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "gone"
    wanted = ("State", "VmRSS", "Threads")
    rows = (line.partition(":") for line in text.splitlines())
    return ", ".join(f"{key} {' '.join(value.split())}" for key, _, value in rows if key in wanted)


def _stack(pid: int, modes: list[str], timeout_s: float) -> str:
    """By the first of py-spy's modes that tells anything; else why the last does not."""
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    trouble = ""
    for mode in modes:
        try:
            done = subprocess.run(
                [program, "dump", mode, "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
            continue
        if told := done.stdout.strip():
            return told
        trouble = done.stderr.strip()[:300]
    return f"(no stack: {trouble})"
