"""`gyre demo`: a small language model learns addition by GRPO, through the whole system, on this machine.

A short supervised warm start comes first: the model learns from a pupil who often forgets to carry. Reinforcement
learning then has to find out, from rewards alone, that carrying is what is right. With `agent` it learns to use a
calculator over two or three turns instead, from a pupil who often forgets that there is one. With `chaos`, the
processes that it runs on are killed meanwhile.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.api.definition.builder import RLJobBuilder
from gyre.api.definition.rl_job import RLJob
from gyre.api.handle import JobHandle
from gyre.api.submit import submit_job
from gyre.api.terminal.foreground import cluster_watched, in_foreground, starting, terminable
from gyre.api.terminal.live import LiveProgress
from gyre.errors import GyreError, JobFailed

CONFIG: dict[str, Any] = {
    "task": {"digits": 2, "operators": "+"},
    "model": {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "mlp": 256, "max_positions": 32},
    "sampling": {
        "n": 8,
        "temperature": 1.0,
        "max_new_tokens": 4,
    },  # the longest sum has three digits, and an end
    "optim": {"lr": 1e-3},
    "warm_start": {"max_steps": 250, "batch": 256, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
}
"""Tuned together: from the warm start, at about a third of the held-out problems, 120 steps of 128 prompts take the
model beyond 90 %."""

STEPS = 80
"""At 128 prompts a step; accuracy passes 80 % between steps 20 and 60, depending on the seed."""

AGENT_CONFIG: dict[str, Any] = {
    "task": {"name": "gyre.agents.calculator:CalculatorTask"},
    "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 168, "max_positions": 64},
    "sampling": {
        "n": 8,
        "temperature": 1.0,
        "max_new_tokens": 12,
    },  # the longest turn is a call of four digits and two
    "evaluation": {"temperature": 1.0, "threshold": 1.0},
    "optim": {"lr": 1e-3},
    "warm_start": {"max_steps": 120, "batch": 128, "lr": 4e-3, "slips": 0.6},
    "agent": {
        "environment": "gyre.agents.calculator:Calculator",
        "concurrency": 64,
        "max_turns": 4,
        "max_tokens": 60,
    },
}
"""Of the demo with an agent. After the warm start about a quarter of the held-out problems are solved, as often as the
pupil remembers to call."""

AGENT_STEPS = 16
"""At 32 prompts, or 256 sessions, a step."""

WAIT_S = 1800.0
"""Deadline of the demo, far beyond its time on the slowest machine that it is meant for."""

POLL_S = 0.5


def demo_job(*, steps: int | None = None, seed: int = 0, agent: bool = False) -> RLJob:
    """The demo as a job: two rollout vertices, one reward vertex, a gang of two actor ranks; with `agent` one rollout
    vertex, and two that run sessions."""
    prompts = 32 if agent else 128
    builder = (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(8)
        .device_type("CPU")
        .recipe("grpo")
        .config({"seed": seed, **(AGENT_CONFIG if agent else CONFIG)})
        .run(
            steps=steps or (AGENT_STEPS if agent else STEPS),
            prompts_per_step=prompts,
            groups_per_firing=prompts // 4,
            groups_per_micro_batch=prompts // 2,
            checkpoint_every=10,
            evaluate_every=4 if agent else 10,
            held_out=128 if agent else 512,
        )
        .failover(silence_timeout_s=6.0)
    )
    roles = builder.actor().total(2)
    if agent:
        job: RLJob = roles.rollout().total(1).agent().total(2).build()
    else:
        job = roles.rollout().total(2).elastic(1, 4).reward().total(1).build()
    return job


def run_demo(
    *,
    chaos: bool = False,
    as_json: bool = False,
    steps: int | None = None,
    seed: int = 0,
    home_path: str | Path | None = None,
    opens_page: bool = False,
    agent: bool = False,
) -> int:
    """Run the demo in the foreground; with `opens_page` a browser shows its page. Returns the exit status: 0 only if
    it succeeded with every prompt accounted for."""
    started = time.monotonic()
    plan = (AGENT_PLAN if agent else PLAN) if chaos else ()
    job = demo_job(steps=steps, seed=seed, agent=agent)
    live = LiveProgress(
        "GRPO on products, with a calculator. Warm start: supervised, on sessions of a pupil who forgets to ask it."
        if agent
        else "GRPO on two-digit addition. Warm start: supervised, on the answers of a pupil who forgets carries."
    )
    live.opens_page = opens_page
    live.say("starting Ray and the job's processes …")
    name = f"demo-{time.strftime('%H%M%S')}"
    with terminable():
        try:
            with starting():
                handle = submit_job(job.spec, name, home_path=home_path)
            with in_foreground(handle):
                live.read_steps = lambda step: handle.steps(after=step)
                try:
                    view = _watch(handle, live, plan)
                finally:
                    live.close()
        finally:
            live.close()
    summary = summary_of(view, wall_s=time.monotonic() - started)
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    _tell_end(live, view, summary)
    return 0 if keeps_its_promise(view) else 1


def keeps_its_promise(view: dict[str, Any]) -> bool:
    """Whether the job succeeded, and of the prompts that it drew, which are some, none was lost or trained twice."""
    result = view["job"]["result"]
    if str(view["job"]["phase"]) != "succeeded" or not result.get("prompts"):
        return False
    return (result.get("prompts_lost"), result.get("trained_twice")) == (0, 0)


def summary_of(view: dict[str, Any], *, wall_s: float) -> dict[str, Any]:
    """Returns the summary that `demo --json` prints at the end."""
    result = view["job"]["result"]
    return {
        "job": view["job"]["job_id"],
        "status": str(view["job"]["phase"]),
        "steps": result.get("steps", view["job"]["step"]),
        "accuracy_first": result.get("accuracy_first"),
        "accuracy_last": result.get("accuracy_last"),
        "prompts_lost": result.get("prompts_lost"),
        "trained_twice": result.get("trained_twice"),
        "incidents": len(view["incidents"]),
        "wall_s": round(wall_s, 1),
    }


Plan = tuple[tuple[float, str, tuple[str, ...]], ...]
"""At which share of the steps, how, and who."""

PLAN: Plan = (
    (0.05, "kill", ("rollout_manager-0",)),
    (0.12, "kill", ("rollout-0",)),
    (0.20, "kill", ("reward-0",)),
    (0.30, "kill", ("actor-1",)),
    (0.42, "kill", ("trainer-0",)),
    (0.52, "kill", ("master",)),
    (0.62, "kill", ("trainer-0", "master")),
    (0.74, "stop", ("rollout-1",)),
    (0.86, "kill", ("actor-0", "rollout-0")),
)

AGENT_PLAN: Plan = (
    (0.05, "kill", ("rollout_manager-0",)),
    (0.12, "kill", ("agent-0",)),
    (0.20, "kill", ("rollout-0",)),
    (0.30, "kill", ("actor-1",)),
    (0.42, "kill", ("agent-0", "agent-1")),
    (0.52, "kill", ("master",)),
    (0.62, "kill", ("trainer-0", "master")),
    (0.74, "stop", ("agent-1",)),
    (0.86, "kill", ("agent-0", "rollout_manager-0")),
)


@dataclass(slots=True)
class Chaos:
    """Kills by the step that the job has reached: each kind of process once, then several at a time."""

    handle: JobHandle
    live: LiveProgress
    steps: int
    plan: Plan
    done: set[int] = field(default_factory=set)

    def strike(self, step: int) -> None:
        """Kill whatever is due at this step. Runs in a thread of its own, because finding a victim may take a
        moment."""
        for index, (share, how, names) in enumerate(self.plan):
            if index not in self.done and step >= max(1, round(share * self.steps)):
                self.done.add(index)
                threading.Thread(target=self._do, args=(how, names), name="gyre-chaos", daemon=True).start()

    def _do(self, how: str, names: tuple[str, ...]) -> None:
        from gyre.testing.processes import ProcessFaults

        faults = ProcessFaults(self.handle)
        try:
            victims = faults.kill(*names) if how == "kill" else [faults.stop(name) for name in names]
        except (TimeoutError, ProcessLookupError, GyreError):
            return  # it was down already, or the job has ended: nothing left to kill
        signal_name = "SIGKILL" if how == "kill" else "SIGSTOP"
        for victim in victims:
            self.live.say(f"chaos: {signal_name} to {victim.name} (pid {victim.pid})")


def _watch(handle: JobHandle, live: LiveProgress, plan: Plan) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    monkey: Chaos | None = None
    show = cluster_watched(live.show)
    while True:
        view = handle.status()
        show(view)
        if view["job"]["ended_at"]:
            return view
        steps = view["progress"].get("steps")
        if plan and steps:
            monkey = monkey or Chaos(handle, live, steps, plan)
            monkey.strike(view["progress"].get("step") or 0)
        if time.monotonic() > deadline:
            raise JobFailed(f"the demo did not end within {WAIT_S:g} s.", hint="See `gyre events`.")
        time.sleep(POLL_S)


def _tell_end(live: LiveProgress, view: dict[str, Any], summary: dict[str, Any]) -> None:
    """What the last line does not say: the error, or each incident, and where to look."""
    if summary["status"] != "succeeded":
        if error := view["job"]["error"]:
            live.say(error)
        return
    for incident in view["incidents"]:
        seconds = incident["recovery_s"]
        took = f"{seconds:.1f} s" if seconds else "–"
        live.say(f"  {incident['vertex']}: {incident['cause']} → {incident['decision']} ({took})")
    live.say(f"look back with: gyre events {summary['job']}")
    live.say(f"                gyre replay {summary['job']}")
