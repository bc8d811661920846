"""Whoever stands still in the middle of a transaction is found by the kernel's table, and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.errors import StoreError
from gyre.store import database as databases
from gyre.store import open_store
from gyre.store.write_lock import described, holder_in, holder_of

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    path = tmp_path / "gyre.db"
    open_store(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def holder(store_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the write lock, and is stopped."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"holds\n"
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.communicate()


def test_who_holds_the_lock_is_found_and_nobody_where_it_is_free(
    store_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    with open_store(f"sqlite:///{store_path}") as store:
        assert holder_of(store_path) == store.journal("any").held_by() == holder.pid
        holder.kill()
        holder.wait()
        assert holder_of(store_path) is None
    assert holder_of(store_path.parent / "none.db") is None


def test_looking_costs_a_writer_nothing_of_its_own_locks(store_path: Path) -> None:
    """A descriptor of `-shm` that is closed would drop them: then another process could write in between."""
    database = databases.open_database(f"sqlite:///{store_path}", create=False, read_only=False)
    with database.write():
        assert holder_of(store_path) == os.getpid()
        assert holder_of(store_path) == os.getpid()
    database.close()


def test_a_write_that_is_given_up_names_who_is_in_its_way(
    store_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "BUSY_TIMEOUT_S", 0.1)
    with open_store(f"sqlite:///{store_path}") as store, pytest.raises(StoreError) as found:
        store.create_job(job_id="a-1", name="a", spec={}, now=1.0)
    assert f"process {holder.pid} (" in str(found.value)
    assert "which is stopped" in str(found.value)


def test_only_the_write_lock_of_this_very_file_counts() -> None:
    device = os.makedev(0xFD, 0x01)
    line = "1: POSIX  ADVISORY  WRITE 42 fd:01:7 120 120\n"
    assert holder_in(line, device, 7) == 42
    for other in (
        line.replace(":7 ", ":8 "),
        line.replace("fd:01", "fd:02"),
        line.replace("120 120", "121 121"),
        line.replace("WRITE", "READ "),
        line.replace("1: POSIX", "1: -> POSIX"),
        line.replace(" 42 ", " 0 "),
        line.replace("120 120", "0 EOF"),
        "",
    ):
        assert holder_in(other, device, 7) is None, other


def test_a_process_that_has_ended_is_still_described() -> None:
    assert described(2**22 + 1) == f"process {2**22 + 1}"
