"""The watch warns of what does not learn, once, and of nothing that does."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.workloads.trainer.learning.learning_watch import CODES, LearningWatch, Warned


def healthy(step: int, **other: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward_mean": 0.4 + step / 100,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "grad_norm": 0.3,
        "entropy": 1.8,
        "old_kl": 1e-4,
        "flat_groups_ratio": 0.2,
        "cut_off_ratio": 0.1,
    } | other


def told_of(
    watch: LearningWatch, steps: list[dict[str, Any]], *, end: bool = False
) -> list[tuple[str, int, bool]]:
    told = [warned for metrics in steps for warned in watch.step(metrics)]
    told += watch.at_end() if end else []
    return [(warned.code, warned.step, warned.holds) for warned in told]


def test_a_job_that_learns_is_left_alone() -> None:
    steps = [
        healthy(step, entropy=1.8 * 0.8**step, old_kl=1e-4 * 1.2**step, reward_mean=0.3 + step / 100)
        for step in range(1, 31)
    ]
    assert told_of(LearningWatch(), steps, end=True) == []


EQUAL = {"reward_mean": 0.5, "reward_min": 0.5, "reward_max": 0.5}


@pytest.mark.parametrize(
    ("code", "wrong", "at"),
    [
        ("equal_rewards", EQUAL, 3),
        ("flat_groups", {"flat_groups_ratio": 0.6}, 3),
        ("no_gradient", {"grad_norm": 0.0}, 3),
        ("cut_off", {"cut_off_ratio": 0.3}, 3),
        ("not_finite", {"skipped": 1}, 1),
    ],
)
def test_what_is_wrong_from_the_start_is_told_at_once(code: str, wrong: dict[str, Any], at: int) -> None:
    """And again in newer words whenever the steps have doubled."""
    watch = LearningWatch()
    told = {step: watch.step(healthy(step, **wrong)) for step in range(1, 25)}
    assert [one.code for one in told[at]] == [code]
    again = {step for step, found in told.items() if found} - {at}
    assert again in (
        set(),
        {step for step in range(at + 1, 25) if (step // at).bit_count() == 1 and step % at == 0},
    )
    assert {(one.code, one.step, one.holds) for found in told.values() for one in found} == {(code, at, True)}
    words = [one.message for found in told.values() for one in found]
    assert len(set(words)) == len(words)


def test_a_short_run_is_judged_at_its_end() -> None:
    steps = [healthy(step, **EQUAL, flat_groups_ratio=1.0, grad_norm=0.0) for step in (1, 2)]
    watch = LearningWatch()
    assert told_of(watch, steps) == []
    assert [(one.code, one.step) for one in watch.at_end()] == [
        ("equal_rewards", 2),
        ("flat_groups", 2),
        ("no_gradient", 2),
    ]
    assert watch.at_end() == []


def test_what_still_holds_is_told_in_newer_words_at_the_end() -> None:
    watch = LearningWatch()
    for step in range(1, 31):
        watch.step(healthy(step, cut_off_ratio=0.5 if step > 10 else 0.3))
    [newer] = watch.at_end()
    assert (newer.code, newer.step) == ("cut_off", 3)
    assert newer.message.startswith("50 % of the answers of steps 21 to 30")


def test_equal_rewards_later_are_told_after_ten_steps_and_end_when_they_differ() -> None:
    steps = [healthy(1), *(healthy(step, **EQUAL) for step in range(2, 15)), healthy(15)]
    assert told_of(LearningWatch(), steps) == [("equal_rewards", 11, True), ("equal_rewards", 15, False)]
    other = {"reward_min": 0.1, "reward_max": 0.1}
    assert told_of(LearningWatch(), [healthy(1, **EQUAL), healthy(2, **other), healthy(3, **EQUAL)]) == []


def test_without_a_baseline_of_the_group_equal_rewards_have_a_gradient() -> None:
    steps = [healthy(step, flat_groups_ratio=1.0) for step in range(1, 20)]
    assert told_of(LearningWatch(group_baseline=False), steps, end=True) == []


@pytest.mark.parametrize("name", ["kl", "rollout_kl", "old_kl"])
def test_a_kl_that_runs_away(name: str) -> None:
    steps = [healthy(step, **{name: 0.01 * 1.5**step}) for step in range(1, 21)]
    assert [told[0] for told in told_of(LearningWatch(), steps)] == ["kl_runs_away"]
    high = [healthy(step, **{name: 0.5}) for step in range(1, 21)]
    assert told_of(LearningWatch(), high) == [], "it began so"


def test_an_entropy_that_collapses_while_the_reward_does_not_rise() -> None:
    steps = [healthy(step, entropy=1.8 * 0.6**step, reward_mean=0.2) for step in range(1, 21)]
    assert [told[0] for told in told_of(LearningWatch(), steps)] == ["entropy_collapsed"]
    rising = [healthy(step, entropy=1.8 * 0.6**step) for step in range(1, 21)]
    assert told_of(LearningWatch(), rising) == []


def test_a_job_without_evaluations_is_told_before_its_first_step() -> None:
    watch = LearningWatch(not_evaluated="run.evaluate_every is 0")
    assert [one.code for one in watch.begin()] == ["not_evaluated"]
    assert watch.begin() == []
    assert "not_evaluated" in watch.held
    assert told_of(watch, [healthy(1)], end=True) == []


def test_rows_that_are_never_trained_are_told_before_the_first_step_and_to_the_end() -> None:
    watch = LearningWatch(never_trained="65 of the 200 rows of data are never trained")
    assert [(one.code, one.message) for one in watch.begin()] == [
        ("never_trained", "65 of the 200 rows of data are never trained")
    ]
    assert watch.begin() == []
    assert told_of(watch, [healthy(step) for step in range(1, 30)], end=True) == []
    assert list(watch.held) == ["never_trained"]


def test_metrics_of_a_learner_of_the_users_own_may_lack_anything() -> None:
    assert told_of(LearningWatch(), [{"step": step} for step in range(1, 30)], end=True) == []
    assert told_of(LearningWatch(), [{}] * 20, end=True) == []


def test_folding_the_same_steps_again_comes_to_the_same() -> None:
    steps = [healthy(step, cut_off_ratio=0.9, **(EQUAL if step % 17 else {})) for step in range(1, 60)]
    first, again = LearningWatch(), LearningWatch()
    told = [warned for metrics in steps for warned in first.step(metrics)]
    for metrics in steps:
        again.step(metrics)
    assert first.held == again.held
    assert all(isinstance(warned, Warned) and warned.code in CODES for warned in told)


def test_skipped_steps_are_counted_at_the_end() -> None:
    watch = LearningWatch()
    skipped = {"skipped": 1}
    first, second = [one for step in (1, 2, 3) for one in watch.step({"step": step, **skipped})]
    assert first.message == "step 1 was skipped: its gradient was not finite"
    assert second.message == "2 steps were skipped, last step 2: their gradients were not finite"
    [last] = watch.at_end()
    assert last.message == "3 steps were skipped, last step 3: their gradients were not finite"


def climbing(step: int, *, to: float) -> dict[str, Any]:
    """A reward that goes from 0.4 to `to` in 40 steps, with groups that become flat."""
    done = min(step / 40, 1.0)
    return healthy(step, reward_mean=0.4 + done * (to - 0.4), flat_groups_ratio=0.2 + 0.7 * done**2)


def test_equal_rewards_of_solved_prompts_are_no_news() -> None:
    steps = [healthy(step, reward_mean=0.05 * step, reward_min=0.0, reward_max=1.0) for step in range(1, 20)]
    solved = [healthy(step, reward_mean=1.0, reward_min=1.0, reward_max=1.0) for step in range(20, 60)]
    assert told_of(LearningWatch(), [*steps, *solved], end=True) == []


def test_groups_that_are_flat_because_their_prompts_are_solved_are_no_news() -> None:
    steps = [climbing(step, to=0.97) for step in range(1, 60)]
    assert (
        told_of(LearningWatch(), [*steps, *(one | {"grad_norm": 0.0} for one in steps[-5:])], end=True) == []
    )


@pytest.mark.parametrize("to", [0.3, 0.4, 0.48])
def test_groups_that_become_flat_while_the_reward_stays_low_are(to: float) -> None:
    steps = [climbing(step, to=to) for step in range(1, 60)]
    assert [code for code, _, _ in told_of(LearningWatch(), steps)] == ["flat_groups"]
