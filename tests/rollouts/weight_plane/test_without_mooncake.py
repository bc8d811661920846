"""Where Mooncake is not installed, a job that asks for it hears so, and others do without."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.config import WeightsSpec
from gyre.errors import ConfigError
from gyre.rollouts import weight_peer
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.protocol.frames import Loaded
from gyre.rollouts.weight_peer import check_transports
from tests.rollouts.owners import NoCommands
from tests.rollouts.plane import live_plane
from tests.rollouts.weight_plane.far_instance import NETWORK, TOKEN, URL, Make, free_ports
from tests.waits import GENEROUS_S


@pytest.fixture
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)


@pytest.mark.usefixtures("without_mooncake")
@pytest.mark.parametrize("transports", ["mooncake", ["mooncake", "tcp"]])
def test_mooncake_by_name_where_it_is_not_installed_is_one_clear_error(far: Make, transports: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"weights\.transports: mooncake given, but .* cannot be imported"
    ) as told:
        far(transports=transports)
    assert "gyre-rl[mooncake]" in told.value.hint


@pytest.mark.usefixtures("without_mooncake")
async def test_an_instance_whose_machine_has_no_mooncake_leaves_and_says_why(tmp_path: Path) -> None:
    settings = AgentSettings(name="a", max_running=1, kv_tokens=1024, cache=tmp_path)

    async with live_plane(tmp_path, weights=WeightsSpec(transports=["mooncake"])) as plane:
        with pytest.raises(ConfigError, match="mooncake"):
            await asyncio.wait_for(
                Agent(settings, FixedEndpoint(plane.url, "secret"), NoCommands()).run(), GENEROUS_S
            )


@pytest.mark.usefixtures("without_mooncake")
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "weights.trusted_network does not say"),
        ({"receiver_networks": [NETWORK]}, "weights.trusted_network does not say"),
        ({"trusted_network": True}, "cannot be imported"),
        ({"trusted_network": True, "encrypt": True}, "does not encrypt"),
    ],
)
async def test_auto_does_without_mooncake_and_says_why(far: Make, settings: Any, why: str) -> None:
    loaded = await far(**settings).load(1)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"
    assert "mooncake not: " in loaded.why
    assert why in loaded.why


def test_a_party_that_cannot_be_set_up_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def refuse(settings: WeightsSpec, reach: str) -> Any:
        made.append(reach)
        raise ConfigError("no such device")

    monkeypatch.setattr(weight_peer, "_open_mooncake", refuse)
    monkeypatch.setattr(weight_peer, "PORT_WITHIN_S", 0.0)
    ports = free_ports(1)
    settings = WeightsSpec(ports=ports)
    with pytest.raises(ConfigError, match="no such device"):
        weight_peer.WeightPeer(tmp_path / "root", "a test", TOKEN, settings, url=URL)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    with taken, pytest.raises(ConfigError, match=r"weights\.ports"):
        weight_peer.WeightPeer(tmp_path / "root", "a test", TOKEN, settings, url=URL)
    assert made == ["127.0.0.1"]  # no engine where there is no port
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_other_transports_need_no_mooncake(without_mooncake: None) -> None:
    for transports in (["auto"], ["tcp"], ["shm", "tcp"]):
        check_transports(WeightsSpec(transports=transports))
