"""The master's interface for the REST server and the command line: reads and commands.

`MasterApi` is the whole surface between the control loop and its clients: reads return immutable snapshots and may come
from any thread, so a slow client never slows the control loop.

The view of a job is plain data with these keys; the records are those of `gyre.failover.state`:

    job        a JobRecord, and steps_asked. While the store is out of reach, its reason is `store_lost`
    master     pid, epoch, url, node, answering
    vertices   a list of VertexRecords, and of each its LastReport
    incidents  a list of Incidents, oldest first, and of each its IncidentEnd
    progress   what the trainer last reported: step, steps, version, reward, accuracy, accuracy_first,
               tokens_per_s, times (of each role, the share of recent time by activity), waits (those of
               them that are waits, "role waits for role (activity)" → 0 to 1), …
    evaluations
               of each held-out set, by its name, its Evaluations in the order of versions
    training   a TrainingRecord
    warnings   a list: code, step, message of what says that the job does not learn, while it holds
    bottleneck one sentence on what the job's speed depends on, or ""
    seq        sequence number of the last committed event
    disks      a list of the disks without room: where, node ("": the master's), required_bytes, available_bytes,
               since, said (whether a write that failed is all that is known)
    store      error: why the journal cannot be written, or ""
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

from sqlalchemy import make_url

from gyre.config import JobSpec
from gyre.config.secrets import secret_values, shown_notify
from gyre.failover import JobState, JoinToken, MachineRecord, VertexPhase
from gyre.failover.state import JobRecord, fields_of
from gyre.graph import NodeCapacity
from gyre.logs.reading import LogQuery
from gyre.master.incident_words import IncidentEnd, came_to
from gyre.master.session_words import sessions_sentence
from gyre.observe.efficiency import SPEEDS, STORE_LOST, makes_steps
from gyre.observe.samples.query import SampleReader
from gyre.redaction import HIDDEN, Secrets
from gyre.workloads.trainer.bottleneck import bottleneck_of

View = dict[str, Any]


@dataclass
class LastReport:
    """What a vertex last said: the version of the weights that it serves, the operator that it runs ("" for none), and
    its own report."""

    version: int | None = None
    busy: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class MachineView:
    """A machine of the cluster, by Ray's id. `cpu`, `gpu` and `memory_bytes` are what the job may use of it; `there` is
    false for one that has gone and of which something is remembered. `deaths` are those that count; until
    `left_until`, and while it is `draining`, nobody new is placed there. `found` is what its pre-flight found wrong."""

    id: str
    ip: str
    there: bool
    cpu: float
    gpu: float
    memory_bytes: int
    vertices: list[str]
    deaths: int
    left_until: float | None = None
    found: str = ""
    draining: str = ""


class MasterApi(Protocol):
    """Every method may be called from any thread. `command` blocks until the event is in the journal."""

    def view(self) -> View: ...

    def tokens(self) -> list[dict[str, Any]]:
        """The join tokens, as `tokens_of` gives them."""
        ...

    def spec(self) -> dict[str, Any]:
        """The job's configuration, as `spec_of` gives it."""
        ...

    def graph(self, *, placement: bool = True) -> dict[str, Any]:
        """The compiled graph and plan, as `gyre.graph.as_dict` gives it."""
        ...

    def events(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Committed events with seq > after: seq, id, cause, kind, at, actor, body."""
        ...

    def wait_for_events(self, *, after: int, timeout_s: float) -> bool:
        """Blocks until an event with seq > after is committed. Returns False if none came in time."""
        ...

    def nodes(self) -> list[dict[str, Any]]:
        """The machines of the cluster, as `nodes_of` gives them. Raises Unreachable past the deadline."""
        ...

    def command(self, verb: str, body: Mapping[str, Any], *, by: str, timeout_s: float = 10.0) -> int:
        """Submit `scale` (role, count), `drain` (target, reason), `undrain` (target), `pause`, `resume`, `stop`
        (reason), `create_token` (name, digest, expires_at, scopes) or `revoke_token` (name). Returns the event's seq.

        Raises Conflict, NotFound or ConfigError if the coordinator refuses, Unreachable past the deadline.
        """
        ...

    def logs(
        self, query: LogQuery, *, after: Mapping[str, int], tail: int | None, limit_bytes: int
    ) -> dict[str, Any]:
        """A page of lines, as `gyre.master.logs.logs_page` gives it: `lines`, `next`, `more`, `searched_from`,
        `missing`. Raises ConfigError for an expression that is none or takes too long."""
        ...

    def steps(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """The metrics of the steps beyond `after`, in order, at most `limit` of them."""
        ...

    def listed(self) -> dict[str, Any]:
        """What a list shows of the job beside its record: its summary (`gyre.observe.run_summary`), `tags` and `notes`.
        Raises StoreError."""
        ...

    def label(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None
    ) -> dict[str, Any]:
        """Change what users call the job by, also of one that has ended: `tags` and `notes` as they then are. Raises
        ConfigError for bad ones, StoreError."""
        ...

    def audit(self) -> dict[str, Any]:
        """The sample ledger, counted and cross-checked in SQL: `gyre.store.LedgerAudit` as plain data."""
        ...

    def plane_account(self) -> dict[str, Any] | None:
        """The rollout plane's token account as it was committed last (`gyre.rollouts.plane.stored_account`); None where
        it has written nothing."""
        ...

    def samples(self) -> SampleReader:
        """The samples that the job keeps, as far as they are on this machine's disks; none where they are not."""
        ...

    def series(
        self,
        *,
        prefix: str = "",
        since: float | None = None,
        until: float | None = None,
        points: int = 300,
        names: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The job's numbers over time (`gyre.observe.series`): `resolution_s`, `series` (source, number, pairs of time
        and value) and `cut`."""
        ...

    def at(self, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        """The job after event `seq`, at a time (seconds since 1970), or now, as `gyre.master.moment_view` gives it.
        Raises NotFound, or StoreError for a history that does not fold."""
        ...

    def timeline(self, *, since: float | None = None, until: float | None = None) -> dict[str, Any]:
        """Who did what between two times, or so far (`gyre.observe.timeline`): `since`, `until`, `first`, `last`,
        `lanes` (`id`, `role`, `kind`, `spans`: from, to, state, cause), `flags` (`at`, `kind`, `text`, `seq`) and
        `cut`."""
        ...

    def decisions(self, *, around: int) -> dict[str, int | None]:
        """`previous` and `next`: the decisions before and after event `around`, or None."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text format."""
        ...


def nodes_of(state: JobState, there: Sequence[NodeCapacity], *, now: float) -> list[dict[str, Any]]:
    """`MachineView`s as plain data, of those that are there and those that the job remembers something of."""
    capacities = {node.node_id: node for node in there}
    standing: dict[str, list[str]] = {}
    for vertex in state.vertices.values():
        if vertex.node and vertex.phase is VertexPhase.RUNNING:
            standing.setdefault(vertex.node, []).append(vertex.id)
    out = []
    for name in [*capacities, *(name for name in state.machines if name not in capacities)]:
        node, known = capacities.get(name), state.machines.get(name) or MachineRecord(name)
        out.append(
            vars(
                MachineView(
                    id=name,
                    ip=node.ip if node else "",
                    there=node is not None,
                    cpu=node.cpu if node else 0.0,
                    gpu=node.gpu if node else 0.0,
                    memory_bytes=node.memory_bytes if node else 0,
                    vertices=standing.get(name, []),
                    deaths=len(known.deaths),
                    left_until=known.left_until if known.left_until > now else None,
                    found=known.found,
                    draining=known.draining,
                )
            )
        )
    return out


ENGINES_OF = "rollout_manager"
"""The role whose `health()` says how every instance of the rollout plane is."""


def engines_of(view: View) -> list[dict[str, Any]]:
    """What the rollout manager last said of each instance: an `EngineStatus` of `gyre.rollouts.plane.reported`. Empty
    where there is no rollout plane, or it has not reported."""
    found = plane_of(view).get("instances")
    if not isinstance(found, list):
        return []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("instance"), str)]


