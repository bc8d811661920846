"""The samples of a job as its master sends them over REST: a SampleReader for who has no files."""

from __future__ import annotations

from typing import Any, Protocol

from gyre.observe.samples.query import Order, SampleFilter


class AsksMaster(Protocol):
    def get_of(self, job: str, path: str, **query: Any) -> dict[str, Any]:
        """The body of a route below the job's. Raises Unreachable, and what the master raises."""


class RemoteSamples:
    def __init__(self, client: AsksMaster, job: str) -> None:
        self._client = client
        self._job = job

    def _get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._client.get_of(self._job, path, **query)

    def steps(self) -> dict[str, Any]:
        return self._get("samples/steps")

    def find(
        self, wanted: SampleFilter, *, order: Order = "step", limit: int = 50, offset: int = 0
    ) -> dict[str, Any]:
        return self._get(
            "samples",
            step=wanted.step,
            group=wanted.group,
            reward=",".join(map(str, wanted.reward)) or None,
            tokens=",".join(map(str, wanted.tokens)) or None,
            outcome=wanted.outcome,
            instance=wanted.instance,
            version=wanted.version,
            quarantined=wanted.quarantined,
            order=order,
            limit=limit,
            offset=offset,
        )

    def sample(self, step: int, group: int, sample: int) -> dict[str, Any]:
        return self._get(f"samples/{step}/{group}/{sample}")

    def held_out_sets(self) -> dict[str, Any]:
        return self._get("held-out")

    def held_out(
        self,
        name: str,
        *,
        version: int | None = None,
        against: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> dict[str, Any]:
        return self._get(f"held-out/{name}", version=version, against=against, limit=limit, offset=offset)
