"""The sample ledger: terms, what a checkpoint covers, and an audit that finds what was planted."""

from __future__ import annotations

import signal

import pytest
from sqlalchemy import select

from gyre.errors import Fenced, StoreError
from gyre.store import CheckpointRow, GroupRow, LedgerStore, StepRow, Store, tables
from tests.store.fault_points import at_points
from tests.store.store_processes import in_processes


@pytest.fixture
def ledger(store: Store) -> LedgerStore:
    opened = store.ledger("j1")
    opened.take_over(term=1)
    return opened


def _step(step: int, *group_ids: int) -> StepRow:
    return StepRow(
        step, version=step, digest=f"d{step}", group_ids=list(group_ids), metrics={"loss": 0.5}, at=1.0
    )


def _train(ledger: LedgerStore, step: int, *group_ids: int) -> None:
    ledger.write(
        1,
        groups=[GroupRow(number, "trained", step, step - 1, step) for number in group_ids],
        steps=[_step(step, *group_ids)],
    )


def test_an_empty_ledger_loads_empty(store: Store) -> None:
    rows = store.ledger("nobody").load()
    assert (rows.term, rows.cursor, rows.groups, rows.steps, rows.checkpoints) == (0, 0, [], [], [])
    assert store.ledger("nobody").audit().clean


def test_an_older_term_is_fenced_and_changes_nothing(ledger: LedgerStore) -> None:
    ledger.write(1, groups=[GroupRow(0, "queued", payload=b"p")], cursor=1)
    ledger.take_over(term=1)  # the same writer, restarted
    ledger.take_over(term=5)
    with pytest.raises(Fenced, match=r"term 5.*term 3"):
        ledger.take_over(term=3)
    with pytest.raises(Fenced, match=r"term 5.*term 1"):
        ledger.write(1, groups=[GroupRow(0, "trained", 1)], cursor=9)
    with pytest.raises(Fenced):
        ledger.write(6, cursor=9)
    rows = ledger.load()
    assert (rows.term, rows.cursor, rows.groups) == (5, 1, [GroupRow(0, "queued", payload=b"p")])


def test_a_ledger_that_nobody_took_over_refuses_writes(store: Store) -> None:
    with pytest.raises(Fenced, match="take_over first"):
        store.ledger("j2").write(1, cursor=1)


def test_the_data_is_noted_once_and_by_the_writer_alone(ledger: LedgerStore) -> None:
    assert ledger.hold_data(1, "the first") == "the first"
    assert ledger.hold_data(1, "another") == "the first"
    ledger.take_over(term=2)
    assert ledger.hold_data(2, "another") == "the first"
    with pytest.raises(Fenced, match=r"term 2.*term 1"):
        ledger.hold_data(1, "the first")
    assert ledger.load().cursor == 0


def test_payload_and_versions_stay_through_a_change_of_status(ledger: LedgerStore) -> None:
    ledger.write(1, groups=[GroupRow(0, "queued", payload=b"\x00prompt"), GroupRow(1, "queued")], cursor=2)
    ledger.write(1, groups=[GroupRow(0, "done", None, 3, 4), GroupRow(0, "done", 7)])
    assert ledger.load().groups == [GroupRow(0, "done", 7, 3, 4, b"\x00prompt"), GroupRow(1, "queued")]
    ledger.write(1, groups=[GroupRow(1, "done", payload=b"tokens"), GroupRow(1, "done", 7)])
    assert ledger.load().groups[1] == GroupRow(1, "done", 7, None, None, b"tokens")
    with pytest.raises(StoreError, match="cannot be 'lost'"):
        ledger.write(1, groups=[GroupRow(1, "lost")])


