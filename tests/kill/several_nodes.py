"""A Ray cluster of several nodes on this machine, for programs: a process has one Ray connection."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}


@contextmanager
def several_nodes(
    workers: int, *, cpus: int, head_cpus: int | None = None
) -> Iterator[tuple[Any, list[Any], str]]:
    """A head and so many workers, each with `cpus`: Ray's `Cluster`, its workers, and a folder for the job's home.

    With more `head_cpus` the head is the first machine that a plan takes; among equal ones that is chance.
    """
    os.environ.update(HEALTH)  # Ray reads them when its processes start
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="gn", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder  # where Ray notes the address of a new cluster
        os.makedirs(f"{folder}/ray", exist_ok=True)
        head = {"num_cpus": head_cpus or cpus, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        added = [cluster.add_node(num_cpus=cpus) for _ in range(workers)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="gyre", log_to_driver=False)
        yield cluster, added, folder
        ray.shutdown()
        cluster.shutdown()
