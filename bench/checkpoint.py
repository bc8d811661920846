"""What a checkpoint costs the training, and how soon a killed rank has its state back: host memory beside the disk.

    python bench/checkpoint.py [--layers 4] [--hidden 768] [--runs 5] [--kills 20] [--folder DIR] [--json FILE]
    python bench/checkpoint.py --shape qwen3-0.6b --tokens 16384 --ways disk --runs 2 --kills 0 --json FILE   # on a GPU

One Megatron rank with a decoder of that shape; its state is weights, float32 weights where it computes in bfloat16, and
AdamW's moments. After each of `--runs` steps:

- `memory`: `gyre.workloads.gang.host_memory`. `hold` is how long training stands, `whole` until the state counts (it is
  hashed by a thread meanwhile), `restore` verifies and copies it back;
- `disk`: the checkpoint that every layout loads, written in the background below `--folder`. `hold` is how long
  training stands, `whole` until it is on the disk, fsync and all: what the last checkpoint of a job takes. `restore`
  verifies every byte and the weights' digest. With `memory` it is written from there, otherwise from a copy of its own;
- `copy`: the same bytes copied once between tensors of this process, to compare with;
- `dlrover`: the same tensors through DLRover's `SharedMemoryHandler`, bare, its metadata in another process, where
  `gyre-rl[dlrover]` is installed. `restore` copies the tensors back; there is nothing to verify.

`--ways` names those that are wanted. With `disk`, steps of `--tokens` tokens are timed alone and beside the writing;
how long the memory for the copy takes to be had (beside the first step), and, with `--shape`, the checkpoint of weights
that were just read, are timed once.

First, `--kills` processes are killed by SIGKILL at random moments while they save 64 MB over and over: how many left a
state that is whole, how many none, and how many a mixture of two. For DLRover the process that holds the metadata
lives on; without it, it has nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.host_memory import HostMemory, plan
from gyre.workloads.megatron import MegatronActor

Row = dict[str, Any]
Named = list[tuple[str, torch.Tensor]]
KILLED_BYTES = 64 << 20


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }
}
SHAPES["tiny"] = SHAPES["qwen3-0.6b"] | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
"""Models by the content of their `config.json`; their weights are drawn from the seed."""

SAMPLE_TOKENS = 512


def actor_in(folder: Path, asked: argparse.Namespace) -> MegatronActor:
    actor = MegatronActor()
    megatron: dict[str, Any] = {"memory_checkpoint_share": 1.0 if "memory" in asked.ways else 0.0}
    if asked.shape:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[asked.shape]))
        megatron["model_path"] = str(model)
    config = {
        "model": {
            "layers": asked.layers,
            "hidden": asked.hidden,
            "heads": asked.hidden // 64,
            "kv_heads": asked.hidden // 128,
            "mlp": 3 * asked.hidden,
        },
        "task": {},
        "optim": {"lr": 1e-6},
        "megatron": megatron,
        "sampling": {"n": 2},
    }
    actor.context = WorkloadContext("bench", "actor", 0, 1, config=config, directory=folder)
    actor.setup()
    actor.warm_start()
    return actor


def train(actor: MegatronActor, tokens: int) -> None:
    """A step of one group of samples of so many tokens together; with few its cost is the optimizer's."""
    step = actor.step + 1
    draw = np.random.default_rng(step)
    length = min(SAMPLE_TOKENS, tokens // 2)
    samples = [
        Sample(
            draw.integers(0, 10, length).astype(np.int32),
            np.full(length, -2.0, np.float32),
            (VersionRun(0, 0, length),),
            reward=float(k % 2),
        )
        for k in range(max(2, tokens // length))
    ]
    group = Group(step, draw.integers(0, 10, 6).astype(np.int32), samples=samples)
    actor.begin(step)
    actor.accumulate([group], step=step, index=0)
    actor.apply(step=step, indices=1, group_ids=[group.id])


@contextlib.contextmanager
def clock(row: Row, what: str) -> Iterator[None]:
    """Wall and CPU seconds of this process, threads included."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    row.setdefault(f"{what}_s", []).append(time.perf_counter() - wall)
    row.setdefault(f"{what}_cpu_s", []).append(time.process_time() - cpu)


def memory_row(actor: MegatronActor, asked: argparse.Namespace) -> Row:
    """`hold` as the actor itself spends it in `apply`."""
    kept = actor.backend.memory
    assert kept is not None
    memory = kept._memory
    assert memory is not None
    row: Row = {"way": "memory"}
    for _ in range(asked.runs):
        train(actor, asked.tokens)
        memory.settle()
        with clock(row, "whole"):
            with clock(row, "hold"):
                kept.save_if_due(actor.step, actor._metadata())
            memory.settle()
        digest = actor.state()["digest"]
        with clock(row, "restore"):
            book = kept.restore(newer_than=0, at_most=actor.step)
        assert book is not None
        assert book["step"] == actor.step
        actor.changed()
        assert actor.state()["digest"] == digest
    return row


def disk_row(actor: MegatronActor, folder: Path, asked: argparse.Namespace) -> Row:
    row: Row = {"way": "disk"}
    for run in range(asked.runs):
        train(actor, asked.tokens)
        settle()
        path = folder / f"disk_{run}"
        with clock(row, "whole"):
            with clock(row, "hold"):
                actor.checkpoint(path, background=True)
            actor.checkpoint_written(wait=True)
        row["size_bytes"] = written_bytes(path)
        settle()
        with clock(row, "restore"):
            actor.restore(path)
            settle()
        shutil.rmtree(path)
    return row


def first_row(actor: MegatronActor, folder: Path) -> Row:
    """The checkpoint of weights that were just read or drawn."""
    row: Row = {"way": "first"}
    path = folder / "first"
    with clock(row, "hold"), clock(row, "whole"):
        actor.checkpoint(path)
    row["size_bytes"] = written_bytes(path)
    shutil.rmtree(path)
    return row


def room_row(actor: MegatronActor) -> Row:
    """The memory for the copy, which a thread takes beside the first step; on a GPU it is page-locked."""
    from gyre.workloads.megatron.checkpoints import on_disk

    row: Row = {"way": "room", "size_bytes": 0}
    writer = actor.backend.writer
    with clock(row, "whole"):
        with clock(row, "hold"):
            on_disk.prepare(writer, actor.backend.policy)
        writer._buffer._join()
    return row


def beside_row(actor: MegatronActor, folder: Path, asked: argparse.Namespace) -> Row:
    """Steps alone, and steps while a checkpoint is being written: as many checkpoints as runs."""
    row: Row = {"way": "beside", "alone_s": [], "beside_s": []}

    def step(times: list[float]) -> None:
        settle()
        began = time.perf_counter()
        train(actor, asked.tokens)
        settle()
        times.append(time.perf_counter() - began)

    warm: list[float] = []
    for _ in range(3):
        step(warm)
    for run in range(asked.runs):
        for _ in range(asked.steps):
            step(row["alone_s"])
        path = folder / f"beside_{run}"
        actor.checkpoint(path, background=True)
        while not actor.checkpoint_written(wait=False):
            step(row["beside_s"])  # the last one may outlast the writing
        shutil.rmtree(path)
    return row


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def written_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def copy_row(named: Named, runs: int) -> Row:
    row: Row = {"way": "copy"}
    target = [torch.zeros_like(tensor, device="cpu") for _, tensor in named]
    for _ in range(runs):
        with clock(row, "hold"):
            for into, (_, tensor) in zip(target, named, strict=True):
                into.copy_(tensor.detach())
    row["whole_s"], row["whole_cpu_s"] = row["hold_s"], row["hold_cpu_s"]
    row["restore_s"], row["restore_cpu_s"] = row["hold_s"], row["hold_cpu_s"]
    return row


# -- DLRover's handler ------------------------------------------------------------------------------------


def handler(*, host: bool) -> Any:
    """Raises ImportError without the extra."""
    from dlrover.python.elastic_agent.torch.ckpt_saver import SharedMemoryHandler

    return SharedMemoryHandler(0, host=host)


def dlrover_state(named: Named, step: int) -> dict[str, Any]:
    from dlrover.python.elastic_agent.torch.ckpt_saver import DLROVER_CKPT_CONFIG_KEY, CheckpointConfig

    return {**dict(named), DLROVER_CKPT_CONFIG_KEY: CheckpointConfig(step=step)}


def hold_metadata(ready: Any) -> None:
    host, parent = handler(host=True), os.getppid()
    ready.set()
    while os.getppid() == parent:
        time.sleep(0.2)
    del host


@contextlib.contextmanager
def metadata_holder() -> Iterator[None]:
    """What DLRover's elastic agent is for its ranks."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold_metadata, args=(ready,), daemon=True)
    holder.start()
    try:
        assert ready.wait(60), "the process that holds DLRover's metadata did not start"
        yield
    finally:
        holder.kill()
        holder.join()
        run = os.environ["TORCHELASTIC_RUN_ID"]
        shutil.rmtree(f"/tmp/ckpt_sock/{run}", ignore_errors=True)
        for left in Path("/dev/shm").glob(f"{run}_*"):
            left.unlink(missing_ok=True)


def dlrover_row(named: Named, runs: int) -> Row:
    row: Row = {"way": "dlrover"}
    with metadata_holder():
        rank = handler(host=False)
        rank.save_state_dict(dlrover_state(named, 0))  # makes the memory
        for run in range(runs):
            with clock(row, "hold"):
                rank.save_state_dict(dlrover_state(named, run + 1))
            with clock(row, "restore"):
                found = rank.load_state_dict()
                for name, tensor in named:
                    tensor.detach().copy_(found[name])
    row["whole_s"], row["whole_cpu_s"] = row["hold_s"], row["hold_cpu_s"]
    return row


# -- kills ------------------------------------------------------------------------------------------------


def saved_state(step: int) -> Named:
    return [(f"t{at}", torch.full((KILLED_BYTES // 64,), float(step))) for at in range(16)]


def save_for_ever(save: Callable[[int, Named], None], ready: Any) -> None:
    step = 0
    while True:
        step += 1
        save(step, saved_state(step))
        if step == 3:
            ready.set()


def gyre_saver(root: str, ready: Any) -> None:
    memory = HostMemory("bench", 0, root=Path(root))

    def save(step: int, named: Named) -> None:
        memory.save(named, lineage="", step=step, book={})

    save_for_ever(save, ready)


def dlrover_saver(root: str, ready: Any) -> None:
    rank = handler(host=False)
    save_for_ever(lambda step, named: rank.save_state_dict(dlrover_state(named, step)), ready)


def killed(target: Callable[[str, Any], None], root: str, draw: random.Random) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=target, args=(root, ready), daemon=True)
    process.start()
    assert ready.wait(120), "it did not begin to save"
    time.sleep(draw.uniform(0.0, 0.3))
    process.kill()
    process.join()


def is_whole(named: Named) -> bool:
    values = {float(value) for _, tensor in named for value in (tensor.min(), tensor.max())}
    return len(values) == 1


def gyre_kills(count: int, root: Path) -> Row:
    row = {"way": "memory", "whole": 0, "none": 0, "torn": 0}
    draw = random.Random(1)
    for _ in range(count):
        killed(gyre_saver, str(root), draw)
        memory = HostMemory("bench", 0, root=root)
        records = memory.records()
        found = saved_state(0)
        if not records:
            row["none"] += 1
        else:
            right = memory.load(records[0], found) and is_whole(found)
            row["whole" if right else "torn"] += 1
        memory.close(keep=False)
    return row


def dlrover_kills(count: int) -> Row:
    row = {"way": "dlrover", "whole": 0, "none": 0, "torn": 0}
    draw = random.Random(1)
    for _ in range(count):
        os.environ["TORCHELASTIC_RUN_ID"] = f"gyre-bench-{uuid.uuid4().hex[:8]}"
        with metadata_holder():
            killed(dlrover_saver, "", draw)
            reader = handler(host=False)  # kept: what it loads is of its mapping, which goes with it
            found = reader.load_state_dict()
            named = [(name, tensor) for name, tensor in found.items() if isinstance(tensor, torch.Tensor)]
            row["none" if not named else "whole" if is_whole(named) else "torn"] += 1
    return row


# -- telling ----------------------------------------------------------------------------------------------


def spread(values: list[float]) -> Row:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def told(row: Row, size: int) -> Row:
    return {
        "way": row["way"],
        "size_bytes": row.get("size_bytes", size),
        **{key: spread(value) for key, value in row.items() if isinstance(value, list) and value},
    }


def milliseconds(spread_: Row) -> str:
    return f"{1e3 * spread_['median']:.0f} ({1e3 * spread_['least']:.0f}..{1e3 * spread_['most']:.0f})"


def print_table(rows: list[Row], kills: list[Row]) -> None:
    print(f"{'':8} {'MB':>7} {'hold ms':>22} {'whole ms':>22} {'restore ms':>22} {'CPU s/GB':>9}")
    for row in rows:
        if row["way"] == "beside":
            continue
        cells = [milliseconds(row[key]) if key in row else "" for key in ("hold_s", "whole_s", "restore_s")]
        cpu = (
            row["whole_cpu_s"]["median"] / max(row["size_bytes"], 1) * 1e9 if row["size_bytes"] > 1e6 else 0.0
        )
        print(
            f"{row['way']:8} {row['size_bytes'] / 1e6:7.0f} {cells[0]:>22} {cells[1]:>22} {cells[2]:>22} {cpu:9.2f}"
        )
    print()
    for row in rows:
        if row["way"] == "beside" and "beside_s" in row:
            longer = row["beside_s"]["median"] / row["alone_s"]["median"] - 1.0
            print(
                f"a step alone {milliseconds(row['alone_s'])} ms, beside the writing "
                f"{milliseconds(row['beside_s'])} ms: {longer:+.1%}"
            )
    for row in kills:
        print(
            f"killed while saving, {row['way']:8} whole {row['whole']}, none {row['none']}, torn {row['torn']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="", help="instead of layers and hidden")
    parser.add_argument("--tokens", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="steps alone, for each checkpoint beside steps")
    parser.add_argument("--ways", default="memory,disk,copy,dlrover")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the disk's checkpoints go; a temporary folder")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.ways = asked.ways.split(",")
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHELASTIC_RUN_ID", f"gyre-bench-{uuid.uuid4().hex[:8]}")
    try:
        import dlrover.python.elastic_agent.torch.ckpt_saver  # noqa: F401

        has_dlrover = "dlrover" in asked.ways
    except ImportError as error:
        print(f"without DLRover: {error}", file=sys.stderr)
        has_dlrover = False
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        root = Path(folder)
        # First, while this process has no threads that a fork would lose.
        kills = [gyre_kills(asked.kills, root / "shm")] if asked.kills else []
        if has_dlrover and asked.kills:
            kills.append(dlrover_kills(asked.kills))
        actor = actor_in(root, asked)
        from gyre.workloads.megatron.checkpoints.parts import parts_of  # not before Megatron is there

        found: list[Row] = []
        if "disk" in asked.ways:
            found += [first_row(actor, root)] if asked.shape else []
            found += [room_row(actor)] if "memory" not in asked.ways else []
        train(actor, asked.tokens)
        named = [(part.name, part.tensor) for part in parts_of(actor.backend.policy)]
        size = plan(named)[1]
        if "memory" in asked.ways:
            found.append(memory_row(actor, asked))
        if "disk" in asked.ways:
            found += [disk_row(actor, root, asked), beside_row(actor, root, asked)]
        if "copy" in asked.ways:
            found.append(copy_row(named, asked.runs))
        if has_dlrover:
            found.append(dlrover_row(named, asked.runs))
        actor.forget_memory()
        actor.teardown()
    rows = [told(row, size) for row in found]
    print_table(rows, kills)
    if asked.json is not None:
        machine = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "command": " ".join(["python", "bench/checkpoint.py", *sys.argv[1:]]),
        }
        asked.json.write_text(json.dumps({**machine, "rows": rows, "kills": kills}, indent=1))


if __name__ == "__main__":
    main()
