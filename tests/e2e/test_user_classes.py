"""A user's own classes on a real Ray cluster, as the documents say that they are written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from tests.e2e.conftest import ENDS_WITHIN_S, HERE, Process, Shared

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

MODULE = "tests.e2e.workloads"


def described(**where: Any) -> RLJobBuilder:
    builder: RLJobBuilder = (
        RLJobBuilder()
        .node_num(3)
        .device_per_node(2)
        .device_type("CPU")
        .config({"c1": "v1"})
        .global_env({"e0": "v0"})
        .trainer(MODULE, "MyTrainer")
        .actor(MODULE, "MyActor")
        .total(2)
        .per_node(1)
        .env({"e1": "v1"})
        .rollout(MODULE, "MyRollout")
        .total(2)
        .per_node(1)
        .reference(MODULE, "MyReference")
        .total(2)
        .per_node(1)
    )
    return builder


def check(result: dict[str, Any]) -> None:
    assert result["all"] == [[0] * 5, [1] * 5]
    assert result["one"] == [1, 1]
    assert result["plain"] == [[0, 2, 0, {"c1": "v1"}, False], [1, 2, 0, {"c1": "v1"}, False]]
    here = [
        {"rank": rank, "world_size": 2, "local_rank": 0, "e0": "v0", "e1": "v1", "c1": "v1", "word": "here"}
        for rank in (0, 1)
    ]
    assert result["where"] == here
    assert result["scattered"] == [10, 20, 31, 41, 51]
    assert result["awaited"] == [[[0], [1]], [{**entry, "word": "there"} for entry in here]]
    assert [(index, len(out)) for index, out in result["streamed"]] == [(0, 1), (1, 2), (2, 3)]
    assert result["config"] == {"c1": "v1"}


def test_the_job_of_the_readme_runs_and_its_handle_tells_everything(shared: Shared) -> None:
    handle = described().build().submit("readme", home_path=shared.home)
    view = handle.wait(ENDS_WITHIN_S)
    assert view["job"]["phase"] == "succeeded"
    check(handle.status()["job"]["result"])
    assert len(handle.notes) == 1, handle.notes
    assert "the cluster has 1, so logical nodes share machines" in handle.notes[0]
    kinds = [event["kind"] for event in handle.events()]
    assert kinds[:2] == ["JobSubmitted", "MasterStarted"]
    assert kinds.count("VertexStarted") == 7
    lines = list(handle.logs(since=0.0))
    assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
    assert any(line["vertex"] == "actor-1" and "actor 1 of 2 is up" in line["text"] for line in lines)
    assert any(line["vertex"] == "rollout-0" and "generates 5" in line["text"] for line in lines)

    async def twins() -> None:
        assert (await handle.aio.wait(ENDS_WITHIN_S))["job"]["phase"] == "succeeded"
        assert (await handle.aio.status())["job"]["job_id"] == handle.job_id
        assert [event["kind"] async for event in handle.aio.events()] == kinds
        assert {line["vertex"] async for line in handle.aio.logs(role="actor", rank=1)} == {"actor-1"}

    asyncio.run(twins())
    handle.close()


@pytest.mark.slow
def test_a_script_holds_its_own_classes_and_starts_its_own_cluster(short_home: Path) -> None:
    """`python script.py` on a machine without Ray: it runs, and leaves nothing behind. Classes are given themselves,
    `build` is left out, and ranks on one machine know their places there."""
    import sys

    script = Process.start(short_home, str(HERE / "own_script.py"), command=(sys.executable,))
    ended = script.end(90)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "[[0, 0, 0], [1, 1, 1]] [[0, 0], [1, 1]] ()"
    assert ended.err == ""
    script.nothing_left()
