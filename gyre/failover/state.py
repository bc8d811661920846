"""The control plane's state: the fold of the events so far.

Few phases, with a reason (an enum) and a message beside them. A job's phase derives from its vertices':

    SUBMITTED → STARTING → RUNNING ⇄ RECOVERING, PAUSED → STOPPING → SUCCEEDED | FAILED | STOPPED

by this rank: ended and stopping are decided outright; before the trainer first ran it is STARTING; with a
wanted vertex not running it is RECOVERING, unless that waits for room and the job can do without it; paused by
the user it is PAUSED; else RUNNING.

Invariant *fold is snapshot*: `rows_of(state)` is what the journal's snapshot holds, and `state_from` is its
inverse, so a master may load either the rows or the whole history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from enum import StrEnum
from typing import Any

from gyre.config import JOIN_SCOPE, JOIN_TOKEN
from gyre.errors import StoreCorrupt
from gyre.failover.evaluation import LATER, Evaluation

TRAINING = "training"
"""The kind, and the key, of the snapshot's row of a `TrainingRecord`."""


class JobPhase(StrEnum):
    SUBMITTED = "submitted"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PAUSED = "paused"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)


class VertexPhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Reason(StrEnum):
    """The reason why a job or vertex is in its phase."""

    NONE = ""
    SUBMITTED = "submitted"
    SCALED = "scaled"
    RESTARTED = "restarted"
    REGION_RESTARTED = "region_restarted"
    JOB_RESTARTED = "job_restarted"
    FINISHED = "finished"
    STOP_REQUESTED = "stop_requested"
    USER_CODE = "user_code"
    BUDGET_SPENT = "budget_spent"
    ENGINE_NOT_STARTED = "engine_not_started"
    PAUSE_REQUESTED = "pause_requested"
    CLUSTER_LOST = "cluster_lost"
    NO_ROOM = "no_room"
    DRAINED = "drained"
    CONTINUED = "continued"
    NOT_FINITE = "not_finite"
    OUT_OF_MEMORY = "out_of_memory"
    CONFIG = "config"
    DISK_FULL = "disk_full"


class Cause(StrEnum):
    """What happened to a lost vertex."""

    DIED = "process_died"
    NODE_LOST = "node_lost"
    STORE_LOST = "store_lost"
    """Of the store, not of a vertex: its file was away, or another."""
    SILENT = "silent"
    """The vertex does not answer: stopped, partitioned, or its host hangs."""
    UNHEALTHY = "unhealthy"
    """Its own `health()` raised."""
    STALLED = "stalled"
    """The vertex answers, but its running call makes no progress."""
    START_FAILED = "start_failed"
    ENGINE_DIED = "engine_died"
    """A rollout instance runs, and its engine ended."""
    ENGINE_START_FAILED = "engine_start_failed"
    """A rollout instance runs, and its engine does not start."""
    POLICY_NOT_SERVED = "policy_not_served"
    """A published policy version could be loaded by no instance."""
    USER_CODE = "user_code"
    COLLECTIVE = "collective_failed"
    CHECKPOINT_LOST = "checkpoint_lost"
    """The gang's last checkpoint is gone, and it continued without the optimizer's state."""
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    """The newest checkpoint was damaged or gone, and the job went back to the one before it."""
    STEP_DIVERGED = "step_diverged"
    """A step that was trained again gave other weights than the first time."""
    NO_STEP = "no_step"
    """Every vertex runs, and the job makes no step."""
    NO_ROOM = "no_room"
    """No machine has room for the vertex."""
    DRAINED = "drained"
    """Its machine, or itself, was asked to go."""
    BAD_PLACE = "bad_place"
    """Too many vertices died on its machine."""
    NOT_FINITE = "not_finite"
    """A step's gradient holds NaN or infinity."""
    OUT_OF_MEMORY = "out_of_memory"
    """A call raised because a device or the host had no memory left."""
    CONFIG = "config_error"
    """What the user wrote cannot be a job, which showed only in a vertex."""
    CALL_FAILED = "call_failed"
    """A call raised in Gyre's own code, or in a library that it stands on."""
    DISK_FULL = "disk_full"
    """A disk has no room for what was to be written."""


class Scope(StrEnum):
    """How wide a repair is."""

    RETRY = "retry"
    VERTEX = "vertex"
    REGION = "region"
    JOB = "job"
    GIVE_UP = "give_up"


