"""The directory of jobs: one live job a name, whoever asks and however many ask at once."""

from __future__ import annotations

import pytest

from gyre.errors import Conflict, Fenced, NotFound, StoreError
from gyre.store import QueuedJob, Store
from gyre.store.directory import QUEUED_FOR_S
from tests.store.store_processes import in_processes


def test_a_job_is_found_by_id_and_the_newest_by_name(store: Store) -> None:
    store.create_job(job_id="a1", name="grpo", spec={"n": 1}, now=1.0, ray_address="ray://x", namespace="ns")
    store.update_job("a1", phase="failed", ended_at=2.0)
    store.create_job(job_id="a2", name="grpo", spec={"n": 2}, now=3.0, ray_address=None, namespace=None)
    assert store.job("grpo").job_id == "a2"
    old = store.job("a1")
    assert (old.spec, old.phase, old.live, old.ray_address, old.namespace) == (
        {"n": 1},
        "failed",
        False,
        "ray://x",
        "ns",
    )
    store.create_job(job_id="a3", name="a1", spec={}, now=4.0)
    assert store.job("a1").job_id == "a1", "an id goes before a name"


def test_jobs_are_listed_newest_first_and_by_life(store: Store) -> None:
    for number in range(5):
        store.create_job(job_id=f"j{number}", name=f"n{number}", spec={}, now=float(number))
    store.update_job("j1", ended_at=9.0)
    store.update_job("j3", ended_at=9.0)
    assert [job.job_id for job in store.jobs()] == ["j4", "j3", "j2", "j1", "j0"]
    assert [job.job_id for job in store.jobs(live=True, limit=2)] == ["j4", "j2"]
    assert [job.job_id for job in store.jobs(live=False)] == ["j3", "j1"]


def test_the_queue_is_of_those_that_wait_and_have_said_so_lately(store: Store) -> None:
    def job(number: int, *, since: float | None, at: float | None = 1000.0, address: str = "c1:6379") -> None:
        store.create_job(
            job_id=f"j{number}", name=f"n{number}", spec={}, now=float(number), ray_address=address
        )
        store.update_job(f"j{number}", queued_since=since, queued_at=at)

    job(0, since=30.0)
    job(1, since=20.0)
    job(2, since=None)
    job(3, since=10.0, at=1000.0 - QUEUED_FOR_S)
    job(4, since=5.0, address="c2:6379")
    job(5, since=6.0)
    store.update_job("j5", ended_at=999.0)
    assert store.queue("c1:6379", 1000.0) == [QueuedJob("j1", "n1", 20.0), QueuedJob("j0", "n0", 30.0)]
    assert [one.job_id for one in store.queue(None, 1000.0)] == ["j4", "j1", "j0"]


def test_the_name_of_a_live_job_is_taken_and_its_holder_is_named(store: Store, make_job) -> None:
    make_job("j1", "grpo")
    store.update_job("j1", phase="running")
    with pytest.raises(
        Conflict, match=r"'grpo' is taken by job j1, which is running.*gyre stop grpo"
    ) as caught:
        store.create_job(job_id="j2", name="grpo", spec={}, now=2.0)
    assert caught.value.details == {"job_id": "j1", "phase": "running"}
    store.update_job("j1", phase="stopped", ended_at=3.0)
    make_job("j2", "grpo")
    with pytest.raises(Conflict, match="taken by job j2"):
        store.update_job("j1", ended_at=None)
    with pytest.raises(Conflict, match="Job ids are never used twice"):
        store.create_job(job_id="j2", name="other", spec={}, now=2.0)
    assert len(store.jobs()) == 2


def test_of_four_that_want_one_name_at_once_one_gets_it(store: Store) -> None:
    outcomes = in_processes(
        store.url, *[("create_named", {"job_id": f"j{number}", "name": "grpo"}) for number in range(4)]
    )
    assert sorted(outcome.error or "created" for outcome in outcomes) == ["conflict"] * 3 + ["created"], (
        outcomes
    )
    [winner] = store.jobs()
    assert all(f"job {winner.job_id}" in outcome.message for outcome in outcomes if outcome.error)


def test_fields_change_one_by_one_and_a_typo_is_named(store: Store, make_job) -> None:
    make_job()
    store.update_job(
        "j1", phase="running", reason="ready", message="3 of 3", url="http://x", token_hint="~/t"
    )
    store.update_job("j1", spec={"n": 2})
    job = store.job("j1")
    assert (job.phase, job.reason, job.message, job.url, job.token_hint, job.spec) == (
        "running", "ready", "3 of 3", "http://x", "~/t", {"n": 2},
    )  # fmt: skip
    with pytest.raises(StoreError, match="did you mean 'phase'"):
        store.update_job("j1", fase="running")
    with pytest.raises(NotFound):
        store.update_job("j9", phase="running")


def test_a_replaced_master_cannot_write_over_its_successor(store: Store, make_job) -> None:
    journal = store.journal(make_job())
    old, new = journal.take_over(now=1.0, pid=10), journal.take_over(now=2.0, pid=20)
    store.update_job("j1", epoch=new, phase="running")
    with pytest.raises(Fenced):
        store.update_job("j1", epoch=old, phase="failed", ended_at=3.0)
    job = store.job("j1")
    assert (job.phase, job.live, job.epoch, job.master_pid) == ("running", True, new, 20)


def test_an_unknown_name_is_answered_with_the_nearest(store: Store, make_job) -> None:
    with pytest.raises(NotFound, match="no job yet"):
        store.job("grpo")
    make_job("j1", "grpo-7b")
    with pytest.raises(NotFound, match="did you mean 'grpo-7b'"):
        store.job("grpo-7")
