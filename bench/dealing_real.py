"""The real part of `bench/dealing.py`: the product's manager, in a process of its own, over WebSockets.

Agents and engines are SIMULATED, in this process and in real time: the engines are those of `dealing_fleet.py`, and the
agents report as `gyre.rollouts.agent` does. A sample's tokens are counted and checked: each as long as it is to be, and
none twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
from dealing_fleet import REPORT_S, SLOTS, Case, Engine, Sim, best_parts

from gyre.rollouts.agent.agent import FLUSH_GAP_S
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, encode
from gyre.rollouts.protocol.frames import PROTOCOL, Attach, GroupsStored, Hello, Loaded, Publish, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.weights.version.model_folder import list_model_folder

STEP_WITHIN_S = 120.0
LOOK_S = 0.002


class RealClock:
    @property
    def now(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(max(seconds, 0.0), call)


class Agent:
    def __init__(self, fleet: Fleet, name: str, slow: float) -> None:
        self.fleet, self.name = fleet, name
        self.incarnation = 0
        self.slow = slow
        self.version = -1
        self.begin_anew()

    def begin_anew(self) -> None:
        """A new process, with an engine that has nothing."""
        if self.incarnation:
            self.engine.running.clear()
            self.engine.waiting.clear()
        self.incarnation += 1
        clock: Any = RealClock()
        self.engine = Engine(clock, self.slow, self.fleet.case.prompt, lambda sim: self.over(sim.key, "stop"))
        self.sims: dict[int, tuple[dict[str, Any], Sim, int]] = {}
        """The work, its sample, and the tokens of it that were sent, by lease."""
        self.ends: list[tuple[int, int, str]] = []
        self.seq = 0
        self.made = 0
        self.made_at = time.monotonic()
        self.rate = 0.0
        self.news = asyncio.Event()
        self.socket: aiohttp.ClientWebSocketResponse | None = None

    @property
    def has_free_slot(self) -> bool:
        engine = self.engine
        taken = len(engine.running) + len(engine.waiting)
        return self.socket is not None and self.version == self.fleet.version and taken < SLOTS

    async def run(self, session: aiohttp.ClientSession, port: int) -> None:
        url = f"http://127.0.0.1:{port}/v1/agent"
        async with session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, compress=0) as socket:
            hello = Hello(
                protocol=PROTOCOL,
                instance=self.name,
                incarnation=f"{self.name}-{self.incarnation}",
                model="unset",
                engine="simulated",
                max_running=SLOTS,
                kv_tokens=1 << 36,
            )
            await socket.send_bytes(encode(hello))
            async with asyncio.TaskGroup() as tasks:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    kind, body = msgpack.unpackb(message.data)
                    if kind == "welcome":
                        self.socket = socket
                        reporter = tasks.create_task(self.report())
                        body = body["weights"]
                    if kind == "assign":
                        self.take(body)
                    elif kind == "cancel":
                        for _, lease in body["rows"]:
                            self.cancel(lease)
                    elif kind in ("weights", "welcome") and body is not None:
                        tasks.create_task(self.load(body))
                self.socket = None
                reporter.cancel()

    async def load(self, weights: dict[str, Any]) -> None:
        if await self.fleet.loads(self.name, weights["version"]) and self.socket is not None:
            self.version = weights["version"]
            self.engine.prompts.clear()
            frame = Loaded(version=self.version, checksum=weights["checksum"], fetch_s=0.0, load_s=0.0)
            await self.socket.send_bytes(encode(frame))

    def take(self, body: dict[str, Any]) -> None:
        groups = {one["request_id"]: int.from_bytes(one["tokens"][:4], "little") for one in body["prompts"]}
        begun = []
        for work in body["work"]:
            group = groups[work["request_id"]]
            prior = len(work["prior"]) // 4
            sim = Sim(work["lease"], group, self.fleet.length_of(group, work["key"] & 0xFFFF), prior)
            sim.stay = 1
            self.sims[work["lease"]] = (work, sim, prior)
            begun.append(sim)
        self.engine.give(begun)

    def cancel(self, lease: int) -> None:
        if lease in self.sims:
            self.engine.recall(self.sims[lease][1], lambda: self.over(lease, "released"))

    def over(self, lease: int, kind: str) -> None:
        self.ends.append((self.sims[lease][0]["row"], lease, kind))
        self.news.set()

    async def report(self) -> None:
        due = time.monotonic() + REPORT_S
        while self.socket is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due - time.monotonic(), 0.0)):
                    await self.news.wait()
            self.news.clear()
            now = time.monotonic()
            everything = now >= due
            if everything:
                self.rate = (self.engine.made - self.made) / (now - self.made_at)
                self.made, self.made_at, due = self.engine.made, now, now + REPORT_S
            if everything or self.ends:
                await self.socket.send_bytes(encode(self.progress(everything)))
            await asyncio.sleep(FLUSH_GAP_S)

    def progress(self, everything: bool) -> GenerationProgress:
        self.seq += 1
        ends, self.ends = self.ends, []
        leases = self.sims if everything else [lease for _, lease, _ in ends]
        new = []
        for lease in leases:
            work, sim, sent = self.sims[lease]
            if (made := self.engine.tokens_of(sim)) > sent:
                new.append((work["row"], lease, sent, made - sent))
                self.sims[lease] = (work, sim, made)
        new.sort()
        rows, held, starts, counts = (list(column) for column in zip(*new, strict=True)) if new else ([],) * 4
        tokens = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)] or [[]]
        )
        for _, lease, _ in ends:
            del self.sims[lease]
        return GenerationProgress(
            self.seq,
            np.array(rows, np.uint32),
            np.array(held, np.uint64),
            np.array(starts, np.uint32),
            np.array(counts, np.uint32),
            np.full(len(rows), self.version, np.int32),
            tokens.astype(np.int32),
            np.zeros(len(tokens), np.float32),
            [End(row, lease, kind, "", ()) for row, lease, kind in ends],  # type: ignore[arg-type]
            running=min(len(self.sims), SLOTS),
            waiting=max(len(self.sims) - SLOTS, 0),
            rate_tokens_s=self.rate,
        )


class Fleet:
    """`killed_s`: when the last agent is killed in each step; `back_s` later it dials again as a new process."""

    def __init__(self, case: Case, folder: Path, *, killed_s: float = 0.0, back_s: float = 0.0) -> None:
        self.case, self.folder = case, folder
        self.killed_s, self.back_s = killed_s, back_s
        self.agents = {f"i{at}": Agent(self, f"i{at}", slow) for at, slow in enumerate(case.slow)}
        self.version = 0
        self.began = 0.0
        self.lengths: list[int] = []
        self.left: set[int] = set()
        self.done = asyncio.Event()
        self.waits: list[float] = []
        """How long samples waited somewhere beside a free slot, each time that they did."""

    def length_of(self, group: int, index: int) -> int:
        return self.lengths[group % 10_000 * self.case.samples + index]

    async def loads(self, name: str, version: int) -> bool:
        """Wait until the agent has loaded it. False where it was killed meanwhile."""
        agent = self.agents[name]
        incarnation = agent.incarnation
        load_s = self.case.loads_s[int(name[1:])]
        if version:
            await asyncio.sleep(max(self.began + load_s - time.monotonic(), 0.0))
        return agent.incarnation == incarnation

    async def run(self, port: int, steps: int) -> list[float]:
        """The seconds of each step."""
        took = []
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Authorization": "Bearer bench"}
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            url = f"http://127.0.0.1:{port}/v1/trainer"
            async with session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, compress=0) as trainer:
                await trainer.send_bytes(encode(Attach(protocol=PROTOCOL, term=1)))
                await self.publish(trainer)
                tasks = [asyncio.create_task(one.run(session, port)) for one in self.agents.values()]
                tasks += [asyncio.create_task(self.hear(trainer)), asyncio.create_task(self.watch())]
                await asyncio.sleep(0.5)
                for number in range(steps):
                    took.append(await self.step(trainer, number, session, port))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return took

    async def publish(self, trainer: aiohttp.ClientWebSocketResponse) -> None:
        path = self.folder / f"v{self.version}"
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(bytes([self.version % 256]) * 100)
        checksum = list_model_folder(path, version=self.version).checksum
        await trainer.send_bytes(encode(Publish(version=self.version, checksum=checksum, path=str(path))))

    async def step(
        self, trainer: aiohttp.ClientWebSocketResponse, number: int, session: aiohttp.ClientSession, port: int
    ) -> float:
        case = self.case
        self.version += 1
        self.lengths = case.drawn(number)
        self.began = time.monotonic()
        await self.publish(trainer)
        first = self.version * 10_000
        prompts = [np.zeros(case.prompt, np.int32) for _ in range(case.groups)]
        for at, prompt in enumerate(prompts):
            prompt[0] = first + at
        self.left = set(range(first, first + case.groups))
        self.done.clear()
        groups = [Group(first + at, prompt, {}) for at, prompt in enumerate(prompts)]
        request = Request(
            purpose="train",
            groups=pack_groups(groups),
            n=case.samples,
            sampling={"max_new_tokens": case.limit, "temperature": 1.0},
            seed=1,
            min_version=self.version,
        )
        await trainer.send_bytes(encode(request))
        killer = asyncio.create_task(self.kill(session, port)) if self.killed_s else None
        async with asyncio.timeout(STEP_WITHIN_S):
            await self.done.wait()
        took_s = time.monotonic() - self.began
        if killer is not None:
            await killer
        return took_s

    async def kill(self, session: aiohttp.ClientSession, port: int) -> None:
        agent = list(self.agents.values())[-1]
        await asyncio.sleep(self.killed_s)
        if agent.socket is not None:
            connection = agent.socket._response.connection
            assert connection is not None
            assert connection.transport is not None
            agent.socket = None
            connection.transport.abort()
        agent.begin_anew()
        agent.version = -1
        await asyncio.sleep(self.back_s)
        self.back = asyncio.create_task(agent.run(session, port))

    async def hear(self, trainer: aiohttp.ClientWebSocketResponse) -> None:
        async for message in trainer:
            kind, body = msgpack.unpackb(message.data)
            if kind != "done":
                continue
            for group in unpack_groups(body["groups"]):
                lengths = [len(sample.token_ids) for sample in group.samples]
                expected = [self.length_of(group.id, index) for index in range(self.case.samples)]
                if lengths != expected or group.id not in self.left:
                    raise SystemExit(
                        f"group {group.id} came with {lengths} tokens, and is to have {expected}"
                    )
                for sample in group.samples:
                    if not (sample.token_ids == np.arange(len(sample.token_ids))).all():
                        raise SystemExit(f"group {group.id}: tokens are lost, or there twice")
                self.left.discard(group.id)
                frame = GroupsStored(purpose="train", ids=[group.id])
                await trainer.send_bytes(encode(frame))
            if not self.left:
                self.done.set()

    async def watch(self) -> None:
        """Note how long a sample waits in an engine's queue while another engine has a free slot."""
        since: float | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            full = [one for one in self.agents.values() if len(one.engine.running) >= SLOTS]
            waits = any(one.engine.waiting for one in full) and any(
                one.has_free_slot for one in self.agents.values()
            )
            if waits and since is None:
                since = time.monotonic()
            elif not waits and since is not None:
                self.waits.append(time.monotonic() - since)
                since = None


async def alone_s(case: Case, step: int) -> float:
    """Seconds of the same engines in real time, each with the part that is best for it when it has loaded."""
    parts, _ = best_parts(case, step)
    lengths = case.drawn(step)
    left: set[int] = set()
    done = asyncio.Event()

    def ended(sim: Sim) -> None:
        left.discard(sim.key)
        if not left:
            done.set()

    clock: Any = RealClock()
    began = time.monotonic()
    first = 0
    for at, count in parts.items():
        engine = Engine(clock, case.slow[at], case.prompt, ended)
        some = [
            Sim(group * case.samples + index, group, lengths[group * case.samples + index], stay=1)
            for group in range(first, first + count)
            for index in range(case.samples)
        ]
        left |= {sim.key for sim in some}
        first += count
        clock.after(case.loads_s[at], lambda engine=engine, some=some: engine.give(some))
    async with asyncio.timeout(STEP_WITHIN_S):
        await done.wait()
    return time.monotonic() - began
