"""The row of an evaluation, against its definitions: every choice of k samples counted, and the rounding of rewards."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config.sections import EvaluationSettings
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.evaluation.results import MOST_VALUES, best_of, pass_at, row_of
from gyre.workloads.trainer.learning.step_metrics import MOST_COMPONENTS


def groups_of(rewards, extras=()):
    """`extras`: of each prompt what its samples' function returned beside their rewards."""
    return [
        Group(
            -1 - at,
            np.zeros(1, np.int32),
            samples=[
                Sample(
                    np.zeros(1, np.int32),
                    np.zeros(1, np.float32),
                    (VersionRun(4, 0, 1),),
                    reward=reward,
                    extras=dict(extras[at][place]) if extras else {},
                )
                for place, reward in enumerate(earned)
            ],
        )
        for at, earned in enumerate(rewards)
    ]


def row(rewards, metas=None, extras=(), **settings):
    groups = groups_of(rewards, extras)
    found = row_of(
        EvaluationKey(4, "aime"), groups, metas or [{} for _ in groups], EvaluationSettings(**settings)
    )
    json.dumps(found, allow_nan=False)
    return found


SAMPLES = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.0, -2.0]), min_size=1, max_size=6)


@given(SAMPLES, st.data())
def test_pass_at_k_and_best_of_k_are_the_means_over_every_choice(rewards, data):
    n = len(rewards)
    k = data.draw(st.integers(1, n))
    choices = list(itertools.combinations(rewards, k))
    right = sum(reward >= 1.0 for reward in rewards)
    assert pass_at(right, n, k) == pytest.approx(
        np.mean([max(choice) >= 1.0 for choice in choices]), abs=1e-12
    )
    assert best_of(np.array(rewards), k) == pytest.approx(
        np.mean([max(choice) for choice in choices]), abs=1e-12
    )


def test_many_samples_do_not_overflow():
    assert pass_at(1, 5000, 2500) == pytest.approx(0.5)
    assert best_of(np.linspace(0, 1, 5000), 2500) == pytest.approx(1.0, abs=1e-3)


def test_a_row_says_what_was_earned_and_what_is_right():
    found = row([[1, 0, 0, 0], [1, 1, 0, 1]], n=4, temperature=1.0, threshold=1.0)
    assert found == {
        "version": 4,
        "set": "aime",
        "prompts": 2,
        "count": 8,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "accuracy": 0.5,
        "threshold": 1.0,
        "right_by": "",
        "distinct": 1,
        "components": {},
        "pass_at": {"1": 0.5, "4": 1.0},
        "best_of": {"1": 0.5, "4": 1.0},
        "by": {},
    }
    assert row([[1, 0, 0, 0], [1, 1, 0, 1]], n=4, k=[2], threshold=1.0)["pass_at"] == {"2": 0.75}


@pytest.mark.parametrize(
    ("rewards", "threshold", "accuracy"),
    [
        ([1, 0], None, None),
        ([0.9, 0.0], None, None),
        ([-1.0, 1.0], None, None),
        ([1, 0], 1.0, 0.5),
        ([np.float32(1) - 1e-7, 1e-8], 1.0, 0.5),
        ([0.9, 0.8999999, 0.89], 0.9, 2 / 3),
        ([0.1 + 0.2 + 0.7, 0.99], 1.0, 0.5),
        ([-1.0, 1.0], 0.0, 0.5),
        ([-3.0, -2.0], -2.5, 0.5),
    ],
)
def test_accuracy_is_of_a_threshold_and_without_one_there_is_none(rewards, threshold, accuracy):
    found = row([[float(reward)] for reward in rewards], threshold=threshold)
    assert found["accuracy"] == (None if accuracy is None else pytest.approx(accuracy))
    assert found["threshold"] == threshold
    assert set(found["pass_at"]) == (set() if accuracy is None else {"1"})
    assert found["reward_mean"] == pytest.approx(np.mean(rewards), abs=1e-6)
    assert found["reward_std"] == pytest.approx(np.std(rewards), abs=1e-6)


def test_answers_are_counted_by_their_tokens():
    groups = groups_of([[1, 0], [1, 0]])
    one, other = (replace(groups[0].samples[0], token_ids=np.array([at], np.int32)) for at in (5, 6))
    made = [replace(groups[0], samples=[one, other]), replace(groups[1], samples=[one, one])]
    assert row_of(EvaluationKey(4, "aime"), made, [{}, {}], EvaluationSettings())["distinct"] == 2


