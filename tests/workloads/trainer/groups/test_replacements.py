"""Groups that are not trained as they are: what takes their slot, what is counted and told, and when it is too many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.config import parse_job
from gyre.config.spec import RunSpec
from gyre.errors import UserCodeError
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.rollouts.trainer.staleness import Action, Verdict
from gyre.store import LedgerStore, open_store
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.micro_batches import NO_GRADIENT
from gyre.workloads.trainer.groups.replacements import Replacements
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.prompts import CheckedPrompts
from tests.workloads.reported import Reported
from tests.workloads.toy_policy import toy_spec

STALE = Verdict(Action.DROP, "3 versions behind")
PER_STEP, TOKENS = 2, 3


def prompt(group_id: int) -> Group:
    return Group(group_id, np.array([group_id], np.int32))


class Source:
    prompt = staticmethod(prompt)


PROMPTS = CheckedPrompts(Source(), RunSpec(), None)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as opened:
        yield opened.ledger("j1")


class Kept:
    """A SampleWriter that writes nothing: what it was given, with the outcome and the evidence."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, int, str, str]] = []
        """Of each group its number, how many samples it has, the outcome and the evidence."""

    def not_trained(self, group: Group, outcome: str, evidence: str) -> None:
        self.groups.append((group.id, len(group.samples), outcome, evidence))

    def quarantined(self, step: int, group: Group, evidence: str) -> None:
        assert step == 1, "the step that is being made"
        self.groups.append((group.id, len(group.samples), "quarantined", evidence))


class Run:
    """Four drawn groups of which 0 and 1 are scored, in a graph whose firings each take two groups."""

    def __init__(self, store: LedgerStore, *, redraw_stale: bool = True, dynamic_sampling: int = 1) -> None:
        self.graph = JobGraph(parse_job(toy_spec()))
        self.flow = self.graph.flow()
        self.groups = GroupState(SampleLedger(store, 1), per_step=PER_STEP)
        self.groups.record_drawn([prompt(group_id) for group_id in range(4)])
        self.score(0, 1)
        for ref in self.graph.refs_before_training:
            self.flow.mark_done(ref, [0])
        self.reported = Reported()
        self.reports = self.reported.events
        self.kept: Any = Kept()
        self.replacements = Replacements(
            self.groups,
            self.flow,
            refs_before_training=[],
            arrival=None,
            redraw_stale=redraw_stale,
            dynamic_sampling=dynamic_sampling,
            tokens_discarded={"stale": 10},
            prompts=PROMPTS,
            reports=self.reported,
            samples=self.kept,
        )

    def score(self, *ids: int) -> None:
        for group_id in ids:
            sample = Sample(
                np.zeros(TOKENS, np.int32),
                np.zeros(TOKENS, np.float32),
                (VersionRun(0, 0, TOKENS),),
                reward=1.0,
            )
            self.groups.merge([Group(group_id, np.array([group_id], np.int32), samples=[sample])])
        self.groups.record_scored(list(ids))


def test_a_quarantined_group_leaves_its_slot_to_the_next_prompt(store: LedgerStore) -> None:
    run = Run(store)
    by = run.replacements.quarantine(2, evidence="it died " * 1000)
    assert (by.id, run.groups.id_at(2), run.groups.slot_of(4)) == (4, 4, 2)
    assert run.groups.unscored == {3, 4}
    (told,) = run.reports
    assert told["kind"] == "GroupReplaced"
    assert (told["group"], told["replaced_by"], told["reason"]) == (2, 4, "quarantined")
    assert len(told["evidence"]) == 4000
    assert run.replacements.tokens_discarded == {"stale": 10, "quarantined": 0}
    assert run.kept.groups == [(2, 0, "quarantined", "it died " * 1000)]


def test_of_a_group_that_was_delivered_and_cannot_be_trained_people_see_its_samples(
    store: LedgerStore,
) -> None:
    run = Run(store)
    delivered = Group(2, np.array([2], np.int32), samples=[Sample(np.zeros(0, np.int32), np.zeros(0), ())])
    run.replacements.quarantine(2, evidence="a log-prob of nan", delivered=delivered)
    assert run.kept.groups == [(2, 1, "quarantined", "a log-prob of nan")]


def test_more_quarantined_groups_than_a_step_has_are_not_the_prompts_fault(store: LedgerStore) -> None:
    run = Run(store)
    for group_id in (2, 3):
        run.replacements.quarantine(group_id, evidence="")
    assert not run.replacements.too_many_quarantined
    run.replacements.quarantine(4, evidence="")
    assert run.replacements.too_many_quarantined
    run.groups.record_trained(1, {"tokens": 0})
    assert not run.replacements.too_many_quarantined, "a step was made in between"


@pytest.mark.parametrize("redraw", [True, False])
def test_a_stale_group_is_answered_again_or_replaced(store: LedgerStore, redraw: bool) -> None:
    run = Run(store, redraw_stale=redraw)
    run.replacements.drop(1, STALE)
    assert run.groups.id_at(1) == (1 if redraw else 4)
    assert run.groups.unscored == ({1, 2, 3} if redraw else {2, 3, 4})
    assert run.replacements.tokens_discarded == {"stale": 10 + TOKENS}
    assert [told["reason"] for told in run.reports] == ([] if redraw else ["stale"])
    assert run.kept.groups == [(1, 1, "stale", "3 versions behind")]


def test_the_firings_of_a_dropped_group_are_made_again(store: LedgerStore) -> None:
    """With one group a firing, as the graph has where groups are dropped."""
    run = Run(store)
    single = JobGraph(
        parse_job(
            toy_spec(
                run={"micro_batches": "streamed", "groups_per_firing": 1},
                staleness={"policy": "drop"},
                max_staleness=1,
            )
        )
    )
    flow = single.flow()
    single.mark_scored(flow, 4, [2, 3])
    replacements = Replacements(
        run.groups,
        flow,
        refs_before_training=single.refs_before_training,
        arrival=None,
        redraw_stale=True,
        dynamic_sampling=0,
        tokens_discarded={},
        prompts=PROMPTS,
        reports=Reported(),
        samples=run.kept,
    )
    replacements.drop(1, STALE)
    for ref in ("rollout.generate", "reward.score", "reference.logprobs"):
        assert [flow.is_done(ref, index) for index in range(2)] == [True, False], ref
    assert flow.is_done("trainer.prompts", 1), "its prompt is drawn"


def test_too_many_groups_without_gradient_end_the_run_with_the_reason(store: LedgerStore) -> None:
    run = Run(store, dynamic_sampling=1)
    run.replacements.drop(0, NO_GRADIENT)
    run.replacements.drop(1, NO_GRADIENT)
    run.score(4)
    with pytest.raises(UserCodeError, match=r"step 1: of 3 groups all samples earned the same"):
        run.replacements.drop(4, NO_GRADIENT)
    assert run.replacements.tokens_discarded["no_gradient"] == 3 * TOKENS
