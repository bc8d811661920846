"""What becomes of an operator's result: refused with the reason, or merged until the group is scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.config import parse_job
from gyre.errors import Fenced
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.store import LedgerStore, open_store
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.messages import Failure
from tests.workloads.toy_policy import toy_spec

IDS = [0, 1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


def group(group_id: int, *, version: int = 0, reward: float | None = None, **extras: Any) -> Group:
    sample = Sample(
        np.zeros(1, np.int32),
        np.zeros(1, np.float32),
        (VersionRun(version, 0, 1),),
        reward=reward,
        extras=extras,
    )
    return Group(group_id, np.zeros(1, np.int32), samples=[sample])


class Run:
    """Two groups are drawn, and their firings of every operator have started."""

    def __init__(self, store: LedgerStore) -> None:
        graph = JobGraph(parse_job(toy_spec()))
        self.flow = graph.flow()
        self.groups = GroupState(SampleLedger(store, 1), per_step=8)
        self.groups.record_drawn([Group(group_id, np.zeros(1, np.int32)) for group_id in IDS])
        self.retries = Retries()
        self.failures: list[tuple[str, str]] = []
        self.attempts: list[int] = []
        self.scored: list[list[int]] = []
        for ref in graph.refs_before_training:
            self.flow.start(self.flow.firing(ref, 0))
        self.results = FiringResults(
            graph,
            self.flow,
            self.groups,
            self.retries,
            max_staleness=0,
            reports=self,
            keeper=self,
        )

    def report(self, kind: str, **body: Any) -> None:
        assert kind == "OperatorFailed"
        self.failures.append((body["vertex"], body["operator"]))
        self.attempts.append(body["attempt"])

    def acknowledge(self, ids: Sequence[int]) -> None:
        self.scored.append(list(ids))

    def firing(self, ref: str) -> Firing:
        return self.flow.firing(ref, 0)

    def accept(self, ref: str, groups: list[Group]) -> None:
        self.results.accept([self.firing(ref)], groups)


@pytest.mark.parametrize(
    "order", [("reward.score", "reference.logprobs"), ("reference.logprobs", "reward.score")]
)
def test_a_group_is_scored_when_the_last_operator_has_added_its_part(
    store: LedgerStore, order: tuple[str, str]
) -> None:
    run = Run(store)
    run.accept("rollout.generate", [group(group_id) for group_id in IDS])
    parts = {
        "reward.score": [group(group_id, reward=1.0) for group_id in IDS],
        "reference.logprobs": [group(group_id, reference=2.0) for group_id in IDS],
    }
    run.accept(order[0], parts[order[0]])
    assert (run.scored, run.groups.unscored) == ([], {0, 1})
    run.accept(order[1], parts[order[1]])
    assert (run.scored, run.groups.unscored, list(run.groups.scored)) == ([IDS], set(), IDS)
    assert [(one.samples[0].reward, one.samples[0].extras) for one in run.groups.by_id.values()] == [
        (1.0, {"reference": 2.0})
    ] * 2
    later = GroupState(SampleLedger(store, 2), per_step=8)
    assert list(later.scored) == IDS, "the ledger has them"


@pytest.mark.parametrize(
    ("ref", "value", "text", "user_code"),
    [
        ("rollout.generate", [group(0, version=0), group(1)], "", True),
        ("rollout.generate", None, "rollout.generate: it returned NoneType", True),
        (
            "reward.score",
            [group(0, reward=1.0), group(1)],
            "reward.score: it returned group 1 without rewards",
            True,
        ),
    ],
)
def test_a_value_is_refused_with_the_operators_name(
    store: LedgerStore, ref: str, value: Any, text: str, user_code: bool
) -> None:
    run = Run(store)
    failure = run.results.problem_with([run.firing(ref)], IDS, value)
    assert (failure is None) is (text == "")
    if failure is not None:
        assert failure.error.startswith(text)
        assert failure.user_code is user_code


def test_a_token_that_is_too_old_is_not_the_users_fault(store: LedgerStore) -> None:
    """Step 2 of a synchronous job: its slots begin at 8, and only version 1 may answer them."""
    run = Run(store)
    firing = Firing("rollout.generate", 4, (8, 9))
    failure = run.results.problem_with([firing], IDS, [group(0, version=1), group(1, version=0)])
    assert failure is not None
    assert (failure.user_code, "policy version 0, permitted is 1" in failure.error) == (False, True)
    assert run.results.problem_with([firing], IDS, [group(0, version=1), group(1, version=1)]) is None


def test_a_failed_call_is_reported_once_and_its_firings_wait(store: LedgerStore) -> None:
    run = Run(store)
    firing = run.firing("reward.score")
    run.results.fail([firing], ("reward-0", 1), Failure("ValueError", "", user_code=True))
    assert run.failures == [("reward-0", "reward.score")]
    assert firing.index not in run.flow.running("reward.score")
    assert not run.retries.may(("reward.score", 0), 0.0)


def test_attempts_are_counted_since_the_call_or_its_operator_last_succeeded(store: LedgerStore) -> None:
    """A call that always fails is found out although others succeed, and so is an operator all of whose calls fail."""
    run, failure = Run(store), Failure("ValueError", "", user_code=True)
    firing = run.firing("reward.score")
    for key in (
        "reward.score",
        ("reward.score", 0),
    ):  # another call has succeeded; the next call is another one
        run.attempts.clear()
        for _ in range(3):
            if firing.index not in run.flow.running("reward.score"):
                run.flow.start(firing)
            run.results.fail([firing], ("reward-0", 1), failure)
            run.retries.succeeded(key)
        assert run.attempts == [1, 2, 3]
        run.retries.succeeded("reward.score")
        run.retries.succeeded(("reward.score", 0))


def test_a_fenced_call_ends_the_trainer(store: LedgerStore) -> None:
    run = Run(store)
    with pytest.raises(Fenced, match="a newer term"):
        run.results.fail(
            [run.firing("reward.score")], ("reward-0", 1), Failure("a newer term", "", False, fenced=True)
        )
    assert run.failures == []
