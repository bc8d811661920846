"""A disk that is really full: a small file system of its own, on both databases."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.errors import StoreFull
from gyre.store import Entry, Journal, Store, open_store
from tests.machine import SmallDisk, small_disk
from tests.store.fault_points import BEGUN, at_points
from tests.store.store_processes import entries


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """A file system of 1 MiB."""
    with small_disk(1024) as made:
        yield made


def _big(first: int) -> list[Entry]:
    """Entries of 50 kB that do not compress."""
    import random

    noise = random.Random(first)
    return [replace(entry, body={"x": noise.randbytes(25_000).hex()}) for entry in entries(first, 2)]


def _fill(journal: Journal, epoch: int) -> int:
    """Append until the disk is full; the number of the first entry that did not fit."""
    for first in range(1, 200, 2):
        try:
            journal.append(epoch, _big(first))
        except StoreFull:
            return first
    raise AssertionError("the disk never was full")


def _survives(journal: Journal, make_room: Callable[[], None]) -> None:
    epoch = journal.take_over(now=1.0, pid=1)
    first = _fill(journal, epoch)
    assert first > 1
    assert journal.last_seq() == len(journal.events()) == first - 1
    assert [command.id for command in journal.pending_commands()] == [f"c{first - 1}"]
    make_room()
    journal.append(epoch, _big(first))
    assert journal.last_seq() == len(journal.events()) == first + 1


def test_a_full_disk_is_said_so_and_the_same_entries_go_in_later_sqlite(disk: SmallDisk) -> None:
    with open_store(f"sqlite:///{disk.path / 'gyre.db'}") as store:
        store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
        _survives(store.journal("j1"), lambda: disk.resize(8192))
        store.verify()


@pytest.mark.postgres
def test_a_full_disk_is_said_so_and_the_same_entries_go_in_later_postgres(
    disk: SmallDisk, postgres_url: str, postgres_server: str
) -> None:
    import psycopg

    disk.resize(3072)
    space = disk.path / "space"
    space.mkdir()
    with contextlib.suppress(LookupError):
        shutil.chown(space, "postgres")
    plain = postgres_server.replace("+psycopg", "") + "/postgres"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
    try:
        with open_store(postgres_url + "%20-cdefault_tablespace%3Dsmall") as store:
            store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
            _survives(store.journal("j1"), lambda: disk.resize(16384))
        with psycopg.connect(plain, autocommit=True) as connection:
            schema = postgres_url.rpartition("%3D")[2]
            connection.execute(f"DROP SCHEMA {schema} CASCADE")
            connection.execute(f"CREATE SCHEMA {schema}")
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute("DROP TABLESPACE small")


def test_a_store_cannot_be_created_on_a_full_disk_and_says_why(disk: SmallDisk) -> None:
    (disk.path / "ballast").write_bytes(b"x" * (1024 * 1024 - 8192))
    with pytest.raises(StoreFull, match=r"No space left for .*gyre\.db"):
        open_store(f"sqlite:///{disk.path / 'gyre.db'}")


def test_a_file_at_its_page_limit_is_full(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as store:
        store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)

        def limit(pages: int) -> None:
            def on_begin(point: str) -> None:
                if point == BEGUN:
                    connections[-1].exec_driver_sql(f"PRAGMA max_page_count={pages}")

            at_points(store, on_begin)

        connections = _watch(store)
        limit(200)
        _survives(store.journal("j1"), lambda: limit(100_000))


def _watch(store: Store) -> list:
    import sqlalchemy as sa

    connections: list[sa.Connection] = []
    sa.event.listen(store._database._engine, "begin", connections.append)
    return connections
