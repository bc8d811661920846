"""A store's file that vanishes, is replaced or damaged while it is open: noticed, never written to, and gone on with
once it is back."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gyre.errors import StoreCorrupt, StoreError, StoreLost
from gyre.store import Store, open_store
from gyre.store.presence import ANSWERED_FOR_S, Lost, Presence
from gyre.testing.clock import VirtualClock
from tests.waits import GENEROUS_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "gyre.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{path}") as opened:
        opened.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
        _copy_of(path)
        opened.update_job("j1", message="after the copy")
        yield opened


def _files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}*"))


def _aside(path: Path) -> None:
    for file in _files(path):
        file.rename(file.with_name(f"aside-{file.name}"))


def _back(path: Path) -> None:
    for file in path.parent.glob("aside-*"):
        file.rename(file.with_name(file.name.removeprefix("aside-")))


def _copy_of(path: Path) -> Path:
    copy = path.with_name("copy")
    with sqlite3.connect(path) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    source.close()
    target.close()
    return copy


def _delete(path: Path) -> None:
    for file in _files(path):
        file.unlink()


def _put_copy_in_place(path: Path) -> None:
    os.replace(path.with_name("copy"), path)


def _put_other_in_place(path: Path) -> None:
    other = path.with_name("other.db")
    open_store(f"sqlite:///{other}").close()
    os.replace(other, path)


def _checkpoint(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


WAYS: dict[str, tuple[Callable[[Path], None], Lost, str]] = {
    "deleted": (_delete, Lost.MISSING, "deleted or moved"),
    "the file alone deleted": (os.unlink, Lost.MISSING, "deleted or moved"),
    "moved": (_aside, Lost.MISSING, "deleted or moved"),
    "replaced by an older copy": (_put_copy_in_place, Lost.REPLACED, "an older copy of it is in its place"),
    "replaced by another store": (_put_other_in_place, Lost.REPLACED, "another store is in its place"),
    "replaced by a text": (
        lambda path: (path.unlink(), path.write_text("no store"))[0],
        Lost.REPLACED,
        "what is no Gyre store is in its place",
    ),
    "truncated": (lambda path: os.truncate(path, 4096), Lost.TRUNCATED, "truncated"),
    "emptied": (lambda path: os.truncate(path, 0), Lost.TRUNCATED, "truncated"),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_committed_into_a_store_that_is_lost(store: Store, path: Path, way: str) -> None:
    do, kind, words = WAYS[way]
    _checkpoint(path)
    store.job("j1")
    do(path)
    there = {file: file.read_bytes() for file in _files(path) if not file.name.endswith("-shm")}
    for use in (
        lambda: store.update_job("j1", phase="running"),
        lambda: store.journal("j1").take_over(now=2.0, pid=1),
        lambda: store.job("j1"),
    ):
        with pytest.raises(StoreLost, match=words) as found:
            use()
        assert found.value.details["lost"] == kind
        assert found.value.hint
    assert there == {file: file.read_bytes() for file in _files(path) if not file.name.endswith("-shm")}


def test_a_store_that_is_put_back_goes_on(store: Store, path: Path) -> None:
    epoch = store.journal("j1").take_over(now=2.0, pid=1)
    _aside(path)
    with pytest.raises(StoreLost):
        store.journal("j1").take_over(now=3.0, pid=1)
    _back(path)
    assert store.journal("j1").take_over(now=4.0, pid=1) == epoch + 1


def test_a_transaction_that_was_open_when_the_file_went_is_not_acknowledged(store: Store, path: Path) -> None:
    with pytest.raises(StoreLost), store._database.write() as connection:  # noqa: PT012
        connection.exec_driver_sql("UPDATE gyre_jobs SET phase = 'running'")
        _aside(path)
    _back(path)
    assert store.job("j1").phase != "running"


def test_a_writer_that_holds_waits_until_the_store_is_back(store: Store, path: Path) -> None:
    with open_store(store.url, create=False, hold_s=20.0) as holding:
        holding.job("j1")
        _aside(path)
        timer = threading.Timer(0.4, _back, (path,))
        timer.start()
        holding.update_job("j1", phase="running")
        timer.join()
    assert store.job("j1").phase == "running"


@pytest.mark.parametrize("with_index", [False, True])
def test_what_was_in_a_removed_log_is_brought_into_the_file(
    store: Store, path: Path, with_index: bool
) -> None:
    store.update_job("j1", phase="running")
    Path(f"{path}-wal").unlink()
    if with_index:
        Path(f"{path}-shm").unlink()
    store.update_job("j1", message="after it")
    copy = path.with_name("as-a-fresh-process-sees-it.db")
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{copy}{end}")
    with open_store(f"sqlite:///{copy}", create=False) as fresh:
        row = fresh.job("j1")
    assert (row.phase, row.message) == ("running", "after it")


def test_a_copy_that_is_written_over_the_file_is_older(store: Store, path: Path) -> None:
    """The inode is the same: only the count of commits tells it."""
    copy = path.with_name("copy")
    _checkpoint(path)
    with copy.open("rb") as source, path.open("r+b") as target:
        shutil.copyfileobj(source, target)
    store._database._engine.dispose()  # no page is remembered
    with pytest.raises(StoreLost, match="older copy"):
        store.update_job("j1", message="never")


def test_a_file_that_was_compacted_is_the_same(store: Store, path: Path) -> None:
    for number in range(300):
        store.create_job(job_id=f"k{number}", name=f"k{number}", spec={"x": "y" * 2000}, now=1.0)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.commit()
        store.job("j1")
        connection.execute("DELETE FROM gyre_jobs WHERE job_id <> 'j1'")
        connection.commit()
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    store.update_job("j1", phase="running")
    assert store.job("j1").phase == "running"


def test_a_read_only_file_is_told(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gyre.store.presence.os.access", lambda where, how: how != os.W_OK
    )  # root may write anything
    with pytest.raises(StoreLost, match="read-only"):
        store.update_job("j1", phase="running")


def test_a_file_system_that_hangs_is_told_in_time_and_costs_one_thread(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    answers, hangs = threading.Event(), threading.Event()

    def stat(where: str) -> os.stat_result:
        if hangs.is_set():
            answers.wait(20.0)
        return os.stat(where)

    presence = Presence(path, stat=stat)
    presence.connected(first=True)
    presence.hangs_after_s = 5.0
    assert presence.look_within() is None
    presence.hangs_after_s = 0.05
    hangs.set()
    before = threading.active_count()
    for _ in range(3):
        began = time.monotonic()
        finding = presence.look_within()
        assert finding is not None
        assert finding.kind is Lost.HANGING
        assert time.monotonic() - began < 5.0
    assert threading.active_count() <= before + 1
    hangs.clear()
    answers.set()
    assert presence._hanging is not None
    presence._hanging.thread.join(5.0)
    presence.hangs_after_s = 5.0
    assert presence.look_within() is None


def test_a_thread_that_waits_for_the_disk_holds_up_no_other(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    asked, answers = threading.Event(), threading.Event()

    def stat(where: str) -> os.stat_result:
        if where.endswith("-wal"):
            asked.set()
            answers.wait(GENEROUS_S)
        return os.stat(where)

    presence = Presence(path, stat=stat)
    presence.connected(first=True)
    looks = threading.Thread(target=presence.look)
    looks.start()
    assert asked.wait(GENEROUS_S)
    others = threading.Thread(target=presence.committed, args=(1,))
    others.start()
    others.join(GENEROUS_S / 2)
    is_held_up = others.is_alive()
    answers.set()
    looks.join(GENEROUS_S)
    others.join(GENEROUS_S)
    assert not is_held_up


def test_a_look_that_another_overtook_is_no_finding(path: Path) -> None:
    """The file grows and is seen to have, between a thread's question and its judgement."""
    path.parent.mkdir()
    path.write_bytes(b"x")
    overtaken = False

    def stat(where: str) -> os.stat_result:
        nonlocal overtaken
        found = os.stat(where)
        if where == str(path) and presence._file is not None and not overtaken:
            overtaken = True
            path.write_bytes(b"xx")
            assert presence.look() is None
        return found

    presence = Presence(path, stat=stat)
    presence.connected(first=True)
    assert presence.look() is None
    assert overtaken
    path.write_bytes(b"x")
    finding = presence.look()
    assert finding is not None
    assert finding.kind is Lost.TRUNCATED


