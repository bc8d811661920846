"""A fleet on the suite's Ray, and a client of its door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.rollouts.protocol.endpoint import read_endpoint
from gyre.store import open_store
from tests.e2e.conftest import ENDS_WITHIN_S, Shared

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
    version: int = 0
    """The newest that was published."""

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

    async def publish(self, folders: Sequence[Path]) -> None:
        """The next version, whatever dies before: one folder after the other."""
        self.version += 1
        folder = folders[self.version % len(folders)]
        await self.until_asked("/v1/policies", {"version": self.version, "path": str(folder)})

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

    async def answered(self, asking: Sequence[asyncio.Task[Any]], count: int) -> None:
        """So many of them have their answers."""
        deadline = time.monotonic() + ENDS_WITHIN_S
        while sum(task.done() for task in asking) < count:
            assert time.monotonic() < deadline, "no answers come"
            await asyncio.sleep(0.01)

    async def settled(self) -> dict[str, Any]:
        """The manager's account in tokens, once nothing is generated any more."""
        assert self.session is not None
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            found = read_endpoint(home(self.shared.home).job_directory(self.handle.job_id))
            assert found is not None
            async with self.session.get(
                f"{found[0]}/v1/status", headers={"Authorization": f"Bearer {found[1]}"}
            ) as reply:
                told = await reply.json()
            if not told["queued"] and not any(one["running"] for one in told["instances"]):
                account: dict[str, Any] = told["account"]
                return account
            assert time.monotonic() < deadline, "it still generates"
            await asyncio.sleep(0.2)

    async def kept(self, request_id: str) -> int | None:
        """Tokens of a request that the door keeps; None where there is none of this id, or none any more."""
        assert self.session is not None
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.session.get(f"{self.url}/v1/requests/{request_id}", headers=headers) as reply:
            if reply.status == 404:
                return None
            assert reply.status == 200, await reply.text()
            return sum(one["tokens"] for one in (await reply.json())["samples"])

    async def healthy(self) -> None:
        """An instance serves."""
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


@contextlib.contextmanager
def fleet_on(shared: Shared, model: Path, name: str, folder: Path, instances: int = 2) -> Iterator[Fleet]:
    """A fleet over the model as version 0, with a key that may do everything. It is stopped with the block."""
    file = folder / "fleet.json"
    spec = {
        "name": name,
        "recipe": "fleet",
        "config": {"model_path": str(model)},
        "rollouts": {"report_interval_s": 0.05, "max_running": 16},
        "roles": {"rollout": {"total": instances}},
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
