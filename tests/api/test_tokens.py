"""Join tokens from end to end: the command line over REST to a real master, its journal, and a real rollout manager."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.handle import AsyncJobHandle, JobHandle
from gyre.api.rest import RestServer, create_app
from gyre.config import ROLLOUT_MANAGER
from gyre.errors import NotFound, Unauthorized
from gyre.rollouts.agent.join import run_agent
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.protocol.frames import Drain, Reject
from gyre.rollouts.trainer.plane_client import RolloutClient
from gyre.store import open_store
from tests.doubles.standing_job import StandingJob, small_spec
from tests.rollouts.agent.crew import Crew
from tests.rollouts.owners import Heard
from tests.rollouts.plane import JOIN_TOKEN, SOON_S, TOKEN, Plane, until


class Job:
    """A job with a rollout plane, and the command line at its master."""

    def __init__(self, master: StandingJob, url: str, plane: Plane) -> None:
        self.master, self.url, self.plane = master, url, plane

    async def gyre(self, *arguments: str) -> Any:
        """What a verb writes as JSON."""
        said = await asyncio.to_thread(CliRunner().invoke, main, ["--url", self.url, *arguments, "--json"])
        assert said.exit_code == 0, said.output
        return json.loads(said.stdout)

    async def token(self, name: str, *options: str) -> str:
        """A new token that the manager has heard of."""
        made = await self.gyre("token", "create", "standing-1", "--name", name, *options)
        await until(lambda: name in self.plane.manager.callers.tokens._tokens)
        return str(made["token"])


@pytest.fixture
def master() -> Iterator[StandingJob]:
    spec = small_spec()
    spec.roles[ROLLOUT_MANAGER] = spec.roles["reward"].model_copy()
    with StandingJob(spec) as job:
        yield job


@pytest.fixture
async def job(master: StandingJob, tmp_path: Path) -> AsyncIterator[Job]:
    server = RestServer(create_app(master.master, token=None))
    with open_store(f"sqlite:///{master.directory}/gyre.db") as store:
        plane = Plane(store.rollouts("standing-1"), tmp_path)
        await plane.start()
        try:
            yield Job(master, server.start(), plane)
        finally:
            for peer in plane.peers:
                await peer.socket.close()
            if plane.http is not None:
                await plane.http.close()
            await plane.manager.stop()
            server.stop()
    plane.exact()


async def test_who_joined_with_a_revoked_token_is_cut_and_its_samples_go_on(job: Job) -> None:
    plane = job.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    spot = await plane.working("spot-1", token=await job.token("spot"))
    await trainer.ask([0])
    (sample,) = await spot.work(1)
    await spot.report({sample.work.row: 7})
    await until(lambda: plane.manager.groups.account.generated == 7)
    await job.gyre("token", "revoke", "standing-1", "spot")
    rejected = await spot.wire.expect(Reject)
    assert (rejected.code, rejected.message) == ("unauthorised", "The token 'spot' was revoked.")
    await spot.wire.closed()
    own = await plane.working("own")
    (moved,) = await own.work(1)
    assert moved.tokens == sample.tokens, "what the other one reported was generated again"
    await own.report({moved.work.row: 1}, {moved.work.row: "length"})
    assert list(await trainer.groups(1)) == [0]
    (left,) = plane.told("InstanceLeft")
    assert (left["instance"], left["reason"], left["tokens"]) == ("spot-1", "token", 7)
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await spot.back()


async def test_a_handle_makes_tells_and_revokes_tokens(job: Job) -> None:
    store_url = f"sqlite:///{job.master.directory}/gyre.db"
    with open_store(store_url) as store:
        store.update_job("standing-1", url=job.url)
    handle = JobHandle("standing-1", store_url)
    await _make_tell_and_revoke(handle.aio)
    handle.close()


async def _make_tell_and_revoke(handle: AsyncJobHandle) -> None:
    made = await handle.create_token("spot", expires_in_s=3600.0)
    again = await handle.create_token("lab")
    assert len({made, again}) == 2
    await handle.revoke_token("lab")
    told = {one["name"]: one for one in await handle.tokens()}
    assert told["spot"]["expires_at"] == pytest.approx(time.time() + 3600.0, abs=60.0)
    assert told["spot"]["revoked_at"] is None
    assert told["lab"]["revoked_at"] is not None
    assert made not in str(told)
    with pytest.raises(NotFound):
        await handle.revoke_token("nobody")


async def test_a_restarted_manager_knows_what_was_revoked(job: Job) -> None:
    plane = job.plane
    kept, revoked = await job.token("kept"), await job.token("revoked")
    await plane.kill()
    await job.gyre("token", "revoke", "standing-1", "revoked")
    await plane.start(tokens_every_s=1e6)
    await plane.agent("a", token=kept)
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await plane.agent("b", token=revoked)
    status, said = await plane.post("/v1/drain", {"instance": "a"}, token=revoked)
    assert (status, said["message"]) == (401, "The token 'revoked' was revoked.")


async def test_a_token_expires(job: Job) -> None:
    plane = job.plane
    token = await job.token("lent", "--expires-in", "1h")
    (lent,) = (one for one in await job.gyre("token", "ls", "standing-1") if one["name"] == "lent")
    assert "digest" not in lent
    plane.manager.callers.clock = lambda: lent["expires_at"] - 1.0
    agent = await plane.agent("a", token=token)
    plane.manager.callers.clock = lambda: lent["expires_at"]
    assert "has expired" in (await agent.wire.expect(Reject)).message
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await plane.agent("a", token=token)


async def test_the_default_token_joins_and_is_revoked_as_others(job: Job) -> None:
    plane = job.plane
    agent = await plane.agent("a", token=JOIN_TOKEN)
    own = await plane.agent("own")
    assert [one["name"] for one in await job.gyre("token", "ls", "standing-1")] == ["default"]
    await job.gyre("token", "revoke", "standing-1", "default")
    await agent.wire.expect(Reject)
    await plane.manager.stop()
    await plane.start()
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await plane.agent("a", token=JOIN_TOKEN)
    await own.back()


async def test_a_machine_that_joins_cannot_be_the_trainer(job: Job) -> None:
    plane = job.plane
    token = await job.token("spot")
    heard = Heard()
    client = RolloutClient(FixedEndpoint(plane.url, token), heard, term=2**63 - 1)
    try:
        await until(lambda: heard.errors)
    finally:
        await asyncio.to_thread(client.close)
    assert isinstance(heard.errors[0], Unauthorized)
    assert "The token 'spot' is an instance's: it may not attach as the trainer." in str(heard.errors[0])
    await (await plane.trainer(term=1)).publish(0)
    await until(lambda: plane.manager.versions.newest == 0)


async def test_a_machine_that_joins_sees_and_drains_only_its_own(job: Job) -> None:
    plane = job.plane
    token = await job.token("spot")
    await plane.agent("own")
    mine = await plane.agent("mine", token=token)
    assert (await plane.get("/v1/status", token=token))[0] == 401
    assert (await plane.get("/v1/status"))[0] == 200
    assert (await plane.post("/v1/drain", {"instance": "own"}, token=token))[0] == 401
    assert (await plane.post("/v1/drain", {"instance": "mine"}, token=token))[0] == 200
    await mine.wire.expect(Drain)
    assert (await plane.post("/v1/drain", {"instance": "own"}, token=TOKEN))[0] == 200


@pytest.mark.parametrize(
    ("hello", "reason"), [({"instance": "rollout-0"}, "name_taken"), ({"local": True}, "local")]
)
async def test_a_machine_that_joins_takes_nobodys_place(job: Job, hello: dict[str, Any], reason: str) -> None:
    plane = job.plane
    placed = await plane.agent("rollout-0")
    token = await job.token("spot")
    wire = await plane.dial(token=token)
    await wire.send(placed.hello(**({"instance": "spot-1", "incarnation": "2"} | hello)))
    assert (await wire.expect(Reject)).code == reason
    assert await placed.wire.echo(), "it was cut for another one"


async def test_the_job_takes_its_name_back(job: Job) -> None:
    plane = job.plane
    squatter = await plane.agent("rollout-0", token=await job.token("spot"))
    placed = await plane.agent("rollout-0", incarnation="2")
    assert (await squatter.wire.expect(Reject)).code == "superseded"
    assert await placed.wire.echo()


async def test_a_real_agent_ends_with_the_reason_when_its_token_is_revoked(job: Job, tmp_path: Path) -> None:
    crew = Crew(job.plane, tmp_path)
    crew.token = await job.token("spot")
    work = asyncio.create_task(run_agent(crew.settings("a"), crew, crew.commands("a", 0.01)))
    await until(lambda: "a" in job.plane.manager.links)
    await job.gyre("token", "revoke", "standing-1", "spot")
    with pytest.raises(Unauthorized, match="'spot' was revoked"):
        await asyncio.wait_for(work, SOON_S)
    with pytest.raises(Unauthorized, match="'spot' was revoked") as again:
        await run_agent(crew.settings("a"), crew, crew.commands("a", 0.01))
    assert again.value.exit_code == 3
