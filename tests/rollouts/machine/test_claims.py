"""What a peer says it holds is checked before it counts: *a claim is checked*."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.protocol.frames import Held, Keep
from tests.rollouts.machine.simulated_agents import Rows, SimAgent, picture
from tests.rollouts.machine.small_groups import asked, groups_with, join, report

LIMIT = 1000


def dial(groups: OpenGroups, name: str, incarnation: int, *held: Held) -> list[Keep]:
    hello = SimAgent(name, 0, incarnation).hello()
    return groups.join(replace(hello, held=list(held), kv_tokens=1 << 30))


def claim(sample: InFlightSample, **other: Any) -> Held:
    """Of an instance that has 5 tokens more than are known."""
    told = {"key": sample.key, "lease": sample.lease, "start": 0, "length": sample.length + 5}
    return Held(**(told | other))


def working(samples: int = 6) -> tuple[OpenGroups, list[InFlightSample]]:
    """All at instance "a", with ten tokens each."""
    groups = groups_with("a")
    requests = groups.open(asked(samples, limit=LIMIT))
    groups.assign()
    found = [request.samples[0] for request in requests]
    report(groups, "a", dict.fromkeys(found, 10))
    return groups, found


def test_a_peer_that_claims_everything_is_given_nothing() -> None:
    groups, samples = working()
    before = picture(groups)
    every_lease = range((1 << 40) - 3, (1 << 40) + 20)
    claims = [claim(one, lease=lease, length=2**62) for one in samples for lease in every_lease]
    assert dial(groups, "liar", 9, *claims) == []
    assert picture(groups) == before
    assert groups.cancelled == []
    assert {one.instance for one in samples} == {"a"}


def restarted(groups: OpenGroups, rows: Rows | None = None, *, epoch: int = 2) -> OpenGroups:
    """The manager after this one, which was killed after a last commit into `rows`."""
    rows = rows or Rows(newest=5)
    batch = groups.take_batch()
    rows.counters = batch.counters
    rows.groups |= batch.opened
    rows.deltas |= dict(batch.encoded())
    return rows.restored(epoch)


def elsewhere(groups: OpenGroups, key: int) -> InFlightSample:
    """The sample, which "b" has by now."""
    join(groups, "b")
    groups.assign()
    sample = groups.sample(key)
    assert sample is not None
    assert sample.instance == "b"
    return sample


@pytest.mark.parametrize("wrong", [{"length": LIMIT + 1}, {"start": 11}, {"lease": 0}, {"lease": 7 << 40}])
def test_a_peer_that_claims_what_nobody_has_is_believed_in_nothing_that_cannot_be(
    wrong: dict[str, int],
) -> None:
    """After a restart nobody has a sample."""
    groups, samples = working()
    again = restarted(groups)
    assert dial(again, "a", 0, *(claim(one, **wrong) for one in samples)) == []
    assert again.account.generated <= len(samples) * LIMIT
    assert again.missing_tokens() == 0


def test_a_stored_lease_is_nobody_else_s_claim_though_nobody_has_the_sample() -> None:
    groups, samples = working()
    again = restarted(groups)
    assert dial(again, "liar", 9, *(claim(one) for one in samples)) == []
    first, *others = samples
    assert dial(again, "a", 0, *(claim(one, lease=first.lease) for one in others)) == [], "another sample's"
    assert again.account.generated == groups.account.generated
    assert len(dial(again, "a", 0, *(claim(one) for one in samples))) == len(samples)


def test_who_returns_to_the_next_manager_has_its_sample_back_from_who_got_it_there() -> None:
    """What it generated while there was no manager is not generated again."""
    groups, (sample,) = working(1)
    again = restarted(groups)
    theirs = elsewhere(again, sample.key)
    taken = ("b", theirs.row, theirs.lease)
    (keep,) = dial(again, "a", 0, claim(sample))
    assert keep.known == 10
    assert theirs.instance == "a"
    assert again.cancelled == [taken]
    report(again, "a", {theirs: 5})
    assert theirs.length == 15
    assert again.account.discarded == {}
    assert again.missing_tokens() == 0


@pytest.mark.parametrize("told", ["another incarnation's", "another sample's", "one never granted"])
def test_no_other_claim_takes_a_sample_from_who_got_it_from_the_next_manager(told: str) -> None:
    groups, (sample, other) = working(2)
    again = restarted(groups)
    join(again, "b")
    again.assign()
    leases = {"another sample's": other.lease, "one never granted": other.lease + 1}
    claimed = claim(sample, lease=leases.get(told, sample.lease))
    generated = again.account.generated
    assert dial(again, "a", 9 if told == "another incarnation's" else 0, claimed) == []
    assert again.cancelled == []
    assert again.account.generated == generated
    theirs = again.sample(sample.key)
    assert theirs is not None
    assert theirs.instance == "b"


def test_a_lease_that_died_with_its_manager_counts_as_long_as_nobody_has_the_sample() -> None:
    """It was granted after the last commit, and is higher than all that are stored."""
    groups, (sample,) = working(1)
    rows = Rows(newest=5)
    restarted(groups, rows)
    groups.leave("a")
    join(groups, "c")
    groups.assign()
    assert sample.instance == "c"
    for is_late in (False, True):
        again = rows.restored(2)
        if is_late:
            elsewhere(again, sample.key)
        kept = dial(again, "c", 0, claim(sample))
        assert [one.key for one in kept] == ([] if is_late else [sample.key])


def test_leases_outlast_several_managers_and_moves() -> None:
    """A lease that had ended before the restart is known as well, with what was known at its end."""
    groups, (sample,) = working(1)
    first = claim(sample)
    groups.leave("a", died="connection_lost")
    join(groups, "b")
    groups.assign()
    report(groups, "b", {sample: 1})
    second = claim(sample, start=10)
    rows = Rows(newest=5)
    again = restarted(groups, rows)
    join(again, "c")
    again.assign()
    (theirs,) = again.samples()
    assert theirs.instance == "c"
    report(again, "c", {theirs: 1})
    third = restarted(again, rows, epoch=3)
    (last,) = third.samples()
    assert last.length == 12
    elsewhere(third, last.key)
    report(third, "b", {last: 10})
    generated = third.account.generated
    assert dial(third, "a", 0, first) == []
    assert third.account.generated - generated == 5, "of 15 tokens 10 had come in when it lost the sample"
    assert dial(third, "a", 0, first) == []
    assert third.account.generated - generated == 5, "told once"
    assert dial(third, "b", 0, replace(second, length=40)) != []
    assert third.missing_tokens() == 0


@pytest.mark.parametrize("reset", ["before the lease is stored", "after it", "by the next manager"])
def test_nothing_from_before_a_reset_is_a_claim_on_the_sample_that_began_anew(reset: str) -> None:
    """Whoever still generates the old one would take it from who generates the new one, and hand it back at once."""
    groups, (sample,) = working(1)
    told = claim(sample)
    rows = Rows(newest=5)
    if reset == "after it":
        restarted(groups, rows)
    if reset != "by the next manager":
        groups._quarantine(sample)
    again = restarted(groups, rows)
    if reset == "by the next manager":
        again._quarantine(next(again.samples()))
    theirs = elsewhere(again, sample.key)
    assert theirs.length == 0
    assert dial(again, "a", 0, told) == []
    assert theirs.instance == "b"


def test_leases_go_with_their_groups() -> None:
    groups, _ = working(3)
    groups.take_batch()
    groups.leave("a")
    join(groups, "b")
    groups.assign()  # new leases, and the groups are closed before the commit
    groups.close("train", range(3))
    batch = groups.take_batch()
    assert batch.deltas == []
    assert len(batch.forgotten) == 1
    assert not groups.is_dirty


def test_a_lease_of_an_earlier_manager_takes_nothing_from_who_has_it_now() -> None:
    groups, samples = working()
    assert dial(groups, "old", 9, *(claim(one, lease=3) for one in samples)) == []
    assert {one.instance for one in samples} == {"a"}


@pytest.mark.parametrize("length", [15, 2**62])
def test_another_incarnation_s_lease_is_no_claim(length: int) -> None:
    """Nor does it count as generated and lost what nobody can have generated."""
    groups, samples = working(1)
    (sample,) = samples
    told = claim(sample, length=length)
    groups.leave("a", died="connection_lost")
    join(groups, "b")
    groups.assign()
    generated = groups.account.generated
    assert dial(groups, "liar", 9, told) == []
    assert sample.instance == "b"
    assert groups.account.generated == generated
    kept = dial(groups, "a", 0, told)
    assert [one.key for one in kept] == ([sample.key] if length <= LIMIT else [])
    assert groups.missing_tokens() == 0
    assert groups.account.generated - generated <= LIMIT


def test_a_welcome_that_is_lost_costs_nothing() -> None:
    """The instance dials again with the lease of before: it never heard of the one that it was given."""
    groups, samples = working(1)
    told = claim(samples[0])
    for _ in range(3):
        (keep,) = dial(groups, "a", 0, told)
        assert keep.known == 10
    assert groups.account.discarded == {}
