"""A disk that is really full: a small file system of its own, on both databases."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.errors import StoreFull
from gyre.store import Entry, Journal, Store, open_store
from tests.store.fault_points import BEGUN, at_points
from tests.store.store_processes import entries


def _mount(folder: Path, size_kb: int, *, again: bool = False) -> None:
    options = f"size={size_kb}k" + (",remount" if again else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB. Not below `tmp_path`, which the server's user could not enter."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-small-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        try:
            _mount(folder, 1024)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no right to mount a tmpfs here: see the page-count test below")
        yield folder
        subprocess.run(["umount", "-l", folder], check=True)
    finally:
        folder.rmdir()


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


def test_a_full_disk_is_said_so_and_the_same_entries_go_in_later_sqlite(small_disk: Path) -> None:
    with open_store(f"sqlite:///{small_disk / 'gyre.db'}") as store:
        store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
        _survives(store.journal("j1"), lambda: _mount(small_disk, 8192, again=True))
        store.verify()


@pytest.mark.postgres
def test_a_full_disk_is_said_so_and_the_same_entries_go_in_later_postgres(
    small_disk: Path, postgres_url: str, postgres_server: str
) -> None:
    import psycopg

    _mount(small_disk, 3072, again=True)
    space = small_disk / "space"
    space.mkdir()
    with contextlib.suppress(LookupError):
        shutil.chown(space, "postgres")
    plain = postgres_server.replace("+psycopg", "") + "/postgres"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
    try:
        with open_store(postgres_url + "%20-cdefault_tablespace%3Dsmall") as store:
            store.create_job(job_id="j1", name="grpo", spec={}, now=1.0)
            _survives(store.journal("j1"), lambda: _mount(small_disk, 16384, again=True))
        with psycopg.connect(plain, autocommit=True) as connection:
            schema = postgres_url.rpartition("%3D")[2]
            connection.execute(f"DROP SCHEMA {schema} CASCADE")
            connection.execute(f"CREATE SCHEMA {schema}")
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute("DROP TABLESPACE small")


def test_a_store_cannot_be_created_on_a_full_disk_and_says_why(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (1024 * 1024 - 8192))
    with pytest.raises(StoreFull, match=r"No space left for .*gyre\.db"):
        open_store(f"sqlite:///{small_disk / 'gyre.db'}")


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