@dataclass
class Disk:
    """A disk that can hang: every look at a file on it waits until it answers again."""

    hangs: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)

    def stat(self, where: str) -> os.stat_result:
        if self.hangs.is_set():
            self.answers.wait(20.0)
        return os.stat(where)

    def hang(self) -> None:
        self.answers.clear()
        self.hangs.set()

    def answer(self) -> None:
        self.hangs.clear()
        self.answers.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk()
    monkeypatch.setattr("gyre.store.presence.HANGS_AFTER_S", 0.1)
    monkeypatch.setattr("gyre.store.presence.ANSWERED_FOR_S", 0.0)
    monkeypatch.setattr("gyre.store.database.Presence", lambda path: Presence(path, stat=made.stat))
    yield made
    made.answer()


def test_each_use_of_a_store_on_a_disk_that_hangs_ends_in_time(disk: Disk, store: Store) -> None:
    epoch = store.journal("j1").take_over(now=2.0, pid=1)
    disk.hang()
    before = threading.active_count()
    for use in (
        lambda: store.update_job("j1", phase="running"),
        lambda: store.journal("j1").take_over(now=3.0, pid=1),
        lambda: store.job("j1"),
        lambda: open_store(store.url, create=False),
    ):
        began = time.monotonic()
        with pytest.raises(StoreLost, match="does not answer") as found:
            use()
        assert found.value.details["lost"] == Lost.HANGING
        assert time.monotonic() - began < 5.0
    finding = store.look()
    assert finding is not None
    assert finding.kind is Lost.HANGING
    assert threading.active_count() <= before + 2, "one thread of the open store, one of the open that failed"
    disk.answer()
    _wait_until(lambda: store.look() is None)
    assert store.journal("j1").take_over(now=4.0, pid=1) == epoch + 1


