"""Entrypoints of elastic training: functions that every rank runs, and a script."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gyre_dlrover.api.runtime import current_worker

RANKS = ("NAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "JOB", "ROLE")


def train() -> None:
    """Sum the ranks up, and write what this one is."""
    import torch
    import torch.distributed as dist

    config = current_worker().job_info.user_config
    mine = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(mine)
    known = " ".join(os.environ[name] for name in RANKS)
    folder = Path(config.folder)
    (folder / f"rank-{dist.get_rank()}").write_text(f"{known} {float(mine):g} {os.environ['E0']}")


def train_from_where_it_was() -> None:
    """Steps of an all-reduce each; rank 0 writes each down, and a new gang goes on from there."""
    import torch
    import torch.distributed as dist

    config = current_worker().job_info.user_config
    folder = Path(config.folder)
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    done = torch.tensor([len(list(folder.glob("step-*")))])
    dist.broadcast(done, src=0)
    for step in range(int(done), config.steps):
        total = torch.ones(1)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            (folder / f"step-{step:03}").write_text(f"{float(total):g} {os.getpid()}")
        time.sleep(config.step_s)


def raises() -> None:
    folder = Path(current_worker().job_info.user_config["folder"])
    rank = os.environ["RANK"]
    with (folder / f"tries-{rank}").open("a") as file:
        file.write("x")
    raise ArithmeticError(f"rank {rank} cannot add")
