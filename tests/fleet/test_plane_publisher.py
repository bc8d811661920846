"""A publisher that serves its versions itself, over a door whose manager sees none of its folders: gyre-verl's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gyre.config import WeightsSpec
from gyre.rollouts.agent.owner import Check
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.protocol.frames import Loaded, Weights
from tests.fleet.fleet_plane import FleetPlane
from tests.rollouts.owners import WeightsOwner
from tests.rollouts.plane import SOON_S, ScriptedAgent, until

ROOT = Path(__file__).parents[2]
PACKAGE = str(ROOT / "integrations" / "gyre-verl")
sys.path.insert(0, PACKAGE)
try:
    from gyre_verl.door import Door, DoorError
    from gyre_verl.plane import PlaneSource
finally:
    sys.path.remove(PACKAGE)  # it would be the folder that other tests' classes are found in

CONFIG = {"model_type": "qwen3", "hidden_size": 8}

PUBLISHES = """
import sys, time
from pathlib import Path
import torch
from gyre_verl.door import Door
from gyre_verl.plane import PlaneSource

url, place = sys.argv[1], Path(sys.argv[2])
door = Door(url, "trainer-key", patience_s=20.0)
source = PlaneSource(door, place / "model", root=place / "shm")
told = source.put({"model.norm.weight": torch.arange(300_000, dtype=torch.float32)}, 1)
door.publish(1, told)
print("published", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The publisher's machine."""
    model = tmp_path / "far" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "far"


@pytest.fixture
def trainer(plane: FleetPlane, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that publishes version 1 and serves it."""
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHES, plane.url, str(place)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGE}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Fetching(WeightsOwner):
    """What an instance does with a version that it is told of: it fetches it, without an engine."""

    def __init__(self, plane: FleetPlane, folder: Path, key: str) -> None:
        super().__init__()
        self._plane, self._key = plane, key
        self.tensors: dict[str, torch.Tensor] = {}
        self.config: Any = None
        self.weights = AgentWeights(folder, self, fetch_timeout_s=SOON_S)

    async def serve(self, folder: Path, weights: Weights, check: Check) -> None:
        await check()
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())

    async def load(self, weights: Weights) -> Loaded:
        await self.weights.load(weights, self._plane.url, self._key)
        loaded = self.frames[-1]
        assert isinstance(loaded, Loaded), loaded
        return loaded


async def fetched(plane: FleetPlane, name: str) -> tuple[ScriptedAgent, Fetching, Loaded]:
    """An instance that joins, fetches what it is told of, and says so."""
    agent = ScriptedAgent(plane, name)
    welcome = await agent.dial()
    assert welcome.weights is not None
    assert not welcome.weights.local_path, "the manager was told of a folder"
    fetching = Fetching(plane, plane.tmp_path / name, welcome.weights_key)
    loaded = await fetching.load(welcome.weights)
    await agent.wire.send(loaded)
    return agent, fetching, loaded


async def test_a_version_outlives_the_trainer_that_served_it(
    plane: FleetPlane, place: Path, trainer: subprocess.Popen[str]
) -> None:
    assert trainer.stdout is not None
    assert await asyncio.to_thread(trainer.stdout.readline) == "published\n"
    _, first, loaded = await fetched(plane, "a")
    try:
        await until(lambda: plane.manager.groups.instances["a"].version == 1)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        _, second, _ = await fetched(plane, "b")
        second.weights.close()
        told = plane.manager.versions.published
        assert told is not None
        assert loaded.source not in told.sources, "the manager knows the instance's by its own word"
        for one in first, second:
            assert torch.equal(one.tensors["model.norm.weight"], torch.arange(300_000, dtype=torch.float32))
            assert one.config == CONFIG
    finally:
        first.weights.close()


@pytest.mark.parametrize("key", ["other", "spot"])
async def test_the_planes_key_is_told_to_publishers_alone(plane: FleetPlane, key: str) -> None:
    status, told = await plane.get("/v1/policies/plane", "trainer-key")
    assert (status, json.loads(told)["weights"]) == (200, WeightsSpec().model_dump(mode="json"))
    status, refusal = await plane.get("/v1/policies/plane", f"{key}-key")
    assert status == 401
    assert json.loads(told)["key"].encode() not in refusal


async def test_a_key_without_the_scope_is_refused_in_a_sentence(plane: FleetPlane, place: Path) -> None:
    door = Door(plane.url, "other-key", patience_s=20.0)
    with pytest.raises(DoorError, match="may not serve versions: it has not the scope publish"):
        await asyncio.to_thread(PlaneSource, door, place / "model", root=place / "shm")


async def test_a_machine_that_cannot_listen_as_it_is_told_says_so(plane: FleetPlane, place: Path) -> None:
    door = Door(plane.url, "trainer-key", patience_s=20.0)
    with pytest.raises(DoorError, match=r"weights\.bind: this machine has not the address"):
        await asyncio.to_thread(PlaneSource, door, place / "model", bind="203.0.113.9", root=place / "shm")


async def test_a_source_that_the_manager_cannot_reach_is_refused(plane: FleetPlane, place: Path) -> None:
    door = Door(plane.url, "trainer-key", patience_s=20.0)
    source = await asyncio.to_thread(PlaneSource, door, place / "model", root=place / "shm")
    try:
        told: dict[str, Any] = await asyncio.to_thread(source.put, {"a": torch.ones(3)}, 1)
        assert told["dial"] is True
        for changed, why in (
            ({"checksum": "0" * 32}, "has no version with this checksum"),
            ({"sources": ["127.0.0.1:9"]}, "does not answer the manager"),
            ({"sources": ["nowhere"]}, "of host:port"),
            ({"sources": ["127.0.0.1:9"] * 17}, "at most 16"),
        ):
            with pytest.raises(DoorError, match=why):
                await asyncio.to_thread(door.publish, 1, {**told, **changed})
        assert plane.manager.versions.newest == -1
        published = await asyncio.to_thread(
            door.publish, 1, {**told, "sources": ["127.0.0.1:9", source.address]}
        )
        assert published == {"version": 1, "checksum": told["checksum"]}
    finally:
        source.close()


async def test_a_source_outside_of_the_senders_networks_is_refused(plane: FleetPlane, place: Path) -> None:
    publishing = plane.door._publishing
    assert publishing._plane is not None
    publishing._plane._weights = WeightsSpec(sender_networks=["10.0.0.0/8"])
    for address, why in (("127.0.0.1:9", "none of weights.sender_networks"), ("host:9", "no IP address")):
        body = {"version": 1, "checksum": "0" * 32, "sources": [address], "dial": True}
        status, told = await plane.post("/v1/policies", body, "trainer-key")
        assert (status, told["code"]) == (422, "not_reachable")
        assert why in told["message"]


async def test_a_new_manager_knows_the_models_end_tokens_again(plane: FleetPlane, place: Path) -> None:
    """Sources say nothing of them, the job's own model does."""
    model = plane.tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 2}))
    (model / "model.safetensors").write_bytes(b"0" * 100)
    await plane.door.publish_first(model)
    body = {"version": 1, "checksum": "c" * 32, "sources": ["10.0.0.5:7000"]}
    assert (await plane.post("/v1/policies", body, "trainer-key"))[0] == 200
    await plane.kill()
    await plane.start()
    await plane.door.publish_first(model)
    assert plane.door._publishing.words.stops == (2,)