def test_a_writer_that_holds_waits_for_a_disk_that_hangs(disk: Disk, store: Store) -> None:
    with open_store(store.url, create=False, hold_s=20.0) as holding:
        disk.hang()
        timer = threading.Timer(0.4, disk.answer)
        timer.start()
        holding.update_job("j1", phase="running")
        timer.join()
    assert store.job("j1").phase == "running"


def test_a_look_that_was_answered_lately_costs_no_thread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    path.touch()
    clock = VirtualClock()
    presence = Presence(path, clock=clock)
    presence.connected(first=True)
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread))[1]
    )
    for _ in range(5):
        assert presence.look_often() is None
    assert started == ["store-presence"]
    clock.advance(ANSWERED_FOR_S)
    assert presence.look_often() is None
    assert started == ["store-presence"] * 2


def _wait_until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_the_system_cannot_reach_is_an_error_of_ours(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("gyre.store.database._check_path", fails)
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(f"sqlite:///{path}", create=False)


def test_a_database_without_a_store_is_a_lost_one(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    with pytest.raises(StoreLost, match="holds no Gyre store"):
        open_store(f"sqlite:///{path}", create=False)


@pytest.mark.parametrize("content", [b"", b"no database at all, but long enough to be read as one" * 40])
def test_a_damaged_file_is_corrupt(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt):
        open_store(f"sqlite:///{path}", create=False)


@pytest.mark.parametrize("content", [None, b""])
def test_nobody_but_who_creates_makes_a_store(path: Path, content: bytes | None) -> None:
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError):
        open_store(f"sqlite:///{path}", create=False)
    assert not path.exists() or path.stat().st_size == 0


def test_readers_beside_writers_take_no_read_for_an_older_copy(store: Store) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                store.job("j1")
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        store.update_job("j1", message=str(number))
    stop.set()
    for reader in readers:
        reader.join(30.0)
    assert errors == []
