"""A plane with agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.rollouts.manager import shell as shell_module
from tests.rollouts.agent.crew import Crew
from tests.rollouts.plane import live_plane


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_module, "TICK_S", 0.02)


@pytest.fixture
async def crew(tmp_path: Path, quick_ticks: None) -> AsyncIterator[Crew]:
    # Nobody is given up for being slow: who is waited for here comes.
    async with live_plane(tmp_path, reconnect_grace_s=60.0, restart_grace_s=60.0) as plane:
        crew = Crew(plane, tmp_path)
        try:
            yield crew
        finally:
            await crew.stop()
        plane.exact()
