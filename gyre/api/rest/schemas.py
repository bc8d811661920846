"""The types of the REST interface's requests and answers: the source of its OpenAPI, and of the page's own types
(`ui/src/rest.ts`, which `python -m tools.rest_types` writes).

Bodies that come in are strict: an unknown key is refused. What goes out lists the keys that clients may build
on; a workload's own report and later additions pass through beside them.

What shows a thing that has a class in another room is called by that class's name with `Schema`; a body that comes in
ends in `Body`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from typing_extensions import TypeAliasType

from gyre.api import account
from gyre.api.rest.records import FromRecord
from gyre.api.runs import GroupedRuns
from gyre.failover import state
from gyre.failover.evaluation import Evaluation as EvaluationRecord
from gyre.graph.elements import Edge, EdgeKind
from gyre.master.incident_words import IncidentEnd
from gyre.master.master_api import LastReport, MachineView
from gyre.observe.run_lines import RunSummary
from gyre.rollouts.plane import reported

_NUMBER = {"anyOf": [{"type": "number"}, {"type": "null"}]}
Step = TypeAliasType(
    "Step",
    Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _NUMBER})],
)
"""The numbers of one step, by the names in docs/training.md."""

Point = TypeAliasType("Point", tuple[float, float | None])

SpanState = TypeAliasType(
    "SpanState",
    Literal["train", "generate", "wait", "load", "reward", "checkpoint", "evaluate", "start", "down", "idle"],
)
Span = TypeAliasType("Span", tuple[float, float, SpanState, str])


class Out(BaseModel, metaclass=FromRecord):
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="null", use_attribute_docstrings=True)


class In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Problem(BaseModel):
    """RFC 9457. `code` is stable across releases."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    details: dict[str, Any] = Field(default_factory=dict)


class Health(BaseModel):
    ok: bool = True


JOBS_OWN = (
    *("master_pid", "master_node", "master_url"),  # of `master`
    *("full_disks", "disk_had_room_at"),  # of `disks`
    *("trainer_started", "outcome", "serial", "restored", "halved"),
)
VERTEXS_OWN = ("avoids", "reported")
"""What the coordinator keeps of a job, and of a vertex, for itself: an answer does not promise it."""


class JobItem(Out):
    """One job of a list. Times in seconds since 1970."""

    job_id: str
    name: str
    phase: str
    reason: str = ""
    message: str = ""
    epoch: int = 0
    step: int = 0
    version: int = -1
    submitted_at: float = 0.0
    ended_at: float | None = None


class Run(JobItem, of=RunSummary):
    """A line of the table of runs. Null is what is not known."""

    live: bool = True
    tags: list[str] = Field(default_factory=list)
    notes: str = ""


class RunGroup(Out, of=GroupedRuns):
    """What runs have in common (`key`, "" for those that have none of it), what they are called (`title`), the
    `settings` in which they differ from the other groups, how many of them failed, and what they come to by the name of
    the column: as numbers, and in `words`. `held_out`: of which set, and in which unit, that value is."""


class JobList(BaseModel):
    """`total`: how many jobs there are, of which a list has the newest. `shared_names`: those of several jobs, whether
    the filter lets them through or not, which are distinguished by their ids. `cost`: what the jobs that are listed
    cost together, in words; "" where none has prices."""

    jobs: list[Run]
    groups: list[RunGroup] | None = None
    total: int = 0
    shared_names: list[str] = Field(default_factory=list)
    cost: str = ""


class LabelsSchema(BaseModel):
    tags: list[str]
    notes: str


class LabelBody(In):
    """Tags to add and to remove, and the note; null leaves it as it is."""

    add: list[str] = Field(default_factory=list)
    remove: list[str] = Field(default_factory=list)
    notes: str | None = None


class Job(JobItem, of=state.JobRecord, without=JOBS_OWN):
    """The job's record as the journal keeps it. `/now` has what it costs so far."""

    steps_asked: int | None = None
    """The steps that it is to make; null where its trainer says what a step is."""


class Master(Out):
    pid: int
    epoch: int
    url: str
    node: str
    answering: bool


class VertexSchema(Out, of=(state.VertexRecord, LastReport), without=VERTEXS_OWN):
    """One instance of a role. `version`: of the weights that it serves; `busy`: the operator that it runs; `fields`:
    its own report."""


class GraphEdge(Out, of=Edge):
    """What flows from one operator, or role, to another: of `source` firings every `produce`, for `target` `consume`,
    `delay` of them ahead; with a `capacity`, so many at most."""

    kind: EdgeKind


class OperatorSchema(Out):
    ref: str
    role: str
    method: str
    dispatch: str


