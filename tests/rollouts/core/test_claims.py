"""What a peer says it holds is checked before it counts: *a claim is checked*."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.protocol.frames import Held, Keep
from tests.rollouts.core.test_groups import SimAgent, asked, groups_with, join, picture, report

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


def test_a_peer_that_claims_what_nobody_has_is_believed_in_no_length_that_cannot_be() -> None:
    """After a restart nobody has a sample, and no lease of the manager before is known."""
    groups, samples = working()
    batch = groups.take_batch()
    again = OpenGroups(epoch=2)
    again.newest_version = 5
    again.promote(0)
    again.restore(batch.counters, batch.opened, batch.encoded())
    lost = again.account.generated
    assert dial(again, "liar", 9, *(claim(one, length=LIMIT + 1) for one in samples)) == []
    assert dial(again, "liar", 9, *(claim(one, start=11) for one in samples)) == []
    assert dial(again, "liar", 9, *(claim(one, lease=0) for one in samples)) == []
    assert dial(again, "liar", 9, *(claim(one, lease=7 << 40) for one in samples)) == []
    assert again.account.generated == lost
    assert again.missing_tokens() == 0
    assert len(dial(again, "honest", 1, *(claim(one) for one in samples))) == len(samples)


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
