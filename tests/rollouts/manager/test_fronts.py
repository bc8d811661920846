"""What the manager does for its fronts: without a good token nobody reaches a route that is not said to be open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web

from gyre.rollouts.manager import rollout_manager
from gyre.rollouts.manager.front import Front
from gyre.rollouts.manager.trainer_front import TrainerFront
from gyre.rollouts.plane.settings import ManagerSettings
from tests.rollouts.plane import TOKEN, live_plane


class Careless(TrainerFront):
    """Its routes ask nobody for a token."""

    open_paths = frozenset({"/open"})

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/careless", self._answer), web.get("/open", self._answer)]

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(text="here")


async def test_a_route_that_checks_nothing_is_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fronts_of(settings: ManagerSettings) -> Sequence[type[Front]]:
        return (Careless,)

    monkeypatch.setattr(rollout_manager, "fronts_of", fronts_of)
    async with live_plane(tmp_path) as plane:
        assert (await plane.get("/careless", token="forged"))[0] == 401
        assert await plane.get("/careless", token=TOKEN) == (200, b"here")
        assert await plane.get("/open", token="forged") == (200, b"here")
