"""A history folds to its snapshot, from the start or from any point of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gyre.errors import StoreCorrupt
from gyre.failover import FailoverCoordinator, JobState, differences, fold, rows_of, state_from
from gyre.failover import events as e
from tests.failover.histories import History, Recorded


@pytest.fixture
def eventful(history: History) -> History:
    history.start_all()
    history.report(e.StepCompleted, step=1, version=1)
    history.lose("actor-1", stack="here")
    history.start_all()
    history.decide(e.ScaleRequested("rollout", 1))
    history.stop_all()
    history.report(e.TrainerFinished, result={})
    return history.stop_all()


def test_the_fold_is_the_state(eventful: History, coordinator: FailoverCoordinator) -> None:
    assert fold(coordinator, eventful.records) == eventful.state
    assert differences(fold(coordinator, eventful.records), rows_of(eventful.state)) == []


def test_the_fold_may_go_on_from_the_rows_of_any_moment(
    eventful: History, coordinator: FailoverCoordinator
) -> None:
    for cut in range(len(eventful.records)):
        rows = rows_of(fold(coordinator, eventful.records[:cut]))
        loaded = state_from({key: rows[key] for key in sorted(rows)})
        assert differences(fold(coordinator, eventful.records[cut:], loaded), rows_of(eventful.state)) == []


def test_bodies_that_were_json_fold_the_same(eventful: History, coordinator: FailoverCoordinator) -> None:
    again = [
        Recorded(r.seq, r.kind, r.at, json.loads(json.dumps(r.body, sort_keys=True)))
        for r in eventful.records
    ]
    assert differences(fold(coordinator, again), rows_of(eventful.state)) == []


def test_differences_name_the_row_and_both_sides(eventful: History) -> None:
    stored = rows_of(eventful.state)
    stored[("job", "job")] = {**stored[("job", "job")], "step": 99}
    del stored[("vertex", "reward-0")]
    stored[("vertex", "ghost-0")] = {"id": "ghost-0"}
    found = {difference.key: difference for difference in differences(eventful.state, stored)}
    assert set(found) == {("job", "job"), ("vertex", "reward-0"), ("vertex", "ghost-0")}
    assert (found[("job", "job")].folded or {})["step"] == 1
    assert found[("vertex", "reward-0")].stored is None
    assert found[("vertex", "ghost-0")].folded is None


def test_an_empty_history_is_an_empty_state(coordinator: FailoverCoordinator) -> None:
    assert fold(coordinator, []) == JobState()
    assert state_from(rows_of(JobState())) == JobState()


@pytest.mark.parametrize(
    "damage",
    [{"phase": "asleep"}, {"phase": None}, {"phase": []}, {"more": 1}, [], 7, "text", None],
    ids=str,
)
def test_rows_that_nobody_wrote_are_no_state(eventful: History, damage: Any) -> None:
    for key, row in rows_of(eventful.state).items():
        if key[0] in ("job", "vertex"):
            rows = {**rows_of(eventful.state), key: {**row, **damage} if isinstance(damage, dict) else damage}
            with pytest.raises(StoreCorrupt, match="snapshot"):
                state_from(rows)
