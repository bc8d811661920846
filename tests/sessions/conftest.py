"""A live manager with sessions for each test, with short ticks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.rollouts.manager import shell as shell_module
from tests.sessions.session_plane import SessionPlane, session_plane


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "TICK_S", 0.02)


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[SessionPlane]:
    async with session_plane(tmp_path) as plane:
        yield plane
        plane.exact()
