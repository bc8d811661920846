"""The pre-flight of a machine: whether a job's vertices could work there at all.

It is run on a machine of the cluster before it is trusted, and after it was left alone. It looks for what would end
every vertex there, by causes that are not the job's, and for nothing that is only unusual.

This module must not know how it gets to the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.version import __version__

LEAST_DISK_BYTES = 64 << 20
"""Of the folder for temporary files: logs and sockets need that much."""

GPUS_ANSWER_S = 30.0
"""A driver that takes longer has lost a device."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a machine of the job must have: the master's `version` of Gyre and of Python ("3.11"), the job's
    `directory` ("" for any), and so many `gpus`."""

    version: str
    python: str
    directory: str
    gpus: int = 0


def needs_of(directory: str | Path, *, gpus: int) -> Needs:
    """The needs of a job whose master is this process."""
    return Needs(__version__, _python(), str(directory), gpus)


def examine(needs: Needs) -> list[str]:
    """What is wrong with this machine, a sentence each; nothing if it is fit. Takes a second, where GPUs hang
    `GPUS_ANSWER_S`."""
    found = []
    if __version__ != needs.version:
        found.append(f"Gyre is {__version__} here and {needs.version} at the master.")
    if _python() != needs.python:
        found.append(f"Python is {_python()} here and {needs.python} at the master.")
    if needs.directory:
        found += _directory(Path(needs.directory))
    found += _disk()
    if needs.gpus:
        found += _gpus(needs.gpus)
    return found


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _directory(directory: Path) -> list[str]:
    if not directory.is_dir():
        return [f"The job's directory {directory} is not there: GYRE_HOME must be a shared folder."]
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return [f"The job's directory {directory} cannot be written by user {os.getuid()}."]
    return []


def _disk() -> list[str]:
    temporary = tempfile.gettempdir()
    free = shutil.disk_usage(temporary).free
    return [f"{temporary} has {free >> 20} MiB left."] if free < LEAST_DISK_BYTES else []


def _gpus(count: int) -> list[str]:
    """What NVIDIA's tool says of the devices; of other vendors' nothing is known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=GPUS_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi did not answer within {GPUS_ANSWER_S:g} s."]
    if told.returncode:
        return [f"nvidia-smi failed: {(told.stderr or told.stdout).strip()[:200]}"]
    devices = [line.partition(",") for line in told.stdout.splitlines() if line.strip()]
    found = []
    if len(devices) < count:
        found.append(f"{len(devices)} of {count} GPUs are there.")
    for index, _, errors in devices:
        if errors.strip().isdecimal() and int(errors) > 0:  # "[N/A]" where a device cannot tell
            found.append(f"GPU {index.strip()} has {errors.strip()} uncorrected memory errors.")
    return found
