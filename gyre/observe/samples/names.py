"""How the files of samples are named, where they are, and the outcomes that Gyre itself distinguishes."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "samples"
"""Below the job's directory."""

_STEP = re.compile(r"step-(\d{8,})\.parquet")
_QUARANTINED = re.compile(r"quarantined-(\d{8,})\.parquet")

HELD_OUT_FOLDER = "held-out"
"""Below the folder of samples: the answers to held-out prompts, a file for each set and version."""
_HELD_OUT = re.compile(r"([A-Za-z0-9_.-]+)@(\d{8,})\.parquet")

TRAINED = "trained"
QUARANTINED = "quarantined"
EVALUATED = "evaluated"

PARTIAL = ".partial"
"""The end of the name of a file that is not whole."""


def step_file(step: int) -> str:
    return f"step-{step:08d}.parquet"


def quarantined_file(group: int) -> str:
    return f"quarantined-{group:08d}.parquet"


def step_of(name: str) -> int | None:
    """The step of a file; None where it is no step's."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def is_quarantined(name: str) -> bool:
    return _QUARANTINED.fullmatch(name) is not None


def held_out_file(name: str, version: int) -> str:
    """Of a set, whose name cannot have the sign between the two."""
    return f"{name}@{version:08d}.parquet"


def held_out_of(name: str) -> tuple[str, int] | None:
    """The set and the version of a file; None where it has none."""
    found = _HELD_OUT.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def folder_of(job_directory: Path) -> Path:
    return job_directory / FOLDER
