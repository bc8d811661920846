"""The rollout plane's writes leave SQLite's log to `checkpoint`, which no commit waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.store import RolloutStore, Store, database, open_store

BODY = bytes(100_000)


def written(store: Store, tmp_path: Path, count: int) -> tuple[RolloutStore, int]:
    """A store with so many deltas of 100 kB, and the size of its file."""
    rollouts = store.rollouts("job")
    rollouts.take_over(term=1)
    for seq in range(count):
        rollouts.write(1, counters={}, deltas=[(seq, BODY)])
    return rollouts, (tmp_path / "gyre.db").stat().st_size


def test_what_is_written_goes_into_the_file_when_it_is_asked_for(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        store.create_job(job_id="job", name="job", spec={}, now=0.0)
        rollouts, before = written(store, tmp_path, 60)
        assert before < 2_000_000, "a commit has brought it into the file"
        rollouts.checkpoint()
        assert (tmp_path / "gyre.db").stat().st_size > 6_000_000
        assert len(rollouts.load().deltas) == 60


def test_a_log_that_nobody_looks_after_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LARGE_LOG_PAGES", 2 * database.LOG_PAGES)
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        store.create_job(job_id="job", name="job", spec={}, now=0.0)
        written(store, tmp_path, 300)
        assert (tmp_path / "gyre.db-wal").stat().st_size < 10_000_000


def test_a_lost_store_is_left_alone(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        store.create_job(job_id="job", name="job", spec={}, now=0.0)
        rollouts, _ = written(store, tmp_path, 1)
        away = (tmp_path / "gyre.db").rename(tmp_path / "away.db")
        rollouts.checkpoint()
        assert not (tmp_path / "gyre.db").exists()
        away.rename(tmp_path / "gyre.db")
        rollouts.checkpoint()
        assert len(rollouts.load().deltas) == 1
