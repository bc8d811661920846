"""The load of `bench/rollouts.py`: simulated agents and a simulated trainer, over real WebSockets, on one core.

What is simulated: the engines. Each sample's tokens and log-probs are a function of its prompt, its index and the
position, and come at a fixed rate, as decoding does. The agents report as `gyre.rollouts.agent.agent` does: everything
every `interval_s`, and a sample's end with its last tokens at once. The trainer asks for groups, checks some of what
it gets token by token, tells that it has taken them and asks for as many again.

Started with its options as one JSON argument; answers one JSON line on stdout to each line on stdin: `stats`,
`reset`, `kill NAME`, `hang NAME`, `join NAME`, `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plane import lines, quantiles, say

from gyre.rollouts.agent.agent import FLUSH_GAP_S
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, encode
from gyre.rollouts.protocol.frames import PROTOCOL, Attach, GroupsStored, Hello, Loaded, Publish, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups

VOCABULARY = 151_936
"""Qwen's: its ids do not fit into two bytes."""

PROMPT_TOKENS = 256
CHECK_EVERY = 50


def tokens_of(base: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int32]:
    return ((base + position * 31) % VOCABULARY).astype(np.int32)


def logprobs_of(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    return (tokens & 1023).astype(np.float32) * np.float32(-1 / 256)


def base_of(first_prompt_token: int, index: int) -> int:
    return first_prompt_token * 7919 + index * 104_729


class Wire:
    """Bytes with their WebSocket headers."""

    out = 0
    back = 0
    trainer_out = 0
    trainer_back = 0

    @staticmethod
    def size(payload: int, *, masked: bool) -> int:
        header = 2 if payload < 126 else 4 if payload < 1 << 16 else 10
        return payload + header + (4 if masked else 0)


class Agent:
    def __init__(self, load: Load, name: str) -> None:
        options = load.options
        self.load = load
        self.name = name
        self.size = options["slots"] * 2 + 64
        self.rate = options["rate"]
        self.interval_s = options["interval_s"]
        self.rows = np.zeros(self.size, np.uint32)
        self.leases = np.zeros(self.size, np.uint64)
        self.keys = np.zeros(self.size, np.int64)
        self.bases = np.zeros(self.size, np.int64)
        self.limits = np.zeros(self.size, np.int64)
        self.sent = np.zeros(self.size, np.int64)
        self.began = np.zeros(self.size, np.float64)
        self.count = 0
        self.seq = 0
        self.acked = 0
        self.hanging = False
        self.taken = 0
        self.loaded_at = 0.0
        self.first_work_at = 0.0
        self.freed: deque[float] = deque()
        self.wake = asyncio.Event()
        self.socket: aiohttp.ClientWebSocketResponse | None = None

    async def run(self, session: aiohttp.ClientSession) -> None:
        load = self.load
        url = f"http://127.0.0.1:{load.options['port']}/v1/agent"
        async with session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, compress=0) as socket:
            self.socket = socket
            await self.send(
                encode(
                    Hello(
                        protocol=PROTOCOL,
                        instance=self.name,
                        incarnation=f"{self.name}-1",
                        model="unset",
                        engine="simulated",
                        max_running=load.options["slots"],
                        kv_tokens=1 << 36,
                    )
                )
            )
            reporter: asyncio.Task[None] | None = None
            try:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    Wire.back += Wire.size(len(message.data), masked=False)
                    if load.options.get("echo"):
                        reporter = reporter or asyncio.create_task(self.report())
                        continue
                    kind, body = msgpack.unpackb(message.data)
                    if kind == "assign":
                        self.take(body)
                    elif kind == "ack":
                        self.acked = body["seq"]
                    elif kind == "cancel":
                        await self.cancel(body["rows"])
                    elif kind == "weights":
                        await self.serve(body)
                    elif kind == "welcome":
                        reporter = asyncio.create_task(self.report())
                        if body["weights"] is not None:
                            await self.serve(body["weights"])
                    elif kind == "reject":
                        print(self.name, body, file=sys.stderr)
                        break
            finally:
                if reporter is not None:
                    reporter.cancel()

    async def send(self, data: bytes) -> None:
        assert self.socket is not None
        Wire.out += Wire.size(len(data), masked=True)
        await self.socket.send_bytes(data)

    async def serve(self, weights: dict[str, Any]) -> None:
        self.loaded_at = time.monotonic()
        await self.send(
            encode(Loaded(version=weights["version"], checksum=weights["checksum"], fetch_s=0.0, load_s=0.0))
        )

    # -- work ---------------------------------------------------------------------------------------

    def take(self, body: dict[str, Any]) -> None:
        now = time.monotonic()
        self.first_work_at = self.first_work_at or now
        prompts = {prompt["request_id"]: prompt for prompt in body["prompts"]}
        low, high = self.load.options["tokens"]
        load = self.load
        for work in body["work"]:
            prompt = prompts[work["request_id"]]
            first = int.from_bytes(prompt["tokens"][:4], "little")
            base = base_of(first, work["key"] & 0xFFFF)
            prior = len(work["prior"]) // 4
            at = self.count
            self.count += 1
            self.rows[at] = work["row"]
            self.leases[at] = work["lease"]
            self.keys[at] = work["key"]
            self.bases[at] = base
            self.limits[at] = max(low + base % (high - low), prior + 1)
            self.sent[at] = prior
            # The first ones are found in the middle, so that what follows is steady from the beginning.
            self.taken += 1
            ahead = (
                base % 997 / 997 if self.taken <= load.options["in_flight"] // load.options["agents"] else 0.0
            )
            self.began[at] = now - max(prior, int(ahead * self.limits[at])) / self.rate
            if self.freed:
                load.freed_s.append(now - self.freed.popleft())
            asked_at = load.asked_at.pop(first, None) if load.asked_at else None
            if asked_at is not None:
                load.asked_s.append(now - asked_at)
            if load.lost is not None:
                load.lost.pop(work["key"], None)
                if not load.lost:
                    load.moved_at, load.lost = now, None
        self.wake.set()

    async def cancel(self, pairs: list[tuple[int, int]]) -> None:
        if self.hanging:
            return
        ends = []
        for row, lease in pairs:
            for at in np.flatnonzero(self.leases[: self.count] == lease).tolist():
                ends.append(End(row, lease, "released", "", ()))
                self.drop(np.array([at]))
        if ends:
            await self.emit(np.empty(0, np.int64), np.empty(0, np.int64), ends)

    def drop(self, gone: NDArray[np.int64]) -> None:
        keep = np.ones(self.count, np.bool_)
        keep[gone] = False
        left = int(keep.sum())
        for column in (self.rows, self.leases, self.keys, self.bases, self.limits, self.sent, self.began):
            column[:left] = column[: self.count][keep]
        self.count = left

    # -- reports ------------------------------------------------------------------------------------

    async def report(self) -> None:
        due = time.monotonic() + self.interval_s * (hash(self.name) % 997) / 997
        while True:
            now = time.monotonic()
            at = due
            if self.count:
                limits, began = self.limits[: self.count], self.began[: self.count]
                at = min(at, float((began + limits / self.rate).min()))
            if at > now + 0.0005:
                self.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(at - now):
                        await self.wake.wait()
                continue
            if self.hanging:
                await asyncio.sleep(3600)
            self.load.late_s.append(now - at)
            if now >= due:
                await self.emit_new(now, everything=True)
                due = max(due + self.interval_s, now)
            else:
                await self.emit_new(now, everything=self.load.options.get("whole_reports", False))
            await asyncio.sleep(FLUSH_GAP_S)

    async def emit_new(self, now: float, *, everything: bool) -> None:
        count = self.count
        made = np.minimum(((now - self.began[:count]) * self.rate).astype(np.int64) + 1, self.limits[:count])
        ended = made >= self.limits[:count]
        new = made > self.sent[:count]
        if not everything:
            new &= ended
        which = np.flatnonzero(new)
        which = which[np.argsort(self.rows[which])]
        gone = np.flatnonzero(ended)
        ends = [
            End(row, lease, "stop", "", ())
            for row, lease in zip(self.rows[gone].tolist(), self.leases[gone].tolist(), strict=True)
        ]
        await self.emit(which, made, ends, gone)

    async def emit(
        self,
        which: NDArray[np.int64],
        made: NDArray[np.int64],
        ends: list[End],
        gone: NDArray[np.int64] | None = None,
    ) -> None:
        """`which` go out up to `made`; `gone` are forgotten."""
        self.seq += 1
        starts = self.sent[which]
        counts = (made[which] if which.size else starts) - starts
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        position = np.arange(total) + np.repeat(starts - offsets, counts)
        tokens = tokens_of(np.repeat(self.bases[which], counts), position)
        frame = GenerationProgress(
            self.seq,
            self.rows[which],
            self.leases[which],
            starts.astype(np.uint32),
            counts.astype(np.uint32),
            np.zeros(len(which), np.int32),
            tokens,
            logprobs_of(tokens),
            ends,
            running=self.count,
            used_tokens=int(self.sent[: self.count].sum()),
            rate_tokens_s=self.rate * self.count,
        )
        self.sent[which] = made[which] if which.size else starts
        if gone is not None and gone.size:
            self.drop(gone)
        load = self.load
        load.tokens += total
        load.reports += 1
        now = time.monotonic()
        for _ in ends:
            if load.options["slots_limit"]:
                self.freed.append(now)
        await self.send(encode(frame))


