"""Engines that are started while the first version is made, over the folder that it is made from."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gyre.engines.http_client import EngineClient
from gyre.rollouts.agent.agent import Agent
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.protocol.frames import Publish
from gyre.workloads.gang.weight_source import WeightSource
from tests.rollouts.agent.crew import Crew
from tests.rollouts.plane import SOON_S, ScriptedTrainer, small_folder, until


def base_folder(tmp_path: Path, **changes: Any) -> Path:
    """Of the model that `ScriptedTrainer` publishes, with other weights than any version of it."""
    return small_folder(tmp_path / "base", 77, **changes).path


async def ready_early(agent: Agent) -> int:
    """The process of its engine, once that has answered; nobody has a version yet."""
    host = agent._host
    await until(lambda: host._early is not None and host._early[1].done())
    (engine,) = host.engines
    assert engine.pid is not None
    return engine.pid


async def tokens_of(trainer: ScriptedTrainer, purpose: str) -> list[bytes]:
    await trainer.ask([0], n=2, limit=6, purpose=purpose)
    (group,) = (await trainer.groups(1, purpose)).values()
    return [sample.token_ids.tobytes() for sample in group.samples]


async def test_it_serves_the_first_version_and_nothing_before(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[str] = []

    async def freeze(client: EngineClient) -> bool:
        frozen.append(client.url)
        return True

    monkeypatch.setattr(EngineClient, "freeze_gc", freeze)
    agent = crew.start("a", base=base_folder(tmp_path))
    early = await ready_early(agent)
    (instance,) = crew.plane.manager.status()["instances"]
    assert instance["version"] == -1
    assert agent.version == -1
    assert len(frozen) == 1, "its garbage collector would look at all that it has imported, again and again"
    trainer = await crew.plane.trainer()
    await trainer.publish(0)
    await crew.serving("a")
    assert [engine.pid for engine in agent._host.engines] == [early]
    assert [told["instance"] for told in crew.plane.told("EngineStarted")] == ["a"]
    limits = crew.plane.told("EngineLimited")
    assert [told["instance"] for told in limits] == ["a"]
    drawn = await tokens_of(trainer, "train")
    agent.drain("the other's turn")
    await crew.tasks["a"]
    crew.start("b")
    await crew.serving("b")
    assert await tokens_of(trainer, "calm") == drawn, "these are not the first version's weights"


async def test_one_of_another_model_is_replaced(crew: Crew, tmp_path: Path) -> None:
    agent = crew.start("a", base=base_folder(tmp_path, hidden=16))
    early = await ready_early(agent)
    await (await crew.plane.trainer()).publish(0)
    await crew.serving("a")
    (engine,) = agent._host.engines
    assert engine.pid != early
    assert not psutil.pid_exists(early)
    assert crew.plane.told("EngineStartFailed") == []


async def test_one_that_does_not_start_is_started_over_the_first_version(crew: Crew, tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    (base / "model.safetensors").unlink()
    agent = crew.start("a", base=base)
    await until(lambda: agent._host._early is not None and agent._host._early[1].done())
    await (await crew.plane.trainer()).publish(0)
    await crew.serving("a")
    assert crew.plane.told("EngineStartFailed") == [], "only a start over a version counts"


async def test_one_that_dies_before_it_has_a_version_is_replaced(crew: Crew, tmp_path: Path) -> None:
    agent = crew.start("a", base=base_folder(tmp_path))
    early = await ready_early(agent)
    os.killpg(early, signal.SIGKILL)
    (engine,) = agent._host.engines
    await until(lambda: engine.death is not None)
    await (await crew.plane.trainer()).publish(0)
    await crew.serving("a")
    assert [one.pid for one in agent._host.engines] != [early]
    assert crew.plane.told("EngineDied") == [], "it had nobody's work"


async def test_an_agent_that_ends_before_there_is_a_version_leaves_no_engine(
    crew: Crew, tmp_path: Path
) -> None:
    agent = crew.start("a", base=base_folder(tmp_path))
    await until(lambda: agent._host.engines and agent._host.engines[0].pid)
    other = crew.start("b", base=base_folder(tmp_path / "of_b"))
    pids = [agent._host.engines[0].pid, await ready_early(other)]
    for task in crew.tasks.values():  # one that starts, or has just started, and one that stands
        task.cancel()
    await asyncio.gather(*crew.tasks.values(), return_exceptions=True)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_it_starts_while_a_version_is_fetched_from_another_machine(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = WeightSource(tmp_path, crew.weights_endpoint, root=tmp_path / "far")
    base = base_folder(tmp_path)
    config = json.loads((base / "config.json").read_text())
    told = far.publish({"x": torch.full((999,), 1.0)}, config, version=0, step=0)
    trainer = await crew.plane.trainer()
    await trainer.wire.send(Publish(version=0, checksum=told["checksum"], path="", sources=[far.address]))
    await until(lambda: crew.plane.manager.versions.served is not None)
    fetch, comes = AgentWeights._fetch, threading.Event()

    def slowly(weights: AgentWeights, *given: Any) -> Any:
        assert comes.wait(SOON_S)
        return fetch(weights, *given)

    monkeypatch.setattr(AgentWeights, "_fetch", slowly)
    agent = crew.start("a", base=base)
    early = await ready_early(agent)
    assert agent.version == -1
    comes.set()
    await crew.serving("a")
    assert [engine.pid for engine in agent._host.engines] == [early]
    assert len((await tokens_of(trainer, "train"))[0]) > 0
    far.close()


async def test_who_comes_when_there_is_a_version_starts_over_it(crew: Crew, tmp_path: Path) -> None:
    await (await crew.plane.trainer()).publish(0)
    agent = crew.start("a", base=base_folder(tmp_path))
    await crew.serving("a")
    assert agent._host._early is None
    assert len(agent._host.engines) == 1
