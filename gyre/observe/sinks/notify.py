"""The sink of `observe.notify`: it notifies people of incidents, warnings and the job's end, in few and short messages.

What comes between two flushes is one message: a `text` that chats show, and the `events` as data.

Invariants:
- *at least once, with the same key*: a message is kept before it is sent, and until it is known to have arrived. What a
  death leaves open is sent again as it was, with the key that it had, so that the other side can tell;
- *bounded*: a message names so many events and says how many more there were, and there is a pause between two;
- *news*: what happened more than a day ago is left out, so that who was away for a week is not flooded.

This module must not know how a message travels.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import quote as url_quote

from gyre.clock import SleepingClock
from gyre.config.secrets import is_address, is_header_value, resolved
from gyre.errors import ConfigError
from gyre.observe.sinks.delivery import CommandDelivery, Notification, Target, Webhook
from gyre.observe.sinks.sink import SinkEnd, SinkEvaluation, SinkIncident, SinkJob, SinkWarning

NOTIFY = "notify"
"""The kind of this sink. It is no name that `observe.sinks` takes: it has settings of its own."""

INCIDENT, RECOVERED, WARNING, END = "incident", "recovered", "warning", "end"

PAGE = 10_000
"""Events between two flushes: a storm of incidents is one message."""
MOST_LINES = 20
"""In the text; below the number of lines after which chats fold a message."""
MOST_EVENTS = 100
LONGEST_LINE = 300
NEWS_FOR_S = 86_400.0
PAUSE_S = 5.0
"""Between two messages: what comes meanwhile is one, and no chat counts that as a flood."""

_REPAIRED = ("recovered", "scaled away")
"""The outcomes that are good news. `job ended` is none of its own: the end is told."""


@dataclass(frozen=True, slots=True)
class _News:
    at: float
    seq: int
    kind: str
    line: str
    data: dict[str, Any]


@dataclass(slots=True)
class _Outbox:
    """What was sent last, or is being sent: `upto` is the number of the last event in it, `at` when that was."""

    upto: int = 0
    at: float = 0.0
    key: str = ""
    body: str = ""
    text: str = ""
    sent: bool = True


@dataclass(frozen=True, slots=True)
class NotifyOptions:
    """As `observe.notify` has it."""

    webhook: str = ""
    command: Sequence[str] = ()
    on: Collection[str] = (INCIDENT, WARNING, END)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Of the target, so that it keeps its cursor when others are added or taken away."""
        target = json.dumps([self.webhook, *self.command])
        return hashlib.sha256(target.encode()).hexdigest()[:12]

    def target(self, job: SinkJob, environment: Mapping[str, str]) -> Target:
        """Who is told. `environment` has what `$NAME` stands for, and is the command's. Raises ConfigError for a
        variable that is not set, or holds no address."""
        if self.command:
            return CommandDelivery(
                self.command, {**environment, "GYRE_JOB": job.name, "GYRE_JOB_ID": job.job_id}
            )
        address = resolved(self.webhook, environment)
        if not is_address(address):
            raise ConfigError(
                f"{self.webhook} is set to what is no address.", hint='Expected "https://host/…".'
            )
        headers = {name: resolved(value, environment) for name, value in self.headers.items()}
        for name, value in headers.items():
            if not is_header_value(value):
                raise ConfigError(
                    f"{self.headers[name]} is set to what a header cannot hold.", hint="Expected plain ASCII."
                )
        return Webhook(address, headers)


