"""Run as a program: a cluster of three nodes on this machine, one of which is killed under a running job.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}


def main() -> int:
    os.environ.update(HEALTH)  # Ray reads them when its processes start
    import ray
    from ray.cluster_utils import Cluster

    from gyre.api.home import home
    from gyre.testing.processes import ProcessFaults
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job

    with tempfile.TemporaryDirectory(prefix="gn", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder  # where Ray notes the address of a new cluster
        os.makedirs(f"{folder}/ray", exist_ok=True)
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False},
        )
        workers = [cluster.add_node(num_cpus=2) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="gyre", log_to_driver=False)
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
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
