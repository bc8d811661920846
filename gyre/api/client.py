"""A master over REST, as plain data.

Invariants:
- *every call ends*: each has a timeout; a stream has one between two signs of life;
- *the same errors*: a problem that comes back is raised as the GyreError it was, and no answer is Unreachable.

It must not know the store; `gyre.api.reader` puts the two together.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from gyre.api.cursor import read_cursor, write_cursor
from gyre.api.remote_samples import RemoteSamples
from gyre.errors import ConfigError, GyreError, Unauthorized, Unreachable
from gyre.logs.reading import PAGE_BYTES, LogQuery
from gyre.observe.http_deadline import bounded, within

TIMEOUT_S = 5.0
"""For each part of a request, and each silence in its answer."""
WHOLE_S = 60.0
"""For a whole request and answer, however steadily it comes: a page of samples over a slow line takes seconds."""
COMMAND_TIMEOUT_S = 15.0
"""Deadline of a command, which waits for the journal: longer than the master's own."""

SILENCE_TIMEOUT_S = 40.0
"""A stream sends something every 15 s; after this long without anything the connection is dead."""


class GyreClient:
    """One master. Use it as a context manager, or `close` it. Not tied to a job: its url is a master's."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """`trust` says which certificates to accept (`gyre.api.tls.trust_of`); None those of this machine's
        authorities."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is not a master's address.", hint="Give one such as http://127.0.0.1:8265."
            )
        self.url = url.rstrip("/")
        self._http = bounded(
            httpx.Client(
                base_url=self.url,
                headers={b"Authorization": f"Bearer {token}".encode()} if token else None,
                timeout=timeout_s,
                # A transport that is given goes by no proxy of the environment: the master is Gyre's own.
                transport=transport or httpx.HTTPTransport(verify=trust or True),
            )
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- reads --------------------------------------------------------------------------------------

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/jobs")["jobs"]
        return found

    def view(self, job: str) -> dict[str, Any]:
        return self._get(_job(job))

    def graph(self, job: str) -> dict[str, Any]:
        return self._get(f"{_job(job)}/graph")

    def nodes(self, job: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get(f"{_job(job)}/nodes")["nodes"]
        return found

    def spec(self, job: str) -> dict[str, Any]:
        return self._get(f"{_job(job)}/spec")

    def tokens(self, job: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get(f"{_job(job)}/tokens")["tokens"]
        return found

    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        page: list[dict[str, Any]] = self._get(f"{_job(job)}/events", after=after, limit=limit)["events"]
        return page

    def steps(self, job: str, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The metrics of the steps beyond `after`, in order."""
        page: list[dict[str, Any]] = self._get(f"{_job(job)}/metrics", since=after, limit=limit)["steps"]
        return page

    def account(self, job: str) -> dict[str, Any]:
        """Where every prompt and every token is (`gyre.api.account`)."""
        return self._get(f"{_job(job)}/account")

    def series(
        self,
        job: str,
        *,
        prefix: str = "",
        since: float | None = None,
        until: float | None = None,
        points: int = 300,
        names: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Numbers over time: `resolution_s`, `series` (by source and name, pairs of time and value), `cut`."""
        return self._get(
            f"{_job(job)}/series",
            source=prefix or None,
            since=since,
            until=until,
            points=points,
            number=list(names) or None,
        )

    def at(self, job: str, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        """The job after an event or at a time: `view`, `event`, `first`, `last`."""
        return self._get(f"{_job(job)}/at", seq=seq, time=time)

    def timeline(self, job: str, *, since: float | None = None, until: float | None = None) -> dict[str, Any]:
        """Who did what from when to when: `since`, `until`, `first`, `last`, `lanes`, `flags`, `cut`."""
        return self._get(f"{_job(job)}/timeline", since=since, until=until)

    def decisions(self, job: str, *, around: int) -> dict[str, Any]:
        """`previous` and `next`, the decisions before and after an event."""
        return self._get(f"{_job(job)}/decisions", around=around)

    def logs(
        self,
        job: str,
        query: LogQuery | None = None,
        *,
        after: Mapping[str, int] | None = None,
        tail: int | None = None,
        limit_bytes: int = PAGE_BYTES,
    ) -> dict[str, Any]:
        """A page of lines: see `JobReader.logs`."""
        page = self._get(
            f"{_job(job)}/logs",
            **asdict(query or LogQuery()),
            cursor=write_cursor(after) if after else None,
            tail=tail,
            limit_bytes=limit_bytes,
        )
        return {**page, "next": read_cursor(page.pop("cursor"))}

    def samples(self, job: str) -> RemoteSamples:
        return RemoteSamples(self, job)

    def get_of(self, job: str, path: str, **query: Any) -> dict[str, Any]:
        """The body of a route below the job's. Raises Unreachable, and what the master raises."""
        return self._get(f"{_job(job)}/{path}", **query)

    def stream(self, job: str, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yields every event after `after`, and then new ones as they come. Ends when the master closes the stream;
        call again to continue. Raises Unreachable when the connection breaks."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_TIMEOUT_S)
        try:
            with self._http.stream(
                "GET", f"/api/v1{_job(job)}/events/stream", headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _error_of(response)
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line[5:])
        except httpx.HTTPError as error:
            raise self._failed(error) from error

    # -- commands -----------------------------------------------------------------------------------

    def command(self, job: str, verb: str, body: Mapping[str, Any] | None = None) -> int:
        """`scale` (role, count), `drain` (target, reason), `undrain` (target), `pause`, `resume`, `stop` (reason),
        `create_token` (name, digest, expires_at, scopes) or `revoke_token` (name). Returns the event's seq."""
        response = self._send(
            "POST", f"{_job(job)}:{verb}", json=dict(body) if body else None, timeout=COMMAND_TIMEOUT_S
        )
        return int(response["seq"])

    def label(
        self, job: str, *, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None
    ) -> dict[str, Any]:
        """Change the tags and the note: `tags` and `notes` as they then are."""
        body = {"add": list(add), "remove": list(remove), "notes": notes}
        return self._send("POST", f"{_job(job)}:label", json=body, timeout=COMMAND_TIMEOUT_S)

    # -- inside -------------------------------------------------------------------------------------

    def _get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._send(
            "GET", path, params={key: value for key, value in query.items() if value is not None}
        )

    def _send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            with within(WHOLE_S):
                response = self._http.request(method, f"/api/v1{path}", **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failed(error) from error
        if response.is_error:
            raise _error_of(response)
        try:
            body: dict[str, Any] = response.json()
        except ValueError:
            raise self._unreachable("what answers there is not a Gyre master") from None
        return body

    def _failed(self, error: Exception) -> GyreError:
        if "CERTIFICATE_VERIFY_FAILED" not in str(error):
            return self._unreachable(error)
        return Unauthorized(
            f"The master at {self.url} is not who it should be: {error}.",
            hint="Give its certificate or authority with --ca, or --fingerprint. Nothing was sent to it.",
        )

    def _unreachable(self, why: object) -> Unreachable:
        return Unreachable(
            f"No master answers at {self.url}: {str(why) or type(why).__name__}.",
            hint="A restarting master takes a few seconds; `gyre ls` says which jobs run.",
        )


def _job(job: str) -> str:
    return f"/jobs/{quote(job, safe='')}"


def _error_of(response: httpx.Response) -> GyreError:
    """The error that a problem+json body was made from."""
    try:
        body = response.json()
        code, detail = str(body["code"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(
            f"{response.request.url} answered {response.status_code}, and not as a Gyre master does.",
            hint="Check the address.",
        )
    kind = _by_code().get(code, Unauthorized if response.status_code in (401, 403) else GyreError)
    details = dict(body.get("details") or {})
    return kind(detail, hint=str(body.get("hint", "")), details={**details, "status": response.status_code})


def _by_code() -> dict[str, type[GyreError]]:
    found: dict[str, type[GyreError]] = {}
    kinds = [GyreError]
    while kinds:
        kind = kinds.pop()
        found[kind.code] = kind
        kinds += kind.__subclasses__()
    return found
