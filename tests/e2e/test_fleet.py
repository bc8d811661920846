"""A fleet without a trainer, run for real: its door is asked and published at while its processes are killed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.rollouts.protocol.endpoint import read_endpoint
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.engines.embedded.tiny import write_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [3, 1, 4, 1, 5]


@dataclass
class Fleet:
    """A running fleet, and a client of its door. The door's address outlives its manager."""

    shared: Shared
    handle: JobHandle
    key: str
    session: aiohttp.ClientSession | None = None
    seen: dict[str, list[int]] = field(default_factory=dict)
    """By id, the tokens that a stream has told so far."""

    @property
    def url(self) -> str:
        found = read_endpoint(home(self.shared.home).job_directory(self.handle.job_id))
        assert found is not None
        return found[0]

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.session is not None
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers) as reply:
            return reply.status, json.loads(await reply.read())

    async def until_asked(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, whatever dies before: the same again, as a client does."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            try:
                status, told = await self.ask(path, body)
                if status == 200:
                    return told
                assert status in (503, 504), (status, told)
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, f"{body} was not answered"
            await asyncio.sleep(0.2)

    async def listen(self, request_id: str, new: int) -> None:
        """Listen to a request's stream, as far as it goes."""
        assert self.session is not None
        headers = {"Authorization": f"Bearer {self.key}"}
        body = {"rid": request_id, "prompt": PROMPT, "max_tokens": new, "ignore_eos": True, "stream": True}
        tokens = self.seen[request_id] = []
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {") and "choices" in (told := json.loads(line[6:])):
                        tokens += told["choices"][0]["token_ids"]
        except aiohttp.ClientError:  # its manager was killed
            return

    async def heard(self, tokens: int) -> None:
        """So many tokens came by all streams together."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while sum(len(one) for one in self.seen.values()) < tokens:
            assert time.monotonic() < deadline, "no tokens come"
            await asyncio.sleep(0.01)

    async def healthy(self) -> None:
        assert self.session is not None
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            try:
                async with self.session.get(f"{self.url}/health") as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, AssertionError):
                pass
            assert time.monotonic() < deadline, "no instance serves"
            await asyncio.sleep(0.2)


def body_of(request_id: str, new: int, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    return {"rid": request_id, "input_ids": PROMPT, "sampling_params": params, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fleet")
    return [write_checkpoint(root / f"v{seed}", "qwen3", seed=seed) for seed in range(3)]


@pytest.fixture
def fleet(shared: Shared, folders: list[Path], tmp_path: Path) -> Iterator[Fleet]:
    name = f"fleet-{tmp_path.name[-12:].strip('_-')}"
    file = tmp_path / "fleet.json"
    spec = {
        "name": name,
        "recipe": "fleet",
        "config": {"model_path": str(folders[0])},
        "rollouts": {"report_interval_s": 0.05, "max_running": 16},
        "roles": {"rollout": {"total": 2}},
    }
    file.write_text(json.dumps(spec))
    began = shared.gyre("submit", str(file), "--ray-address", shared.address)
    assert began.code == 0, began.err
    store_url = f"sqlite:///{shared.home / 'gyre.db'}"
    with open_store(store_url) as store:
        (job_id,) = [row.job_id for row in store.jobs(live=True) if row.name == name]
    handle = JobHandle(job_id, store_url, home_path=str(shared.home))
    made = shared.gyre("token", "create", name, "--name", "lab", "--scope", "generate", "--scope", "publish")
    assert made.code == 0, made.err
    yield Fleet(shared, handle, made.out.strip())
    handle.stop("the test is over")
    handle.wait(ENDS_WITHIN_S)
    handle.close()


async def test_it_answers_publishes_and_answers_with_the_new_version(
    fleet: Fleet, folders: list[Path]
) -> None:
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
        status, told = await fleet.ask("/generate", body_of("one", 12, return_logprob=True))
        assert status == 200, told
        assert len(told["output_ids"]) == 12
        assert told["meta_info"]["policy_versions"] == [[0, 0, 12]]
        status, published = await fleet.ask("/v1/policies", {"version": 1, "path": str(folders[1])})
        assert status == 200, published
        status, later = await fleet.ask("/generate", body_of("two", 12, policy={"at_least": 1}))
        assert status == 200, later
        assert later["meta_info"]["policy_versions"] == [[1, 0, 12]]
        assert await fleet.ask("/generate", body_of("one", 12, return_logprob=True)) == (200, told)
        await fleet.listen("three", 12)
        assert len(fleet.seen["three"]) == 12


@pytest.mark.kill
async def test_whoever_is_killed_every_id_gets_its_tokens_and_gets_them_again(
    fleet: Fleet, folders: list[Path]
) -> None:
    """An instance, then the manager, while versions change under forty requests."""
    faults = ProcessFaults(fleet.handle)
    ids = [f"request-{number}" for number in range(40)]
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
        listening = [asyncio.create_task(fleet.listen(one, 300)) for one in ids]
        await fleet.heard(200)
        for number, name in enumerate(("rollout-0", "rollout_manager-0"), start=1):
            (victim,) = await asyncio.to_thread(faults.kill, name)
            await fleet.until_asked("/v1/policies", {"version": number, "path": str(folders[number])})
            replaced = await asyncio.to_thread(faults.replaced, victim, timeout_s=ENDS_WITHIN_S)
            assert replaced.pid != victim.pid
        await asyncio.gather(*listening)
        bodies = {one: body_of(one, 300) for one in ids}
        whole = dict(
            zip(
                ids,
                await asyncio.gather(*(fleet.until_asked("/generate", bodies[one]) for one in ids)),
                strict=True,
            )
        )
        again = [await fleet.until_asked("/generate", bodies[one]) for one in ids]
    for one, told in whole.items():
        assert len(told["output_ids"]) == 300
        assert told["output_ids"][: len(fleet.seen[one])] == fleet.seen[one], "told tokens were replaced"
    assert [told["output_ids"] for told in again] == [told["output_ids"] for told in whole.values()]