def pools_of_view(view: View) -> dict[str, dict[str, Any]]:
    """What the rollout manager last said of each pool with a price, a `PoolStatus`, by role."""
    found = plane_of(view).get("pools")
    return (
        {role: one for role, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}
    )


def plane_of(view: View) -> dict[str, Any]:
    """What the rollout manager last said of the whole plane (`RolloutManager.status`); empty where there is none."""
    for vertex in view["vertices"]:
        health = vertex["fields"].get("health") if vertex["role"] == ENGINES_OF else None
        if isinstance(health, dict):
            return health
    return {}


TOLD_FIRST = (STORE_LOST, "disk_full", "no_room")
"""What a job lacks is shown before anything else, and nothing is named beside it as the bottleneck. The job's `message`
says what it is; it may make steps all the same, with fewer instances."""


def lacks(view: Mapping[str, Any]) -> str:
    """What a job that has not ended lacks before anything else: one of `TOLD_FIRST`, or ""."""
    job = view["job"]
    return "" if job["ended_at"] or job["reason"] not in TOLD_FIRST else str(job["reason"])


def door_of(view: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the rollout manager last said of a fleet's door (a `DoorStatus`); None of another job, and before it
    has reported."""
    door = plane_of(dict(view)).get("door")
    return door if isinstance(door, dict) else None


def door_url(view: Mapping[str, Any]) -> str:
    """Where a fleet's door is; "" where none is known."""
    url = (door_of(view) or {}).get("url")
    return url if isinstance(url, str) else ""


def sessions_of(view: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the rollout manager last said of the sessions of a job with agents (a `SessionsStatus`), and all of it in a
    `sentence`; None of another job, before it has reported, and where the job has ended: then there are none."""
    sessions = plane_of(dict(view)).get("sessions")
    if view["job"]["ended_at"] or not isinstance(sessions, dict):
        return None
    return {**sessions, "sentence": sessions_sentence(sessions)}


def view_of(
    state: JobState,
    *,
    seq: int,
    telemetry: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Mapping[str, Any] | None = None,
    store_error: str = "",
    answering: bool = True,
    decided: JobState | None = None,
    asked: int | None = None,
) -> View:
    """Returns the view of a state. `telemetry` holds the last report of each vertex, by id. `decided` is the state that
    the journal may not hold yet: which disks are full is shown from it, for it may be the journal's. `asked` are the
    steps that the job is to make, where that is known."""
    disks = (decided or state).job
    job = _job(state, disks, store_error, asked)
    shown = {key: value for key, value in (progress or {}).items() if makes_steps(job) or key not in SPEEDS}
    return {
        "job": job,
        "master": {
            "pid": state.job.master_pid,
            "epoch": state.job.epoch,
            "url": state.job.master_url,
            "node": state.job.master_node,
            "answering": answering,
        },
        "vertices": _vertices(state, telemetry or {}),
        "incidents": _incidents(state),
        "progress": shown,
        "evaluations": _evaluations(state),
        "training": asdict(state.training),
        "warnings": [
            {"code": one.code, "step": one.step, "message": one.message}
            for one in sorted(state.warnings.values(), key=lambda one: (one.step, one.code))
            if one.holds
        ],
        "bottleneck": "" if lacks({"job": job}) else bottleneck_of(job["phase"], shown),
        "seq": seq,
        "disks": [dict(disks.full_disks[key]) for key in sorted(disks.full_disks)],
        "store": {"error": store_error},
    }


def _job(state: JobState, disks: JobRecord, store_error: str, asked: int | None) -> dict[str, Any]:
    """`disks` has those that are full. What the job lacks is its reason, and its message says it."""
    job = asdict(state.job)
    if disks.full_disks and not state.job.full_disks and not job["phase"].ended:
        job |= {"reason": disks.reason, "message": disks.message}
    elif store_error and not job["phase"].ended:
        job |= {
            "reason": STORE_LOST,
            "message": f"The store is out of reach, and training waits for it: {store_error}",
        }
    job["steps_asked"] = asked
    for hidden in ("full_disks", "disk_had_room_at"):  # `disks` of the view has them
        del job[hidden]
    return job


def _vertices(state: JobState, telemetry: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**fields_of(record), **vars(LastReport(**telemetry.get(record.id, {})))}
        for record in state.vertices.values()
    ]


def _incidents(state: JobState) -> list[dict[str, Any]]:
    """In the order of time."""
    found = [
        {
            **fields_of(incident),
            "region": list(incident.region),
            **vars(IncidentEnd(incident.recovery_s, came_to(fields_of(incident)))),
        }
        for incident in state.incidents.values()
    ]
    return sorted(found, key=lambda incident: incident["at"])


def _evaluations(state: JobState) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for evaluation in sorted(state.evaluations.values(), key=lambda one: (one.set, one.version)):
        found.setdefault(evaluation.set, []).append(fields_of(evaluation))
    return found


def tokens_of(tokens: Mapping[str, JoinToken]) -> list[dict[str, Any]]:
    """The tokens without their digests: name, by, created_at, expires_at, revoked_at, scopes."""
    return [{key: value for key, value in asdict(one).items() if key != "digest"} for one in tokens.values()]


def spec_of(spec: JobSpec) -> dict[str, Any]:
    """The job's configuration without what may be secret (`gyre.config.secrets`, `gyre.redaction`). Whoever may look at
    a job need not be its owner."""
    shown: dict[str, Any] = spec.model_dump(mode="json")
    for part in (shown, *shown["roles"].values()):
        part["env"] = dict.fromkeys(part["env"], HIDDEN)
    shown["observe"]["notify"] = shown_notify(shown["observe"]["notify"])
    if spec.store.url is not None:
        shown["store"]["url"] = make_url(spec.store.url).render_as_string(hide_password=True)
    secrets = Secrets(secret_values(spec.model_dump(mode="json"), os.environ))
    return cast(dict[str, Any], secrets.data(shown))
