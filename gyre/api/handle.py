"""A handle on a submitted job: what `submit` returns, in the driver or in any later process.

    handle = JobHandle("grpo-1a2b", "sqlite:////home/me/.gyre/gyre.db")
    handle.status()["job"]["phase"]
    handle.wait(timeout=3600)            # or: await handle.aio.wait(timeout=3600)

Every method has an asynchronous twin of the same name and arguments under `handle.aio`.

Invariants:
- *a handle is a few strings*: it pickles, and holds nothing that a restart of the master could break;
- *waiting survives the master*: it goes on over restarts, and ends by itself when no master has shown a sign
  of life for `lost_after_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from gyre.api.home import home
from gyre.api.reader import COMMAND_DEADLINE_S, JobReader
from gyre.config import JOIN_SCOPE
from gyre.errors import GyreError, JobFailed, StoreLost, Unreachable
from gyre.failover import JobPhase
from gyre.logs.moments import moment_of
from gyre.logs.reading import LogQuery
from gyre.master.master_api import View

POLL_S = 0.5
STORE_LOST_AFTER_S = 15.0
"""How long a wait goes on while the store is gone and the master does not answer either: a master's restart."""

LOST_AFTER_S = 300.0
"""Beyond what a restart of the master takes on a busy cluster, and beyond the vertices' own patience."""


