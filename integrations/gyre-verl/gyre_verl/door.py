"""A fleet's door as verl's processes see it.

Invariant *again is the same*: whatever a connection, an engine or the manager dies of, a request is asked again with
its id, and the door gives the tokens that it has of it already. What the door says about the request itself is an
error."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AWAY = frozenset({429, 502, 503, 504})
"""Statuses after which the same is asked again."""

AGAIN_S = (0.2, 5.0)
"""The first pause before it is asked again, doubled up to the second."""

DELETE_WITHIN_S = 5.0
"""For an answer to be forgotten. The door forgets it by itself later."""


class DoorError(RuntimeError):
    """The door refuses what was asked, or was away for too long."""


@dataclass(frozen=True)
class Door:
    """`url` is the rollout manager's, `key` a token with the scopes `generate` and `publish`. `patience_s` is how long
    the door may be away, and how long an answer may take."""

    url: str
    key: str
    patience_s: float = 1800.0

    @classmethod
    def of(cls, config: Any) -> Door:
        """The door of verl's configuration: `trainer.v1.gyre.{url,key,patience_s}`."""
        given = config.trainer.v1.get("gyre", {})
        if not given.get("url") or not given.get("key"):
            raise DoorError("trainer.v1.gyre.url and .key are not set: say where the fleet's door is.")
        return cls(
            str(given["url"]).rstrip("/"), str(given["key"]), float(given.get("patience_s", cls.patience_s))
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

    # -- verl's trainer, which waits ------------------------------------------------------------------

    def policies(self) -> dict[str, Any]:
        """`newest` and `served`, None where nothing is published, and `instances` by name."""
        return self._called("GET", "/v1/policies", None)

    def plane(self) -> dict[str, Any]:
        """What a publisher on the weight plane needs: its `key`, and `weights`, its settings."""
        return self._called("GET", "/v1/policies/plane", None)

    def publish(self, version: int, told: Mapping[str, Any]) -> dict[str, Any]:
        """Publish a version: `told` has the `path` of a folder on the manager's machine, or `checksum` and `sources`.
        Returns `{"version", "checksum"}` when it is durable."""
        return self._called("POST", "/v1/policies", {"version": version, **told})

    def _called(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}{path}", data, self.headers, method=method)
        until, pause = time.monotonic() + self.patience_s, AGAIN_S[0]
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self.patience_s) as reply:
                    told: dict[str, Any] = json.loads(reply.read())
                    return told
            except urllib.error.HTTPError as error:
                why = error.read().decode(errors="replace")[:1000]
                if error.code not in AWAY:
                    raise DoorError(f"{method} {path}: {error.code} {why}") from None
            except (urllib.error.URLError, ConnectionError, TimeoutError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            if time.monotonic() > until:
                raise DoorError(
                    f"{method} {path}: the fleet's door was away for {self.patience_s:g} s: {why}"
                )
            time.sleep(pause)
            pause = min(2 * pause, AGAIN_S[1])

    # -- verl's agent loops, many at once -------------------------------------------------------------

    async def generate(self, session: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        """One sample: the answer of `POST /generate`. Raises DoorError."""
        import aiohttp

        until, pause = time.monotonic() + self.patience_s, AGAIN_S[0]
        while True:
            try:
                async with session.post(f"{self.url}/generate", json=body, headers=self.headers) as reply:
                    if reply.status == 200:
                        told: dict[str, Any] = await reply.json()
                        return told
                    why = (await reply.text())[:1000]
                    if reply.status not in AWAY:
                        raise DoorError(f"request {body['rid']}: {reply.status} {why}")
            except (TimeoutError, aiohttp.ClientError) as error:
                why = f"{type(error).__name__}: {error}"
            if time.monotonic() > until:
                raise DoorError(f"request {body['rid']}: no answer within {self.patience_s:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN_S[1])

    async def forget(self, session: Any, request_id: str) -> None:
        """Let the door forget an answer that is here."""
        import aiohttp

        try:
            url = f"{self.url}/v1/requests/{request_id}"
            timeout = aiohttp.ClientTimeout(total=DELETE_WITHIN_S)
            async with session.delete(url, headers=self.headers, timeout=timeout):
                pass
        except (TimeoutError, aiohttp.ClientError):  # it forgets by itself
            return


def request_id(trajectory: str, prompt_ids: Sequence[int]) -> str:
    """The id of one turn of a trajectory: the same whenever it is asked for."""
    seen = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:16]
    return f"{trajectory}-{seen}"
