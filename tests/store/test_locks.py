"""A process may open one store any number of times: closing one of them must not cost the others their locks."""

from __future__ import annotations

from pathlib import Path

from gyre.store import open_store
from tests.store.store_processes import in_processes


def test_a_second_opening_in_one_process_leaves_the_first_its_locks(tmp_path: Path) -> None:
    """POSIX drops all of a process's locks on a file when any descriptor of it is closed. Without its lock, the
    next other process to leave takes itself for the last one, and deletes the log that this one writes to."""
    url = f"sqlite:///{tmp_path / 'gyre.db'}"
    with open_store(url) as store:
        store.create_job(job_id="a-1", name="a", spec={}, now=1.0)
        open_store(url).close()
        (outcome,) = in_processes(url, ("open_it", {}))
        assert outcome.error is None, outcome
        assert (tmp_path / "gyre.db-wal").exists()
        store.create_job(job_id="b-1", name="b", spec={}, now=2.0)
        with open_store(url) as other:
            assert other.job("b").job_id == "b-1"
    with open_store(url) as store:
        assert [job.job_id for job in store.jobs()] == ["b-1", "a-1"]
