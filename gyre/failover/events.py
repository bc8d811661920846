"""Events: every input of the control plane's decisions, in the past tense.

An event is data: `kind_of` and `body_of` turn it into what the journal keeps, `event_from` turns that back. A
field added later needs a default, so that old histories still fold.

Events that the trainer reports carry its `incarnation` and the number of the `report`, counted from 1 in each
incarnation: a report that comes twice, because a master died before acknowledging it, is known by that number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gyre.config import JOIN_SCOPE
from gyre.failover.evaluation import Evaluation
from gyre.failover.state import fields_of


class Event:
    """The common base; see the subclasses."""


class ReportedEvent(Event):
    """What a vertex reports: `RolloutsChanged` and `ScaleAdvised` are the rollout manager's, `Reported` and
    `ReportRefused` any vertex's, the others are the trainer's. `report` is its number, from 1 in each incarnation."""

    incarnation: int
    report: int


@dataclass(frozen=True, slots=True)
class JobSubmitted(Event):
    """The first event of every history. `roles` is the number of vertices wanted of each role. `weights_from` says
    whose weights the job begins with, if not its model's: they lie in its own folder, which its spec names."""

    job_id: str
    name: str
    roles: dict[str, int]
    weights_from: str = ""


@dataclass(frozen=True, slots=True)
class JobContinued(Event):
    """An ended job goes on, with so many vertices of each role. `changes` are those of its spec, as
    `gyre.config.changes` has them: from here on another spec is in force."""

    roles: dict[str, int]
    changes: dict[str, list[Any]] = field(default_factory=dict)
    by: str = "user"


@dataclass(frozen=True, slots=True)
class MasterStarted(Event):
    """A master took the job over: its epoch fences every older one."""

    epoch: int
    pid: int
    node: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class VertexStarted(Event):
    """The process lives and its `setup()` has returned."""

    vertex: str
    incarnation: int
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class VertexStartFailed(Event):
    """It could not be started: mostly because its `setup()` raised."""

    vertex: str
    incarnation: int
    error: str
    traceback: str = ""
    user_code: bool = False
    node: str = ""
    """The machine on which it was tried, if there is another."""
    code: str = ""
    place: str = ""
    method: str = ""
    """As in `OperatorFailed`."""


@dataclass(frozen=True, slots=True)
class VertexWaitsForRoom(Event):
    """No machine has room for the vertex. The scheduler goes on trying; the event comes again when what is missing
    has changed."""

    vertex: str
    incarnation: int
    required: str
    available: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class VertexFoundRoom(Event):
    """A vertex that waited for room has its place, and its process starts."""

    vertex: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DiskFilled(Event):
    """The disk of `where`, on the machine `node` ("": the master's), has fewer than `required_bytes` left. It comes
    again where the disk is fuller by far."""

    where: str
    required_bytes: int
    available_bytes: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class DiskHasRoom(Event):
    """A disk that was full has room again."""

    where: str
    available_bytes: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class VertexLost(Event):
    """`cause` is a `Cause` value; `evidence` holds what was seen: exit detail, process state, stack. `generated` says
    that the vertex is a rollout instance that had generated tokens: they are kept, so this was progress."""

    vertex: str
    incarnation: int
    cause: str
    evidence: dict[str, Any] = field(default_factory=dict)
    detected_after_s: float | None = None
    node: str = ""
    """The machine on which it was, if there is another."""
    generated: bool = False


@dataclass(frozen=True, slots=True)
class VertexFellSilent(Event):
    """The vertex reports nothing, and is left alone: its process is neither stopped nor dead. `life` is a `Life`
    value, and `detail` says what was seen."""

    vertex: str
    incarnation: int
    life: str
    silent_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class VertexHeardAgain(Event):
    """A vertex that fell silent reports again: its silence was a false alarm."""

    vertex: str
    incarnation: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class VertexStopped(Event):
    """The process of a vertex that was stopped is gone."""

    vertex: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class OperatorFailed(ReportedEvent):
    """A call raised in a vertex that goes on living. The controller repeats it by itself. `attempt` counts, this one
    included, how often in a row the same call has failed, or calls of its operator none of which succeeded between,
    whichever is more; 0 where the controller does not know. `code` is the stable code of one of Gyre's errors. `place`
    (`file.py:12`) and `method` (`module:Class.method`) say where in the user's code it was raised, if it was."""

    incarnation: int
    vertex: str
    vertex_incarnation: int
    operator: str
    error: str
    traceback: str
    user_code: bool
    report: int = 0
    attempt: int = 0
    code: str = ""
    place: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True)
