"""Run as a program: three nodes on this machine and a journal in PostgreSQL. The trainer and the node of the master are
killed together.

`master_moves.py POSTGRES_URL` prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from gyre.testing.processes import ProcessFaults

FOUND_S = 60.0
"""For Ray to notice a dead node and start the master elsewhere."""


def main(url: str) -> int:
    from gyre.api.home import home
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job
    from tests.kill.several_nodes import several_nodes

    with several_nodes(2, cpus=3) as (cluster, workers, folder):
        builder = tiny_job(config={"gated": True}, store=url).node_num(3)
        handle = builder.build().submit("moves", home_path=folder)
        gate = Gate(home(folder).job_directory(handle.job_id))
        faults = ProcessFaults(handle)
        gate.open_to(5)
        faults.reach_step(3)
        by_raylet = {one.all_processes["raylet"][0].process.pid: one for one in workers}
        # Ray chooses the node of a master by chance, and the head cannot be killed.
        while (node := by_raylet.get(raylet_of(master(handle)["pid"]))) is None:
            kill(handle)
        before, struck_at = master(handle), time.monotonic()
        raylet = raylet_of(before["pid"])
        (trainer,) = faults.kill("trainer-0")
        cluster.remove_node(node, allow_graceful=False)
        after = next_master(handle, before)
        moved_s = time.monotonic() - struck_at
        faults.replaced(trainer)
        elsewhere = raylet_of(after["pid"]) not in (raylet, 0)
        gate.open()
        view = handle.wait(150)
        out: dict[str, Any] = {
            "phase": str(view["job"]["phase"]),
            "result": view["job"]["result"],
            "epochs": [before["epoch"], after["epoch"]],
            "elsewhere": elsewhere,
            "moved_s": round(moved_s, 2),
            "outcomes": sorted({incident["outcome"] for incident in view["incidents"]}),
            "lost": [incident["vertex"] for incident in view["incidents"]],
        }
        handle.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def master(handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = handle.status()["master"]
    return found


def raylet_of(pid: int) -> int:
    """The raylet that started this process; 0 if that is gone."""
    try:
        return next((one.pid for one in psutil.Process(pid).parents() if "raylet" in one.name()), 0)
    except psutil.NoSuchProcess:
        return 0


def kill(handle: Any) -> None:
    """Kill the master and wait for the next."""
    victim = ProcessFaults(handle).kill("master")[0]
    next_master(handle, {"epoch": victim.incarnation})


def next_master(handle: Any, before: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + FOUND_S
    while time.monotonic() < deadline:
        now = master(handle)
        if now["epoch"] > before["epoch"] and now["answering"]:
            return now
        time.sleep(0.1)
    raise TimeoutError(f"no master came after epoch {before['epoch']} in {FOUND_S:g} s")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1]))
