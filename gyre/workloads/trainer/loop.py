"""The built-in trainer: walks whatever graph it is given.

It fires an operator when its inputs are there and its outputs have room (`gyre.graph.flow`), sends firings to a free
vertex or to the rollout plane, writes what comes back into the sample ledger, feeds the gangs with micro-batches
(`gyre.workloads.trainer.micro_batches`), and closes the cycle over the weights edge. It holds no recipe: GRPO is the
graph in
`gyre.graph.recipes`.

A firing takes places of the run; which group stands in a place is the book's to know (`gyre.workloads.trainer.slots`).

Invariants:
- *written before trained*, *batches are recorded*, *nothing vanishes*: see `gyre.rollouts.trainer.sample_ledger`;
- *no old weights*: what an operator returns is checked against the staleness bound, token by token;
- *a firing is repeated whole*: on another vertex, with the same groups;
- *every evaluation is told*: of each version that is due one, there is a result or a reason why there is none.

Further ones stand where they are kept: `gyre.workloads.trainer.learning.lifecycle`,
`gyre.workloads.trainer.learning.optimizer_steps`,
`gyre.workloads.trainer.vertex_calls`, `gyre.workloads.trainer.group_state`.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from gyre.errors import Fenced, GyreError, UserCodeError, VertexLost
from gyre.graph import compile_job, local_roles
from gyre.graph.flow import Firing, Flow
from gyre.graph.model import Dispatch, EdgeKind, Operator
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.plane_client import CannotGenerate
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.rollouts.trainer.staleness import StalenessPolicy, Verdict
from gyre.workloads.base import BaseTrainer
from gyre.workloads.gang.gang import Gang, GangLost, Outcome, operator_failed, outcome_of
from gyre.workloads.gang.spread import SpreadCall, SpreadCalls
from gyre.workloads.trainer.evaluation_scoring import EvaluationScoring
from gyre.workloads.trainer.evaluations import Evaluations
from gyre.workloads.trainer.group_state import GroupState
from gyre.workloads.trainer.learning.checkpoints import Checkpoints
from gyre.workloads.trainer.learning.dispatch import GangCall, GangDispatch
from gyre.workloads.trainer.learning.learners import learners_of
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.micro_batches import NO_GRADIENT, FixedBatches, StepAssembly, StreamedBatches
from gyre.workloads.trainer.result_checks import (
    problem_with_evaluation,
    problem_with_groups,
    problem_with_versions,
)
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.rollout_requests import TRAIN, RolloutRequests
from gyre.workloads.trainer.vertex_calls import VertexCalls
from gyre.workloads.trainer.wait_stats import WaitStats
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

IDLE_POLL_S = 0.25
"""How long the loop sleeps without news; it bounds how late a pause or stop is noticed."""


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
        self.streamed = self.run.micro_batches == "streamed"
        self.in_order = self.spec.staleness.policy == "in_order"
        self.last_edges = [e for e in self.dcg.into(self.taker.ref) if e.kind is EdgeKind.SAMPLES]
        self.made_by = [
            operator.ref
            for operator in self.dcg.operators
            if operator.dispatch in (Dispatch.ONE, Dispatch.SPREAD, Dispatch.PLANE)
            and any(edge.kind is EdgeKind.SAMPLES for edge in self.dcg.into(operator.ref))
        ]
        """The operators that a group goes through between being drawn and being whole."""
        self.flow = Flow(self.dcg, pace=self.pace.ref, count=self.run.steps)

    def _recover(self) -> None:
        """Take up where the ledger says the last trainer stood; nothing that is done is done again."""
        runtime, directory = self.runtime, self.context.directory
        directory.mkdir(parents=True, exist_ok=True)
        self.evaluations = Evaluations(directory / "evaluations.jsonl")
        self.evaluations.load()
        self.book = GroupState(self.ledger, per_step=self.batch)
        self.discarded = self.ledger.account().discarded
        """Tokens that were not trained on, by reason."""
        self.replaced_at: list[int] = []
        """The step at which each group was replaced that this trainer replaced for want of a gradient."""
        self.set_aside_at: list[int] = []
        """The step at which each group was set aside that this trainer did so with for poison."""
        self.arrival: ArrivalOrder | None = None if self.in_order else self._arrival_order()
        self.assembly = self._assembly()
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.waits = WaitStats()
        self.retries = Retries()
        self.calls = VertexCalls(runtime.membership, runtime.transport)
        self.spread = SpreadCalls(hear=lambda *what: self.inbox.put(("spread", what)))
        self.judging = EvaluationScoring(
            self.calls, self.retries, hear=lambda *what: self.inbox.put(("judged", what))
        )
        self.plane: RolloutRequests | None = None
        if self.uses_plane:
            self.plane = RolloutRequests(
                directory,
                self.config,
                term=runtime.term,
                stop_token_ids=getattr(self.data, "stop_token_ids", ()),
                hear=lambda purpose, groups: self.inbox.put(("plane", (purpose, groups))),
                fail=lambda error: self.inbox.put(("plane_failed", error)),
                last_share=self.run.groups_per_micro_batch / self.batch if local_roles(self.spec) else None,
            )
        self._make_gang_keeper()
        runtime.membership.listen(lambda: self.inbox.put(("membership", None)))
        self._mark_done()
        self.feeder.rewind()

    def _make_gang_keeper(self) -> None:
        runtime, timeout_s, report = self.runtime, self.run.call_timeout_s, self.runtime.report
        directory = self.context.directory
        self.policies = ServedPolicies(
            directory, runtime.transport, report=report, plane=self.plane, timeout_s=timeout_s
        )
        self.steps = OptimizerSteps(self.book, self.policies, timeout_s=timeout_s, report=report)
        checkpoints = Checkpoints(directory, self.book, term=runtime.term, timeout_s=timeout_s, report=report)
        self.steps.tell_earlier()
        checkpoints.tell_earlier()
        self.keeper = GangLifecycle(
            runtime,
            self.book,
            leader=self.leader,
            followers=self.followers,
            checkpoints=checkpoints,
            policies=self.policies,
            steps=self.steps,
            keeps_initial=any(operator.initial_policy for operator in self.dcg.operators),
            blame=self._blame,
        )
        self.feeder = GangDispatch(
            self.book,
            self.flow,
            self.keeper,
            self.assembly,
            (self.leader, *self.followers),
            streamed=self.streamed,
            check=self._check_staleness,
            hear=lambda *what: self.inbox.put(("rank", what)),
        )

    def _arrival_order(self) -> ArrivalOrder:
        staleness, function = self.spec.staleness, self.spec.staleness.function
        judge = None
        if function is not None:
            judge = getattr(importlib.import_module(function.module), function.name)
        order = ArrivalOrder(
            StalenessPolicy(self.spec.max_staleness, judge),
            per_step=self.batch,
            keeps_places=staleness.policy == "wait",
        )
        for group_id, version in self.book.asked_of.items():
            order.asked(group_id, version)
        return order

    def _assembly(self) -> StepAssembly:
        ranks = self.spec.roles[self.leader.role].total
        if self.streamed:
            return StreamedBatches(self.book, self.run, ranks=ranks, arrival=self.arrival)
        return FixedBatches(self.book, self.run, ranks=ranks, ordered=self.taker.ordered)

    def _mark_done(self) -> None:
        """The firings whose groups the ledger has."""
        book = self.book
        total = book.step * self.batch
        while total < self.run.steps * self.batch and book.is_drawn(total):
            total += 1
        missing = {book.place_of(group_id) for group_id in book.queued}
        for operator in self.dcg.operators:
            ref = operator.ref
            if operator.dispatch is Dispatch.GANG:
                continue
            if not any(edge.kind is EdgeKind.SAMPLES for edge in self._edges_of(ref)):
                self._mark_evaluated(operator)
                continue
            size = len(self.flow.firing(ref, 0).groups)
            open_firings = {place // size for place in missing}
            self.flow.mark_done(ref, (index for index in range(total // size) if index not in open_firings))

    def _mark_evaluated(self, operator: Operator) -> None:
        """Those that are settled. One that was open when the last trainer died is made again: by the rollout plane with
        its own policy, which no newer one has overtaken there; by a rollout class with the newest, for weights come
        with the call and older ones are gone. That is once for all that are open."""
        indices = range(self.flow.total(operator.ref))
        due = [i for i in indices if self._version_of(Firing(operator.ref, i)) <= self.book.step]
        unsettled = [
            i for i in due if not self.evaluations.is_settled(self._version_of(Firing(operator.ref, i)))
        ]
        if operator.dispatch is not Dispatch.PLANE:
            for index in unsettled[:-1]:
                version = self._version_of(Firing(operator.ref, index))
                self._leave_out(version, "the trainer was replaced, and its policy is served no more")
            unsettled = unsettled[-1:]
        self.flow.mark_done(operator.ref, (index for index in due if index not in unsettled))

    def _version_of(self, evaluation: Firing) -> int:
        """The policy whose making is its licence."""
        edge = self.dcg.into(evaluation.operator)[0]
        tokens = (evaluation.index + 1) * edge.consume - edge.initial_tokens
        return max(0, -(-tokens // edge.produce))

    def _edges_of(self, ref: str) -> tuple[Any, ...]:
        return (*self.dcg.into(ref), *self.dcg.out_of(ref))

    def _loop(self) -> None:
        runtime = self.runtime
        while not self._is_complete():
            if runtime.should_stop and not self._busy() and self._has_devices():
                return
            if self.keeper.gang is None and self._has_devices() and self.keeper.form():
                self.feeder.rewind()
            if not runtime.paused and not runtime.should_stop:
                self._dispatch()
                self._check_progress()
            self._take_news()
            self._check_gangs()
            self._tell_progress()

    def _has_devices(self) -> bool:
        """Local engines may have them: they are asked for, and come back in a moment."""
        return self.plane is None or self.plane.needs_devices()

    def _is_complete(self) -> bool:
        """All has fired, and what came of it is in a checkpoint."""
        return self.flow.finished and self.book.checkpoint_step == self.book.step

    def _busy(self) -> bool:
        """Calls are in flight. What the rollout plane generates is in its own ledger, and nobody waits for it."""
        return any(
            self.flow.running(ref)
            for ref, operator in self.operators.items()
            if operator.dispatch is not Dispatch.PLANE
        )

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
            elif kind == "spread":
                self._spread_ended(*content)
            elif kind == "plane":
                self._plane_answered(*content)
            elif kind == "judged":
                self._judged(*content)
            elif kind == "plane_failed":
                self._plane_failed(content)
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
        self._feed_gangs()
        again = True
        while again:
            again = False
            together: dict[tuple[str, int], list[Firing]] = {}
            for firing in sorted(self.flow.enabled(), key=self._urgency):
                operator = self.operators[firing.operator]
                if operator.dispatch is Dispatch.CONTROLLER:
                    self._draw(firing)
                    again = True
                elif operator.dispatch is Dispatch.GANG:
                    self.feeder.step_optimizer(operator, firing)
                elif self.retries.may((firing.operator, firing.index), now):
                    together.setdefault((firing.operator, self._step_of(firing)), []).append(firing)
            for (ref, step), firings in together.items():
                if self.operators[ref].dispatch is Dispatch.PLANE:
                    self._send_to_plane(firings, step)
                elif self.operators[ref].dispatch is Dispatch.SPREAD:
                    self._send_to_ranks(self.operators[ref], firings, step)
                else:
                    self._send_to_ones(self.operators[ref], firings, step)

    def _urgency(self, firing: Firing) -> tuple[int, int]:
        """Evaluations first, for they must see their own version; then in the order of the samples."""
        return (0 if not firing.groups and firing.operator != self.pace.ref else 1, firing.index)

    def _step_of(self, firing: Firing) -> int:
        """The step that its groups are for; without groups, the last one."""
        if not firing.groups:
            return self.book.step
        return firing.groups[0] // self.batch + 1 if self.in_order else self.book.step + 1

    def _ids(self, firings: Sequence[Firing]) -> list[int]:
        return [self.book.id_at(place) for firing in firings for place in firing.groups]

    def _draw(self, firing: Firing) -> None:
        self.flow.start(firing)
        self.book.drawn([self._prompt(self.book.id_at(place)) for place in firing.groups])
        self.flow.complete(firing)

    def _prompt(self, group_id: int) -> Group:
        group = self.prompt(group_id)
        if group.id != group_id:
            raise UserCodeError(
                f"prompt({group_id}) gave a group with the id {group.id}.",
                hint="A group's id is the index that it was asked for by.",
            )
        return group

    def _send_to_ones(self, operator: Operator, firings: list[Firing], step: int) -> None:
        """As many firings in a call as make `groups_per_firing` groups, as long as somebody has room."""
        fed = any(edge.kind is EdgeKind.WEIGHTS for edge in self.dcg.into(operator.ref))
        policy = None
        if fed or operator.initial_policy:
            policy = self.policies.initial if operator.initial_policy else self.policies.published
            if policy is None:
                return
        for some in self._in_calls(firings):
            member = self.calls.free_member(operator.role)
            if member is None:
                return
            ids = self._ids(some)
            groups = [self.book.groups[group_id] for group_id in ids] or self.held_out(self.run.held_out)
            if self.arrival is not None and policy is not None and fed:
                for group_id in ids:
                    self.arrival.asked(group_id, policy.version)
            for firing in some:
                self.flow.start(firing)
            future = self.calls.submit(
                member, operator.method, groups, policy=policy, _gyre_step=step, _gyre_index=some[0].index
            )
            future.add_done_callback(partial(self._hear_one, some, ids, member))

    def _in_calls(self, firings: list[Firing]) -> Iterator[list[Firing]]:
        rate = len(firings[0].groups)
        size = max(1, self.run.groups_per_firing // rate) if rate else 1
        for first in range(0, len(firings), size):
            yield firings[first : first + size]

    def _send_to_ranks(self, operator: Operator, firings: list[Firing], step: int) -> None:
        """To all ranks of a gang, when they are there and at the present step."""
        gang = self.keeper.gang_of(operator.role)
        for some in self._in_calls(firings):
            if gang is None or not self.spread.has_room(operator.role):
                return
            ids = self._ids(some)
            shares = [
                [self.book.groups[group_id] for group_id in share]
                for share in self.book.dealt(ids, gang.size)
            ]
            for firing in some:
                self.flow.start(firing)
            self.spread.send(gang, operator.method, some, ids, shares, step=step)

    def _send_to_plane(self, firings: list[Firing], step: int) -> None:
        """No policy is sent along: the plane has what was published, and each request says how old it may be."""
        plane, published = self.plane, self.policies.published
        if plane is None or published is None:
            return
        for firing in firings:
            self.flow.start(firing)
        if not firings[0].groups:
            for firing in firings:
                version = min(self._version_of(firing), published.version)
                plane.evaluate(firing, self.held_out(self.run.held_out), version=version)
            return
        asked = [(firing, [self.book.groups[i] for i in self._ids([firing])]) for firing in firings]
        if self.in_order:
            plane.ask(asked, min_version=max(0, step - 1 - self.spec.max_staleness))
            return
        versions: dict[int, list[tuple[Firing, list[Group]]]] = {}
        for firing, groups in asked:
            version = self.book.asked_of.get(groups[0].id, published.version)
            versions.setdefault(version, []).append((firing, groups))
        for version, some in versions.items():
            self._asked([group.id for _, groups in some for group in groups], version)
            plane.ask(some, min_version=version)

    def _asked(self, ids: list[int], version: int) -> None:
        """Out of order, a group's deadline follows from the policy that it was asked of; also for a later trainer."""
        if self.arrival is not None:
            new = [group_id for group_id in ids if group_id not in self.book.asked_of]
            if new:
                self.book.asked(new, version)
            for group_id in ids:
                self.arrival.asked(group_id, version)

    def _hear_one(self, firings: list[Firing], ids: list[int], member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self.inbox.put(("one", (firings, ids, member, outcome_of(done))))

    # -- feeding the gangs --------------------------------------------------------------------------

    def _feed_gangs(self) -> None:
        """Micro-batches as far as there is room: first those that are recorded and were not sent to this gang, then
        new ones."""
        if self.keeper.gang is None or (self.plane is not None and self.plane.devices_lent):
            return
        for group_id, verdict in self.assembly.refresh():
            self._drop(group_id, verdict)
        self.feeder.feed()

    def _could_train(self) -> bool:
        """Whether there is something for the gangs to do, or no gang to do it."""
        gangs = {operator.ref for operator in self.operators.values() if operator.dispatch is Dispatch.GANG}
        return (
            self.keeper.gang is None
            or self.assembly.has_news
            or any(firing.operator in gangs for firing in self.flow.enabled())
        )

    def _check_staleness(self, shares: list[list[Group]], step: int) -> None:
        if self.spec.staleness.function is not None:
            return  # it has said what it thinks
        oldest = step - 1 - self.spec.max_staleness
        for group in (group for share in shares for group in share):
            if group.versions is not None and group.versions[0] < oldest:
                raise GyreError(
                    f"group {group.id} has tokens of policy version {group.versions[0]}; step {step} with "
                    f"max_staleness {self.spec.max_staleness} permits {oldest} and newer.",
                    hint="This is a defect in Gyre's flow.",
                )

    def _check_progress(self) -> None:
        """A function of the user's that lets everybody wait, while nothing else can happen, would do so for ever."""
        if self.arrival is None or self.spec.staleness.function is None or self.keeper.gang is None:
            return
        if self.feeder.is_calling or any(self.flow.running(ref) for ref in self.operators):
            return
        could_start = any(firing.operator != self.taker.ref for firing in self.flow.enabled())
        if self.arrival.waiting and not could_start:
            raise UserCodeError(
                f"{self.spec.staleness.policy} lets {self.arrival.waiting} groups wait, and there is nothing to wait "
                f"for: no step can be made from policy version {self.book.step}.",
                hint="Let it train or drop some of what is there.",
            )

    # -- taking results in --------------------------------------------------------------------------

    def _one_ended(
        self, firings: list[Firing], ids: list[int], member: Member, outcome: Outcome | VertexLost
    ) -> None:
        self.calls.ended(member)
        if isinstance(outcome, VertexLost):
            self.runtime.membership.doubt(*member)
            self.calls.distrust(member)
            for firing in firings:
                self.flow.cancel(firing)
            return
        status, value = outcome
        failure = value if status == "error" else self._refusal(firings, ids, value)
        if failure is not None:
            self.calls.distrust(member)
            self._firings_failed(firings, member, failure)
            return
        if ids:
            self._took(firings, value)
        else:
            self.retries.succeeded((firings[0].operator, firings[0].index))
            self._evaluated(value)
            version = self._version_of(firings[0])
            self._leave_out(
                version, f"version {value['version']} was served by then, and was evaluated instead"
            )
            self.flow.complete(firings[0])

    def _plane_answered(self, purpose: str, groups: list[Group]) -> None:
        assert self.plane is not None
        answered, unasked = self.plane.came(purpose, groups)
        if purpose != TRAIN:
            version = int(purpose.rpartition("/")[2])
            if unasked and self.evaluations.is_settled(version):  # else it comes again when it is asked for
                self.plane.judged(version, unasked)
        else:
            known = [group_id for group_id in unasked if self.book.is_settled(group_id)]
            if known:
                self.plane.written(known)
        for firing, whole in answered:
            if firing.index not in self.flow.running(firing.operator):
                continue
            if purpose == TRAIN:
                self._took([firing], whole)
            else:
                self.judging.add(version, firing, whole)
                self.judging.send(step=self.book.step, now=time.monotonic())

    def _plane_failed(self, error: GyreError) -> None:
        """Groups that nobody can generate have their place taken by others; anything else ends the run."""
        plane = self.plane
        if not isinstance(error, CannotGenerate) or plane is None:
            raise error
        purpose, evidence = error.details["purpose"], str(error)
        for group_id in error.details["ids"]:
            if not plane.waits_for(purpose, group_id):
                continue  # told before
            if purpose != TRAIN:
                answered = plane.leave_out(purpose, group_id)
                if answered is not None:
                    self._answered_without(purpose, *answered, evidence=evidence)
                continue
            by = self._prompt(self.book.cursor)
            self._set_aside(group_id, by, reason="poison", evidence=evidence)
            self.set_aside_at.append(self.book.step)
            published = self.policies.published
            version = published.version if published is not None else 0
            if self.in_order:
                step = self.book.place_of(by.id) // self.batch + 1
                version = max(0, step - 1 - self.spec.max_staleness)
            self._asked([by.id], version)
            plane.ask_instead(group_id, by, min_version=version)
        if self.set_aside_at.count(self.book.step) > self.batch:
            raise error  # not the prompts' fault: without a step in between, more than a step has were given up

    def _answered_without(self, purpose: str, firing: Firing, groups: list[Group], *, evidence: str) -> None:
        """An evaluation is whole without those that nobody can generate, or there is nothing to judge."""
        version = int(purpose.rpartition("/")[2])
        if groups:
            self.judging.add(version, firing, groups)
            self.judging.send(step=self.book.step, now=time.monotonic())
        else:
            self._leave_out(version, evidence)
            self.flow.complete(firing)

    def _set_aside(self, group_id: int, by: Group, *, reason: str, evidence: str) -> None:
        if self.arrival is not None:
            self.arrival.forget(group_id)
        tokens = self.book.set_aside(group_id, by, reason=reason, evidence=evidence)
        self.discarded[reason] = self.discarded.get(reason, 0) + tokens
        self.runtime.report(
            "GroupSetAside",
            group=group_id,
            replaced_by=by.id,
            reason=reason,
            tokens=tokens,
            evidence=evidence[:4000],
        )

    def _drop(self, group_id: int, verdict: Verdict) -> None:
        """A whole group that is too old: its prompt is answered again, or another takes its place. One without a
        gradient is always replaced."""
        place = self.book.place_of(group_id)
        if verdict is NO_GRADIENT:
            self._set_aside(
                group_id, self._prompt(self.book.cursor), reason="no_gradient", evidence=verdict.reason
            )
            self._check_dynamic_sampling()
        elif self.spec.staleness.dropped == "again":
            tokens = self.book.give_back(group_id, reason="stale", evidence=verdict.reason)
            self.discarded["stale"] = self.discarded.get("stale", 0) + tokens
        else:
            self._set_aside(group_id, self._prompt(self.book.cursor), reason="stale", evidence=verdict.reason)
        for ref in self.made_by:
            self.flow.undo(ref, place)

    def _check_dynamic_sampling(self) -> None:
        self.replaced_at.append(self.book.step)
        count, most = self.replaced_at.count(self.book.step), self.run.dynamic_sampling * self.batch
        if count > most:
            raise UserCodeError(
                f"step {self.book.step + 1}: of {count} groups all samples earned the same, more than "
                f"run.dynamic_sampling ({self.run.dynamic_sampling}) times prompts_per_step.",
                hint="The prompts are too easy or too hard for the policy, or the reward does not tell answers apart.",
            )

    def _judged(self, version: int, member: Member, outcome: Outcome | VertexLost) -> None:
        self.calls.ended(member)
        if isinstance(outcome, VertexLost):
            self.runtime.membership.doubt(*member)
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

    def _took(self, firings: list[Firing], groups: list[Group]) -> None:
        """An operator's groups are here and in order."""
        self.book.merge(groups)
        for firing in firings:
            self.retries.succeeded((firing.operator, firing.index))
            self.flow.complete(firing)
        if any(edge.source == firings[0].operator for edge in self.last_edges):
            whole = [group.id for group in groups if self._is_whole(group.id)]
            self.book.done([group_id for group_id in whole if group_id in self.book.queued])
            if self.plane is not None and whole:
                self.plane.written(whole)

    def _refusal(self, firings: list[Firing], ids: list[int], value: Any) -> Failure | None:
        """Why what an operator returned cannot be taken."""
        problem: str | None
        theirs = True
        operator = firings[0].operator
        if not ids:
            problem = problem_with_evaluation(value)
        else:
            problem = problem_with_groups(value, ids, self.book.groups)
            if problem is None and self.in_order:
                # Not the user's: a load that failed left an older policy behind, and it will be loaded again.
                oldest = self._step_of(firings[0]) - 1 - self.spec.max_staleness
                problem, theirs = problem_with_versions(value, oldest), False
        if problem is None:
            return None
        return Failure(error=f"{operator}: {problem}.", traceback="", user_code=theirs)

    def _firings_failed(self, firings: list[Firing], member: Member, failure: Failure) -> None:
        if failure.fenced:
            raise Fenced(failure.error)
        self._blame(member, firings[0].operator, failure)
        for firing in firings:
            self.retries.failed((firing.operator, firing.index), time.monotonic())
            self.flow.cancel(firing)

    def _blame(self, member: Member, operator: str, failure: Failure) -> None:
        self.runtime.report("OperatorFailed", **operator_failed(member, operator, failure))

    def _is_whole(self, group_id: int) -> bool:
        place = self.book.place_of(group_id)
        return all(self.flow.is_done(edge.source, place // edge.produce) for edge in self.last_edges)

    def _evaluated(self, value: dict[str, Any]) -> None:
        row = {"version": value["version"], "accuracy": value["accuracy"], "count": value["count"]}
        if self.evaluations.add(row):
            self.runtime.report("Evaluated", **row)

    def _leave_out(self, version: int, reason: str) -> None:
        """Unless the version has a result."""
        if self.evaluations.leave_out(version, reason[:1000]):
            self.runtime.report("EvaluationLeftOut", version=version, reason=reason[:1000])

    def _is_dead(self, gang: Gang, rank: int, outcome: Outcome | VertexLost) -> bool:
        """Whether the rank died in a call that counts. Its gang is then dropped."""
        if not isinstance(outcome, VertexLost):
            return False
        self.runtime.membership.doubt(*gang.members[rank])
        self._drop_gang(GangLost())
        return True

    def _rank_ended(self, call: GangCall, rank: int, outcome: Outcome | VertexLost) -> None:
        call.outcomes[rank] = outcome
        if not self.feeder.is_current(call) or self._is_dead(call.gang, rank, outcome):
            return
        try:
            values = self.feeder.ended(call)
            if values is None:
                return
            if call.batch is not None:
                self.feeder.taken(call.gang.role, call.batch)
            else:
                self._optimizer_stepped(call, values[0])
        except GangLost as lost:
            self._drop_gang(lost)

    def _spread_ended(self, call: SpreadCall, rank: int, outcome: Outcome | VertexLost) -> None:
        call.outcomes[rank] = outcome
        if not self.spread.is_current(call) or self._is_dead(call.gang, rank, outcome):
            return
        try:
            groups = self.spread.ended(call)
        except GangLost as lost:
            self._drop_gang(lost)
            return
        if groups is None:
            return
        failure = self._refusal(call.firings, call.ids, groups)
        if failure is not None:
            self._firings_failed(call.firings, call.gang.members[0], failure)
        else:
            self._took(call.firings, groups)

    def _optimizer_stepped(self, call: GangCall, metrics: dict[str, Any]) -> None:
        """Raises GangLost."""
        if call.firing.operator != self.pace.ref:
            self.steps.beside(call.gang.role, metrics)
            self.flow.complete(call.firing)
            return
        self.steps.ended(call.gang, metrics)
        self.feeder.begin_step()
        self.flow.complete(call.firing)
        self.keeper.step_was_good()
        self.keeper.checkpoint_if_due(call.gang)

    def _check_gangs(self) -> None:
        try:
            self.feeder.check_failed(time.monotonic())
            self.spread.check_failed(time.monotonic())
        except GangLost as lost:
            self._drop_gang(lost)

    def _drop_gang(self, lost: GangLost) -> None:
        self.keeper.drop(lost)
        for firing in self.spread.give_up():
            self.flow.cancel(firing)
        self.feeder.rewind()

    # -- telling ------------------------------------------------------------------------------------

    def _tell_progress(self) -> None:
        self.waits.look(self.flow, self.operators, time.monotonic())
        if self.plane is not None:
            self.plane.look(
                self.flow,
                self.operators,
                wanted=self.runtime.membership.wanted("rollout"),
                could_train=self._could_train(),
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
            staleness_mean=metrics.get("staleness_mean"),
            groups_waiting=len(self.book.whole),
            groups_set_aside=self.book.set_aside_count,
            tokens_discarded=dict(self.discarded),
            waits=self.waits.shares(),
            checkpoint_step=self.book.checkpoint_step,
        )

    def _finish(self) -> dict[str, Any]:
        # What a checkpoint lacks is in the ledger, and is replayed; what ranks keep in memory goes with them.
        with contextlib.suppress(GangLost):
            if self.keeper.gang is not None and self.book.checkpoint_step != self.book.step:
                self.keeper.checkpoint(self.keeper.gang)  # told to stop
            self.keeper.end()
        account = self.ledger.account()
        rows = self.evaluations.rows
        self._tell_progress()
        return {
            "steps": self.book.step,
            "prompts": account.drawn,
            "prompts_lost": len(account.lost)
            if self.runtime.should_stop
            else account.drawn - account.trained - account.set_aside,
            "prompts_set_aside": account.set_aside,
            "trained_twice": len(account.trained_twice),
            "accuracy_first": rows[0]["accuracy"] if rows else None,
            "accuracy_last": rows[-1]["accuracy"] if rows else None,
            "tokens": self.book.tokens,
            "tokens_discarded": account.discarded,
            "digest": self.book.digests.get(self.book.step, ""),
        }
