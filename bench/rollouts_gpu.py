"""The rollout plane alone, not the product's job (that is `job_gpu.py`), around a real SGLang on one or two GPUs: what
it costs, and what it does when things die.

    python bench/rollouts_gpu.py --out DIR [--part single ...]      # SGLang 0.5.17 or newer, a GPU; under 10 minutes
    python bench/rollouts_gpu.py --out DIR --dry-run                # the same on CPU with the embedded engine

The model has Qwen3-0.6B's shape and random bf16 weights, in two versions. The manager, each agent and each engine are
processes of their own; the ledger is a SQLite file on disk; the trainer is Gyre's client in this process.

    single      one instance: the engine asked directly by Gyre's engine client, and through the whole plane, in turn;
                directly with as many in flight as it runs, and with as many as the plane gives it ("over")
    updates     new weights under running samples: in place, then (after the manager was killed) by retracting
    transcript  raw replies of the engine, one JSON line each, into transcript.jsonl
    two         two instances; one is killed with its engine and brought back. Beside it the sum of the capacities
    crash       the engine's scheduler of one instance is killed
    drain       one instance is drained with notice
    ends        an agent alone is killed: its engine ends, and no GPU memory is held
    seeded      whether SGLang's deterministic inference starts, keeps a sample's tokens, and what it costs

Each part has a deadline; one that fails is recorded with the last words of the engines, and the next one goes on.
results.json is written anew after each part. tokens/s are of whole runs, ramp and tail included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_plane.children import Child
from gpu_plane.conduct import NAMES, conduct
from gpu_plane.model import model_main
from gpu_plane.roles import agent_main, manager_main

Child.script = Path(__file__).resolve()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--part", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--rounds", type=int, help="of the throughputs of `single`")
    parser.add_argument("--seconds", type=float, help="for everything; parts that find no time are left out")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="so many times all deadlines, on a machine that is busy"
    )
    for role in ("manager", "agent", "model"):
        parser.add_argument(f"--{role}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.manager:
        asyncio.run(manager_main(json.loads(options.manager)))
    elif options.agent:
        asyncio.run(agent_main(json.loads(options.agent)))
    elif options.model:
        model_main(json.loads(options.model))
    elif options.out is None:
        parser.error("--out is needed")
    else:
        return conduct(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
