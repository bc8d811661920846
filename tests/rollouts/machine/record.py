"""Record the histories that `test_recorded.py` plays again: `python -m tests.rollouts.machine.record`.

Only for a change that is meant to do something else: what is recorded is what a manager is held to.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

from tests.rollouts.machine.player import Step
from tests.rollouts.machine.world import World

GOLDEN = Path(__file__).parent / "golden"
STEPS = 700
LIVES = {"trainer": (1, 2), "handover": (3,), "door": (4, 5)}
"""By kind of job, the seeds."""


def written(history: list[Step]) -> bytes:
    text = "\n".join(json.dumps(step, separators=(",", ":"), default=str) for step in history)
    return gzip.compress(text.encode(), mtime=0)


def read(path: Path) -> list[Step]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().split("\n")]


async def life(kind: str, seed: int, steps: int = STEPS) -> list[Step]:
    return await World(kind, seed).live(steps)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for kind, seeds in LIVES.items():
        for seed in seeds:
            history = asyncio.run(life(kind, seed))
            path = GOLDEN / f"{kind}_{seed}.json.gz"
            path.write_bytes(written(history))
            print(path.name, len(history), path.stat().st_size)


if __name__ == "__main__":
    main()
