"""Reads of a job and commands to it: from its master while that answers, otherwise from the journal.

Invariants:
- *the journal is enough*: every read works with the master gone, the cluster gone, the job long over;
- *history has one source*: events are read from the journal whenever there is one, never stitched together;
- *a command ends*: it is repeated over a master's restart (commands are idempotent) up to a deadline, and then
  it is Unreachable.

With a `url` and no store, the master is all there is: then a master that does not answer is Unreachable. This
module must not know Ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gyre.api.account import account_of
from gyre.api.client import GyreClient
from gyre.api.home import Home, home
from gyre.api.stored_states import StoredStates, with_job
from gyre.api.tls import trust_of
from gyre.api.verdict import judged_steps
from gyre.config import JOIN_SCOPE, parse_job
from gyre.config.secrets import secret_values
from gyre.errors import (
    Conflict,
    Fenced,
    GyreError,
    NotFound,
    StoreCorrupt,
    StoreError,
    StoreLost,
    Unauthorized,
    Unreachable,
)
from gyre.failover import FailoverCoordinator, JobPhase, JobState
from gyre.logs.reading import PARTIAL_S, LogQuery
from gyre.master.logs import logs_page
from gyre.master.master_api import View, tokens_of
from gyre.master.moment_view import moment_of
from gyre.master.store_notes import LostNote, notes_below
from gyre.observe.history import JobHistory
from gyre.observe.run_labels import label, labels_of
from gyre.observe.run_lines import FORM, LISTED, line_of
from gyre.observe.run_summary import keep_summary, summed_up
from gyre.observe.samples.query import SampleReader
from gyre.observe.series.thinning import POINTS
from gyre.redaction import KNOWN
from gyre.store import JobRow, ListedJob, Store, open_store

if TYPE_CHECKING:
    from gyre.observe.samples.files import SampleFiles

PROBE_TIMEOUT_S = 2.0
"""How long a read waits for the master before it turns to the journal."""

COMMAND_DEADLINE_S = 30.0
RETRY_AFTER_S = 0.25
SILENT_S = 3.0
"""How long a command may take before it is said that it waits: a master answers within a second."""
LONG_HISTORY = 100_000
"""Events from which on it is said that a history is read: a million take half a minute of a core."""
FOLLOW_POLL_S = 0.2
PAGE = 1000
LONG_LIST = 200
"""Jobs without a summary from which on it is said that they are summed up: each takes some ten milliseconds."""
LOG_PAGE_BYTES = 2**18
LOG_POLL_S = 0.5
JOBS_WITH_SAMPLES = 4
"""Jobs whose samples' narrow columns are kept in memory, those that were asked for last."""


