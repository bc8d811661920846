from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import mounted


@pytest.fixture
def small_mount() -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(1) as folder:
        yield folder
