"""Run as a program: a job on one machine, a second one that comes late, Ray's notice that it will go, another that is
lost without a notice and is away for a while, and one more.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

PREEMPTION = 2
"""`DrainNodeReason` of Ray's GCS: the machine goes whatever runs there."""

NOTICE_S = 120.0

AWAY_S = 20.0
"""Longer than all restarts of a vertex take that the job's small budget pays for."""


def main() -> int:
    from gyre.api.home import home
    from gyre.testing.processes import ProcessFaults
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job
    from tests.kill.several_nodes import several_nodes

    with several_nodes(0, cpus=4, head_cpus=5) as (cluster, _, folder):
        builder = tiny_job(
            steps=60,
            config={"gated": True},
            rollout_cpu=3,
            rollout_total=1,
            elastic={"min": 1, "max": 2, "auto": False},
            failover={
                "silence_timeout_s": 30.0,
                "vertex": {"max": 2, "window_s": 600},
                "job": {"max": 0, "window_s": 600},
            },
        )
        handle = builder.node_num(3).build().submit("guests", home_path=folder)
        gate = Gate(home(folder).job_directory(handle.job_id))
        faults = ProcessFaults(handle)
        until = partial(faults.until, timeout_s=60.0)
        gate.open_to(7)
        faults.reach_step(5)
        out: dict[str, Any] = {}
        handle.scale("rollout", 2)
        until(lambda view: vertex(view, "rollout-1")["no_room"] or None, "one that waits for room")
        began = time.monotonic()
        guest = cluster.add_node(num_cpus=4)
        until(
            lambda view: vertex(view, "rollout-1")["version"] is not None or None,
            "weights on the new machine",
        )
        out["used_after_s"] = round(time.monotonic() - began, 2)
        out["stands_on_the_guest"] = vertex(handle.status(), "rollout-1")["node"] == guest.node_id
        gate.open_to(20)
        faults.reach_step(12)
        began = time.monotonic()
        notify(cluster.address, guest.node_id)
        until(
            lambda view: vertex(view, "rollout-1")["phase"] in ("stopping", "starting") or None, "the notice"
        )
        out["noticed_after_s"] = round(time.monotonic() - began, 2)
        view = until(
            lambda view: view if vertex(view, "rollout-1")["no_room"] else None, "one that is drained"
        )
        out["drained_after_s"] = round(time.monotonic() - began, 2)
        out["while_drained"] = {"phase": view["job"]["phase"], "reason": view["job"]["reason"]}
        cluster.remove_node(guest, allow_graceful=False)
        gate.open_to(30)
        faults.reach_step(25)
        lost = cluster.add_node(num_cpus=4)
        view = until(
            lambda view: view if vertex(view, "rollout-1")["phase"] == "running" else None, "another machine"
        )
        out |= {"incidents": view["incidents"], "restarts": summary(view)["restarts"]}
        out["stays"], out["lost"] = (vertex(view, name)["node"] for name in ("rollout-0", "rollout-1"))
        assert out["lost"] == lost.node_id
        cluster.remove_node(lost, allow_graceful=False)
        gate.open_to(45)
        time.sleep(AWAY_S)
        out["away"] = summary(handle.status())
        began = time.monotonic()
        cluster.add_node(num_cpus=4)
        until(lambda view: not summary(view)["waiting"] or None, "one more machine")
        out["used_again_after_s"] = round(time.monotonic() - began, 2)
        gate.open()
        view = handle.wait(150)
        left = [
            event["body"]["details"]
            for event in handle.events()
            if event["body"].get("what") == "InstanceLeft"
        ]
        out["left"] = [(one["instance"], one["reason"]) for one in left]
        out |= {"end": summary(view), "result": view["job"]["result"]}
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def notify(address: str, node: str) -> None:
    """What a cloud's agent does when it hears that a machine will be taken back."""
    from ray._raylet import GcsClient

    deadline_ms = int((time.time() + NOTICE_S) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node, PREEMPTION, "spot", deadline_ms)
    assert accepted, why


def summary(view: dict[str, Any]) -> dict[str, Any]:
    return {
        "phase": str(view["job"]["phase"]),
        "reason": str(view["job"]["reason"]),
        "message": view["job"]["message"],
        "step": view["progress"].get("step"),
        "waiting": {v["id"]: v["no_room"] for v in view["vertices"] if v["no_room"]},
        "restarts": {v["id"]: v["restarts"] for v in view["vertices"] if v["restarts"]},
        "incidents": [(i["vertex"], i["cause"], i["scope"], i["outcome"]) for i in view["incidents"]],
    }


def vertex(view: dict[str, Any], name: str) -> dict[str, Any]:
    absent = {"no_room": "", "phase": "", "version": None, "node": ""}
    return next((one for one in view["vertices"] if one["id"] == name), absent)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