VERTEX_TRANSITIONS = frozenset(
    {
        (VertexPhase.STARTING, VertexPhase.RUNNING),
        (VertexPhase.STARTING, VertexPhase.STARTING),
        (VertexPhase.RUNNING, VertexPhase.STARTING),
        (VertexPhase.STARTING, VertexPhase.STOPPING),
        (VertexPhase.RUNNING, VertexPhase.STOPPING),
        (VertexPhase.STOPPING, VertexPhase.STOPPED),
        (VertexPhase.STOPPING, VertexPhase.STARTING),
        (VertexPhase.STOPPED, VertexPhase.STARTING),
    }
)
"""Every permitted `(from, to)`. STARTING to STARTING is a start given up for the next incarnation's, STOPPING to
STARTING a vertex that was asked for again before it was gone."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    job_id: str = ""
    name: str = ""
    phase: JobPhase = JobPhase.SUBMITTED
    reason: Reason = Reason.NONE
    message: str = ""
    epoch: int = 0
    master_pid: int = 0
    master_node: str = ""
    master_url: str = ""
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    paused: bool = False
    trainer_started: bool = False
    """`fit()` has been asked for at least once: from here on lost vertices mean RECOVERING."""
    outcome: JobPhase | None = None
    """While STOPPING: the phase it will end in."""
    roles: dict[str, int] = field(default_factory=dict)
    serial: int = 0
    step: int = 0
    version: int = -1
    """The newest published policy version; -1 before the first. It only grows."""
    checkpoint_step: int = -1
    checkpoint_path: str = ""
    restored: dict[str, int] = field(default_factory=dict)
    """The number of the last restore of each role that had one."""
    halved: dict[str, int] = field(default_factory=dict)
    """The number of the last `PassesHalved` of each role whose passes were halved."""
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The traceback or sentence that ended the job, for people."""
    weights_from: str = ""
    """Whose weights it began with, if not its model's."""
    full_disks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The disks without room, by machine and path: `where`, `node`, `required_bytes`, `available_bytes`, `since`, and
    `said`, whether a write that failed is all that is known of it."""
    disk_had_room_at: float | None = None
    """When the last full disk had room again."""
    price_per_hour: float = 0.0
    """What an hour costs since `priced_at`, of what its roles reserve; 0 where no price is given, and once it has
    ended."""
    priced_at: float = 0.0
    spent: float = 0.0
    """What the job cost until `priced_at`."""


@dataclass(frozen=True, slots=True)
class VertexRecord:
    id: str
    role: str
    rank: int
    phase: VertexPhase = VertexPhase.STARTING
    reason: Reason = Reason.SUBMITTED
    message: str = ""
    incarnation: int = 1
    pid: int = 0
    node: str = ""
    since: float = 0.0
    restarts: int = 0
    no_room: str = ""
    """While it waits for room: what it requires, what is available, and what would help."""
    no_room_since: float = 0.0
    avoids: str = ""
    """The machine that it was drained from, on which it is not started again."""
    silent: str = ""
    """While it reports nothing and is left alone: what its process was found to do, a `Life` value."""
    silent_since: float = 0.0
    false_alarms: int = 0
    """How often this vertex, in whatever incarnation, fell silent and was heard again."""
    reported: int = 0
    """Reports of this incarnation up to here are in the journal; repeated ones are dropped."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """What the job has seen of a machine of the cluster, by Ray's id of the node."""

    id: str
    deaths: tuple[float, ...] = ()
    """When vertices died there, since it was last left alone."""
    times_left: int = 0
    """How often it was left alone."""
    left_until: float = 0.0
    found: str = ""
    """Why it is unfit, as its last pre-flight found."""
    draining: str = ""
    """Why no new vertex is placed there; "" if some are."""

    def is_closed(self, now: float) -> bool:
        """Whether it accepts no new vertices."""
        return bool(self.draining) or now < self.left_until


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that went wrong: evidence, suspected culprit, decision, outcome."""

    id: str
    at: float
    vertex: str
    incarnation: int
    cause: str
    scope: Scope
    decision: str
    evidence: dict[str, Any] = field(default_factory=dict)
    user_code: bool = False
    region: tuple[str, ...] = ()
    detected_after_s: float | None = None
    recovered_at: float | None = None
    outcome: str = "open"

    @property
    def recovery_s(self) -> float | None:
        return None if self.recovered_at is None else self.recovered_at - self.at


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token with which machines join the rollout plane, or others use a fleet's door, by its name. The token itself
    is nowhere: `digest` is its SHA-256 in hex, and empty for the one that the rollout manager made itself."""

    name: str
    digest: str = ""
    by: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    scopes: tuple[str, ...] = (JOIN_SCOPE,)
    """What its owner may do, of `gyre.config.TOKEN_SCOPES`."""

    def is_valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the steps of a job say together: the metrics of the first and of the last step, and the tokens of all.
    `continued_at` and `continued_step` say when and at which step an ended job went on last."""

    first: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    continued_at: float | None = None
    continued_step: int = 0
    continued_reward: float | None = None
    """The reward of the first step since."""


@dataclass(frozen=True, slots=True)
class LearningWarning:
    """A warning that the job does not learn as it should. The last one of each code; `holds` is whether it still
    does."""

    code: str
    step: int
    message: str
    holds: bool = True


@dataclass(frozen=True, slots=True)
class JobState:
    """Immutable. `uses` holds, per budget key, the times of use within the window; `attempts` the number of uses since
    the last progress."""

    job: JobRecord = field(default_factory=JobRecord)
    vertices: dict[str, VertexRecord] = field(default_factory=dict)
    incidents: dict[str, Incident] = field(default_factory=dict)
    uses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    machines: dict[str, MachineRecord] = field(default_factory=dict)
    tokens: dict[str, JoinToken] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    warnings: dict[str, LearningWarning] = field(default_factory=dict)
    training: TrainingRecord = field(default_factory=TrainingRecord)


RowKey = tuple[str, str]


def fields_of(record: Any) -> dict[str, Any]:
    """A dataclass as a mapping. Unlike `asdict` it copies no field, for what holds plain data that nobody changes."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


