"""What the parts of the loop's bench share: actors, planes and instances, and steps that several of them measure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gpu_plane.bench import Bench
from gpu_plane.children import ROOT, Child, Instance
from gpu_plane.drive import drive
from gpu_plane.engine_command import API_KEY
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import cpu_of, spent
from gpu_plane.plane import Plane
from gpu_plane.scale import Ask
from training_loop.actors.actor import LEVELS, ActorFailed, ActorProcess
from training_loop.actors.gang import ActorGang
from training_loop.rates import WARM, exact, rates, versions_served, weights_summary
from training_loop.scales import DRY_BIG, Scale
from training_loop.trainer import LoopTrainer, inputs, synthetic


@dataclass
class LoopBench(Bench):
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

    # .. processes

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
            "task": {},  # prompts are made up: no data set is read
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
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(config["threads"]),
        }
        if self.cuda:  # a rank of several sees all devices and has its own, as one that Gyre placed
            devices = ",".join(str(number) for number in range(ranks)) if ranks > 1 else str(gpu)
            env |= {"CUDA_VISIBLE_DEVICES": devices, "GYRE_DEVICES": str(rank)}
        output = self.place / f"actor-{name}-{level}-{rank}.out"
        return ActorProcess(Child.script, options, output, level=level, env=env)

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

    def _written(self, number: int, until: float) -> Path:
        if self._writers[number].process.wait(max(1.0, until - now())):
            raise PartFailed((self.place / "models.out").read_text()[-2000:])
        return self.models[number]

    def _write_model(self, number: int, scale: Scale) -> Child:
        return self._write_model_at(self.models[number], number, scale)

    def _write_model_at(self, folder: Path, seed: int, scale: Scale) -> Child:
        options = {
            "folder": str(folder),
            "shape": scale.model,
            "seed": seed,
            "bf16": self.cuda,
            "threads": 4 if self.cuda else 1,
        }
        return Child("model", options, self.place / "models.out")

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

    def _loader_key(self, instance: Instance) -> str:
        key = ""
        for process in instance.tree():
            with contextlib.suppress(psutil.Error):
                key = process.environ().get("GYRE_WEIGHT_LOADER", "") or key
        return key

    # .. what is measured in more than one part

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

    def _first_update(self, plane: Plane, trainer: LoopTrainer, name: str, until: float) -> Row:
        trainer.publish(trainer.step, now())
        trainer.wait_published(until)
        plane.log.wait("WeightsLoaded", until, instance=name, version=trainer.step)
        return versions_served(plane, trainer, trainer.step, trainer.step)[0]

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
        before, began, first = cpu_of(children), now(), trainer.step + 1
        try:
            trainer.run(steps, until, staleness=1, label="loop", first_groups=compare)
        finally:
            rows = [row for row in trainer.steps if row["step"] >= first]
            out["rates"] = rates(rows)
            out["steps"] = rows
            out["versions"] = versions_served(plane, trainer, first, trainer.step)
            out["weights"] = weights_summary(out["versions"], name)
        out["cores"] = spent(before, cpu_of(children), now() - began)
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

    async def _load_under_load(
        self, out: Row, url: str, folder: Path, version: str, key: str, stages: Sequence[str], until: float
    ) -> None:
        from gyre.engines.http_client import EngineClient
        from gyre.engines.weight_loading import EngineLoader

        shape, running = self.scale.shape, self.scale.running
        rounds = 3
        async with EngineClient(url, api_key=API_KEY) as client:
            ways: dict[str, EngineLoader] = {}
            for stage in stages:
                loader = EngineLoader(client, folder, key=key, stage=stage)  # type: ignore[arg-type]
                if await loader.arm():
                    ways[stage] = loader
                else:
                    out[f"{stage}_why_not"] = loader.why_not
            ways["disk"] = EngineLoader(client, folder)
            lengths = max(shape.lengths) * 4
            asks = [Ask(shape.prompt_of(8_000_000 + one), lengths) for one in range(running // shape.n)]
            within = max(5.0, until - now())
            load = asyncio.create_task(drive(url, asks, shape.n, running // 2, within))
            await asyncio.sleep(1.0)
            try:
                for way, loader in ways.items():
                    for _ in range(rounds):
                        if load.done():
                            load = asyncio.create_task(
                                drive(url, asks, shape.n, running // 2, max(5.0, until - now()))
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