class ElasticSchema(Out):
    """How many there may be of a role."""

    min: int
    max: int


class Role(Out):
    name: str
    entrypoint: str
    total: int
    gang: bool
    elastic: ElasticSchema | None


class Graph(Out):
    """The compiled graph; besides these keys its machines, cycles, regions and notes, and unless it is left out where
    each vertex stands (`sub_graphs`, `placement`)."""

    name: str
    recipe: str | None
    roles: list[Role]
    operators: list[OperatorSchema]
    edges: list[GraphEdge]
    role_edges: list[GraphEdge]


class VertexList(BaseModel):
    vertices: list[VertexSchema]


ENGINES_OWN = ("incarnation", "pid", "checksum", "source")
DOORS_OWN = ("kept_tokens", "key_bytes")
SESSIONS_OWN = ("oversampled",)
"""What the rollout manager reports besides: an answer does not promise it."""


class EngineSchema(Out, of=reported.EngineStatus, without=ENGINES_OWN): ...


class Machine(Out, of=MachineView): ...


class MachineList(BaseModel):
    nodes: list[Machine]


class PoolSchema(Out, of=reported.PoolStatus): ...


class DoorOfKey(Out, of=reported.KeyCounts): ...


class DoorRequests(Out, of=reported.RequestCounts):
    keys: dict[str, DoorOfKey] = Field(default_factory=dict)


class DoorSchema(Out, of=reported.DoorStatus, without=DOORS_OWN):
    requests: DoorRequests = Field(default_factory=DoorRequests)


class SessionFaultSchema(Out, of=reported.SessionFault): ...


class SessionCountsSchema(Out, of=reported.SessionTotals):
    faults: list[SessionFaultSchema] = Field(default_factory=list)


class SessionsSchema(Out, of=reported.SessionsStatus, without=SESSIONS_OWN):
    since_start: SessionCountsSchema = Field(default_factory=SessionCountsSchema)
    sentence: str


class EngineList(BaseModel):
    engines: list[EngineSchema]
    pools: dict[str, PoolSchema] = Field(default_factory=dict)
    door: DoorSchema | None = None
    sessions: SessionsSchema | None = None


class IncidentSchema(Out, of=(state.Incident, IncidentEnd)):
    """One thing that went wrong: evidence, culprit, decision, outcome."""


class IncidentList(BaseModel):
    incidents: list[IncidentSchema]


class EvaluationPart(Out):
    """What the prompts with one value of a column earned."""

    count: int
    reward_mean: float | None = None
    accuracy: float | None = None


class EvaluationSchema(Out, of=EvaluationRecord):
    """What a policy version's answers to a held-out set earned."""

    by: dict[str, EvaluationPart] = Field(default_factory=dict)


class StoreHealth(Out):
    error: str = ""
    """Why the journal cannot be written, or an empty string."""


class LearningWarningSchema(Out, of=state.LearningWarning, without=("holds",)):
    """What says that the job does not learn as it should, since `step`; it holds now. `code` is stable."""


class Training(Out, of=state.TrainingRecord):
    """What the steps of the job say together: the metrics of its first and last step, and the tokens of all. Where an
    ended job went on: when (seconds since 1970), at which step, and the reward of the first step since."""


class FullDisk(Out):
    """A disk without room. `where` is a folder on it, `node` its machine ("": the master's). `said`: a write that
    failed is all that is known of it."""

    where: str
    node: str = ""
    required_bytes: int = 0
    available_bytes: int = 0
    since: float
    said: bool = False


class JobView(Out):
    """All there is to see of a job at one moment."""

    job: Job
    master: Master
    vertices: list[VertexSchema]
    incidents: list[IncidentSchema]
    progress: dict[str, Any]
    evaluations: dict[str, list[EvaluationSchema]] = Field(default_factory=dict)
    """By the held-out set's name, in the order of versions."""
    training: Training = Field(default_factory=Training)
    warnings: list[LearningWarningSchema] = Field(default_factory=list)
    bottleneck: str = ""
    """What the job's speed depends on, in one sentence; empty where that is not known."""
    seq: int
    disks: list[FullDisk] = Field(default_factory=list)
    """The disks without room, for which the job waits."""
    store: StoreHealth


class EventSchema(Out):
    """One event of the journal; `seq` is the id of its server-sent form."""

    seq: int
    id: str
    cause: str | None = None
    kind: str
    at: float
    actor: str = ""
    body: dict[str, Any]


