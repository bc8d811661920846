"""One rank of a gang on a machine: an actor of plain torch or of Megatron that trains, alone with its peers.

python -m tests.machines.rank JSON

Prints a line of JSON when it has met the others, one after each step, and one at its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from gyre.workloads.base import WorkloadContext
from tests.megatron.work import CONFIG, random_groups, take_step

FOREVER = 10**6


@dataclass(frozen=True)
class Orders:
    """What a rank does: `steps` steps, with a checkpoint in `folder` after each, which a later gang goes on from."""

    backend: str
    rank: int
    ranks: int
    master_addr: str
    master_port: int
    address: str
    """What Ray would call the machine's; empty where nobody knows it."""
    timeout_s: float
    folder: str
    steps: int = 2
    megatron: dict[str, Any] | None = None

    def words(self) -> list[str]:
        return [sys.executable, "-m", "tests.machines.rank", json.dumps(asdict(self))]


def main(orders: Orders) -> None:
    began = time.monotonic()
    torch.set_num_threads(1)
    if orders.backend == "torch":
        from gyre.workloads.torch.actor import TorchActor as Actor
    else:
        import tests.megatron.preload  # noqa: F401
        from gyre.workloads.megatron.actor import MegatronActor as Actor  # type: ignore[assignment]
    actor = Actor()
    config = CONFIG | {"collective_timeout_s": orders.timeout_s, "megatron": orders.megatron or {}}
    where = {name: getattr(orders, name) for name in ("master_addr", "master_port", "address")}
    actor.context = WorkloadContext(
        "j", "actor", orders.rank, orders.ranks, config=config, directory=Path(orders.folder), **where
    )
    loaded = time.monotonic()
    try:
        actor.setup()
        say(met=True, at=own_ends())
        saved = sorted(Path(orders.folder).glob("step-*"), key=lambda path: int(path.name[5:]))
        if saved:
            actor.restore(saved[-1])
        else:
            actor.warm_start()
        while actor.step < orders.steps:
            take_step(actor, [random_groups(4 * actor.step, 4)])
            path = Path(orders.folder, f"step-{actor.step}")
            actor.checkpoint(path.with_name(f"part-{actor.step}"))
            torch.distributed.barrier()
            if orders.rank == 0:
                path.with_name(f"part-{actor.step}").rename(path)
            say(step=actor.step)
        say(ended=actor.step, digest=actor.state()["digest"])
    except Exception as error:
        now = time.monotonic()
        say(failed=type(error).__name__, error=str(error)[:600], waited_s=now - loaded, all_s=now - began)
    os._exit(0)  # what a broken group still does at its end is not looked at here


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def own_ends() -> list[str]:
    """This process's own addresses in connections to others."""
    found = psutil.Process().net_connections("tcp")
    return sorted(
        {one.laddr.ip.removeprefix("::ffff:") for one in found if one.status == psutil.CONN_ESTABLISHED}
    )


if __name__ == "__main__":
    main(Orders(**json.loads(sys.argv[1])))
