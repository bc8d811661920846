"""Slots and the state of groups: which group stands where, and that a later trainer finds the same in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config import RunSpec
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.store import LedgerStore, open_store
from gyre.workloads.trainer.groups.group_state import GroupSlots, GroupState
from gyre.workloads.trainer.groups.micro_batches import FixedBatches, StreamedBatches, is_made


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.data())
def test_slots_keep_their_groups_and_a_later_reader_finds_the_same(
    draws: list[bool], data: st.DataObject
) -> None:
    """Either the next slot is drawn, or a group that stands somewhere is replaced by a newly drawn one."""
    slots, stands, replaced = GroupSlots({}), [], {}
    for cursor, is_draw in enumerate(draws):
        if is_draw or not stands:
            assert slots.id_at(len(stands)) == cursor
            stands.append(cursor)
        else:
            at = data.draw(st.integers(0, len(stands) - 1))
            slots.replace(stands[at], cursor)
            replaced[stands[at]] = cursor
            stands[at] = cursor
        for known in (slots, GroupSlots(replaced)):
            assert [known.id_at(at) for at in range(len(stands))] == stands
            assert [known.slot_of(group) for group in stands] == list(range(len(stands)))
    for old in replaced:
        assert slots.id_at(slots.slot_of(old)) in stands


def prompt(group_id: int) -> Group:
    return Group(group_id, np.array([1, 2], np.int32))


def sampled(group_id: int, *, tokens: int = 3, version: int = 0) -> Group:
    sample = Sample(
        np.arange(tokens, dtype=np.int32),
        np.zeros(tokens, np.float32),
        (VersionRun(version, 0, tokens),),
        reward=1.0,
    )
    return Group(group_id, np.array([1, 2], np.int32), samples=[sample])


def test_a_restore_that_came_to_nothing_leaves_its_number_to_the_next(store: LedgerStore) -> None:
    def state(term: int) -> GroupState:
        ledger = SampleLedger(store, term)
        return GroupState(ledger, per_step=2)

    first = state(1)
    actor = first.record_restore_begun("actor", 2, "memory", 4)
    assert first.record_restore_begun("actor", 2, "disk", 4).number == actor.number == 1
    critic = first.record_restored(first.record_restore_begun("critic", 2, "disk", 4), 4, 0.5)
    second = state(2)
    assert second.restores == first.restores
    assert (second.restores["actor"].step, critic.number) == (None, 2)
    again = second.record_restored(second.record_restore_begun("actor", 3, "disk", 4), 4, None)
    assert (again.number, again.gang) == (1, 3)
    third = state(3)
    assert third.restores == {"actor": again, "critic": critic}
    assert third.record_restore_begun("actor", 4, "disk", 4).number == 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


def state_of(store: LedgerStore, term: int) -> GroupState:
    return GroupState(SampleLedger(store, term), per_step=4)


def finish(groups: GroupState, *ids: int) -> None:
    for group_id in ids:
        groups.merge([sampled(group_id, tokens=1 + group_id % 3)])
    groups.record_scored(list(ids))


def same(one: GroupState, other: GroupState) -> None:
    assert (one.step, one.cursor, one.unscored, one.min_versions) == (
        other.step,
        other.cursor,
        other.unscored,
        other.min_versions,
    )
    assert one.batches == other.batches
    assert set(one.scored) == set(other.scored)
    assert [one.id_at(at) for at in range(12)] == [other.id_at(at) for at in range(12)]
    assert one.replaced_count == other.replaced_count
    with_samples = {g for g, group in one.by_id.items() if group.samples and g not in one.unscored}
    assert with_samples == set(other.by_id)


def test_digests_of_weights_that_are_no_more_are_forgotten_by_the_ledger_too(store: LedgerStore) -> None:
    groups = state_of(store, 1)
    for step in (1, 2, 3):
        groups.record_trained(step, {"tokens": 1})
        groups.record_digest(step, f"digest {step}")
    groups.forget_digests(2)
    later = state_of(store, 2)
    for known in (groups, later):
        assert (known.digests, known.step) == ({1: "digest 1"}, 3)


RUN = RunSpec(prompts_per_step=4, groups_per_micro_batch=2)


def test_the_next_reader_finds_what_is_known_after_each_write(store: LedgerStore) -> None:
    term = 1
    groups = state_of(store, term)

    def check() -> GroupState:
        nonlocal term
        term += 1
        after = state_of(store, term)
        same(groups, after)
        after.by_id = groups.by_id | after.by_id  # prompts are drawn again
        return after

    groups.record_drawn([prompt(at) for at in range(8)])
    groups = check()
    groups.record_requested([0, 1, 2], 5)
    groups = check()
    finish(groups, 3, 0, 5, 1)
    groups = check()
    assert groups.min_versions == {2: 5}
    assert groups.record_redrawn(5, reason="stale", evidence="old") == 3
    groups = check()
    assert 5 in groups.unscored
    assert groups.min_versions == {2: 5, 5: 0}
    assert groups.record_replaced(2, prompt(8), reason="quarantined", evidence="it died") == 0
    groups = check()
    assert (groups.id_at(2), groups.id_at(8), groups.is_settled(2), groups.is_settled(8)) == (
        8,
        9,
        True,
        False,
    )
    finish(groups, 8)

    assembly = FixedBatches(groups, RUN, ranks=2, ordered=True)
    first, second = assembly.take(), assembly.take()
    assert first is not None
    assert second is not None
    assert (first.ids, second.ids, assembly.take()) == ([0, 1], [3, 8], None)
    assert [len(share) for share in first.shares] == [1, 1]
    assert is_made(groups, 1)
    groups = check()
    groups.record_trained(1, {"tokens": 7})
    groups.record_digest(1, "d1")
    groups = check()
    assert groups.ids_of(1) == [0, 1, 3, 8]
    groups.record_checkpoint(1, Path("/c/1"))
    groups = check()
    assert set(groups.batches) == set()
    account = SampleLedger(store, 99).account()
    assert (account.drawn, account.trained, account.waiting, account.dropped) == (9, 4, 4, 1)
    assert account.discarded == {"stale": 3, "quarantined": 0}
    assert (account.lost, account.trained_twice) == ((), ())


def test_a_stream_goes_on_where_the_ledger_says_it_stood(store: LedgerStore) -> None:
    groups = state_of(store, 1)
    groups.record_drawn([prompt(at) for at in range(8)])
    stream = StreamedBatches(groups, RUN, ranks=2, arrival=None)
    finish(groups, 2, 6)
    assert stream.refresh() == []
    assert stream.take() is None  # 6 is the next step's, and a rank would have nothing
    finish(groups, 0)
    assert stream.has_news
    stream.refresh()
    batch = stream.take()
    assert batch is not None
    assert (batch.ids, batch.last, stream.take(), stream.has_news) == ([0, 2], False, None, False)

    later = state_of(store, 2)
    assert later.batches == {1: [batch]}
    later.by_id |= {at: prompt(at) for at in (1, 3)}
    stream = StreamedBatches(later, RUN, ranks=2, arrival=None)
    finish(later, 3, 1)
    stream.refresh()
    last = stream.take()
    assert last is not None
    assert (last.index, last.ids, last.last) == (1, [1, 3], True)


def test_a_micro_batch_is_dealt_anew_to_another_number_of_ranks(store: LedgerStore) -> None:
    groups = state_of(store, 1)
    groups.record_drawn([prompt(at) for at in range(4)])
    finish(groups, 0, 1, 2, 3)
    batch = FixedBatches(
        groups, RunSpec(prompts_per_step=4, groups_per_micro_batch=4), ranks=2, ordered=True
    ).take()
    assert batch is not None
    assert [len(share) for share in groups.shares(batch, 2)] == [2, 2]
    assert sorted(group.id for share in groups.shares(batch, 3) for group in share) == [0, 1, 2, 3]


def test_rows_bring_the_prompt_that_they_have_in_common(store: LedgerStore) -> None:
    state = state_of(store, 1)
    state.record_drawn([prompt(0), prompt(1)])
    rows, plain = sampled(0), sampled(1)
    rows.samples[0].rollout = 0
    for group in (rows, plain):
        group.prompt_ids, group.meta = np.array([9], np.int32), {"more": 1}
    state.merge([rows, plain])
    assert (state[0].prompt_ids.tolist(), state[0].meta) == ([9], {"more": 1})
    assert (state[1].prompt_ids.tolist(), state[1].meta) == ([1, 2], {})
