"""An agent with its engine, as an instance runs it, for `bench/turns.py --gpu`.

It says where its engine listens when it serves, and at each line on stdin of every request that has ended since the
last one: (its session, tokens of its prompt, how many of them the engine had cached). It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from gyre.rollouts.protocol.endpoint import FixedEndpoint

sys.path.insert(0, str(Path(__file__).resolve().parent))

from session_case import session_of

from gyre.engines.replies import StreamReader
from gyre.logs.output import redirect_output
from gyre.rollouts.agent.agent import Agent, AgentSettings, JobWishes
from gyre.rollouts.agent.join import EngineCommands
from gyre.weights.owned_dirs import default_root

READY_WITHIN_S = 400.0
"""A first start on a fresh machine compiles kernels for two to three minutes."""

cached: list[tuple[int, int, int]] = []


def watch() -> None:
    """Note what the engine says of each request that ends, and the product does not need."""
    init, chunk = StreamReader.__init__, StreamReader._chunk

    def started(self: Any, request: Any, vocabulary: int | None = None) -> None:
        init(self, request, vocabulary)
        self.prompt_is = session_of(request.input_ids), len(request.input_ids)

    def read(self: Any, body: dict[str, Any]) -> Any:
        found = chunk(self, body)
        if self.finished:
            cached.append((*self.prompt_is, int(body["meta_info"].get("cached_tokens") or 0)))
        return found

    StreamReader.__init__ = started  # type: ignore[method-assign,assignment]
    StreamReader._chunk = read  # type: ignore[method-assign]


async def run(options: dict[str, Any], out: Any) -> None:
    wishes = JobWishes()
    commands = EngineCommands(
        options["engine"],
        max_running=options["max_running"],
        kv_tokens=options["kv_tokens"],
        wishes=wishes,
        python=options["python"] or None,
        extra=options["extra"],
    )
    settings = AgentSettings(
        name="rollout-0",
        max_running=options["max_running"],
        kv_tokens=options["kv_tokens"],
        cache=default_root(),
        engine=options["engine"],
        ready_within_s=READY_WITHIN_S,
        starts=None,
    )
    agent = Agent(settings, FixedEndpoint(options["url"], "bench"), commands, wishes=wishes)
    work = asyncio.create_task(agent.run())

    def say(told: dict[str, Any]) -> None:
        print(json.dumps(told), file=out, flush=True)

    while agent._host.client is None or agent._host.engine is None:
        if work.done():
            work.result()
        await asyncio.sleep(0.05)
    say({"url": agent._host.engine.url, "key": agent._host.engine.api_key or ""})
    while await asyncio.to_thread(sys.stdin.readline):
        say({"cached": cached})
        cached.clear()
    agent.drain("the end", 5.0)
    await asyncio.wait([work], timeout=15.0)


def main() -> None:
    options = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")  # stdout becomes the log, of the engine too
    redirect_output(Path(options["log"]))
    watch()
    asyncio.run(run(options, out))


if __name__ == "__main__":
    main()
