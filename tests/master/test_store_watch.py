"""A store that vanishes under the real master, and the watch over it, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gyre.errors import SchemaTooNew, StoreCorrupt, StoreError, StoreFull, StoreLost
from gyre.failover import Cause, JobPhase, JobState
from gyre.failover.events import StoreReturned
from gyre.master import store_watch
from gyre.master.store_notes import MARK_FILE, MarkWriter, read_mark, write_mark
from gyre.master.store_watch import LOOK_S, StoreWatch, store_at
from gyre.store import Journal, StoreMark
from gyre.store.presence import Finding, Lost
from gyre.testing.clock import VirtualClock, run_virtual
from tests.doubles.standing_job import MasterLife
from tests.master.lives import JOB_ID, Job, Life

GONE = Finding(Lost.MISSING, "/s/gyre.db", "The store /s/gyre.db is gone: it was deleted or moved.")
OTHER = Finding(
    Lost.REPLACED, "/s/gyre.db", "The store /s/gyre.db was replaced: another store is in its place."
)
TIMEOUT_S = 60.0


@dataclass
class Watched:
    """A watch whose store is as `there` says at each moment."""

    there: Callable[[float], Finding | None]
    mark: StoreMark | None = None
    committed: JobState = field(default_factory=JobState)
    clock: VirtualClock = field(default_factory=VirtualClock)
    events: list[tuple[float, StoreReturned]] = field(default_factory=list)
    gone: list[tuple[float, str]] = field(default_factory=list)
    error: str = ""

    def look(self) -> Finding | None:
        return self.there(self.clock.monotonic())

    def submit(self, event: StoreReturned) -> None:
        self.events.append((self.clock.monotonic(), event))

    async def give_up(self, why: str) -> None:
        self.gone.append((self.clock.monotonic(), why))

    def run(self, for_s: float, *, at: Callable[[Watched, StoreWatch], None] = lambda *_: None) -> Watched:
        store: Any = self

        async def watch() -> None:
            watch = StoreWatch(
                store,
                store,
                timeout_s=TIMEOUT_S,
                clock=self.clock,
                owner=self,
                directory=Path("/nowhere"),
            )
            task = asyncio.create_task(watch.run())
            while self.clock.monotonic() < for_s and not task.done():
                await asyncio.sleep(LOOK_S / 4)
                at(self, watch)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        run_virtual(watch(), self.clock)
        return self


def test_a_lost_store_is_noticed_within_two_looks_and_the_error_says_what_to_do() -> None:
    noticed: list[float] = []

    def at(watched: Watched, watch: StoreWatch) -> None:
        if watch.lost and not noticed:
            noticed.append(watched.clock.monotonic())
            assert watch.lost == GONE.sentence
            assert GONE.sentence in watched.error
            assert "mv" in watched.error

    Watched(lambda now: GONE if now >= 10.0 else None).run(20.0, at=at)
    assert 10.0 <= noticed[0] <= 10.0 + 2 * LOOK_S


def test_a_store_that_is_back_is_one_event_with_what_was_found_and_how_long() -> None:
    watched = Watched(lambda now: GONE if 10.0 <= now < 40.0 else None).run(100.0)
    ((at, event),) = watched.events
    assert 40.0 <= at <= 40.0 + 2 * LOOK_S
    assert (event.kind, event.sentence) == ("missing", GONE.sentence)
    assert event.away_s == pytest.approx(30.0, abs=2 * LOOK_S)
    assert event.lost_at == pytest.approx(VirtualClock().time() + 10.0, abs=2 * LOOK_S)
    assert watched.error == ""
    assert watched.gone == []


def test_each_absence_has_a_time_of_its_own() -> None:
    away = ((5.0, 45.0), (50.0, 90.0))
    watched = Watched(lambda now: GONE if any(a <= now < b for a, b in away) else None).run(120.0)
    assert [round(event.away_s) for _, event in watched.events] == [40, 40]
    assert watched.gone == [], "two absences of 40 s are none of 80"


def test_a_finding_is_printed_once_and_a_change_of_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(lambda now: None if not 5.0 <= now < 45.0 else GONE if now < 20.0 else OTHER).run(60.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines if line] == [
        "the store is lost, nothing is committed",
        "the store is lost, nothing is committed",
        "the store is back",
    ]
    assert GONE.sentence in lines[0]
    assert OTHER.sentence in lines[1]
    ((_, event),) = watched.events
    assert (event.kind, round(event.away_s)) == ("replaced", 40)


def test_a_store_that_stays_away_is_given_up_once_and_in_time() -> None:
    watched = Watched(lambda now: GONE if now >= 10.0 else None).run(300.0)
    ((at, why),) = watched.gone
    assert why == GONE.sentence
    assert 10.0 + TIMEOUT_S <= at <= 10.0 + TIMEOUT_S + 3 * LOOK_S
    assert watched.events == []


# -- finding the store at the start --------------------------------------------------------------------


def _opens(monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> list[Any]:
    """`open_store` raises or returns these in turn, the last one for ever. Returns the outcomes that were used."""
    left, used = list(outcomes), []

    def open_store(url: str, *, create: bool) -> Any:
        assert not create
        used.append(left.pop(0) if len(left) > 1 else left[0])
        if isinstance(used[-1], Exception):
            raise used[-1]
        return used[-1]

    monkeypatch.setattr(store_watch, "open_store", open_store)
    return used


def _found(clock: VirtualClock, timeout_s: float = 30.0) -> Any:
    return run_virtual(store_at("sqlite:////s/gyre.db", timeout_s=timeout_s, clock=clock), clock)


@pytest.mark.parametrize(
    "error",
    [
        StoreLost("There is no store at /s/gyre.db."),
        StoreError("/s/gyre.db cannot be opened for writing.", details={"unreachable": True}),
        StoreError("postgresql://h/d cannot be reached.", details={"unreachable": True}),
        StoreError("/s/gyre.db: another process held the write lock.", details={"busy": True}),
        StoreCorrupt("/s/gyre.db is not a readable Gyre store."),
        SchemaTooNew("/s/gyre.db has schema 0099."),
    ],
)
def test_a_store_that_does_not_open_is_waited_for_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: StoreError
) -> None:
    store = object()
    _opens(monkeypatch, *[error] * 5, store)
    clock = VirtualClock()
    assert _found(clock) is store
    assert clock.monotonic() == pytest.approx(5 * LOOK_S)
    _opens(monkeypatch, error)
    assert _found(clock, timeout_s=30.0) is None
    assert clock.monotonic() == pytest.approx(5 * LOOK_S + 30.0, abs=2 * LOOK_S)
    assert capsys.readouterr().err.count("waiting for the store") == 2


def test_a_full_disk_is_not_waited_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _opens(monkeypatch, StoreFull("No space left for /s/gyre.db."))
    clock = VirtualClock()
    with pytest.raises(StoreFull):
        _found(clock)
    assert (len(used), clock.monotonic()) == (1, 0.0)


def _live(
    job: Job, *, store_lost_timeout_s: float, at: tuple[float, Callable[[], None]] | None = None
) -> None:
    """One master, in whose loop time passes also while it has no store yet."""
    life = MasterLife(job.world, job_id=JOB_ID, store_url=job.url, directory=job.folder)
    life.master._store_lost_timeout_s = store_lost_timeout_s
    try:
        life.start().add_done_callback(life.stop_loop)
        life.loop.call_later(300.0, life.die)
        if at is not None:
            life.loop.call_later(*at)
        life.loop.run_forever()
    finally:
        life.bury()


@pytest.mark.parametrize("where", ["the opening", "the take-over"])
def test_a_full_disk_at_the_start_has_no_deadline_and_is_in_the_history(
    monkeypatch: pytest.MonkeyPatch, make_job: Callable[..., Job], where: str
) -> None:
    job = make_job(steps=2)
    owner, name = (store_watch, "open_store") if where == "the opening" else (Journal, "take_over")
    done = getattr(owner, name)

    def full_at_first(*args: Any, **options: Any) -> Any:
        if job.clock.monotonic() < 25.0:
            raise StoreFull("No space left.")
        return done(*args, **options)

    monkeypatch.setattr(owner, name, full_at_first)
    _live(job, store_lost_timeout_s=10.0)
    assert job.phase is JobPhase.SUCCEEDED
    assert job.clock.monotonic() >= 25.0
    assert {"DiskFilled", "DiskHasRoom"} <= set(job.kinds)


def test_a_master_that_starts_without_its_store_waits_for_it(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=2)
    away = job.folder / "away"
    _move(job, job.folder, away)
    _live(job, store_lost_timeout_s=30.0, at=(15.0, lambda: _move(job, away, job.folder)))
    assert job.clock.monotonic() > 15.0
    assert job.phase is JobPhase.SUCCEEDED


def test_a_master_whose_store_does_not_come_gives_up_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path / "job")
    _move(job, job.folder, job.folder / "away")
    _live(job, store_lost_timeout_s=30.0)
    assert list(job.folder.glob("gyre.db*")) == []
    assert job.world.ended
    assert "was not there for 30 s: the job is given up" in capsys.readouterr().err
    job.store.close()


# -- a copy that is older than the last master saw ------------------------------------------------------


@pytest.fixture
def dead_with_a_copy(make_job: Callable[..., Job]) -> Job:
    """A job whose master died after its store was copied. The copy is in the store's place, the store in `newer`."""
    job = make_job(steps=40, step_s=2.0)
    older = job.folder / "older"
    life = job.life().at(10.0, lambda _: _copy(job, older))
    life.run(60.0)
    _move(job, job.folder, job.folder / "newer")
    _move(job, older, job.folder)
    return job


