"""Golden histories fold to their snapshots, and the tampered one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.api.job_replay import coordinator_of, fold_by_parts
from gyre.config import parse_job
from gyre.config.changes import undone
from gyre.failover import differences, fold
from gyre.store import EventRow

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PHASES = {
    "undisturbed": "succeeded",
    "rollout_lost": "succeeded",
    "actor_lost": "succeeded",
    "user_code": "failed",
    "commanded": "stopped",
    "continued": "succeeded",
    "evaluated": "succeeded",
    "judged": "succeeded",
    "learning": "succeeded",
    "tampered": "succeeded",
}


def load(name: str) -> tuple[dict[str, Any], list[EventRow], dict[tuple[str, str], dict[str, Any]]]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    history = [
        EventRow(
            event["seq"],
            event["id"],
            event["cause"],
            event["kind"],
            event["at"],
            event["actor"],
            1,
            event["body"],
        )
        for event in data["events"]
    ]
    return data, history, {(row["kind"], row["key"]): row["body"] for row in data["snapshot"]}


def test_every_golden_history_is_expected() -> None:
    assert set(NAMES) == set(PHASES)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_history_folds_to_its_snapshot(name: str) -> None:
    data, history, snapshot = load(name)
    state = fold_by_parts(data["spec"], history, history)
    assert state.job.phase == PHASES[name]
    found = differences(state, snapshot)
    if name == "tampered":
        assert {difference.key[0] for difference in found} == {"job", "vertex", "budget"}
    else:
        assert found == []


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"tampered"}))
def test_folding_in_two_parts_is_folding_at_once(name: str) -> None:
    data, history, snapshot = load(name)
    for cut in range(len(history)):
        state = fold_by_parts(data["spec"], history, history[:cut])
        assert differences(fold_by_parts(data["spec"], history, history[cut:], state), snapshot) == []


def test_a_continued_history_has_the_newer_events_and_folds_over_two_specs() -> None:
    """Under the spec of one part alone, whichever it is, the machine would be left alone otherwise."""
    data, history, snapshot = load("continued")
    assert {
        "JobContinued",
        "JoinTokenCreated",
        "JoinTokenRevoked",
        "DrainRequested",
        "UndrainRequested",
    } <= {event.kind for event in history}
    assert history[0].body["weights_from"]
    causes = {row["cause"] for (kind, _), row in snapshot.items() if kind == "incident"}
    assert {"bad_place", "drained", "node_lost"} <= causes
    changes = next(event.body["changes"] for event in history if event.kind == "JobContinued")
    for spec in (data["spec"], undone(data["spec"], changes)):
        assert differences(fold(coordinator_of(parse_job(spec)), history), snapshot)