TABLES = {
    "vertex": "vertices",
    "incident": "incidents",
    "machine": "machines",
    JOIN_TOKEN: "tokens",
    "evaluation": "evaluations",
    "warning": "warnings",
}
"""By the kind of a snapshot's row, the field of the state that has its record, by name."""

_LATER: dict[type, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    JobRecord: ((("halved",), ("halved",)), (("priced_at",), ("price_per_hour", "priced_at", "spent"))),
    VertexRecord: ((("silent", "false_alarms"), ("silent", "silent_since", "false_alarms")),),
    JoinToken: ((("scopes",), ("scopes",)),),
    Evaluation: tuple(((name,), (name,)) for name in LATER),
}
"""Fields that records have since a release, in pairs: where the first ones have their defaults, a row has none of the
second ones. Rows of before have nothing of them, and the same history gives the same row."""


def record_at(state: Any, key: RowKey) -> Any:
    """The record of a `JobState`, or of a draft of one, that a row is of; None if it has none."""
    kind, name = key
    if kind in TABLES:
        return getattr(state, TABLES[kind]).get(name)
    return state.job if kind == "job" else state.training


def row_of(state: JobState, key: RowKey) -> dict[str, Any] | None:
    """The snapshot row under `key`, as JSON-able data; None if the state has none."""
    kind, name = key
    if kind == "budget":
        uses = state.uses.get(name)
        return None if uses is None else {"uses": list(uses), "attempts": state.attempts.get(name, 0)}
    record = record_at(state, key)
    if record is None or record == TrainingRecord():
        return None
    row = {
        field_name: list(one) if isinstance(one, tuple) else one
        for field_name, one in fields_of(record).items()
    }
    for marks, absent in _LATER.get(type(record), ()):
        if all(getattr(record, mark) == _default(type(record), mark) for mark in marks):
            for gone in absent:
                del row[gone]
    return row


def _default(kind: type, name: str) -> Any:
    found: Field[Any] = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return found.default if found.default_factory is MISSING else found.default_factory()


def rows_of(state: JobState) -> dict[RowKey, dict[str, Any]]:
    """The whole snapshot."""
    keys: list[RowKey] = [("job", "job"), (TRAINING, TRAINING)]
    keys += [("budget", name) for name in state.uses]
    keys += [(kind, name) for kind, table in TABLES.items() for name in getattr(state, table)]
    return {key: row for key in keys if (row := row_of(state, key)) is not None}


def state_from(rows: Mapping[RowKey, Mapping[str, Any]]) -> JobState:
    """The inverse of `rows_of`. Raises StoreCorrupt for rows that it does not write."""
    try:
        return _state_from(rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreCorrupt(
            f"The job's snapshot is not one: {error!r:.300}.",
            hint="A newer Gyre wrote it, or it was changed outside Gyre; `gyre replay` folds the events instead.",
        ) from error


def _state_from(rows: Mapping[RowKey, Mapping[str, Any]]) -> JobState:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in _RECORDS}
    for (kind, name), row in rows.items():
        if kind in found:
            found[kind][name] = _RECORDS[kind](row)
    vertices, budgets = found["vertex"], found["budget"]
    order = sorted(vertices, key=lambda name: (vertices[name].role, vertices[name].rank))
    return JobState(
        job=found["job"].get("job", JobRecord()),
        uses={name: tuple(row["uses"]) for name, row in budgets.items()},
        attempts={name: row["attempts"] for name, row in budgets.items() if row["attempts"]},
        training=found[TRAINING].get(TRAINING, TrainingRecord()),
        **{table: found[kind] for kind, table in TABLES.items()}
        | {"vertices": {name: vertices[name] for name in order}},
    )


def _job_from(row: Mapping[str, Any]) -> JobRecord:
    outcome = row["outcome"]
    return JobRecord(
        **{
            **row,
            "phase": JobPhase(row["phase"]),
            "reason": Reason(row["reason"]),
            "outcome": None if outcome is None else JobPhase(outcome),
        }
    )


_RECORDS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "job": _job_from,
    "vertex": lambda row: VertexRecord(
        **{**row, "phase": VertexPhase(row["phase"]), "reason": Reason(row["reason"])}
    ),
    "incident": lambda row: Incident(**{**row, "scope": Scope(row["scope"]), "region": tuple(row["region"])}),
    "budget": dict,
    "machine": lambda row: MachineRecord(**{**row, "deaths": tuple(row["deaths"])}),
    JOIN_TOKEN: lambda row: JoinToken(**{**row, "scopes": tuple(row.get("scopes", (JOIN_SCOPE,)))}),
    "evaluation": lambda row: Evaluation(**row),
    "warning": lambda row: LearningWarning(**row),
    TRAINING: lambda row: TrainingRecord(**row),
}
"""What a row of each kind is read as."""