def _copy(job: Job, folder: Path) -> None:
    folder.mkdir()
    with (
        contextlib.closing(sqlite3.connect(job.folder / "gyre.db")) as source,
        contextlib.closing(sqlite3.connect(folder / "gyre.db")) as target,
    ):
        source.backup(target)


def _swap(job: Job) -> None:
    for file in job.folder.glob("gyre.db*"):
        file.unlink()
    _move(job, job.folder / "newer", job.folder)


def test_a_master_takes_no_older_copy_and_goes_on_with_the_newer_one(
    dead_with_a_copy: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job = dead_with_a_copy
    began = job.clock.monotonic()
    _live(job, store_lost_timeout_s=60.0, at=(15.0, lambda: _swap(job)))
    assert "is an older copy" in capsys.readouterr().err
    assert job.clock.monotonic() > began + 15.0
    assert job.phase is JobPhase.SUCCEEDED
    job.check()


def test_an_older_copy_that_stays_ends_the_job_and_is_not_written_to(
    dead_with_a_copy: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job = dead_with_a_copy
    before = (job.folder / "gyre.db").read_bytes()
    _live(job, store_lost_timeout_s=30.0)
    assert job.world.ended
    assert "the job is given up" in capsys.readouterr().err
    assert (job.folder / "gyre.db").read_bytes() == before
    _swap(job)


def test_another_store_is_not_taken_for_the_job_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path / "job")
    write_mark(job.folder, StoreMark("another", 1))
    _live(job, store_lost_timeout_s=30.0)
    assert job.world.ended
    assert "is another store than the job's" in capsys.readouterr().err
    job.store.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"store_id": "a"}',
        '{"store_id": "a", "commits": "9"}',
        '{"store_id": 1, "commits": 9}',
    ],
)
def test_a_mark_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MARK_FILE).write_text(text)
    assert read_mark(tmp_path) is None
    assert read_mark(tmp_path / "nowhere") is None
    write_mark(tmp_path / "nowhere", StoreMark("a", 1))