@dataclass(frozen=True, slots=True)
class Found:
    """A job found by name or id. `url` is where its master was last seen."""

    job_id: str
    name: str
    live: bool
    url: str
    phase: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A job as it was at a moment."""

    name: str
    phase: str
    step: int
    at: float


class JobReader:
    """Reads and commands any job of one store, or the one job of the master at `url`."""

    def __init__(
        self,
        store_url: str | None,
        *,
        url: str | None = None,
        token: str | None = None,
        at: Home | None = None,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        ca: Path | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """`url` wins over `store_url` for everything that a master can answer. `ca` and `fingerprint` say what to trust
        of a master that speaks TLS; else it is the certificate in the job's directory, where that is in this home."""
        self._store_url, self._url, self._token = store_url, url, token
        self._home = at or home()
        self._probe_timeout_s = probe_timeout_s
        self._ca, self._fingerprint = ca, fingerprint
        self._opened: Store | None = None
        self._states: StoredStates | None = None
        self._clients: dict[str, GyreClient] = {}
        self._urls: dict[str, str] = {}
        self._known: dict[str, _Known] = {}
        self._histories: dict[str, JobHistory] = {}
        self._learned: set[str] = set()
        """Jobs whose secret values are known."""
        self.on_wait: Callable[[str], None] = lambda sentence: None
        """Is told, by any thread, what takes long, when it has begun to."""
        self._samples: OrderedDict[str, SampleFiles] = OrderedDict()
        self._samples_lock = threading.Lock()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = self._states = None
            self._histories.clear()
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """The store, opened on first use. Raises StoreError, or NotFound where none was named."""
        if self._store_url is None:
            raise NotFound("No store is known, only a master's address.", hint="Give --store URL.")
        if self._opened is None:
            self._opened = open_store(self._store_url, create=False)
        return self._opened

    # -- which job ----------------------------------------------------------------------------------

    def jobs(self, *, live: bool | None = None) -> list[dict[str, Any]]:
        """The newest `LISTED` jobs, the newest first: job_id, name, phase, reason, message, epoch, submitted_at,
        ended_at, live, url; what `gyre.observe.run_summary` sums up of each; its `tags` and `notes`; and from the store
        `queue_place`, the place among the jobs that wait for room that others hold.
        """
        if self._url is not None:
            return self._client(self._url).jobs()
        try:
            rows = self.store.listing.jobs(form=FORM, live=live, limit=LISTED)
        except (StoreLost, StoreCorrupt) as error:
            return self._jobs_of_masters(error)
        if (missing := sum(not row.live and row.summary is None for row in rows)) >= LONG_LIST:
            self.on_wait(
                f"Summing up {missing:,} jobs that ended before there were lists of this kind, once."
            )
        return [self._item(row) for row in rows]

    def listed(self, job_id: str) -> dict[str, Any]:
        """The summary and the labels of a job, as `MasterApi.listed` gives them."""
        if self._url is not None:
            return next(job for job in self._client(self._url).jobs() if job["job_id"] == job_id)
        row = self.store.job(job_id)
        summary = summed_up(self.store, job_id, row.spec, self._truth(row))
        return summary | labels_of(self.store.listing.labels(job_id))

    def label(
        self, job_id: str, *, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None
    ) -> dict[str, Any]:
        """Change the tags and the note of a job, whether it runs or has ended: `tags` and `notes` as they then are.
        Raises ConfigError for bad ones."""
        if self._url is not None:
            return self._client(self._url).label(job_id, add=add, remove=remove, notes=notes)
        return label(self.store, job_id, add=add, remove=remove, notes=notes)

    def _queue_place(self, row: JobRow) -> int | None:
        """The job's place among those that wait for room that others hold, from 1 on; None where it does not."""
        if not row.live or row.queued_since is None:
            return None
        queue = [one.job_id for one in self.store.queue(row.ray_address, time.time())]
        return queue.index(row.job_id) + 1 if row.job_id in queue else None

    def find(self, job: str | None = None, *, live_first: bool = False) -> Found:
        """Returns the job of that id or name; for None the newest, with `live_first` the newest that runs."""
        if self._url is not None:
            known = self._client(self._url)
            record = known.view(job)["job"] if job is not None else known.jobs()[0]
            ended = JobPhase(record["phase"]).ended
            return Found(record["job_id"], record["name"], not ended, self._url, record["phase"])
        try:
            return self._stored(job, live_first)
        except (StoreLost, StoreCorrupt) as error:
            return self._noted(job, error)

    def _stored(self, job: str | None, live_first: bool) -> Found:
        if job is not None:
            return _found(self.store.job(job))
        newest = (self.store.jobs(live=True, limit=1) if live_first else []) or self.store.jobs(limit=1)
        if not newest:
            raise NotFound("There is no job yet.", hint="Start one: gyre demo, or gyre run FILE.")
        return _found(newest[0])

    # -- reads --------------------------------------------------------------------------------------

    def view(self, job_id: str) -> View:
        """The view of the job at this moment; `master.answering` says where it is from."""
        if self._url is not None:
            return self._client(self._url).view(job_id)
        try:
            row = self.store.job(job_id)
        except (StoreLost, StoreCorrupt) as error:
            return self._last_known(job_id, error)
        if row.live and row.url:
            self._urls[job_id] = row.url
        view = self._view_of(row)
        self._known[job_id] = _known_of(view)
        return view

    def _last_known(self, job_id: str, error: StoreError) -> View:
        """The master's own view where it answers; else the error, with what was last known of the job and since when.
        What a connection still reads of a file that is gone is no news."""
        if job_id not in self._known:
            self._noted(job_id, error)
        if (url := self._urls.get(job_id)) is not None:
            with contextlib.suppress(GyreError):
                view = self._client(url, job_id).view(job_id)
                self._known[job_id] = _known_of(view)
                return view
        known = self._known[job_id]
        since = datetime.fromtimestamp(known.at, UTC)
        raise StoreLost(
            f"Last known of {known.name}: {known.phase}, step {known.step}, {time.time() - known.at:.0f} s ago "
            f"(since {since:%Y-%m-%d %H:%M:%S} UTC); its master does not answer. {error.message}",
            hint=error.hint,
            details=error.details,
        ) from error

    def _noted(self, job: str | None, error: StoreError) -> Found:
        """The job as its master noted it in this home when it lost the store, or as this reader last saw it."""
        for known_id, known in self._known.items():
            if job in (known_id, known.name):
                return Found(known_id, known.name, True, self._urls.get(known_id, ""), known.phase)
        for note in self._notes(error):
            if job in (None, note.job_id, note.name):
                self._known[note.job_id] = _Known(note.name, note.phase, note.step, note.at)
                if note.url:
                    self._urls[note.job_id] = note.url
                return Found(note.job_id, note.name, True, note.url, note.phase)
        raise error

    def _notes(self, error: StoreError) -> list[LostNote]:
        return [
            note for note in notes_below(self._home.jobs_folder) if note.path == error.details.get("path")
        ]

    def _jobs_of_masters(self, error: StoreError) -> list[dict[str, Any]]:
        """The jobs whose masters have noted that they lost this store, and answer. Raises the error where none does."""
        found: list[dict[str, Any]] = []
        for note in self._notes(error):
            self._noted(note.job_id, error)
            with contextlib.suppress(GyreError):
                found += self._client(note.url, note.job_id).jobs()
        if not found:
            for note in self._notes(error):
                self._last_known(note.job_id, error)
            raise error
        return found

    def _view_of(self, row: JobRow) -> View:
        if row.live and row.url:
            try:
                return self._client(row.url, row.job_id).view(row.job_id)
            except (Unreachable, NotFound, Unauthorized):
                pass  # the master is away, replaced by another program, or refuses us: the journal has it all
        return self._stored_view(row)

    def nodes(self, job_id: str) -> list[dict[str, Any]]:
        """The cluster's machines, as `gyre.master.master_api.nodes_of` gives them. Raises Conflict if the job has
        ended, Unreachable if its master does not answer."""
        if self._url is not None:
            return self._client(self._url).nodes(job_id)
        row = self.store.job(job_id)
        if not row.live:
            raise Conflict(f"Job {row.name} has ended ({row.phase}); it has no machines any more.")
        if not row.url:
            raise Unreachable(
                f"The master of job {row.name} has not started yet.", hint="Try again in a moment."
            )
        return self._client(row.url, row.job_id).nodes(row.job_id)

    def master_state(self, job: Mapping[str, Any]) -> str:
        """Returns the state of the master of an item of `jobs`: `answering`, `away`, or nothing for a job that has
        ended."""
        if self._url is not None:
            return "answering"
        if job["ended_at"]:  # also of a job that is lost and whose end nobody has written yet
            return ""
        return "answering" if self.view(job["job_id"])["master"]["answering"] else "away"

    def spec(self, job_id: str) -> dict[str, Any]:
        """The resolved spec that the job was submitted with."""
        if self._url is not None:
            return self._client(self._url).spec(job_id)
        return self.store.job(job_id).spec

    def create_token(
        self,
        job_id: str,
        name: str,
        *,
        expires_at: float | None = None,
        scopes: Sequence[str] = (JOIN_SCOPE,),
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> tuple[str, int]:
        """Make a token with these of `gyre.config.TOKEN_SCOPES`, good until `expires_at` (seconds since 1970). Returns
        it, which nobody can tell again, and the event's sequence number. Raises as `command`."""
        from gyre.rollouts.protocol.credentials import digest_of, new_secret

        made = new_secret()
        body = {"name": name, "digest": digest_of(made), "expires_at": expires_at, "scopes": list(scopes)}
        return made, self.command(job_id, "create_token", body, deadline_s=deadline_s)

    def tokens(self, job_id: str) -> list[dict[str, Any]]:
        """The tokens: name, by, created_at, expires_at, revoked_at, scopes."""
        if self._url is not None:
            return self._client(self._url).tokens(job_id)
        row = self.store.job(job_id)
        spec = parse_job(row.spec)
        coordinator = FailoverCoordinator(spec, lambda vertex: frozenset((vertex,)))
        return tokens_of(coordinator.join_tokens(self._state(row)))

    def events(self, job_id: str, *, after: int = 0, limit: int = PAGE) -> list[dict[str, Any]]:
        """Committed events with seq > after, at most `limit`."""
        if self._url is not None:
            return self._client(self._url).events(job_id, after=after, limit=limit)
        shown = self._shown(job_id)
        return [shown(row.as_view()) for row in self.store.journal(job_id).events(after=after, limit=limit)]

    def steps(self, job_id: str, *, last: int | None = None, after: int = 0) -> list[dict[str, Any]]:
        """The metrics of each step beyond `after`, in order, by the names in docs/training.md; with `last` of so many
        only."""
        if self._url is None:
            return self.store.ledger(job_id).metrics(after=after, limit=last, newest=True)
        client = self._client(self._url)
        if last is not None:
            newest = int(client.view(job_id)["training"]["last"].get("step", 0))
            after = max(newest - last, after)
        found: list[dict[str, Any]] = []
        while page := client.steps(job_id, after=after, limit=PAGE):
            found += page
            after = page[-1]["step"]
            if len(page) < PAGE:
                break
        return found if last is None else found[-last:]

    def steps_judged(self, view: View) -> list[Mapping[str, Any]]:
        """The metrics of the steps by which it is said whether the job learns (`gyre.api.verdict`), in order."""
        job_id, last = view["job"]["job_id"], int((view["training"]["last"] or {}).get("step", 0))
        if self._url is not None:
            client = self._client(self._url)
            return judged_steps(lambda after, limit: client.steps(job_id, after=after, limit=limit), last)
        ledger = self.store.ledger(job_id)
        return judged_steps(lambda after, limit: ledger.metrics(after=after, limit=limit), last)

    def account(self, view: View) -> dict[str, Any]:
        """Where every prompt and every token of the viewed job is, as `gyre.api.account.account_of` gives it."""
        job_id = view["job"]["job_id"]
        if self._url is not None:
            return self._client(self._url).account(job_id)
        from gyre.rollouts.plane.stored_account import stored_account

        audit = asdict(self.store.ledger(job_id).audit())
        return account_of(
            view, audit, lambda: stored_account(self.store.rollouts(job_id).load()), now=time.time()
        )

    def series(
        self,
        job_id: str,
        *,
        prefix: str = "",
        since: float | None = None,
        until: float | None = None,
        points: int = POINTS,
        names: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Numbers over time, as `MasterApi.series` gives them."""
        if self._url is not None:
            return self._client(self._url).series(
                job_id, prefix=prefix, since=since, until=until, points=points, names=names
            )
        from gyre.observe.series import read_series

        rows = self.store.series(job_id)
        return read_series(
            rows, prefix=prefix, since=since, until=until, points=points, names=names
        ).as_dict()

    def at(self, job_id: str, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        """The job after an event or at a time, as `MasterApi.at` gives it."""
        if self._url is not None:
            return self._client(self._url).at(job_id, seq=seq, time=time)
        return self._shown(job_id)(moment_of(self._history_of(job_id).at(seq, time=time)))

    def timeline(
        self, job_id: str, *, since: float | None = None, until: float | None = None
    ) -> dict[str, Any]:
        """Who did what from when to when, as `MasterApi.timeline` gives it."""
        if self._url is not None:
            return self._client(self._url).timeline(job_id, since=since, until=until)
        from gyre.observe.timeline import read_timeline

        found = read_timeline(self.store, self._history_of(job_id), since=since, until=until)
        return self._shown(job_id)(found.as_dict())

    def decisions(self, job_id: str, *, around: int) -> dict[str, int | None]:
        """`previous` and `next`: the decisions before and after an event, or None."""
        if self._url is not None:
            return self._client(self._url).decisions(job_id, around=around)
        previous, following = self._history_of(job_id).decisions(around)
        return {"previous": previous, "next": following}

    def _history_of(self, job_id: str) -> JobHistory:
        if job_id not in self._histories:
            if (count := self.store.journal(job_id).last_seq()) >= LONG_HISTORY:
                self.on_wait(
                    f"Reading the {count:,} events of job {job_id} for the first time; it takes a while."
                )
            self._histories[job_id] = JobHistory(self.store, job_id)
        return self._histories[job_id]

    def history(
        self, job_id: str, *, after: int = 0, follow: bool = False, poll_s: float = FOLLOW_POLL_S
    ) -> Iterator[dict[str, Any]]:
        """Every event after `after`; with `follow` also what is still to come, until the job has ended."""
        while True:
            page = self.events(job_id, after=after, limit=PAGE)
            yield from page
            if page:
                after = page[-1]["seq"]
            if len(page) == PAGE:
                continue
            if not follow:
                return
            if self.has_ended(job_id):
                yield from self.events(job_id, after=after)  # what came between the two looks
                return
            yield from self._wait_for_more(job_id, after, poll_s)

    def has_ended(self, job_id: str) -> bool:
        if self._url is not None:
            return JobPhase(self._client(self._url).view(job_id)["job"]["phase"]).ended
        row = self.store.job(job_id)
        return not row.live or self._state(row).job.phase.ended

    def logs(
        self,
        job_id: str,
        query: LogQuery | None = None,
        *,
        after: Mapping[str, int] | None = None,
        tail: int | None = None,
        limit_bytes: int = LOG_PAGE_BYTES,
    ) -> dict[str, Any]:
        """A page of lines in the order of time: `lines`, each with `at` (seconds since 1970), `level` (D, I, W, E),
        `vertex`, `incarnation`, `file` and `text`; `next`, to give as `after`; `more`: whether there is more to read at
        once; `searched_from`: what is older was not looked at; `missing`: in a first page,
        sentences about logs that are not to be had.

        At first the newest output, or that from the query's `since` on, or the newest `tail` lines of each vertex;
        with `after` what came since.

        Without a master: from the log files of this machine. NotFound where there are none.
        """
        query = query or LogQuery()
        url = self._url or self._live_url(job_id)
        folder = self._home.find_logs(job_id)
        if url:
            try:
                return self._client(url, job_id).logs(
                    job_id, query, after=after, tail=tail, limit_bytes=limit_bytes
                )
            except (Unreachable, NotFound, Unauthorized):
                if folder is None:
                    raise
        if folder is None:
            raise NotFound(
                f"There are no logs of job {job_id} in {self._home.path}.",
                hint="They lie in the GYRE_HOME of the machine that ran it.",
            )
        page = logs_page(
            folder,
            lambda: self.view(job_id)["vertices"] if self._url is None else [],
            query,
            after=after or {},
            tail=tail,
            limit_bytes=limit_bytes,
        )
        return self._shown(job_id)(page)

    def log_pages(
        self,
        job_id: str,
        query: LogQuery,
        *,
        tail: int | None = None,
        follow: bool = False,
        poll_s: float = LOG_POLL_S,
    ) -> Iterator[dict[str, Any]]:
        """The pages of `logs` up to now; with `follow` until the job has ended."""
        after: dict[str, int] = {}
        ended = not follow
        while True:
            page = self.logs(job_id, query, after=after, tail=None if after else tail)
            yield page
            after = page["next"]
            if page["more"]:
                continue
            if ended:
                return
            ended = self.has_ended(job_id)
            time.sleep(max(poll_s, 1.5 * PARTIAL_S) if ended else poll_s)  # also what has no end of line

    def samples(self, job_id: str) -> SampleReader:
        """The samples that the job keeps: from the files of this home, else from its master. Raises NotFound where
        there are none, and says why."""
        if self._url is not None:
            return self._client(self._url).samples(job_id)
        files = self._sample_files(job_id)
        if files.exists:
            return files
        if url := self._live_url(job_id):
            with contextlib.suppress(Unreachable, NotFound, Unauthorized):
                remote = self._client(url, job_id).samples(job_id)
                found = remote.steps()
                if found["steps"] or found["quarantined"]:
                    return remote
        row = self.store.job(job_id)
        raise NotFound(f"There are no samples of job {row.name} in {self._home.path}.", hint=_why_none(row))

    def _sample_files(self, job_id: str) -> SampleFiles:
        """The reader of the job's files, which remembers what filters and sorts of them."""
        from gyre.observe.samples.files import SampleFiles

        with self._samples_lock:
            files = self._samples.setdefault(job_id, SampleFiles(self._home.samples(job_id)))
            self._samples.move_to_end(job_id)
            if len(self._samples) > JOBS_WITH_SAMPLES:
                self._samples.popitem(last=False)
            return files

    def _live_url(self, job_id: str) -> str:
        """Where the master of a job that has not ended was last seen; "" where there is none."""
        try:
            row = self.store.job(job_id)
        except (StoreLost, StoreCorrupt) as error:
            return self._noted(job_id, error).url
        return (row.url or "") if row.live else ""

    # -- commands -----------------------------------------------------------------------------------

    def command(
        self,
        job_id: str,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> int:
        """Returns the seq of the event that records the command. Raises what the master raises, Conflict if the job has
        ended, Unreachable if no master took the command within `deadline_s`."""
        said = threading.Timer(
            SILENT_S,
            self.on_wait,
            [f"No master took the {verb} yet; it is asked for up to {deadline_s:g} s."],
        )
        said.daemon = True
        said.start()
        try:
            return self._carried(job_id, verb, body, deadline_s)
        finally:
            said.cancel()

    def _carried(self, job_id: str, verb: str, body: Mapping[str, Any] | None, deadline_s: float) -> int:
        until = time.monotonic() + deadline_s
        while True:
            found = self.find(job_id)
            if not found.live:
                raise Conflict(
                    f"Job {found.name} has ended ({found.phase}); `{verb}` needs a running job.",
                    hint="`gyre ls` shows the jobs that run.",
                )
            error = self._try_command(found, verb, body)
            if isinstance(error, int):
                return error
            if time.monotonic() + RETRY_AFTER_S > until:
                raise Unreachable(
                    f"No master of job {found.name} took the {verb} within {deadline_s:g} s: {error.message}",
                    hint=error.hint or "`gyre show` says whether the master answers.",
                )
            time.sleep(RETRY_AFTER_S)

    def _try_command(self, found: Found, verb: str, body: Mapping[str, Any] | None) -> int | GyreError:
        """Returns the seq, or the error that another attempt may overcome."""
        if not found.url:
            return Unreachable("its master has no address yet.", hint="It may still be starting.")
        client = self._client(found.url, found.job_id)
        try:
            return client.command(found.job_id, verb, body)
        except (Unreachable, Fenced) as error:
            return error
        except NotFound as error:
            try:
                mine = any(item["job_id"] == found.job_id for item in client.jobs())
            except GyreError as unsure:
                return unsure
            if mine:
                raise
            return error  # another master has the port now; the journal will have the new address of ours

    # -- inside -------------------------------------------------------------------------------------

    def _client(self, url: str, job_id: str | None = None) -> GyreClient:
        if url not in self._clients:
            timeout_s = 5.0 if url == self._url else self._probe_timeout_s
            known = self._home.rest_certificate(job_id) if job_id is not None else None
            trust = trust_of(url, ca=self._ca, fingerprint=self._fingerprint, known=known)
            self._clients[url] = GyreClient(url, self._token, timeout_s=timeout_s, trust=trust)
        return self._clients[url]

    def _wait_for_more(self, job_id: str, after: int, poll_s: float) -> Iterator[dict[str, Any]]:
        """Returns when there may be more; yields nothing itself."""
        if self._url is None:
            journal = self.store.journal(job_id)
            for _ in range(max(1, round(1.0 / poll_s))):
                if journal.last_seq() > after:
                    break
                time.sleep(poll_s)
        else:
            time.sleep(poll_s)
        yield from ()

    def _state(self, row: JobRow) -> JobState:
        return with_job(self._kept_states().state(row), row)

    def _kept_states(self) -> StoredStates:
        if self._states is None:
            self._states = StoredStates(self.store)
        return self._states

    def _stored_view(self, row: JobRow) -> View:
        return self._shown(row.job_id, row.spec)(self._kept_states().view(row, self._truth(row)))

    def _shown(
        self, job_id: str, spec: Mapping[str, Any] | None = None
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """What makes data of the job such that it may be shown (`gyre.redaction`). A job that is not in the store any
        more says nothing by its values."""
        if job_id not in self._learned:
            if spec is None:
                with contextlib.suppress(NotFound, StoreError):
                    spec = self.store.job(job_id).spec
            KNOWN.learn(secret_values(spec or {}, os.environ))
            if spec is not None:
                self._learned.add(job_id)
        return KNOWN.data

    def _truth(self, row: JobRow) -> JobState:
        """The stored state; as lost where nothing of a live job is left that could write its end."""
        from gyre.api.orphaned_jobs import lost_state

        state = self._kept_states().state(row)
        return (lost_state(self.store, row, state) if row.live else None) or with_job(state, row)

    def _item(self, listed: ListedJob) -> dict[str, Any]:
        """The line of a job: of one that has ended by what is kept of it, of any other by its state."""
        if listed.live or listed.summary is None:
            return self._summed_up(listed)
        return _line(listed, listed.summary)

    def _summed_up(self, listed: ListedJob) -> dict[str, Any]:
        row = self.store.job(listed.job_id)
        state = self._truth(row)
        if not row.live:
            return _line(listed, keep_summary(self.store, row.job_id, row.spec, state, seq=listed.last_seq))
        line = _line(listed, summed_up(self.store, row.job_id, row.spec, state))
        job = state.job
        return line | {
            "phase": str(job.phase),
            "reason": str(job.reason),
            "ended_at": job.ended_at,  # also of a job that is lost and whose end nobody has written yet
            "queue_place": self._queue_place(row),
        }


def _why_none(row: JobRow) -> str:
    """Why a job has no samples here."""
    kept = row.spec.get("observe", {}).get("samples", {})
    if kept.get("every") == 0:
        return "It was told to keep none: observe.samples.every is 0."
    if row.live and not row.spec.get("recipe"):
        return "Its trainer is a script of your own: Gyre does not see the samples of its steps."
    if row.live:
        return "It has not made a step yet, or its trainer is on a machine with another GYRE_HOME."
    return "They lie in the GYRE_HOME of the machine that its trainer ran on, in jobs/<id>/samples."


def _line(listed: ListedJob, summary: Mapping[str, Any]) -> dict[str, Any]:
    return line_of(
        summary,
        job_id=listed.job_id,
        name=listed.name,
        phase=listed.phase,
        reason=listed.reason,
        message=listed.message,
        epoch=listed.epoch,
        created_at=listed.created_at,
        ended_at=listed.ended_at,
        url=listed.url,
        tags=listed.labels.tags,
        notes=listed.labels.notes,
    )


def _found(row: JobRow) -> Found:
    return Found(row.job_id, row.name, row.live, row.url or "", row.phase)


def _known_of(view: View) -> _Known:
    job = view["job"]
    return _Known(job["name"], job["phase"], job["step"], time.time())
