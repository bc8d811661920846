"""Where prompts and tokens are: the sums are exact in every phase and after every end, and say what they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.api.account import account_of, lines_of
from gyre.failover import JobPhase
from gyre.rollouts.plane.stored_account import account_in, stored_account
from gyre.store import open_store
from tests.rollouts.machine.small_groups import asked, groups_with, report

AUDIT = {
    "counts": {"queued": 3, "done": 2, "trained": 90, "dropped": 1},
    "duplicates": {7: [1, 2]},
    "gaps": [(10, 11), (20, 20)],
    "cursor": 99,
    "discarded": {"too_old": 5},
}
SAID = {"generated": 9, "delivered": 5, "in_flight": 3, "discarded": {"x": 1}, "missing": 0}
COMMITTED = {"generated": 80, "delivered": 60, "in_flight": 15, "discarded": {"quarantined": 5}, "missing": 0}


def view(
    said: Any = SAID, *, phase: str = "running", manager: str = "running", answering: bool = True
) -> dict[str, Any]:
    vertex = {
        "role": "rollout_manager",
        "phase": manager,
        "fields": {"health": {"account": said}} if said else {},
    }
    return {
        "job": {"phase": JobPhase(phase), "reason": ""},
        "progress": {},
        "training": {"last": {}, "tokens": 0},
        "master": {"answering": answering},
        "vertices": [vertex] if manager else [],
    }


def test_prompts_are_counted_from_the_ledger() -> None:
    found = account_of(view(), AUDIT, lambda: None, now=0.0)
    assert found["prompts"] == {
        "drawn": 99,
        "trained": 90,
        "dropped": 1,
        "in_flight": 5,
        "lost": 3,
        "twice": 1,
    }
    assert found["tokens"]["not_trained"] == {"too_old": 5}


RUNS, STORE = "The rollout manager said so last.", "The rollout manager committed this last;"


@pytest.mark.parametrize(
    ("given", "committed", "generated", "waiting", "told"),
    [
        (view(), None, 9, "in flight", RUNS),
        (view(phase="recovering"), COMMITTED, 9, "in flight", RUNS),
        (view(phase="paused"), COMMITTED, 9, "in flight", RUNS),
        (view(manager="starting"), COMMITTED, 80, "in flight", STORE),
        (view(said=None), COMMITTED, 80, "in flight", STORE),
        (view(answering=False), COMMITTED, 80, "in flight", STORE),
        *(
            (view(phase=phase, manager=manager), COMMITTED, 80, "in flight when the job ended", STORE)
            for phase in ("succeeded", "stopped", "failed")
            for manager in ("running", "stopped", "")
        ),
        (
            view(said=None, phase="starting"),
            None,
            None,
            "in flight",
            "The rollout manager has counted nothing yet.",
        ),
        (
            view(said=None, phase="failed"),
            None,
            None,
            "in flight when",
            "The rollout manager never counted anything.",
        ),
        (view(manager=""), None, None, "in flight", "This job has no rollout manager"),
    ],
)
def test_the_sum_is_of_one_moment_in_every_phase(
    given: dict[str, Any], committed: Any, generated: int | None, waiting: str, told: str
) -> None:
    """What a manager said that runs no more is older than what it committed: a job that ended has nothing of it."""
    tokens = account_of(given, AUDIT, lambda: committed, now=0.0)["tokens"]
    assert (tokens["generated"], tokens["told"][: len(told)]) == (generated, told)
    assert tokens["waiting"].startswith(waiting)
    if generated is not None:
        parts = tokens["delivered"] + tokens["in_flight"] + sum(tokens["discarded"].values())
        assert parts + tokens["missing"] == generated


def test_the_sums_are_said_on_a_terminal() -> None:
    lines = lines_of(account_of(view(phase="stopped"), AUDIT, lambda: COMMITTED, now=0.0))
    assert lines["prompts"] == (
        "99 drawn = 90 trained + 5 in flight when the job ended + 1 dropped + 3 lost; 1 trained twice"
    )
    assert lines["tokens"].startswith(
        "80 generated = 60 delivered + 15 in flight when the job ended + 5 quarantined, 0 missing. The rollout"
    )
    nothing = account_of(view(manager=""), AUDIT, lambda: None, now=0.0)
    assert lines_of(nothing)["tokens"].startswith("This job has no rollout manager")


def test_the_store_has_the_account_of_a_manager_that_was_killed(tmp_path: Path) -> None:
    """What it did not commit is in no count, and the sum is exact all the same."""
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as store:
        rollouts = store.rollouts("job-1")
        assert stored_account(rollouts.load()) is None
        rollouts.take_over(term=1)
        groups = groups_with("a")
        one, two = groups.open(asked(2))
        groups.assign()
        report(groups, "a", {one.samples[0]: 4, two.samples[0]: 7}, {one.samples[0]: "stop"})
        groups.close("train", [one.group.id])
        batch = groups.take_batch()
        rollouts.write(
            1, counters=batch.counters, opened=batch.opened, deltas=batch.encoded(), closed=batch.closed
        )
        committed = account_in(groups)
        report(groups, "a", {two.samples[0]: 3})
        assert committed == {"generated": 11, "delivered": 4, "in_flight": 7, "discarded": {}, "missing": 0}
        assert stored_account(rollouts.load()) == committed != account_in(groups)


def test_what_the_job_costs_is_in_the_words_of_show() -> None:
    priced = view()
    priced["job"] |= {"priced_at": 1000.0, "price_per_hour": 9.0, "spent": 0.5, "ended_at": None}
    priced["training"]["tokens"] = 1_000_000
    found = account_of(priced, AUDIT, lambda: None, now=1000.0 + 1200.0)
    assert [(one["label"], one["value"]) for one in found["cost"]] == [
        ("cost so far", "3.50, 9.00 an hour"),
        ("cost by million tokens", "3.50"),
    ]
    assert account_of(view(), AUDIT, lambda: None, now=0.0)["cost"] == []
