"""The metrics of a step that its sessions have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.rollouts.session_extras import ENGINE_S, OUTCOME, PATH, TOOL_S, TURNS
from gyre.workloads.trainer.learning.metric_names import METRICS
from gyre.workloads.trainer.learning.session_metrics import session_metrics
from gyre.workloads.trainer.learning.step_metrics import step_metrics


def row(rollout: int, path: list[list[Any]], outcome: str = "scored", **numbers: float) -> Sample:
    length = path[-1][3]
    mask = np.zeros(length, np.bool_)
    for _, _, drawn, end, _ in path:
        mask[drawn:end] = True
    keys = {"turns": TURNS, "tool_s": TOOL_S, "engine_s": ENGINE_S}
    extras = {PATH: path, OUTCOME: outcome, **{keys[name]: value for name, value in numbers.items()}}
    return Sample(
        np.zeros(length, np.int32),
        np.zeros(length, np.float32),
        (VersionRun(0, 0, length),),
        reward=1.0,
        extras=extras,
        mask=mask,
        rollout=rollout,
    )


BRANCHED = [
    row(0, [[0, 0, 0, 4, None], [1, 4, 7, 9, 0.5]], turns=3, tool_s=2.0, engine_s=1.0),
    row(0, [[0, 0, 0, 4, None], [2, 4, 5, 8, 0.5]]),
]
SHORT = [row(1, [[0, 0, 1, 3, None]], "truncated", turns=1)]


def test_a_rollout_counts_once_in_however_many_rows_it_is() -> None:
    found = session_metrics([Group(0, np.zeros(2, np.int32), samples=[*BRANCHED, *SHORT])])
    assert found == {
        "rollouts_scored_ratio": 0.5,
        "rollouts_truncated_ratio": 0.5,
        "rollouts_policy_fault_ratio": 0.0,
        "turns_mean": 2.0,
        "turns_max": 3,
        "tool_seconds_mean": 2.0,  # of the other one no manager saw all
        "tool_seconds_max": 2.0,
        "engine_seconds_mean": 1.0,
        "tokens_not_drawn": 3 + 1 + 1,
        "turn_1_tokens_mean": 3.0,
        "turn_2_tokens_mean": 2.0,
        "turn_3_tokens_mean": 3.0,
    }


def test_a_step_has_them_and_a_step_without_sessions_has_none_of_them() -> None:
    group = Group(0, np.zeros(2, np.int32), samples=[*BRANCHED, *SHORT])
    found = step_metrics({}, [group], 1, at=0.0, seconds=1.0)
    assert found["turns_max"] == 3
    assert found.keys() <= METRICS.keys()
    plain = Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(0, 0, 2),), reward=1.0)
    assert session_metrics([Group(0, np.zeros(2, np.int32), samples=[plain])]) == {}
    assert session_metrics([]) == {}


def test_turns_after_the_fourth_are_one_number() -> None:
    path = [[turn, 2 * turn, 2 * turn, 2 * turn + 2, None] for turn in range(6)]
    found = session_metrics([Group(0, np.zeros(2, np.int32), samples=[row(0, path)])])
    assert [name for name in found if name.endswith("tokens_mean")] == [
        *(f"turn_{turn}_tokens_mean" for turn in range(1, 5)),
        "later_turns_tokens_mean",
    ]
    assert found["later_turns_tokens_mean"] == pytest.approx(2.0)
