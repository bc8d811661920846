"""`bench/turns.py --gpu`: the same sessions through Gyre and straight to its engine, in turn."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rollout_plane.child import child
from session_plane.session_case import Case, name_of, session_of

HERE = Path(__file__).resolve().parent

Row = dict[str, Any]
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode

TRITON = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none")
"""Kernels that need no compiler on the machine."""
SECRET = "bench"
CLAIMED_AT_ONCE = 64
BEAT_S = 4.0
WARM = 8
"""Sessions of two turns before anything is counted: kernels are compiled, and the first engine has started."""


@dataclass
class Ran:
    """A round of sessions. By (session, tokens of the prompt): what the engine could have had cached of it."""

    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    turn_s: list[float] = field(default_factory=list)
    could: dict[tuple[int, int], int] = field(default_factory=dict)
    cached: dict[tuple[int, int], int] = field(default_factory=dict)

    def row(self) -> Row:
        could = sum(self.could[key] for key in self.cached if key in self.could)
        found = sum(min(count, self.could[key]) for key, count in self.cached.items() if key in self.could)
        turns = np.array(self.turn_s)
        return {
            "tokens": self.tokens,
            "seconds": self.ended - self.began,
            "tokens_s": self.tokens / (self.ended - self.began),
            "turn_p50_s": float(np.quantile(turns, 0.5)),
            "turn_p99_s": float(np.quantile(turns, 0.99)),
            "reused": found / could if could else 0.0,
            "known": len(self.cached) / max(len(self.could), 1),
        }


Turn = Callable[[list[int]], Awaitable[list[int]]]
"""Prompt in, drawn tokens out."""


async def talk(case: Case, first: int, number: int, ran: Ran, turn: Turn) -> None:
    """A session: the same prompts and tools whoever answers, but for what is drawn."""
    ids = name_of(number, case.vocabulary)
    session = session_of(ids)
    for at in range(case.turns):
        if at:
            ran.could[session, len(ids) + case.added_tokens] = len(ids) - 1  # no pass has read its last token
            await asyncio.sleep(case.tool_of(first, at))
        ids += case.tokens_of(first, at)
        began = time.monotonic()
        drawn = await turn(ids)
        ran.turn_s.append(time.monotonic() - began)
        ran.tokens += len(drawn)
        ids += drawn


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path, model: Path) -> None:
        self.given, self._folder, self._model = given, folder, model
        self._is_small = given.engine == "embedded"
        vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        drawn = min(given.drawn, 32) if self._is_small else given.drawn
        self.case = Case(vocabulary=vocabulary, drawn_tokens=drawn)
        self._next_group = 0
        self._next_number = 0
        self._errors: list[str] = []

    async def run(self) -> Row:
        given = self.given
        sampling = {"max_new_tokens": self.case.drawn_tokens, "temperature": 1.0, "ignore_eos": True}
        serving = {"what": "manager", "core": None, "folder": str(self._folder), "turns": self.case.turns}
        rounds: dict[str, list[Row]] = {"bare": [], "gyre": []}
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(child(HERE / "served.py", serving))
            self._url = f"http://127.0.0.1:{manager.hear()['port']}"
            client = self._trainer()
            stack.callback(client.close)
            self._ask = lambda groups: client.request(
                "train", groups, n=8, sampling=sampling, seed=1, min_version=0
            )
            agent = stack.enter_context(child(HERE / "engine.py", self._agent()))
            began = time.monotonic()
            where = await asyncio.to_thread(agent.hear)
            ready_s = time.monotonic() - began
            self._engine = where["url"], where["key"]
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            timeout = aiohttp.ClientTimeout(total=600.0)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.http:
                ways = {"bare": self._bare, "gyre": self._gyre}
                for way in ways.values():
                    await way(WARM, replace(self.case, turns=2))
                until = time.monotonic() + given.within
                longest = 0.0
                for at in range(given.rounds):
                    if at and time.monotonic() + 2 * longest > until:
                        break
                    for name, way in ways.items():
                        await self._flush()
                        agent.ask()
                        ran = await way(given.sessions, self.case)
                        told = await asyncio.to_thread(agent.ask)
                        if name == "gyre":
                            ran.cached = {(first, count): had for first, count, had in told["cached"]}
                        rounds[name].append(ran.row())
                        longest = max(longest, ran.ended - ran.began)
                        print(f"{name}: {json.dumps(rounds[name][-1])}", file=sys.stderr, flush=True)
        if self._errors:
            raise SystemExit("; ".join(self._errors))
        return {
            "model": str(given.gpu),
            "engine": given.engine,
            "sessions": given.sessions,
            "case": msgspec.to_builtins(self.case),
            "engine_ready_s": round(ready_s, 1),
            **rounds,
            "share": statistics.median(
                one["tokens_s"] / other["tokens_s"]
                for one, other in zip(rounds["gyre"], rounds["bare"], strict=True)
            ),
            "reused": {
                name: statistics.median(row["reused"] for row in rows) for name, rows in rounds.items()
            },
        }

    def _agent(self) -> Row:
        small = self._is_small
        return {
            "url": self._url,
            "engine": self.given.engine,
            "python": self.given.python,
            "max_running": 8 if small else None,
            "kv_tokens": 1 << 16 if small else None,
            "extra": [] if small else [*TRITON, *self.given.engine_args],
            "log": str(self._folder / "engine.log"),
        }

    def _trainer(self) -> Any:
        from gyre.rollouts.protocol.endpoint import FixedEndpoint
        from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
        from gyre.weights.version.model_folder import list_model_folder

        errors = self._errors

        class Trainer(HearsOfRollouts):
            def groups_delivered(self, purpose: str, groups: Any) -> None:
                client.taken(purpose, [group.id for group in groups])

            def failed(self, error: Exception) -> None:
                errors.append(repr(error))

        client = RolloutClient(FixedEndpoint(self._url, SECRET), Trainer(), term=1)
        client.publish(0, list_model_folder(self._model, version=0).checksum, self._model)
        return client

    async def _flush(self) -> None:
        """Nothing is cached that an earlier round had."""
        url, key = self._engine
        headers = {"Authorization": f"Bearer {key}"}
        for _ in range(50):
            async with self.http.post(f"{url}/flush_cache", headers=headers) as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.1)
        raise SystemExit("the engine does not forget what it has cached")

    # -- the two ways -------------------------------------------------------------------------------

    async def _bare(self, sessions: int, case: Case) -> Ran:
        ran, (url, key) = Ran(), self._engine
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        params = {"max_new_tokens": case.drawn_tokens, "temperature": 1.0, "ignore_eos": True}

        async def turn(ids: list[int]) -> list[int]:
            asked = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": False}
            told = await self._post(f"{url}/generate", asked, headers)
            ran.cached[session_of(ids), len(ids)] = int(told["meta_info"].get("cached_tokens") or 0)
            found: list[int] = told["output_ids"]
            return found

        numbers = [self._number() for _ in range(sessions)]
        ran.began = time.monotonic()
        await asyncio.gather(*(talk(case, at, one, ran, turn) for at, one in enumerate(numbers)))
        ran.ended = time.monotonic()
        return ran

    async def _gyre(self, sessions: int, case: Case) -> Ran:
        from gyre.rollouts.samples import Group

        ran = Ran()
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        params = {"max_tokens": case.drawn_tokens, "logprobs": 1}
        prompt = np.array([1], np.int32)  # each session begins with one of its own
        some = range(self._next_group, self._next_group + -(-sessions // 8))
        self._next_group = some.stop
        self._ask([Group(one, prompt, {}) for one in some])
        given: list[Row] = []
        while len(given) < sessions:
            told = {"worker": "bench", "most": CLAIMED_AT_ONCE, "wait_s": 20.0}
            given += (await self._post(f"{self._url}/v1/sessions/claim", told, headers))["sessions"]
        running = {one["id"] for one in given}

        async def one(at: int, session: Row) -> None:
            async def turn(ids: list[int]) -> list[int]:
                told = await self._post(
                    f"{self._url}{session['path']}/inference/v1/generate",
                    {"token_ids": ids, "sampling_params": params},
                    headers,
                )
                found: list[int] = told["choices"][0]["token_ids"]
                return found

            await talk(case, at, self._number(), ran, turn)
            ran.ended = time.monotonic()
            name = session["path"].removeprefix("/s/")
            told = {"outcome": "scored", "reward": 1.0}
            await self._post(f"{self._url}/v1/sessions/{name}/end", told, headers)
            running.discard(session["id"])

        async def beat() -> None:
            while True:
                told = {"worker": "bench", "sessions": sorted(running)}
                await self._post(f"{self._url}/v1/sessions/beat", told, headers)
                await asyncio.sleep(BEAT_S)

        beating = asyncio.create_task(beat())
        ran.began = time.monotonic()
        try:
            await asyncio.gather(*(one(at, session) for at, session in enumerate(given)))
        finally:
            beating.cancel()
        return ran

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    async def _post(self, url: str, told: Any, headers: Row) -> Any:
        async with self.http.post(url, data=encode(told), headers=headers) as reply:
            read = await reply.read()
            if reply.status != 200:
                raise SystemExit(f"{url}: {reply.status} {read[:500]!r}; {self._errors}")
            return decode(read)


def compared(given: argparse.Namespace) -> Row:
    if Path(given.gpu).is_dir():
        model = Path(given.gpu)
    else:
        from job_plane.case import Case as Model

        model = Model(shape=given.gpu, dry=given.engine == "embedded").model()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=given.folder) as folder:
        bench = Bench(given, Path(folder), model)
        with _log_told(Path(folder) / "engine.log"):
            return asyncio.run(bench.run())


@contextlib.contextmanager
def _log_told(log: Path) -> Iterator[None]:
    """Where it fails, the end of the engine's log says why."""
    try:
        yield
    except BaseException:
        if log.exists():
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
        raise


def table(found: Row) -> str:
    lines = [
        f"{found['sessions']} sessions of {found['case']['turns']} turns, {found['engine']}, {found['model']}",
        "",
        "| way | tokens/s | turn p50 s | p99 | reused |",
        "| --- |" + " --- |" * 4,
    ]
    for name in ("bare", "gyre"):
        rows = found[name]
        cells = [
            statistics.median(row[key] for row in rows) for key in ("tokens_s", "turn_p50_s", "turn_p99_s")
        ]
        shown = [f"{cells[0]:.0f}", *(f"{one:.2f}" for one in cells[1:])]
        lines.append(f"| {name} | {' | '.join(shown)} | {found['reused'][name]:.1%} |")
    lines += [
        "",
        f"gyre by bare: {found['share']:.3f}, of {len(found['gyre'])} rounds, cores {os.cpu_count()}",
    ]
    return "\n".join(lines)
