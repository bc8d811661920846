"""The built-in trainer: walks whatever graph it is given.

It fires an operator when its inputs are there and its outputs have room (`gyre.graph.flow`), sends the firing to
a free vertex or to the whole gang, writes what comes back into the sample ledger, and closes the cycle over the
weights edge. It holds no recipe: GRPO is the graph in `gyre.graph.recipes`.

Invariants:
- *written before trained*, *batches are fixed*: see `gyre.rollouts.ledger`;
- *a step is in the ledger before its weights are out*: no policy version is served that a restart could lose;
- *no old weights*: a vertex is given the newest version together with the call that needs it, and what it
  returns is checked against the staleness bound, token by token;
- *a firing is repeated whole*: on another vertex, with the same groups.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import queue
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack

from gyre.errors import Fenced, GyreError, UserCodeError, VertexLost
from gyre.graph import compile_job
from gyre.graph.flow import Firing, Flow
from gyre.graph.model import Dispatch, EdgeKind, Operator
from gyre.rollouts.ledger import SampleLedger
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseTrainer
from gyre.workloads.evaluations import Evaluations
from gyre.workloads.gang import Gang, GangLost, Outcome, outcome_of
from gyre.workloads.plane_calls import TRAIN, PlaneCalls
from gyre.workloads.protocol import Failure
from gyre.workloads.returned import problem_with_evaluation, problem_with_groups, problem_with_versions
from gyre.workloads.roster import Member
from gyre.workloads.waits import WaitClock

CALLS_PER_VERTEX = 2
"""Firings sent to one vertex at a time: one in work, one waiting, so that it never idles for a round trip."""

KEPT_CHECKPOINTS = 2

INITIAL_POLICY = "initial_policy.msgpack"

RETRY_FIRST_S, RETRY_MAX_S = 0.2, 5.0
"""Pause before a failed firing is sent again, doubled each time: the budgets are the master's to count, and a
call that fails at once must not be repeated a thousand times a second while the master is away."""

IDLE_POLL_S = 0.25
"""How long the loop sleeps without news; it bounds how late a pause or stop is noticed."""


@dataclass(frozen=True, slots=True)
class Published:
    """A policy version that may be served, and what stands for its weights in calls."""

    version: int
    checksum: str
    bundle: Any

    @property
    def identity(self) -> tuple[int, str]:
        """Both: a step without gradient makes a new version of the same bytes, and a replay that diverged
        would make other bytes of the same version."""
        return self.version, self.checksum


@dataclass(slots=True)
class _GangFiring:
    firing: Firing
    gang: Gang
    outcomes: list[Outcome | VertexLost | None]


@dataclass(slots=True)
class _Tries:
    count: int = 0
    not_before: float = 0.0


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
        paces = [
            operator
            for operator in self.dcg.operators
            if operator.dispatch is Dispatch.GANG
            and any(edge.kind is EdgeKind.WEIGHTS for edge in self.dcg.out_of(operator.ref))
        ]
        if len(paces) != 1:
            raise GyreError(
                f"the graph has {len(paces)} gang operators with weights going out; the built-in trainer needs one.",
                hint="Write a trainer with a fit() for other shapes.",
            )
        self.pace = paces[0]
        self.batch = self.run.prompts_per_step
        feeders = [self.operators[edge.source] for edge in self.dcg.into(self.pace.ref)]
        self.taker: Operator = next(op for op in feeders if op.dispatch is Dispatch.GANG)
        """The gang operator that takes samples: what flows into it is in the ledger."""
        self.micro_batches = next(
            edge.consume for edge in self.dcg.into(self.pace.ref) if edge.source == self.taker.ref
        )
        self.uses_plane = any(op.dispatch is Dispatch.PLANE for op in self.dcg.operators)
        self.last_edges = [e for e in self.dcg.into(self.taker.ref) if e.kind is EdgeKind.SAMPLES]
        self.flow = Flow(self.dcg, pace=self.pace.ref, count=self.run.steps)

    def _recover(self) -> None:
        """Take up where the ledger says the last trainer stood; nothing that is done is done again."""
        directory = self.context.directory
        directory.mkdir(parents=True, exist_ok=True)
        self.evaluations = Evaluations(directory / "evaluations.jsonl")
        self.evaluations.load()
        found = self.ledger.open()
        self.step = found.step
        self.cursor = found.cursor
        self.digests = found.digests
        self.groups: dict[int, Group] = found.groups
        self.checkpoint_step = found.checkpoint_step
        self.checkpoint_path = found.checkpoint_path
        self._remove_old_checkpoints()
        self.published: Published | None = None
        self.initial: Published | None = None
        """What training began with, for reference models; kept in a file, for the actor moves on."""
        self.gang: Gang | None = None
        self.gang_count = 0
        self.gang_not_before = 0.0
        self.gang_tries = 0
        self.loaded: dict[Member, tuple[int, str]] = {}
        self.in_flight: dict[Member, int] = {}
        self.gang_firings: dict[tuple[str, int], _GangFiring] = {}
        self.tries: dict[tuple[str, int], _Tries] = {}
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.tokens = sum(int(row.get("tokens", 0)) for row in found.metrics.values())
        self.speed_tokens_s = 0.0
        self.last_step_at = time.monotonic()
        self.waits = WaitClock()
        self.plane: PlaneCalls | None = None
        self.judging: dict[int, tuple[Firing, int, list[Group]]] = {}
        """Evaluations that the plane has answered and the reward role has not, by version."""
        self.judging_sent: set[int] = set()
        if self.uses_plane:
            self.plane = PlaneCalls(
                directory,
                self.config,
                term=self.runtime.term,
                stop_token_ids=getattr(self.data, "stop_token_ids", ()),
                hear=lambda purpose, groups: self.inbox.put(("plane", (purpose, groups))),
                fail=lambda error: self.inbox.put(("plane_failed", error)),
            )
        self.runtime.roster.listen(lambda: self.inbox.put(("roster", None)))

        have = self.groups.keys()
        trained = self.step * self.batch
        for operator in self.dcg.operators:
            ref = operator.ref
            if operator.dispatch is Dispatch.GANG:
                continue
            if not any(edge.kind is EdgeKind.SAMPLES for edge in self._edges_of(ref)):
                every = max(1, self.dcg.into(ref)[0].consume)
                self.flow.mark_done(ref, range(-(-self.step // every)))
                continue
            total = self.flow.total(ref)
            self.flow.mark_done(
                ref,
                (
                    index
                    for index in range(total)
                    if all(g < trained or g in have for g in self.flow.firing(ref, index).groups)
                ),
            )
        self._rewind_gang()

    def _edges_of(self, ref: str) -> tuple[Any, ...]:
        return (*self.dcg.into(ref), *self.dcg.out_of(ref))

    def _rewind_gang(self) -> None:
        self.flow.rewind(self.taker.ref, 0)
        self.flow.mark_done(self.taker.ref, range(self.step * self.micro_batches))
        self.flow.rewind(self.pace.ref, 0)
        self.flow.mark_done(self.pace.ref, range(self.step))
        self.gang_firings.clear()

    def _loop(self) -> None:
        runtime = self.runtime
        while not self._is_complete():
            if runtime.should_stop and not self._busy():
                return
            if self.gang is None and time.monotonic() >= self.gang_not_before:
                self._form_gang()
            if not runtime.paused and not runtime.should_stop:
                self._dispatch()
            self._take_news()
            self._tell_progress()

    def _is_complete(self) -> bool:
        """All has fired, and what came of it is in a checkpoint."""
        return self.flow.finished and self.checkpoint_step == self.step

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
            elif self.gang is not None and not self.gang.is_current():
                self._drop_gang(GangLost())
            try:
                kind, content = self.inbox.get_nowait()
            except queue.Empty:
                return

    # -- sending firings out ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        now = time.monotonic()
        for version in self.judging.keys() - self.judging_sent:
            self._judge(version)
        again = True
        while again:
            again = False
            for firing in sorted(self.flow.enabled(), key=self._urgency):
                tries = self.tries.get((firing.operator, firing.index))
                if tries is not None and now < tries.not_before:
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
        for group_id in firing.groups:
            group = self.prompt(group_id)
            if group.id != group_id:
                raise UserCodeError(
                    f"prompt({group_id}) gave a group with the id {group.id}.",
                    hint="A group's id is the index that it was asked for by.",
                )
            self.groups[group_id] = group
        if firing.groups and firing.groups[-1] >= self.cursor:
            new = [group_id for group_id in firing.groups if group_id >= self.cursor]
            self.cursor = firing.groups[-1] + 1
            self.ledger.drawn(new, self.cursor)
        self.flow.complete(firing)

    def _send_to_one(self, operator: Operator, firing: Firing) -> None:
        fed = any(edge.kind is EdgeKind.WEIGHTS for edge in self.dcg.into(operator.ref))
        needs_weights = fed or operator.initial_policy
        published = self.initial if operator.initial_policy else self.published
        if needs_weights and published is None:
            return
        member = self._free_member(operator.role)
        if member is None:
            return
        options: dict[str, Any] = {}
        if needs_weights and published is not None and self.loaded.get(member) != published.identity:
            options["bundle"] = published.bundle
            self.loaded[member] = published.identity
        groups = [self.groups[group_id] for group_id in firing.groups]
        if not firing.groups:
            groups = self.held_out(self.run.held_out)
        self.flow.start(firing)
        self.in_flight[member] = self.in_flight.get(member, 0) + 1
        step = firing.groups[0] // self.batch + 1 if firing.groups else self.step
        future = self.runtime.transport.submit(
            *member, operator.method, groups, **options, _gyre_step=step, _gyre_index=firing.index
        )
        future.add_done_callback(partial(self._hear_one, firing, member))

    def _send_to_plane(self, firing: Firing) -> None:
        """No policy is sent along: the plane has what was published, and each request says how old it may be."""
        plane, published = self.plane, self.published
        if plane is None or published is None:
            return
        self.flow.start(firing)
        if firing.groups:
            step = firing.groups[0] // self.batch + 1
            oldest = max(0, step - 1 - self.spec.max_staleness)
            plane.ask(firing, [self.groups[group_id] for group_id in firing.groups], min_version=oldest)
        else:
            plane.evaluate(firing, self.held_out(self.run.held_out), version=published.version)

    def _hear_one(self, firing: Firing, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self.inbox.put(("one", (firing, member, outcome_of(done))))

    def _free_member(self, role: str) -> Member | None:
        """The running vertex of the role with the fewest firings on it, if one has room."""
        members = self.runtime.roster.members(role)
        if not members:
            return None
        best = min(members, key=lambda member: self.in_flight.get(member, 0))
        return best if self.in_flight.get(best, 0) < CALLS_PER_VERTEX else None

    def _send_to_gang(self, operator: Operator, firing: Firing) -> None:
        gang = self.gang
        if gang is None:
            return
        per_rank: list[tuple[Any, ...]]
        step = self.step + 1
        kwargs: dict[str, Any] = {"_gyre_step": step}
        if firing.groups:
            groups = [self.groups[group_id] for group_id in firing.groups]
            self._check_staleness(groups, step)
            per_rank = [(groups[rank :: gang.size],) for rank in range(gang.size)]
            kwargs["_gyre_index"] = firing.index % self.micro_batches
        else:
            per_rank = [()] * gang.size
            kwargs["_gyre_indices"] = self.micro_batches
            kwargs["_gyre_group_ids"] = self._ids_of(step)
        self.flow.start(firing)
        pending = _GangFiring(firing, gang, [None] * gang.size)
        self.gang_firings[(firing.operator, firing.index)] = pending
        for rank, future in enumerate(gang.submit(operator.method, per_rank, **kwargs)):
            future.add_done_callback(partial(self._hear_rank, pending, rank))

    def _hear_rank(self, pending: _GangFiring, rank: int, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self.inbox.put(("rank", (pending, rank, outcome_of(done))))

    def _ids_of(self, step: int) -> list[int]:
        return list(range((step - 1) * self.batch, step * self.batch))

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
        self.in_flight[member] = max(0, self.in_flight.get(member, 0) - 1)
        if firing.index not in self.flow.running(firing.operator):
            return
        if isinstance(outcome, VertexLost):
            self.runtime.roster.doubt(*member)
            self.loaded.pop(member, None)
            self.flow.cancel(firing)
            return
        status, value = outcome
        if status == "error":
            self.loaded.pop(member, None)
            self._firing_failed(firing, member, value)
            return
        refusal = self._refusal(firing, value)
        if refusal is not None:
            self.loaded.pop(member, None)
            self._firing_failed(firing, member, refusal)
            return
        if firing.groups:
            self._took(firing, value)
        else:
            self.tries.pop((firing.operator, firing.index), None)
            self._evaluated(value)
            self.flow.complete(firing)

    def _plane_answered(self, purpose: str, groups: list[Group]) -> None:
        assert self.plane is not None
        answered, unasked = self.plane.came(purpose, groups)
        if purpose != TRAIN:
            if unasked:
                self.plane.judged(int(purpose.rpartition("/")[2]), unasked)
        else:
            known = [g for g in unasked if g < self.step * self.batch or self._is_written(g)]
            if known:
                self.plane.written(known)
        for firing, whole in answered:
            if firing.index not in self.flow.running(firing.operator):
                continue
            if purpose == TRAIN:
                self._took(firing, whole)
            else:
                version = int(purpose.rpartition("/")[2])
                self.judging[version] = (firing, version, whole)
                self._judge(version)

    def _is_written(self, group_id: int) -> bool:
        return group_id in self.groups and bool(self.groups[group_id].samples) and self._is_whole(group_id)

    def _judge(self, version: int) -> None:
        """Let the reward role say how good an evaluation is."""
        firing, _, groups = self.judging[version]
        tries = self.tries.get((firing.operator, firing.index))
        member = self._free_member("reward")
        if member is None or (tries is not None and time.monotonic() < tries.not_before):
            return  # `_dispatch` asks again
        self.in_flight[member] = self.in_flight.get(member, 0) + 1
        future = self.runtime.transport.submit(*member, "score", groups, _gyre_step=self.step, _gyre_index=0)
        future.add_done_callback(lambda done: self.inbox.put(("judged", (version, member, outcome_of(done)))))
        self.judging_sent.add(version)

    def _judged(self, version: int, member: Member, outcome: Outcome | VertexLost) -> None:
        self.in_flight[member] = max(0, self.in_flight.get(member, 0) - 1)
        self.judging_sent.discard(version)
        if isinstance(outcome, VertexLost):
            self.runtime.roster.doubt(*member)
            return
        status, value = outcome
        firing, _, groups = self.judging[version]
        if status == "error":
            tries = self.tries.setdefault((firing.operator, firing.index), _Tries())
            tries.count += 1
            tries.not_before = time.monotonic() + min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (tries.count - 1))
            self._blame(member, "reward.score", value)
            return
        del self.judging[version]
        self.tries.pop((firing.operator, firing.index), None)
        rewards = [sample.reward or 0.0 for group in value for sample in group.samples]
        right = sum(reward >= 1.0 for reward in rewards)
        self._evaluated({"version": version, "accuracy": right / max(1, len(rewards)), "count": len(rewards)})
        assert self.plane is not None
        self.plane.judged(version, [group.id for group in groups])
        self.flow.complete(firing)

    def _took(self, firing: Firing, groups: list[Group]) -> None:
        """An operator's groups are here and in order."""
        self.tries.pop((firing.operator, firing.index), None)
        self._merge(groups)
        self.flow.complete(firing)
        if any(edge.source == firing.operator for edge in self.last_edges):
            whole = [group_id for group_id in firing.groups if self._is_whole(group_id)]
            if whole:
                self.ledger.done([self.groups[group_id] for group_id in whole])
                if self.plane is not None:
                    self.plane.written(whole)

    def _refusal(self, firing: Firing, value: Any) -> Failure | None:
        """Why what an operator returned cannot be taken."""
        problem: str | None
        theirs = True
        if not firing.groups:
            problem = problem_with_evaluation(value)
        else:
            problem = problem_with_groups(value, firing.groups, self.groups)
            if problem is None:
                # Not the user's: a load that failed left an older policy behind, and it will be loaded again.
                problem, theirs = problem_with_versions(value, self.batch, self.spec.max_staleness), False
        if problem is None:
            return None
        return Failure(error=f"{firing.operator}: {problem}.", traceback="", user_code=theirs)

    def _firing_failed(self, firing: Firing, member: Member, failure: Failure) -> None:
        if failure.fenced:
            raise Fenced(failure.error)
        tries = self.tries.setdefault((firing.operator, firing.index), _Tries())
        tries.count += 1
        tries.not_before = time.monotonic() + min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (tries.count - 1))
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

    def _merge(self, returned: list[Group]) -> None:
        """What operators add to a group comes together here, whichever of them ends first."""
        for new in returned:
            mine = self.groups[new.id]
            if not mine.samples:
                mine.samples = new.samples
                continue
            for sample, update in zip(mine.samples, new.samples, strict=True):
                sample.reward = update.reward if update.reward is not None else sample.reward
                sample.extras |= update.extras

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
                self._step_done(pending.gang, values[0])
            self.flow.complete(firing)
            if firing.operator == self.pace.ref:
                self.gang_tries = 0  # only now: what fails may come after calls that succeed
                self._checkpoint_if_due(pending.gang)
        except GangLost as lost:
            self._drop_gang(lost)

    # -- steps, versions, checkpoints ---------------------------------------------------------------

    def _step_done(self, gang: Gang, metrics: dict[str, Any]) -> None:
        """The optimizer has stepped: the ledger first, then the weights go out."""
        step = self.step + 1
        manifest, buffer = gang.call_rank0("export_weights", version=step, timeout_s=self.run.call_timeout_s)
        ids = self._ids_of(step)
        lag = [step - 1 - v[0] for v in (self.groups[g].versions for g in ids) if v is not None]
        now = time.monotonic()
        seconds, self.last_step_at = now - self.last_step_at, now
        tokens = sum(self.groups[g].token_count for g in ids)
        self.tokens += tokens
        rate = tokens / max(seconds, 1e-9)
        self.speed_tokens_s = rate if not self.speed_tokens_s else 0.8 * self.speed_tokens_s + 0.2 * rate
        told = {
            **{
                key: value
                for key, value in metrics.items()
                if isinstance(value, int | float) and math.isfinite(value)
            },
            "tokens": tokens,
            "seconds": seconds,
            "staleness_max": max(lag, default=0),
        }
        self.ledger.trained(
            step=step,
            version=step,
            digest=manifest["checksum"],
            group_ids=ids,
            metrics=told,
            now=time.time(),
        )
        self.step = step
        self.digests[step] = manifest["checksum"]
        self.metrics = told
        self.runtime.report("StepCompleted", step=step, version=step, metrics=told)
        self._publish(gang, manifest, buffer)

    def _publish(self, gang: Gang, manifest: dict[str, Any], buffer: bytes) -> None:
        before = self.published
        if self.plane is not None:
            version = manifest["version"]
            self.plane.publish(
                *gang.call_rank0("export_model", version=version, timeout_s=self.run.call_timeout_s)
            )
        self.published = Published(
            manifest["version"], manifest["checksum"], self.runtime.transport.share((manifest, buffer))
        )
        if before is None or before.version < manifest["version"]:
            self.runtime.report(
                "WeightsPublished",
                version=manifest["version"],
                step=manifest["step"],
                checksum=manifest["checksum"],
                size_bytes=manifest["size_bytes"],
                base=before.version if before else None,
            )

    def _checkpoint_if_due(self, gang: Gang) -> None:
        if self.step % self.run.checkpoint_every == 0 or self.step == self.run.steps:
            self._checkpoint(gang)

    def _checkpoint(self, gang: Gang) -> None:
        """Every rank writes below a temporary folder; its renaming and the ledger's row commit it."""
        root = self.context.directory / "checkpoints"
        final = root / f"step_{self.step:08d}"
        partial = root / f".partial_{self.step:08d}_{self.runtime.term}_{gang.number}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        gang.call("checkpoint", partial, timeout_s=self.run.call_timeout_s)
        if final.exists():
            shutil.rmtree(final)  # renamed by a trainer that died before the ledger knew of it
        partial.rename(final)
        self.ledger.checkpoint(step=self.step, path=final, now=time.time())
        self.checkpoint_step, self.checkpoint_path = self.step, final
        self.runtime.report("CheckpointCommitted", step=self.step, path=str(final))
        for group_id in [g for g in self.groups if g < self.step * self.batch]:
            del self.groups[group_id]
        self._remove_old_checkpoints()

    def _remove_old_checkpoints(self) -> None:
        """Those that newer ones replace, and what deaths left unfinished."""
        final = self.checkpoint_path
        if final is None:
            return
        kept = sorted(path for path in final.parent.glob("step_*") if path <= final)
        for old in (*kept[:-KEPT_CHECKPOINTS], *final.parent.glob(".partial_*")):
            shutil.rmtree(old, ignore_errors=True)

    # -- the gang's life ----------------------------------------------------------------------------

    def _form_gang(self) -> None:
        members = self.runtime.roster.whole(self.pace.role)
        if members is None:
            return
        self.gang_count += 1
        gang = Gang(
            self.gang_count,
            self.pace.role,
            tuple(members),
            self.runtime.roster,
            self.runtime.transport,
            self.runtime.waiting,
        )
        try:
            self._bring_up(gang)
            if self.checkpoint_step != self.step:
                self._checkpoint_if_due(gang)  # one that an earlier gang or trainer did not live to write
        except GangLost as lost:
            self._drop_gang(lost)
            return
        self.gang = gang
        self._rewind_gang()
        self.last_step_at = time.monotonic()

    def _bring_up(self, gang: Gang) -> None:
        """From whatever state the ranks are in to the ledger's last step, exactly."""
        timeout_s = self.run.call_timeout_s
        if self.checkpoint_step is None:
            gang.call("warm_start", timeout_s=timeout_s)
            self._keep_initial(gang)
            self._checkpoint(gang)
        else:
            states = gang.call("state", timeout_s=timeout_s)
            steps = {state["step"] for state in states}
            living = len(steps) == 1 and len({state["digest"] for state in states}) == 1
            at = max(steps)
            if not living or at <= self.checkpoint_step or at > self.step + 1:
                gang.call("restore", self.checkpoint_path, timeout_s=timeout_s)
                at = self.checkpoint_step
            for step in range(at + 1, self.step + 1):
                self._replay(gang, step)
            if at == self.step + 1:
                # The optimizer stepped, but the trainer died before the ledger had it.
                self._step_done(
                    gang,
                    gang.call(
                        self.pace.method,
                        _gyre_step=at,
                        _gyre_indices=0,
                        _gyre_group_ids=[],
                        timeout_s=timeout_s,
                    )[0],
                )
                self._checkpoint_if_due(gang)
        self._serve_initial()
        gang.call("begin", self.step + 1, timeout_s=timeout_s)
        if self.published is None or self.published.version < self.step:
            manifest, buffer = gang.call_rank0("export_weights", version=self.step, timeout_s=timeout_s)
            known = self.digests.get(self.step)
            if known is not None and known != manifest["checksum"]:
                self._blame(
                    gang.members[0],
                    "restore",
                    Failure(
                        error=f"replaying step {self.step} gave weights {manifest['checksum']}, the ledger has {known}",
                        traceback="",
                        user_code=False,
                    ),
                )
            self._publish(gang, manifest, buffer)

    def _keep_initial(self, gang: Gang) -> None:
        """Before the first checkpoint commits, so that whoever finds that one finds this too."""
        if any(operator.initial_policy for operator in self.dcg.operators):
            bundle = gang.call_rank0("export_weights", version=0, timeout_s=self.run.call_timeout_s)
            path = self.context.directory / INITIAL_POLICY
            path.with_suffix(".partial").write_bytes(msgpack.packb(bundle))
            path.with_suffix(".partial").rename(path)

    def _serve_initial(self) -> None:
        path = self.context.directory / INITIAL_POLICY
        if self.initial is None and path.exists():
            manifest, buffer = msgpack.unpackb(path.read_bytes())
            shared = self.runtime.transport.share((manifest, buffer))
            self.initial = Published(manifest["version"], manifest["checksum"], shared)

    def _replay(self, gang: Gang, step: int) -> None:
        """Train a step again that the restored checkpoint does not cover: same groups, same micro-batches."""
        timeout_s = self.run.call_timeout_s
        gang.call("begin", step, timeout_s=timeout_s)
        ids = self._ids_of(step)
        size = self.batch // self.micro_batches
        for index in range(self.micro_batches):
            groups = [self.groups[g] for g in ids[index * size : (index + 1) * size]]
            per_rank = [(groups[rank :: gang.size],) for rank in range(gang.size)]
            futures = gang.submit(self.taker.method, per_rank, _gyre_step=step, _gyre_index=index)
            gang.gather(self.taker.method, futures, timeout_s=timeout_s)
        gang.call(
            self.pace.method,
            _gyre_step=step,
            _gyre_indices=self.micro_batches,
            _gyre_group_ids=ids,
            timeout_s=timeout_s,
        )
        self.report_progress(replayed_step=step)

    def _drop_gang(self, lost: GangLost) -> None:
        self.gang = None
        self._rewind_gang()
        self.gang_not_before = 0.0
        if lost.blamed is not None:
            member, operator, failure = lost.blamed
            self.gang_tries += 1
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** (self.gang_tries - 1))
            self.gang_not_before = time.monotonic() + pause_s
            self._blame(member, operator, failure)

    # -- telling ------------------------------------------------------------------------------------

    def _tell_progress(self) -> None:
        self.waits.look(self.flow, self.operators, time.monotonic())
        rows = self.evaluations.rows
        metrics = getattr(self, "metrics", {})
        self.report_progress(
            step=self.step,
            steps=self.run.steps,
            version=self.published.version if self.published else -1,
            reward=metrics.get("reward_mean"),
            accuracy=rows[-1]["accuracy"] if rows else None,
            accuracy_first=rows[0]["accuracy"] if rows else None,
            accuracy_version=rows[-1]["version"] if rows else None,
            tokens=self.tokens,
            tokens_per_s=round(self.speed_tokens_s, 1),
            step_s=metrics.get("seconds"),
            staleness=metrics.get("staleness_max"),
            waits=self.waits.shares(),
            checkpoint_step=self.checkpoint_step,
        )

    def _finish(self) -> dict[str, Any]:
        if self.gang is not None and self.checkpoint_step != self.step:
            # Told to stop: what the checkpoint lacks is in the ledger, and is replayed.
            with contextlib.suppress(GangLost):
                self._checkpoint(self.gang)
        account = self.ledger.account()
        rows = self.evaluations.rows
        self._tell_progress()
        return {
            "steps": self.step,
            "prompts": account.drawn,
            "prompts_lost": len(account.lost)
            if self.runtime.should_stop
            else account.drawn - account.trained,
            "trained_twice": len(account.trained_twice),
            "accuracy_first": rows[0]["accuracy"] if rows else None,
            "accuracy_last": rows[-1]["accuracy"] if rows else None,
            "tokens": self.tokens,
            "digest": self.digests.get(self.step, ""),
        }
