"""Writes the golden histories: hand-written events, driven through the real decisions, with their snapshots.

    python -m tests.failover.build_golden [NAME ...]

A golden history of a release is kept for good: it stands for the journals that users have. A change of the decisions
that makes one of them fold to something else breaks stored jobs: write no file of a release anew.
`tampered` is the one that must not fold to its snapshot: it shows that replay would notice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gyre.config import ROLLOUT_MANAGER, Budget, JobSpec, parse_job
from gyre.config.changes import Changes, changes_between
from gyre.config.parse import apply_overrides
from gyre.failover import VertexPhase, rows_of
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.graph import compile_job
from tests.doubles.standing_job import small_spec
from tests.failover.histories import History, coordinator_of

FOLDER = Path(__file__).parent / "golden"
START_AT = 1_700_000_000.0


class World(History):
    """A history under the golden job, which answers the commands that end vertices."""

    def __init__(self, spec: JobSpec | None = None) -> None:
        self.spec = compile_job(spec or small_spec("golden")).spec
        super().__init__(coordinator_of(self.spec), now=START_AT)

    def record(self, *events: e.Event) -> None:
        for event in events:
            for command in self.decide(event).commands:
                if isinstance(command, c.StopVertex):
                    self.record(e.VertexStopped(command.vertex, command.incarnation))

    def submit(self) -> World:
        self.record(
            e.JobSubmitted(
                "golden-1", self.spec.name, {name: role.total for name, role in self.spec.roles.items()}
            ),
            e.MasterStarted(1, pid=100, node="n0", url="http://127.0.0.1:8265"),
        )
        return self

    def start_all(self) -> World:
        """Every vertex that is starting comes up."""
        for record in list(self.state.vertices.values()):
            if record.phase is VertexPhase.STARTING:
                pid = 1000 + len(self.records)
                self.record(e.VertexStarted(record.id, record.incarnation, pid=pid, node="n0"))
        return self

    def start_on(self, machine: str, others: dict[str, str]) -> None:
        """Every vertex that is starting comes up: on the machine, or where `others` says."""
        for record in list(self.state.vertices.values()):
            if record.phase is VertexPhase.STARTING:
                pid, node = 1000 + len(self.records), others.get(record.id, machine)
                self.record(e.VertexStarted(record.id, record.incarnation, pid=pid, node=node))

    def die(self, vertex: str, machine: str) -> None:
        """It dies on the machine, and comes up there again."""
        lost = self.state.vertices[vertex].incarnation
        self.record(e.VertexLost(vertex, lost, "process_died", {"exit": "SIGKILL"}, node=machine))
        self.start_on(machine, {})

    def go_on(self, roles: dict[str, int], changes: Changes) -> None:
        """The ended job goes on: what comes is decided over the changed spec."""
        plain = self.spec.model_dump(mode="json")
        after = apply_overrides(plain, [f"{key}={new}" for key, (_, new) in changes.items()])
        self.spec = compile_job(parse_job(after)).spec
        assert changes_between(plain, self.spec.model_dump(mode="json")) == changes
        self.coordinator = coordinator_of(self.spec)
        self.record(e.JobContinued(roles, changes))

    def step(self, number: int) -> None:
        trainer = self.state.vertices["trainer-0"].incarnation
        self.record(
            e.StepCompleted(trainer, number, number, {"reward": number / 10}),
            e.WeightsPublished(
                trainer, number, number, f"xxh3:{number:016x}", 1 << 20, base=number - 1 or None
            ),
        )

    def finish(self) -> None:
        self.record(
            e.TrainerFinished(self.state.vertices["trainer-0"].incarnation, {"steps": self.state.job.step})
        )

    def as_dict(self, about: str) -> dict[str, Any]:
        snapshot = [
            {"kind": kind, "key": key, "body": body}
            for (kind, key), body in sorted(rows_of(self.state).items())
        ]
        data = {
            "about": about,
            "spec": self.spec.model_dump(mode="json"),
            "events": [
                {**asdict(record), "id": f"e{record.seq}", "cause": None, "actor": "master"}
                for record in self.records
            ],
            "snapshot": snapshot,
        }
        plain: dict[str, Any] = json.loads(json.dumps(data))
        return plain


def undisturbed() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    for number in (1, 2, 3):
        world.step(number)
    world.record(
        e.Evaluated(incarnation=1, version=3, accuracy=0.75, count=64, prompts=16),
        e.CheckpointCommitted(1, 3, "/checkpoints/3"),
    )
    world.finish()
    return world.as_dict("Nothing goes wrong.")


def rollout_lost() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    world.step(1)
    world.record(
        e.VertexLost("rollout-1", 1, "process_died", {"exit": "SIGKILL"}, detected_after_s=0.02),
        e.VertexLost("rollout-1", 1, "process_died", {"exit": "SIGKILL"}),
    )
    world.start_all()
    world.step(2)
    world.finish()
    return world.as_dict("A rollout dies, the news comes twice, it is replaced.")


def actor_lost() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    world.step(1)
    world.record(
        e.CheckpointCommitted(1, 1, "/checkpoints/1"),
        e.VertexLost("actor-1", 1, "stalled", {"stack": "File train.py, line 3"}, detected_after_s=2.5),
        e.OperatorFailed(1, "actor-0", 1, "actor.update", "peer gone", "Traceback …", user_code=False),
    )
    world.start_all()
    world.step(2)
    world.finish()
    return world.as_dict("A rank hangs; its gang restarts together, once.")


def user_code() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    trouble = 'Traceback (most recent call last):\n  File "mine.py", line 7\nValueError: no'
    for report in range(1, 5):
        reward = world.state.vertices["reward-0"]
        if reward.phase is VertexPhase.STARTING:
            world.start_all()
            reward = world.state.vertices["reward-0"]
        world.record(
            e.OperatorFailed(
                1,
                "reward-0",
                reward.incarnation,
                "reward.score",
                "ValueError: no",
                trouble,
                user_code=True,
                report=report,
            )
        )
    return world.as_dict("User code raises until its budget is spent: the job fails with its traceback.")


def commanded() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    world.record(e.ScaleRequested("rollout", 3))
    world.start_all()
    world.record(e.PauseRequested(), e.ResumeRequested(), e.ScaleRequested("rollout", 1))
    world.record(e.MasterStarted(2, pid=200, node="n0"), e.ScaleRequested("rollout", 2))
    world.start_all()
    world.record(e.StopRequested("enough"), e.TimerFired("drain"))
    return world.as_dict("Scaled up and down, paused, resumed, taken over by a new master, stopped.")


def continued() -> dict[str, Any]:
    """It ends over another spec than it began with: a machine is left alone after three deaths, and after two."""
    spec = small_spec("golden")
    spec.roles[ROLLOUT_MANAGER] = spec.roles["reward"].model_copy()
    spec.failover.vertex = Budget(max=20, window_s=3600)
    world = World(spec)
    roles = {name: role.total for name, role in world.spec.roles.items()}
    n0, n1, digests = "a" * 56, "b" * 56, ("c" * 64, "d" * 64)
    world.record(
        e.JobSubmitted("golden-1", world.spec.name, roles, weights_from="job golden-0, step_00000003"),
        e.MasterStarted(1, pid=100, node="h0", url="http://127.0.0.1:8265"),
    )
    world.start_on(n0, {"rollout-1": n1, "reward-0": n1})
    world.step(1)
    world.record(
        e.JoinTokenCreated("spot", digests[0]),
        e.JoinTokenCreated("lent", digests[1], expires_at=START_AT + 1e6),
        e.JoinTokenRevoked("spot"),
        e.JoinTokenRevoked("default"),
    )
    for victim in ("rollout-1", "reward-0"):
        world.die(victim, n1)
    world.record(e.CheckpointCommitted(1, 1, "/checkpoints/1"))
    world.die("rollout-1", n1)  # one too many: the machine is left alone
    world.record(e.UndrainRequested(node=n1))
    world.record(e.DrainRequested(node=n1, reason="spot notice", by="ray"))
    world.start_on(n0, {})
    world.record(
        e.DrainRequested(vertex="rollout-0", reason="moved"),
        e.UndrainRequested(node=n1),
        e.UndrainRequested(vertex="rollout-0"),
        e.DrainRequested(vertex="actor-1", reason="moved"),  # and with it its gang
    )
    world.start_on(n0, {"rollout-0": n1})
    world.record(e.StopRequested("enough"), e.TimerFired("drain"))
    world.go_on(roles, {"failover.machine.max": [3, 2], "run.steps": [world.spec.run.steps, 9]})
    world.record(e.MasterStarted(2, pid=200, node="h0"))
    world.start_on(n0, {"rollout-1": n1, "reward-0": n1})
    for victim in ("rollout-1", "reward-0"):
        world.die(victim, n1)  # here two are too many
    gone = world.state.vertices["rollout-1"].incarnation
    world.record(e.VertexLost("rollout-1", gone, "node_lost", {"node": n1}, node=n1))
    world.record(e.MachineExamined(n1, "The job's directory is not there."))
    world.start_on(n0, {})
    world.step(2)
    world.finish()
    return world.as_dict("Tokens, bad and drained machines, an end, and a going on with another spec.")


def evaluated() -> dict[str, Any]:
    world = World()
    world.submit()
    world.start_all()
    by = {"math": {"count": 6, "reward_mean": 0.5, "accuracy": 0.5}}
    common: dict[str, Any] = {
        "count": 8,
        "prompts": 2,
        "reward_std": 0.5,
        "by": by,
        "best_of": {"1": 0.5, "4": 0.75},
    }

    def found(version: int, name: str, mean: float, accuracy: float | None) -> e.Evaluated:
        passed = {} if accuracy is None else {"1": accuracy, "4": 0.75}
        return e.Evaluated(
            incarnation=1,
            version=version,
            set=name,
            reward_mean=mean,
            accuracy=accuracy,
            pass_at=passed,
            **common,
        )

    world.record(found(0, "math500", 0.25, 0.25), found(0, "aime", 0.5, None))
    world.step(1)
    world.step(2)
    world.record(
        found(2, "aime", 0.625, None),
        found(2, "math500", 0.5, 0.5),
        found(2, "math500", 0.875, 0.875),  # told again, and the first is final
        e.EvaluationLeftOut(1, 1, "its policy is served no more", set="aime"),
    )
    world.finish()
    return world.as_dict("Two held-out sets, evaluated twice each.")


def judged() -> dict[str, Any]:
    """A held-out set whose reward function says what is right, and another number beside it; and one that says
    nothing."""
    world = World()
    world.submit()
    world.start_all()
    each: dict[str, Any] = {"incarnation": 1, "version": 0, "count": 8, "prompts": 2, "reward_mean": 0.25}
    said: dict[str, Any] = {
        "right_by": "reward.acc",
        "components": {"reward.acc": 0.5, "reward.format": 0.75},
    }
    world.record(
        e.Evaluated(accuracy=0.5, set="aime", **each, **said),
        e.Evaluated(accuracy=None, set="math500", **each),
    )
    world.step(1)
    world.finish()
    return world.as_dict("A held-out set whose reward function says what is right.")


def learning() -> dict[str, Any]:
    """Steps are summed up, warnings come, change, end and stay, and the job goes on."""
    world = World()
    roles = {name: role.total for name, role in world.spec.roles.items()}
    world.record(
        e.JobSubmitted("golden-1", world.spec.name, roles),
        e.MasterStarted(1, pid=100, node="n0", url="http://127.0.0.1:8265"),
    )
    world.start_all()
    metrics = {"reward_mean": 0.25, "reward_std": 0.5, "tokens": 512, "entropy": 1.5}
    world.record(
        e.StepCompleted(1, 1, 1, metrics),
        e.LearningWarned(1, "cut_off", "30 % of the answers of step 1 were cut off", 1),
        e.LearningWarned(1, "flat_groups", "80 % of the groups of step 1 have no gradient", 1),
        e.StepCompleted(1, 2, 2, metrics | {"reward_mean": 0.5}),
        e.LearningWarned(1, "cut_off", "", 2, holds=False),
        e.LearningWarned(1, "flat_groups", "75 % of the groups of steps 1 to 2 have no gradient", 2),
    )
    world.finish()
    world.go_on(roles, {"run.steps": [world.spec.run.steps, 9]})
    world.record(e.MasterStarted(2, pid=200, node="n0"))
    world.start_all()
    trainer = world.state.vertices["trainer-0"].incarnation
    world.record(e.StepCompleted(trainer, 3, 3, metrics | {"reward_mean": 0.75}))
    world.finish()
    return world.as_dict("Steps that are summed up, and warnings of a job that does not learn.")


def tampered() -> dict[str, Any]:
    data = rollout_lost()
    for row in data["snapshot"]:
        if row["kind"] == "job":
            row["body"]["step"] = 20
        if row["key"] == "rollout-1":
            row["body"]["restarts"] = 0
    data["snapshot"] = [row for row in data["snapshot"] if row["kind"] != "budget"]
    return {
        **data,
        "about": "As rollout_lost, but somebody has been at the snapshot: must not compare equal.",
    }


HISTORIES: dict[str, Callable[[], dict[str, Any]]] = {
    build.__name__: build
    for build in (
        undisturbed,
        rollout_lost,
        actor_lost,
        user_code,
        commanded,
        continued,
        evaluated,
        judged,
        learning,
        tampered,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:] or HISTORIES:
        text = json.dumps(HISTORIES[name](), indent=1, sort_keys=True, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n")
