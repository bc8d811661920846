"""By which way and in which form weights travel is what the job says, and the journal hears of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import WeightsSpec
from gyre.rollouts.plane import versions as manager_weights
from gyre.rollouts.plane.versions import PolicyVersions
from gyre.rollouts.protocol.frames import Loaded, LoadFailed, Weights
from gyre.weights.codecs.fp8 import round_fp8
from gyre.workloads.rollout_vertices import JOURNALLED
from tests.rollouts.plane import live_plane, until
from tests.rollouts.weight_plane.far_instance import MATRIX, Make, policy


@pytest.mark.parametrize(
    ("transports", "here", "way"),
    [
        ("auto", True, "linked"),
        ("auto", False, "tcp"),
        ("tcp", True, "tcp"),
        ("shm", True, "linked"),
        (["tcp", "shm"], True, "linked"),
    ],
)
async def test_the_transport_is_the_one_that_was_asked_for(
    far: Make, transports: Any, here: bool, way: str
) -> None:
    loaded = await far(transports=transports).load(1, here=here)
    assert isinstance(loaded, Loaded)
    assert loaded.way == way


async def test_shared_memory_alone_does_not_reach_another_machine(far: Make) -> None:
    failed = await far(transports="shm", gives_up_s=0.5).load(1)
    assert isinstance(failed, LoadFailed)
    assert "weights.transports" in failed.error


@pytest.mark.parametrize(
    ("codec", "first", "then", "bytes_less_than"),
    [
        ("none", "none", "none", 1.01),
        ("delta", "none", "delta", 0.1),
        ("planes", "planes", "planes", 0.8),
        ("fp8", "fp8", "delta", 0.1),
    ],
)
async def test_the_codec_is_the_one_that_was_asked_for(
    far: Make, codec: str, first: str, then: str, bytes_less_than: float
) -> None:
    plane = far(codec=codec, chunk_bytes="1MiB")
    for version, expected in ((1, first), (2, then)):
        loaded = await plane.load(version)
        assert isinstance(loaded, Loaded)
        assert loaded.codec == expected
    assert then in loaded.why
    size = plane.manifest["size_bytes"]
    assert int(loaded.fetched.split(" bytes")[0].rpartition(" ")[2]) < bytes_less_than * size


@pytest.mark.parametrize(
    ("imports", "expected"), [(True, "tests.workloads.own_plugins:deflate"), (False, "none")]
)
async def test_a_codec_of_the_jobs_own_is_used_where_the_instance_names_it_too(
    far: Make, imports: bool, expected: str
) -> None:
    """What only the manager names is not imported."""
    own = "tests.workloads.own_plugins:deflate"
    loaded = await far(codec=own, chunk_bytes="1MiB", imports=own if imports else "").load(1)
    assert isinstance(loaded, Loaded)
    assert loaded.codec == expected


async def test_fp8_rounds_what_instances_get_to_bfloat16_whatever_the_actor_trains_in(far: Make) -> None:
    from safetensors.torch import load_file

    plane = far(codec="fp8")
    await plane.load(1, dtype=torch.float32)
    found = load_file(plane.folders[-1] / "model.safetensors")
    exact = policy(1, dtype=torch.float32)
    assert torch.equal(found[MATRIX], round_fp8(exact[MATRIX]).to(torch.bfloat16))
    assert torch.equal(found["model.norm.weight"], exact["model.norm.weight"].to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "found"), [("trained", "float32"), ("bfloat16", "bfloat16")])
async def test_the_dtype_of_what_instances_get(far: Make, dtype: str, found: str) -> None:
    plane = far(dtype=dtype)
    await plane.load(1, dtype=torch.float32)
    assert {spec["dtype"] for spec in plane.manifest["tensors"]} == {found}


async def test_streams_chunks_and_stall_timers(far: Make) -> None:
    plane = far(streams=5, chunk_bytes="1MiB", stall_timeout_s=7.5)
    await plane.load(1, size=2000)
    assert plane.manifest["chunk_bytes"] == 1 << 20
    assert plane.instance._holdings is not None
    receiver = plane.instance._holdings.receiver
    assert (receiver.streams, receiver.stall_s) == (5, 7.5)
    assert plane.source.server._stall_s == 7.5


def test_ways_that_take_turns_are_told_of_once_a_minute() -> None:
    versions, told = PolicyVersions(), []
    ways = [("tcp", "none"), ("here", "none"), ("tcp", "delta"), ("", ""), ("linked", "none")]
    for second in range(121):
        way, codec = ways[second % len(ways)]
        frame = Loaded(version=second, checksum="c", fetch_s=0.1, load_s=0.1, way=way, codec=codec)
        if versions.way_changed("a", frame, float(second)) is not None:
            told.append((second, way, codec))
    assert told == [(0, "tcp", "none"), (62, "tcp", "delta")]
    for second in (121, 122, 125):  # what it has come to is told in the end
        frame = Loaded(version=second, checksum="c", fetch_s=0.1, load_s=0.1, way="tcp", codec="none")
        if versions.way_changed("a", frame, float(second)) is not None:
            told.append((second, "tcp", "none"))
    assert told[2:] == [(122, "tcp", "none")]


async def test_the_manager_says_how_and_tells_the_journal_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_weights, "WAY_TOLD_EACH_S", 0.0)
    wanted = WeightsSpec(transports=["tcp"], codec="delta", streams=3, ports="7100-7107", encrypt=True)
    async with live_plane(tmp_path, weights=wanted) as plane:
        trainer = await plane.trainer()
        agent = await plane.agent("a")
        welcome = await agent.dial()
        assert welcome.plane == wanted
        for version, codec in enumerate(["none", "delta", "delta", "none"]):
            await trainer.publish(version)
            weights = await agent.wire.expect(Weights)
            await agent.wire.send(
                Loaded(
                    version=version,
                    checksum=weights.checksum,
                    fetch_s=0.1,
                    load_s=0.1,
                    way="tcp",
                    codec=codec,
                    why=f"{codec} was asked for",
                )
            )
        await until(lambda: len(plane.told("TransferChosen")) == 3)
        assert [(told["version"], told["codec"]) for told in plane.told("TransferChosen")] == [
            (0, "none"),
            (1, "delta"),
            (3, "none"),
        ]
        assert plane.told("TransferChosen")[1] == {
            "instance": "a",
            "version": 1,
            "transport": "tcp",
            "codec": "delta",
            "why": "delta was asked for",
        }
    assert "TransferChosen" in JOURNALLED
