"""The rollout manager's session API, from asyncio.

Invariants:
- *an agent outlives a manager*: while the manager is away each request is sent again, with the same bytes, to wherever
  the job's directory says that the next one listens; only its deadline ends it;
- *told as repeated*: a request that is sent again says so (`x-stainless-retry-count`, as SDKs do), so that the manager
  knows it for the same turn;
- *final is final*: what the manager refuses for good is raised at once (`outcomes`).

This module must not know what an agent is, or how many run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gyre.agents.outcomes import BudgetSpent, Outcome, SessionLost, SessionRefused
from gyre.errors import Unauthorized

CONNECT_S = 5.0
"""Time to accept a connection. A living machine needs milliseconds; a lost packet is resent after 1 s and 3 s."""

ANSWER_S = 120.0
"""Longest silence of an open request: after it the same is asked again, and joins what runs. A manager whose machine is
gone closes no connection."""

QUICK_S = 10.0
"""Time for an answer that needs no engine: a beat, an end, a snapshot."""

PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Before each further attempt; the last one stays. A manager is back some seconds after its death."""

WAIT_S = 20.0
"""How long the manager may keep a claim for which there is no session yet."""

SETTLE_S = 900.0
"""Within which the end of a session must be in the ledger: longer than a job waits for a manager's machine to be
replaced in most clusters. After that the session is somebody else's."""

MOST_ANSWER_BYTES = 64 << 20
"""Largest answer: a turn of 100,000 tokens with their log-probs, ids and texts as JSON takes 15 MB."""

AGAIN = frozenset((408, 409, 425, 429))
"""Statuses below 500 after which asking again helps."""

