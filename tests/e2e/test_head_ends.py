"""A job whose cluster's head ends says so at once."""

from __future__ import annotations

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
