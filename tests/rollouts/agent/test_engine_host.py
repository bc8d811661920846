"""An engine starts while its folder is verified, and serves when both are done."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from gyre.engines.errors import EngineNotStarted
from gyre.rollouts.agent.engine_host import EngineHost
from gyre.weights.version.manifest import WeightMismatch
from tests.rollouts.agent.crew import Crew
from tests.rollouts.owners import EngineOwner
from tests.rollouts.plane import SOON_S, small_folder, until


async def nothing() -> None:
    pass


@pytest.fixture
def host(crew: Crew) -> EngineHost:
    return EngineHost(crew.commands("a", 0.01), EngineOwner(), ready_within_s=SOON_S, clock=time)


async def engine_of(host: EngineHost) -> int:
    await until(lambda: host.engines and host.engines[0].pid)
    pid = host.engines[0].pid
    assert pid is not None
    return pid


async def test_it_starts_meanwhile_and_is_nobodys_before(host: EngineHost, tmp_path: Path) -> None:
    verified = asyncio.Event()

    async def check() -> None:
        await verified.wait()

    serving = asyncio.create_task(host.serve(small_folder(tmp_path / "v", 0).path, "0", "in_place", check))
    pid = await engine_of(host)
    (engine,) = host.engines
    await until(lambda: engine._reserved is None)  # it answers
    assert host.client is None, "its folder is not verified"
    verified.set()
    assert await serving is None
    assert host.client is not None
    assert engine.pid == pid
    for task in host.stop_watching():
        task.cancel()
    await host.client.close()
    await host.close()


async def test_one_over_other_bytes_is_ended(host: EngineHost, tmp_path: Path) -> None:
    found = asyncio.Event()

    async def check() -> None:
        await found.wait()
        raise WeightMismatch("other bytes")

    serving = asyncio.create_task(host.serve(small_folder(tmp_path / "v", 0).path, "0", "in_place", check))
    pid = await engine_of(host)
    found.set()
    with pytest.raises(WeightMismatch, match="other bytes"):
        await serving
    assert (host.client, host.engines) == (None, [])
    assert not psutil.pid_exists(pid)


async def test_where_both_fail_the_bytes_are_why(host: EngineHost, tmp_path: Path) -> None:
    async def check() -> None:
        await until(lambda: not host.engines)
        raise WeightMismatch("other bytes")

    folder = small_folder(tmp_path / "v", 0).path
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineNotStarted):
        await host.serve(folder, "0", "in_place", nothing)
    with pytest.raises(WeightMismatch, match="other bytes"):
        await host.serve(folder, "0", "in_place", check)
    assert host.engines == []


async def test_who_is_called_off_leaves_no_engine(host: EngineHost, tmp_path: Path) -> None:
    serving = asyncio.create_task(host.serve(small_folder(tmp_path / "v", 0).path, "0", "in_place", nothing))
    pid = await engine_of(host)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert host.engines == []
    assert not psutil.pid_exists(pid)
