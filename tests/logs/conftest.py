from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import small_disk


@pytest.fixture
def small_mount() -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(1 << 10) as disk:
        folder = disk.path
        yield folder
