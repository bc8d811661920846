"""The connection to the manager when the network swallows what is sent: both ends notice, and the dialling end dials
again. Every limit here is far below what the test waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.protocol.connection import ConnectionSettings
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from tests.rollouts.owners import Heard, NoCommands, NowhereKnown
from tests.rollouts.plane import TOKEN, Plane, live_plane, until
from tests.rollouts.proxy import SwallowingProxy, swallowing_proxy

NEVER_S = 3600.0
QUICK_S = 0.4
PATIENT = ConnectionSettings(heartbeat_s=NEVER_S, welcome_within_s=NEVER_S)
WATCHFUL = ConnectionSettings(heartbeat_s=QUICK_S, welcome_within_s=10.0)


@contextlib.asynccontextmanager
async def behind(proxy: SwallowingProxy, folder: Path, settings: ConnectionSettings) -> AsyncIterator[Agent]:
    agent = Agent(
        AgentSettings(name="a", max_running=1, kv_tokens=1024, cache=folder),
        FixedEndpoint(proxy.url, TOKEN),
        NoCommands(),
        connection=settings,
    )
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def trainer_behind(
    proxy: SwallowingProxy, settings: ConnectionSettings
) -> AsyncIterator[RolloutClient]:
    client = RolloutClient(FixedEndpoint(proxy.url, TOKEN), HearsOfRollouts(), term=1, connection=settings)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    """A manager that notices nothing by itself."""
    async with live_plane(tmp_path, heartbeat_s=NEVER_S, silence_timeout_s=NEVER_S) as plane:
        yield plane


async def test_an_agent_dials_again_when_the_network_swallows_everything(
    plane: Plane, tmp_path: Path
) -> None:
    async with swallowing_proxy(plane.port) as proxy, behind(proxy, tmp_path, WATCHFUL) as agent:
        await until(lambda: agent.connected)
        first = plane.manager.links["a"]
        proxy.swallow()
        await until(lambda: plane.manager.links["a"] is not first)
        assert plane.manager.links["a"].hello.incarnation == first.hello.incarnation
        await until(lambda: agent.connected)


@pytest.fixture(params=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's loop is Python's own, or uvloop's: Ray installs that in its processes wherever it finds it, and it
    comes with SGLang."""
    if request.param == "uvloop":
        monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)


@pytest.mark.usefixtures("loops")
async def test_a_trainer_dials_again_and_asks_again(plane: Plane) -> None:
    async with swallowing_proxy(plane.port) as proxy, trainer_behind(proxy, WATCHFUL) as client:
        await until(lambda: client.connected)
        proxy.swallow()
        client.request(
            "train",
            [Group(0, np.array([1, 2], np.int32))],
            n=1,
            sampling={"max_new_tokens": 3},
            seed=1,
            min_version=0,
        )
        await until(lambda: plane.manager.groups.queued == 1)


async def test_a_manager_that_takes_the_connection_and_says_nothing_is_dialled_again(
    plane: Plane, tmp_path: Path
) -> None:
    settings = ConnectionSettings(heartbeat_s=NEVER_S, welcome_within_s=QUICK_S)
    async with swallowing_proxy(plane.port) as proxy:
        proxy.swallow(new_too=True)
        async with behind(proxy, tmp_path, settings) as agent:
            await until(lambda: proxy.accepted >= 2)
            assert not agent.connected
            proxy.forward()
            await until(lambda: agent.connected)


async def test_a_connection_that_answers_pings_stands_however_quiet_it_is(plane: Plane) -> None:
    async with swallowing_proxy(plane.port) as proxy, trainer_behind(proxy, WATCHFUL) as client:
        await until(lambda: client.connected)
        trainer = plane.trainer_connection
        await asyncio.sleep(5 * QUICK_S)
        assert plane.trainer_connection is trainer
        assert proxy.accepted == 1


async def test_the_manager_drops_a_trainer_and_an_agent_that_are_silent(plane: Plane, tmp_path: Path) -> None:
    plane.change(heartbeat_s=QUICK_S)
    async with (
        swallowing_proxy(plane.port) as proxy,
        behind(proxy, tmp_path, PATIENT) as agent,
        trainer_behind(proxy, PATIENT) as client,
    ):
        await until(lambda: agent.connected and client.connected)
        link = plane.manager.links["a"]
        proxy.swallow(new_too=True)
        await until(lambda: link.connection is None and plane.trainer_connection is None)


async def test_a_defect_in_the_clients_thread_is_told() -> None:
    """Nobody else would see it: the trainer would wait for samples for ever."""

    class Defective(NowhereKnown):
        def where(self) -> None:
            raise TypeError("a defect")

    heard = Heard()
    client = RolloutClient(Defective(), heard, term=1)
    await until(lambda: len(heard.errors) == 1)
    assert "TypeError('a defect')" in heard.errors[0].message
    await asyncio.to_thread(client.close)
