"""The list of jobs: labels that nobody loses, and summaries that are given out only while they are true."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update

from gyre.errors import NotFound, StoreError
from gyre.store import Entry, Labels, StepRow, Store, tables


def _entry(seq: int) -> Entry:
    return Entry(seq=seq, event_id=f"e{seq}", cause=None, kind="Some", at=1.0, actor="m", body={})


def _job(store: Store, job_id: str = "j1", events: int = 2) -> int:
    store.create_job(job_id=job_id, name=job_id, spec={}, now=1.0)
    epoch = store.journal(job_id).take_over(now=1.0, pid=1)
    store.journal(job_id).append(epoch, [_entry(seq) for seq in range(1, events + 1)])
    return epoch


def test_labels_are_changed_whether_the_job_runs_or_has_ended(store: Store) -> None:
    store.create_job(job_id="j1", name="grpo", spec={}, now=1.0, labels=Labels(("b", "a"), "first"))
    listing = store.listing
    assert listing.labels("j1") == Labels(("a", "b"), "first")
    store.update_job("j1", ended_at=2.0)
    assert listing.label("j1", add=["c"], remove=["a", "never"]) == Labels(("b", "c"), "first")
    assert listing.label("j1", notes="second") == Labels(("b", "c"), "second")
    assert [job.labels for job in listing.jobs(form=1)] == [Labels(("b", "c"), "second")]
    assert listing.label("j1", remove=["b", "c"], notes="") == Labels()
    with pytest.raises(NotFound):
        listing.label("j2", add=["a"])
    with pytest.raises(StoreError, match="NUL"):
        listing.label("j1", notes="a\0b")
    assert listing.labels("j1") == Labels()


def test_of_those_who_tag_at_once_nobody_loses(store: Store) -> None:
    _job(store)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.listing.label("j1", add=[f"t{number}"]), range(16)))
    assert set(store.listing.labels("j1").tags) == {f"t{number}" for number in range(16)}


def test_a_summary_is_given_out_while_it_is_of_the_last_event_and_in_this_form(store: Store) -> None:
    epoch, listing = _job(store), store.listing

    def summary(form: int = 1) -> object:
        return listing.jobs(form=form)[0].summary

    assert summary() is None
    listing.keep_summary("j1", seq=2, form=1, body={"step": 5})
    assert summary() == {"step": 5}
    assert summary(form=2) is None
    store.journal("j1").append(epoch, [_entry(3)])
    assert summary() is None, "the journal went on"
    listing.keep_summary("j1", seq=3, form=1, body={"step": 6})
    assert summary() == {"step": 6}
    with store._database.write() as connection:
        connection.execute(update(tables.job_summaries).values(body="{half"))
    assert summary() is None, "what is damaged is made anew"


def test_a_list_has_every_job_and_those_of_a_life(store: Store) -> None:
    for number in range(4):
        store.create_job(job_id=f"j{number}", name=f"n{number}", spec={}, now=float(number))
    store.update_job("j1", ended_at=9.0)
    listing = store.listing
    assert [job.job_id for job in listing.jobs(form=1)] == ["j3", "j2", "j1", "j0"]
    assert [job.job_id for job in listing.jobs(form=1, live=False)] == ["j1"]
    assert [job.job_id for job in listing.jobs(form=1, live=True, limit=2)] == ["j3", "j2"]
    assert listing.count() == 4


@pytest.mark.parametrize(("steps", "points", "wanted"), [(0, 4, []), (1, 4, [1]), (4, 4, [1, 2, 3, 4])])
def test_few_steps_are_all_there(store: Store, steps: int, points: int, wanted: list[int]) -> None:
    assert _sparse(store, steps, points) == wanted


def test_of_many_steps_as_many_are_read_as_are_asked_for_and_the_last(store: Store) -> None:
    found = _sparse(store, 103, 10)
    assert found == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100, 103]


def _sparse(store: Store, steps: int, points: int) -> list[int]:
    store.create_job(job_id="j", name="j", spec={}, now=1.0)
    ledger = store.ledger("j")
    ledger.take_over(term=1)
    ledger.write(
        1, steps=[StepRow(step, step, None, [], {"r": step / 2}, 1.0) for step in range(1, steps + 1)]
    )
    found = ledger.sparse_metrics(points)
    assert all(one["r"] == one["step"] / 2 for one in found)
    return [one["step"] for one in found]
