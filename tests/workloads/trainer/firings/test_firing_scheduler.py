"""Which enabled firings start: drawn prompts enable more, calls have one operator and one step, failures wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.config import parse_job
from gyre.config.spec import RunSpec
from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.store import LedgerStore, open_store
from gyre.workloads.trainer.firings.firing_scheduler import FiringScheduler
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.prompts import CheckedPrompts
from gyre.workloads.trainer.retries import RETRY_FIRST_S, Retries
from tests.workloads.toy_policy import toy_spec


class Starting:
    """A runner that starts as many firings as it has `room` for."""

    def __init__(self, flow: Flow, room: int) -> None:
        self.flow, self.room = flow, room
        self.sent: list[tuple[str, list[int], int]] = []

    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        self.sent.append((operator.ref, [firing.index for firing in firings], step))
        for firing in firings[: self.room]:
            self.flow.start(firing)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


class Run:
    def __init__(self, store: LedgerStore, *, room: int = 100, **changes: Any) -> None:
        graph = JobGraph(parse_job(toy_spec(**changes)))
        self.flow = graph.flow()
        self.groups = GroupState(SampleLedger(store, 1), per_step=graph.per_step)
        self.retries = Retries()
        self.runner = Starting(self.flow, room)
        self.stepped: list[Firing] = []
        self.scheduler = FiringScheduler(
            graph,
            self.flow,
            self.groups,
            self.retries,
            {Dispatch.ONE: self.runner},
            gangs=self,
            prompts=CheckedPrompts(self, RunSpec(), None),  # type: ignore[arg-type]
        )

    def step_optimizer(self, operator: Operator, firing: Firing) -> None:
        self.stepped.append(firing)

    def prompt(self, group_id: int) -> Group:
        return Group(group_id, np.array([1], np.int32))


def test_prompts_are_drawn_as_far_as_there_is_room_and_generated_as_far_as_the_bound_permits(
    store: LedgerStore,
) -> None:
    run = Run(store)
    run.scheduler.start_enabled(0.0)
    assert run.groups.cursor == 16
    assert run.groups.unscored == set(range(16))
    assert run.runner.sent == [
        ("rollout.evaluate", [0], 0),
        ("rollout.generate", [0, 1, 2, 3], 1),
    ], "an evaluation must see its own version; step 2 needs weights that are not there"


def test_firings_for_different_steps_are_sent_apart(store: LedgerStore) -> None:
    run = Run(store, max_staleness=1, run={"evaluate_every": 0})
    run.scheduler.start_enabled(0.0)
    assert run.runner.sent == [
        ("rollout.generate", [0, 1, 2, 3], 1),
        ("rollout.generate", [4, 5, 6, 7], 2),
    ]


def test_what_found_no_room_is_offered_again_and_what_runs_is_not(store: LedgerStore) -> None:
    run = Run(store, room=1, run={"evaluate_every": 0})
    run.scheduler.start_enabled(0.0)
    run.runner.sent.clear()
    run.scheduler.start_enabled(0.0)
    assert run.runner.sent == [("rollout.generate", [1, 2, 3], 1)]


def test_a_firing_that_failed_waits_and_the_others_do_not(store: LedgerStore) -> None:
    run = Run(store, room=0, run={"evaluate_every": 0})
    run.scheduler.start_enabled(0.0)
    run.retries.failed(("rollout.generate", 2), 0.0)
    run.runner.sent.clear()
    run.scheduler.start_enabled(RETRY_FIRST_S / 2)
    run.scheduler.start_enabled(RETRY_FIRST_S)
    assert [indices for _, indices, _ in run.runner.sent] == [[0, 1, 3], [0, 1, 2, 3]]


def test_the_optimizer_is_stepped_when_its_micro_batches_are_taken(store: LedgerStore) -> None:
    run = Run(store)
    run.flow.mark_done("actor.accumulate", [0, 1])
    run.scheduler.start_enabled(0.0)
    assert Firing("actor.apply", 0) in run.stepped
