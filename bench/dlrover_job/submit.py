"""Submits the job of bench/dlrover.py: in a process of its own, on a Ray cluster that this process has started."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    options = json.loads(sys.argv[1])
    import ray

    from gyre_dlrover.api.builder import RLJobBuilder

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=options["ray"],
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    builder = RLJobBuilder().device_per_node(8).device_type("CPU").config(options["config"])
    builder.trainer("dlrover_job.roles.Trainer").resource(cpu=0.5)
    builder.actor("dlrover_job.roles.Actor").total(2).resource(accelerator=0.5)
    builder.rollout("dlrover_job.roles.Rollout").total(2).resource(accelerator=0.5)
    job = builder.build()
    notes = Path(options["config"]["notes"])
    with notes.open("a") as file:
        file.write(f"{time.time()!r} submits\n")
    code = job.submit("bench", **options["submit"])
    with notes.open("a") as file:
        file.write(f"{time.time()!r} returns {code}\n")
    return int(code)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # neither's threads are waited for: Ray's cluster ends with this process
