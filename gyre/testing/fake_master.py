"""A master that is a fake: the real decisions over a journal in memory, with a clock that stands still.

It has the whole of `MasterApi`, so the REST interface, the client and a dashboard can be tried without Ray and
without a database. What it does not do is carry commands out: no process is started, `record` is how the
world's answers come in.

    master = FakeMaster(spec)
    master.record(VertexStarted("rollout-0", 1, pid=11, node="n0"))
    app = create_app(master, token=None)

Knobs: `answer_after_s` delays every answer (real time), `fail_with` is raised by every call while it is set,
`progress`, `telemetry` and `log_text` are what it shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from gyre.config import TRAINER, JobSpec, RoleSpec
from gyre.errors import Conflict, GyreError
from gyre.failover import FailoverCoordinator, JobState
from gyre.failover import events as e
from gyre.master.master_api import View, view_of


def small_spec(name: str = "small") -> JobSpec:
    """A trainer, a gang of two actors, two elastic rollouts and a reward: the smallest job with every case."""
    workload = {"module": "gyre.workloads", "name": "BaseWorkload"}
    return JobSpec.model_validate(
        {
            "name": name,
            "roles": {
                TRAINER: {
                    "entrypoint": {"module": "gyre.workloads", "name": "BaseTrainer"},
                    "resources": {"accelerator": 0},
                },
                "actor": {"entrypoint": workload, "total": 2, "gang": True},
                "rollout": {"entrypoint": workload, "total": 2, "elastic": {"min": 1, "max": 4}},
                "reward": {"entrypoint": workload},
            },
        }
    )


def regions_of_gangs(spec: JobSpec) -> Any:
    """The regions that hold where no collective edge joins two roles: each gang is one."""

    def region(vertex: str) -> frozenset[str]:
        role = vertex.rpartition("-")[0]
        known = spec.roles.get(role, RoleSpec())
        return (
            frozenset(f"{role}-{rank}" for rank in range(known.total)) if known.gang else frozenset({vertex})
        )

    return region


class FakeMaster:
    """A MasterApi. Thread-safe, as the protocol wants it."""

    def __init__(
        self,
        spec: JobSpec | None = None,
        *,
        job_id: str = "fake-1",
        pid: int = 4242,
        url: str = "",
        now: float = 1_700_000_000.0,
    ) -> None:
        self._spec = spec or small_spec()
        self._coordinator = FailoverCoordinator(self._spec, regions_of_gangs(self._spec))
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self.state = JobState()
        self.now = now
        self.answer_after_s = 0.0
        self.fail_with: Exception | None = None
        self.progress: dict[str, Any] = {}
        self.telemetry: dict[str, dict[str, Any]] = {}
        self.log_text: dict[str, str] = {}
        """Log text by file name, `<vertex>.<incarnation>.log`."""
        self.reads = 0
        """How often `events` was called."""
        self.record(
            e.JobSubmitted(job_id, self._spec.name, {name: r.total for name, r in self._spec.roles.items()})
        )
        self.record(e.MasterStarted(epoch=1, pid=pid, node="n0", url=url))

    # -- the world ----------------------------------------------------------------------------------

    def record(self, event: e.Event, *, actor: str = "fake", after_s: float = 1.0) -> int:
        """Decide and commit an event `after_s` virtual seconds after the one before. Returns its seq."""
        with self._changed:
            self.now += after_s
            self.state = self._coordinator.decide(self.state, event, self.now).state
            seq = len(self._events) + 1
            self._events.append(
                {
                    "seq": seq,
                    "id": f"e{seq}",
                    "cause": None,
                    "kind": e.kind_of(event),
                    "at": self.now,
                    "actor": actor,
                    "body": e.body_of(event),
                }
            )
            self._changed.notify_all()
            return seq

    def start_all(self) -> None:
        """Every vertex that is starting comes up."""
        for pid, vertex in enumerate(list(self.state.vertices.values()), start=1000):
            self.record(e.VertexStarted(vertex.id, vertex.incarnation, pid=pid, node="n0"))

    # -- MasterApi ---------------------------------------------------------------------------------

    def view(self) -> View:
        self._behave()
        with self._changed:
            return view_of(
                self.state, seq=len(self._events), telemetry=self.telemetry, progress=self.progress
            )

    def spec(self) -> dict[str, Any]:
        self._behave()
        return self._spec.model_dump(mode="json")

    def graph(self) -> dict[str, Any]:
        self._behave()
        return {"roles": {name: {"total": role.total} for name, role in self._spec.roles.items()}}

    def events(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        self._behave()
        with self._changed:
            self.reads += 1
            return self._events[after : after + limit]

    def wait_for_events(self, *, after: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self._events) > after, timeout_s)

    def command(self, verb: str, body: Mapping[str, Any], *, by: str, timeout_s: float = 10.0) -> int:
        self._behave()
        job = self.state.job
        if job.phase.ended:
            raise Conflict(f"Job {job.name} is {job.phase}; it takes no commands.")
        event: e.Event
        if verb == "scale":
            self._coordinator.check_scale(self.state, body["role"], body["count"])
            event = e.ScaleRequested(body["role"], body["count"], by=by)
        elif verb == "stop":
            event = e.StopRequested(str(body.get("reason", "")), by=by)
        elif verb == "pause":
            event = e.PauseRequested(by=by)
        elif verb == "resume":
            event = e.ResumeRequested(by=by)
        else:
            raise GyreError(f"{verb!r} is no command.")
        return self.record(event, actor=by)

    def logs(
        self, *, role: str | None, rank: int | None, after: Mapping[str, int], limit_bytes: int
    ) -> dict[str, Any]:
        self._behave()
        chunks = []
        offsets = dict(after)
        for file, text in sorted(self.log_text.items()):
            vertex, incarnation = file.split(".")[:2]
            its_role, _, its_rank = vertex.rpartition("-")
            if (role is not None and its_role != role) or (rank is not None and its_rank != str(rank)):
                continue
            offset = offsets.get(file, 0)
            part = text.encode()[offset : offset + limit_bytes]
            if part:
                offsets[file] = offset + len(part)
                limit_bytes -= len(part)
                chunks.append(
                    {
                        "vertex": vertex,
                        "incarnation": int(incarnation),
                        "file": file,
                        "offset": offset,
                        "text": part.decode(errors="replace"),
                    }
                )
        return {"chunks": chunks, "next": offsets}

    def metrics(self) -> bytes:
        self._behave()
        return f"# TYPE gyre_journal_seq gauge\ngyre_journal_seq {len(self._events)}\n".encode()

    def _behave(self) -> None:
        if self.answer_after_s:
            time.sleep(self.answer_after_s)
        if self.fail_with is not None:
            raise self.fail_with