def test_a_breakdown_has_a_part_for_each_value_of_the_column():
    metas = [{"source": "math"}, {"source": "math"}, {"source": "code"}, {}, {"source": None}]
    found = row([[1], [0], [1], [0], [0]], metas, by="source", threshold=1.0)["by"]
    assert found == {
        "math": {"count": 2, "reward_mean": 0.5, "accuracy": 0.5},
        "none": {"count": 2, "reward_mean": 0.0, "accuracy": 0.0},
        "code": {"count": 1, "reward_mean": 1.0, "accuracy": 1.0},
    }
    assert list(found) == ["math", "none", "code"], "those with the most prompts first"
    shaped = row([[0.5], [0.25]], metas[:2], by="source")["by"]
    assert shaped == {"math": {"count": 2, "reward_mean": 0.375, "accuracy": None}}


def test_a_column_of_many_values_is_kept_short():
    metas = [{"id": at // 2 if at < 4 else at} for at in range(100)]
    found = row([[at % 2] for at in range(100)], metas, by="id")["by"]
    assert len(found) == MOST_VALUES
    assert list(found)[:2] == ["0", "1"]
    assert list(found)[-1] == "other"
    assert sum(part["count"] for part in found.values()) == 100
    long = row([[1.0]], [{"id": "x" * 10_000}], by="id")["by"]
    assert max(map(len, long)) <= 64


def test_sizes_for_which_a_prompt_has_too_few_samples_are_left_out():
    assert row([[1, 0], [1]], n=2, threshold=1.0)["pass_at"] == {"1": 0.75}


def said(*values, name="reward.acc"):
    """Of each prompt one sample, whose function said this of it."""
    return [[{name: value, "reward.length": 10.0 * at}] for at, value in enumerate(values)]


@pytest.mark.parametrize("name", ["reward.acc", "reward.compute_score.acc"])
def test_what_the_function_calls_right_is_the_accuracy_and_its_name_is_told(name):
    """The rewards are of verl's kind: 1 and -1, and a bonus; no threshold of ours would count them."""
    metas = [{"source": source} for source in ("aime", "aime", "math")]
    extras = said(1.0, 0.0, 1.0, name=name)
    found = row([[1.2], [-1.0], [0.1]], metas, extras, by="source")
    assert (found["accuracy"], found["right_by"], found["threshold"]) == (pytest.approx(2 / 3), name, None)
    assert found["pass_at"] == {"1": pytest.approx(2 / 3)}
    assert {source: part["accuracy"] for source, part in found["by"].items()} == {"aime": 0.5, "math": 1.0}
    assert found["components"] == {name: pytest.approx(2 / 3), "reward.length": 10.0}


def test_a_threshold_that_the_job_says_goes_before_what_the_function_says():
    found = row([[1.0], [0.0]], extras=said(0.0, 0.0), threshold=1.0)
    assert (found["accuracy"], found["right_by"], found["components"]["reward.acc"]) == (0.5, "", 0.0)


@pytest.mark.parametrize(
    "extras",
    [
        said(1.0, 0.5),  # a share is no verdict
        [[{"reward.acc": 1.0}], [{}]],  # of this answer it says nothing
        [[{"reward.a.acc": 1.0, "reward.b.acc": 0.0}]] * 2,  # two say it
        said(1.0, 1.0, name="reward.accuracy_bonus"),
    ],
)
def test_what_does_not_say_of_each_answer_whether_it_is_right_is_no_accuracy(extras):
    found = row([[1.0], [0.0]], extras=extras)
    assert (found["accuracy"], found["right_by"], found["pass_at"]) == (None, "", {})
    assert set(found["components"]) >= {key for of_one in extras for one in of_one for key in one}


def test_many_numbers_of_a_function_do_not_fill_the_journal():
    extras = [[{f"reward.n{at}": 1.0 for at in range(200)}]]
    assert len(row([[1.0]], extras=extras)["components"]) == MOST_COMPONENTS


def test_the_rows_of_a_rollout_are_one_answer():
    rewards, extras = (
        [[1, 0, 0, 0], [1, 1, 0, 1]],
        [[{"reward.acc": float(one)} for one in of] for of in ([1, 0, 0, 0], [1, 1, 0, 1])],
    )
    groups = groups_of(rewards, extras)
    for group in groups:
        whole = [replace(sample, rollout=at) for at, sample in enumerate(group.samples)]
        group.samples = [whole[0], whole[1], whole[0], whole[2], whole[3], whole[0]]
    settings = EvaluationSettings(n=4, temperature=1.0)
    found = row_of(EvaluationKey(4, "aime"), groups, [{}, {}], settings)
    assert found | {"distinct": 1} == row(rewards, extras=extras, n=4, temperature=1.0)
    assert found["count"] == 8
