"""How the files of samples are named, where they are, and the outcomes that Gyre itself tells apart."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "samples"
"""Below the job's directory."""

_STEP = re.compile(r"step-(\d{8,})\.parquet")
_QUARANTINED = re.compile(r"quarantined-(\d{8,})\.parquet")

TRAINED = "trained"
QUARANTINED = "quarantined"

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


def folder_of(job_directory: Path) -> Path:
    return job_directory / FOLDER