class TrainerFinished(ReportedEvent):
    """`fit()` returned. `stopped` says that it did so because it was asked to."""

    incarnation: int
    result: dict[str, Any]
    stopped: bool = False
    report: int = 0


@dataclass(frozen=True, slots=True)
class TrainerFailed(ReportedEvent):
    incarnation: int
    error: str
    traceback: str
    user_code: bool
    report: int = 0
    code: str = ""
    place: str = ""
    method: str = ""
    """As in `OperatorFailed`."""


@dataclass(frozen=True, slots=True)
class StepCompleted(ReportedEvent):
    """An optimizer step is in the sample ledger, with the policy version it made. `again` means that an
    earlier trainer completed the step and may have died before its report was journaled."""

    incarnation: int
    step: int
    version: int
    metrics: dict[str, float] = field(default_factory=dict)
    report: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class StepReported(Event):
    """The `fit()` of a script has called `report_progress(step=…)` with a step larger than all before."""

    step: int


@dataclass(frozen=True, slots=True)
class LearningWarned(ReportedEvent):
    """The job's metrics say that it does not learn as it should: `code` and `message` say how, from `step` on. With
    `holds` False they say so no longer. `again` as in `StepCompleted`."""

    incarnation: int
    code: str
    message: str
    step: int
    report: int = 0
    holds: bool = True
    again: bool = False


@dataclass(frozen=True, slots=True)
class WeightsPublished(ReportedEvent):
    incarnation: int
    version: int
    step: int
    checksum: str
    size_bytes: int
    base: int | None = None
    report: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Evaluation, ReportedEvent):
    """A held-out set was answered by a policy version, with this result."""

    incarnation: int
    report: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationLeftOut(ReportedEvent):
    """This version has no result for this held-out set, and will get none."""

    incarnation: int
    version: int
    reason: str
    report: int = 0
    set: str = "held_out"


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(ReportedEvent):
    """A complete checkpoint is on disk and in the ledger. `again` as in `StepCompleted`."""

    incarnation: int
    step: int
    path: str
    report: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointDamaged(ReportedEvent):
    """The newest checkpoint, of `step`, cannot be used, for the reason in `problem`. The ranks are restored from the
    one before it, of step `older`, and the steps since are trained again."""

    incarnation: int
    step: int
    path: str
    problem: str
    older: int
    report: int = 0


@dataclass(frozen=True, slots=True)
class StepDiverged(ReportedEvent):
    """Training `step` again gave weights with the checksum `found`; the ledger has `expected` for it. `error` says it
    in a sentence."""

    incarnation: int
    role: str
    step: int
    expected: str
    found: str
    error: str
    report: int = 0


@dataclass(frozen=True, slots=True)
class GangRestored(ReportedEvent):
    """The ranks of a role were brought back to step `step`, from `source`: `memory` of their machines, `disk`, or an
    `instance`, which has weights and nothing of the optimizer. Steps after it are trained again. `seconds` is how long
    it took, None if the trainer died before it could report it. `gang` is the incarnation of the first rank.
    `number` counts the job's restores: a later trainer reports the last ones of an earlier one again."""

    incarnation: int
    role: str
    source: str
    step: int
    checkpoint_step: int
    seconds: float | None = 0.0
    report: int = 0
    gang: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class GroupReplaced(ReportedEvent):
    """Another prompt took a group's place. `reason` is `quarantined`, with the engines' last words as
    evidence; `stale`; or `no_gradient` if all samples earned the same. `tokens` counts the trainer's tokens of
    it."""

    incarnation: int
    group: int
    replaced_by: int
    reason: str
    tokens: int = 0
    evidence: str = ""
    report: int = 0


