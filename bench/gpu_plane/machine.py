"""The machine under a bench: its GPUs, and what processes take of it and leave on it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from gpu_plane.children import ROOT, Child
from gpu_plane.follow import Row, now


def machine() -> Row:
    def said(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    versions = "from importlib.metadata import version as v\n"
    versions += "for n in ('torch','sglang','sglang-kernel','transformers','aiohttp','numpy'):\n"
    versions += "  try: print(n, v(n))\n  except Exception: print(n, '-')"
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "gpus": said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "packages": said(sys.executable, "-c", versions).splitlines(),
        "commit": said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "py_spy": py_spy(Path(tempfile.gettempdir())) is not None,
    }


def gpu_used_mib() -> list[int] | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [int(line) for line in told.stdout.split()]


def gpu_seen_fresh() -> str | None:
    """What a process that begins now sees free, in MiB."""
    code = (
        "import torch\n"
        "print([[v >> 20 for v in torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())])"
    )
    try:
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()


def left_of(processes: Sequence[psutil.Process]) -> list[Row]:
    """Which of these are there still, zombies included."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running():
                left.append({"pid": process.pid, "status": process.status()})
    return left


def gone_within(processes: Sequence[psutil.Process], within_s: float) -> tuple[float, list[Row]]:
    """How long until none of them is left, and who is after that time."""
    began = now()
    while (left := left_of(processes)) and now() - began < within_s:
        time.sleep(0.02)
    return round(now() - began, 3), left


def cpu_of(children: dict[str, Child]) -> dict[str, float]:
    """CPU seconds so far of each process, by role."""
    seconds: dict[str, float] = {}
    for role, child in children.items():
        for process in child.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                name = role if process.pid == child.pid else f"{role} engine: {short_name(process)}"
                seconds[name] = seconds.get(name, 0.0) + times.user + times.system
    own = time.process_time()
    return {**seconds, "this (trainer, or who asks the engine)": own}


def short_name(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    for word in ("scheduler", "detokenizer", "guard.py", "launch_server", "embedded"):
        if word in line:
            return word
    return process.name()


def spent(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Cores taken by each."""
    shares = {name: round((after[name] - before.get(name, 0.0)) / seconds, 3) for name in after}
    return {name: share for name, share in shares.items() if share >= 0.005}


def written_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io") as file:
            return int(next(line for line in file if line.startswith("wchar")).split()[1])
    except OSError:
        return 0


def py_spy(place: Path) -> str | None:
    found = shutil.which("py-spy")
    for folder in sys.path:
        for path in (*Path(folder).glob("py_spy-*.data/scripts/py-spy"), Path(folder, "bin", "py-spy")):
            if found is None and path.is_file():
                copy = place / "py-spy"
                shutil.copy(path, copy)
                copy.chmod(0o755)
                found = str(copy)
    return found
