"""The scoring of samples one by one, as they finish: for a reward class that looks at each sample by itself.

The rollout plane announces samples that finished before their groups were complete. They go to the reward role at once,
together with whatever else has finished since its vertices had room, so that scoring overlaps with generation. Only
what a reward needs travels, and the scores come back alone. A firing, which has whole groups, joins the scores that are
there to the samples where they lie, and ends when its last one has come.

Invariants:
- *of these tokens*: a score counts for a sample with the very tokens, and the end, that it was given for;
- *early notice is a hint*: a sample that was not announced early is scored with its group, and one that is lost with a
  reward's process is sent again;
- *scored where it counts*: nothing reaches the ledger before its whole group is scored.

This module must not know how samples are generated or who scores them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from gyre.errors import Fenced, VertexDied
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.samples import Group, Sample, SampleKey
from gyre.workloads.gang.gang import Outcome, operator_failed, outcome_of
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.firings.result_checks import NOTHING_KNOWN, Expectations, problem_with_groups
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.firings.rollout_scores import for_reward, scored_rows, with_scores
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.firings.vertex_firings import ids_of
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.inbox_messages import Inbox, ScoringEnded
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

MOST_TOGETHER = 512
"""Samples in one call: a vertex that dies has no more to do again."""

TOKENS_A_WRITE = 4 << 20
"""In one transaction of the ledger: 32 MiB."""

KEPT = 4096
"""Samples of groups that were given up are forgotten when there are so many more than are wanted."""


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """`groups` have the samples that are scored, and `keys` name them, in order."""

    groups: list[Group]
    keys: list[SampleKey]
    member: Member

    def samples(self) -> Iterator[tuple[SampleKey, Sample]]:
        return zip(self.keys, (sample for group in self.groups for sample in group.samples), strict=True)


class SampleScoring:
    """A `FiringRunner` of the operator that scores."""

    def __init__(
        self,
        operator: Operator,
        flow: Flow,
        groups: GroupState,
        calls: VertexCalls,
        results: FiringResults,
        retries: Retries,
        *,
        reports: HearsEvents,
        inbox: Inbox,
        expectations: Expectations = NOTHING_KNOWN,
    ) -> None:
        self._operator = operator
        self._flow = flow
        self._groups = groups
        self._calls = calls
        self._results = results
        self._retries = retries
        self._reports = reports
        self._inbox = inbox
        self._expected = expectations.for_groups(operator)
        self._samples: dict[SampleKey, Sample] = {}
        """A sample that was announced early or is in a firing, with its reward once it has one; no log-probs or
        versions."""
        self._waiting: dict[SampleKey, None] = {}
        """Of these, in order, those that are in no call and have no reward."""
        self._in_calls: dict[SampleKey, Sample] = {}
        self._begun: dict[int, tuple[Firing, list[int]]] = {}
        """The firings that have begun, by their index, with their groups."""
        self._scored_by: Member | None = None
        """Who scored last."""
        self._forget_beyond = KEPT

    # -- what there is to score ---------------------------------------------------------------------

    def finished(self, samples: Mapping[SampleKey, Sample]) -> None:
        """Samples have finished before their groups."""
        for key, sample in samples.items():
            if key[0] in self._groups.unscored and not self._groups[key[0]].samples:
                self._add(key, sample)
        if len(self._samples) > self._forget_beyond:
            self._forget([key for key in self._samples if key[0] not in self._groups.unscored])
            self._forget_beyond = 2 * len(self._samples) + KEPT

    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        """Begin these firings, whose groups are whole; `pump` sends what is not scored yet."""
        for firing in firings:
            ids = ids_of([firing], self._groups)
            self._flow.start(firing)
            self._begun[firing.index] = (firing, ids)
            for group_id in ids:
                group = self._groups[group_id]
                for index in scored_rows(group):
                    sample, known = group.samples[index], self._samples.get((group_id, index))
                    if known is None or not _is_same(known, sample):
                        self._add((group_id, index), for_reward(sample))

    def _add(self, key: SampleKey, sample: Sample) -> None:
        known = self._samples.get(key)
        if known is None or not _is_same(known, sample):
            self._samples[key] = sample
            self._waiting[key] = None

    def _forget(self, keys: Iterable[SampleKey]) -> None:
        for key in keys:
            del self._samples[key]
            self._waiting.pop(key, None)
            self._retries.succeeded((self._operator.ref, key))

    # -- calls --------------------------------------------------------------------------------------

    def pump(self, now: float, *, step: int) -> None:
        """Called in every turn of the loop: end the firings that are scored, and send what waits to vertices that have
        room. `now` is monotonic seconds."""
        self._end_firings()
        while self._waiting and self._retries.may(self._operator.ref, now):
            member = self._calls.free_member(self._operator.role)
            if member is None:
                return
            share = max(1, -(-len(self._waiting) // max(1, self._calls.count(self._operator.role))))
            self._score(member, list(self._waiting)[: min(share, MOST_TOGETHER)], step)

    def _score(self, member: Member, keys: Sequence[SampleKey], step: int) -> None:
        by_group: dict[int, list[SampleKey]] = {}
        for key in keys:
            del self._waiting[key]
            if key[0] in self._groups.unscored:  # else it was given up meanwhile
                by_group.setdefault(key[0], []).append(key)
        if not by_group:
            return
        groups = []
        for group_id, some in by_group.items():
            whole = self._groups[group_id]
            samples = [self._samples[key] for key in some]
            groups.append(Group(group_id, whole.prompt_ids, whole.meta, samples))
        call = ScoringCall(groups, [key for some in by_group.values() for key in some], member)
        self._in_calls.update(call.samples())
        future = self._calls.fire(
            member,
            self._operator,
            groups,
            step=step,
            index=self._groups.slot_of(groups[0].id),
            expected=self._expected,
            slim=True,
            added_only=True,
        )
        future.add_done_callback(partial(self._call_ended, call))

    def _call_ended(self, call: ScoringCall, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._inbox.put(ScoringEnded(call, outcome_of(done)))

    def ended(self, call: ScoringCall, outcome: Outcome | VertexDied) -> None:
        """Handle a call that has ended: keep its scores, or put its samples back. Raises Fenced."""
        self._calls.ended(call.member)
        for key, sample in call.samples():
            if self._in_calls.get(key) is sample:
                del self._in_calls[key]
        if isinstance(outcome, VertexDied):
            self._calls.lost(call.member)
            self._put_back(call)
            return
        status, value = outcome
        failure = value if status == "error" else self._take_in(call, value)
        if failure is None:
            self._retries.succeeded(self._operator.ref)
            self._end_firings()
            return
        if failure.fenced:
            raise Fenced(failure.error)
        self._calls.failed(call.member)
        now = time.monotonic()
        attempts = [self._retries.failed(self._operator.ref, now)]
        attempts += [self._retries.failed((self._operator.ref, key), now) for key in call.keys]
        body = operator_failed(call.member, self._operator.ref, failure, max(attempts))
        self._reports.report("OperatorFailed", **body)
        self._put_back(call)

    def _take_in(self, call: ScoringCall, scored: Any) -> Failure | None:
        """Keep the scores; or why they are refused."""
        ref, known = self._operator.ref, {group.id: group for group in call.groups}
        problem = problem_with_groups(ref, scored, list(known), known)
        if problem is not None:
            return Failure(error=f"{ref}: {problem}.", traceback="", user_code=True)
        self._scored_by = call.member
        returned = [sample for group in scored for sample in group.samples]
        for (key, sample), its in zip(call.samples(), returned, strict=True):
            self._retries.succeeded((ref, key))
            if self._samples.get(key) is sample:
                sample.reward, sample.extras = its.reward, its.extras
        return None

    def _put_back(self, call: ScoringCall) -> None:
        self._waiting.update(
            {key: None for key, sample in call.samples() if self._samples.get(key) is sample}
        )

    # -- firings ------------------------------------------------------------------------------------

    def _end_firings(self) -> None:
        """End the firings that are scored, as many at once as go into one write to the ledger."""
        ended: list[Firing] = []
        scored: list[Group] = []
        for index, (firing, ids) in list(self._begun.items()):
            if not all(self._is_scored(group_id) for group_id in ids):
                continue
            del self._begun[index]
            groups = [self._scored(self._groups[group_id]) for group_id in ids]
            failure = self._results.problem_with([firing], ids, groups)
            if failure is not None and self._scored_by is not None:
                self._results.fail([firing], self._scored_by, failure)
                continue
            ended.append(firing)
            scored += groups
            if sum(group.positions for group in scored) >= TOKENS_A_WRITE:
                self._accept(ended, scored)
                ended, scored = [], []
        if ended:
            self._accept(ended, scored)

    def _accept(self, firings: Sequence[Firing], groups: Sequence[Group]) -> None:
        self._results.accept(firings, groups)
        self._forget((group.id, index) for group in groups for index in scored_rows(group))

    def _is_scored(self, group_id: int) -> bool:
        rows = scored_rows(self._groups[group_id])
        return all(self._samples[group_id, index].reward is not None for index in rows)

    def _scored(self, group: Group) -> Group:
        """The group with what is known of its samples' scores."""
        return with_scores(group, [self._samples[group.id, index] for index in scored_rows(group)])

    def withdraw(self) -> None:
        """Nothing begins while the run is paused or stops: take back the firings that no call works for."""
        busy = {group_id for group_id, _ in self._in_calls}
        for index, (firing, ids) in list(self._begun.items()):
            if not busy.intersection(ids):
                del self._begun[index]
                self._flow.cancel(firing)


def _is_same(one: Sample, other: Sample) -> bool:
    # Of bytes, for of a few tokens array_equal takes ten times as long.
    return one.finish_reason == other.finish_reason and one.token_ids.tobytes() == other.token_ids.tobytes()
