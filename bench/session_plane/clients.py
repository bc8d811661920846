"""The load of `bench/turns.py`: simulated engines, a trainer that asks for groups, clients that run sessions.

The engines are those of `bench/rollout_plane/load.py`, over real WebSockets. Each session's client asks for a turn with
token ids, waits as long as its tool takes, and asks for the next; a worker claims sessions as others end. Of each turn
are known: when it was asked for, when an engine had it, when the engine reported its end, when the answer was there.
All of it is in this process, so that there is one clock.

Without `agents` the far end is the bare server, which says when it had a request and when its time was over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "rollout_plane"), str(HERE)]

import load as rollout_load  # noqa: E402 - bench/rollout_plane/load.py, by the path above
from session_case import Case  # noqa: E402

from gyre.rollouts.protocol.progress import End  # noqa: E402

rollout_load.CHECK_EVERY = 1
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode
HEADERS = {"Authorization": "Bearer bench"}
CLAIMED_AT_ONCE = 64
BEAT_S = 4.0


class Turns:
    """When what of each turn happened, by (session, tokens of its prompt), monotonic."""

    def __init__(self) -> None:
        self.asked: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[int, int], float] = {}
        self.ended: dict[tuple[int, int], float] = {}
        self.answered: dict[tuple[int, int], float] = {}
        self.engines: dict[tuple[int, int], str] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        """Which turn of its session it is."""

    def figures(self, since: float, until: float) -> dict[str, Any]:
        """Of the turns that were asked for in this time and have been answered."""
        kept = [key for key in self.answered if since <= self.asked[key] < until]
        way_in = np.array([self.arrived[key] - self.asked[key] for key in kept])
        way_out = np.array([self.answered[key] - self.ended[key] for key in kept])
        found: dict[str, Any] = {"n": len(kept), "turns_s": len(kept) / (until - since)}
        for name, values in (("in", way_in), ("out", way_out), ("added", way_in + way_out)):
            for label, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                found[f"{name}_{label}_ms"] = float(np.quantile(values, q) * 1e3) if kept else 0.0
        return found

    def stayed(self) -> float:
        """Share of the turns with a parent that went to their parent's engine."""
        by_session: dict[int, dict[int, str]] = {}
        for key, engine in self.engines.items():
            by_session.setdefault(key[0], {})[self.numbers[key]] = engine
        pairs = [
            (one[number - 1], engine)
            for one in by_session.values()
            for number, engine in one.items()
            if number - 1 in one
        ]
        return sum(before == after for before, after in pairs) / len(pairs) if pairs else 0.0


class Engine(rollout_load.Agent):
    """An engine that says when it had a turn, and when it reported its end."""

    def __init__(self, load: Any, name: str) -> None:
        super().__init__(load, name)
        self._turn_of: dict[int, tuple[int, int]] = {}

    def take(self, body: dict[str, Any]) -> None:
        now, turns = time.monotonic(), self.load.turns
        prompts = {prompt["request_id"]: prompt["tokens"] for prompt in body["prompts"]}
        for work in body["work"]:
            tokens = prompts[work["request_id"]]
            key = int.from_bytes(tokens[:4], "little"), len(tokens) // 4
            turns.arrived.setdefault(key, now)
            turns.engines[key] = self.name
            self._turn_of[work["lease"]] = key
        super().take(body)

    async def emit(self, which: Any, made: Any, ends: list[End], gone: Any = None) -> None:
        now = time.monotonic()
        for end in ends:
            self.load.turns.ended[self._turn_of.pop(end.lease)] = now
        await super().emit(which, made, ends, gone)


class Trainer(rollout_load.Trainer):
    def check(self, group: Any) -> None:
        """A row is a session's whole path: what was drawn is what the engine's function gives, turn by turn."""
        self.checked += 1
        low, high = self.load.options["tokens"]
        for sample in group.samples:
            # sessions begin with numbers of their own, and so their rows have no prompt in common
            base = rollout_load.base_of(int(sample.token_ids[0]), 0)
            position = np.arange(low + base % (high - low))
            turn = rollout_load.tokens_of(np.full(len(position), base, np.int64), position)
            drawn = sample.token_ids[sample.mask]
            self.wrong += not np.array_equal(drawn, np.tile(turn, self.load.case.turns))


