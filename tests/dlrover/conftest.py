"""The suite's Ray cluster, and where its jobs have their home."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="package")
def gyre_home(ray_cluster: str) -> Iterator[dict[str, Any]]:
    """What `submit(gyre=…)` takes; the cluster is one that this process is connected to."""
    with tempfile.TemporaryDirectory(prefix="gd", dir="/tmp") as folder:
        yield {"home_path": Path(folder)}
