"""What the death of a rollout instance costs with a spare, and without one, taken apart, on one or two GPUs.

    python bench/spares_gpu.py --json FILE [--shape 1.7B] [--gpus 2] [--limit-s 285] [--dry-run] [-- ENGINE ARGUMENTS]

The rollout manager is the product's, with its ledger, in this process; instances are processes of their own, each an
agent with SGLang under it, as Gyre places them. The plane always has samples that wait. Stages, each written to FILE
when it is over, and left out where the time is spent:

    cold        the instance starts with empty folders of compiled kernels (a spare beside it, on the second GPU)
    spare       SIGKILL of the instance, agent and engine: until the spare has samples, and until it makes tokens
    back        the instance starts again beside the spare that serves, with what was compiled: until it serves
    engine      SIGKILL of the engine alone, its agent lives: as `spare`; and `engine, back`, until it has started again
    alone       the spare is gone. SIGKILL of the instance: until it makes tokens again, while nobody else does

Each start is taken apart by the lines of its log, in seconds since the process was asked for; the logs lie beside FILE.
With one GPU both engines share it, each with a part of its memory, and start one after the other: a bench's way, which
leaves neither its speed. `--dry-run`: small, the embedded engine, on CPUs: numbers without meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import SHAPES, TRITON, Case, Row  # noqa: E402

INSTANCE, SPARE = "rollout-0", "spare_rollout-0"
SECRET = "the bench's"
PROMPT_TOKENS, NEW_TOKENS, SAMPLES = 48, 256, 8
LOOK_S = 0.01
STEADY_S = 3.0
"""Generating before each death, and the window of the rate before and after it."""
READY_WITHIN_S = 240.0
ON_ONE_GPU = ("--mem-fraction-static", "0.85", "--max-total-tokens", "131072")
"""Two engines fit on one GPU by a small KV memory."""

MARKS = {
    "asked for": "the engine is asked for",
    "imported, arguments read": "server_args=",
    "scheduler imported": "Init torch distributed begin",
    "distributed": "Init torch distributed end",
    "weights begin": "Load weight begin",
    "weights end": "Load weight end",
    "memory": "Memory pool end",
    "graphs begin": r"[Cc]aptur\w* .*[Gg]raph.*begin",
    "graphs end": r"[Cc]aptur\w* .*[Gg]raph.*end",
    "listens": "Uvicorn running|Application startup complete|fired up",
}
"""Where a start is, by the first line of the log with it; of the end of the graphs the last one, for there are two."""

LAST = ("graphs end", "listens")
TOLD = re.compile("|".join([*MARKS.values(), "[Cc]ompil", "begin", "ends?\\.", "elapsed"]))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, required=True, help="file for the results, written after each stage"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.7B")
    parser.add_argument(
        "--gpus", type=int, choices=(1, 2), default=None, help="those that there are, at most two"
    )
    parser.add_argument("--limit-s", type=float, default=285.0, help="no stage begins that would end later")
    parser.add_argument("--python", default="", help="SGLang's; this one if not given")
    parser.add_argument("--groups", type=int, default=128, help="of 8 samples, always open")
    parser.add_argument("--dry-run", action="store_true", help="small, on CPUs: numbers without meaning")
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("engine_args", nargs="*", help="further arguments of SGLang's command line")
    return parser


# -- an instance --------------------------------------------------------------------------------------


def agent_main(told: Row) -> None:
    """An agent as a vertex runs it, without the vertex: its log has each line's time."""
    from gyre.logs.output import redirect_output

    redirect_output(Path(told["log"]))
    from gyre.engines.process import EngineCommand
    from gyre.rollouts.agent.agent import AgentSettings
    from gyre.rollouts.agent.join import EngineCommands, run_agent
    from gyre.rollouts.protocol.endpoint import FixedEndpoint
    from gyre.weights.owned_dirs import default_root

    made = EngineCommands(
        told["engine"],
        max_running=told["max_running"],
        kv_tokens=told["kv_tokens"],
        python=told["python"] or None,
        extra=told["extra"],
    )

    class Commands:
        def command(self, folder: Path, version: str) -> EngineCommand:
            print(MARKS["asked for"], flush=True)
            return made.command(folder, version)

    settings = AgentSettings(
        name=told["name"],
        max_running=told["max_running"],
        kv_tokens=told["kv_tokens"],
        cache=default_root(),
        engine=told["engine"],
        ready_within_s=READY_WITHIN_S,
        starts=None,
    )
    asyncio.run(run_agent(settings, FixedEndpoint(told["url"], SECRET), Commands()))