class Load:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.case = Case(**options["case"])
        self.turns = Turns()
        self.running: dict[str, asyncio.Task[None]] = {}
        self.engines: list[Engine] = []
        self.trainer = Trainer(self)  # type: ignore[arg-type]
        # what the engines of bench/rollout_plane note of themselves
        self.asked_at: dict[int, float] = {}
        self.lost: dict[int, None] | None = None
        self.freed_s: list[float] = []
        self.asked_s: list[float] = []
        self.late_s: list[float] = []
        self.tokens = self.reports = self.sessions = 0
        self.disturbed = False
        self._next = 0
        self._ending: set[str] = set()
        """Sessions whose ends are on their way, or there."""
        self._ended = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        options = self.options
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=HEADERS, connector=connector, timeout=timeout) as session:
            self.http = session
            tasks = []
            if options["agents"]:
                tasks = [asyncio.create_task(self._trainer(session))]
                await self.trainer.attached.wait()
                for number in range(options["agents"]):
                    self.engines.append(Engine(self, f"engine-{number}"))
                    tasks.append(asyncio.create_task(self.engines[-1].run(session)))
                for task in tasks:
                    task.add_done_callback(_ended)
                await asyncio.sleep(1.0)
                self.trainer.ask(options["open"] // options["n"] * 3 // 2)
                tasks += [asyncio.create_task(self._claim()), asyncio.create_task(self._beat())]
            else:
                tasks = [asyncio.create_task(self._begin())]
            gc.collect()
            gc.freeze()
            gc.disable()
            await asyncio.sleep(options["warm_s"])
            began, usage = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
            say({"at": began})
            self.late_s.clear()
            await asyncio.sleep(options["seconds"])
            until, now = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
            say({"at": until})
            await asyncio.sleep(options["drawn_s"] + 1.0)
            for task in tasks:
                if task.done() and (error := task.exception()):
                    raise error
            for task in (*tasks, *self.running.values()):
                task.cancel()
            await asyncio.gather(*tasks, *self.running.values(), return_exceptions=True)
        cpu = now.ru_utime + now.ru_stime - usage.ru_utime - usage.ru_stime
        return {
            **self.turns.figures(began, until),
            "sessions_ended": self.sessions,
            "stayed": self.turns.stayed() if options["agents"] else None,
            "groups": self.trainer.groups,
            "checked": self.trainer.checked,
            "wrong": self.trainer.wrong,
            "load_cpu_share": cpu / (until - began),
            "load_late": rollout_load.quantiles(self.late_s),
        }

    async def _trainer(self, session: aiohttp.ClientSession) -> None:
        await self.trainer.run(session)
        raise SystemExit("the trainer's connection ended")

    # -- sessions -----------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Against the bare server: as many sessions as are to be open, always."""
        while True:
            while len(self.running) < self.options["open"]:
                self._start(None)
                if len(self.running) % 50 == 0:
                    await asyncio.sleep(0.05)
            self._ended.clear()
            await self._ended.wait()

    async def _claim(self) -> None:
        while True:
            room = self.options["open"] - len(self.running)
            if not room:
                self._ended.clear()
                await self._ended.wait()
                continue
            told = {"worker": "bench", "most": min(room, CLAIMED_AT_ONCE), "wait_s": 5.0}
            for one in (await self._post("/v1/sessions/claim", told))["sessions"]:
                self._start(one)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            told = {"worker": "bench", "sessions": list(self.running)}
            lost = (await self._post("/v1/sessions/beat", told))["lost"]
            if gone := [one for one in lost if one in self.running and one not in self._ending]:
                raise SystemExit(f"sessions were lost: {gone[:3]}")

    def _start(self, given: dict[str, Any] | None) -> None:
        number, self._next = self._next, self._next + 1
        name = given["id"] if given else str(number)
        self.running[name] = asyncio.create_task(self._run(name, given["path"] if given else "", number))
        self.running[name].add_done_callback(lambda task: self._over(name, task))

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        self.running.pop(name, None)
        self.sessions += 1
        self._ended.set()
        _ended(task)

    async def _run(self, name: str, path: str, number: int) -> None:
        case = self.case
        await asyncio.sleep(case.tool_of(number, 99))
        ids = [number, *case.tokens_of(number, 0)[1:]]
        for turn in range(case.turns):
            if turn:
                await asyncio.sleep(case.tool_of(number, turn))
                ids += case.tokens_of(number, turn)
            key = number, len(ids)
            self.turns.numbers[key] = turn
            params = {"max_tokens": 4 * case.drawn_tokens, "logprobs": 1}
            body = encode({"token_ids": ids, "sampling_params": params})
            self.turns.asked[key] = time.monotonic()
            told = await self._post(f"{path}/inference/v1/generate", body)
            self.turns.answered[key] = time.monotonic()
            if not path:
                self.turns.arrived[key], self.turns.ended[key] = told["arrived"], told["ended"]
            ids += told["choices"][0]["token_ids"]
        if path:
            self._ending.add(name)
            told = {"outcome": "scored", "reward": 1.0}
            await self._post(f"/v1/sessions/{path.removeprefix('/s/')}/end", told)

    async def _post(self, path: str, told: Any) -> Any:
        body = told if isinstance(told, bytes) else encode(told)
        url = f"http://127.0.0.1:{self.options['port']}{path}"
        async with self.http.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
            read = await reply.read()
            if reply.status != 200:
                raise SystemExit(f"{path}: {reply.status} {read[:500]!r}")
            return decode(read)


def _ended(task: asyncio.Task[None]) -> None:
    """A part that always runs has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["core"]})
    say(asyncio.run(Load(options).run()))


if __name__ == "__main__":
    main()