def test_one_mark_is_written_at_a_time_and_the_same_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, written = threading.Event(), []

    def write(_directory: Path, mark: StoreMark) -> None:
        written.append(mark.commits)
        assert hangs.wait(30.0)

    monkeypatch.setattr("gyre.master.store_notes.write_mark", write)
    marks = MarkWriter(tmp_path)
    for commits in (1, 1, 2, 3):  # the disk hangs over the first
        marks.keep(StoreMark("a", commits))
    hangs.set()
    assert marks._thread is not None
    marks._thread.join(30.0)
    marks.keep(StoreMark("a", 3))
    marks._thread.join(30.0)
    marks.keep(StoreMark("a", 3))
    assert written == [1, 3]


# -- under the master ----------------------------------------------------------------------------------


def _move(job: Job, source: Path, target: Path) -> None:
    """The store's files, from one folder to the other. The log is there before the file that names it."""
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("gyre.db*"), reverse=True):
        os.rename(file, target / file.name)


def test_a_job_whose_store_is_moved_away_goes_on_and_says_so(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=40, step_s=2.0)
    away = job.folder / "away"
    seen: dict[str, Any] = {}

    def look(life: Life) -> None:
        seen["view"], seen["files"] = life.master.view(), list(job.folder.glob("gyre.db*"))
        seen["steps"] = len(job.world.steps)

    life = job.life().at(20.0, lambda _: _move(job, job.folder, away)).at(22.5, look)
    life.at(50.0, lambda _: seen.update(later=len(job.world.steps)))
    life.at(60.0, lambda _: _move(job, away, job.folder))
    life.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert "is gone: it was deleted or moved" in seen["view"]["store"]["error"]
    assert seen["files"] == [], "no store is made in its place"
    assert seen["later"] > seen["steps"], "the data plane goes on"
    (lost,) = [one for one in job.incidents if one.cause == Cause.STORE_LOST]
    assert (lost.outcome, lost.evidence["kind"]) == ("recovered", "missing")
    assert lost.evidence["away_s"] == pytest.approx(40.0, abs=3 * LOOK_S)
    assert not job.state.uses, "nobody pays for it"


def test_a_job_whose_store_is_deleted_is_given_up(
    make_job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(steps=10_000)
    away = job.folder / "away"
    life = job.life().at(20.0, lambda _: _move(job, job.folder, away))
    life.master._store_lost_timeout_s = 10.0
    ended: list[float] = []

    async def end() -> None:
        ended.append(job.clock.monotonic())

    life.connection.end = end  # type: ignore[method-assign]
    life.run(60.0)
    (at,) = ended
    assert at == pytest.approx(30.0, abs=5 * LOOK_S)
    assert "the job is given up" in capsys.readouterr().err
    assert list(job.folder.glob("gyre.db*")) == []
    _move(job, away, job.folder)
