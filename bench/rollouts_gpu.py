"""The rollout plane around a real SGLang on one or two GPUs: what it costs, and what it does when things die.

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
import contextlib
import json
import os
import platform
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # else each process that is started here compiles what it imports

import aiohttp
import numpy as np
import psutil
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "bench"
Row = dict[str, Any]
now = time.monotonic  # one clock for all processes of this machine


@dataclass(frozen=True)
class Scale:
    """How much of everything; the same logic for both."""

    engine: str
    shape: dict[str, int]
    prompt: int
    new: int
    groups: int
    n: int
    running: int
    few: int
    rounds: int
    kv_tokens: int
    settle_s: float
    absent_s: float
    after_s: float
    total_s: float


GPU = Scale(
    engine="sglang",
    shape={
        "hidden": 1024,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "inner": 3072,
        "vocab": 151_936,
    },
    prompt=128,
    new=256,
    groups=128,
    n=8,
    running=256,
    few=64,
    rounds=2,
    kv_tokens=262_144,
    settle_s=10.0,
    absent_s=90.0,
    after_s=10.0,
    total_s=555.0,
)
DRY = Scale(
    engine="embedded",
    shape={"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 128, "vocab": 512},
    prompt=16,
    new=128,
    groups=16,
    n=4,
    running=16,
    few=4,
    rounds=1,
    kv_tokens=16_384,
    settle_s=4.0,
    absent_s=25.0,
    after_s=3.0,
    total_s=230.0,
)

SGLANG_EXTRA = (
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
)


class PartFailed(Exception):
    """A part cannot go on."""


# -- processes of their own --------------------------------------------------------------------------------


class Log:
    """Lines of JSON with the time, for whoever follows."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"at": now(), "kind": kind, **fields}) + "\n")


