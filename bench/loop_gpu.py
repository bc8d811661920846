"""A loop of the bench's own on two GPUs, not the product's job (that is `job_gpu.py`): a Megatron actor trains on the
first, SGLang serves on the second, Gyre between them.

    python bench/loop_gpu.py --out DIR [--part loop ...]     # SGLang 0.5.17 or newer, megatron-core, two GPUs
    python bench/loop_gpu.py --out DIR --dry-run             # the same on CPU: Megatron over Gloo, the embedded engine

The model has Qwen3-0.6B's shape (then Qwen3-1.7B's) and random weights. The rollout manager with its SQLite ledger,
each agent, each engine and the actor are processes of their own; the trainer is Gyre's client in this process. GRPO
with rewards made of the tokens, at most one step stale, so that generation and training overlap.

    bare       beside the engine's start: Megatron's own loop over the same model and passes, then Gyre's actor alone
    served     the engine is there, and takes the actor's weights for the first time
    loop       the loop: tokens/s, from the optimizer's step to weights that are served, log-probs of engine and trainer
    loading    one version into the engine under load: by each stage of Gyre's loader, and from the disk
    sync       the same loop with nothing stale: generate, then train, on the same split of the GPUs
    faults     an instance joins; an engine is killed, then an agent; both come back; one is drained, while steps go on
    layouts    the actor alone on both GPUs: data, tensor and pipeline parallel against one GPU; publish, checkpoints
    colocated  both GPUs train data parallel, and both generate in between: in Gyre's local windows, then without
               Gyre's plane, engines asked directly, as the baseline
    big        the loop with the 1.7B shape
    tp2        one engine over both GPUs under load: versions into both ranks, what it generates against Megatron
    critic     PPO's critic: alone, beside the actor on the other GPU, and with it on one; does it learn
    memory     checkpoints in host memory against those on disk: what training stands for; a rank is killed by SIGKILL
    more       `rollouts_gpu.py`'s parts of two instances, one a GPU, with what time is left

Each part has a deadline; one that fails is recorded with the last words of all processes, and the next one goes on.
results.json is written anew after each part, and within `layouts`, `tp2`, `critic` and `memory`. On a machine that is
busy with others, `--patience 3` triples the deadlines.

All of it in four calls of less than ten minutes each, the longest part first in each (in brackets what it should
take, on two H200; the first start of an engine on a machine compiles kernels):

    python bench/loop_gpu.py --out DIR/1 --seconds 560 --steps 14 --part loop faults loading    # 350 s: start 12,
                                                            # bare 45, served 60, loop 60, loading 18, faults 155
    python bench/loop_gpu.py --out DIR/2 --seconds 560 --part colocated layouts                 # 360 s: 200, 160
    python bench/loop_gpu.py --out DIR/3 --seconds 570 --part big more                          # 380 s: 110, 270
    python bench/loop_gpu.py --out DIR/4 --seconds 480 --part tp2 critic memory                 # 300 s: 100, 65, 135
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_plane.children import Child
from gpu_plane.engine_command import engine_command
from gpu_plane.model import model_main
from gpu_plane.roles import agent_main, manager_main
from training_loop import tensor_parallel as tensor_parallel_of
from training_loop.actors import critic as critic_of
from training_loop.actors import memory as memory_of
from training_loop.actors.actor import Work, actor_main
from training_loop.conduct import NAMES, conduct
from training_loop.engine_commands import sglang_on_cpu_of, without_loader

Child.script = Path(__file__).resolve()

WORKS: dict[str, type[Work]] = {
    "actor": Work,
    "critic": critic_of.CriticWork,
    "memory": memory_of.MemoryWork,
    "versions": tensor_parallel_of.VersionsWork,
}
"""What an actor's process answers, by name."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--part", choices=NAMES, nargs="+", default=[name for name in NAMES if name != "more"]
    )
    parser.add_argument("--steps", type=int, help="of the loop")
    parser.add_argument("--seconds", type=float, help="for everything; parts that find no time are left out")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="so many times all deadlines, on a machine that is busy"
    )
    parser.add_argument("--no-loader", action="store_true", help="weights by update_weights_from_disk")
    parser.add_argument(
        "--publish", choices=("arena", "folder"), default="arena", help="how a version is written"
    )
    parser.add_argument("--sglang-cpu", metavar="PYTHON", help="with --dry-run: SGLang of that environment")
    parser.add_argument("--json", action="store_true", help="print results.json instead of the table")
    for role in ("manager", "agent", "model", "actor", "touch"):
        parser.add_argument(f"--{role}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.manager:
        asyncio.run(manager_main(json.loads(options.manager)))
    elif options.agent:
        told = json.loads(options.agent)
        command = sglang_on_cpu_of(told["sglang_cpu"]) if told["sglang_cpu"] else engine_command
        if not told["loader"]:
            command = without_loader(command)
        if told["ranks"] > 1:
            command = tensor_parallel_of.over_devices(command, told["ranks"], told["devices"])
        asyncio.run(agent_main(told, command))
    elif options.model:
        model_main(json.loads(options.model))
    elif options.actor:
        told = json.loads(options.actor)
        actor_main(told, WORKS[told["work"]])
    elif options.touch:
        touch(**json.loads(options.touch))
    elif options.out is None:
        parser.error("--out is needed")
    else:
        return conduct(options)
    return 0


def touch(folder: str, size: int) -> None:
    """Have the machine give us its memory: on some, pages are slow when they are touched for the first time."""
    with tempfile.TemporaryFile(dir=folder) as file:
        block = b"\1" * (16 << 20)
        for _ in range(size // len(block)):
            file.write(block)


if __name__ == "__main__":
    sys.exit(main())
