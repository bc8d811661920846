"""Run as a program: a job on one machine, a second one that comes late, and Ray's notice that it will go.

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
            failover={"silence_timeout_s": 30.0},
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
        gate.open_to(40)
        faults.reach_step(35)
        cluster.add_node(num_cpus=4)
        until(lambda view: vertex(view, "rollout-1")["phase"] == "running" or None, "another machine")
        gate.open()
        view = handle.wait(150)
        left = [
            event["body"]["details"]
            for event in handle.events()
            if event["body"].get("what") == "InstanceLeft"
        ]
        out["left"] = [(one["instance"], one["reason"]) for one in left]
        out["phase"] = view["job"]["phase"]
        out["result"] = view["job"]["result"]
        out["incidents"] = view["incidents"]
        out["restarts"] = {one["id"]: one["restarts"] for one in view["vertices"] if one["restarts"]}
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def notify(address: str, node: str) -> None:
    """What a cloud's agent does when it hears that a machine will be taken back."""
    from ray._raylet import GcsClient

    deadline_ms = int((time.time() + NOTICE_S) * 1000)
    accepted, why = GcsClient(address=address).drain_node(node, PREEMPTION, "spot", deadline_ms)
    assert accepted, why


def vertex(view: dict[str, Any], name: str) -> dict[str, Any]:
    absent = {"no_room": "", "phase": "", "version": None, "node": ""}
    return next((one for one in view["vertices"] if one["id"] == name), absent)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
