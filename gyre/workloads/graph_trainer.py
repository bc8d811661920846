"""The built-in trainer: walks whatever graph it is given.

It fires an operator when its inputs are there and its outputs have room (`gyre.graph.flow`), sends the firing to
a free vertex or to the whole gang, writes what comes back into the sample ledger, and closes the cycle over the
weights edge. It holds no recipe: GRPO is the graph in `gyre.graph.recipes`.

Invariants:
- *written before trained*, *batches are fixed*: see `gyre.rollouts.ledger`;
- *no old weights*: what an operator returns is checked against the staleness bound, token by token;
- *a firing is repeated whole*: on another vertex, with the same groups.

Further ones stand where they are kept: `gyre.workloads.gang_keeper`, `gyre.workloads.optimizer_steps`,
`gyre.workloads.vertex_calls`, `gyre.workloads.group_book`.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from gyre.errors import Fenced, GyreError, UserCodeError, VertexLost
from gyre.graph import compile_job, local_roles
from gyre.graph.flow import Firing, Flow
from gyre.graph.model import Dispatch, EdgeKind, Operator
from gyre.rollouts.ledger import SampleLedger
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseTrainer
from gyre.workloads.checkpoints import Checkpoints
from gyre.workloads.evaluations import Evaluations
from gyre.workloads.gang import Gang, GangLost, Outcome, outcome_of
from gyre.workloads.gang_keeper import GangKeeper
from gyre.workloads.group_book import GroupBook
from gyre.workloads.judging import Judging
from gyre.workloads.learners import learners_of
from gyre.workloads.optimizer_steps import OptimizerSteps
from gyre.workloads.plane_calls import TRAIN, PlaneCalls
from gyre.workloads.protocol import Failure
from gyre.workloads.retries import Retries
from gyre.workloads.returned import problem_with_evaluation, problem_with_groups, problem_with_versions
from gyre.workloads.roster import Member
from gyre.workloads.served_policies import ServedPolicies
from gyre.workloads.vertex_calls import VertexCalls
from gyre.workloads.waits import WaitClock

IDLE_POLL_S = 0.25
"""How long the loop sleeps without news; it bounds how late a pause or stop is noticed."""


@dataclass(slots=True)
class _GangFiring:
    firing: Firing
    gang: Gang
    outcomes: list[Outcome | VertexLost | None]


class GraphTrainer(BaseTrainer):
    """Subclass it to bring other prompts: override `prompt` and `held_out`."""

    runtime: Any

    # -- data ---------------------------------------------------------------------------------------

    def setup(self) -> None:
        module, _, name = self.runtime.spec.run.data.partition(":")
        self.data = getattr(importlib.import_module(module), name)(self.config)

    def prompt(self, index: int) -> Group:
        group: Group = self.data.prompt(index)
        return group

    def held_out(self, count: int) -> list[Group]:
        groups: list[Group] = self.data.held_out(count)
        return groups

    # -- the run ------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Runs the graph to its end. The result holds the account of every prompt."""
        runtime = self.runtime
        self.spec = runtime.spec
        self.run = runtime.spec.run
        self.dcg = compile_job(runtime.spec).dcg
        self._read_graph()
        binding = runtime.binding
        with SampleLedger.at(binding.store_url, binding.job_id, runtime.term) as self.ledger:
            self._recover()
            try:
                self._loop()
                return self._finish()
            finally:
                if self.plane is not None:
                    self.plane.close()

    def _read_graph(self) -> None:
        self.operators = {operator.ref: operator for operator in self.dcg.operators}
        self.leader, self.followers = learners_of(self.dcg)
        self.learners = {learner.role: learner for learner in (self.leader, *self.followers)}
        self.pace, self.taker = self.leader.pace, self.leader.taker
        self.batch = self.run.prompts_per_step
        self.micro_batches = self.leader.micro_batches
        self.uses_plane = any(op.dispatch is Dispatch.PLANE for op in self.dcg.operators)
        self.last_edges = [e for e in self.dcg.into(self.taker.ref) if e.kind is EdgeKind.SAMPLES]
        self.flow = Flow(self.dcg, pace=self.pace.ref, count=self.run.steps)

    def _recover(self) -> None:
        """Take up where the ledger says the last trainer stood; nothing that is done is done again."""
        runtime, directory = self.runtime, self.context.directory
        directory.mkdir(parents=True, exist_ok=True)
        self.evaluations = Evaluations(directory / "evaluations.jsonl")
        self.evaluations.load()
        self.book = GroupBook(self.ledger, per_step=self.batch, micro_batches=self.micro_batches)
        self.gang_firings: dict[tuple[str, int], _GangFiring] = {}
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.waits = WaitClock()
        self.retries = Retries()
        self.calls = VertexCalls(runtime.roster, runtime.transport)
        self.judging = Judging(self.calls, self.retries, hear=lambda *what: self.inbox.put(("judged", what)))
        self.plane: PlaneCalls | None = None
        if self.uses_plane:
            self.plane = PlaneCalls(
                directory,
                self.config,
                term=runtime.term,
                stop_token_ids=getattr(self.data, "stop_token_ids", ()),
                hear=lambda purpose, groups: self.inbox.put(("plane", (purpose, groups))),
                fail=lambda error: self.inbox.put(("plane_failed", error)),
                last_share=1.0 / self.micro_batches if local_roles(self.spec) else None,
            )
        self._make_gang_keeper()
        runtime.roster.listen(lambda: self.inbox.put(("roster", None)))
        self._mark_done()
        self._rewind_gang()

    def _make_gang_keeper(self) -> None:
        runtime, timeout_s, report = self.runtime, self.run.call_timeout_s, self.runtime.report
        directory = self.context.directory
        self.policies = ServedPolicies(
            directory, runtime.transport, report=report, plane=self.plane, timeout_s=timeout_s
        )
        self.steps = OptimizerSteps(self.book, self.policies, timeout_s=timeout_s, report=report)
        self.keeper = GangKeeper(
            runtime,
            self.book,
            leader=self.leader,
            followers=self.followers,
            checkpoints=Checkpoints(
                directory, self.book, term=runtime.term, timeout_s=timeout_s, report=report
            ),
            policies=self.policies,
            steps=self.steps,
            keeps_initial=any(operator.initial_policy for operator in self.dcg.operators),
            blame=self._blame,
        )

    def _mark_done(self) -> None:
        """The firings whose groups the ledger has."""
        have, step = self.book.groups.keys(), self.book.step
        trained = step * self.batch
        for operator in self.dcg.operators:
            ref = operator.ref
            if operator.dispatch is Dispatch.GANG:
                continue
            if not any(edge.kind is EdgeKind.SAMPLES for edge in self._edges_of(ref)):
                every = max(1, self.dcg.into(ref)[0].consume)
                self.flow.mark_done(ref, range(-(-step // every)))
                continue
            self.flow.mark_done(
                ref,
                (
                    index
                    for index in range(self.flow.total(ref))
                    if all(g < trained or g in have for g in self.flow.firing(ref, index).groups)
                ),
            )

    def _edges_of(self, ref: str) -> tuple[Any, ...]:
        return (*self.dcg.into(ref), *self.dcg.out_of(ref))

    def _rewind_gang(self) -> None:
        for learner in self.learners.values():
            self.flow.rewind(learner.taker.ref, 0)
            self.flow.mark_done(learner.taker.ref, range(self.book.step * learner.micro_batches))
            self.flow.rewind(learner.pace.ref, 0)
            self.flow.mark_done(learner.pace.ref, range(self.book.step))
        self.gang_firings.clear()

    def _loop(self) -> None:
        runtime = self.runtime
        while not self._is_complete():
            if runtime.should_stop and not self._busy() and self._has_devices():
                return
            if self.keeper.gang is None and self._has_devices() and self.keeper.form():
                self._rewind_gang()
            if not runtime.paused and not runtime.should_stop:
                self._dispatch()
            self._take_news()
            self._tell_progress()

    def _has_devices(self) -> bool:
        """Local engines may have them: they are asked for, and come back in a moment."""
        return self.plane is None or self.plane.needs_devices()

    def _is_complete(self) -> bool:
        """All has fired, and what came of it is in a checkpoint."""
        return self.flow.finished and self.book.checkpoint_step == self.book.step

    def _busy(self) -> bool:
        return any(self.flow.running(ref) for ref in self.operators)

    def _take_news(self) -> None:
        try:
            kind, content = self.inbox.get(timeout=IDLE_POLL_S)
        except queue.Empty:
            return
        while True:
            if kind == "one":
                self._one_ended(*content)
            elif kind == "rank":
                self._rank_ended(*content)
            elif kind == "plane":
                self._plane_answered(*content)
            elif kind == "judged":
                self._judged(*content)
            elif kind == "plane_failed":
                raise content
            elif not self.keeper.is_current():
                self._drop_gang(GangLost())
            try:
                kind, content = self.inbox.get_nowait()
            except queue.Empty:
                return

    # -- sending firings out ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        now = time.monotonic()
        self.judging.send(step=self.book.step, now=now)
        again = True
        while again:
            again = False
            for firing in sorted(self.flow.enabled(), key=self._urgency):
                if not self.retries.may((firing.operator, firing.index), now):
                    continue
                operator = self.operators[firing.operator]
                if operator.dispatch is Dispatch.CONTROLLER:
                    self._draw(firing)
                    again = True
                elif operator.dispatch is Dispatch.GANG:
                    self._send_to_gang(operator, firing)
                elif operator.dispatch is Dispatch.PLANE:
                    self._send_to_plane(firing)
                else:
                    self._send_to_one(operator, firing)

    def _urgency(self, firing: Firing) -> tuple[int, int]:
        """Evaluations first, for they must see their own version; then in the order of the samples."""
        return (0 if not firing.groups and firing.operator != self.pace.ref else 1, firing.index)

    def _draw(self, firing: Firing) -> None:
        self.flow.start(firing)
        groups = []
        for group_id in firing.groups:
            group = self.prompt(group_id)
            if group.id != group_id:
                raise UserCodeError(
                    f"prompt({group_id}) gave a group with the id {group.id}.",
                    hint="A group's id is the index that it was asked for by.",
                )
            groups.append(group)
        self.book.drawn(groups)
        self.flow.complete(firing)

    def _send_to_one(self, operator: Operator, firing: Firing) -> None:
        fed = any(edge.kind is EdgeKind.WEIGHTS for edge in self.dcg.into(operator.ref))
        policy = None
        if (fed or operator.initial_policy) and operator.role not in self.learners:
            policy = self.policies.initial if operator.initial_policy else self.policies.published
            if policy is None:
                return
        if operator.role in self.learners and self.keeper.gang is None:
            return  # its ranks have not been brought to the present step
        member = self.calls.free_member(operator.role)
        if member is None:
            return
        groups = [self.book.groups[group_id] for group_id in firing.groups]
        if not firing.groups:
            groups = self.held_out(self.run.held_out)
        self.flow.start(firing)
        step = firing.groups[0] // self.batch + 1 if firing.groups else self.book.step
        future = self.calls.submit(
            member, operator.method, groups, policy=policy, _gyre_step=step, _gyre_index=firing.index
        )
        future.add_done_callback(partial(self._hear_one, firing, member))

    def _send_to_plane(self, firing: Firing) -> None:
        """No policy is sent along: the plane has what was published, and each request says how old it may be."""
        plane, published = self.plane, self.policies.published
        if plane is None or published is None:
            return
        self.flow.start(firing)
        if firing.groups:
            step = firing.groups[0] // self.batch + 1
            oldest = max(0, step - 1 - self.spec.max_staleness)
            plane.ask(firing, [self.book.groups[group_id] for group_id in firing.groups], min_version=oldest)
        else:
            plane.evaluate(firing, self.held_out(self.run.held_out), version=published.version)

    def _hear_one(self, firing: Firing, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self.inbox.put(("one", (firing, member, outcome_of(done))))

    def _send_to_gang(self, operator: Operator, firing: Firing) -> None:
        gang = self.keeper.gang_of(operator.role)
        if gang is None or (self.plane is not None and self.plane.devices_lent):
            return
        per_rank: list[tuple[Any, ...]]
        micro_batches = self.learners[operator.role].micro_batches
        step = (firing.index // micro_batches if firing.groups else firing.index) + 1
        kwargs: dict[str, Any] = {"_gyre_step": step}
        if firing.groups:
            groups = [self.book.groups[group_id] for group_id in firing.groups]
            self._check_staleness(groups, step)
            per_rank = [(groups[rank :: gang.size],) for rank in range(gang.size)]
            kwargs["_gyre_index"] = firing.index % micro_batches
        else:
            per_rank = [()] * gang.size
            kwargs["_gyre_indices"] = micro_batches
            kwargs["_gyre_group_ids"] = self.book.ids_of(step)
        self.flow.start(firing)
        pending = _GangFiring(firing, gang, [None] * gang.size)
        self.gang_firings[(firing.operator, firing.index)] = pending
        for rank, future in enumerate(gang.submit(operator.method, per_rank, **kwargs)):
            future.add_done_callback(partial(self._hear_rank, pending, rank))

    def _hear_rank(self, pending: _GangFiring, rank: int, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self.inbox.put(("rank", (pending, rank, outcome_of(done))))

    def _check_staleness(self, groups: list[Group], step: int) -> None:
        oldest = step - 1 - self.spec.max_staleness
        for group in groups:
            if group.versions is not None and group.versions[0] < oldest:
                raise GyreError(
                    f"group {group.id} has tokens of policy version {group.versions[0]}; step {step} with "
                    f"max_staleness {self.spec.max_staleness} permits {oldest} and newer.",
                    hint="This is a defect in Gyre's flow.",
                )

    # -- taking results in --------------------------------------------------------------------------

    def _one_ended(self, firing: Firing, member: Member, outcome: Outcome | VertexLost) -> None:
        self.calls.ended(member)
        if firing.index not in self.flow.running(firing.operator):
            return
        if isinstance(outcome, VertexLost):
            self.runtime.roster.doubt(*member)
            self.calls.distrust(member)
            self.flow.cancel(firing)
            return
        status, value = outcome
        failure = value if status == "error" else self._refusal(firing, value)
        if failure is not None:
            self.calls.distrust(member)
            self._firing_failed(firing, member, failure)
            return
        if firing.groups:
            self._took(firing, value)
        else:
            self.retries.succeeded((firing.operator, firing.index))
            self._evaluated(value)
            self.flow.complete(firing)

    def _plane_answered(self, purpose: str, groups: list[Group]) -> None:
        assert self.plane is not None
        answered, unasked = self.plane.came(purpose, groups)
        if purpose != TRAIN:
            if unasked:
                self.plane.judged(int(purpose.rpartition("/")[2]), unasked)
        else:
            known = [g for g in unasked if g < self.book.step * self.batch or self._is_written(g)]
            if known:
                self.plane.written(known)
        for firing, whole in answered:
            if firing.index not in self.flow.running(firing.operator):
                continue
            if purpose == TRAIN:
                self._took(firing, whole)
            else:
                self.judging.add(int(purpose.rpartition("/")[2]), firing, whole)
                self.judging.send(step=self.book.step, now=time.monotonic())

    def _is_written(self, group_id: int) -> bool:
        group = self.book.groups.get(group_id)
        return group is not None and bool(group.samples) and self._is_whole(group_id)

    def _judged(self, version: int, member: Member, outcome: Outcome | VertexLost) -> None:
        self.calls.ended(member)
        if isinstance(outcome, VertexLost):
            self.runtime.roster.doubt(*member)
            self.judging.again(version)
            return
        status, value = outcome
        if status == "error":
            self.judging.failed(version, time.monotonic())
            self._blame(member, "reward.score", value)
            return
        firing, ids, row = self.judging.judged(version, value)
        self._evaluated(row)
        assert self.plane is not None
        self.plane.judged(version, ids)
        self.flow.complete(firing)

    def _took(self, firing: Firing, groups: list[Group]) -> None:
        """An operator's groups are here and in order."""
        self.retries.succeeded((firing.operator, firing.index))
        self.book.merge(groups)
        self.flow.complete(firing)
        if any(edge.source == firing.operator for edge in self.last_edges):
            whole = [group_id for group_id in firing.groups if self._is_whole(group_id)]
            if whole:
                self.book.done(whole)
                if self.plane is not None:
                    self.plane.written(whole)

    def _refusal(self, firing: Firing, value: Any) -> Failure | None:
        """Why what an operator returned cannot be taken."""
        problem: str | None
        theirs = True
        if not firing.groups:
            problem = problem_with_evaluation(value)
        else:
            problem = problem_with_groups(value, firing.groups, self.book.groups)
            if problem is None:
                # Not the user's: a load that failed left an older policy behind, and it will be loaded again.
                problem, theirs = problem_with_versions(value, self.batch, self.spec.max_staleness), False
        if problem is None:
            return None
        return Failure(error=f"{firing.operator}: {problem}.", traceback="", user_code=theirs)

    def _firing_failed(self, firing: Firing, member: Member, failure: Failure) -> None:
        if failure.fenced:
            raise Fenced(failure.error)
        self.retries.failed((firing.operator, firing.index), time.monotonic())
        self._blame(member, firing.operator, failure)
        self.flow.cancel(firing)

    def _blame(self, member: Member, operator: str, failure: Failure) -> None:
        self.runtime.report(
            "OperatorFailed",
            vertex=member[0],
            vertex_incarnation=member[1],
            operator=operator,
            error=failure.error,
            traceback=failure.traceback,
            user_code=failure.user_code,
        )

    def _is_whole(self, group_id: int) -> bool:
        return all(self.flow.is_done(edge.source, group_id // edge.produce) for edge in self.last_edges)

    def _evaluated(self, value: dict[str, Any]) -> None:
        row = {"version": value["version"], "accuracy": value["accuracy"], "count": value["count"]}
        self.evaluations.add(row)
        self.runtime.report("Evaluated", **row)

    def _rank_ended(self, pending: _GangFiring, rank: int, outcome: Outcome | VertexLost) -> None:
        pending.outcomes[rank] = outcome
        current = self.gang_firings.get((pending.firing.operator, pending.firing.index))
        if current is not pending:
            return  # the answer of a gang that is no more
        if isinstance(outcome, VertexLost):
            self.runtime.roster.doubt(*pending.gang.members[rank])
            self._drop_gang(GangLost())
            return
        if any(got is None for got in pending.outcomes):
            return
        firing = pending.firing
        try:
            values = pending.gang.settle(
                firing.operator, [got for got in pending.outcomes if got is not None]
            )
            del self.gang_firings[(firing.operator, firing.index)]
            if firing.operator == self.pace.ref:
                self.steps.ended(pending.gang, values[0])
            elif not firing.groups:
                self.steps.beside(pending.gang.role, values[0])
            self.flow.complete(firing)
            if firing.operator == self.pace.ref:
                self.keeper.step_was_good()
                self.keeper.checkpoint_if_due(pending.gang)
        except GangLost as lost:
            self._drop_gang(lost)

    def _drop_gang(self, lost: GangLost) -> None:
        self.keeper.drop(lost)
        self._rewind_gang()

    # -- telling ------------------------------------------------------------------------------------

    def _tell_progress(self) -> None:
        self.waits.look(self.flow, self.operators, time.monotonic())
        if self.plane is not None:
            self.plane.look(
                self.flow,
                self.operators,
                wanted=self.runtime.roster.wanted("rollout"),
                has_gang=self.keeper.gang is not None,
            )
        rows, metrics, published = self.evaluations.rows, self.steps.metrics, self.policies.published
        self.report_progress(
            step=self.book.step,
            steps=self.run.steps,
            version=published.version if published else -1,
            reward=metrics.get("reward_mean"),
            accuracy=rows[-1]["accuracy"] if rows else None,
            accuracy_first=rows[0]["accuracy"] if rows else None,
            accuracy_version=rows[-1]["version"] if rows else None,
            tokens=self.book.tokens,
            tokens_per_s=round(self.steps.tokens_per_s, 1),
            step_s=metrics.get("seconds"),
            staleness=metrics.get("staleness_max"),
            waits=self.waits.shares(),
            checkpoint_step=self.book.checkpoint_step,
        )

    def _finish(self) -> dict[str, Any]:
        if self.keeper.gang is not None and self.book.checkpoint_step != self.book.step:
            # Told to stop: what the checkpoint lacks is in the ledger, and is replayed.
            with contextlib.suppress(GangLost):
                self.keeper.checkpoint(self.keeper.gang)
        account = self.ledger.account()
        rows = self.evaluations.rows
        self._tell_progress()
        return {
            "steps": self.book.step,
            "prompts": account.drawn,
            "prompts_lost": len(account.lost)
            if self.runtime.should_stop
            else account.drawn - account.trained,
            "trained_twice": len(account.trained_twice),
            "accuracy_first": rows[0]["accuracy"] if rows else None,
            "accuracy_last": rows[-1]["accuracy"] if rows else None,
            "tokens": self.book.tokens,
            "digest": self.book.digests.get(self.book.step, ""),
        }