class NotifySink:
    def __init__(
        self,
        job: SinkJob,
        target: Target,
        *,
        on: Collection[str],
        page_address: Callable[[], str] = lambda: "",
        clock: SleepingClock = time,
    ) -> None:
        """`page_address` is that of the master's web page while there is one, else ""."""
        self._job = job
        self._target = target
        self._on = frozenset(on)
        self._page_address = page_address
        self._clock = clock
        self._path = job.directory / "outbox.json"
        self._outbox = _read_outbox(self._path)
        self._pending: list[_News] = []
        self._next_at = 0.0

    # -- what it receives --------------------------------------------------------------------------

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        """Steps are no news."""

    def evaluation(self, evaluation: SinkEvaluation) -> None:
        """Nor are evaluations."""

    def warning(self, warning: SinkWarning) -> None:
        line = (
            f"warning at step {warning.step}: {warning.code}: {warning.message}"
            if warning.holds
            else f"no longer so at step {warning.step}: {warning.code}"
        )
        self._take(WARNING if warning.holds else RECOVERED, line, asdict(warning))

    def incident(self, incident: SinkIncident) -> None:
        where = incident.vertex or "the job"
        if incident.is_new:
            why = f" ({incident.error})" if incident.error and incident.error not in incident.decision else ""
            line = f"incident: {where}: {incident.cause}: {incident.decision}{why}"
            self._take(INCIDENT, line, asdict(incident))
        elif incident.outcome != "job ended":
            after = "" if incident.recovery_s is None else f" after {incident.recovery_s:.1f} s"
            kind = RECOVERED if incident.outcome in _REPAIRED else INCIDENT
            self._take(kind, f"{incident.outcome}{after}: {where}: {incident.cause}", asdict(incident))

    def ended(self, end: SinkEnd) -> None:
        why = end.message or end.reason
        self._take(END, f"the job {end.phase}{f': {why}' if why else ''}", asdict(end))

    def _take(self, kind: str, line: str, data: dict[str, Any]) -> None:
        if kind in self._on and self._is_news(data["at"]):
            self._pending.append(_News(data["at"], data["seq"], kind, readable(line), data))

    def _is_news(self, at: float) -> bool:
        return at > self._clock.time() - NEWS_FOR_S

    # -- what it sends ------------------------------------------------------------------------------

    def flush(self) -> None:
        if not self._outbox.sent and self._is_news(self._outbox.at):
            self._send()
        news = [one for one in self._pending if one.seq > self._outbox.upto]
        if news:
            self._outbox = self._outbox_of(news)
            _write_outbox(self._path, self._outbox)
            self._send()
        self._pending = []

    def close(self) -> None:
        """All was sent when `flush` returned."""

    def _send(self) -> None:
        self._clock.sleep(max(0.0, self._next_at - self._clock.monotonic()))
        outbox = self._outbox
        self._target.deliver(Notification(outbox.key, outbox.body.encode(), outbox.text))
        self._next_at = self._clock.monotonic() + PAUSE_S
        outbox.sent = True
        _write_outbox(self._path, outbox)

    def _outbox_of(self, news: Sequence[_News]) -> _Outbox:
        job = self._job
        named = f"{job.job_id}/{job.directory.name}/{news[0].seq}-{news[-1].seq}"
        key = hashlib.sha256(named.encode()).hexdigest()[:32]
        page = "" if any(one.kind == END for one in news) else self._page_address()  # it goes with the master
        text = text_of(job.name, news, page)
        body = {
            "text": text,
            "job": job.name,
            "job_id": job.job_id,
            "key": key,
            "at": news[-1].at,
            "page": page,
            "events": [
                {"kind": one.kind, "text": one.line, **_short(one.data)} for one in news[-MOST_EVENTS:]
            ],
            "more": max(0, len(news) - MOST_EVENTS),
        }
        return _Outbox(news[-1].seq, news[-1].at, key, json.dumps(body), text, sent=False)


def text_of(name: str, news: Sequence[_News], page: str) -> str:
    """What people read: a headline, the news, the newest last, and where there is more."""
    counts = Counter(one.kind for one in news if one.kind != END)
    ends = [one.line.partition(":")[0].removeprefix("the job ") for one in news if one.kind == END]
    parts = [f"{count} {kind}{'s' * (count > 1 and kind != RECOVERED)}" for kind, count in counts.items()]
    lines = [f"Gyre job {name}: {', '.join([*ends, *parts])}"]
    if (left := len(news) - MOST_LINES) > 0:
        lines.append(f"… and {left} more before these:")
    lines += [f"• {one.line}" for one in news[-MOST_LINES:]]
    incidents = set() if ends else {one.data["id"] for one in news if "outcome" in one.data}
    one = f" {quote(next(iter(incidents)))}" if len(incidents) == 1 else ""
    lines.append(f"More: `gyre show {name}{one}`{f', {_link(page, name, incidents)}' if page else ''}")
    return "\n".join(lines)


def _link(page: str, name: str, incidents: Collection[str]) -> str:
    one = f"?id={url_quote(next(iter(incidents)), safe='')}" if len(incidents) == 1 else ""
    return f"{page.rstrip('/')}/#/jobs/{url_quote(name, safe='')}/{f'incidents{one}' if incidents else 'now'}"


def readable(line: str) -> str:
    """On one line, of bounded length, and without what makes a chat call everybody (`<!channel>`, `@all`): errors quote
    what users' code, and models, have written."""
    shown = "".join(one if one.isprintable() else " " for one in line)
    shown = " ".join(shown.split()).replace("<", "‹").replace("@", "@\u200b")
    return shown if len(shown) <= LONGEST_LINE else f"{shown[: LONGEST_LINE - 1]}…"


def _short(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:LONGEST_LINE] if isinstance(value, str) else value for name, value in data.items()}


def _read_outbox(path: Path) -> _Outbox:
    """What was kept; nothing where there is none, or it cannot be read: then it is sent again."""
    try:
        return _Outbox(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return _Outbox()


def _write_outbox(path: Path, outbox: _Outbox) -> None:
    fresh = path.with_suffix(".new")
    with open(fresh, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(json.dumps(asdict(outbox)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