_REPEATED = "x-stainless-retry-count"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A session that this worker is to run, as the manager hands it out.

    `task` is what the data set says of the prompt, `prompt_ids` its tokens. `turns` of them are in the ledger already.
    `snapshot` is what was kept of its environment, None for nothing.
    """

    id: str
    purpose: str
    group: int
    index: int
    attempt: int
    path: str
    task: Mapping[str, Any]
    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    turns: int
    snapshot: bytes | None
    seconds_left: float
    max_turns: int
    max_tokens: int

    @property
    def name(self) -> str:
        """Its id, and which claim this is: what another worker's claim has replaced is refused."""
        return self.path.rpartition("/")[2]

    @classmethod
    def read(cls, told: Any) -> Claimed:
        """Raises ValueError for what is no session."""
        try:
            snapshot = told.get("snapshot")
            return cls(
                id=str(told["id"]),
                purpose=str(told["purpose"]),
                group=int(told["group"]),
                index=int(told["index"]),
                attempt=int(told.get("attempt", 0)),
                path=str(told.get("path") or f"/s/{told['id']}"),
                task=dict(told.get("task") or {}),
                prompt_ids=[int(one) for one in told.get("prompt_ids") or ()],
                sampling=dict(told.get("sampling") or {}),
                turns=int(told.get("turns", 0)),
                snapshot=None if snapshot is None else base64.b64decode(snapshot, validate=True),
                seconds_left=float(told["seconds_left"]),
                max_turns=int(told["max_turns"]),
                max_tokens=int(told["max_tokens"]),
            )
        except (KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ValueError(f"the rollout manager handed out what is no session: {error!r:.200}") from error


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """What the manager answered, whole: its status, the headers that a client reads, and the body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON. Raises SessionRefused for what is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            raise SessionRefused(
                f"The rollout manager answered {self.status} with {len(self.body)} bytes that are no JSON.",
                hint="Is something else listening at its address?",
            ) from None


class SessionClient:
    """The sessions of one `worker`. Use it from one event loop, and `close` it there."""

    def __init__(
        self,
        endpoint: Callable[[], tuple[str, str] | None],
        *,
        worker: str,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """`endpoint()` is the manager's URL and the job's secret, None while it has not started; `tls()` what to trust.
        Both are asked before each attempt."""
        self.worker = worker
        self._endpoint = endpoint
        self._tls = tls
        self._http: aiohttp.ClientSession | None = None
        self.away_since: float | None = None
        """The loop's time since which no request was answered; None while the manager answers."""

    async def claim(self, most: int, wait_s: float = WAIT_S) -> list[Claimed]:
        """At most `most` sessions for this worker: as soon as there is one, none after `wait_s`. Raises TimeoutError
        while the manager is away; what it gave meanwhile is nobody's, and comes again."""
        body = {"worker": self.worker, "most": most, "wait_s": wait_s}
        answer = await self._post(
            "/v1/sessions/claim", body, within_s=wait_s + QUICK_S, answer_s=wait_s + QUICK_S
        )
        return [Claimed.read(one) for one in _list(answer.json(), "sessions")]

    async def beat(self, sessions: Sequence[str], back: Sequence[str] = ()) -> set[str]:
        """Say that these run here; what was given to this worker some time ago and is not among them is handed out
        again, and at once what it gives `back`, by the names of its claims. Returns those of them that are not this
        worker's any more. Raises TimeoutError while the manager is away."""
        told = {"worker": self.worker, "sessions": list(sessions), "back": list(back)}
        answer = await self._post("/v1/sessions/beat", told)
        return {str(one) for one in _list(answer.json(), "lost")}

    async def end(self, session: Claimed, outcome: Outcome) -> None:
        """End the session; it is in the ledger when this returns. Raises SessionLost, SessionRefused, TimeoutError."""
        body = {
            "outcome": outcome.kind,
            "reward": outcome.reward,
            "reason": outcome.reason,
            "extras": dict(outcome.extras),
        }
        await self._post(f"/v1/sessions/{session.name}/end", body, within_s=SETTLE_S)

    async def snapshot(self, session: Claimed, data: bytes) -> None:
        """Keep `data` with the session, for whoever claims it next. Raises as `end` does."""
        answer = await self.ask(
            "PUT", f"/v1/sessions/{session.name}/snapshot", data, within_s=SETTLE_S, answer_s=QUICK_S
        )
        raise_refusal(answer)

    async def _post(
        self, path: str, body: Mapping[str, Any], *, within_s: float = QUICK_S, answer_s: float = QUICK_S
    ) -> ClientAnswer:
        answer = await self.ask("POST", path, orjson.dumps(body), within_s=within_s, answer_s=answer_s)
        raise_refusal(answer)
        return answer

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        within_s: float,
        answer_s: float = ANSWER_S,
        headers: Mapping[str, str] | None = None,
    ) -> ClientAnswer:
        """Send these bytes until they are answered: an answer after which asking again helps is none. `answer_s` is
        the longest silence of one attempt. Raises TimeoutError after `within_s`."""
        loop = asyncio.get_running_loop()
        given = dict(headers or {})
        first = _count(given.pop(_REPEATED, "0"))
        attempt = 0
        async with asyncio.timeout(within_s):
            while True:
                if first + attempt:
                    given[_REPEATED] = str(first + attempt)
                answer = await self._attempt(method, path, body, given, answer_s)
                if answer is not None:
                    self.away_since = None
                    if answer.status not in AGAIN and answer.status < 500:
                        return answer
                elif self.away_since is None:
                    self.away_since = loop.time()
                await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
                attempt += 1

    async def _attempt(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], answer_s: float
    ) -> ClientAnswer | None:
        """What the manager answers; None where it does not, and would another time."""
        where = self._endpoint()
        if where is None:
            return None
        url, secret = where
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        own = {
            "Content-Type": "application/json",
            **headers,
            "Authorization": f"Bearer {secret}",
            "Accept-Encoding": "identity",
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=answer_s)
        try:
            async with self._http.request(
                method,
                url.rstrip("/") + path,
                data=body,
                headers=own,
                timeout=limits,
                ssl=self._tls() or True,
            ) as response:
                content = bytearray()
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > MOST_ANSWER_BYTES:
                        raise SessionRefused(
                            f"The rollout manager answered {path} with more than {MOST_ANSWER_BYTES} bytes.",
                            hint="Ask for fewer tokens, or without log-probs.",
                        )
                kept = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
                return ClientAnswer(response.status, kept, bytes(content))
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None  # a manager that dies, starts, or whose machine is gone: the next attempt finds the next one

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()


_KEPT_HEADERS = ("Content-Type", "x-should-retry", "x-request-id", "request-id")


def raise_refusal(answer: ClientAnswer) -> None:
    """Raises what a final refusal means: BudgetSpent, SessionLost, Unauthorized, or SessionRefused. Nothing for an
    answer."""
    if answer.status < 400:
        return
    message, code = f"status {answer.status}", ""
    try:
        told = orjson.loads(answer.body)["error"]
        message, code = str(told["message"]), str(told.get("code") or "")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass  # an answer of something in between, which has no words of ours
    if answer.status == 422 and code == "budget":
        raise BudgetSpent(message)
    if answer.status in (404, 410):
        raise SessionLost(f"The session is not this worker's any more: {message}")
    if answer.status in (401, 403):
        raise Unauthorized(f"The rollout manager refuses this worker: {message}")
    raise SessionRefused(
        f"The rollout manager refuses: {message}", details={"status": answer.status, "code": code}
    )


def _list(told: Any, name: str) -> list[Any]:
    found = told.get(name) if isinstance(told, dict) else None
    if not isinstance(found, list):
        raise SessionRefused(f"The rollout manager answered without a list of {name}.")
    return found


def _count(text: str) -> int:
    """A count of retries as an SDK says it."""
    return int(text) if text.isdigit() and len(text) < 6 else 0
