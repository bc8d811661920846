"""The journal: fencing, numbers, and one transaction for what belongs together, whenever a process dies."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.errors import Fenced, NotFound, StoreError
from gyre.store import Entry, Journal, Store, StoredCommand, tables
from tests.examples import examples
from tests.store.fault_points import AFTER_COMMIT, BEFORE_COMMIT, BEGUN
from tests.store.store_processes import entries, in_processes

APPEND_POINTS = [BEGUN, "events", "snapshot", "outbox", BEFORE_COMMIT, AFTER_COMMIT]
"""When a process dies in an append: at a point, or after the first statement that changes a table."""


@pytest.fixture
def journal(store: Store, make_job) -> Journal:
    return store.journal(make_job())


def _agrees(journal: Journal, last: int) -> None:
    """Events, snapshot and outbox are those of exactly `last` of `entries()`."""
    assert journal.last_seq() == last
    assert [event.seq for event in journal.events()] == list(range(1, last + 1))
    assert [event.event_id for event in journal.events()] == [f"e{seq}" for seq in range(1, last + 1)]
    assert journal.snapshot() == (
        {("counter", "last"): {"seq": last}, ("row", str(last)): {}} if last else {}
    )
    assert [command.id for command in journal.pending_commands()] == ([f"c{last}"] if last else [])


def test_an_append_stores_events_snapshot_and_commands(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    journal.append(epoch, entries(1, 3))
    journal.append(epoch, entries(4, 2))
    _agrees(journal, 5)
    event = journal.events(after=3, limit=1)[0]
    assert (event.kind, event.at, event.actor, event.epoch, event.body) == (
        "Ticked",
        4.0,
        "test",
        1,
        {"seq": 4},
    )


def test_commands_come_back_in_the_order_of_issue(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    first, second = entries(1, 2)
    issued = [StoredCommand(id=name, kind="Do", body={}) for name in ("z", "a", "m")]
    journal.append(epoch, [replace(first, commands=issued), replace(second, done=["a", "unknown"])])
    assert [command.id for command in journal.pending_commands()] == ["z", "m", "c2"]
    assert [command.seq for command in journal.pending_commands()] == [1, 1, 2]


def test_what_is_done_is_not_kept(store: Store, journal: Journal) -> None:
    """A long job has issued many commands."""

    def kept() -> int:
        with store._database.read() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(tables.outbox)).scalar_one()

    epoch = journal.take_over(now=5.0, pid=7)
    for entry in entries(1, 200):
        ours = StoredCommand(id=f"c{entry.seq}", kind="Do", body={})
        journal.append(epoch, [replace(entry, commands=[ours], done=[f"c{entry.seq - 1}"])])
    assert kept() == 1
    with store._database.write() as connection:  # as if it had been left
        connection.execute(sa.update(tables.outbox).values(done_seq=200))
    journal.take_over(now=6.0, pid=8)
    assert kept() == 0


def test_the_last_writer_of_a_row_within_a_batch_wins(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    one, two, three = (replace(entry, upserts={}, deletes=[]) for entry in entries(1, 3))
    key = ("vertex", "a")
    journal.append(
        epoch,
        [
            replace(one, upserts={key: {"n": 1}}),
            replace(two, deletes=[key]),
            replace(three, upserts={key: {}}),
        ],
    )
    assert journal.snapshot() == {key: {}}
    with pytest.raises(StoreError, match="both writes and deletes"):
        journal.append(epoch, [replace(entries(4, 1)[0], upserts={key: {}}, deletes=[key])])


def test_an_older_epoch_is_fenced_and_changes_nothing(journal: Journal) -> None:
    old = journal.take_over(now=5.0, pid=7)
    journal.append(old, entries(1, 1))
    new = journal.take_over(now=6.0, pid=8)
    assert new == old + 1 == journal.epoch()
    with pytest.raises(Fenced, match=rf"epoch {new}.*epoch {old}"):
        journal.append(old, entries(2, 1))
    with pytest.raises(Fenced):
        journal.append(new + 1, entries(2, 1))
    _agrees(journal, 1)


def test_of_two_masters_that_start_at_once_exactly_one_writes(store: Store, journal: Journal) -> None:
    race = ("take_over_and_append", {"job_id": "j1", "first": 1})
    outcomes = in_processes(store.url, race, race)
    assert sorted(outcome.error or "wrote" for outcome in outcomes) == ["fenced", "wrote"], outcomes
    assert next(outcome.result for outcome in outcomes if outcome.error is None) == 2 == journal.epoch()
    _agrees(journal, 1)


@pytest.mark.parametrize("first", [1, 3, 4, 6, 9])
def test_a_hole_or_a_taken_number_is_refused(journal: Journal, first: int) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    journal.append(epoch, entries(1, 4))
    with pytest.raises(StoreError, match=r"hole|belongs to"):
        journal.append(epoch, [replace(entries(first, 1)[0], event_id="other")])
    with pytest.raises(StoreError, match="must follow"):
        journal.append(epoch, [entries(5, 1)[0], entries(7, 1)[0]])
    _agrees(journal, 4)


def test_entries_sent_again_after_an_unknown_outcome_are_stored_once(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    journal.append(epoch, entries(1, 4))
    journal.append(epoch, entries(1, 4))
    _agrees(journal, 4)
    journal.append(epoch, entries(3, 4))  # a batch of which two are there already
    _agrees(journal, 6)


def test_an_id_used_twice_is_refused_and_named(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    journal.append(epoch, entries(1, 2))
    with pytest.raises(StoreError, match="event e1 is stored as number 1"):
        journal.append(epoch, [replace(entries(3, 1)[0], event_id="e1")])
    with pytest.raises(StoreError, match="used twice in this append"):
        journal.append(epoch, [replace(entry, event_id="same") for entry in entries(3, 2)])
    with pytest.raises(StoreError, match="command c2 was issued by event 2"):
        journal.append(epoch, [replace(entries(3, 1)[0], commands=[StoredCommand("c2", "Tick", {})])])
    _agrees(journal, 2)


def test_what_is_not_plain_json_is_refused_before_anything_is_stored(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    for body in (
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"x": b"bytes"},
        {"x": {1, 2}},
        {"ranks": [{1: 2}]},
    ):
        with pytest.raises(StoreError, match="not plain JSON"):
            journal.append(epoch, [*entries(1, 1), replace(entries(2, 1)[0], body=body)])
    for kind in ("a\x00b", "\ud800"):
        with pytest.raises(StoreError, match="NUL or half a surrogate"):
            journal.append(epoch, [replace(entries(1, 1)[0], kind=kind)])
    _agrees(journal, 0)


def test_a_history_by_time_is_a_prefix_even_if_the_clock_went_back(journal: Journal) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    times = [10.0, 20.0, 15.0, 30.0, 12.0]
    journal.append(epoch, [replace(entry, at=at) for entry, at in zip(entries(1, 5), times, strict=True)])

    def upto(**bounds: float) -> list[int]:
        return [event.seq for event in journal.events(**bounds)]

    assert upto(until_time=20.0) == [1, 2, 3]
    assert upto(until_time=16.0) == [1]
    assert upto(until_time=9.0) == []
    assert upto(until_time=99.0, after=1, until=4, limit=2) == [2, 3]


def test_a_journal_of_no_job_is_not_found(store: Store) -> None:
    for call in (
        lambda: store.journal("nobody").take_over(now=1.0, pid=1),
        lambda: store.journal("nobody").append(1, entries(1, 1)),
        lambda: store.journal("nobody").last_seq(),
    ):
        with pytest.raises(NotFound, match="nobody"):
            call()


def test_a_process_killed_at_any_point_of_an_append_leaves_all_or_nothing(store: Store, make_job) -> None:
    for number, _ in enumerate(APPEND_POINTS):
        journal = store.journal(make_job(f"j{number}", f"n{number}"))
        journal.append(journal.take_over(now=1.0, pid=1), entries(1, 2))
    dying = [
        ("append_and_die", {"job_id": f"j{number}", "epoch": 1, "first": 3, "count": 3, "point": point})
        for number, point in enumerate(APPEND_POINTS)
    ]
    outcomes = in_processes(store.url, *dying)
    assert [outcome.signal for outcome in outcomes] == [signal.SIGKILL] * len(dying), outcomes
    for number, point in enumerate(APPEND_POINTS):
        journal = store.journal(f"j{number}")
        _agrees(journal, 5 if point == AFTER_COMMIT else 2)
        journal.append(1, entries(3, 3))  # the writer's successor in the same epoch does not know which
        _agrees(journal, 5)
        journal.append(journal.take_over(now=2.0, pid=2), entries(6, 1))
        _agrees(journal, 6)
    store.verify()


def test_eight_threads_of_fifty_read_modify_writes_lose_nothing(store: Store, journal: Journal) -> None:
    """The trap in SQLAlchemy: with the driver's own BEGIN this leaves a third of them."""
    failures: list[BaseException] = []

    def count() -> None:
        query = sa.select(tables.jobs.c.message).where(tables.jobs.c.job_id == "j1").with_for_update()
        try:
            for _ in range(50):
                with store._database.write() as connection:
                    seen = int(connection.execute(query).scalar_one() or 0)
                    connection.execute(sa.update(tables.jobs).values(message=str(seen + 1)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.job("j1").message == "400"


def test_concurrent_take_overs_each_get_an_epoch_of_their_own(journal: Journal) -> None:
    epochs: list[int] = []
    threads = [
        threading.Thread(target=lambda: epochs.extend(journal.take_over(now=1.0, pid=1) for _ in range(10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epochs) == list(range(1, 41))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
json_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # half surrogates and NULs
bodies = st.dictionaries(json_text, json_values | json_text, max_size=5)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=bodies, row=bodies, order=bodies)
def test_any_json_body_comes_back_as_it_was(journal: Journal, body, row, order) -> None:
    seq = journal.last_seq() + 1
    epoch = journal.epoch() or journal.take_over(now=1.0, pid=1)
    entry = Entry(
        seq=seq,
        event_id=f"e{seq}",
        cause="ü∀😀",
        kind="K",
        at=0.1 + seq,
        actor="me",
        body=body,
        upserts={("kind", "ключ"): row},
        commands=[StoredCommand(f"c{seq}", "Do", order)],
        done=[f"c{seq - 1}"],
    )
    journal.append(epoch, [entry])
    [event] = journal.events(after=seq - 1)
    assert (event.body, event.cause, event.at) == (body, "ü∀😀", 0.1 + seq)
    assert journal.snapshot() == {("kind", "ключ"): row}
    assert [command.body for command in journal.pending_commands()] == [order]


def test_the_few_events_that_change_a_spec_are_found_without_a_walk_through_the_others(
    journal: Journal, store: Store
) -> None:
    epoch = journal.take_over(now=5.0, pid=7)
    first, second, third = entries(1, 3)
    journal.append(epoch, [first, replace(second, kind="JobContinued"), third])
    assert [event.seq for event in journal.continued()] == [2]
    with store._database.read() as connection:
        if connection.dialect.name != "sqlite":
            pytest.skip("PostgreSQL chooses by its statistics")
        asked: list[tuple[str, tuple[str, ...]]] = []
        sa.event.listen(
            connection.engine,
            "before_cursor_execute",
            lambda _, __, statement, parameters, *___: asked.append((statement, parameters)),
        )
    journal.continued()
    statement, parameters = next(one for one in asked if "JobContinued" in one[0])
    with store._database.read() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    assert any("gyre_events_continued" in row[3] for row in plan), plan