@dataclass(frozen=True, slots=True)
class GroupRedrawn(ReportedEvent):
    """A trainer found scored samples in the ledger that cannot be trained, with what is wrong as evidence, and its
    prompt is answered again. `tokens` counts the tokens that were discarded."""

    incarnation: int
    group: int
    tokens: int = 0
    evidence: str = ""
    report: int = 0


@dataclass(frozen=True, slots=True)
class BatchSkipped(ReportedEvent):
    """A step left the weights of `role` as they were, because its gradient was not finite: `error` is what the ranks
    said. Its groups are dropped."""

    incarnation: int
    step: int
    role: str
    groups: int
    tokens: int
    error: str
    report: int = 0


@dataclass(frozen=True, slots=True)
class PassesHalved(ReportedEvent):
    """The ranks of `role` train in smaller passes from now on, because one did not fit into memory: `error` is what the
    rank said. A pass has at most `pass_tokens`, or a micro-batch is computed in `passes`; with `recompute` activations
    that were kept are computed again, which comes before the first halving. `number` is the ledger's: a later trainer
    reports again what an earlier one may have reported in vain."""

    incarnation: int
    role: str
    pass_tokens: int = 0
    error: str = ""
    report: int = 0
    passes: int = 0
    number: int = 0
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class MasterHung(Event):
    """A vertex ended a master that lived but did not answer, and reports that to the successor."""

    vertex: str
    pid: int
    silent_s: float
    stack: str


@dataclass(frozen=True, slots=True)
class JobStalled(Event):
    """Every vertex runs, and no step came after `step` for `after_s`, while `limit_s` are allowed. `stands_still` says
    whether nothing else moved either. `evidence` holds who waits for whom, and the trainer's stack."""

    step: int
    after_s: float
    limit_s: float
    stands_still: bool
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutsChanged(ReportedEvent):
    """The rollout manager (`vertex`) reports what became of an instance, a sample or a window: `what` is
    `InstanceJoined`, `InstanceLeft`, `InstanceDraining`, `InstanceSuspended`, `RecallIgnored`, `AddressIgnored`,
    `EngineStarted`, `EngineStartFailed`, `EngineDied`, `EngineLimited`, `LoaderFallback`, `SampleQuarantined`,
    `WindowClosed`, `MemoryNotReleased`, `WeightsRefused`, `FetchFault`, `TransferChosen`,
    `SparePromoted`, `SpareRelieved`, `PolicyNotServed`, `PolicyServed`, `SessionFault`, `SessionsPaused`,
    `SessionsResumed`, `AgentLost` or `PeerRefused`; the rollout plane's log has the rest."""

    vertex: str
    incarnation: int
    what: str
    details: dict[str, Any] = field(default_factory=dict)
    report: int = 0
    node: str = ""
    """The machine of the instance, if it is a vertex and there is another; the master adds it."""


@dataclass(frozen=True, slots=True)
class ScaleAdvised(ReportedEvent):
    """The rollout manager's elasticity policy: of the elastic `role` there should be `count` vertices instead of
    `seen`. `reason` is the policy's sentence, `observed` its observation. `possible` is how many of them the cluster
    has room for, up to `count`, as the master found when it got the advice; None if it did not look."""

    vertex: str
    incarnation: int
    role: str
    seen: int
    count: int
    reason: str
    observed: dict[str, Any] = field(default_factory=dict)
    possible: int | None = None
    report: int = 0


@dataclass(frozen=True, slots=True)
class Reported(ReportedEvent):
    """A vertex reported an event of a kind that this Gyre does not know: the user's own, or another version's."""

    vertex: str
    incarnation: int
    kind: str
    details: dict[str, Any] = field(default_factory=dict)
    report: int = 0


@dataclass(frozen=True, slots=True)
class ReportRefused(ReportedEvent):
    """A vertex reported an event that cannot be what its `kind` says. `reason` is what is wrong with it."""

    vertex: str
    incarnation: int
    kind: str
    reason: str
    report: int = 0


@dataclass(frozen=True, slots=True)
class ScaleRequested(Event):
    role: str
    count: int
    by: str = "user"


@dataclass(frozen=True, slots=True)
class DrainRequested(Event):
    """A machine (`node`, Ray's id), or one vertex, is to be left. `by` is "ray" for a notice of the cluster's."""

    node: str = ""
    vertex: str = ""
    reason: str = ""
    by: str = "user"


