"""Run as a program: a cluster of three nodes on this machine, one of which is killed under a running job.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    from gyre.api.home import home
    from gyre.testing.processes import ProcessFaults
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job
    from tests.kill.several_nodes import several_nodes

    with several_nodes(2, cpus=2) as (cluster, workers, folder):
        builder = tiny_job(config={"gated": True}).node_num(3)
        handle = builder.spread("rollout").build().submit("nodes", home_path=folder)
        gate = Gate(home(folder).job_directory(handle.job_id))
        faults = ProcessFaults(handle)
        gate.open_to(7)
        faults.reach_step(5)
        before = handle.status()
        victims = {v["id"] for v in before["vertices"] if v["node"] == workers[0].node_id}
        struck_at = time.time()
        cluster.remove_node(workers[0], allow_graceful=False)
        gate.open()
        view = handle.wait(150)
        out: dict[str, Any] = {
            "phase": str(view["job"]["phase"]),
            "result": view["job"]["result"],
            "nodes": sorted({v["node"] for v in before["vertices"]}),
            "victims": sorted(victims),
            "incidents": [
                {
                    key: incident[key]
                    for key in ("vertex", "cause", "scope", "outcome", "recovery_s", "decision")
                }
                | {"after_s": round(incident["at"] - struck_at, 2)}
                for incident in view["incidents"]
            ],
        }
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