async def manager_main(options: Row) -> None:
    """A rollout manager with its ledger; says where it listens in the endpoint's file."""
    from gyre.rollouts.manager.server import ManagerSettings, RolloutManager
    from gyre.rollouts.manager.sessions import AgentSession
    from gyre.store import open_store

    log = Log(options["log"])

    class Telling(RolloutManager):
        def _send_work(self, given: Any) -> None:
            for name, (_, work) in given.items():
                if prior := [len(one.prior) // 4 for one in work if one.prior]:
                    log.write("Continued", instance=name, samples=len(prior), tokens=sum(prior))
            super()._send_work(given)

        def _drained(self, session: AgentSession) -> None:
            log.write("HandedOver", instance=session.name)
            super()._drained(session)

    stopped = asyncio.Event()

    def fatal(error: BaseException) -> None:
        log.write("Fatal", error="".join(traceback.format_exception(error))[-4000:])
        stopped.set()

    store = open_store(f"sqlite:///{options['database']}")
    if options["term"] == 1:
        store.create_job(job_id="bench", name="bench", spec={}, now=time.time())
    manager = Telling(
        store.rollouts("bench"),
        term=options["term"],
        token=TOKEN,
        settings=ManagerSettings(**options["settings"]),
        on_event=lambda kind, fields: log.write(kind, **fields),
        on_fatal=fatal,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    port = await manager.start("127.0.0.1", 0)
    endpoint = Path(options["endpoint"])
    partial = endpoint.with_suffix(".new")
    partial.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    partial.rename(endpoint)
    log.write("Listening", port=port, term=options["term"])
    while not stopped.is_set():
        book = manager.book
        log.write(
            "state",
            generated=book.account.generated,
            queued=book.queued,
            instances={
                name: [one.tokens, len(one.held), one.version] for name, one in book.instances.items()
            },
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), 0.1)
    log.write("Stopping", missing=manager.book.missing_tokens())
    await manager.stop()
    store.close()


def endpoint_of(path: Path) -> Callable[[], tuple[str, str] | None]:
    def endpoint() -> tuple[str, str] | None:
        try:
            return json.loads(path.read_text())["url"], TOKEN
        except (OSError, ValueError, KeyError):
            return None

    return endpoint


async def agent_main(options: Row) -> None:
    """One agent and its engine."""
    import gyre.rollouts.agent.agent as module
    from gyre.engines.process import EngineCommand, EngineProcess
    from gyre.rollouts.agent.agent import Agent, AgentSettings

    log = Log(options["log"])
    tail = Path(options["tail"])
    engines: list[EngineProcess] = []

    def save_tail() -> None:
        if engines and engines[-1].tail:
            tail.write_text(engines[-1].tail)

    class Watched(EngineProcess):
        async def _spawn(self) -> None:
            self.began = now()
            engines.append(self)
            await super()._spawn()

        async def start(self) -> str:
            url = await super().start()
            log.write("engine", url=url, pid=self.pid, start_s=round(now() - self.began, 2))
            return url

        async def _stop(self) -> None:
            save_tail()
            await super()._stop()

    module.EngineProcess = Watched  # type: ignore[misc]

    def command_for(folder: Path, version: str) -> EngineCommand:
        return engine_command(options, folder, version)

    agent = Agent(
        AgentSettings(
            name=options["name"],
            max_running=options["running"],
            kv_tokens=options["kv_tokens"],
            cache=Path(options["cache"]),
            engine=options["engine"],
            ready_within_s=options["ready_s"],
            local=options.get("local", False),
        ),
        endpoint_of(Path(options["endpoint"])),
        command_for,
        on_progress=lambda fields: log.write("progress", **fields),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: agent.drain("SIGTERM", 5.0))

    async def save() -> None:
        while True:
            await asyncio.sleep(1.0)
            save_tail()

    saving = asyncio.create_task(save())
    log.write("began", pid=os.getpid())
    try:
        await agent.run()
    except BaseException as error:
        log.write("failed", error="".join(traceback.format_exception(error))[-4000:])
        raise
    finally:
        log.write("ended")
        saving.cancel()


def engine_command(options: Row, folder: Path | str, version: str, *, seeded: bool = False) -> Any:
    from gyre.engines.process import EngineCommand
    from gyre.engines.sglang import STREAM_INTERVAL, sglang_command

    if options["engine"] == "sglang":
        extra = [
            *SGLANG_EXTRA,
            *("--cuda-graph-max-bs", str(options["running"])),
            *("--max-running-requests", str(options["running"])),
            *("--max-total-tokens", str(options["kv_tokens"])),
            *("--mem-fraction-static", str(options["memory"])),
            *(["--enable-memory-saver"] if options.get("local") and options.get("saver", True) else []),
        ]
        env = {"CUDA_VISIBLE_DEVICES": str(options["gpu"]), "HF_HUB_OFFLINE": "1"}
        return sglang_command(folder, weight_version=version, seeded=seeded, extra=extra, env=env)
    argv = [
        *(sys.executable, "-m", "gyre.engines.embedded"),
        *("--model-path", str(folder), "--host", "{host}", "--port", "{port}"),
        *("--stream-interval", str(STREAM_INTERVAL), "--weight-version", version),
        *("--max-running-requests", str(options["running"]), "--max-total-tokens", str(options["kv_tokens"])),
    ]
    return EngineCommand(tuple(argv), {"OMP_NUM_THREADS": "1"})


def model_main(options: Row) -> None:
    """Write one version of the model, in Hugging Face's layout with Gyre's listing."""
    import torch
    from safetensors.torch import save_file

    from gyre.weights.version.model_folder import list_model_folder

    torch.set_num_threads(options["threads"])
    folder, s = Path(options["folder"]), options["shape"]
    hidden, inner, heads = s["hidden"], s["inner"], s["heads"] * s["head_dim"]
    kv = s["kv_heads"] * s["head_dim"]
    dtype = torch.bfloat16 if options["bf16"] else torch.float32
    generator = torch.Generator().manual_seed(options["seed"])

    def random(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    tensors = {
        "model.embed_tokens.weight": random(s["vocab"], hidden, std=2.0 / hidden**0.5),
        "model.norm.weight": ones(hidden),
    }
    for layer in range(s["layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(heads, hidden, std=hidden**-0.5),
            f"{name}.self_attn.k_proj.weight": random(kv, hidden, std=hidden**-0.5),
            f"{name}.self_attn.v_proj.weight": random(kv, hidden, std=hidden**-0.5),
            f"{name}.self_attn.o_proj.weight": random(hidden, heads, std=heads**-0.5),
            f"{name}.self_attn.q_norm.weight": ones(s["head_dim"]),
            f"{name}.self_attn.k_norm.weight": ones(s["head_dim"]),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden, std=hidden**-0.5),
            f"{name}.mlp.up_proj.weight": random(inner, hidden, std=hidden**-0.5),
            f"{name}.mlp.down_proj.weight": random(hidden, inner, std=inner**-0.5),
        }
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s["vocab"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": s["layers"],
        "initializer_range": 0.02,
        "bos_token_id": s["vocab"] - 2,
        "eos_token_id": s["vocab"] - 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    list_model_folder(folder, version=0)


# -- following them ----------------------------------------------------------------------------------------


class Follow:
    """The lines that a process of ours writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._offset = 0

    def rows(self, kind: str | None = None, after: float = 0.0, **match: Any) -> list[Row]:
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._rows += [json.loads(line) for line in whole.splitlines()]
        return [
            row
            for row in self._rows
            if row["at"] >= after
            and kind in (None, row["kind"])
            and all(row.get(key) == value for key, value in match.items())
        ]

    def wait(self, kind: str, until: float, after: float = 0.0, **match: Any) -> Row:
        """The first such line. Raises PartFailed when none comes in time."""
        while not (found := self.rows(kind, after, **match)):
            if now() > until:
                raise PartFailed(f"no {kind} {match} in time in {self.path.name}")
            time.sleep(0.02)
        return found[0]


class Child:
    """This script in another role; a bench that has more roles sets its own."""

    script = Path(__file__).resolve()

    def __init__(self, role: str, options: Row, output: Path) -> None:
        self.options = options
        with open(output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self.script), f"--{role}", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                },
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tree(self) -> list[psutil.Process]:
        try:
            me = psutil.Process(self.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to it and all below it; who they were."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        return tree

    def stop(self, within_s: float) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        self.kill()


class Instance(Child):
    def __init__(self, place: Path, options: Row) -> None:
        self.name = options["name"]
        self.began = now()
        number = len(list(place.glob(f"agent-{self.name}-*.jsonl")))
        self.log = Follow(place / f"agent-{self.name}-{number}.jsonl")
        self.tail = place / f"engine-{self.name}-{number}.tail"
        whole = {**options, "log": str(self.log.path), "tail": str(self.tail)}
        super().__init__("agent", whole, place / f"agent-{self.name}-{number}.out")

    def engine_url(self) -> str:
        found = self.log.rows("engine")
        if not found:
            raise PartFailed(f"{self.name} has no engine")
        return str(found[-1]["url"])

    def check(self) -> None:
        if self.process.poll() is not None:
            failed = self.log.rows("failed")
            raise PartFailed(
                f"agent {self.name} ended: {failed[-1]['error'] if failed else self.process.poll()}"
            )


class Plane:
    """A manager, its trainer, and where both keep what."""

    def __init__(self, place: Path, name: str) -> None:
        self.place = place / name
        self.place.mkdir()
        self.endpoint = self.place / "endpoint.json"
        self.database = self.place / "gyre.db"
        self.log = Follow(self.place / "manager.jsonl")
        self.manager: Child | None = None
        self.trainer: Trainer | None = None
        self.term = 0

    def start(self, until: float, **settings: Any) -> None:
        self.term += 1
        options = {
            "database": str(self.database),
            "endpoint": str(self.endpoint),
            "log": str(self.log.path),
            "term": self.term,
            "settings": settings,
        }
        self.manager = Child("manager", options, self.place / "manager.out")
        self.log.wait("Listening", until, term=self.term)
        if self.trainer is None:
            self.trainer = Trainer(endpoint_of(self.endpoint))

    def ask(self, path: str, body: Row | None = None) -> Row:
        url = json.loads(self.endpoint.read_text())["url"]
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            url + path,
            data,
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: Row = json.load(response)
        return answer

    def account(self, within_s: float = 5.0) -> Row:
        """When the manager has heard that everything was taken."""
        until = now() + within_s
        while (status := self.ask("/v1/status"))["open_groups"] and now() < until:
            time.sleep(0.05)
        return {
            **status["account"],
            "open_groups": status["open_groups"],
            "set_aside": status["samples_set_aside"],
        }

    def disk_bytes(self) -> int:
        """Of the ledger, with nothing left in its log."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=5.0)) as connection:
            connection.execute("pragma wal_checkpoint(truncate)")
        return sum(file.stat().st_size for file in self.place.glob("gyre.db*"))

    def rate(self, first: float, last: float, instance: str | None = None) -> float:
        """tokens/s that came in between two moments, of all or of one instance."""
        rows = [row for row in self.log.rows("state", first) if row["at"] <= last]
        if len(rows) < 2:
            return 0.0
        if instance is None:
            values = [row["generated"] for row in rows]
        else:
            values = [row["instances"].get(instance, [0])[0] for row in rows]
        return float((values[-1] - values[0]) / (rows[-1]["at"] - rows[0]["at"]))

    def stop(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        if self.manager is not None:
            self.manager.stop(10.0)


@dataclass
class Ask:
    prompt: NDArray[np.int32]
    length: int


class Trainer:
    """Asks for groups and checks what comes: every sample whole, each of its tokens of a known version.
    A group may come again after a cut; it is counted once."""

    def __init__(self, endpoint: Callable[[], tuple[str, str] | None]) -> None:
        from gyre.rollouts.trainer.plane_client import RolloutClient

        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, int]] = {}
        self._next = 0
        self.taking = True
        self.came: dict[int, tuple[float, int]] = {}
        self.versions: Counter[int] = Counter()
        self.mixed = 0
        self.twice: list[int] = []
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self._feeding: threading.Event | None = None
        self._feeder: threading.Thread | None = None
        self.client = RolloutClient(
            endpoint, term=1, on_groups=self._groups, on_error=lambda error: self.errors.append(str(error))
        )

    def _groups(self, purpose: str, groups: list[Any]) -> None:
        at = now()
        with self._lock:
            for group in groups:
                length, n = self._asked[group.id]
                if group.id in self.came:
                    self.twice.append(group.id)
                    continue
                self.came[group.id] = (at, group.token_count)
                if len(group.samples) != n:
                    self.wrong.append(f"group {group.id} has {len(group.samples)} samples")
                for sample in group.samples:
                    if len(sample.token_ids) != length or sample.finish_reason != "length":
                        self.wrong.append(
                            f"a sample of group {group.id}: {len(sample.token_ids)} of {length} tokens"
                        )
                    self.mixed += len(sample.versions) > 1
                    for run in sample.versions:
                        self.versions[run.version] += run.end - run.start
        if self.taking:
            self.client.taken(purpose, [group.id for group in groups])

    def take(self, ids: Sequence[int]) -> None:
        self.client.taken("train", list(ids))

    def publish(self, version: int, folder: Path) -> float:
        from gyre.weights.version.model_folder import ModelFolder

        found = ModelFolder.read(folder)
        at = now()
        self.client.publish(version, found.checksum, folder)
        return at

    def ask(self, asks: Sequence[Ask], n: int) -> list[int]:
        from gyre.rollouts.samples import Group

        ids = []
        for one in asks:
            with self._lock:
                number, self._next = self._next, self._next + 1
                self._asked[number] = (one.length, n)
            sampling = {"max_new_tokens": one.length, "temperature": 1.0, "ignore_eos": True}
            self.client.request(
                "train", [Group(number, one.prompt)], n=n, sampling=sampling, seed=number, min_version=0
            )
            ids.append(number)
        return ids

    @property
    def outstanding(self) -> int:
        with self._lock:
            return len(self._asked) - len(self.came)

    def wait(self, ids: Sequence[int], until: float) -> tuple[float, int]:
        """When the last came, and how many tokens. Raises PartFailed."""
        while True:
            with self._lock:
                left = [number for number in ids if number not in self.came]
                if not left:
                    return max(self.came[i][0] for i in ids), sum(self.came[i][1] for i in ids)
            if now() > until:
                raise PartFailed(f"{len(left)} of {len(ids)} groups did not come in time; {self.errors[-1:]}")
            time.sleep(0.005)

    def wait_all(self, until: float) -> None:
        with self._lock:
            ids = list(self._asked)
        if ids:
            self.wait(ids, until)

    def feed(self, scale: Scale, groups: int) -> None:
        """Keep so many groups asked for, until `no_more`."""
        stop = self._feeding = threading.Event()

        def work() -> None:
            seed = 10_000
            while not stop.wait(0.02):
                if (missing := groups - self.outstanding) > 0:
                    self.ask(workload(scale, seed, missing), scale.n)
                    seed += 1

        self._feeder = threading.Thread(target=work, daemon=True)
        self._feeder.start()

    def no_more(self) -> None:
        if self._feeding is not None and self._feeder is not None:
            self._feeding.set()
            self._feeder.join(5.0)

    def checked(self) -> Row:
        with self._lock:
            return {
                "groups": len(self.came),
                "delivered_again": len(self.twice),
                "wrong": self.wrong[:10],
                "samples_of_two_versions": self.mixed,
                "tokens_by_version": {str(key): value for key, value in sorted(self.versions.items())},
                "errors": self.errors[-5:],
            }

    def close(self) -> None:
        self.no_more()
        self.client.close()


def workload(scale: Scale, seed: int, groups: int, *, varied: bool = False) -> list[Ask]:
    """Random prompts, none alike. Varied lengths have the same mean."""
    random = np.random.default_rng(seed)
    prompts = random.integers(3, scale.shape["vocab"] - 4, (groups, scale.prompt)).astype(np.int32)
    spread = scale.new * 5 // 8 if varied else 0
    lengths = random.integers(scale.new - spread, scale.new + spread + 1, groups)
    return [Ask(prompt, int(length)) for prompt, length in zip(prompts, lengths, strict=True)]


# -- the engine, asked directly ----------------------------------------------------------------------------


async def drive(url: str, asks: Sequence[Ask], n: int, in_flight: int, within_s: float) -> Row:
    """`n` samples of each, so many at once, by Gyre's engine client."""
    from gyre.engines.dialect import GenerateRequest, SamplingParams
    from gyre.engines.http_client import EngineClient

    work = iter([(number, one) for number, one in enumerate(one for one in asks for _ in range(n))])
    base = time.time_ns() % 10**12
    first_s: list[float] = []
    totals = {"tokens": 0, "chunks": 0, "samples": 0}

    async def worker(client: EngineClient) -> None:
        for number, one in work:
            sampling = SamplingParams(max_new_tokens=one.length, ignore_eos=True, sampling_seed=number)
            request = GenerateRequest(f"{base:013d}{number:07d}", one.prompt, sampling)
            asked, made = now(), 0
            async with aclosing(client.generate(request)) as chunks:
                async for chunk in chunks:
                    if not made:
                        first_s.append(now() - asked)
                    made += len(chunk.token_ids)
                    totals["chunks"] += 1
            if made != one.length:
                raise PartFailed(f"the engine gave {made} of {one.length} tokens")
            totals["tokens"] += made
            totals["samples"] += 1

    async with asyncio.timeout(within_s), EngineClient(url) as client:
        began = now()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(worker(client))
        seconds = now() - began
    return {
        **totals,
        "in_flight": in_flight,
        "seconds": round(seconds, 3),
        "tokens_s": round(totals["tokens"] / seconds, 1),
        "first_token_p50_s": round(statistics.median(first_s), 4),
    }


# -- the machine -------------------------------------------------------------------------------------------


def gpu_used_mib() -> list[int] | None:
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [int(line) for line in told.stdout.split()]


def gpu_seen_fresh() -> str | None:
    """What a process that begins now sees free, in MiB."""
    code = (
        "import torch\n"
        "print([[v >> 20 for v in torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())])"
    )
    try:
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()


def left_of(processes: Sequence[psutil.Process]) -> list[Row]:
    """Which of these are there still, zombies included."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running():
                left.append({"pid": process.pid, "status": process.status()})
    return left


def gone_within(processes: Sequence[psutil.Process], within_s: float) -> tuple[float, list[Row]]:
    """How long until none of them is left, and who is after that time."""
    began = now()
    while (left := left_of(processes)) and now() - began < within_s:
        time.sleep(0.02)
    return round(now() - began, 3), left


def cpu_of(children: dict[str, Child]) -> dict[str, float]:
    """CPU seconds so far of each process, by role."""
    seconds: dict[str, float] = {}
    for role, child in children.items():
        for process in child.tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                name = role if process.pid == child.pid else f"{role} engine: {_short(process)}"
                seconds[name] = seconds.get(name, 0.0) + times.user + times.system
    own = time.process_time()
    return {**seconds, "this (trainer, or who asks the engine)": own}


def _short(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    for word in ("scheduler", "detokenizer", "guard.py", "launch_server", "embedded"):
        if word in line:
            return word
    return process.name()


def spent(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Cores taken by each."""
    shares = {name: round((after[name] - before.get(name, 0.0)) / seconds, 3) for name in after}
    return {name: share for name, share in shares.items() if share >= 0.005}


def written_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io") as file:
            return int(next(line for line in file if line.startswith("wchar")).split()[1])
    except OSError:
        return 0


def py_spy(place: Path) -> str | None:
    found = shutil.which("py-spy")
    for folder in sys.path:
        for path in (*Path(folder).glob("py_spy-*.data/scripts/py-spy"), Path(folder, "bin", "py-spy")):
            if found is None and path.is_file():
                copy = place / "py-spy"
                shutil.copy(path, copy)
                copy.chmod(0o755)
                found = str(copy)
    return found


# -- the parts ---------------------------------------------------------------------------------------------


@dataclass
class Bench:
    scale: Scale
    out: Path
    place: Path
    models: list[Path]
    end_at: float
    gpus: int
    results: Row = field(default_factory=dict)
    planes: dict[str, Plane] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)

    # .. what several parts need

    def plane(self, name: str, until: float, **settings: Any) -> Plane:
        if name not in self.planes:
            plane = self.planes[name] = Plane(self.place, name)
            plane.start(until, **settings)
            assert plane.trainer is not None
            plane.trainer.publish(0, self.models[0])
        return self.planes[name]

    def instance(self, plane: Plane, name: str, *, running: int, gpu: int, memory: float) -> Instance:
        options = {
            "name": name,
            "running": running,
            "kv_tokens": self.scale.kv_tokens * running // self.scale.running,
            "cache": str(self.place / "cache" / name),
            "engine": self.scale.engine,
            "endpoint": str(plane.endpoint),
            "gpu": gpu,
            "memory": memory,
            "ready_s": 200.0,
        }
        self.instances[name] = Instance(plane.place, options)
        return self.instances[name]

    def loaded(self, plane: Plane, instance: Instance, until: float, after: float = 0.0) -> Row:
        """The event of its weights. Raises PartFailed as soon as its agent has ended."""
        after = max(after, instance.began)
        while True:
            with contextlib.suppress(PartFailed):
                return plane.log.wait("WeightsLoaded", min(until, now() + 0.5), after, instance=instance.name)
            instance.check()
            refused = plane.log.rows("WeightsRefused", after, instance=instance.name)
            if len(refused) > 1:  # once may be a port that somebody else took
                raise PartFailed(f"{instance.name} has no engine: {refused[-1]['error'][:2500]}")
            if now() > until:
                raise PartFailed(f"{instance.name} did not load its weights in time")

    def living(self, *names: str) -> list[Instance]:
        for name in names:
            if name not in self.instances:
                raise PartFailed(f"instance {name} was not started")
            self.instances[name].check()
        return [self.instances[name] for name in names]

    def one(self) -> tuple[Plane, Instance, Trainer]:
        (instance,) = self.living("a")
        instance.engine_url()
        plane = self.planes["one"]
        assert plane.trainer is not None
        return plane, instance, plane.trainer

    def pair(self) -> tuple[Plane, Trainer]:
        self.living("b", "c")
        plane = self.planes["pair"]
        assert plane.trainer is not None
        return plane, plane.trainer

    def through_gyre(
        self,
        plane: Plane,
        asks: Sequence[Ask],
        until: float,
        children: dict[str, Child],
        *,
        take: bool = True,
    ) -> tuple[Row, list[int]]:
        trainer = plane.trainer
        assert trainer is not None
        trainer.taking = take
        before, began = cpu_of(children), now()
        ids = trainer.ask(asks, self.scale.n)
        ended, tokens = trainer.wait(ids, until)
        seconds = ended - began
        row = {
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_s": round(tokens / seconds, 1),
            "cores": spent(before, cpu_of(children), now() - began),
            "held": _held_within(plane, "a", began + 0.15 * seconds, began + 0.75 * seconds),
        }
        trainer.taking = True
        return row, ids

    # .. one instance

    def start_one(self, out: Row, until: float) -> None:
        plane = self.plane("one", until)
        began = now()
        instance = self.instance(plane, "a", running=self.scale.running, gpu=0, memory=0.6)
        out["loaded"] = self.loaded(plane, instance, until)
        out["from_agent_start_to_loaded_s"] = round(now() - began, 2)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["gpu_used_mib"] = gpu_used_mib()

    def single(self, out: Row, until: float) -> None:
        plane, instance, trainer = self.one()
        scale, url = self.scale, instance.engine_url()
        assert plane.manager is not None
        children = {"manager": plane.manager, "agent": instance}

        def bare(seed: int, in_flight: int, *, groups: int = scale.groups, varied: bool = False) -> Row:
            before, began = cpu_of(children), now()
            asks = workload(scale, seed, groups, varied=varied)
            row = asyncio.run(drive(url, asks, scale.n, in_flight, until - now()))
            row["cores"] = spent(before, cpu_of(children), now() - began)
            return row

        out["warm_up"] = [bare(1, scale.running, groups=scale.groups // 2)]
        row, _ = self.through_gyre(plane, workload(scale, 2, scale.groups // 2), until, children)
        out["warm_up"].append(row)

        disk, written = plane.disk_bytes(), written_bytes(plane.manager.pid)
        seed = 10
        over = scale.running * 17 // 16  # as many as the plane gives it
        for turn in range(scale.rounds):
            for kind, varied in (("fixed", False), ("varied", True)):
                ways = ("gyre", "bare", "bare_over")
                for way in (*ways[turn % 3 :], *ways[: turn % 3]):
                    if way != "gyre":
                        in_flight = over if way == "bare_over" else scale.running
                        row = bare(seed, in_flight, varied=varied)
                    else:
                        keep = turn == 0 and not varied
                        asks = workload(scale, seed, scale.groups, varied=varied)
                        row, ids = self.through_gyre(plane, asks, until, children, take=not keep)
                        if keep:
                            row["disk_bytes_per_token"] = round(
                                (plane.disk_bytes() - disk) / row["tokens"], 2
                            )
                            told = written_bytes(plane.manager.pid) - written
                            row["written_bytes_per_token"] = round(told / row["tokens"], 2)
                            trainer.take(ids)
                    out.setdefault(f"{way}_{kind}", []).append(row)
                    seed += 1
        for kind in ("fixed", "varied"):
            for way in ("bare", "bare_over"):
                ratio = _median(out[f"gyre_{kind}"]) / _median(out[f"{way}_{kind}"])
                out[f"gyre_over_{way}_{kind}"] = round(ratio, 4)
        out["bare_few"] = [bare(seed, scale.few, groups=scale.groups // 2)]
        out["account"] = plane.account()
        out["checked"] = trainer.checked()
        if out["gyre_over_bare_fixed"] < 0.97 and (tool := py_spy(self.place)) is not None:
            out["profile"] = self._profile(plane, instance, tool, seed + 3, until)

    def _profile(self, plane: Plane, instance: Instance, tool: str, seed: int, until: float) -> Row:
        """One more run with py-spy at the manager and the agent, by function, into the output folder."""
        assert plane.manager is not None
        assert plane.trainer is not None
        ids = plane.trainer.ask(workload(self.scale, seed, self.scale.groups), self.scale.n)
        time.sleep(0.5)
        runs = []
        for role, pid in (("manager", plane.manager.pid), ("agent", instance.pid)):
            command = [tool, "record", "--pid", str(pid), "--duration", "4", "--rate", "200"]
            command += [
                "--format",
                "raw",
                "--nonblocking",
                "--output",
                str(self.place / f"profile-{role}.txt"),
            ]
            runs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for run in runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(20)
            run.kill()
        plane.trainer.wait(ids, until)
        found: Row = {}
        for role in ("manager", "agent"):
            path = self.place / f"profile-{role}.txt"
            if not path.exists():
                continue
            inner: Counter[str] = Counter()
            for line in path.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                inner.update({frame: int(count) for frame in set(stack.split(";"))})
            total = max(inner.values(), default=1)
            found[role] = {frame: round(count / total, 3) for frame, count in inner.most_common(60)}
        return found

    def updates(self, out: Row, until: float) -> None:
        plane, instance, trainer = self.one()
        scale = self.scale

        def run(version: int, row: Row, between: Callable[[Row], None]) -> None:
            mixed, began = trainer.mixed, now()
            before = Counter(trainer.versions)
            ids = trainer.ask(workload(scale, 100 + version, version * scale.groups), scale.n)
            self._until_generating(plane, began, until)
            between(row)
            published = trainer.publish(version, self.models[version % 2])
            loaded = self.loaded(plane, instance, until, published)
            row["publish_to_loaded_s"] = round(loaded["at"] - published, 3)
            row["agent_verified_s"], row["agent_pause_load_resume_s"] = loaded["fetch_s"], loaded["load_s"]
            row["held_then"] = _held(plane, "a", published)
            ended, tokens = trainer.wait(ids, until)
            row |= {"tokens": tokens, "seconds": round(ended - began, 3)}
            row["tokens_s"] = round(tokens / (ended - began), 1)
            row["samples_of_two_versions"] = trainer.mixed - mixed
            row["tokens_by_version"] = dict(Counter(trainer.versions) - before)

        def nothing(row: Row) -> None:
            return None

        def kill_the_manager(row: Row) -> None:
            assert plane.manager is not None
            killed = now()
            plane.manager.kill()
            plane.start(until, update_mode="retract")
            back = plane.log.wait("InstanceJoined", until, killed, instance="a")
            row["manager_killed_to_listening_s"] = round(plane.log.rows("Listening")[-1]["at"] - killed, 3)
            row["manager_killed_to_agent_back_s"] = round(back["at"] - killed, 3)
            row["held_by_agent"], row["kept"] = back["held"], back["kept"]
            # Weights are to come under running samples again.
            while _held(plane, "a", now()) < scale.running // 2:
                if now() > until:
                    raise PartFailed("nothing is generated after the manager came back")
                time.sleep(0.02)
            time.sleep(0.3)
            row["manager_killed_to_working_s"] = round(now() - 0.3 - killed, 3)

        out["in_place"] = {}
        run(1, out["in_place"], nothing)
        out["account_in_place"] = plane.account()
        out["retract_after_manager_killed"] = {}
        run(2, out["retract_after_manager_killed"], kill_the_manager)
        out["account"] = plane.account()
        out["checked"] = trainer.checked()

    def _until_generating(self, plane: Plane, since: float, until: float) -> None:
        """Some of the run's tokens have come in."""
        part = self.scale.groups * self.scale.n * self.scale.new // 5
        while now() < until:
            rows = plane.log.rows("state", since)
            if rows and rows[-1]["generated"] - rows[0]["generated"] >= part:
                return
            time.sleep(0.02)
        raise PartFailed("nothing is generated")

    # .. raw replies

    def start_pair(self, out: Row, until: float) -> None:
        """Only begun here: they start while the transcript is recorded."""
        plane = self.plane("pair", until)
        half = self.scale.running // 2
        for number, name in enumerate(("b", "c")):
            gpu = number if self.gpus > 1 else 0
            self.instance(plane, name, running=half, gpu=gpu, memory=0.5)
        out["gpus"] = self.gpus

    def transcript(self, out: Row, until: float) -> None:
        instance = self.instances.get("a")
        if instance is None:
            raise PartFailed("there is no engine")
        url = instance.engine_url()
        lines: list[Row] = []
        try:
            asyncio.run(self._record(url, lines, until))
        finally:
            with open(self.out / "transcript.jsonl", "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        out["lines"] = len(lines)
        out["statuses"] = [[line["what"], line.get("status"), line["seconds"]] for line in lines]

    async def _record(self, url: str, lines: list[Row], until: float) -> None:
        began, scale = now(), self.scale
        prompt = workload(scale, 77, 1)[0].prompt.tolist()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=30)
        )

        async def call(what: str, method: str, path: str, body: Row | None = None) -> Any:
            at = now()
            line: Row = {
                "what": what,
                "at": round(at - began, 4),
                "method": method,
                "path": path,
                "request": body,
            }
            lines.append(line)
            try:
                async with session.request(method, url + path, json=body) as response:
                    line["status"] = response.status
                    line["content_type"] = response.content_type
                    line["body"] = (await response.text())[:60_000]
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                line["error"] = repr(error)
            line["seconds"] = round(now() - at, 4)
            return line.get("body")

        async def stream(what: str, rid: str, **changes: Any) -> None:
            sampling = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True, **changes}
            body = {
                "rid": rid,
                "input_ids": prompt,
                "sampling_params": sampling,
                "stream": True,
                "return_logprob": True,
            }
            at = now()
            line: Row = {
                "what": what,
                "at": round(at - began, 4),
                "method": "POST",
                "path": "/generate",
                "request": body,
                "events": [],
            }
            lines.append(line)
            try:
                async with session.post(url + "/generate", json=body) as response:
                    line["status"] = response.status
                    line["content_type"] = response.content_type
                    async for raw in response.content:
                        if raw.strip():
                            line["events"].append(
                                [round(now() - at, 4), raw.decode(errors="replace").rstrip("\n")]
                            )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                line["error"] = repr(error)
            line["seconds"] = round(now() - at, 4)

        def rid(number: int) -> str:
            return f"{number:020d}"

        try:
            async with asyncio.timeout(until - now()):
                for path in ("/model_info", "/server_info", "/ready", "/health", "/v1/loads", "/nowhere"):
                    await call(path, "GET", path)
                await stream("sampled", rid(1))
                await stream("greedy", rid(2), temperature=0.0)
                await stream("seeded", rid(3), sampling_seed=7)
                await stream("seeded again", rid(4), sampling_seed=7)
                await stream("top_p, top_k, min_p", rid(5), top_p=0.9, top_k=20, min_p=0.01)
                await stream("stop token", rid(6), stop_token_ids=list(range(scale.shape["vocab"] // 2)))
                await stream("one token", rid(7), max_new_tokens=1)
                await stream("unknown sampling parameter", rid(8), nonsense=1)
                await stream("too long", rid(9), max_new_tokens=1_000_000)
                await call("abort of nobody", "POST", "/abort_request", {"rid": rid(99)})
                many = scale.running // 2
                for mode in ("in_place", "retract", "abort"):
                    long = scale.new * 6
                    base = 1000 * (1 + ("abort", "retract", "in_place").index(mode))
                    running = [
                        asyncio.create_task(
                            stream(
                                f"running, {mode}",
                                rid(base + number),
                                max_new_tokens=long,
                                sampling_seed=number,
                            )
                        )
                        for number in range(many)
                    ]
                    await asyncio.sleep(1.0)
                    await call("load while running", "GET", "/v1/loads")
                    await call("abort of one", "POST", "/abort_request", {"rid": rid(base)})
                    await call(f"pause {mode}", "POST", "/pause_generation", {"mode": mode})
                    await call("ready while paused", "GET", "/ready")
                    body = {
                        "model_path": str(self.models[1]),
                        "weight_version": f"9{base}",
                        "flush_cache": mode == "abort",  # 0.5.17 dies of it where a request waits
                    }
                    await call(f"update, {mode}", "POST", "/update_weights_from_disk", body)
                    await call(f"flush while paused, {mode}", "POST", "/flush_cache", {})
                    await call(f"resume, {mode}", "POST", "/continue_generation", {})
                    await asyncio.sleep(0.5)
                    if mode == "in_place":
                        await asyncio.wait(running, timeout=8.0)
                    await call("abort of all", "POST", "/abort_request", {"rid": "", "abort_all": True})
                    await asyncio.wait(running, timeout=10.0)
                    for task in running:
                        task.cancel()
                await call(
                    "update from nowhere",
                    "POST",
                    "/update_weights_from_disk",
                    {"model_path": "/nonexistent", "weight_version": "1", "flush_cache": True},
                )
                await call("model_info after", "GET", "/model_info")
                await call("flush", "POST", "/flush_cache", {})
        finally:
            await session.close()
            _thin(lines)

    def stop_one(self, out: Row, until: float) -> None:
        instance, plane = self.instances.get("a"), self.planes.get("one")
        if instance is not None:
            processes, began = instance.tree(), now()
            instance.stop(15.0)
            out["stopped_s"] = round(now() - began, 2)
            out["left"] = gone_within(processes, 2.0)[1]
            out["ended_by_itself"] = bool(instance.log.rows("ended"))
        if plane is not None:
            plane.stop()
            out["missing"] = [row["missing"] for row in plane.log.rows("Stopping")]
        out["gpu_used_mib"] = gpu_used_mib()

    # .. two instances

    def two(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            out[f"loaded_{name}"] = self.loaded(plane, self.instances[name], until)
        out["gpu_used_mib"] = gpu_used_mib()
        began = now()
        trainer.feed(scale, 4 * scale.running // scale.n)
        time.sleep(scale.settle_s)
        warm = began + scale.settle_s / 3
        victim = self.instances["c"]
        options = {key: value for key, value in victim.options.items() if key not in ("log", "tail")}
        struck = now()
        out["rate_of_both"] = round(both := plane.rate(warm, struck), 1)
        out["rate_each"] = {name: round(plane.rate(warm, struck, name), 1) for name in ("b", "c")}
        held = _held(plane, "c", struck)
        progress = victim.log.rows("progress")[-1]
        killed = victim.kill()
        left = plane.log.wait("InstanceLeft", until, struck, instance="c")
        self.instances["c"] = back = Instance(plane.place, options)  # who joins before takes its place untold
        out["killed"] = {
            "samples_held": held,
            "detected_s": round(left["at"] - struck, 3),
            "reason": left["reason"],
            "samples_moved": left["moved"],
            "tokens_moved": left["tokens"],
            "last_report_before_s": round(struck - progress["at"], 3),
            "tokens_lost_with_it_at_most": round(plane.rate(warm, struck, "c") * (struck - progress["at"])),
            "processes_gone_s": gone_within(killed, 3.0)[0],
            "processes_left": left_of(killed),
        }
        loaded = self.loaded(plane, back, min(until - 25.0, struck + scale.absent_s), struck)
        absent_s = loaded["at"] - struck
        out["killed"]["back_s"] = round(absent_s, 2)
        out["rate_of_one"] = round(alone := plane.rate(struck + max(2.0, absent_s / 2), loaded["at"]), 1)
        out["killed"] |= self._continued(plane, struck, loaded["at"], "c", left["moved"])
        time.sleep(scale.after_s)
        stopped = now()
        out["rate_of_both_after"] = round(plane.rate(loaded["at"] + min(2.0, scale.after_s / 2), stopped), 1)
        rows = [row for row in plane.log.rows("state", began) if row["at"] <= stopped]
        made = rows[-1]["generated"] - rows[0]["generated"]
        ideal = both * (stopped - began - absent_s) + alone * absent_s
        out["tokens"], out["ideal_tokens"] = made, round(ideal)
        out["of_ideal"] = round(made / ideal, 4) if ideal else None
        trainer.no_more()
        trainer.wait_all(until)
        out["seconds"] = round(now() - began, 2)
        out["account"] = account = plane.account()
        out["checked"] = trainer.checked()
        extra = account["generated"] - account["delivered"]
        out["generated_again"] = extra - sum(account["discarded"].values())
        out["events"] = dict(Counter(row["kind"] for row in plane.log.rows() if row["kind"] != "state"))

    def _continued(self, plane: Plane, first: float, last: float, lost: str, moved: int) -> Row:
        """When the lost samples were given to others, as far as the log shows them."""
        rows = [
            row for row in plane.log.rows("Continued", first) if row["at"] <= last and row["instance"] != lost
        ]
        found, total = [], 0
        for row in rows:
            if total >= moved:
                break
            total += row["samples"]
            found.append(round(row["at"] - first, 3))
        return {"elsewhere_first_s": found[:1], "elsewhere_last_s": found[-1:], "elsewhere_samples": total}

    def crash(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            self.loaded(plane, self.instances[name], min(until, now() + 40.0))
        trainer.feed(scale, scale.running // 2 // scale.n)  # half full: who loses its instance finds room
        time.sleep(min(4.0, scale.settle_s))
        victim = self.instances["c"]
        processes = [process for process in victim.tree() if process.pid != victim.pid]
        inner = [process for process in processes if _short(process) == "scheduler"]
        target = inner[0] if inner else processes[-1]
        out["killed"] = {"pid": target.pid, "what": _short(target)}
        struck = now()
        target.kill()
        try:
            died = plane.log.wait("EngineDied", min(until, struck + 30.0), struck, instance="c")
        except PartFailed:  # its server goes on without it; then that is killed too
            out["scheduler_alone_not_noticed"] = True
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if _short(process) == "launch_server":
                        process.kill()
            died = plane.log.wait("EngineDied", until, struck, instance="c")
        out["detected_s"] = round(died["at"] - struck, 3)
        out["error"], out["tail"] = died["error"], died["tail"][-1500:]
        out["processes_gone_s"], out["processes_left"] = gone_within(processes, 5.0)
        loaded = self.loaded(plane, victim, until, struck)
        out["working_again_s"] = round(loaded["at"] - struck, 2)
        out |= self._continued(plane, struck, loaded["at"], "c", 10**9)
        out["gpu_used_mib"] = gpu_used_mib()
        time.sleep(1.0)
        out["rate"] = round(plane.rate(now() - 1.0, now()), 1)
        trainer.no_more()
        trainer.wait_all(until)
        out["account"], out["checked"] = plane.account(), trainer.checked()

    def drain(self, out: Row, until: float) -> None:
        scale = self.scale
        plane, trainer = self.pair()
        for name in ("b", "c"):
            self.loaded(plane, self.instances[name], min(until, now() + 40.0))
        trainer.feed(scale, scale.running // 2 // scale.n)
        time.sleep(min(4.0, scale.settle_s))
        leaver = self.instances["c"]
        processes, held = leaver.tree(), _held(plane, "c", now())
        notice = now()
        plane.ask("/v1/drain", {"instance": "c", "deadline_s": 30.0})
        over = plane.log.wait("HandedOver", until, notice, instance="c")
        left = plane.log.wait("InstanceLeft", until, notice, instance="c")
        out["samples_held"] = held
        out["handed_over_s"] = round(over["at"] - notice, 3)
        out["connection_closed_s"] = round(left["at"] - notice, 3)
        out["reason"], out["moved_at_the_end"] = left["reason"], left["moved"]
        leaver.process.wait(max(1.0, until - now()))
        out["agent_and_engine_ended_s"] = round(now() - notice, 3)
        out["exit_status"] = leaver.process.returncode
        out["processes_left"] = gone_within(processes, 2.0)[1]
        out |= self._continued(plane, notice, now(), "c", held)
        trainer.no_more()
        trainer.wait_all(until)
        out["account"], out["checked"] = plane.account(), trainer.checked()

    def ends(self, out: Row, until: float) -> None:
        """The agent alone is killed: the guard ends the engine."""
        (instance,) = self.living("b")
        processes = instance.tree()
        instance.process.kill()
        instance.process.wait()
        out["engine_gone_s"], out["processes_left"] = gone_within(processes, 20.0)
        self.planes["pair"].stop()
        out["missing"] = [row["missing"] for row in self.planes["pair"].log.rows("Stopping")]
        until_free = now() + 5.0
        while (used := gpu_used_mib()) is not None and max(used) > 2000 and now() < until_free:
            time.sleep(0.5)
        out["gpu_used_mib"], out["gpu_free_and_total_mib_seen_fresh"] = used, gpu_seen_fresh()

    # .. seeds

    def seeded(self, out: Row, until: float) -> None:
        asyncio.run(self._seeded(out, until))

    async def _seeded(self, out: Row, until: float) -> None:
        from gyre.engines.dialect import GenerateRequest, SamplingParams
        from gyre.engines.http_client import EngineClient
        from gyre.engines.process import EngineProcess

        scale = self.scale
        options = {
            "engine": scale.engine,
            "running": scale.running,
            "kv_tokens": scale.kv_tokens,
            "memory": 0.6,
            "gpu": 0,
        }
        command = engine_command(options, self.models[0], "0", seeded=True)
        began = now()
        engine = EngineProcess(command, ready_within_s=max(5.0, until - now() - 15.0))
        try:
            url = await engine.start()
            out["start_s"] = round(now() - began, 2)
            asks = workload(scale, 500, 4)

            async def sample(
                client: EngineClient, one: Ask, seed: int, prior: Sequence[int], number: int
            ) -> list[int]:
                ids = np.concatenate([one.prompt, np.array(prior, np.int32)])
                sampling = SamplingParams(one.length - len(prior), ignore_eos=True, sampling_seed=seed)
                found: list[int] = []
                async with aclosing(
                    client.generate(GenerateRequest(f"{number:020d}", ids, sampling))
                ) as chunks:
                    async for chunk in chunks:
                        found += chunk.token_ids.tolist()
                return [*prior, *found]

            async with asyncio.timeout(max(1.0, until - now())), EngineClient(url) as client:
                alone = [await sample(client, one, 7, (), number) for number, one in enumerate(asks)]
                crowd = [(one, 7 + copy) for one in asks for copy in range(scale.running // len(asks))]
                many = await asyncio.gather(
                    *(sample(client, one, seed, (), 100 + at) for at, (one, seed) in enumerate(crowd))
                )
                same = many[:: scale.running // len(asks)]
                cut = scale.new // 3
                on = await asyncio.gather(
                    *(sample(client, one, 7, alone[at][:cut], 9000 + at) for at, one in enumerate(asks))
                )
            out["alike_alone_and_in_a_full_batch"] = [_alike(*two) for two in zip(alone, same, strict=True)]
            out["alike_whole_and_continued"] = [_alike(*two) for two in zip(alone, on, strict=True)]
            out["different_seeds_differ"] = many[0] != many[1]
            within = max(1.0, until - now())
            out["throughput"] = await drive(
                url, workload(scale, 501, scale.groups), scale.n, scale.running, within
            )
        except BaseException:
            out["engine_tail"] = engine.tail[-6000:]
            raise
        finally:
            await engine.stop()


def _alike(first: list[int], second: list[int]) -> int:
    """How many tokens agree from the start; the length where all do."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row["tokens_s"] for row in rows)


def _held(plane: Plane, name: str, at: float) -> int:
    """Samples that the instance had then."""
    rows = [row for row in plane.log.rows("state") if row["at"] <= at]
    return int(rows[-1]["instances"].get(name, [0, 0])[1]) if rows else 0


def _held_within(plane: Plane, name: str, first: float, last: float) -> Row:
    """How many samples it had: fewer than it can run is the manager's fault."""
    rows = [row for row in plane.log.rows("state", first) if row["at"] <= last]
    held = [row["instances"].get(name, [0, 0])[1] for row in rows]
    return {"mean": round(statistics.mean(held), 1), "least": min(held)} if held else {}


def _thin(lines: list[Row]) -> None:
    """Of the many streams that ran during a pause, keep three whole, and of the others how they ended."""
    kept: Counter[str] = Counter()
    for line in lines:
        if line["what"].startswith("running"):
            kept[line["what"]] += 1
            if kept[line["what"]] > 3:
                line["request"] = {"rid": line["request"]["rid"]}
                line["events"] = line["events"][-2:]


# -- the run -----------------------------------------------------------------------------------------------

PARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("start_one", 210.0, ("single", "updates", "transcript")),
    ("single", 220.0, ("single",)),
    ("updates", 45.0, ("updates",)),
    ("start_pair", 15.0, ("two", "crash", "drain", "ends")),
    ("transcript", 60.0, ("transcript",)),
    ("stop_one", 25.0, ("single", "updates", "transcript")),
    ("two", 190.0, ("two",)),
    ("crash", 90.0, ("crash",)),
    ("drain", 30.0, ("drain",)),
    ("ends", 45.0, ("ends",)),
    ("seeded", 100.0, ("seeded",)),
)
"""Steps with their deadlines, and the parts that need them."""

NAMES = ("single", "updates", "transcript", "two", "crash", "drain", "ends", "seeded")


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """For a part that waits where no deadline was thought of."""

    def ring(number: int, frame: Any) -> None:
        raise PartFailed(f"still not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def write(bench: Bench) -> None:
    partial = bench.out / ".results.json"
    partial.write_text(json.dumps(bench.results, indent=1) + "\n")
    partial.rename(bench.out / "results.json")


def tails(bench: Bench) -> dict[str, str]:
    return {
        path.name: path.read_text(errors="replace")[-2500:]
        for path in sorted(bench.place.glob("*/*"))
        if path.suffix in (".tail", ".out") and path.stat().st_size
    }


def gather_logs(bench: Bench) -> None:
    """What every process said, in one file of at most some MiB; profiles beside it."""
    with open(bench.out / "logs.txt", "wb") as file:
        for path in sorted(
            [*bench.place.glob("*/*"), *bench.place.glob("*.txt"), *bench.place.glob("*.out")]
        ):
            if path.suffix in (".tail", ".out", ".jsonl", ".txt") and path.is_file():
                data = path.read_bytes()
                if path.suffix == ".jsonl":
                    lines = [line for line in data.splitlines(True) if b'"state"' not in line]
                    data = b"".join(line for line in lines if b'"progress"' not in line)
                file.write(f"\n===== {path.name}\n".encode() + data[-400_000:])


def run_part(bench: Bench, name: str, limit_s: float) -> None:
    out: Row = {}
    bench.results["parts"][name] = out
    began = now()
    until = min(began + limit_s, bench.end_at)
    print(f"[{began - bench.results['began']:6.1f} s] {name}", flush=True)
    try:
        if until - began < 5.0:
            raise PartFailed("no time is left for it")
        with alarm(until - began + 3.0):
            getattr(bench, name)(out, until)
        out["ok"] = True
    except Exception as error:
        out["ok"] = False
        out["failed"] = f"{type(error).__name__}: {error}"[:3000]
        out["traceback"] = traceback.format_exc()[-3000:]
        out["tails"] = tails(bench)
        print(f"    FAILED: {out['failed']}", flush=True)
    for plane in bench.planes.values():
        if plane.trainer is not None:
            plane.trainer.no_more()
            plane.trainer.taking = True
    out["part_seconds"] = round(now() - began, 2)
    write(bench)


def machine() -> Row:
    def said(*command: str) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    versions = "from importlib.metadata import version as v\n"
    versions += "for n in ('torch','sglang','sglang-kernel','transformers','aiohttp','numpy'):\n"
    versions += "  try: print(n, v(n))\n  except Exception: print(n, '-')"
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "gpus": said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "packages": said(sys.executable, "-c", versions).splitlines(),
        "commit": said("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "py_spy": py_spy(Path(tempfile.gettempdir())) is not None,
    }


def summary(results: Row) -> list[str]:
    lines = []
    for name, part in results["parts"].items():
        state = "ok" if part.get("ok") else f"FAILED {part.get('failed', '')[:160]}"
        lines.append(f"{name:<11}{part.get('part_seconds', 0):7.1f} s  {state}")
    parts = results["parts"]
    wanted = {
        "start_one": ("engine_start_s",),
        "single": tuple(
            f"gyre_over_{way}_{kind}" for way in ("bare", "bare_over") for kind in ("fixed", "varied")
        ),
        "two": ("rate_of_both", "rate_of_one", "of_ideal", "generated_again", "killed", "account"),
        "crash": ("detected_s", "working_again_s", "elsewhere_first_s", "elsewhere_last_s", "processes_left"),
        "drain": ("samples_held", "handed_over_s", "agent_and_engine_ended_s"),
        "ends": ("engine_gone_s", "gpu_used_mib"),
        "seeded": ("alike_alone_and_in_a_full_batch", "alike_whole_and_continued", "throughput"),
    }
    for name, keys in wanted.items():
        lines += [f"{name}.{key} = {parts[name][key]}" for key in keys if key in parts.get(name, {})]
    for key in (
        "bare_fixed",
        "gyre_fixed",
        "bare_varied",
        "gyre_varied",
        "bare_over_fixed",
        "bare_over_varied",
        "bare_few",
    ):
        rows = parts.get("single", {}).get(key, [])
        for row in rows:
            lines.append(
                f"single.{key}: {row['tokens_s']:.0f} tok/s  {row['cores']} held {row.get('held', '')}"
            )
    lines += [
        f"updates.{key} = {row}" for key, row in parts.get("updates", {}).items() if isinstance(row, dict)
    ]
    return lines


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


def conduct(options: argparse.Namespace) -> int:
    scale = DRY if options.dry_run else GPU
    scale = replace(
        scale, absent_s=scale.absent_s * options.patience, total_s=scale.total_s * options.patience
    )
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # nothing that was started is left
    began = now()
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 6 << 30
    gpus = 0 if options.dry_run else len(gpu_used_mib() or [])
    with (
        tempfile.TemporaryDirectory(prefix="gyre-gpu-") as place,
        tempfile.TemporaryDirectory(prefix="gyre-gpu-", dir=memory if roomy else None) as weights,
    ):
        bench = Bench(
            scale,
            options.out.resolve(),
            Path(place),
            [Path(weights, "first"), Path(weights, "second")],
            began + (options.seconds or scale.total_s),
            gpus,
        )
        (bench.place / "cache").mkdir()
        bench.results = {"began": began, "dry_run": options.dry_run, "scale": vars(scale), "parts": {}}

        def last_resort() -> None:
            bench.results["watchdog"] = True
            write(bench)
            gather_logs(bench)
            end_all(bench)
            os._exit(3)

        watchdog = threading.Timer(bench.end_at - now() + 20.0, last_resort)
        watchdog.daemon = True
        watchdog.start()
        try:
            writers = [
                Child(
                    "model",
                    {
                        "folder": str(folder),
                        "shape": scale.shape,
                        "seed": seed,
                        "bf16": not options.dry_run,
                        "threads": 1 if options.dry_run else 4,
                    },
                    bench.place / "models.out",
                )
                for seed, folder in enumerate(bench.models)
            ]
            bench.results["machine"] = machine()
            bench.results["gpu_used_mib_before"] = gpu_used_mib()
            if any(writer.process.wait(120) for writer in writers):
                raise SystemExit((bench.place / "models.out").read_text()[-2000:])
            bench.results["models_written_s"] = round(now() - began, 2)
            for name, limit_s, needed_by in PARTS:
                if set(needed_by) & set(options.part):
                    run_part(bench, name, limit_s * options.patience)
        finally:
            end_all(bench)
            bench.results["seconds"] = round(now() - began, 1)
            bench.results["gpu_used_mib_after"] = gpu_used_mib()
            write(bench)
            gather_logs(bench)
            watchdog.cancel()
    print("\n".join(summary(bench.results)))
    return 0 if all(part.get("ok") for part in bench.results["parts"].values()) else 1


def end_all(bench: Bench) -> None:
    """Whatever is still there of what was started here. Guards first: they end their engines at once when told so, and
    take out of shared memory what these had there."""
    guards = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "guard.py" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGUSR1)
                guards.append(process)
    psutil.wait_procs(guards, timeout=4.0)
    for child in [*bench.instances.values(), *(plane.manager for plane in bench.planes.values())]:
        if child is not None:
            with contextlib.suppress(psutil.Error, OSError):
                child.kill()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
