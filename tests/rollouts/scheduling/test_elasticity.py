"""How many instances: as computed, within bounds, with a reason, and without flapping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.scheduling.elasticity import ElasticPolicy, ElasticSettings, PlaneObservation, Scale
from tests.examples import examples

SETTINGS = ElasticSettings(min=1, max=16)
FINE = PlaneObservation(instances=4, trainer_wait_share=0.05, idle_share=0.1, rate_tokens_s=4000)
LACKING = replace(FINE, trainer_wait_share=0.4, idle_share=0.0)
IDLING = replace(FINE, trainer_wait_share=0.0, idle_share=0.6)


def told(
    policy: ElasticPolicy, observation: PlaneObservation, times: int = 3, start: float = 0.0
) -> list[Scale | None]:
    return [policy.decide(observation, start + at * 100.0) for at in range(times)]


def test_the_trainer_s_lack_is_made_up_for() -> None:
    *before, scale = told(ElasticPolicy(SETTINGS), LACKING)
    assert before == [None, None]
    assert scale is not None
    assert scale.target == 6  # 4 * 0.9 / 0.6
    assert scale.reason == (
        "The trainer did not train for 40% of the time (it waited 40% and generated 0%); 6 instances instead of 4"
        " make up for it."
    )


def test_a_fleets_reasons_speak_of_its_samples() -> None:
    policy = ElasticPolicy(SETTINGS, of_fleet=True)
    up = told(policy, LACKING)[-1]
    assert up == Scale(
        6, "Samples waited for a place for 40% of the time; 6 instances instead of 4 make up for it."
    )
    down = told(ElasticPolicy(SETTINGS, of_fleet=True), IDLING, 4, start=1000.0)[2]
    assert down is not None
    assert (
        down.reason
        == "Instances were idle for 60% of the time and samples waited for 0%; 2 instead of 4 suffice."
    )


def test_what_the_trainer_generates_itself_is_lacking_too() -> None:
    scale = told(ElasticPolicy(SETTINGS), replace(FINE, local_share=0.35))[-1]
    assert scale is not None
    assert scale.target == 6


def test_idle_instances_are_given_back_but_not_so_many_that_the_trainer_waits() -> None:
    scale = told(ElasticPolicy(SETTINGS), IDLING, 4, start=1000.0)[2]
    assert scale is not None
    assert scale.target == 2  # 1.6 are busy
    assert "idle for 60%" in scale.reason


def test_instances_with_a_long_queue_behind_them_are_kept() -> None:
    behind = replace(IDLING, queued_tokens=4000 * 61, least_queued_tokens=4000 * 61)
    assert told(ElasticPolicy(SETTINGS), behind, 5) == [None] * 5


def test_a_queue_at_the_end_of_a_step_is_the_next_ones_and_one_of_a_fleet_is_a_burst() -> None:
    asked_for = replace(IDLING, queued_tokens=4000 * 61)
    assert told(ElasticPolicy(SETTINGS), asked_for, 5)[2] is not None
    assert told(ElasticPolicy(SETTINGS, of_fleet=True), asked_for, 5) == [None] * 5


@pytest.mark.parametrize(
    ("instances", "target", "reason"),
    [(0, 1, "0 instances are there, and min is 1."), (17, 16, "17 instances are there, and max is 16.")],
)
def test_the_bounds_hold_at_once(instances: int, target: int, reason: str) -> None:
    policy = ElasticPolicy(SETTINGS)
    assert policy.decide(replace(FINE, instances=instances), 0.0) == Scale(target, reason)
    assert policy.decide(replace(FINE, instances=instances), 0.1) == Scale(target, reason)


def test_from_none_to_one_as_soon_as_samples_wait() -> None:
    policy = ElasticPolicy(ElasticSettings(min=0, max=4))
    assert policy.decide(PlaneObservation(instances=0), 0.0) is None
    scale = policy.decide(PlaneObservation(instances=0, queued_tokens=1.0), 1.0)
    assert scale is not None
    assert scale.target == 1


def test_at_most_doubled_and_never_beyond_max() -> None:
    starved = replace(LACKING, trainer_wait_share=0.95)
    doubled = told(ElasticPolicy(SETTINGS), starved)[-1]
    assert doubled is not None
    assert doubled.target == 8
    capped = told(ElasticPolicy(replace(SETTINGS, max=5)), starved)[-1]
    assert capped is not None
    assert capped.target == 5
    assert told(ElasticPolicy(replace(SETTINGS, max=4)), starved) == [None] * 3


def test_those_that_are_starting_are_waited_for() -> None:
    assert told(ElasticPolicy(SETTINGS), replace(LACKING, starting=2), 6) == [None] * 6


def test_one_observation_among_others_changes_nothing() -> None:
    policy = ElasticPolicy(SETTINGS)
    for at in range(40):
        assert policy.decide((LACKING, IDLING)[at % 2], at * 100.0) is None
    for at in range(40, 80):
        assert policy.decide((LACKING, LACKING, FINE)[at % 3], at * 100.0) is None


def test_after_a_change_there_is_a_cool_down() -> None:
    policy = ElasticPolicy(replace(SETTINGS, up_cooldown_s=500.0))
    assert told(policy, LACKING)[-1] is not None
    assert told(policy, replace(LACKING, instances=6), 4, start=300.0) == [None] * 4


def test_a_raise_that_did_not_help_is_taken_back_and_not_repeated_for_a_while() -> None:
    policy = ElasticPolicy(replace(SETTINGS, plateau_s=2000.0))
    raised = told(policy, LACKING)[-1]
    assert raised is not None
    assert raised.target == 6
    bound_by_the_tail = replace(LACKING, instances=6)
    back = told(policy, bound_by_the_tail, 3, start=300.0)[-1]
    assert back == Scale(
        4,
        "The trainer did not train for 40% of the time with 4 instances, and for 40% with 6: the added instances do"
        " not help, and are given back.",
    )
    assert told(policy, LACKING, 19, start=600.0) == [None] * 19
    assert any(told(policy, LACKING, 10, start=2600.0))


def test_whether_a_raise_helped_is_told_by_the_length_of_steps() -> None:
    """Instances that take the cores from each other and from the trainer: it waits less, for it is slower too."""
    policy = ElasticPolicy(SETTINGS)
    assert told(policy, replace(LACKING, step_s=1.6))[-1] is not None
    slower = replace(FINE, instances=6, trainer_wait_share=0.05, step_s=1.9)
    back = told(policy, slower, 3, start=300.0)[-1]
    assert back is not None
    assert back.target == 4
    assert back.reason.startswith("A step took 1.6 s with 4 and 1.9 s with 6: ")

    policy = ElasticPolicy(SETTINGS)
    assert told(policy, replace(LACKING, step_s=1.6))[-1] is not None
    assert told(policy, replace(slower, step_s=1.3), 9, start=300.0) == [None] * 9


def test_instances_that_are_idle_are_not_blamed_for_long_steps() -> None:
    """A reward that became slow."""
    policy = ElasticPolicy(SETTINGS)
    assert told(policy, replace(LACKING, step_s=1.6))[-1] is not None
    idle = replace(FINE, instances=6, idle_share=0.6, step_s=9.0)
    back = next(one for one in told(policy, idle, 9, start=400.0) if one)
    assert back.reason.startswith("Instances were idle for 60% of the time")


def test_nothing_is_added_on_cores_that_are_all_in_use() -> None:
    policy = ElasticPolicy(SETTINGS)
    full = replace(LACKING, cores_busy=0.97)
    assert told(policy, full, 9) == [
        None,
        None,
        Scale(
            4,
            "The trainer did not train for 40% of the time, but 97% of the machine's cores are in use: another"
            " instance would only take from those that are there.",
        ),
        *[None] * 6,  # it was said
    ]
    raised = policy.decide(replace(full, cores_busy=0.6), 1000.0)
    assert raised is not None
    assert raised.target == 6


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"elastic\(3, 2\)"):
        ElasticSettings(min=3, max=2)


@settings(max_examples=examples(150), deadline=None)
@given(
    work_s=st.floats(10, 3000),
    train_s=st.floats(5, 300),
    tail_s=st.floats(0, 200),
    first=st.integers(1, 16),
    noise=st.floats(0, 0.08),
)
def test_in_a_world_that_stays_the_same_the_number_settles(
    work_s: float, train_s: float, tail_s: float, first: int, noise: float
) -> None:
    """`work_s` is what one instance alone would need. Generation and training overlap."""
    policy, count, now = ElasticPolicy(replace(SETTINGS, plateau_s=1e9)), first, 0.0
    targets = [count]
    for at in range(60):
        generated_s = max(work_s / count, tail_s) * (1 + noise * (-1) ** at)
        step_s = max(generated_s, train_s)
        now += step_s
        scale = policy.decide(
            PlaneObservation(
                instances=count,
                trainer_wait_share=1 - train_s / step_s,
                idle_share=1 - work_s / count / step_s if step_s > work_s / count else 0.0,
                rate_tokens_s=1000.0 * count,
                step_s=step_s,
            ),
            now,
        )
        if scale is not None:
            assert SETTINGS.min <= scale.target <= SETTINGS.max
            assert scale.target != count
            count = scale.target
            targets.append(count)
    directions = [after > before for before, after in pairwise(targets)]
    turns = sum(before != after for before, after in pairwise(directions))
    assert turns <= 2
    assert len(targets) <= SETTINGS.max, "every number once, at the most"
