"""Any moment of a journal: keyframes change nothing, whatever becomes of them."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.errors import NotFound, StoreError
from gyre.failover import JobState, VertexPhase, differences, rows_of
from gyre.failover import events as e
from gyre.observe import history as histories
from gyre.observe import keyframes
from gyre.observe.folding import Coordinators
from gyre.observe.history import JobHistory
from gyre.store import Entry, EventRow, Store, open_store
from tests.examples import examples
from tests.failover.histories import History, coordinator_of, spec_with
from tests.failover.test_golden import NAMES, load

GOLDEN = sorted(set(NAMES) - {"tampered"})


@contextmanager
def keyframes_each(events: int) -> Iterator[None]:
    """Keyframes of short histories, and reads of few events, as if they were long."""
    with (
        patch.object(keyframes, "LEAST_EVENTS", events),
        patch.object(keyframes, "BYTES_PER_EVENT", 10**9),
        patch.object(histories, "PAGE", 4),
    ):
        yield


def stored(store: Store, spec: dict[str, Any], history: list[EventRow]) -> JobHistory:
    store.create_job(job_id="j1", name="j1", spec=spec, now=1.0)
    journal = store.journal("j1")
    epoch = journal.take_over(now=1.0, pid=1)
    journal.append(
        epoch,
        [Entry(row.seq, row.event_id, row.cause, row.kind, row.at, row.actor, row.body) for row in history],
    )
    return JobHistory(store, "j1")


def states_of(data: dict[str, Any], history: list[EventRow]) -> list[JobState]:
    """The states after each event, folded from the first one on; before it all is empty."""
    continued = [row for row in history if row.kind == "JobContinued"]
    steps = Coordinators(data["spec"], continued).steps(history, JobState())
    return [JobState(), *(step.decision.state for step in steps)]


def in_any_order(count: int) -> list[int]:
    order = list(range(count + 1))
    random.Random(count).shuffle(order)
    return order


@pytest.mark.parametrize("name", GOLDEN)
def test_a_keyframe_changes_nothing_of_a_golden_history(name: str, tmp_path: Path) -> None:
    data, rows, _ = load(name)
    with keyframes_each(3), open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        assert stored(store, data["spec"], rows).follow() == len(rows)
        assert len(store.keyframes("j1").marks(keyframes.FORM)) == len(rows) // 3
        fresh, states = JobHistory(store, "j1"), states_of(data, rows)
        for seq in in_any_order(len(rows)):
            moment = fresh.at(seq)
            assert differences(moment.state, rows_of(states[seq])) == []
            assert moment.event == (rows[seq - 1] if seq else None)
            assert moment.last == len(rows)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('histories') / 'a.db'}") as store:
        yield store


OPERATIONS = ("step", "lose", "start", "pause", "scale", "say", "fail")


@given(
    happens=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5)), max_size=30),
    each=st.integers(1, 5),
    back=st.floats(-3.0, 3.0),
)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_keyframe_changes_nothing_whatever_happened(
    shared_store: Store, happens: list[tuple[str, int]], each: int, back: float
) -> None:
    spec = spec_with()
    made = History(coordinator_of(spec)).submit().start_all()
    for what, number in happens:
        _let_happen(made, what, number)
    rows = [
        EventRow(
            one.seq,
            f"e{one.seq}",
            None,
            one.kind,
            one.at + (back if one.seq % 7 == 0 else 0.0),
            "x",
            1,
            one.body,
        )
        for one in made.records
    ]
    data = {"spec": spec.model_dump(mode="json")}
    with shared_store._database.write() as connection:
        for table in ("gyre_jobs", "gyre_journals", "gyre_events", "gyre_keyframes"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    with keyframes_each(each):
        stored(shared_store, data["spec"], rows).follow()
        fresh, states = JobHistory(shared_store, "j1"), states_of(data, rows)
        decisions = [row.seq for row in rows if _decides(row, states)]
        for seq in range(len(rows) + 1):
            assert differences(fresh.at(seq).state, rows_of(states[seq])) == []
            previous, following = fresh.decisions(seq)
            assert previous == max((one for one in decisions if one < seq), default=None)
            assert following == min((one for one in decisions if one > seq), default=None)
        for row in rows:
            until = [one.seq for one in shared_store.journal("j1").events(until_time=row.at)]
            assert fresh.at(time=row.at).seq == (until[-1] if until else 0)


def _let_happen(made: History, what: str, number: int) -> None:
    vertices = sorted(made.state.vertices)
    vertex = vertices[number % len(vertices)]
    if made.state.job.phase.ended:
        return
    if what == "step":
        made.step()
    elif what == "lose" and made[vertex].phase is VertexPhase.RUNNING:
        made.lose(vertex)
    elif what == "start":
        made.start_all()
    elif what == "pause":
        made.decide(e.PauseRequested() if not made.state.job.paused else e.ResumeRequested())
    elif what == "scale":
        made.decide(e.ScaleRequested("rollout", 1 + number % 4))
    elif what == "say":
        made.report(e.Evaluated, version=number, accuracy=0.5, count=4, prompts=4)
    elif what == "fail" and made[vertex].phase is VertexPhase.RUNNING and vertex != "trainer-0":
        made.fail_operator(vertex)


def _decides(row: EventRow, states: list[JobState]) -> bool:
    """From the states alone: an incident came, or has another outcome, or somebody commanded."""
    if row.kind in ("PauseRequested", "ResumeRequested", "ScaleRequested"):
        return True
    before = {key: one.outcome for key, one in states[row.seq - 1].incidents.items()}
    return any(before.get(key) != one.outcome for key, one in states[row.seq].incidents.items())


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Store, list[EventRow], dict[str, Any]]]:
    """A stored history of which keyframes were made, each three events."""
    data, rows, _ = load("rollout_lost")
    with keyframes_each(3), open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        stored(store, data["spec"], rows).follow()
        yield store, rows, data


@pytest.mark.parametrize(
    "change",
    [
        "body = CAST(substr(body, 1, length(body) - 4) || x'00000000' AS BLOB)",
        "body = (SELECT body FROM gyre_keyframes k WHERE k.seq = 3)",
        "form = '0-of-another-gyre'",
        "checksum = 'x'",
        "latest = latest - 100.0",
        "decisions = '[1,2,3]'",
        "chapter = x'00'",
        '"after" = 0',
        "seq = seq + 1",
        "seq = seq + 1, checksum = 'x'",
    ],
)
def test_a_tampered_keyframe_or_one_of_an_older_form_is_ignored(
    followed: tuple[Store, list[EventRow], dict[str, Any]], change: str
) -> None:
    store, rows, data = followed
    untouched = JobHistory(store, "j1")
    expected = [untouched.decisions(seq) for seq in range(len(rows) + 1)]
    flags = untouched.between(0.0, 1e12)
    with store._database.write() as connection:
        connection.exec_driver_sql(f"UPDATE gyre_keyframes SET {change} WHERE seq IN (6, 9, 15)")
    fresh, states = JobHistory(store, "j1"), states_of(data, rows)
    for seq in range(len(rows) + 1):
        assert differences(fresh.at(seq).state, rows_of(states[seq])) == []
        assert fresh.decisions(seq) == expected[seq]
    assert fresh.between(0.0, 1e12) == flags
    assert fresh.at(time=rows[9].at).seq == 10


def test_a_keyframe_of_another_history_is_ignored(
    followed: tuple[Store, list[EventRow], dict[str, Any]],
) -> None:
    """The store was put back to an older copy, and the job went on differently."""
    store, rows, data = followed
    with store._database.write() as connection:
        connection.exec_driver_sql("UPDATE gyre_events SET event_id = 'other-' || event_id WHERE seq > 4")
        connection.exec_driver_sql(
            "UPDATE gyre_events SET kind = 'PauseRequested', body = '{\"by\":\"me\"}' WHERE seq = 5"
        )
    other = store.journal("j1").events()
    fresh, states = JobHistory(store, "j1"), states_of(data, other)
    for seq in range(len(rows) + 1):
        assert differences(fresh.at(seq).state, rows_of(states[seq])) == []
    assert fresh.decisions(4)[1] == 5


def test_a_store_that_was_opened_for_reading_has_every_moment_too(tmp_path: Path) -> None:
    data, rows, _ = load("actor_lost")
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with open_store(url) as store:
        stored(store, data["spec"], rows)
    with (
        keyframes_each(3),
        open_store(url, read_only=True) as store,
        patch.object(histories, "MISSING_FROM", 4),
    ):
        history, states = JobHistory(store, "j1"), states_of(data, rows)
        for seq in in_any_order(len(rows)):
            assert differences(history.at(seq).state, rows_of(states[seq])) == []
        assert history.decisions(0)[1]
        assert history.between(0.0, 1e12).moves
    with sqlite3.connect(tmp_path / "a.db") as connection:
        assert connection.execute("SELECT count(*) FROM gyre_keyframes").fetchone() == (0,)


def test_missing_keyframes_are_made_by_the_first_reader(tmp_path: Path) -> None:
    data, rows, _ = load("actor_lost")
    with (
        keyframes_each(3),
        patch.object(histories, "MISSING_FROM", 4),
        open_store(f"sqlite:///{tmp_path / 'a.db'}") as store,
    ):
        stored(store, data["spec"], rows).at(len(rows))
        assert len(store.keyframes("j1").marks(keyframes.FORM)) == len(rows) // 3


def test_whoever_follows_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    data, rows, _ = load("actor_lost")
    with keyframes_each(3), open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        first = stored(store, data["spec"], rows)
        assert first.follow(most=7) == 7
        assert JobHistory(store, "j1").follow() == len(rows) - 6, "from the keyframe of event 6"
        assert first.follow() == len(rows) - 7
        marks = store.keyframes("j1").marks(keyframes.FORM)
        assert [mark.seq for mark in marks] == list(range(3, len(rows) + 1, 3))
        assert [mark.after for mark in marks] == list(range(0, len(rows) - 2, 3))


def test_keyframes_of_a_large_state_are_further_apart() -> None:
    assert not keyframes.is_due(keyframes.LEAST_EVENTS - 1, 0)
    assert keyframes.is_due(keyframes.LEAST_EVENTS, 0)
    large = keyframes.BYTES_PER_EVENT * 10_000
    assert not keyframes.is_due(9_999, large)
    assert keyframes.is_due(10_000, large)


def test_what_is_no_event_or_does_not_fold_is_a_sentence(tmp_path: Path) -> None:
    data, rows, _ = load("undisturbed")
    with open_store(f"sqlite:///{tmp_path / 'a.db'}") as store:
        history = stored(store, data["spec"], rows)
        with pytest.raises(NotFound, match=f"numbered from 1 to {len(rows)}"):
            history.at(-1)
        assert history.at(10**9).seq == len(rows)
        with store._database.write() as connection:
            connection.exec_driver_sql("UPDATE gyre_events SET kind = 'Unheard' WHERE seq = 3")
        fresh = JobHistory(store, "j1")
        for call in (lambda: fresh.at(5), fresh.follow, lambda: fresh.decisions(2)):
            with pytest.raises(StoreError, match="does not fold"):
                call()
        assert fresh.at(2).seq == 2
