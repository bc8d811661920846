"""The real loop on two GPUs: a Megatron actor trains on the first, SGLang serves on the second, Gyre between them.

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
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
import rollouts_gpu as base
from rollouts_gpu import Follow, Instance, PartFailed, Plane, Row, now
from training_loop import critic as critic_of
from training_loop import layouts as layouts_of
from training_loop import memory as memory_of
from training_loop import tensor_parallel as tensor_parallel_of
from training_loop import windows as windows_of
from training_loop.actor import LEVELS, ActorFailed, ActorProcess, Work, actor_main
from training_loop.colocated import ColocatedLoop, Engine, phases
from training_loop.gang import ActorGang
from training_loop.trainer import LoopFailed, LoopTrainer, Shape, inputs, synthetic
from training_loop.uptime import ideal_of

HERE = Path(__file__).resolve().parent
base.Child.script = Path(__file__).resolve()


@dataclass(frozen=True)
class Scale:
    """How much of everything; the same logic for all."""

    engine: str
    model: dict[str, int]
    shape: Shape
    pass_tokens: int
    running: int
    kv_tokens: int
    steps: int


GPU = Scale(
    engine="sglang",
    model={
        "hidden": 1024,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "inner": 3072,
        "vocab": 151_936,
    },
    # As much to train as to generate: one GPU each. Passes hold 22 or 23 sequences, a micro-batch is six of them.
    shape=Shape(vocab=151_936, prompt=512, lengths=(256, 192, 320, 256), groups=32, n=8, micro=16),
    pass_tokens=17_408,
    running=256,
    kv_tokens=262_144,
    steps=22,
)
GPU_BIG = Scale(
    engine="sglang",
    model={**GPU.model, "hidden": 2048, "inner": 6144},
    shape=Shape(vocab=151_936, prompt=512, lengths=(256, 192, 320, 256), groups=16, n=8, micro=16),
    pass_tokens=9_216,  # half: its activations are twice as large
    running=128,
    kv_tokens=131_072,
    steps=6,
)
DRY = Scale(
    engine="embedded",
    model={"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 128, "vocab": 512},
    shape=Shape(vocab=512, prompt=24, lengths=(16, 12, 20, 16), groups=4, n=4, micro=2),
    pass_tokens=256,
    running=16,
    kv_tokens=16_384,
    steps=8,
)
DRY_BIG = Scale(
    engine="embedded",
    model={**DRY.model, "hidden": 128, "inner": 256, "head_dim": 32},
    shape=DRY.shape,
    pass_tokens=256,
    running=16,
    kv_tokens=16_384,
    steps=4,
)

WORKS: dict[str, type[Work]] = {
    "actor": Work,
    "critic": critic_of.CriticWork,
    "memory": memory_of.MemoryWork,
    "versions": tensor_parallel_of.VersionsWork,
}
"""What an actor's process answers, by name."""

WARM = 2
"""Steps at the start of a loop that are not counted: the first waits for the first groups."""


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
        asyncio.run(base.manager_main(json.loads(options.manager)))
    elif options.agent:
        told = json.loads(options.agent)
        if told["sglang_cpu"]:
            use_sglang_on_cpu(told["sglang_cpu"])
        if not told["loader"]:
            leave_out_the_loader()
        if told["ranks"] > 1:
            base.engine_command = tensor_parallel_of.over_devices(
                base.engine_command, told["ranks"], told["devices"]
            )
        asyncio.run(base.agent_main(told))
    elif options.model:
        base.model_main(json.loads(options.model))
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


# -- other roles -------------------------------------------------------------------------------------------


def use_sglang_on_cpu(python: str) -> None:
    """Engines are the real SGLang, without its kernels."""
    from gyre.testing.sglang_cpu import sglang_on_cpu

    def command(options: Row, folder: Path | str, version: str, *, seeded: bool = False) -> Any:
        return sglang_on_cpu(
            folder,
            python=python,
            weight_version=version,
            seeded=seeded,
            stream_interval=8,
            max_tokens=options["kv_tokens"],
            max_running=options["running"],
        )

    base.engine_command = command


def leave_out_the_loader() -> None:
    """Engines are started without Gyre's weight loader: versions come from the disk."""
    from dataclasses import replace

    with_it = base.engine_command

    def without(options: Row, folder: Path | str, version: str, *, seeded: bool = False) -> Any:
        command = with_it(options, folder, version, seeded=seeded)
        argv = list(command.argv)
        if "--custom-weight-loader" in argv:
            at = argv.index("--custom-weight-loader")
            del argv[at : at + 2]
        return replace(command, argv=tuple(argv), loader_key="")

    base.engine_command = without


def touch(folder: str, size: int) -> None:
    """Have the machine give us its memory: on some, pages are slow when they are touched for the first time."""
    with tempfile.TemporaryFile(dir=folder) as file:
        block = b"\1" * (16 << 20)
        for _ in range(size // len(block)):
            file.write(block)


# -- what is measured --------------------------------------------------------------------------------------


def rates(rows: Sequence[Row], since: int = WARM) -> Row:
    """Of a loop's steps. "train": while the actor worked; "loop": of the wall clock, all waits included."""
    kept = list(rows)[since:] or list(rows)
    if not kept:
        return {}
    tokens = sum(row["input_tokens"] for row in kept)
    responses = sum(row["response_tokens"] for row in kept)
    wall = kept[-1]["began_at"] + kept[-1]["seconds"] - kept[0]["began_at"]
    train = sum(row["train_s"] for row in kept)
    return {
        "steps": len(kept),
        "step_s": round(wall / len(kept), 4),
        "train_s_a_step": round(train / len(kept), 4),
        "snapshot_s_a_step": round(sum(row["snapshot_s"] for row in kept) / len(kept), 4),
        "waited_s_a_step": round(sum(row["waited_s"] for row in kept) / len(kept), 4),
        "waited_for_publish_s_a_step": round(sum(row["waited_for_publish_s"] for row in kept) / len(kept), 4),
        "input_tokens_a_step": tokens // len(kept),
        "train_tokens_s": round(tokens / train, 1),
        "train_without_snapshot_tokens_s": round(
            tokens / (train - sum(row["snapshot_s"] for row in kept)), 1
        ),
        "loop_tokens_s": round(tokens / wall, 1),
        "response_tokens_s": round(responses / wall, 1),
    }


_TOLD = ("fetch_s", "load_s", "pause_s", "how", "note", "fetched")


def versions_served(plane: Plane, trainer: LoopTrainer, first: int, last: int) -> list[Row]:
    """Of each version from the optimizer's step to the instances that serve it. Seconds."""
    found = []
    for version in range(first, last + 1):
        told = trainer.publications.get(version)
        if told is None:
            continue
        row = {
            "version": version,
            "size_bytes": told["size_bytes"],
            "step_to_publish_began_s": round(told["began_at"] - told["stepped_at"], 4),
            "export_s": round(told["export_s"], 4),
            "write_s": round(told["write_s"], 4),
            "step_to_published_s": round(told["published_at"] - told["stepped_at"], 4),
        }
        loaded = plane.log.rows("WeightsLoaded", told["stepped_at"], version=version)
        row["instances"] = {
            one["instance"]: {
                "step_to_served_s": round(one["at"] - told["stepped_at"], 4),
                **{key: one[key] for key in _TOLD if key in one},
            }
            for one in loaded
        }
        found.append(row)
    return found


def spread(values: Sequence[float]) -> Row:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 4),
        "least": round(ordered[0], 4),
        "most": round(ordered[-1], 4),
        "of": len(ordered),
    }


