"""A live manager with a door, the keys that open it, and clients that ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from gyre.ports.bounds import PortBounds
from gyre.rollouts.manager.door.door import Door
from gyre.rollouts.plane.settings import DoorSettings
from gyre.rollouts.protocol.credentials import digest_of
from gyre.store import open_store
from tests.rollouts.plane import QUICK, Plane, ScriptedAgent, small_folder, until

KEYS = {"lab": ("generate", "publish"), "other": ("generate",), "trainer": ("publish",), "spot": ("join",)}
"""By name, the scopes of each key; the key itself is its name with `-key` behind."""

PROMPT = [7, 8]


class FleetPlane(Plane):
    """`rows` are the tokens as the journal has them, by name."""

    rows: dict[str, dict[str, Any]]

    def make_keys(self) -> None:
        self.rows = {
            name: {
                "digest": digest_of(f"{name}-key"),
                "expires_at": None,
                "revoked_at": None,
                "scopes": list(scopes),
            }
            for name, scopes in KEYS.items()
        }
        self.store.snapshot_rows = lambda kind: self.rows  # type: ignore[method-assign]

    @property
    def door(self) -> Door:
        return next(front for front in self.manager.fronts if isinstance(front, Door))

    async def revoke(self, name: str) -> None:
        self.rows = {**self.rows, name: {**self.rows[name], "revoked_at": 1.0}}
        tokens = self.manager.callers.tokens
        await until(lambda: tokens._tokens[name].revoked_at is not None)

    async def publish(self, version: int, key: str = "lab", **folder: Any) -> tuple[int, Any]:
        path = self.tmp_path / f"v{version}"
        if not path.exists():
            small_folder(path, version, **folder)
        return await self.post("/v1/policies", {"version": version, "path": str(path)}, f"{key}-key")

    async def delete(self, request_id: str, key: str = "lab") -> None:
        url = f"{self.url}/v1/requests/{request_id}"
        async with self.session().delete(url, headers={"Authorization": f"Bearer {key}-key"}) as reply:
            assert reply.status == 200, await reply.text()

    async def generate(self, request_id: str | None = None, key: str = "lab", **body: Any) -> tuple[int, Any]:
        return await self.post("/generate", generate_body(request_id, **body), f"{key}-key")

    def asking(
        self, request_id: str | None = None, key: str = "lab", **body: Any
    ) -> asyncio.Task[tuple[int, Any]]:
        """A client that waits for its answer."""
        return asyncio.create_task(self.generate(request_id, key, **body))

    async def serving(self, *names: str, version: int = 0) -> list[ScriptedAgent]:
        """Agents that serve the version, which is published."""
        status, told = await self.publish(version)
        assert status == 200, told
        return [await self.working(name) for name in names]

    async def heard(self, path: str, body: dict[str, Any], key: str = "lab") -> list[Any]:
        """All events of a stream, the last as text."""
        return [event async for event in self.stream(path, body, key)]

    async def stream(self, path: str, body: dict[str, Any], key: str = "lab") -> AsyncIterator[Any]:
        headers = {"Authorization": f"Bearer {key}-key"}
        async with self.session().post(f"{self.url}{path}", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: "):
                    said = line.removeprefix(b"data: ").strip()
                    yield said.decode() if said == b"[DONE]" else json.loads(said)

    async def told_tokens(self, request_id: str, count: int) -> None:
        """So many tokens of the request are in the ledger."""
        door = self.door
        await until(lambda: request_id in door.ledger.requests())
        known = door.ledger.requests()[request_id]
        await until(lambda: known.tokens == count)

    async def open(self, count: int) -> None:
        door = self.door
        await until(lambda: door.ledger.open_count == count)


def generate_body(request_id: str | None = None, **body: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 100, **body.pop("params", {})}
    told = {"input_ids": PROMPT, "sampling_params": params, **body}
    return {"rid": request_id, **told} if request_id is not None else told


@contextlib.asynccontextmanager
async def fleet_plane(
    tmp_path: Path, *, bounds: PortBounds | None = None, **door: Any
) -> AsyncIterator[FleetPlane]:
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        plane = FleetPlane(store.rollouts("job"), tmp_path, bounds=bounds)
        plane.make_keys()
        await plane.start(door=DoorSettings(cache=tmp_path / "cache", **door))
        try:
            yield plane
        finally:
            for peer in plane.peers:
                await peer.socket.close()
            if plane.http is not None:
                await plane.http.close()
            await plane.manager.stop()


async def finish(agent: ScriptedAgent, tokens: int = 3, count: int = 1) -> list[list[int]]:
    """The agent generates so many tokens for each of its next samples, and ends them."""
    samples = await agent.work(count)
    rows: Sequence[int] = [sample.work.row for sample in samples]
    await agent.report(dict.fromkeys(rows, tokens), dict.fromkeys(rows, "stop"))
    return [sample.tokens for sample in samples]


__all__ = ["KEYS", "PROMPT", "QUICK", "FleetPlane", "finish", "fleet_plane", "generate_body"]