class Trainer:
    """Keeps `open_groups` groups asked for."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.next_id = 0
        self.outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.attached = asyncio.Event()
        self.groups = 0
        self.checked = 0
        self.wrong = 0

    async def run(self, session: aiohttp.ClientSession) -> None:
        url = f"http://127.0.0.1:{self.load.options['port']}/v1/trainer"
        async with session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, compress=0) as socket:
            writer = asyncio.create_task(self.write(socket))
            self.put(encode(Attach(protocol=PROTOCOL, term=1)))
            weights = self.load.options["weights"]
            self.put(encode(Publish(version=0, checksum=weights["checksum"], path=weights["path"])))
            try:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    Wire.trainer_back += Wire.size(len(message.data), masked=False)
                    kind, body = msgpack.unpackb(message.data)
                    if kind == "attached":
                        self.attached.set()
                    elif kind == "done":
                        self.done(body)
                    elif kind == "reject":
                        print("trainer", body, file=sys.stderr)
                        break
            finally:
                writer.cancel()

    def put(self, data: bytes) -> None:
        Wire.trainer_out += Wire.size(len(data), masked=True)
        self.outbox.put_nowait(data)

    async def write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await socket.send_bytes(await self.outbox.get())

    def ask(self, count: int) -> None:
        load = self.load
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        prompt = np.zeros(PROMPT_TOKENS, np.int32)
        groups = []
        for number in ids:
            prompt[0] = number
            groups.append(Group(number, prompt.copy(), {"answer": "42"}))
        now = time.monotonic()
        if not load.options["slots_limit"]:
            load.asked_at.update(dict.fromkeys(ids, now))
        self.put(
            encode(
                Request(
                    purpose="train",
                    groups=pack_groups(groups),
                    n=load.options["n"],
                    sampling={"max_new_tokens": load.options["tokens"][1], "temperature": 1.0},
                    seed=1,
                    min_version=0,
                )
            )
        )

    def done(self, body: dict[str, Any]) -> None:
        _, rows = msgpack.unpackb(body["groups"], strict_map_key=False)
        ids = [row[0] for row in rows]
        for number in ids:
            self.groups += 1
            if self.groups % CHECK_EVERY == 0:
                self.check(next(g for g in unpack_groups(body["groups"]) if g.id == number))
        if not self.load.options.get("never_take"):
            self.put(encode(GroupsStored(purpose="train", ids=ids)))
        self.ask(len(ids))

    def check(self, group: Group) -> None:
        self.checked += 1
        low, high = self.load.options["tokens"]
        for index, sample in enumerate(group.samples):
            base = base_of(group.id, index)
            count = len(sample.token_ids)
            tokens = tokens_of(np.full(count, base, np.int64), np.arange(count))
            right = (
                count >= low
                and (count == low + base % (high - low) or self.load.disturbed)
                and bool((tokens == sample.token_ids).all())
                and bool((logprobs_of(tokens) == sample.logprobs).all())
            )
            self.wrong += not right


class Load:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.agents: dict[str, Agent] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.trainer = Trainer(self)
        self.lost: dict[int, None] | None = None
        self.moved_at = 0.0
        self.disturbed = False
        self.asked_at: dict[int, float] = {}
        self.reset()

    def reset(self) -> None:
        self.began = time.monotonic()
        self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.tokens = 0
        self.reports = 0
        self.freed_s: list[float] = []
        self.asked_s: list[float] = []
        self.late_s: list[float] = []
        Wire.out = Wire.back = Wire.trainer_out = Wire.trainer_back = 0

    async def run(self) -> None:
        options = self.options
        headers = {"Authorization": "Bearer bench"}
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
            self.session = session
            if not options.get("echo"):
                self.tasks["trainer"] = asyncio.create_task(self.trainer.run(session))
                await self.trainer.attached.wait()
            for number in range(options["agents"]):
                self.join(f"agent-{number:04d}")
                if number % 50 == 49:
                    await asyncio.sleep(0.05)
            if not options.get("echo"):
                waiting = options["open_groups"]
                while waiting:
                    some = min(waiting, 64)
                    self.trainer.ask(some)
                    waiting -= some
                    await asyncio.sleep(0.002)
            gc.collect()
            gc.freeze()
            gc.disable()
            say({})
            async for line in lines():
                if line == "stop":
                    break
                say(await self.answer(line))
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        say({})

    def join(self, name: str) -> None:
        self.agents[name] = Agent(self, name)
        self.tasks[name] = asyncio.create_task(self.agents[name].run(self.session))

    async def answer(self, line: str) -> dict[str, Any]:
        verb, _, name = line.partition(" ")
        if verb == "reset":
            self.reset()
            return {}
        if verb == "join":
            self.join(name)
            return {"at": time.monotonic()}
        if verb == "agent":
            agent = self.agents[name]
            return {"loaded_at": agent.loaded_at, "first_work_at": agent.first_work_at, "held": agent.count}
        if verb in ("kill", "hang"):
            agent = self.agents[name]
            self.disturbed = True
            held = agent.count
            self.lost = dict.fromkeys(agent.keys[:held].tolist()) if held else None
            agent.hanging = True
            if verb == "kill":
                assert agent.socket is not None
                connection = agent.socket._response.connection
                assert connection is not None
                assert connection.transport is not None
                connection.transport.abort()
            return {"at": time.monotonic(), "held": held}
        if verb == "moved":
            return {"at": self.moved_at, "left": len(self.lost or ())}
        now = resource.getrusage(resource.RUSAGE_SELF)
        seconds = time.monotonic() - self.began
        cpu = now.ru_utime + now.ru_stime - self.usage.ru_utime - self.usage.ru_stime
        dead = [name for name, task in self.tasks.items() if task.done()]
        return {
            "seconds": seconds,
            "cpu_share": cpu / seconds,
            "tokens_s": self.tokens / seconds,
            "tokens": self.tokens,
            "reports_s": self.reports / seconds,
            "running": sum(agent.count for agent in self.agents.values()),
            "freed_to_work": quantiles(self.freed_s),
            "asked_to_work": quantiles(self.asked_s),
            "late": quantiles(self.late_s),
            "agent_bytes_out": Wire.out,
            "agent_bytes_back": Wire.back,
            "trainer_bytes_out": Wire.trainer_out,
            "trainer_bytes_back": Wire.trainer_back,
            "groups": self.trainer.groups,
            "checked": self.trainer.checked,
            "wrong": self.trainer.wrong,
            "dead": len(dead),
        }


def main() -> None:
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["core"]})
    asyncio.run(Load(options).run())


if __name__ == "__main__":
    main()