@dataclass(frozen=True, slots=True)
class MachineExamined(Event):
    """What the pre-flight of a machine (`node`, Ray's id) found wrong; "" where it was unfit before, and is not now."""

    node: str
    found: str = ""


@dataclass(frozen=True, slots=True)
class JoinTokenCreated(Event):
    """Who presents the token of this SHA-256 (in hex) may do what its `scopes` say, until `expires_at`."""

    name: str
    digest: str
    expires_at: float | None = None
    by: str = "user"
    scopes: tuple[str, ...] = (JOIN_SCOPE,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scopes", tuple(self.scopes))  # the journal's JSON has a list


@dataclass(frozen=True, slots=True)
class UndrainRequested(Event):
    """A machine, or the one that a vertex was drained from, may be used again."""

    node: str = ""
    vertex: str = ""
    by: str = "user"


@dataclass(frozen=True, slots=True)
class JoinTokenRevoked(Event):
    """A join token was revoked: it admits no more instances, and those that joined with it are cut."""

    name: str
    by: str = "user"


@dataclass(frozen=True, slots=True)
class PauseRequested(Event):
    by: str = "user"


@dataclass(frozen=True, slots=True)
class ResumeRequested(Event):
    by: str = "user"


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    reason: str
    by: str = "user"
    at_once: bool = False
    """Whether the trainer's step is not waited for."""


@dataclass(frozen=True, slots=True)
class ClusterLost(Event):
    """Master, vertices and the cluster that they ran on are gone for good: nothing is left to stop."""

    detail: str
    by: str = "user"


@dataclass(frozen=True, slots=True)
class StoreReturned(Event):
    """The store was away or changed, as `kind` and `sentence` say, and is back. Nothing was committed meanwhile."""

    kind: str
    sentence: str
    lost_at: float = 0.0
    away_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """A `SetTimer` command's time has come."""

    timer: str


_KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in list(vars().items())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, ReportedEvent)
}


def reporter_of(event: Event) -> str:
    """The vertex that reports this event."""
    own = RolloutsChanged | ScaleAdvised | Reported | ReportRefused | MasterHung
    return event.vertex if isinstance(event, own) else "trainer-0"


def is_known(kind: str) -> bool:
    return kind in _KINDS


def kind_of(event: Event) -> str:
    return type(event).__name__


def body_of(event: Event) -> dict[str, Any]:
    return fields_of(event)


def event_from(kind: str, body: Mapping[str, Any]) -> Event:
    """Raises ValueError for a kind that this Gyre does not know. Unknown fields of a newer one are dropped."""
    cls = _KINDS.get(kind)
    if cls is None:
        raise ValueError(f"event kind {kind!r} is not known to this Gyre")
    known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in body.items() if key in known})


def reported_from(kind: str, body: Mapping[str, Any]) -> Event:
    """The event that a vertex reports, from plain data. Unlike `event_from`, which reads what a master wrote, it
    believes nothing: raises ValueError with a sentence if no vertex reports this kind, or a field is missing or of
    another type. Metrics that are no numbers are left out."""
    cls = _KINDS.get(kind)
    if cls is None or not issubclass(cls, (ReportedEvent, MasterHung)) or cls in (Reported, ReportRefused):
        raise ValueError(f"{kind} is no event that a vertex reports")
    taken = dict(body)
    types = _types_of(cls)
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name not in taken:
            if item.default is MISSING and item.default_factory is MISSING:
                raise ValueError(f"{kind} lacks {item.name}")
            continue
        value, expected = taken[item.name], types[item.name]
        if expected == dict[str, float] and isinstance(value, dict):
            taken[item.name] = value = {name: number for name, number in value.items() if _is(number, float)}
        if not _is(value, expected):
            raise ValueError(f"{item.name} of {kind} is {value!r:.100}, not {item.type}")
    return event_from(kind, taken)


_types_of: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def _is(value: Any, expected: Any) -> bool:
    """Whether plain data is of the type that an event's field is annotated with."""
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(expected, UnionType):
        return any(_is(value, one) for one in get_args(expected))
    return isinstance(value, get_origin(expected) or expected)