class SeriesSchema(BaseModel):
    """Numbers over time: by source and name, pairs of a time (seconds since 1970) and a value, which is of the
    `resolution_s` seconds from there on. `cut`: there are more sources than an answer holds; ask for fewer."""

    resolution_s: float
    series: dict[str, dict[str, list[Point]]]
    cut: bool = False


class LaneSchema(BaseModel):
    """`kind` is `vertex` or `instance`. `spans` are from, to (seconds since 1970), state and cause: whom it waited for,
    or why it was down."""

    id: str
    role: str
    kind: Literal["vertex", "instance"]
    spans: list[Span]


class FlagSchema(BaseModel):
    """`seq` is the event that made it."""

    at: float
    kind: Literal["incident", "publish", "evaluation", "checkpoint", "command"]
    text: str
    seq: int


class TimelineSchema(BaseModel):
    """`first` and `last` are the job's own ends. `cut`: there are more lanes than an answer holds."""

    since: float
    until: float
    first: float
    last: float
    lanes: list[LaneSchema]
    flags: list[FlagSchema]
    cut: bool = False


class MomentSchema(BaseModel):
    """The job after `event`, which is null before the first one. `first` and `last` are the journal's."""

    view: JobView
    event: EventSchema | None
    first: int
    last: int


class Decisions(BaseModel):
    """The decisions before and after an event, by their numbers: what made or settled an incident, and commands."""

    previous: int | None
    next: int | None


class EventPage(BaseModel):
    """`next` is the `after` of the following page; `more`: whether this one is full."""

    events: list[EventSchema]
    next: int
    more: bool


class LogLine(Out):
    """`at` is by the clock of the machine that wrote the line, in seconds since 1970; of a line without a time it is
    that of the line before. `level` is D, I, W or E."""

    at: float
    level: str
    vertex: str
    incarnation: int
    file: str
    text: str


class LogPage(BaseModel):
    """`lines` in the order of time; `cursor` is where the next page begins, and `more` whether it can be read at once.
    What is older than `searched_from` was not looked at; null: there is nothing older. `missing` says, in a
    first page, whose logs are not to be had, and why."""

    lines: list[LogLine]
    cursor: str
    more: bool
    searched_from: float | None
    missing: list[str]


class Metrics(BaseModel):
    """`steps` are the metrics of each step, by the names in docs/training.md; `next` is the `since` of the following
    page, and `more` whether this one is full. `progress` is what the trainer last reported."""

    steps: list[Step]
    next: int
    more: bool
    warnings: list[LearningWarningSchema]
    bottleneck: str
    job_id: str
    seq: int
    step: int
    version: int
    progress: dict[str, Any]


class PromptAccountSchema(Out, of=account.PromptTotals): ...


class TokenAccountSchema(Out, of=account.TokenTotals): ...


class Price(Out, of=account.PoolPrice): ...


class CostLine(BaseModel):
    """What a job costs, in words: so far, by the hour, by a million tokens."""

    label: str
    value: str


class Account(BaseModel):
    prompts: PromptAccountSchema
    tokens: TokenAccountSchema
    money: list[Price]
    cost: list[CostLine] = Field(default_factory=list)


class ScaleBody(In):
    """`count` vertices of `role`."""

    role: Annotated[str, Field(min_length=1, max_length=64, examples=["rollout"])]
    count: Annotated[int, Field(ge=0, le=100_000, examples=[3])]


class UndrainBody(In):
    """A vertex, or a machine by its address or the beginning of its id."""

    target: Annotated[str, Field(min_length=1, max_length=128, examples=["rollout-1", "10.0.0.7"])]


class DrainBody(UndrainBody):
    reason: Annotated[str, Field(max_length=1000)] = ""


class JoinTokenSchema(Out, of=state.JoinToken, without=("digest",)):
    """A token with which machines join the rollout plane; the token itself is nowhere. Times in seconds since 1970."""


class JoinTokenList(BaseModel):
    tokens: list[JoinTokenSchema]


TokenName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", examples=["spot"])]


class CreateTokenBody(In):
    """`digest` is the SHA-256 of the token, in hex: whoever asks makes the token, and nobody else sees it. `expires_at`
    is in seconds since 1970."""

    name: TokenName
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    expires_at: Annotated[float, Field(gt=0, le=1e11)] | None = None
    scopes: Annotated[list[Literal["join", "generate", "publish"]], Field(min_length=1, max_length=3)] = [
        "join"
    ]


class RevokeTokenBody(In):
    name: TokenName


class StopBody(In):
    """`at_once` does not wait for the step of the trainer."""

    reason: Annotated[str, Field(max_length=1000)] = ""
    at_once: bool = False


class Accepted(BaseModel):
    """`seq` is the event that records the request in the journal."""

    job_id: str
    seq: int
