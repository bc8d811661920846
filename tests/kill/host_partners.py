"""Run as a program: rollouts and rewards that stand together in pairs, each pair on a machine of its own. One of these
machines is killed, and another comes late.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

NOT_USED_S = 5.0
"""Several times as long as a machine with room for both is there before it is used."""


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
            rollout_cpu=2,
            reward_total=2,
            reward_cpu=2,
            failover={"silence_timeout_s": 30.0},
        )
        builder = builder.node_num(2).spread("rollout").with_host_collocation("rollout", "reward")
        handle = builder.build().submit("partners", home_path=folder)
        gate = Gate(home(folder).job_directory(handle.job_id))
        faults = ProcessFaults(handle)
        until = partial(faults.until, timeout_s=60.0)
        gate.open_to(7)
        faults.reach_step(5)
        before = places(handle.status())
        out: dict[str, Any] = {"before": before, "killed": worker.node_id}
        cluster.remove_node(worker, allow_graceful=False)
        out["waits"] = until(lambda view: waits(view) if len(waits(view)) == 2 else None, "two that wait")
        cluster.add_node(num_cpus=3)  # for one of them
        time.sleep(NOT_USED_S)
        out["still"] = waits(handle.status())
        came = time.monotonic()
        whole = cluster.add_node(num_cpus=4)
        until(lambda view: not waits(view) or None, "nobody who waits")
        out["used_after_s"] = round(time.monotonic() - came, 2)
        gate.open()
        view = handle.wait(150)
        out |= {"after": places(view), "whole": whole.node_id, "phase": str(view["job"]["phase"])}
        out["result"] = view["job"]["result"]
        out["restarts"] = {one["id"]: one["restarts"] for one in view["vertices"] if one["restarts"]}
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def places(view: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["node"] for one in view["vertices"]}


def waits(view: dict[str, Any]) -> list[str]:
    return sorted(one["id"] for one in view["vertices"] if one["no_room"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