class Instance:
    """The processes of one instance."""

    def __init__(self, name: str, gpu: int, folder: Path, logs: Path, told: Row) -> None:
        self.name = name
        self._environment = {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "XDG_CACHE_HOME": str(folder / "compiled"),
            "HF_HUB_OFFLINE": "1",
        }
        self._told = told | {"name": name}
        self._logs = logs
        self._starts = 0
        self.log = Path()
        self.started_at = 0.0
        """On time.time()'s clock, as the stamps of the log."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._starts += 1
        self.log = self._logs / f"{self.name}.{self._starts}.log"
        words = [sys.executable, __file__, "--json", os.devnull, "--agent"]
        self.started_at = time.time()
        self.process = subprocess.Popen(
            [*words, json.dumps(self._told | {"log": str(self.log)})], env=os.environ | self._environment
        )

    def kill(self) -> float:
        """SIGKILL of the agent; its guard, which notices, ends the engine. Returns when, monotonic."""
        assert self.process is not None
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def kill_engine(self) -> float:
        """SIGKILL of who computes: SGLang's scheduler, or the embedded engine."""
        import psutil

        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        engines = [one for one in children if "process_guard" not in " ".join(one.cmdline())]
        schedulers = [one for one in engines if "scheduler" in one.name() + " ".join(one.cmdline())]
        self.started_at, at = time.time(), time.monotonic()
        for one in schedulers or engines:
            one.kill()
        return at

    async def leave(self) -> None:
        """It drains, for which the manager's loop must go on."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 20.0)
            self.process.kill()
            self.process.wait()

    def parts(self) -> Row:
        """Seconds since the process was asked for, or its engine killed, by the lines that its log has since then."""
        found: Row = {}
        told = []
        for at, line in stamped(self.log):
            since = round(at - self.started_at, 2)
            if since < 0:
                continue
            for mark, pattern in MARKS.items():
                if (mark not in found or mark in LAST) and re.search(pattern, line):
                    found[mark] = since
            if TOLD.search(line):
                told.append([since, line[:160].rstrip()])
        return {"parts_s": found, "lines": told[:200]}


def stamped(log: Path) -> list[tuple[float, str]]:
    """Lines with their times, seconds since 1970."""
    from gyre.logs.line_format import PREFIX_BYTES, STAMP_BYTES, time_of

    if not log.exists():
        return []
    lines = [(time_of(line[:STAMP_BYTES]), line[PREFIX_BYTES:]) for line in log.read_bytes().splitlines()]
    return [(at, text.decode(errors="replace")) for at, text in lines if at]


# -- the plane ----------------------------------------------------------------------------------------


class Plane:
    """A manager in this process, its trainer, which always asks for more, and what has come of it."""

    def __init__(self, folder: Path, model: Path, groups: int) -> None:
        self._folder, self._model, self._groups = folder, model, groups
        self.events: list[tuple[float, str, Row]] = []
        self.errors: list[str] = []
        self.made: list[tuple[float, int]] = []
        """(time, tokens of all) at each look."""
        self._next = 0
        self.delivered = 0

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        from gyre.config import SPARE_ROLLOUT
        from gyre.rollouts.manager.rollout_manager import RolloutManager
        from gyre.rollouts.manager.shell import HearsOfPlane
        from gyre.rollouts.plane.settings import ManagerSettings
        from gyre.rollouts.protocol.endpoint import FixedEndpoint
        from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
        from gyre.store import open_store
        from gyre.weights.version.model_folder import list_model_folder

        plane = self

        class Owner(HearsOfPlane):
            def event(self, kind: str, fields: Row) -> None:
                plane.events.append((time.monotonic(), kind, fields))

            def fail(self, error: BaseException) -> None:
                plane.errors.append(repr(error))

        class Trainer(HearsOfRollouts):
            def groups_delivered(self, purpose: str, groups: list[Any]) -> None:
                plane.came(purpose, groups)

            def failed(self, error: Exception) -> None:
                plane.errors.append(repr(error))

        with open_store(f"sqlite:///{self._folder}/gyre.db") as store:
            store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
            self.manager = RolloutManager(
                store.rollouts("bench"),
                term=1,
                token=SECRET,
                settings=ManagerSettings(wanted={"rollout": 1, SPARE_ROLLOUT: 1}),
                owner=Owner(),
            )
            port = await self.manager.start("127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{port}"
            self._client = RolloutClient(FixedEndpoint(self.url, SECRET), Trainer(), term=1)
            self._client.publish(0, list_model_folder(self._model, version=0).checksum, self._model)
            self._ask(self._groups)
            watching = asyncio.create_task(self._watch())
            try:
                yield self
            finally:
                watching.cancel()
                self._client.close()
                await self.manager.stop()
                self.missing = self.manager.groups.missing_tokens()

    def came(self, purpose: str, groups: list[Any]) -> None:
        self.delivered += sum(len(group.samples) for group in groups)
        self._client.taken(purpose, [group.id for group in groups])
        self._ask(len(groups))

    def _ask(self, count: int) -> None:
        import numpy as np

        from gyre.rollouts.samples import Group

        some = range(self._next, self._next + count)
        self._next += count
        groups = [
            Group(one, np.random.default_rng(one).integers(1, 500, PROMPT_TOKENS).astype(np.int32))
            for one in some
        ]
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        self._client.request("bench", groups, n=SAMPLES, sampling=sampling, seed=1, min_version=0)

    async def _watch(self) -> None:
        while True:
            self.made.append((time.monotonic(), self.manager.groups.account.generated))
            await asyncio.sleep(LOOK_S)

    def of(self, name: str) -> Any:
        return self.manager.groups.instances.get(name)

    def tokens_of(self, name: str) -> int:
        return self.of(name).generated_tokens if self.of(name) is not None else 0

    def waits(self, name: str) -> bool:
        """Whether it is a spare that has nothing to do."""
        link = self.manager.links.get(name)
        return link is not None and link.not_admitted == "spare" and not self.of(name).held

    async def until(self, holds: Callable[[], bool], within_s: float) -> float:
        """When it holds, monotonic. Raises TimeoutError with the last events."""
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline or self.errors:
                told = [(kind, str(fields)[:300]) for _, kind, fields in self.events[-5:]]
                raise TimeoutError(f"not within {within_s:g} s: {self.errors} {told}")
            await asyncio.sleep(LOOK_S)
        return time.monotonic()

    def rate(self, since: float, until: float) -> float:
        """Tokens/s of the plane."""
        inside = [one for one in self.made if since <= one[0] <= until]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def first(self, kind: str, since: float) -> float | None:
        return next(
            (round(at - since, 3) for at, what, _ in self.events if what == kind and at >= since), None
        )


# -- the stages ---------------------------------------------------------------------------------------


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path, logs: Path) -> None:
        self.given, self.began = given, time.monotonic()
        self._dry = given.dry_run
        gpus = given.gpus or min(2, max(1, gpus_there()))
        case = Case(shape="tiny" if self._dry else given.shape, dry=self._dry)
        self._model = case.model()
        self.plane = Plane(folder, self._model, 8 if self._dry else given.groups)
        self._together = gpus == 2 or self._dry
        shared = () if self._together else ON_ONE_GPU
        self._told = {
            "engine": "embedded" if self._dry else "sglang",
            "python": given.python,
            "max_running": 4 if self._dry else None,
            "kv_tokens": 8192 if self._dry else None,
            "extra": [] if self._dry else [*TRITON, *shared, *given.engine_args],
        }
        self._folder, self._logs = folder, logs
        self._gpu_of = {INSTANCE: 0, SPARE: gpus - 1}
        self.results: Row = {
            "case": f"{case.shape}, prompts of {PROMPT_TOKENS}, {NEW_TOKENS} tokens each, {gpus} GPUs",
            "machine": {"gpus": gpu_names(), "cores": os.cpu_count(), "host": platform.node()},
            "command": " ".join(sys.argv),
            "stages": {},
        }

    def keep(self, stage: str, row: Row) -> None:
        self.results["stages"][stage] = row
        self.results["took_s"] = round(time.monotonic() - self.began, 1)
        self.given.json.write_text(json.dumps(self.results, indent=1))
        shown = {key: value for key, value in row.items() if key != "lines"}
        print(f"{self.results['took_s']:6.1f} s  {stage}: {json.dumps(shown)}", flush=True)

    def has_time(self, stage: str, seconds: float) -> bool:
        left = self.given.limit_s - (time.monotonic() - self.began)
        if left < seconds:
            self.keep(stage, {"left_out": f"{left:.0f} s left, {seconds:.0f} s wanted"})
        return left >= seconds

    async def run(self) -> None:
        plane = self.plane
        async with plane.running():
            told = self._told | {"url": plane.url}
            instance, spare = (
                Instance(name, self._gpu_of[name], self._folder, self._logs, told)
                for name in (INSTANCE, SPARE)
            )
            try:
                await self._stages(instance, spare)
            finally:
                await asyncio.gather(*(one.leave() for one in (spare, instance)))
        self.results |= {"missing_tokens": plane.missing, "delivered_samples": plane.delivered}
        self.keep("end", {"missing_tokens": plane.missing, "errors": plane.errors})

    async def _stages(self, instance: Instance, spare: Instance) -> None:
        plane = self.plane
        instance.start()
        if self._together:
            spare.start()
        took_s = await self._serves(instance)
        self.keep("cold", {"serves_s": took_s} | instance.parts())
        if not self._together:
            spare.start()
        await plane.until(lambda: plane.waits(SPARE), READY_WITHIN_S)
        self.keep("spare is ready", spare.parts())

        at = await self._die(instance.kill)
        self.keep("spare", await self._taken_over(at))
        instance.start()
        took_s = await self._serves(instance)
        self.keep("back", {"serves_s": took_s} | instance.parts())
        await plane.until(lambda: plane.waits(SPARE), 60.0)

        if self.has_time("engine", took_s + 15.0):
            at = await self._die(instance.kill_engine)
            self.keep("engine", await self._taken_over(at))
            await plane.until(lambda: plane.first("EngineStarted", at) is not None, READY_WITHIN_S)
            told = {"started_s": plane.first("EngineStarted", at)}
            self.keep("engine, back", told | instance.parts())
        if self.has_time("alone", took_s + 15.0):
            await spare.leave()
            at = await self._die(instance.kill)
            instance.start()
            served_s = await self._serves(instance)
            await asyncio.sleep(STEADY_S)
            told = {
                "serves_s": served_s,
                "tokens_s_meanwhile": round(plane.rate(at + 1.0, at + served_s - 1.0)),
            }
            self.keep("alone", told | instance.parts())

    async def _serves(self, instance: Instance) -> float:
        """Seconds from its start to its first token."""
        plane, since = self.plane, time.monotonic()
        number = plane.of(instance.name).number if plane.of(instance.name) is not None else -1
        served = await plane.until(
            lambda: (
                (found := plane.of(instance.name)) is not None
                and found.number != number
                and found.generated_tokens > 0
            ),
            READY_WITHIN_S,
        )
        return round(served - since, 2)

    async def _die(self, kill: Callable[[], float]) -> float:
        """Kill it in full work. Returns when."""
        plane = self.plane
        await plane.until(lambda: bool(plane.of(INSTANCE) and plane.of(INSTANCE).held), 60.0)
        await asyncio.sleep(STEADY_S)
        return kill()

    async def _taken_over(self, at: float) -> Row:
        """What the spare did since a death."""
        plane, made = self.plane, self.plane.tokens_of(SPARE)
        given = await plane.until(lambda: bool(plane.of(SPARE).held), 30.0)
        first = await plane.until(lambda: plane.tokens_of(SPARE) > made, 30.0)
        before = plane.rate(at - STEADY_S, at)
        half = await plane.until(
            lambda: plane.rate(time.monotonic() - 1.0, time.monotonic()) > before / 2, 30.0
        )
        await asyncio.sleep(STEADY_S)
        return {
            "promoted_s": plane.first("SparePromoted", at),
            "left_s": plane.first("InstanceLeft", at),
            "engine_died_s": plane.first("EngineDied", at),
            "has_samples_s": round(given - at, 3),
            "first_token_s": round(first - at, 3),
            "half_of_the_rate_s": round(half - at, 2),
            "tokens_s_before": round(before),
            "tokens_s_after": round(plane.rate(time.monotonic() - STEADY_S, time.monotonic())),
        }


def gpu_names() -> list[str]:
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # a machine without one
        return []
    return told.stdout.splitlines()


def gpus_there() -> int:
    return len(gpu_names())


def main() -> int:
    given = arguments().parse_args()
    if given.agent:
        agent_main(json.loads(given.agent))
        return 0
    given.json = given.json.absolute()
    logs = given.json.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="spares_gpu_") as folder:
        asyncio.run(Bench(given, Path(folder), logs).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
