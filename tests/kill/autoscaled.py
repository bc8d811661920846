"""Ray's own autoscaler on this machine: a head without workers, and machines that are processes, for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.kill.several_nodes import HEALTH
from tests.waits import GENEROUS_S

PORT = 6379
"""The port that Ray's provider of such machines has written in."""


_COMMANDS = (
    "initialization",
    "setup",
    "head_setup",
    "worker_setup",
    "head_start_ray",
    "worker_start_ray",
)


@contextmanager
def autoscaled(*, head_cpus: int, cpus: int, machines: int, idle_s: float) -> Iterator[tuple[str, Path]]:
    """The address of the cluster, and a folder for the job's home. Machines of `cpus` come when they are wanted, at
    most so many, and go when they were idle for `idle_s`."""
    with tempfile.TemporaryDirectory(prefix="ga", dir="/tmp") as folder:
        config = {
            "cluster_name": "gyre",
            "max_workers": machines,
            "idle_timeout_minutes": idle_s / 60,
            "upscaling_speed": 10.0,
            "provider": {
                "type": "fake_multinode",
                "disable_node_updaters": True,  # they would go by SSH
                "use_node_id_as_ip": True,  # all of these machines have one address
            },
            "auth": {},
            # Ray reads all of these, though this provider uses none.
            **{name: {} for name in ("docker", "file_mounts", "head_node", "worker_nodes")},
            **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{whose}_commands": [] for whose in _COMMANDS},
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": _type(head_cpus, 0),
                "machine": _type(cpus, machines),
            },
        }
        path = Path(folder, "autoscaler.json")
        path.write_text(json.dumps(config))
        started = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={PORT}"]
        started += [f"--autoscaling-config={path}", f"--num-cpus={head_cpus}", f"--temp-dir={folder}/ray"]
        started += ["--include-dashboard=false", "--disable-usage-stats"]
        environment = {**os.environ, **HEALTH, "RAY_AUTH_MODE": "disabled"}
        environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        try:
            subprocess.run(started, env=environment, check=True, timeout=GENEROUS_S, stdout=sys.stderr)
            yield f"127.0.0.1:{PORT}", Path(folder)
        finally:
            import ray

            ray.shutdown()  # else this process ends with the cluster, before it has said what went wrong
            end_all(folder)


def _type(cpus: int, most: int) -> dict[str, object]:
    return {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": most}


def end_all(folder: str) -> None:
    """End the processes of the cluster in this folder: those that name it, and their children."""
    deadline = time.monotonic() + 10.0
    while (found := _of(folder)) and time.monotonic() < deadline:
        for process in found:
            try:
                process.kill()  # psutil compares the start time first
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=1.0)


def _of(folder: str) -> list[psutil.Process]:
    out = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(folder in part for part in process.info["cmdline"] or ()):
            out.append(process)
            out += process.children(recursive=True)
    return out
