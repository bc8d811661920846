"""Run as a program: two jobs on a cluster that has room for one and a half, and a small third that comes last.

Prints one JSON object. A program of its own because a process has one Ray connection.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any


def main() -> int:
    from gyre.api.home import home
    from gyre.api.reader import JobReader
    from gyre.testing.processes import ProcessFaults
    from tests.kill.gate import Gate
    from tests.kill.jobs import tiny_job
    from tests.kill.several_nodes import several_nodes

    with several_nodes(1, cpus=4, head_cpus=5) as (_, _, folder):

        def job(name: str, steps: int, cpu: float = 3) -> tuple[Any, ProcessFaults, Gate]:
            builder = tiny_job(
                steps=steps,
                config={"gated": True},
                rollout_cpu=cpu,
                elastic={"min": 1, "max": 2, "auto": False},
                failover={"silence_timeout_s": 30.0},
            )
            handle = builder.node_num(2).build().submit(name, home_path=folder)
            return handle, ProcessFaults(handle), Gate(home(folder).job_directory(handle.job_id))

        first, first_job, first_gate = job("first", 14)
        first_gate.open_to(7)
        first_job.reach_step(5)
        stood = machines(first.status())
        second, second_job, second_gate = job("second", 8)
        until = partial(second_job.until, timeout_s=60.0)
        waiting = until(lambda view: view if waits(view) else None, "a job that waits")
        out: dict[str, Any] = {"waits": sorted(waits(waiting)), "says": waiting["job"]["message"]}
        out["phase"] = [waiting["job"]["phase"], waiting["job"]["reason"]]
        out["begun"] = [one["id"] for one in waiting["vertices"] if one["phase"] == "running"]
        third, third_job, third_gate = job("third", 2, cpu=0.1)
        third_gate.open()
        third_job.until(
            lambda view: waits(view) or None, "a job that waits though it has room", timeout_s=60.0
        )
        out["third_says"] = third.status()["job"]["message"]
        first_gate.open_to(10)
        first_job.reach_step(9)
        with JobReader(home(folder).database_url()) as reader:
            out["places"] = {one["name"]: one["queue_place"] for one in reader.jobs()}
        out["third_ran"] = third.status()["job"]["step"]
        out["first_stays"] = machines(first.status()) == stood
        second_gate.open()
        first_gate.open()
        ends = [first.wait(120)]
        began = time.monotonic()
        until(lambda view: not waits(view) or None, "room")
        out["used_after_s"] = round(time.monotonic() - began, 2)
        ends += [second.wait(120), third.wait(120)]
        out["ends"] = [view["job"]["phase"] for view in ends]
        out["lost"] = [view["job"]["result"]["prompts_lost"] for view in ends]
        out["incidents"] = [view["incidents"] for view in ends]
        first.close()
        second.close()
        third.close()
    sys.stdout.write(json.dumps(out) + "\n")
    return 0


def machines(view: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["node"] for one in view["vertices"]}


def waits(view: dict[str, Any]) -> set[str]:
    return {one["id"] for one in view["vertices"] if one["no_room"]}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
