"""Run as a program: a job is submitted to a head without workers; machines come, it grows, shrinks, and they go.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any


def main() -> int:
    import ray

    from gyre.api.home import home
    from gyre.testing.processes import ProcessFaults
    from tests.kill.autoscaled import autoscaled
    from tests.kill.jobs import tiny_job

    most = 3
    with autoscaled(head_cpus=2, cpus=4, machines=most, idle_s=5.0) as (address, folder):
        ray.init(address=address, namespace="gyre", log_to_driver=False)
        builder = tiny_job(
            steps=20_000,  # until this program has seen enough
            rollouts={"max_running": 1},  # so that they are what the trainer waits for
            rollout_cpu=3,
            rollout_total=1,
            elastic={
                "min": 1,
                "max": most,
                "up_cooldown_s": 1.2,
                "down_cooldown_s": 2.0,
                "cores_full": 2.0,  # however busy this machine is
                "machines_timeout_s": 150.0,  # a busy machine starts a raylet slowly
            },
            reward="SwitchedReward",
            actors=1,
        )
        out: dict[str, Any] = {"machines_at_first": living()}
        began = time.monotonic()
        job = builder.build()
        job.spec.node_num = None  # a bound of machines would forbid those that come
        handle = job.submit("grows", home_path=folder)
        out["notes"] = list(handle.notes)
        say(began, out["notes"])
        faults = ProcessFaults(handle)
        until = partial(faults.until, timeout_s=150.0)
        view = until(lambda view: view if view["job"]["reason"] == "no_room" else None, "a job that waits")
        out["while_it_waits"] = view["job"]
        say(began, view["job"]["message"])
        faults.reach_step(1, timeout_s=150.0)
        out["first_step_after_s"] = round(time.monotonic() - began, 1)
        say(began, "the first step")
        until(lambda view: serving(view) == most or None, "the most instances")
        out["grown_after_s"] = round(time.monotonic() - began, 1)
        out["machines_at_most"] = living()
        say(began, "grown")
        slow = home(folder).job_directory(handle.job_id) / "slow"
        slow.touch()
        # Three steps of up to 40 s, however slow this machine is.
        faults.until(lambda view: wanted(view) == 1 or None, "one instance", timeout_s=300.0)
        say(began, "shrunk")
        deadline = time.monotonic() + 120.0
        while living() > 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        out["machines_left"] = living()
        say(began, "machines are gone")
        slow.unlink()
        faults.reach_step(handle.status()["job"]["step"] + 2, timeout_s=150.0)
        handle.stop("seen enough")
        view = handle.wait(60.0)
        out["phase"] = view["job"]["phase"]
        out["incidents"] = [[one["vertex"], one["cause"], one["outcome"]] for one in view["incidents"]]
        groups = ray.util.placement_group_table().values()
        out["groups_left"] = [one["name"] for one in groups if one["state"] != "REMOVED"]
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def say(began: float, what: object) -> None:
    """How far it came, for whoever looks at a run that did not end."""
    print(f"{time.monotonic() - began:.0f} s: {what}", file=sys.stderr, flush=True)


def living() -> int:
    import ray

    return sum(1 for node in ray.nodes() if node["Alive"])


def rollouts(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [vertex for vertex in view["vertices"] if vertex["role"] == "rollout"]


def serving(view: dict[str, Any]) -> int:
    return sum(1 for one in rollouts(view) if one["phase"] == "running" and one["version"] is not None)


def wanted(view: dict[str, Any]) -> int:
    return sum(1 for one in rollouts(view) if one["phase"] not in ("stopped", "stopping"))


if __name__ == "__main__":
    sys.exit(main())
