"""Samples are scored one by one; the groups that are whole by then go to the ledger together."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gyre.graph.elements import Operator
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.trainer.firings import sample_scoring
from gyre.workloads.trainer.firings.sample_scoring import SampleScoring, ScoringCall
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.messages import Failure
from tests.rollout_rows import sessions

MEMBER = ("reward-0", 1)


def group(group_id: int, tokens: int) -> Group:
    ids = np.full(tokens, group_id, np.int32)
    run = (VersionRun(0, 0, tokens),)
    samples = [Sample(ids, np.zeros(tokens, np.float32), run, "stop") for _ in range(2)]
    return Group(group_id, np.zeros(1, np.int32), {}, samples)


class Around:
    """What scoring has to do with: the groups, the flow, calls to one vertex, and what is accepted."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.by_id = {one.id: one for one in groups}
        self.unscored = set(self.by_id)
        self.accepted: list[list[int]] = []
        self.attempts: list[int] = []
        self.scoring = SampleScoring(
            Operator("reward", "score"),
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            Retries(),
            reports=self,
            inbox=queue.SimpleQueue(),
        )

    def report(self, kind: str, **body: Any) -> None:
        assert kind == "OperatorFailed"
        self.attempts.append(body["attempt"])

    def count(self, role: str) -> int:
        return 1

    def __getitem__(self, group_id: int) -> Group:
        return self.by_id[group_id]

    def id_at(self, slot: int) -> int:
        return slot

    slot_of = id_at

    def start(self, firing: Firing) -> None:
        pass

    def free_member(self, role: str) -> Any:
        return MEMBER

    def fire(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()

    def problem_with(self, firings: Sequence[Firing], ids: Sequence[int], value: Any) -> None:
        return None

    def ended(self, member: Any) -> None:
        pass

    failed = ended

    def accept(self, firings: Sequence[Firing], groups: Sequence[Group]) -> None:
        assert [group_id for firing in firings for group_id in firing.groups] == [one.id for one in groups]
        assert all(sample.reward == 1.0 for one in groups for sample in one.samples)
        self.accepted.append([one.id for one in groups])

    def score_all(self) -> None:
        firings = [Firing("reward.score", at, (group_id,)) for at, group_id in enumerate(self.by_id)]
        self.scoring.send(Operator("reward", "score"), firings, step=1)
        self.scoring.pump(0.0, step=1)
        assert self.accepted == []
        for sample in self.scoring._in_calls.values():  # as the one call does when it ends
            sample.reward = 1.0
        self.scoring.pump(0.0, step=1)


@pytest.mark.parametrize(
    ("most", "writes"), [(1 << 20, [[1, 2, 3]]), (40, [[1, 2], [3]]), (1, [[1], [2], [3]])]
)
def test_groups_that_are_scored_at_once_are_one_write_unless_it_were_too_large(
    monkeypatch: pytest.MonkeyPatch, most: int, writes: list[list[int]]
) -> None:
    monkeypatch.setattr(sample_scoring, "TOKENS_A_WRITE", most)
    around = Around([group(group_id, tokens=10) for group_id in (1, 2, 3)])
    around.score_all()
    assert around.accepted == writes


def test_a_sample_that_cannot_be_scored_is_found_out_although_others_are() -> None:
    around = Around([group(1, tokens=10), group(2, tokens=10)])
    scoring, failure = around.scoring, Failure("ValueError", "", user_code=True)
    whole = around.by_id
    for number in range(1, 4):
        call = ScoringCall([whole[1]], [(1, 0), (1, 1)], MEMBER)
        scoring.ended(call, ("error", failure))
        other = ScoringCall([whole[2]], [(2, 0), (2, 1)], MEMBER)
        scored = [replace(sample, reward=1.0) for sample in whole[2].samples]
        scoring.ended(other, ("ok", [Group(2, whole[2].prompt_ids, {}, scored)]))
        assert around.attempts == list(range(1, number + 1))


def test_of_a_rollout_the_last_row_is_scored_and_all_rows_earn_that() -> None:
    (rows,) = sessions(1, 1)
    for sample in rows.samples:
        sample.reward = None
    around = Around([rows])
    firing = Firing("reward.score", 0, (1,))
    around.scoring.send(Operator("reward", "score"), [firing], step=1)
    around.scoring.pump(0.0, step=1)
    asked = dict(around.scoring._in_calls)
    assert [index for _, index in sorted(asked)] == [of[-1] for of in rows.rollouts]
    for sample in asked.values():
        assert sample.mask is not None
        sample.reward, sample.extras = 1.0, {"reward.acc": 1.0}
    around.scoring.pump(0.0, step=1)
    assert around.accepted == [[1]]
    assert not around.scoring._samples
