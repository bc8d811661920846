"""States of a store's jobs are read once for as long as the journal does not grow, and never later than that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.api.job_replay import coordinator_of
from gyre.api.stored_states import JOBS_KEPT, StoredStates, with_job
from gyre.failover import JobPhase, JobState
from gyre.failover.events import Event, JobSubmitted, MasterStarted
from gyre.graph import compile_job
from gyre.master.job_context import entry_of
from gyre.store import Store, open_store
from gyre.store.journal import Journal
from tests.doubles.standing_job import small_spec

SUBMITTED = JobSubmitted(
    "j-0", "small", {name: role.total for name, role in compile_job(small_spec()).spec.roles.items()}
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'g.db'}") as opened:
        yield opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs whose snapshots were read, in order."""
    made: list[str] = []
    plain = Journal.snapshot

    def counted(journal: Journal) -> dict[tuple[str, str], dict[str, object]]:
        made.append(journal.job_id)
        return plain(journal)

    monkeypatch.setattr(Journal, "snapshot", counted)
    return made


def create(store: Store, job_id: str) -> None:
    store.create_job(job_id=job_id, name=job_id, spec=small_spec().model_dump(mode="json"), now=1.0)


def write(store: Store, *events: Event) -> None:
    """Append these to the journal of j-0."""
    journal, state = store.journal("j-0"), JobState()
    epoch = journal.take_over(now=1.0, pid=1)
    seq = journal.last_seq()
    for event in events:
        decision = coordinator_of(small_spec()).decide(state, event, 1.0)
        state, seq = decision.state, seq + 1
        journal.append(epoch, [entry_of(decision, event, seq=seq, event_id=f"e{seq}", at=1.0, actor="test")])


def test_a_state_is_read_again_only_after_an_event(store: Store, reads: list[str]) -> None:
    create(store, "j-0")
    write(store, SUBMITTED)
    states, row = StoredStates(store), store.job("j-0")
    first = states.state(row)
    assert states.state(row) is first
    assert states.view(row, first) is states.view(row, first)
    assert reads == ["j-0"]
    write(store, SUBMITTED, MasterStarted(1, 1, "box"))
    second = states.state(row)
    assert reads == ["j-0"] * 2
    assert states.view(row, second)["master"]["node"] == "box"
    assert states.view(row, second)["seq"] == store.journal("j-0").last_seq()


def test_another_state_has_a_view_of_its_own(store: Store) -> None:
    """Such as that of a job whose end nobody has written yet."""
    create(store, "j-0")
    write(store, SUBMITTED)
    states, row = StoredStates(store), store.job("j-0")
    state = states.state(row)
    other = replace(state, job=replace(state.job, message="lost"))
    assert states.view(row, other)["job"]["message"] == "lost"
    assert states.view(row, state)["job"]["message"] == ""


def test_a_job_that_nobody_has_written_of_is_as_the_directory_says(store: Store) -> None:
    create(store, "j-0")
    state = StoredStates(store).state(store.job("j-0"))
    assert not state.job.job_id
    assert with_job(state, store.job("j-0")).job.phase is JobPhase.SUBMITTED
    store.update_job("j-0", phase="failed", message="no room")
    job = with_job(state, store.job("j-0")).job
    assert (job.job_id, job.phase, job.message) == ("j-0", JobPhase.FAILED, "no room")


def test_the_jobs_asked_for_last_are_kept(store: Store, reads: list[str]) -> None:
    rows = []
    for number in range(JOBS_KEPT + 1):
        create(store, f"j-{number}")
        rows.append(store.job(f"j-{number}"))
    states = StoredStates(store)
    for row in rows:
        states.state(row)
    reads.clear()
    states.state(rows[-1])
    assert reads == []
    states.state(rows[0])
    assert reads == ["j-0"]
