"""What is trained, what waits and what is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import UserCodeError
from gyre.rollouts.samples import VersionRun
from gyre.rollouts.trainer.staleness import TRAIN, Action, Ages, StalenessPolicy, Verdict, ages


def runs(*spans: tuple[int, int]) -> tuple[VersionRun, ...]:
    """Of (version, tokens)."""
    found, at = [], 0
    for version, tokens in spans:
        found.append(VersionRun(version, at, at + tokens))
        at += tokens
    return tuple(found)


def test_ages_are_those_of_the_tokens() -> None:
    assert ages(runs((4, 30), (6, 10)), 6) == Ages(oldest=2, newest=0, mean=1.5, tokens=40)
    assert ages(runs((4, 0), (6, 10)), 6) == Ages(oldest=0, newest=0, mean=0.0, tokens=10)
    assert ages((), 6) == Ages(0, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("max_age", "versions", "action"),
    [
        (0, (6,), Action.TRAIN),
        (0, (5,), Action.DROP),
        (0, (5, 6), Action.DROP),
        (1, (5, 6), Action.TRAIN),
        (1, (4, 5, 6), Action.DROP),
        (3, (3, 6), Action.TRAIN),
        (0, (7,), Action.WAIT),
    ],
)
def test_the_oldest_token_decides(max_age: int, versions: tuple[int, ...], action: Action) -> None:
    verdict = StalenessPolicy(max_age).sample(
        runs(*((version, 5) for version in versions)), trainer_version=6
    )
    assert verdict.action is action
    assert bool(verdict.reason) == (action is not Action.TRAIN)


def test_reasons_name_the_versions() -> None:
    assert StalenessPolicy(1).sample(runs((4, 5)), trainer_version=7).reason == (
        "It has tokens of version 4, 3 behind the trainer's 7; 1 are permitted."
    )


def test_a_function_of_the_user_s_decides_by_itself() -> None:
    def half_fresh(age: Ages) -> Verdict:
        return TRAIN if age.mean <= 1 else Verdict(Action.DROP, "Most of it is old.")

    policy = StalenessPolicy(0, half_fresh)
    assert policy.sample(runs((0, 1), (9, 99)), trainer_version=9) is TRAIN
    assert policy.sample(runs((0, 50), (9, 50)), trainer_version=9).action is Action.DROP


def test_a_function_that_answers_something_else_is_told_so() -> None:
    policy = StalenessPolicy(0, lambda age: True)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserCodeError, match="answered True, expected a Verdict"):
        policy.sample(runs((1, 1)), trainer_version=1)


def test_a_group_has_the_verdict_of_its_strictest_sample() -> None:
    policy = StalenessPolicy(1)
    young, old, later = runs((6, 5)), runs((2, 5)), runs((8, 5))
    assert policy.group([young, young], trainer_version=6) is TRAIN
    assert policy.group([young, later], trainer_version=6).action is Action.WAIT
    assert policy.group([later, young, old], trainer_version=6).action is Action.DROP


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness of -1"):
        StalenessPolicy(-1)


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), max_size=5),
    trainer=st.integers(0, 12),
    max_age=st.integers(0, 5),
)
def test_no_token_older_than_the_bound_is_trained(
    spans: list[tuple[int, int]], trainer: int, max_age: int
) -> None:
    verdict = StalenessPolicy(max_age).sample(runs(*spans), trainer_version=trainer)
    is_old = any(trainer - version > max_age for version, tokens in spans if tokens)
    is_later = any(version > trainer for version, tokens in spans if tokens)
    if verdict.action is Action.TRAIN:
        assert not is_old
    if verdict.action is Action.DROP:
        assert is_old
    if is_old and not is_later:
        assert verdict.action is Action.DROP
