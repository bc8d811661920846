"""What a trainer without a checkpoint asks for: who acknowledged which policy, and its bytes from there."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from gyre.config import WeightsSpec
from gyre.rollouts.manager import shell as shell_module
from gyre.weights.version.arena import read_manifest
from gyre.workloads.gang.weight_copy import FetchedCopy, WeightCopies
from tests.rollouts.agent.test_agent import Crew
from tests.rollouts.plane import TOKEN, live_plane


@pytest.mark.timeout(60)
async def test_a_policy_is_found_and_fetched_from_the_instance_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_module, "TICK_S", 0.02)
    job = tmp_path / "job"
    job.mkdir()
    copies = WeightCopies(job)
    assert copies.newest() is None, "nobody knows where the manager is"
    async with live_plane(tmp_path) as plane:
        (job / "rollouts.json").write_text(json.dumps({"url": plane.url, "token": TOKEN}))
        assert await asyncio.to_thread(copies.newest) is None, "no instance has joined"
        crew = Crew(plane, tmp_path)
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = crew.start("one")
        try:
            await crew.serving("one")
            with monkeypatch.context() as patch:
                patch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody's business, so nobody need be there
                patch.delenv("no_proxy", raising=False)
                patch.setattr(
                    urllib.request, "_opener", None
                )  # it would know no proxy but those it began with
                copy = await asyncio.to_thread(copies.newest)
            assert copy is not None
            assert (copy.version, copy.newest) == (0, 0)
            assert copy.checksum == agent._weights.checksum
            fetched = await asyncio.to_thread(
                lambda: FetchedCopy(
                    job,
                    "actor-0",
                    version=copy.version,
                    checksum=copy.checksum,
                    sources=[(address, "") for address in copy.sources],
                    settings=WeightsSpec(ports=copy.sources[0].rpartition(":")[2]),  # the only one is taken
                    root=tmp_path / "memory",
                    give_up_s=10.0,
                )
            )
            assert read_manifest(fetched.path).checksum == copy.checksum
            fetched.close()
            fetched.close()
            assert list((tmp_path / "memory").iterdir()) == []
        finally:
            await crew.stop()
    assert await asyncio.to_thread(copies.newest) is None, "the manager is gone"
