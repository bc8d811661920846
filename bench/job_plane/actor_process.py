"""A rank of a trainer without Gyre's control plane, in a process of its own: `job_plane.actor`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def start_rank(case: Any, folder: Path, place: Path, *, gpus: list[int], rank: int = 0) -> Any:
    """The process of rank `rank` of as many as there are `gpus`. Its configuration is the job's own."""
    from job_plane.actor import ActorProcess

    config = case.spec(folder)["config"]
    config |= {"threads": 1 if case.dry else 8, "collective_timeout_s": 300.0}
    config["megatron"] |= {"device": "cpu" if case.dry else "cuda", "deterministic": False}
    options = {
        "config": config,
        "cuda": not case.dry,
        "threads": config["threads"],
        "rank": rank,
        "ranks": len(gpus),
        "directory": str(place),
    }
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": str(config["threads"]),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parents[2]), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    if not case.dry:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "GYRE_DEVICES": str(rank)}
    return ActorProcess(HERE, options, place / f"actor_{rank}.out", env=environment)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]
    from job_plane.actor import actor_main

    actor_main(json.loads(sys.argv[2]))