def weights_summary(versions: Sequence[Row], instance: str) -> Row:
    """Medians over versions that came by an update, not by a start."""
    served = [row["instances"][instance] for row in versions if instance in row["instances"]]
    served = [row for row in served if row.get("how") != "start"]
    whole: Row = {}
    for key in ("export_s", "write_s", "step_to_published_s"):
        whole[key] = spread([row[key] for row in versions])
    for key in ("fetch_s", "load_s", "pause_s", "step_to_served_s"):
        whole[key] = spread([row[key] for row in served if key in row])
    whole["how"] = sorted({row.get("how", "") for row in served})
    whole["fetched"] = served[-1].get("fetched", "") if served else ""
    whole["notes"] = sorted({row.get("note", "") for row in served} - {""})
    whole["bytes"] = versions[-1]["size_bytes"] if versions else 0
    return whole


def exact(account: Row) -> bool:
    return bool(
        account["generated"]
        == account["delivered"] + account["in_flight"] + sum(account["discarded"].values())
    )


@dataclass
class Loop(base.Bench):
    scale: Scale  # type: ignore[assignment]
    weights: Path = Path()
    big_scale: Scale = DRY_BIG
    loader: bool = True
    cuda: bool = False
    sglang_cpu: str = ""
    way: str = "arena"
    patience: float = 1.0
    """By how much longer than on an idle machine things may take."""
    actors: dict[str, ActorProcess | ActorGang] = field(default_factory=dict)
    wanted: Sequence[str] = ()

    # .. what several parts need

    def new_actor(self, name: str, scale: Scale, model: Path, level: int = 0, ranks: int = 1) -> None:
        """On the first GPU; several ranks on one GPU each."""
        if ranks == 1:
            self.actors[name] = self._start_rank(name, scale, model, level)
        else:
            self.actors[name] = self._new_gang(name, scale, model, ranks, level)

    def _new_gang(self, name: str, scale: Scale, model: Path, ranks: int, level: int = 0) -> ActorGang:
        return ActorGang(lambda rank: self._start_rank(name, scale, model, level, rank, ranks), ranks)

    def _start_rank(
        self,
        name: str,
        scale: Scale,
        model: Path,
        level: int,
        rank: int = 0,
        ranks: int = 1,
        *,
        work: str = "actor",
        gpu: int = 0,
        changes: Row | None = None,
        directory: Path | None = None,
    ) -> ActorProcess:
        """`gpu` is that of one rank alone; several have the first ones. `changes` go over the sections of its
        `config`, `directory` is the job's."""
        config: Row = {
            "seed": 0,
            "threads": 8 if self.cuda else 1,
            "collective_timeout_s": 300.0,
            "optim": {"lr": 1e-6, "warmup_steps": 1},
            "loss": {"tis_imp_ratio_cap": 2.0},
            "sampling": {"n": scale.shape.n, "max_new_tokens": max(scale.shape.lengths)},
            "megatron": {
                "model_path": str(model),
                "pass_tokens": scale.pass_tokens,
                "deterministic": False,  # measured apart
                "device": "cuda" if self.cuda else "cpu",
            },
        }
        config |= changes or {}
        options = {"config": config, "cuda": self.cuda, "threads": config["threads"], "work": work}
        options |= {"rank": rank, "ranks": ranks, "directory": str(directory or self.place)}
        env = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join([str(base.ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(config["threads"]),
        }
        if self.cuda:  # a rank of several sees all devices and has its own, as one that Gyre placed
            devices = ",".join(str(number) for number in range(ranks)) if ranks > 1 else str(gpu)
            env |= {"CUDA_VISIBLE_DEVICES": devices, "GYRE_DEVICES": str(rank)}
        output = self.place / f"actor-{name}-{level}-{rank}.out"
        return ActorProcess(base.Child.script, options, output, level=level, env=env)

    def new_plane(self, name: str, scale: Scale, until: float) -> Plane:
        """A manager, and a trainer with the actor of that name."""
        plane = self.planes[name] = Plane(self.place, name)
        folder = self.weights / f"published-{name}"
        folder.mkdir()
        trainer = LoopTrainer(plane.endpoint, scale.shape, self.actors[name], folder, way=self.way)
        plane.trainer = trainer  # type: ignore[assignment]
        plane.start(until)
        return plane

    def join(
        self,
        plane: Plane,
        name: str,
        scale: Scale,
        *,
        memory: float,
        loader: bool | None = None,
        gpu: int = 1,
        local: bool = False,
        saver: bool = True,
        ranks: int = 1,
    ) -> Instance:
        """Of several `ranks`, on the first GPUs."""
        options: Row = {
            "name": name,
            "running": scale.running,
            "kv_tokens": scale.kv_tokens,
            "local": local,
            "saver": saver,
            "cache": str(self.weights / f"cache-{name}"),
            "engine": scale.engine,
            "endpoint": str(plane.endpoint),
            "gpu": gpu if self.gpus > 1 else 0,
            "memory": memory,
            "ready_s": 200.0 * self.patience,
            "loader": self.loader if loader is None else loader,
            "sglang_cpu": self.sglang_cpu,
            "ranks": ranks,
            "devices": ",".join(str(number) for number in range(ranks)),
        }
        Path(options["cache"]).mkdir(exist_ok=True)
        self.instances[name] = Instance(plane.place, options)
        return self.instances[name]

    def serving(self) -> tuple[Plane, LoopTrainer]:
        """Raises PartFailed at once where there is nobody to generate."""
        plane, trainer = self.small()
        self.living("a")
        if not self.results["parts"].get("served", {}).get("ok"):
            raise PartFailed("no engine serves the actor's weights")
        return plane, trainer

    def small(self) -> tuple[Plane, LoopTrainer]:
        plane = self.planes.get("small")
        if plane is None or not isinstance(plane.trainer, LoopTrainer):
            raise PartFailed("the plane was not started")
        return plane, plane.trainer

    # .. the small model

    def model(self, out: Row, until: float) -> None:
        """Only begun here: who needs it waits."""
        small = set(self.wanted) - {"big", "more"}
        self._writers = {0: self._write_model(0, self.scale)} if small else {}
        if "big" in self.wanted:
            self._writers[1] = self._write_model(1, self.big_scale)
        free = shutil.disk_usage(self.weights).free
        if self.cuda and free > 20 << 30:
            size = min(free // 2, 16 << 30)
            base.Child("touch", {"folder": str(self.weights), "size": size}, self.place / "touch.out")
        out["free_gib_for_weights"] = round(free / 2**30, 1)
        self.results["machine"] = base.machine()
        self.results["gpu_used_mib_before"] = base.gpu_used_mib()

    def _written(self, number: int, until: float) -> Path:
        if self._writers[number].process.wait(max(1.0, until - now())):
            raise PartFailed((self.place / "models.out").read_text()[-2000:])
        return self.models[number]

    def start(self, out: Row, until: float) -> None:
        """Everything at once: what is slow is the engine's start."""
        began = now()
        self.new_actor("small", self.scale, self.models[0])
        plane = self.new_plane("small", self.scale, until)
        self.join(plane, "a", self.scale, memory=0.5)  # it waits for a version
        model = self._written(0, until)
        out["model_written_s"] = round(now() - began, 2)
        self.small()[1].publish_folder(0, model)

    def _write_model(self, number: int, scale: Scale) -> base.Child:
        return self._write_model_at(self.models[number], number, scale)

    def _write_model_at(self, folder: Path, seed: int, scale: Scale) -> base.Child:
        options = {
            "folder": str(folder),
            "shape": scale.model,
            "seed": seed,
            "bf16": self.cuda,
            "threads": 4 if self.cuda else 1,
        }
        return base.Child("model", options, self.place / "models.out")

    def bare(self, out: Row, until: float) -> None:
        _, trainer = self.small()
        trainer.actor = self._prepared(out, "small", self.scale, self.models[0], until)
        self._baselines(out, trainer, until, bare_steps=6, own_steps=5)
        instance = self.instances.get("a")
        if instance is not None and not instance.log.rows("engine") and until - now() > 30.0:
            out["deterministic"] = self._deterministic(trainer, until)

    def _prepared(
        self, out: Row, name: str, scale: Scale, model: Path, until: float, ranks: int = 1
    ) -> ActorProcess | ActorGang:
        """The actor with the model, after its first passes; by whichever level works."""
        out["levels_that_failed"] = []
        groups = synthetic(scale.shape, 900_000_000, 1)
        for level in range(len(LEVELS)):
            if level:
                self.actors[name].close()
                self.new_actor(name, scale, model, level, ranks)
            actor = self.actors[name]
            try:
                out["setup"] = actor.call("setup", min(90.0 * self.patience, until - now()))
                began = now()
                self._own_step(actor, groups, 1, min(until, now() + 90.0 * self.patience))
                out["first_passes_s"] = round(now() - began, 2)
                return actor
            except ActorFailed as error:
                out["levels_that_failed"].append({"level": LEVELS[level], "error": str(error)[-3500:]})
                print(f"    the actor failed {LEVELS[level]}: {str(error)[-400:]}", flush=True)
                if until - now() < 30.0:
                    raise
        raise PartFailed("the actor works at no level")

    def _own_step(
        self, actor: ActorProcess | ActorGang, groups: list[list[Any]], step: int, until: float
    ) -> Row:
        actor.call("begin", until - now(), step=step)
        parts = [
            actor.call("accumulate", until - now(), groups=micro, step=step, index=index)
            for index, micro in enumerate(groups)
        ]
        ids = [group.id for micro in groups for group in micro]
        told = actor.call("apply", until - now(), step=step, indices=len(groups), group_ids=ids)
        seconds = sum(part["seconds"] for part in parts) + told["seconds"]
        return {
            "seconds": round(seconds, 4),
            "snapshot_s": round(told["snapshot_s"], 4),
            **{key: told[key] for key in ("loss", "grad_norm") if key in told},
        }

    def _baselines(
        self, out: Row, trainer: LoopTrainer, until: float, *, bare_steps: int, own_steps: int
    ) -> None:
        """Both on the passes of a whole step: Megatron's own loop, and Gyre's actor with nobody else."""
        shape, actor = trainer.shape, trainer.actor
        count = shape.groups // shape.micro
        groups = synthetic(shape, 910_000_000, count)
        trainer.step = actor.call("state", 20.0)["step"]
        try:
            out["bare"] = told = actor.call("bare", until - now(), groups=groups, steps=bare_steps)
            seconds = statistics.median(told["steps_s"][1:])
            out["bare_tokens_s"] = round(told["input_tokens"] / seconds, 1)
        except (
            ActorFailed
        ) as error:  # then there is nothing to compare with; the loop is measured all the same
            out["bare_failed"] = str(error)[-2500:]
        tokens = sum(inputs(micro) for micro in groups)
        out["own"] = rows = []
        try:
            for number in range(own_steps):
                more = synthetic(shape, 920_000_000 + number * 1000, count)
                rows.append(self._own_step(actor, more, trainer.step + 1, until))
                trainer.step += 1
        finally:
            trainer.step = actor.call("state", 20.0)["step"]
        seconds = statistics.median(row["seconds"] for row in rows[1:])
        snapshot = statistics.median(row["snapshot_s"] for row in rows[1:])
        out["own_tokens_s"] = round(tokens / seconds, 1)
        out["own_without_snapshot_tokens_s"] = round(tokens / (seconds - snapshot), 1)
        if "bare_tokens_s" in out:
            out["own_over_bare"] = round(out["own_tokens_s"] / out["bare_tokens_s"], 4)
        out["memory"] = trainer.actor.call("memory", 20.0)

    def _deterministic(self, trainer: LoopTrainer, until: float) -> Row:
        """What it costs that a replayed step is the step, bit by bit."""
        shape, rows = trainer.shape, []
        count = shape.groups // shape.micro
        groups = synthetic(shape, 910_000_000, count)
        try:
            trainer.actor.call("deterministic", 10.0, on=True)
            for number in range(2):
                more = synthetic(shape, 930_000_000 + number * 1000, count)
                rows.append(self._own_step(trainer.actor, more, trainer.step + 1, until))
                trainer.step += 1
            tokens = sum(inputs(micro) for micro in groups)
            return {"steps": rows, "tokens_s": round(tokens / rows[-1]["seconds"], 1)}
        except ActorFailed as error:
            return {"failed": str(error)[-1500:]}
        finally:
            with contextlib.suppress(ActorFailed):
                trainer.actor.call("deterministic", 10.0, on=False)

    def served(self, out: Row, until: float) -> None:
        plane, trainer = self.small()
        (instance,) = self.living("a")
        try:
            out["loaded"] = self.loaded(plane, instance, until)
        except PartFailed as error:
            if not self.loader or until - now() < 40.0:  # it did not fail, it was slow
                raise
            out["with_loader_failed"] = str(error)[-3000:]
            out["tails"] = base.tails(self)
            self.loader = False
            instance.kill()
            instance = self.join(plane, "a", self.scale, memory=0.5)
            out["loaded"] = self.loaded(plane, instance, until)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["gpu_used_mib"] = base.gpu_used_mib()
        if trainer.step:
            try:
                out["first_update"] = self._first_update(
                    plane, trainer, "a", min(until, now() + 60.0 * self.patience)
                )
            except (ActorFailed, PartFailed) as error:
                out["first_update_failed"] = f"by {trainer.way}: {error}"[-3000:]
                self.way = trainer.way = "folder" if trainer.way == "arena" else "arena"
                groups = synthetic(trainer.shape, 940_000_000, 1)  # a version means one set of bytes
                self._own_step(trainer.actor, groups, trainer.step + 1, until)
                trainer.step += 1
                out["first_update"] = self._first_update(plane, trainer, "a", until)

    def _first_update(self, plane: Plane, trainer: LoopTrainer, name: str, until: float) -> Row:
        trainer.publish(trainer.step, now())
        trainer.wait_published(until)
        plane.log.wait("WeightsLoaded", until, instance=name, version=trainer.step)
        return versions_served(plane, trainer, trainer.step, trainer.step)[0]

    def loop(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        try:
            self._loop(out, plane, trainer, "a", self.scale.steps, until)
        finally:
            self._compare(out, self.results["parts"].get("bare", {}))

    def _loop(
        self, out: Row, plane: Plane, trainer: LoopTrainer, name: str, steps: int, until: float
    ) -> None:
        def compare(groups: list[Any]) -> None:
            try:
                out["logprobs"] = trainer.actor.call("logprobs", 60.0, groups=groups)
                ages = {
                    run.version for group in groups for sample in group.samples for run in sample.versions
                }
                out["logprobs"]["versions_of_engine"] = sorted(ages)
                out["logprobs"]["version_of_trainer"] = trainer.step
            except ActorFailed as error:
                out["logprobs"] = {"failed": str(error)[-1500:]}

        assert plane.manager is not None
        children = {"manager": plane.manager, "agent": self.instances[name]}
        before, began, first = base.cpu_of(children), now(), trainer.step + 1
        try:
            trainer.run(steps, until, staleness=1, label="loop", first_groups=compare)
        finally:
            rows = [row for row in trainer.steps if row["step"] >= first]
            out["rates"] = rates(rows)
            out["steps"] = rows
            out["versions"] = versions_served(plane, trainer, first, trainer.step)
            out["weights"] = weights_summary(out["versions"], name)
        out["cores"] = base.spent(before, base.cpu_of(children), now() - began)
        plane.log.wait("WeightsLoaded", min(until, now() + 20.0), instance=name, version=trainer.step)
        out["versions"] = versions_served(plane, trainer, first, trainer.step)
        out["weights"] = weights_summary(out["versions"], name)
        steady = rows[WARM:]
        if steady:
            last = steady[-1]["began_at"] + steady[-1]["seconds"]
            out["engine_rate_tokens_s"] = round(plane.rate(steady[0]["began_at"], last), 1)
        out["oldest_age"] = max((age for row in rows for age in row["tokens_by_age"]), default=None)
        out["checked"], out["account"] = trainer.checked(), plane.account()
        out["account_exact"] = exact(out["account"])
        out["memory"] = trainer.actor.call("memory", 20.0)

    def _compare(self, out: Row, bare: Row) -> None:
        if out.get("rates") and bare.get("bare_tokens_s"):
            out["train_over_bare"] = round(out["rates"]["train_tokens_s"] / bare["bare_tokens_s"], 4)
            out["loop_over_bare"] = round(out["rates"]["loop_tokens_s"] / bare["bare_tokens_s"], 4)
        if out.get("rates") and bare.get("own_tokens_s"):
            out["train_over_own"] = round(out["rates"]["train_tokens_s"] / bare["own_tokens_s"], 4)

    # .. ways of loading

    def loading(self, out: Row, until: float) -> None:
        plane, trainer = self.small()
        out["publishing"] = self._publishing(trainer, until)
        self.serving()
        (instance,) = self.living("a")
        told = [row for row in plane.log.rows("WeightsLoaded", instance=instance.name) if row["version"]]
        if not told:
            raise PartFailed("it serves no version that was published by the actor")
        version = told[-1]["version"]
        folder = next(iter(sorted(self.weights.glob(f"cache-a/*/v{version:08d}"))), None)
        if folder is None:
            raise PartFailed(f"the agent has no folder of version {version}")
        key = self._loader_key(instance)
        stages = ("device", "pinned", "host") if key else ()
        out["version"], out["folder"], out["by_loader"] = version, str(folder), bool(key)
        asyncio.run(
            self._load_under_load(out, instance.engine_url(), folder, str(version), key, stages, until)
        )

    def _publishing(self, trainer: LoopTrainer, until: float) -> Row:
        """The newest weights written again by each way, while nothing else is computed; nobody is told."""
        found: Row = {}
        for way in ("arena", "folder"):
            rows: list[Row] = []
            for _ in range(3):
                try:
                    told = trainer.write(trainer.step, way, max(1.0, until - now()))
                except ActorFailed as error:
                    found[f"{way}_failed"] = str(error)[-1500:]
                    break
                rows.append({key: round(told[key], 4) for key in told if key.endswith("_s")})
            found[way] = rows
        return found

    async def _load_under_load(
        self, out: Row, url: str, folder: Path, version: str, key: str, stages: Sequence[str], until: float
    ) -> None:
        from gyre.engines.http_client import EngineClient
        from gyre.engines.weight_loading import EngineLoader

        shape, running = self.scale.shape, self.scale.running
        rounds = 3
        async with EngineClient(url) as client:
            ways: dict[str, EngineLoader] = {}
            for stage in stages:
                loader = EngineLoader(client, folder, key=key, stage=stage)  # type: ignore[arg-type]
                if await loader.arm():
                    ways[stage] = loader
                else:
                    out[f"{stage}_why_not"] = loader.why_not
            ways["disk"] = EngineLoader(client, folder)
            lengths = max(shape.lengths) * 4
            asks = [base.Ask(shape.prompt_of(8_000_000 + one), lengths) for one in range(running // shape.n)]
            within = max(5.0, until - now())
            load = asyncio.create_task(base.drive(url, asks, shape.n, running // 2, within))
            await asyncio.sleep(1.0)
            try:
                for way, loader in ways.items():
                    for _ in range(rounds):
                        if load.done():
                            load = asyncio.create_task(
                                base.drive(url, asks, shape.n, running // 2, max(5.0, until - now()))
                            )
                            await asyncio.sleep(0.5)
                        async with asyncio.timeout(max(1.0, until - now())):
                            report = await loader.load(version, folder)
                        out.setdefault(way, []).append(
                            {
                                key: round(value, 5) if isinstance(value, float) else value
                                for key, value in report.row().items()
                            }
                        )
                        await asyncio.sleep(0.2)
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)

    # .. nothing stale

    def sync(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        first = trainer.step + 1
        steps = 5 if self.cuda else 3
        rows = trainer.run(steps, until, staleness=0, label="sync")
        out["rates"], out["steps"] = rates(rows, since=1), rows
        out["versions"] = versions_served(plane, trainer, first, trainer.step)
        out["oldest_age"] = max((age for row in rows for age in row["tokens_by_age"]), default=None)
        overlapped = self.results["parts"].get("loop", {}).get("rates")
        if overlapped:
            out["loop_over_sync"] = round(overlapped["loop_tokens_s"] / out["rates"]["loop_tokens_s"], 4)
        out["checked"] = trainer.checked()

    # .. deaths

    def faults(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        over = threading.Event()
        out["events"] = events = []
        began, first = now(), trainer.step + 1

        def tell(what: str, **fields: Any) -> None:
            events.append({"at": round(now() - began, 3), "what": what, **fields})

        def story() -> None:
            try:
                self._story(out, plane, tell, until - 25.0)
            except BaseException as error:
                out["story_failed"] = f"{type(error).__name__}: {error}"[:3000]
                out["story_traceback"] = traceback.format_exc()[-2000:]
                out["tails"] = base.tails(self)
            finally:
                over.set()

        thread = threading.Thread(target=story, daemon=True)
        thread.start()
        rows = []
        try:
            rows = trainer.run(10_000, until, staleness=1, label="faults", go_on=lambda: not over.is_set())
        finally:
            over.set()
            rows = [row for row in trainer.steps if row["step"] >= first]
            out["steps"] = rows
            out["steps_ended_at"] = [round(row["began_at"] + row["seconds"] - began, 2) for row in rows]
            out["rates"] = rates(rows, since=0)
        thread.join(5.0)
        if rows:
            gaps = [row["seconds"] for row in rows]
            out["longest_step_s"], out["median_step_s"] = (
                round(max(gaps), 2),
                round(statistics.median(gaps), 2),
            )
        if rows:
            undisturbed = self.results["parts"].get("loop", {}).get("rates", {}).get("loop_tokens_s")
            out["over_undisturbed"] = (
                round(out["rates"]["loop_tokens_s"] / undisturbed, 4) if undisturbed else None
            )
            last = rows[-1]["began_at"] + rows[-1]["seconds"]
            out["instances"] = ideal_of(plane.log.rows(), began, last, self.scale.running)
        out["versions"] = versions_served(plane, trainer, first, trainer.step)
        out["checked"], out["account"] = trainer.checked(), plane.account()
        out["account_exact"] = exact(out["account"])
        state = trainer.actor.call("state", 30.0)
        out["trained_by_actor"] = state["trained"]
        if out.get("story_failed"):
            raise PartFailed(out["story_failed"])

    def _story(self, out: Row, plane: Plane, tell: Any, until: float) -> None:
        log = Follow(plane.log.path)

        def loaded(instance: Instance, after: float) -> Row:
            while True:
                with contextlib.suppress(PartFailed):
                    return log.wait("WeightsLoaded", min(until, now() + 0.5), after, instance=instance.name)
                instance.check()
                if now() > until:
                    raise PartFailed(f"{instance.name} did not load its weights in time")

        def holds(name: str, wanted: int) -> int:
            while now() < until:
                rows = log.rows("state")
                held = int(rows[-1]["instances"].get(name, [0, 0])[1]) if rows else 0
                if held >= wanted:
                    return held
                time.sleep(0.02)
            raise PartFailed(f"{name} was given no work")

        began = now()
        b = self.join(plane, "b", self.scale, memory=0.5)
        loaded(b, began)
        out["joined_s"] = round(now() - began, 2)
        tell("b joined")
        some = self.scale.running // 8
        both_s = 4.0 if self.cuda else 1.0  # what both make is measured then
        time.sleep(both_s)

        a = self.instances["a"]
        holds("b", 1)
        held = holds("a", some)
        processes = [process for process in a.tree() if process.pid != a.pid]
        inner = [process for process in processes if base._short(process) == "scheduler"]
        target = inner[0] if inner else processes[-1]
        struck = now()
        target.kill()
        tell("a's engine killed", held=held)
        died = log.wait("EngineDied", min(until, struck + 60.0 * self.patience), struck, instance="a")
        tell("a's engine reported dead")
        gone = base.gone_within(processes, 5.0)
        back = loaded(a, struck)
        tell("a serves again")
        out["engine_killed"] = {
            "samples_held": held,
            "detected_s": round(died["at"] - struck, 3),
            "processes_gone_s": gone[0],
            "processes_left": gone[1],
            "serves_again_s": round(back["at"] - struck, 2),
            **self._continued(_With(log), struck, back["at"], "a", held),  # type: ignore[arg-type]
        }

        time.sleep(both_s)
        holds("a", 1)
        held = holds("b", some)
        processes = b.tree()
        options = {key: value for key, value in b.options.items() if key not in ("log", "tail")}
        struck = now()
        b.process.kill()
        b.process.wait()
        tell("b's agent killed", held=held)
        left = log.wait("InstanceLeft", min(until, struck + 30.0), struck, instance="b")
        tell("b reported gone", moved=left["moved"])
        gone = base.gone_within(processes, 20.0)
        out["agent_killed"] = {
            "samples_held": held,
            "detected_s": round(left["at"] - struck, 3),
            "samples_moved": left["moved"],
            "tokens_moved": left["tokens"],
            "processes_gone_s": gone[0],
            "processes_left": gone[1],
            **self._continued(_With(log), struck, now(), "b", left["moved"]),  # type: ignore[arg-type]
        }
        self.instances["b"] = Instance(plane.place, options)
        if "big" in self.wanted:
            try:
                self._begin_big(until)  # it starts beside b
            except Exception as error:
                tell("the bigger model did not begin", error=str(error)[:500])
        back = loaded(self.instances["b"], struck)
        tell("b serves again")
        out["agent_killed"]["serves_again_s"] = round(back["at"] - struck, 2)
        holds("b", 1)
        tell("b has work")

        held = holds("a", some)
        processes = a.tree()
        notice = now()
        plane.ask("/v1/drain", {"instance": "a", "deadline_s": 30.0})
        over = log.wait("HandedOver", min(until, notice + 30.0), notice, instance="a")
        tell("a handed over", held=held)
        left = log.wait("InstanceLeft", min(until, notice + 30.0), notice, instance="a")
        with contextlib.suppress(subprocess.TimeoutExpired):
            a.process.wait(max(1.0, min(until - now(), 30.0)))
        tell("a has left")
        out["drained"] = {
            "samples_held": held,
            "handed_over_s": round(over["at"] - notice, 3),
            "connection_closed_s": round(left["at"] - notice, 3),
            "agent_and_engine_ended_s": round(now() - notice, 3),
            "exit_status": a.process.poll(),
            "processes_left": base.gone_within(processes, 2.0)[1],
            **self._continued(_With(log), notice, now(), "a", held),  # type: ignore[arg-type]
        }
        steady = len(self.small()[1].steps) + 2
        while len(self.small()[1].steps) < steady and now() < until:
            time.sleep(0.05)
        tell("two steps with b alone")

    # .. the bigger model

    def _begin_big(self, until: float) -> None:
        """What takes the time of a start. Harmless when repeated."""
        scale, model = self.big_scale, self._written(1, until)
        if "big" not in self.actors:
            self.new_actor("big", scale, model)
        if "big" not in self.planes:
            trainer = self.new_plane("big", scale, until).trainer
            assert isinstance(trainer, LoopTrainer)
            trainer.publish_folder(0, model)
        if "d" not in self.instances:
            self.join(self.planes["big"], "d", scale, memory=0.5)

    def big(self, out: Row, until: float) -> None:
        self._end_small()
        self._begin_big(until)
        scale, model = self.big_scale, self.models[1]
        plane, instance = self.planes["big"], self.instances["d"]
        trainer = plane.trainer
        assert isinstance(trainer, LoopTrainer)
        trainer.actor = self._prepared(out, "big", scale, model, until)
        self._baselines(out, trainer, until, bare_steps=3, own_steps=2)
        out["loaded"] = self.loaded(plane, instance, until)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["first_update"] = self._first_update(plane, trainer, "d", until)
        try:
            self._loop(out, plane, trainer, "d", scale.steps, until)
        finally:
            self._compare(out, out)

    def _end_small(self) -> None:
        """Both GPUs are free then, and what was published."""
        for name in [name for name in self.instances if name != "d"]:
            with contextlib.suppress(psutil.Error, OSError):
                self.instances[name].kill()
        for name in [name for name in self.planes if name != "big"]:
            self.planes.pop(name).stop()
        for name in [name for name in self.actors if name != "big"]:
            self.actors.pop(name).close()
        for path in (
            *self.weights.glob("cache-*"),
            *self.weights.glob("published-*"),
            self.weights / "layouts",
        ):
            if path.name not in ("cache-d", "published-big"):
                shutil.rmtree(path, ignore_errors=True)

    # .. layouts

    def layouts(self, out: Row, until: float) -> None:
        """The actor alone, on both GPUs."""
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        model = self._written(0, until)
        place = self.weights / "layouts"
        if self.cuda and shutil.disk_usage(self.weights).free < 24 << 30:
            place = self.place / "layouts"  # a checkpoint of 0.6 billion parameters has eight gigabytes
        place.mkdir()
        layouts_of.measure(
            out,
            until,
            shape=self.scale.shape,
            start=lambda ranks: self._new_gang(f"layouts-{ranks}", self.scale, model, ranks),
            place=place,
            bf16=self.cuda,
            wrote=lambda: base.write(self),
        )

    # .. one after the other on the same GPUs

    def colocated(self, out: Row, until: float) -> None:
        """Both GPUs train data parallel and both generate: in Gyre's own windows, then without Gyre's plane."""
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        scale = replace(self.scale, running=self.scale.running // 2, kv_tokens=self.scale.kv_tokens // 2)
        model = self._written(0, until)
        self.new_actor("windows", scale, model, ranks=2)
        plane = self.new_plane("windows", scale, until)
        trainer = plane.trainer
        assert isinstance(trainer, LoopTrainer)
        trainer.publish_folder(0, model)
        names = ["la", "lb"]
        for gpu, name in enumerate(names):
            self.join(plane, name, scale, memory=0.9, gpu=gpu, local=True)
        steps = 10 if self.cuda else 4
        try:
            self._in_windows(out, plane, trainer, scale, model, names, steps, until)
        finally:
            base.write(self)
        self._without_the_plane(out, trainer, scale, names, steps, until)
        for key, other in (("windows", "windows"), ("bare", "bare")):
            mine = out.get(other, {}).get("rates", {}).get("loop_tokens_s")
            loop = self.results["parts"].get("loop", {}).get("rates", {}).get("loop_tokens_s")
            if mine and loop:
                out[f"loop_over_{key}"] = round(loop / mine, 4)

    def _in_windows(
        self,
        out: Row,
        plane: Plane,
        trainer: LoopTrainer,
        scale: Scale,
        model: Path,
        names: list[str],
        steps: int,
        until: float,
    ) -> None:
        found: Row = {}
        out["windows"] = found
        preparing: Row = {}

        def prepare() -> None:
            try:
                trainer.actor = self._prepared(
                    out, "windows", scale, model, min(until, now() + 120.0 * self.patience), 2
                )
                trainer.actor.call("give_back", 20.0)
                preparing["step"] = trainer.actor.call("state", 20.0)["step"]
            except BaseException as error:
                preparing["error"] = error

        def look() -> None:
            """Raises at once where no engine will come."""
            for name in names:
                self.instances[name].check()
                refused = plane.log.rows("WeightsRefused", self.instances[name].began, instance=name)
                if refused:
                    raise PartFailed(f"{name} has no engine: {refused[-1]['error'][:2500]}")
            if "error" in preparing:
                raise preparing["error"]

        # The engines start in the first window, and the actor beside them: it does not train yet.
        thread = threading.Thread(target=prepare, daemon=True)
        thread.start()
        began = now()

        def ready() -> None:
            found["engines_generated_s"] = round(now() - began, 2)
            thread.join(max(1.0, until - now()))
            look()
            trainer.at_step(preparing["step"])

        loop = windows_of.WindowLoop(trainer, look)
        try:
            try:
                loop.run(1, min(until - 60.0, now() + 200.0 * self.patience), ready)
            except (PartFailed, LoopFailed) as error:
                if "error" in preparing or not self.cuda or until - now() < 90.0:
                    raise
                found["with_memory_saver_failed"] = str(error)[-2500:]
                found["tails"] = base.tails(self)
                for gpu, name in enumerate(list(names)):
                    self.instances[name].kill()
                    names[gpu] = f"{name}-without"
                    self.join(plane, names[gpu], scale, memory=0.9, gpu=gpu, local=True, saver=False)
                loop.run(1, until - 45.0, ready)
            found["engine_start_s"] = {
                name: self.instances[name].log.rows("engine")[-1]["start_s"] for name in names
            }
            found["gpu_used_mib_asleep"] = base.gpu_used_mib()
            loop.run(steps, min(until - 40.0, now() + 90.0 * self.patience), ready=lambda: None)
        finally:
            rows = [row for row in trainer.steps if row["label"] == "windows"]
            closed = plane.log.rows("WindowClosed", began)
            free = plane.log.rows("DevicesFree", began)
            found["rates"], found["steps"] = windows_of.summary(rows, closed, free), rows
            found["not_released"] = [row["error"] for row in plane.log.rows("MemoryNotReleased", began)][:4]
            found["versions"] = [
                {key: row[key] for key in ("version", "instance", "fetch_s", "load_s", "pause_s", "how")}
                for row in plane.log.rows("WeightsLoaded", began)
            ]
        found["checked"], found["account"] = trainer.checked(), plane.account()
        found["account_exact"] = exact(found["account"])
        out["memory"] = trainer.actor.call("memory", 20.0)

    def _without_the_plane(
        self, out: Row, trainer: LoopTrainer, scale: Scale, names: Sequence[str], steps: int, until: float
    ) -> None:
        """By the same engines and the same actor; agents and manager have nothing to do."""
        found: Row = {}
        out["bare"] = found
        plane = self.planes["windows"]
        engines = []
        for name in names:
            told = plane.log.rows("WeightsLoaded", instance=name)[-1]
            folder = next(iter(sorted(self.weights.glob(f"cache-{name}/*/v{told['version']:08d}"))), None)
            if folder is None:
                raise PartFailed(f"{name} has no folder of version {told['version']}")
            instance = self.instances[name]
            asleep = not plane.log.rows("MemoryNotReleased", instance=name)
            engines.append(Engine(instance.engine_url(), folder, self._loader_key(instance), asleep=asleep))
        loop = ColocatedLoop(
            scale.shape,
            engines,
            train=lambda micro, step, end: self._own_step(trainer.actor, micro, step, end),
            publish=lambda step: Path(trainer.write(step, trainer.way, 60.0)["path"]),
            step=trainer.step,
        )
        try:
            loop.run(steps, min(until, now() + 90.0 * self.patience))
        finally:
            found["rates"], found["steps"] = phases(loop.rows), loop.rows
            found["engines"] = [
                {"loader": bool(engine.key), "releases": engine.releases, "why_not": engine.why_not}
                for engine in engines
            ]
        trainer.step = loop.step

    def _loader_key(self, instance: Instance) -> str:
        key = ""
        for process in instance.tree():
            with contextlib.suppress(psutil.Error):
                key = process.environ().get("GYRE_WEIGHT_LOADER", "") or key
        return key

    # .. one engine over both GPUs

    def tp2(self, out: Row, until: float) -> None:
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        ranks = 2 if self.cuda or self.sglang_cpu else 1  # the embedded engine has one
        scale, models = self.scale, (self.models[0], self.weights / "other")
        other = self._write_model_at(models[1], 7, scale)
        actor = self.actors["tp2"] = self._start_rank("tp2", scale, models[0], 0, work="versions")
        plane = self.planes["tp2"] = Plane(self.place, "tp2")
        trainer = tensor_parallel_of.LoadTrainer(base.endpoint_of(plane.endpoint), scale.shape)
        plane.trainer = trainer
        plane.start(until)
        began = now()
        instance = self.join(plane, "t", scale, memory=0.3, ranks=ranks)
        trainer.publish(0, self._written(0, until))
        if other.process.wait(max(1.0, until - now())):
            raise PartFailed((self.place / "models.out").read_text()[-2000:])
        out["ranks"] = ranks
        out["loaded"] = self.loaded(plane, instance, until)
        out["joined_s"] = round(now() - began, 2)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["actor"] = actor.call("setup", max(1.0, until - now()))
        out["gpu_used_mib"] = base.gpu_used_mib()
        folder = self.weights / "published-tp2"
        folder.mkdir()
        versions = tensor_parallel_of.Versions(
            plane,
            actor,
            models,
            folder,
            instance.name,
            exact=not self.cuda,
            window_s=1.0,
            message=tensor_parallel_of.tokens_a_message(scale.engine),
        )
        out["versions"] = rows = []
        trainer.keep_asking(scale.running * 5 // 4 // scale.shape.n)
        self._until_all_run(plane, instance.name, scale.running, until)
        versions.run(8 if self.cuda else 6, until - 25.0, rows.append)
        out["medians"] = {
            key: spread([row[key] for row in rows if key in row])
            for key in ("fetch_s", "load_s", "pause_s", "step_to_served_s", "publish_to_served_s")
        }
        out["rate_tokens_s"] = {
            when: spread([row[f"tokens_s_{when}"] for row in rows]) for when in ("before", "after")
        }
        trainer.no_more()
        trainer.wait_all(until)
        base.write(self)
        out["came"], out["account"] = trainer.checked(), plane.account()
        out["account_exact"] = exact(out["account"])
        out["checked"] = versions.checked(until)
        base.write(self)
        self._load_by_each_way(out, instance, rows[-1]["version"], until)
        wrong = [*trainer.wrong, *(["runs are out of order"] if trainer.out_of_order else [])]
        wrong += [
            f"model {model}: {kind}"
            for model in (0, 1)
            for kind, found in out["checked"][f"model_{model}"].items()
            if not found.get("within_tolerance", True) or found.get("mixtures")
        ]
        if wrong:
            raise PartFailed(f"what came is not what it should be: {wrong[:5]}")

    def _until_all_run(self, plane: Plane, name: str, running: int, until: float) -> None:
        while True:
            rows = plane.log.rows("state")
            told = rows[-1]["instances"].get(name, [0, 0]) if rows else [0, 0]
            if told[0] >= running * 8 and told[1] >= running * 3 // 4:  # and none waits for its first token
                return
            if now() > until:
                raise PartFailed(f"{name} was not given its work")
            time.sleep(0.05)

    def _load_by_each_way(self, out: Row, instance: Instance, version: int, until: float) -> None:
        """The last version again: by each stage of the loader and from the disk, under load; then the engine's own
        checksums. Last, for an engine may end of what it is asked here; that is recorded."""
        folder = next(iter(sorted(self.weights.glob(f"cache-t/*/v{version:08d}"))), None)
        if folder is None:
            raise PartFailed(f"the agent has no folder of version {version}")
        key, url = self._loader_key(instance), instance.engine_url()
        out["loading"] = {"by_loader": bool(key)}
        stages = ("device", "pinned", "host") if key else ()
        within = min(until - 5.0, now() + 40.0 * self.patience)
        asyncio.run(self._load_under_load(out["loading"], url, folder, str(version), key, stages, within))
        try:
            out["ranks_hold"] = asyncio.run(
                tensor_parallel_of.ranks_hold(
                    url, key, folder, folder, str(version), max(2.0, min(15.0, until - now()))
                )
            )
        except Exception as error:  # an engine that cannot tell
            out["ranks_hold_failed"] = f"{type(error).__name__}: {error}"[:1500]

    # .. the critic

    def critic(self, out: Row, until: float) -> None:
        self._end_small()
        scale, model = self.scale, self._written(0, until)
        # By it a step moves the value head's output by some 0.2; returns are 0 and 1.
        rate = 0.2 / scale.model["hidden"]
        changes: Row = {
            "loss": {"adv_estimator": "gae", "tis_imp_ratio_cap": 2.0},
            "critic": {"optim": {"lr": rate, "warmup_steps": 1}},
        }
        out["critic_lr"] = rate

        def start(name: str, work: str, gpu: int) -> ActorProcess:
            found = self._start_rank(f"critic-{name}", scale, model, 0, work=work, gpu=gpu, changes=changes)
            self.actors[f"critic-{name}"] = found
            return found

        critic_of.measure(
            out,
            until,
            shape=scale.shape,
            start=start,
            gpus=self.gpus if self.cuda else 2,
            steps=(14, 4, 4) if self.cuda else (8, 3, 3),
            wrote=lambda: base.write(self),
        )

    # .. states in memory

    def memory(self, out: Row, until: float) -> None:
        self._end_small()
        scale, model = self.scale, self._written(0, until)
        place = self.place / "memory"
        place.mkdir()

        def start(ranks: int, name: str) -> ActorGang:
            directory = place / name
            directory.mkdir(exist_ok=True)
            return ActorGang(
                lambda rank: self._start_rank(
                    f"memory-{name}-{now():.0f}",
                    scale,
                    model,
                    0,
                    rank,
                    ranks,
                    work="memory",
                    directory=directory,
                ),
                ranks,
            )

        try:
            memory_of.measure(
                out,
                until,
                shape=scale.shape,
                start=start,
                place=place,
                instead=self.weights,
                most_ranks=2 if self.gpus > 1 or not self.cuda else 1,
                cuda=self.cuda,
                wrote=lambda: base.write(self),
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)

    # .. two instances, one a GPU

    def more(self, out: Row, until: float) -> None:
        self._end_small()
        if "d" in self.instances:
            self.instances["d"].kill()
        if "big" in self.actors:
            self.actors["big"].close()
        seconds = until - now() - 15.0
        if seconds < 60.0:
            raise PartFailed("no time is left for it")
        folder = self.out / "more"
        command = [sys.executable, str(HERE / "rollouts_gpu.py"), "--out", str(folder)]
        command += ["--part", "two", "crash", "drain", "ends", "--seconds", f"{seconds:.0f}"]
        command += ["--patience", f"{self.patience:g}"]
        if not self.cuda:
            command.append("--dry-run")
        told = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 14.0, check=False)
        out["status"], out["said"] = told.returncode, told.stdout[-6000:]
        if told.returncode:
            raise PartFailed(told.stderr[-1500:] or "see more/results.json")


@dataclass
class _With:
    """What `Bench._continued` reads of a plane."""

    log: Follow


# -- the run -----------------------------------------------------------------------------------------------

PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    (
        "model",
        20.0,
        (
            "bare",
            "loop",
            "loading",
            "sync",
            "faults",
            "layouts",
            "colocated",
            "big",
            "tp2",
            "critic",
            "memory",
        ),
    ),
    ("start", 120.0, ("bare", "loop", "loading", "sync", "faults")),
    ("bare", 150.0, ("bare", "loop", "loading", "sync", "faults")),
    ("served", 200.0, ("served", "loop", "loading", "sync", "faults")),
    ("loop", 150.0, ("loop",)),
    ("loading", 40.0, ("loading",)),
    ("sync", 60.0, ("sync",)),
    ("faults", 280.0, ("faults",)),
    ("colocated", 310.0, ("colocated",)),
    ("layouts", 230.0, ("layouts",)),
    ("big", 230.0, ("big",)),
    ("tp2", 230.0, ("tp2",)),
    ("critic", 110.0, ("critic",)),
    ("memory", 200.0, ("memory",)),
    ("more", 400.0, ("more",)),
)
"""Steps with their deadlines, and the parts that need them."""

NAMES = (
    *("bare", "served", "loop", "loading", "sync", "faults", "colocated", "layouts", "big"),
    *("tp2", "critic", "memory", "more"),
)


def table(results: Row) -> list[str]:
    lines = []
    parts = results["parts"]
    for name, part in parts.items():
        state = "ok" if part.get("ok") else f"FAILED {part.get('failed', '')[:160]}"
        lines.append(f"{name:<9}{part.get('part_seconds', 0):7.1f} s  {state}")

    def say(name: str, *keys: str) -> None:
        found = {key: parts.get(name, {}).get(key) for key in keys}
        lines.extend(f"{name}.{key} = {value}" for key, value in found.items() if value is not None)

    say("bare", "setup", "bare_tokens_s", "own_tokens_s", "own_without_snapshot_tokens_s", "own_over_bare")
    say("bare", "bare_failed", "deterministic", "memory")
    if parts.get("bare", {}).get("levels_that_failed"):
        lines.append(f"bare: levels that failed: {[x['level'] for x in parts['bare']['levels_that_failed']]}")
    say("served", "engine_start_s", "first_update", "first_update_failed", "with_loader_failed")
    for name in ("loop", "big"):
        say(name, "bare_tokens_s", "own_tokens_s") if name == "big" else None
        say(name, "rates", "train_over_bare", "loop_over_bare", "train_over_own", "engine_rate_tokens_s")
        for key, value in parts.get(name, {}).get("weights", {}).items():
            lines.append(f"{name}.weights.{key} = {value}")
        say(name, "logprobs", "oldest_age", "checked", "account", "account_exact", "cores")
    for way in ("arena", "folder"):
        for row in parts.get("loading", {}).get("publishing", {}).get(way, []):
            lines.append(f"publishing by {way}: {row}")
    for way in ("device", "pinned", "host", "disk"):
        for row in parts.get("loading", {}).get(way, []):
            told = {key: row[key] for key in ("how", "prepare_s", "load_s", "pause_s", "why_disk")}
            lines.append(f"loading.{way}: {told}")
    say("sync", "rates", "loop_over_sync", "oldest_age")
    say("faults", "joined_s", "engine_killed", "agent_killed", "drained", "longest_step_s", "median_step_s")
    say("faults", "over_undisturbed", "instances")
    for name in layouts_of.LAYOUTS:
        row = parts.get("layouts", {}).get(name, {})
        times = (
            "tokens_s",
            "speed_up",
            "gather_s",
            "publish",
            "checkpoint_s",
            "checkpoint_of_it_s",
            "restore_s",
        )
        for key in (*times, "apart_from_one", "within_tolerance", "failed"):
            lines.extend([f"layouts.{name}.{key} = {row[key]}"] if key in row else [])
    for way in ("windows", "bare"):
        row = parts.get("colocated", {}).get(way, {})
        for key in ("rates", "engine_start_s", "not_released", "account_exact", "checked", "engines"):
            lines.extend([f"colocated.{way}.{key} = {row[key]}"] if key in row else [])
    say("colocated", "loop_over_windows", "loop_over_bare")
    say("faults", "checked", "account", "account_exact", "steps_ended_at", "events")
    for name, module in (("tp2", tensor_parallel_of), ("critic", critic_of), ("memory", memory_of)):
        lines += module.table(parts.get(name, {}))
    say("more", "said")
    return lines


def conduct(options: argparse.Namespace) -> int:
    scale, big = (DRY, DRY_BIG) if options.dry_run else (GPU, GPU_BIG)
    if options.steps:
        scale = replace(scale, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # nothing that was started is left
    began = now()
    seconds = options.seconds or (400.0 if options.dry_run else 480.0) * options.patience
    memory = Path("/dev/shm")
    needed = (1 if options.dry_run else 12) << 30
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > needed
    gpus = 0 if options.dry_run else len(base.gpu_used_mib() or [])
    with (
        tempfile.TemporaryDirectory(prefix="gyre-loop-") as place,
        tempfile.TemporaryDirectory(prefix="gyre-loop-", dir=memory if roomy else None) as weights,
    ):
        bench = Loop(
            scale,
            options.out.resolve(),
            Path(place),
            [Path(weights, "small"), Path(weights, "big")],
            began + seconds,
            gpus,
            weights=Path(weights),
            big_scale=big,
            loader=not options.no_loader,
            cuda=not options.dry_run,
            sglang_cpu=options.sglang_cpu or "",
            way=options.publish,
            patience=options.patience,
            wanted=tuple(options.part),
        )
        bench.results = {
            "began": began,
            "dry_run": options.dry_run,
            "scale": asdict(scale),
            "big_scale": asdict(big),
            "in_memory": roomy,
            "parts": {},
        }

        def last_resort() -> None:
            bench.results["watchdog"] = True
            base.write(bench)
            base.gather_logs(bench)
            base.end_all(bench)
            shutil.rmtree(weights, ignore_errors=True)
            os._exit(3)

        watchdog = threading.Timer(bench.end_at - now() + 15.0, last_resort)
        watchdog.daemon = True
        watchdog.start()
        try:
            for name, limit_s, needed_by in PARTS:
                if set(needed_by) & set(options.part):
                    base.run_part(bench, name, limit_s * options.patience)
        finally:
            for plane in bench.planes.values():
                with contextlib.suppress(Exception):  # nothing is to be learned from how it ends
                    plane.stop()
            base.end_all(bench)
            bench.results["seconds"] = round(now() - began, 1)
            base.write(bench)
            base.gather_logs(bench)
            watchdog.cancel()
    print(json.dumps(bench.results) if options.json else "\n".join(table(bench.results)))
    return 0 if all(part.get("ok") for part in bench.results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
