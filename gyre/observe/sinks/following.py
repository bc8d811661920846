"""What is new in a job's store for a sink, from where the sink was: its cursor.

Invariants:
- *at least once*: the cursor moves after the sink has flushed, so what a death interrupts is delivered again;
- *nothing is skipped*: steps are followed by their numbers, everything else by the numbers of the events;
- *from the store alone*: a sink whose job has ended catches up all the same.

This module must not know which sink it delivers to, or when it is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from gyre.errors import NotFound
from gyre.failover.evaluation import SHOWN, Evaluation
from gyre.failover.events import Evaluated, LearningWarned, event_from
from gyre.observe.series.numbers import is_number
from gyre.observe.sinks.incidents import IncidentNews
from gyre.observe.sinks.sink import IncidentSink, Sink, SinkEnd, SinkEvaluation, SinkIncident, SinkWarning
from gyre.redaction import KNOWN
from gyre.store import EventRow, Store

T = TypeVar("T", SinkIncident, SinkEnd, SinkWarning)

PAGE = 500
"""Steps, or events, between two flushes: what is delivered again at the most."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last step, and the last event, that the sink received."""

    step: int = 0
    seq: int = 0


def read_cursor(path: Path) -> Cursor:
    """The kept cursor; the beginning where there is none, or it cannot be read: then all is delivered again."""
    try:
        kept = json.loads(path.read_text())
        return Cursor(int(kept["step"]), int(kept["seq"]))
    except (OSError, ValueError, TypeError, LookupError):
        return Cursor()


def write_cursor(path: Path, cursor: Cursor) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(cursor)))
    os.replace(fresh, path)


def tell_new(
    store: Store,
    job_id: str,
    sink: Sink,
    cursor: Cursor,
    *,
    incidents: IncidentNews | None = None,
    page: int = PAGE,
) -> Cursor:
    """Tell the sink at most a page of what is new, and return where it is then; the same cursor where nothing is.
    `incidents` has the fold of the journal up to the cursor, so that it is not folded again in every look."""
    journal = store.journal(job_id)
    steps = _steps(store, job_id, cursor.step, page)
    for step in steps:
        told = {name: float(value) for name, value in step.items() if is_number(value)}
        sink.step(step["step"], told.pop("at", 0.0), told)
    last_step = steps[-1]["step"] if steps else cursor.step
    events = journal.events(after=cursor.seq, limit=page)
    more = sink if isinstance(sink, IncidentSink) else None
    news = {} if more is None else (incidents or IncidentNews(store, job_id)).of(events)
    for row in events:
        _tell_event(sink, row, last_step)
        if more is not None:
            _tell_news(more, news.get(row.seq, ()))
    moved = Cursor(last_step, events[-1].seq if events else cursor.seq)
    if moved != cursor:
        sink.flush()
    return moved


def _steps(store: Store, job_id: str, after: int, page: int) -> list[dict[str, Any]]:
    try:
        return store.ledger(job_id).metrics(after=after, limit=page)
    except NotFound:
        return []  # the trainer has not begun


def _tell_news(sink: IncidentSink, news: Iterable[SinkIncident | SinkEnd]) -> None:
    for one in news:
        if isinstance(one, SinkIncident):
            sink.incident(_discreet(one))
        else:
            sink.ended(_discreet(one))


def _tell_event(sink: Sink, row: EventRow, last_step: int) -> None:
    if row.kind not in (Evaluated.__name__, LearningWarned.__name__):
        return
    event = event_from(row.kind, row.body)
    if isinstance(event, Evaluated):
        sink.evaluation(SinkEvaluation(event.set, event.version, last_step, row.at, numbers_of(event)))
    elif isinstance(event, LearningWarned):
        sink.warning(
            _discreet(SinkWarning(event.code, event.message, event.step, row.at, event.holds, row.seq))
        )


def numbers_of(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that people are shown of it; `pass_at/4` of those by k, and a component by its own name."""
    found: dict[str, Any] = {}
    for name in SHOWN:
        value = getattr(evaluation, name)
        prefix = "" if name == "components" else f"{name}/"
        found |= (
            {f"{prefix}{key}": one for key, one in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return {name: float(value) for name, value in found.items() if is_number(value)}


def _discreet(told: T) -> T:
    """What is told, without secrets in its texts: an error quotes what failed, and the text leaves the machine."""
    values: dict[str, Any] = {one.name: getattr(told, one.name) for one in fields(told)}
    texts: dict[str, Any] = {name: KNOWN.text(text) for name, text in values.items() if isinstance(text, str)}
    return replace(told, **texts)


def has_ended(store: Store, job_id: str) -> bool:
    return not store.job(job_id).live
