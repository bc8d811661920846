"""Processes of a bench: the rollout manager with its ledger, and an agent with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_plane.endpoint import TOKEN, endpoint_of
from gpu_plane.engine_command import engine_command
from gpu_plane.follow import Log, Row, now


async def manager_main(options: Row) -> None:
    """A rollout manager with its ledger; says where it listens in the endpoint's file."""
    from gyre.rollouts.manager.rollout_manager import RolloutManager
    from gyre.rollouts.manager.sessions import AgentSession
    from gyre.rollouts.manager.settings import ManagerSettings
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
        book = manager.groups
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
    log.write("Stopping", missing=manager.groups.missing_tokens())
    await manager.stop()
    store.close()


async def agent_main(options: Row, command: Callable[..., Any] = engine_command) -> None:
    """One agent and its engine, which `command` starts."""
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
        return command(options, folder, version)

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
