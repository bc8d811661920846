"""Where publisher and instances listen, and between which networks weights travel, is what the job says."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gyre.config import WeightsSpec
from gyre.engines.errors import EngineRefused
from gyre.errors import ConfigError
from gyre.rollouts import weight_peer
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.agent.owner import Check
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.protocol.frames import FetchFault, Loaded, LoadFailed, Weights
from gyre.rollouts.weight_peer import where_to_listen
from tests.rollouts.owners import NoCommands, WeightsOwner
from tests.rollouts.plane import live_plane
from tests.rollouts.weight_plane.far_instance import NETWORK, URL, Make, free_ports
from tests.waits import GENEROUS_S


async def test_each_listens_in_the_range_of_ports(far: Make) -> None:
    ports = free_ports(4)
    plane = far(ports=ports)
    loaded = await plane.load(1)
    assert isinstance(loaded, Loaded)
    first, last = map(int, ports.split("-"))
    found = {int(address.rpartition(":")[2]) for address in (plane.source.address, loaded.source)}
    assert len(found) == 2
    assert all(first <= port <= last for port in found)


def test_a_range_that_is_taken_is_named(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_peer, "PORT_WITHIN_S", 0.0)
    ports = free_ports(1)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    with taken, pytest.raises(ConfigError, match=f"weights.ports: none of {ports}"):
        far(ports=ports)
    assert far(ports=ports).source.address.endswith(ports.partition("-")[0])


def test_a_port_that_becomes_free_is_waited_for(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(1)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    monkeypatch.setattr(weight_peer.time, "sleep", lambda seconds: taken.close())
    assert far(ports=ports).source.address.endswith(ports.partition("-")[0])


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        (NETWORK, ("127.0.0.1", "127.0.0.1")),
        ("0.0.0.0", ("0.0.0.0", "127.0.0.1")),
    ],
)
def test_where_it_listens_and_how_others_reach_it(bind: str, expected: tuple[str, str]) -> None:
    assert where_to_listen(bind, URL) == expected


@pytest.mark.parametrize("bind", ["198.51.100.0/24", "198.51.100.7"])
def test_an_address_that_this_machine_has_not_is_named(far: Make, bind: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.bind"):
        far(bind=bind)


def test_a_machine_that_joins_has_its_own_address_and_ports(tmp_path: Path) -> None:
    one = AgentWeights(
        tmp_path,
        WeightsOwner(),
        fetch_timeout_s=1.0,
        bind="127.0.0.1",
        ports="7100",
    )
    one.settle(WeightsSpec(bind="10.0.0.0/8", ports="1-9", streams=3))
    assert (one._plane.bind, one._plane.ports, one._plane.streams) == ("127.0.0.1", "7100", 3)


async def test_an_instance_that_cannot_listen_as_the_settings_say_leaves_and_says_why(tmp_path: Path) -> None:
    settings = AgentSettings(
        name="a", max_running=1, kv_tokens=1024, cache=tmp_path / "a", bind="198.51.100.7"
    )

    async with live_plane(tmp_path) as plane:
        await (await plane.trainer()).publish(0)
        with pytest.raises(
            ConfigError, match=r"weights\.bind: this machine has not the address 198\.51\.100\.7"
        ):
            await asyncio.wait_for(
                Agent(settings, FixedEndpoint(plane.url, "secret"), NoCommands()).run(), GENEROUS_S
            )


async def test_of_what_was_held_before_nothing_is_left_where_there_is_nothing_new(far: Make) -> None:
    plane = far()
    await plane.load(1)
    plane.instance.settle(WeightsSpec(bind="198.51.100.7"))
    with pytest.raises(ConfigError):
        await plane.load(2)
    assert plane.instance.source == ""
    plane.instance.settle(WeightsSpec())
    assert isinstance(await plane.load(3), Loaded)


async def test_an_engine_that_rejects_a_version_serves_the_one_before_and_is_offered_the_next(
    far: Make,
) -> None:
    plane = far()
    assert isinstance(await plane.load(1), Loaded)
    serve = plane.serve

    async def reject(folder: Path, weights: Weights, check: Check) -> None:
        raise EngineRefused("the tensor w has another shape.")

    plane.serve = reject
    failed = await plane.load(2)
    assert isinstance(failed, LoadFailed)
    assert (failed.version, "another shape" in failed.error) == (2, True)
    assert plane.instance.version == 1
    assert (plane.folders[-1] / "model.safetensors").exists()
    plane.serve = serve
    assert isinstance(await plane.load(3), Loaded)
    assert plane.instance.version == 3


async def test_weights_come_from_the_networks_of_senders_alone(far: Make) -> None:
    plane = far(sender_networks=["10.0.0.0/8"], gives_up_s=0.5)
    assert isinstance(await plane.load(1), LoadFailed)
    await asyncio.sleep(0)
    (trouble, *_) = [frame for frame in plane.frames if isinstance(frame, FetchFault)]
    assert "networks" in trouble.evidence
    assert plane.source.server.sent_bytes == 0


async def test_weights_go_to_the_networks_of_receivers_alone(far: Make) -> None:
    plane = far(receiver_networks=["10.0.0.0/8"], gives_up_s=0.5)
    assert isinstance(await plane.load(1), LoadFailed)
    assert plane.source.server.sent_bytes == 0


async def test_both_networks_permit_what_they_name(far: Make) -> None:
    assert isinstance(await far(sender_networks=[NETWORK], receiver_networks=[NETWORK]).load(1), Loaded)
