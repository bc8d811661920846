"""A sink's own process: it follows the job's store, and may hang, fail or be killed without anybody waiting for it.

    GYRE_SINK='{…}' python -m gyre.observe.sinks.process

Its settings come by the environment, for a store's address may hold a password, and arguments are for all to see.

Invariants:
- *one at a time*: a lock in the sink's folder keeps the process of a next master waiting until this one is gone;
- *nobody is left behind*: it ends when the process that started it is gone, unless the job has ended and there is still
  something to tell;
- *it shows that it lives*: the file `alive` is touched in every turn, so that whoever started it can tell a sink that
  hangs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre.config.secrets import secret_values
from gyre.errors import GyreError
from gyre.logs.output import LOG_VARIABLE, look_at_log, redirect_output
from gyre.observe.history import JobHistory
from gyre.observe.sinks.following import PAGE, Cursor, has_ended, read_cursor, tell_new, write_cursor
from gyre.observe.sinks.incidents import IncidentNews
from gyre.observe.sinks.kinds import make_sink
from gyre.observe.sinks.notify import NOTIFY, NotifyOptions, NotifySink
from gyre.observe.sinks.notify import PAGE as NOTIFY_PAGE
from gyre.observe.sinks.otlp_sink import PAGE as OTLP_PAGE
from gyre.observe.sinks.sink import Sink, SinkJob
from gyre.observe.timeline import read_timeline
from gyre.redaction import KNOWN
from gyre.store import JobRow, Store, open_store

log = logging.getLogger(__name__)

SETTINGS = "GYRE_SINK"
POLL_S = 1.0
_PAGES = {NOTIFY: NOTIFY_PAGE, "otlp": OTLP_PAGE}


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """`folder` is the sink's own; `parent` the process that started it."""

    store_url: str
    job_id: str
    number: int
    kind: str
    folder: str
    parent: int
    to: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    python_path: list[str] = field(default_factory=list)
    poll_s: float = POLL_S

    def as_environment(self) -> dict[str, str]:
        return {SETTINGS: json.dumps(asdict(self))}

    @property
    def label(self) -> str:
        """What its output is called among the job's logs."""
        return f"{'notify' if self.kind == NOTIFY else 'sink'}-{self.number}"

    @property
    def cursor_path(self) -> Path:
        return Path(self.folder) / "cursor.json"

    @property
    def alive_path(self) -> Path:
        return Path(self.folder) / "alive"


def run(settings: SinkSettings) -> None:
    """Tell the sink whatever comes, until the job has ended or the parent is gone."""
    Path(settings.folder).mkdir(parents=True, exist_ok=True)
    with _alone(settings) as is_alone:
        if is_alone:
            with open_store(settings.store_url, create=False) as store:
                _follow(settings, store)


def _follow(settings: SinkSettings, store: Store) -> None:
    row = store.job(settings.job_id)
    KNOWN.learn(secret_values(row.spec, os.environ))
    history = JobHistory(store, settings.job_id)
    job = SinkJob(
        settings.job_id,
        row.name,
        _shown(row.spec),
        Path(settings.folder),
        settings.to,
        settings.number,
        timeline=lambda since, until: read_timeline(store, history, since=since, until=until),
    )
    sink: Sink
    if settings.kind == NOTIFY:
        sink = _notifier(settings, job, row, store)
        if not settings.cursor_path.exists():
            write_cursor(settings.cursor_path, _now(store, settings.job_id))
    else:
        sink = make_sink(settings.kind, job, settings.options, settings.python_path)
    page = _PAGES.get(settings.kind, PAGE)
    incidents = IncidentNews(store, settings.job_id)
    cursor: Cursor = read_cursor(settings.cursor_path)
    while True:
        settings.alive_path.touch()
        look_at_log()
        ended = has_ended(store, settings.job_id)  # before the look: what came by then is told
        moved = tell_new(store, settings.job_id, sink, cursor, incidents=incidents, page=page)
        if moved != cursor:
            write_cursor(settings.cursor_path, moved)
            cursor = moved
            continue
        if ended:
            sink.close()
            return
        if os.getppid() != settings.parent:
            return  # the next master starts another one
        time.sleep(settings.poll_s)


def _notifier(settings: SinkSettings, job: SinkJob, row: JobRow, store: Store) -> NotifySink:
    options = NotifyOptions(**settings.options)
    environment = {**os.environ, **row.spec.get("env", {})}
    return NotifySink(
        job,
        options.target(job, environment),
        on=options.on,
        page_address=lambda: store.job(job.job_id).url or "",
    )


def _now(store: Store, job_id: str) -> Cursor:
    """Where the job was begun, or has gone on last: somebody who is told from then on is not told of what was before,
    for whom to notify can be added only then."""
    continued = store.journal(job_id).continued()
    return Cursor(seq=continued[-1].seq) if continued else Cursor()


def _shown(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec without what may be secret, and without what a sink has no use for: it leaves the machine."""
    shown = {key: value for key, value in spec.items() if key not in ("env", "store", "observe")}
    roles = shown.get("roles")
    if isinstance(roles, dict):
        shown["roles"] = {
            name: {key: value for key, value in role.items() if key != "env"} for name, role in roles.items()
        }
    found: dict[str, Any] = KNOWN.data(shown)
    return found


@contextlib.contextmanager
def _alone(settings: SinkSettings) -> Iterator[bool]:
    """Whether this is the only process of the sink, after the one before it has gone; False where the parent has gone
    meanwhile."""
    with open(Path(settings.folder) / "lock", "w") as lock:
        while True:
            settings.alive_path.touch()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if os.getppid() != settings.parent:
                    yield False
                    return
                time.sleep(settings.poll_s)
            else:
                yield True
                return


def main() -> None:
    settings = SinkSettings(**json.loads(os.environ.pop(SETTINGS)))
    if output := os.environ.get(LOG_VARIABLE):
        redirect_output(Path(output))
    sys.path[:0] = [folder for folder in settings.python_path if folder not in sys.path]
    try:
        run(settings)
    except GyreError as error:  # a sentence is enough; what a sink's own class raises keeps its traceback
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