def test_what_no_checkpoint_covers_is_loaded_and_keeps_its_payload(store: Store, ledger: LedgerStore) -> None:
    ledger.write(
        1, groups=[GroupRow(number, "queued", payload=b"p%d" % number) for number in range(6)], cursor=6
    )
    _train(ledger, 1, 0, 1)
    _train(ledger, 2, 2, 3)
    ledger.write(1, drop_payloads_through_step=2)
    assert [group.group_id for group in ledger.load().groups] == list(range(6)), "trained, but not covered"
    ledger.write(1, checkpoint=CheckpointRow(1, "/ckpt/1", 5.0), drop_payloads_through_step=2)
    rows = ledger.load()
    assert [(group.group_id, group.status, group.payload) for group in rows.groups] == [
        (2, "trained", b"p2"),
        (3, "trained", b"p3"),
        (4, "queued", b"p4"),
        (5, "queued", b"p5"),
    ]
    assert rows.checkpoints == [CheckpointRow(1, "/ckpt/1", 5.0)]
    assert rows.steps == [_step(1, 0, 1), _step(2, 2, 3)]
    # The covered groups' payloads, and theirs alone, are gone.
    groups = tables.ledger_groups
    with store._database.read() as connection:
        kept = connection.execute(select(groups.c.payload).order_by(groups.c.group_id)).scalars().all()
    assert kept == [None, None, b"p2", b"p3", b"p4", b"p5"]


def test_the_audit_finds_planted_duplicates_gaps_and_unlisted_groups(ledger: LedgerStore) -> None:
    present = [0, 1, 4, 5, 6, 8]
    ledger.write(1, groups=[GroupRow(number, "queued") for number in present], cursor=12)
    assert ledger.audit().gaps == [(2, 3), (7, 7), (9, 11)]
    _train(ledger, 1, 0, 1)
    _train(ledger, 2, 4, 5)
    assert ledger.audit().duplicates == {}
    ledger.write(1, steps=[_step(3, 1, 4, 4)], groups=[GroupRow(6, "trained", 3)])
    audit = ledger.audit()
    assert audit.duplicates == {1: [1, 3], 4: [2, 3, 3]}
    assert audit.unlisted == 1
    assert audit.counts == {"queued": 1, "done": 0, "trained": 5, "dropped": 0}
    assert not audit.clean


def test_ledgers_of_two_jobs_do_not_meet(store: Store, ledger: LedgerStore) -> None:
    other = store.ledger("j2")
    other.take_over(term=9)
    other.write(9, groups=[GroupRow(0, "trained", 1)], steps=[_step(1, 0)], cursor=1)
    ledger.write(1, groups=[GroupRow(0, "queued")], steps=[_step(1, 0)], cursor=1)
    assert ledger.audit().clean
    assert ledger.load().groups == [GroupRow(0, "queued")]


def test_a_process_killed_at_any_point_of_a_write_leaves_all_or_nothing(store: Store) -> None:
    points = [f"LedgerStore.write.{when}" for when in ("begun", "before_commit", "after_commit")]
    for number, _ in enumerate(points):
        store.ledger(f"j{number}").take_over(term=1)
    dying = [
        ("ledger_and_die", {"job_id": f"j{number}", "term": 1, "point": point})
        for number, point in enumerate(points)
    ]
    assert [outcome.signal for outcome in in_processes(store.url, *dying)] == [signal.SIGKILL] * 3
    for number, point in enumerate(points):
        rows, audit = store.ledger(f"j{number}").load(), store.ledger(f"j{number}").audit()
        whole = (3, [CheckpointRow(1, "/c/1", 1.0)], 3)
        assert (rows.cursor, rows.checkpoints, audit.counts["trained"]) == (
            whole if point == points[-1] else (0, [], 0)
        )


def test_only_what_may_be_lost_is_written_without_waiting_for_the_disk(
    store: Store, ledger: LedgerStore
) -> None:
    database, modes = store._database, []

    def level(point: str) -> None:
        if point != "LedgerStore.write.before_commit":
            return
        query = "PRAGMA synchronous" if database.is_sqlite else "SHOW synchronous_commit"
        modes.append(str(connections[-1].exec_driver_sql(query).scalar()))

    import sqlalchemy as sa

    connections: list[sa.Connection] = []
    sa.event.listen(database._engine, "begin", connections.append)
    at_points(store, level)
    ledger.write(1, groups=[GroupRow(0, "done", 1, payload=b"p")], cursor=1)
    ledger.write(1, groups=[GroupRow(0, "trained", 1)])
    ledger.write(1, checkpoint=CheckpointRow(1, "/c", 1.0))
    ledger.write(1, steps=[_step(1, 0)])
    relaxed, durable = ("1", "2") if database.is_sqlite else ("off", "on")
    assert modes == [relaxed, durable, durable, relaxed]
