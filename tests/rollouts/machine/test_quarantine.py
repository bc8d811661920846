"""Which sample is to blame for a death: it is quarantined, and nobody else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gyre.rollouts.plane.groups import MOST_RESETS, OpenGroups
from gyre.rollouts.plane.quarantine import CLEARED_AFTER_TOKENS, QUARANTINE_AFTER
from gyre.rollouts.protocol.frames import Held
from tests.rollouts.machine.simulated_agents import Rows, SimAgent, picture
from tests.rollouts.machine.small_groups import asked, die, groups_with, join, report


def test_what_takes_a_whole_machine_down_is_found_too() -> None:
    """Sample 0 ends agent, engine and machine at once, each time under another name."""
    open_groups = groups_with("m0", "m1")
    requests = open_groups.open(asked(24, limit=200))
    poison = requests[0].samples[0]
    machines = 2
    for _ in range(2000):
        open_groups.assign()
        for name in list(open_groups.instances):
            held = list(open_groups.held_by(name))
            if poison in held:
                open_groups.leave(name, died="its machine or agent was lost (connection_lost)")
                join(open_groups, f"m{machines}")
                machines += 1
            elif held:
                ends = {state: "length" for state in held if state.length + 20 >= 200}
                report(open_groups, name, {state: min(20, 200 - state.length) for state in held}, ends)
        if poison.key in open_groups.given_up and all(
            s.finish for s in open_groups.samples() if s is not poison
        ):
            break
    assert set(open_groups.given_up) == {poison.key}
    assert {state.key for state in open_groups.quarantined} == {poison.key}
    assert machines - 2 <= QUARANTINE_AFTER * (MOST_RESETS + 1)
    assert all("connection_lost" in text for text in poison.evidence)


def test_machines_that_go_by_themselves_quarantine_nothing() -> None:
    """Preempted every hundred tokens, without notice."""
    open_groups = groups_with("m0")
    open_groups.open(asked(16, limit=1000))
    for turn in range(1, 200):
        open_groups.assign()
        (name,) = open_groups.instances
        held = list(open_groups.held_by(name))
        if not held:
            break
        ends = {state: "length" for state in held if state.length + 20 >= 1000}
        report(open_groups, name, {state: min(20, 1000 - state.length) for state in held}, ends)
        if turn % 5 == 0:
            open_groups.leave(name, died="connection_lost")
            join(open_groups, f"m{turn}")
    assert all(state.finish for state in open_groups.samples())
    assert open_groups.account.samples_quarantined == 0


def test_who_comes_back_after_a_cut_had_not_died() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(2 * QUARANTINE_AFTER):
        open_groups.assign()
        lease = state.lease
        open_groups.leave("a", died="connection_lost")
        assert state.deaths == 1
        hello = SimAgent("a", 0, 0).hello()
        held = [Held(key=state.key, lease=lease, start=0, length=state.length)]
        open_groups.join(msgspec.structs.replace(hello, held=held, kv_tokens=1 << 30))
        open_groups.serve("a", 0)
        assert state.instance == "a"
        assert state.deaths == 0
    assert open_groups.missing_tokens() == 0


def test_what_a_sample_answers_for_outlasts_the_manager() -> None:
    """It kills an engine under each of three managers, and the third quarantines it."""
    rows: tuple[dict[str, Any], dict[int, bytes], dict[int, bytes]] = ({}, {}, {})
    counters, groups, deltas = rows
    for term in range(1, QUARANTINE_AFTER + 1):
        open_groups = OpenGroups(epoch=term)
        open_groups.newest_version = 5
        open_groups.promote(0)
        open_groups.restore(counters, groups, sorted(deltas.items()))
        if term == 1:
            open_groups.open(asked(1))
        (state,) = open_groups.samples()
        join(open_groups, "a")
        open_groups.assign()
        assert state.deaths == term - 1
        assert len(state.evidence) == term - 1
        die(open_groups, "a")
        batch = open_groups.take_batch()
        counters |= batch.counters
        groups |= batch.opened
        deltas |= dict(batch.encoded())
        for gone in batch.forgotten:
            deltas.pop(gone, None)
    assert open_groups.account.samples_quarantined == 1
    assert len(state.evidence) == QUARANTINE_AFTER


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_poison_is_found_and_no_innocent_neighbour_is_quarantined(names: str) -> None:
    """Sample 0 kills any engine at once; all others would finish. Only it is quarantined, again and again, until its
    group is given up; every other finishes with all tokens that it ever had."""
    open_groups = groups_with(*names)
    requests = open_groups.open(asked(24, limit=200))
    poison = requests[0].samples[0]
    engine_deaths = 0
    for _ in range(2000):
        open_groups.assign()
        for name in names:
            held = list(open_groups.held_by(name))
            if poison in held:
                engine_deaths += 1
                die(open_groups, name)
                continue
            if held:
                ends = {state: "length" for state in held if state.length + 20 >= 200}
                report(open_groups, name, {state: min(20, 200 - state.length) for state in held}, ends)
        assert open_groups.missing_tokens() == 0
        for instance in open_groups.instances.values():
            assert (
                sum(state.deaths >= QUARANTINE_AFTER - 1 for state in open_groups.held_by(instance.name)) <= 1
            )
        if poison.key in open_groups.given_up and all(
            s.finish for s in open_groups.samples() if s is not poison
        ):
            break
    assert set(open_groups.given_up) == {poison.key}
    assert {state.key for state in open_groups.quarantined} == {poison.key}
    assert open_groups.account.samples_quarantined == MOST_RESETS + 1
    assert engine_deaths <= QUARANTINE_AFTER * (MOST_RESETS + 1)
    assert not open_groups.account.discarded["superseded"]
    assert len(poison.evidence) == QUARANTINE_AFTER
    assert all("said so" in text for text in poison.evidence)


def test_engines_that_die_by_themselves_quarantine_nothing() -> None:
    """An engine that dies every hundred tokens, whatever it runs: everybody gets on, so nobody is to blame."""
    open_groups = groups_with("a")
    open_groups.open(asked(16, limit=1000))
    for turn in range(1, 200):
        open_groups.assign()
        held = list(open_groups.held_by("a"))
        if not held:
            break
        ends = {state: "length" for state in held if state.length + 20 >= 1000}
        report(open_groups, "a", {state: min(20, 1000 - state.length) for state in held}, ends)
        if turn % 5 == 0:
            die(open_groups, "a")
    assert all(state.finish for state in open_groups.samples())
    assert open_groups.account.samples_quarantined == 0
    assert open_groups.account.generated == 16 * 1000


def test_what_was_thrown_away_with_a_reset_does_not_come_back_with_the_next_manager() -> None:
    open_groups, rows = groups_with("a"), Rows(newest=5)
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(QUARANTINE_AFTER):
        open_groups.assign()
        report(open_groups, "a", {state: 10}, {state: "failed"})
    assert (state.resets, state.length) == (1, 0)
    open_groups.assign()
    report(open_groups, "a", {state: 3})
    batch = open_groups.take_batch()
    rows.counters, rows.groups, rows.deltas = batch.counters, batch.opened, dict(batch.encoded())
    again = rows.restored(2)
    assert [one.length for one in again.samples()] == [3]
    assert picture(again) == picture(open_groups)


def test_a_suspect_that_gets_further_than_where_it_died_is_cleared() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(2):
        open_groups.assign()
        die(open_groups, "a")
    assert state.deaths == QUARANTINE_AFTER - 1
    open_groups.assign()
    assert open_groups.instances["a"].on_trial is state.placed
    report(open_groups, "a", {state: CLEARED_AFTER_TOKENS + 1})
    assert state.deaths == 0
    assert open_groups.instances["a"].on_trial is None
