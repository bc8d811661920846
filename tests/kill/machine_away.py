"""Run as a program: a job whose second machine goes away, is away for a while, and comes back as another.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

AWAY_S = 20.0
"""Longer than all restarts of a vertex take that the job's small budget pays for."""


def main() -> int:
    from gyre.api.home import home
    from gyre.testing.processes import ProcessFaults
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job
    from tests.kill.several_nodes import several_nodes

    with several_nodes(1, cpus=4, head_cpus=5) as (cluster, (worker,), folder):
        builder = tiny_job(
            steps=60,
            config={"gated": True},
            rollout_cpu=3,
            elastic={"min": 1, "max": 2, "auto": False},
            failover={"vertex": {"max": 2, "window_s": 600}, "job": {"max": 0, "window_s": 600}},
        )
        builder = builder.node_num(2).spread("rollout")
        handle = builder.build().submit("away", home_path=folder)
        gate = Gate(home(folder).job_directory(handle.job_id))
        faults = ProcessFaults(handle)
        gate.open_to(7)
        faults.reach_step(5)
        out: dict[str, Any] = {"before": places(handle.status())}
        cluster.remove_node(worker, allow_graceful=False)
        gate.open_to(40)
        time.sleep(AWAY_S)
        out["away"] = summary(handle.status())
        came = time.monotonic()
        cluster.add_node(num_cpus=4)
        while summary(handle.status())["waiting"] and time.monotonic() - came < 60:
            time.sleep(0.1)
        out["used_after_s"] = round(time.monotonic() - came, 2)
        gate.open()
        view = handle.wait(150)
        out["end"] = summary(view) | {"result": view["job"]["result"]}
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def places(view: dict[str, Any]) -> dict[str, str]:
    return {vertex["id"]: vertex["node"][:8] for vertex in view["vertices"]}


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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