class JobHandle:
    """One job. Safe to use from many threads."""

    def __init__(
        self,
        job_id: str,
        store_url: str,
        token: str | None = None,
        *,
        home_path: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`home_path` is where the job's logs lie, GYRE_HOME by default; `notes` what its placement had to say."""
        self.job_id, self.store_url = job_id, store_url
        self.notes = tuple(notes)
        self._token, self._home_path = token, home_path
        self._reader: JobReader | None = None

    def __repr__(self) -> str:
        return f"JobHandle({self.job_id!r})"

    def _repr_html_(self) -> str:
        """The job in a notebook: how it is, and its curves."""
        from gyre.api.notebook import curves_html, table_html
        from gyre.api.now import now_of
        from gyre.api.verdict import sentence_of

        try:
            view, steps = self.status(), self.steps()
        except GyreError as error:
            return table_html(self.job_id, [("", error.message)])
        now = now_of(view, steps, time.time())
        facts = [(fact["label"], fact["value"]) for fact in now["facts"]]
        rows = [("", now["sentence"]), ("learns", sentence_of(now["learns"])), *facts]
        return table_html(f"{view['job']['name']} ({self.job_id})", rows) + curves_html(steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_handle, (self.job_id, self.store_url, self._token, self._home_path, self.notes))

    @property
    def aio(self) -> AsyncJobHandle:
        """The asynchronous twins of the methods."""
        return AsyncJobHandle(self)

    def close(self) -> None:
        """Let go of connections; the handle can be used again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # -- reads --------------------------------------------------------------------------------------

    def status(self) -> View:
        """The view of the job (see `gyre.master.master_api`), from the master or, without one, the journal."""
        return self._jobs.view(self.job_id)

    def wait(
        self,
        timeout: float | None = None,
        *,
        poll_s: float = POLL_S,
        lost_after_s: float = LOST_AFTER_S,
        on_view: Callable[[View], object] | None = None,
    ) -> View:
        """Wait until the job has ended, and return its last view. `on_view` gets every view on the way.

        Raises JobFailed with the user's traceback in `details["traceback"]`, TimeoutError past `timeout`
        seconds, and Unreachable where neither the master nor the journal gave a sign of life for `lost_after_s`.
        """
        watch = _Watch(self, timeout, lost_after_s)
        while True:
            try:
                view = self.status()
            except StoreLost:
                if not watch.may_come_back():
                    raise
                time.sleep(poll_s)
                continue
            if on_view is not None:
                on_view(view)
            pause_s = watch.look(view, poll_s)
            if pause_s is None:
                return view
            time.sleep(pause_s)

    def steps(self, last: int | None = None, *, after: int = 0) -> list[dict[str, Any]]:
        """The metrics of each step beyond `after`, in order, by the names in docs/training.md; with `last` of so many
        only."""
        return self._jobs.steps(self.job_id, last=last, after=after)

    def events(self, after: int = 0, follow: bool = False) -> Iterator[dict[str, Any]]:
        """The history after a sequence number; with `follow` until the job has ended."""
        return self._jobs.history(self.job_id, after=after, follow=follow)

    def logs(
        self,
        role: str | None = None,
        rank: int | None = None,
        *,
        vertex: str | None = None,
        level: str | None = None,
        since: str | float | None = None,
        until: str | float | None = None,
        tail: int | None = None,
        grep: str | None = None,
        follow: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """The lines of the job's processes in the order of time, as dicts: `at` (seconds since 1970), `level` (D, I, W,
        E), `vertex`, `incarnation`, `file`, `text`. Without `since` and `tail` the newest ones.

        `level` and whatever is worse; `since` and `until`: `"10m"` (ago), an ISO time, or seconds since 1970; `tail`:
        the last lines of each vertex; `grep`: a regular expression; `follow`: go on until the job has ended.

        Raises ConfigError for a time, a level or an expression that is none, NotFound where there are no logs.
        """
        now = time.time()
        query = LogQuery(
            vertex=vertex,
            role=role,
            rank=rank,
            level=level,
            since=moment_of(since, now, key="since") if isinstance(since, str) else since,
            until=moment_of(until, now, key="until") if isinstance(until, str) else until,
            grep=grep,
        )
        for page in self._jobs.log_pages(self.job_id, query, tail=tail, follow=follow):
            yield from page["lines"]

    # -- commands -----------------------------------------------------------------------------------

    def scale(self, role: str, n: int, *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Set the number of a role's vertices. Returns the event's sequence number, as all commands do.

        Raises NotFound, ConfigError or Conflict as the master says, Unreachable past the deadline.
        """
        return self._command("scale", {"role": role, "count": n}, deadline_s)

    def pause(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Pause the trainer at the end of its step."""
        return self._command("pause", {}, deadline_s)

    def resume(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Resume a paused trainer."""
        return self._command("resume", {}, deadline_s)

    def stop(self, reason: str = "", *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Stop the job gracefully. `wait` returns when it has ended."""
        return self._command("stop", {"reason": reason}, deadline_s)

    def drain(self, target: str, reason: str = "", *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Move one vertex, or all on a machine (its address, or the beginning of its id), elsewhere: they hand over
        first."""
        return self._command("drain", {"target": target, "reason": reason}, deadline_s)

    def undrain(self, target: str, *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Use a machine again that was drained or is left alone."""
        return self._command("undrain", {"target": target}, deadline_s)

    # -- join tokens --------------------------------------------------------------------------------

    def create_token(
        self,
        name: str,
        *,
        expires_in_s: float | None = None,
        scopes: Sequence[str] = (JOIN_SCOPE,),
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> str:
        """A token with which machines may join the job's rollout plane, good for so long or until it is revoked; or one
        for a fleet's door, with the scopes `generate` and `publish`. It is
        returned here, and nowhere again. Raises as `scale`."""
        expires_at = None if expires_in_s is None else time.time() + expires_in_s
        made, _ = self._jobs.create_token(
            self.job_id, name, expires_at=expires_at, scopes=scopes, deadline_s=deadline_s
        )
        return made

    def tokens(self) -> list[dict[str, Any]]:
        """The job's join tokens without their secrets: name, by, created_at, expires_at, revoked_at, scopes."""
        return self._jobs.tokens(self.job_id)

    def revoke_token(self, name: str, *, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        """Cut the instances that joined with the token, within a second. Their samples go on elsewhere."""
        return self._command("revoke_token", {"name": name}, deadline_s)

    # -- inside -------------------------------------------------------------------------------------

    @property
    def _jobs(self) -> JobReader:
        if self._reader is None:
            self._reader = JobReader(self.store_url, token=self._token, at=home(self._home_path))
        return self._reader

    def _command(self, verb: str, body: dict[str, Any], deadline_s: float) -> int:
        return self._jobs.command(self.job_id, verb, body, deadline_s=deadline_s)


def _handle(
    job_id: str, store_url: str, token: str | None, home_path: str | None, notes: tuple[str, ...]
) -> JobHandle:
    return JobHandle(job_id, store_url, token, home_path=home_path, notes=notes)


P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    method: Callable[Concatenate[JobHandle, P], R],
) -> Callable[Concatenate[AsyncJobHandle, P], Coroutine[Any, Any, R]]:
    @wraps(method)
    async def twin(self: AsyncJobHandle, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self._handle, *args, **kwargs)

    return twin


def _iterated(
    method: Callable[Concatenate[JobHandle, P], Iterator[dict[str, Any]]],
) -> Callable[Concatenate[AsyncJobHandle, P], AsyncIterator[dict[str, Any]]]:
    @wraps(method)
    async def twin(
        self: AsyncJobHandle, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[dict[str, Any]]:
        items = method(self._handle, *args, **kwargs)
        while (item := await asyncio.to_thread(next, items, None)) is not None:
            yield item

    return twin


class AsyncJobHandle:
    """The asynchronous twin: calls run in threads, waits on the loop, so that cancelling one is immediate. `events` and
    `logs` are asynchronous iterators."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle

    status = _in_thread(JobHandle.status)
    steps = _in_thread(JobHandle.steps)
    events = _iterated(JobHandle.events)
    logs = _iterated(JobHandle.logs)
    scale = _in_thread(JobHandle.scale)
    pause = _in_thread(JobHandle.pause)
    resume = _in_thread(JobHandle.resume)
    stop = _in_thread(JobHandle.stop)
    drain = _in_thread(JobHandle.drain)
    undrain = _in_thread(JobHandle.undrain)
    create_token = _in_thread(JobHandle.create_token)
    tokens = _in_thread(JobHandle.tokens)
    revoke_token = _in_thread(JobHandle.revoke_token)

    async def wait(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - the twin of the other `wait`, with its arguments
        *,
        poll_s: float = POLL_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> View:
        watch = _Watch(self._handle, timeout, lost_after_s)
        while True:
            try:
                view = await self.status()
            except StoreLost:
                if not watch.may_come_back():
                    raise
                await asyncio.sleep(poll_s)
                continue
            pause_s = watch.look(view, poll_s)
            if pause_s is None:
                return view
            await asyncio.sleep(pause_s)


class _Watch:
    """Decides, view by view, whether to go on waiting."""

    def __init__(self, handle: JobHandle, timeout_s: float | None, lost_after_s: float) -> None:
        self._handle = handle
        self._timeout_s, self._lost_after_s = timeout_s, lost_after_s
        self._began_at = self._alive_at = time.monotonic()
        self._seq = -1

    def may_come_back(self) -> bool:
        """Whether to go on waiting where neither the store nor the master can be read."""
        now = time.monotonic()
        within_s = min(self._lost_after_s, STORE_LOST_AFTER_S)
        if self._timeout_s is not None and now - self._began_at > self._timeout_s:
            return False
        return now - self._alive_at <= within_s

    def look(self, view: View, poll_s: float) -> float | None:
        """How long to pause before the next look; None when the job has ended well or was stopped."""
        raise_if_failed(view)
        if JobPhase(view["job"]["phase"]).ended:
            return None
        now = time.monotonic()
        if view["master"]["answering"] or view["seq"] != self._seq:
            self._alive_at, self._seq = now, view["seq"]
        if now - self._alive_at > self._lost_after_s:
            raise Unreachable(
                f"Job {view['job']['name']} is {view['job']['phase']} in its journal, but its master has not "
                f"answered for {self._lost_after_s:g} s.",
                hint="`gyre doctor` says whether Ray runs; submitting the job again starts it anew.",
                details={"job_id": self._handle.job_id},
            )
        if self._timeout_s is None:
            return poll_s
        left_s = self._began_at + self._timeout_s - now
        if left_s <= 0:
            raise TimeoutError(f"job {view['job']['name']} did not end within {self._timeout_s:g} s")
        return min(poll_s, left_s)


def raise_if_failed(view: View) -> None:
    """Raises JobFailed, with the user's traceback in its details, for the view of a job that failed."""
    job = view["job"]
    if JobPhase(job["phase"]) is JobPhase.FAILED:
        raise JobFailed(
            f"Job {job['name']} failed: {job['message'] or job['reason'] or 'no reason given'}.".replace(
                "..", "."
            ),
            hint=f"gyre events {job['name']} shows what led to the failure.",
            details={"traceback": job["error"], "job_id": job["job_id"], "reason": str(job["reason"])},
        )
