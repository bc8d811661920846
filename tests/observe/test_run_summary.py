"""A run in one row: what is known, and None for what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gyre.failover import JobState
from gyre.failover.evaluation import Evaluation
from gyre.observe.run_lines import ran_for
from gyre.observe.run_summary import experiment_of, model_of, summary_of


def _evaluation(
    name: str, version: int, accuracy: float | None, reward: float | None = 0.5, **said: Any
) -> Evaluation:
    return Evaluation(
        version=version, set=name, prompts=10, count=10, reward_mean=reward, accuracy=accuracy, **said
    )


def _state(*evaluations: Evaluation, **last: Any) -> JobState:
    state = JobState()
    return replace(
        state,
        evaluations={one.key: one for one in evaluations},
        training=replace(state.training, last=last),
    )


SPEC: dict[str, Any] = {
    "recipe": "grpo",
    "run": {"steps": 40},
    "config": {"seed": 3, "model_path": "/m/Qwen2.5/"},
}


def test_a_run_without_a_step_says_what_it_does_not_know() -> None:
    found = summary_of(JobState(), {}, [])
    assert (found["recipe"], found["model"], found["rewards"], found["held_out"]) == ("", "", [], [])
    assert [found[key] for key in ("steps", "seed", "reward", "tokens_per_s", "cost")] == [None] * 5


def test_what_the_spec_says() -> None:
    found = summary_of(JobState(), SPEC, [])
    assert (found["recipe"], found["model"], found["steps"], found["seed"]) == ("grpo", "Qwen2.5", 40, 3)
    assert summary_of(JobState(), {"recipe": "grpo"}, [])["seed"] == 0
    for own in ({"run": {"steps": 40}}, {**SPEC, "recipe": "fleet"}):
        assert summary_of(JobState(), own, [])["steps"] is None, "who counts its own steps asks for none"
    assert model_of({"config": {"megatron": {"model_path": "/m/gemma"}}}) == "gemma"
    assert model_of({"config": {"model": {"layers": 2, "hidden": 64}}}) == "2 x 64"
    assert model_of({"config": {"model_path": 7, "model": None}}) == ""


def test_the_best_of_each_set_is_by_accuracy_where_there_is_one_and_else_by_reward() -> None:
    state = _state(
        _evaluation("math", 0, 0.2),
        _evaluation("math", 20, 0.6),
        _evaluation("math", 40, 0.6),
        _evaluation("math", 60, 0.5),
        _evaluation("format", 0, None, 0.9),
        _evaluation("format", 60, None, 0.4),
        _evaluation("empty", 60, None, None),
    )
    silent: dict[str, Any] = {"right_by": "", "components": {}}
    assert summary_of(state, SPEC, [])["held_out"] == [
        {"set": "format", "unit": "reward", "value": 0.9, "version": 0, "last": 0.4, "last_version": 60}
        | silent,
        {"set": "math", "unit": "accuracy", "value": 0.6, "version": 20, "last": 0.5, "last_version": 60}
        | silent,
    ]


def test_the_best_is_by_the_rule_of_the_last_and_says_whose_it_is() -> None:
    said = {"right_by": "reward.acc", "components": {"reward.acc": 0.4, "reward.format": 0.9}}
    state = _state(
        _evaluation("math", 0, 0.7),  # by a threshold, before the job went on with another reward
        _evaluation("math", 20, 0.4, **said),
        _evaluation("math", 40, 0.3, right_by="reward.acc"),
    )
    (found,) = summary_of(state, SPEC, [])["held_out"]
    assert (
        found
        == {"set": "math", "unit": "accuracy", "value": 0.4, "version": 20, "last": 0.3, "last_version": 40}
        | said
    )


def test_numbers_that_are_none_are_none() -> None:
    nan = float("nan")
    steps = [{"reward_mean": 0.123456, "tokens_per_s": 10.0}, {"reward_mean": nan}, {"tokens_per_s": 30.0}]
    found = summary_of(_state(reward_mean=nan), SPEC, steps)
    assert found["rewards"] == [0.1235, None, None]
    assert (found["reward"], found["tokens_per_s"], found["cost"]) == (None, 30.0, None)


def test_the_first_step_of_a_run_has_the_engines_start_in_it_and_is_left_out_of_the_median() -> None:
    steps = [{"at": float(at), "tokens_per_s": rate} for at, rate in enumerate([1.0, 40.0, 50.0, 2.0, 60.0])]
    assert summary_of(JobState(), SPEC, steps)["tokens_per_s"] == 45.0
    again = replace(JobState(), training=replace(JobState().training, continued_at=2.5))
    assert summary_of(again, SPEC, steps)["tokens_per_s"] == 50.0
    assert summary_of(JobState(), SPEC, steps[:1])["tokens_per_s"] is None


@pytest.mark.parametrize(("ended_at", "cost"), [(0.0, 1.25 + 8.0), (1000.0 + 1800.0, 1.25 + 2.0)])
def test_a_run_costs_until_now_or_its_end(ended_at: float, cost: float) -> None:
    """The cost of a step is another number, which its metrics have."""
    state = _state(cost=0.02)
    job = replace(state.job, price_per_hour=4.0, priced_at=1000.0, spent=1.25, ended_at=ended_at)
    assert summary_of(replace(state, job=job), SPEC, [], now=1000.0 + 7200.0)["cost"] == pytest.approx(cost)


def test_a_run_that_went_on_took_what_its_last_run_took() -> None:
    """As its sentence says; the days between its end and its going on are no part of it."""
    state = _state()
    state = replace(state, job=replace(state.job, submitted_at=100.0, ended_at=90_060.0))
    first = summary_of(state, SPEC, [])
    again = summary_of(replace(state, training=replace(state.training, continued_at=90_000.0)), SPEC, [])
    times = {
        "submitted_at": 96.0,
        "ended_at": 90_060.0,
    }  # of its row, which is made before its journal begins
    assert (first["ran_since"], ran_for({**first, **times}, 1e9)) == (100.0, 89_960.0)
    assert (again["ran_since"], ran_for({**again, **times}, 1e9)) == (90_000.0, 60.0)
    assert ran_for({**again, "submitted_at": 96.0, "ended_at": None}, 90_010.0) == 10.0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"name": "other", "tags": ["a"], "notes": "n", "store": {"url": "x"}}, True),
        ({"config": {**SPEC["config"], "seed": 4}}, True),
        ({"config": {**SPEC["config"], "optim": {"lr": 1e-5}}}, False),
        ({"run": {"steps": 41}}, False),
        ({"recipe": "ppo"}, False),
    ],
)
def test_runs_of_one_experiment_differ_in_their_seed_alone(change: dict[str, Any], same: bool) -> None:
    assert (experiment_of({**SPEC, **change}) == experiment_of(SPEC)) is same
