"""The vertex of the role `agent`: it runs sessions beside its host, says how it is, and hands back what it has."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gyre.agents import AgentWorker, vertex
from gyre.errors import ConfigError, UserCodeError
from gyre.rollouts.protocol.endpoint import write_endpoint
from gyre.workloads.base import WorkloadContext
from tests.agents.given_agents import GATE
from tests.agents.manager import SECRET, Manager, served
from tests.waits import GENEROUS_S


@contextmanager
def manager_at(directory: Path, manager: Manager) -> Iterator[None]:
    """The manager at a real port, in a loop on a thread of its own."""
    ready, found = threading.Event(), dict[str, Any]()

    async def serve() -> None:
        async with served(manager) as url:
            found["loop"], found["over"] = asyncio.get_running_loop(), asyncio.Event()
            write_endpoint(directory, {"url": url, "secret": SECRET, "token": "t"})
            ready.set()
            await found["over"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(GENEROUS_S)
    try:
        yield
    finally:
        found["loop"].call_soon_threadsafe(found["over"].set)
        thread.join(GENEROUS_S)


@contextmanager
def worker_of(directory: Path, function: str, **keys: Any) -> Iterator[AgentWorker]:
    made = AgentWorker()
    config = {"agent": {"function": f"tests.agents.given_agents:{function}", **keys}}
    made.context = WorkloadContext("job", "agent", 0, 1, config=config, directory=directory)
    made.setup()
    try:
        yield made
    finally:
        made.teardown()


def wait_until(come: Callable[[], bool], within_s: float = GENEROUS_S) -> None:
    until = time.monotonic() + within_s
    while not come():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def ended(manager: Manager) -> list[str]:
    return [one.ended["outcome"] for one in manager.sessions.values() if one.ended]


@pytest.mark.parametrize("function", ["scores", "asks_an_sdk"])
def test_it_runs_what_the_job_names(tmp_path: Path, function: str) -> None:
    manager = Manager()
    manager.add(3)
    with manager_at(tmp_path, manager), worker_of(tmp_path, function) as worker:
        wait_until(lambda: len(ended(manager)) == 3)
        assert ended(manager) == ["scored"] * 3
        wait_until(lambda: worker.health()["ended"]["scored"] == 3, GENEROUS_S)
        assert worker.health()["sessions"] == 0


def test_it_hands_its_sessions_back_when_it_is_stopped(tmp_path: Path) -> None:
    manager = Manager()
    (one,) = manager.add()
    with manager_at(tmp_path, manager):
        with worker_of(tmp_path, "stays") as worker:
            wait_until(lambda: worker.health()["sessions"] == 1, GENEROUS_S)
            assert one.owner == "agent-0"
        assert (one.owner, one.ended) == ("", None)


def test_beats_go_on_while_the_code_blocks_its_loop_until_it_is_said_to_be_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.agents.runner.BEAT_EVERY_S", 0.05)
    GATE.clear()
    manager = Manager()
    manager.add()
    with manager_at(tmp_path, manager), worker_of(tmp_path, "blocks") as worker:
        try:
            wait_until(lambda: worker.health()["sessions"] == 1, GENEROUS_S)
            before = manager.beats
            wait_until(lambda: manager.beats > before + 5, GENEROUS_S)
            monkeypatch.setattr(vertex, "BLOCKED_S", time.monotonic() - worker.runner.last_turn - 0.001)
            with pytest.raises(UserCodeError, match=r"blocked the event loop .* session\.tool"):
                worker.health()
        finally:
            GATE.set()


def test_a_worker_that_the_manager_refuses_ends(tmp_path: Path) -> None:
    with manager_at(tmp_path, Manager()):
        told = (tmp_path / "rollouts.json").read_text().replace(SECRET, "another")
        (tmp_path / "rollouts.json").write_text(told)
        with worker_of(tmp_path, "scores") as worker:

            def has_stopped() -> bool:
                try:
                    worker.health()
                except RuntimeError:
                    return True
                return False

            wait_until(has_stopped, GENEROUS_S)


def test_a_function_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"config\.agent\.function: .* has no 'score'.*scores"),
        worker_of(tmp_path, "score"),
    ):
        pass
