"""Who is trained next when the first that are whole come first: once, none too old, and no place wasted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.samples import VersionRun
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.staleness import Action, Ages, StalenessPolicy, Verdict
from tests.examples import examples


def of(version: int, tokens: int = 5) -> tuple[VersionRun, ...]:
    return (VersionRun(version, 0, tokens),)


def order(max_age: int, per_step: int = 2, *, keeps: bool = False) -> ArrivalOrder:
    return ArrivalOrder(StalenessPolicy(max_age), per_step=per_step, keeps_slots=keeps)


def test_the_first_that_are_whole_are_taken_and_the_oldest_before_them() -> None:
    arrival = order(1)
    for group, version in ((4, 1), (2, 1), (9, 0), (3, 1)):
        arrival.requested(group, version)
        arrival.scored(group, [of(version)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=2).train == [9, 4]
    assert arrival.choose(trainer_version=1, slots=5).train == [2, 3]
    assert arrival.choose(trainer_version=1, slots=5).train == []
    assert (arrival.waiting, arrival.in_flight) == (0, 0)


def test_what_became_too_old_is_dropped_once() -> None:
    arrival = order(1)
    arrival.scored(0, [of(0), of(2)], trainer_version=2)
    arrival.scored(1, [of(1)], trainer_version=2)
    choice = arrival.choose(trainer_version=2, slots=2)
    assert choice.train == [1]
    ((group, verdict),) = choice.drop
    assert (group, verdict.action) == (0, Action.DROP)
    assert verdict.reason.startswith("It has tokens of version 0, 2 behind the trainer's 2")
    assert arrival.choose(trainer_version=2, slots=2).drop == []


def test_a_place_is_kept_for_who_would_become_too_old() -> None:
    arrival = order(1, keeps=True)
    arrival.requested(0, 0)
    for group in (1, 2):
        arrival.scored(group, [of(1)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=2).train == [1]
    assert arrival.choose(trainer_version=1, slots=1).train == []
    arrival.scored(0, [of(0)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=1).train == [0]
    assert arrival.choose(trainer_version=2, slots=2).train == [2]


def test_a_place_is_kept_steps_ahead() -> None:
    """Four groups of version 0 and two places a step: the next step is theirs, though they may wait one more."""
    arrival = order(2, keeps=True)
    for group in range(4):
        arrival.requested(group, 0)
    for group in (8, 9):
        arrival.scored(group, [of(1)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=2).train == []
    arrival.forget(3)
    assert arrival.choose(trainer_version=1, slots=2).train == [8]


def test_where_not_all_can_be_in_time_the_most_urgent_go_first() -> None:
    arrival = order(1, keeps=True)
    for group in range(5):
        arrival.requested(group, 0)
    arrival.scored(7, [of(1)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=2).train == []
    arrival.scored(3, [of(0)], trainer_version=1)
    assert arrival.choose(trainer_version=1, slots=2).train == [3]


def test_a_function_of_the_users_may_let_groups_wait() -> None:
    def patient(age: Ages) -> Verdict:
        return Verdict(Action.TRAIN if age.oldest >= 1 else Action.WAIT, "not yet")

    arrival = ArrivalOrder(StalenessPolicy(0, patient), per_step=2, keeps_slots=False)
    arrival.scored(0, [of(3)], trainer_version=3)
    assert arrival.choose(trainer_version=3, slots=2).train == []
    assert arrival.choose(trainer_version=4, slots=2).train == [0]


@settings(deadline=None, max_examples=examples(150))
@given(
    dice=st.randoms(use_true_random=False),
    per_step=st.integers(1, 5),
    max_age=st.integers(0, 4),
    data=st.data(),
    keeps=st.booleans(),
)
def test_a_whole_run_trains_each_group_once_and_none_too_old(
    dice: random.Random, per_step: int, max_age: int, data: st.DataObject, keeps: bool
) -> None:
    """Groups are asked for as the graph permits, and come whole in any order, with tokens of any version since."""
    ahead = data.draw(st.integers(0, max_age))
    steps = 8
    arrival = order(max_age, per_step, keeps=keeps)
    version, next_group = 0, 0
    flying: dict[int, int] = {}
    trained: dict[int, int] = {}
    current: list[int] = []
    oldest: dict[int, int] = {}
    again: list[int] = []
    turns = 0
    while version < steps:
        turns += 1
        assert turns < 5000, "the run stands still"
        while again or next_group < min(steps, version + 1 + ahead) * per_step:
            group = again.pop() if again else next_group
            next_group += group == next_group
            arrival.requested(group, version)
            flying[group] = version
        if flying and dice.random() < 0.8:
            group = dice.choice(sorted(flying))
            asked = flying.pop(group)
            oldest[group] = dice.randint(asked, version)
            arrival.scored(group, [of(oldest[group])], trainer_version=version)
        choice = arrival.choose(trainer_version=version, slots=per_step - len(current))
        assert not (keeps and choice.drop), "a place was not kept"
        again += [group for group, _ in choice.drop]
        for group in choice.train:
            assert group not in trained
            assert 0 <= version - oldest[group] <= max_age
            trained[group] = version
        current += choice.train
        if len(current) == per_step:
            version, current = version + 1, []
    assert sorted(trained) == list(range(steps * per_step))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_group_without_tokens_is_as_old_as_the_policy(keeps: bool) -> None:
    arrival = order(0, keeps=keeps)
    arrival.scored(0, [()], trainer_version=7)
    assert arrival.choose(trainer_version=7, slots=1).train == [0]
