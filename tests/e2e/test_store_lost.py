"""A job whose store is moved away and put back loses nothing; one whose cluster's head ends says so at once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from gyre.errors import StoreError
from gyre.store import open_store
from tests.e2e.conftest import Process

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def _step(home: Path) -> int:
    try:
        with open_store(f"sqlite:///{home / 'gyre.db'}", create=False) as store:
            rows = store.jobs()
            return len(store.ledger(rows[0].job_id).metrics()) if rows else 0
    except StoreError:  # it is just being made
        return 0


def test_a_store_that_is_moved_away_and_put_back_loses_nothing(short_home: Path) -> None:
    job = Process.start(short_home, "demo", "--steps", "30", "--json")
    job.until(lambda: (short_home / "gyre.db").exists() and _step(short_home) >= 3)
    away = short_home / "away"
    away.mkdir()
    names = [file.name for file in short_home.glob("gyre.db*")]
    for name in names:
        os.rename(short_home / name, away / name)
    time.sleep(10.0)
    assert not list(short_home.glob("gyre.db*"))
    for name in reversed(names):
        os.rename(away / name, short_home / name)
    ended = job.end()
    assert ended.code == 0, ended
    result = json.loads(ended.out)
    with open_store(f"sqlite:///{short_home / 'gyre.db'}", create=False) as store:
        audit = store.ledger(store.jobs()[0].job_id).audit()
        events = [row.kind for row in store.journal(store.jobs()[0].job_id).events(limit=100_000)]
    assert audit.clean
    assert result
    assert "StoreReturned" in events


def test_the_head_of_the_cluster_ends(short_home: Path) -> None:
    job = Process.start(short_home, "demo", "--steps", "500")
    job.until(lambda: (short_home / "gyre.db").exists() and _step(short_home) >= 2)
    heads = [p for p in psutil.Process(job.process.pid).children(recursive=True) if p.name() == "gcs_server"]
    began = time.monotonic()
    for head in heads:
        head.send_signal(signal.SIGKILL)
    ended = job.end()
    assert time.monotonic() - began < 40.0
    assert ended.code != 0
    assert "head of the job's Ray cluster" in ended.err
    assert "Traceback" not in ended.err
