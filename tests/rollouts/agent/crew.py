"""Agents with a live manager, over a fake engine that says it is one (`engines/plane_engine.py`)."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from gyre.engines.process import EngineCommand
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.protocol.credentials import weights_key
from tests.rollouts.owners import Commands
from tests.rollouts.plane import SOON_S, TOKEN, Plane, cut, until

ENGINE = Path(__file__).parents[2] / "engines" / "plane_engine.py"


class Crew:
    """Agents of one plane, and what their engines are told."""

    def __init__(self, plane: Plane, tmp_path: Path) -> None:
        self.plane, self.tmp_path = plane, tmp_path
        self.agents: dict[str, Agent] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.away = False
        self.token = TOKEN

    def where(self) -> tuple[str, str] | None:
        return None if self.away else (self.plane.url, self.token)

    def trust(self) -> None:
        return None

    def weights_endpoint(self) -> tuple[str, str]:
        return self.plane.url, weights_key(TOKEN)

    def commands(self, name: str, delay: float) -> Commands:
        (self.tmp_path / name).mkdir(exist_ok=True)

        def made(folder: Path, version: str) -> EngineCommand:
            argv = [sys.executable, str(ENGINE), "--model-path", str(folder), "--weight-version", version]
            argv += ["--host", "{host}", "--port", "{port}", "--say", str(self.tmp_path / name)]
            return EngineCommand((*argv, "--delay", str(delay)))

        return Commands(made)

    def settings(self, name: str) -> AgentSettings:
        cache = self.tmp_path / "cache"
        cache.mkdir(exist_ok=True)
        return AgentSettings(
            name=name, max_running=8, kv_tokens=1 << 16, cache=cache, engine="fake", ready_within_s=SOON_S
        )

    def start(self, name: str, delay: float = 0.01, *, base: Path | None = None) -> Agent:
        settings = replace(self.settings(name), base=base)
        agent = Agent(settings, self, self.commands(name, delay))
        self.agents[name] = agent
        self.tasks[name] = asyncio.create_task(agent.run())
        return agent

    def tell(self, name: str, word: str) -> None:
        (self.tmp_path / name / word).write_text("")

    def hold(self, name: str, length: int) -> None:
        """No sample of this agent's, with its prompt, grows longer until `go_on`: what a test does to samples that run
        finds them running, however slow the test or fast the engine is."""
        partial = self.tmp_path / name / "hold.new"
        partial.parent.mkdir(exist_ok=True)
        partial.write_text(str(length))
        partial.rename(partial.with_name("hold"))

    def go_on(self, name: str) -> None:
        self.take_back(name, "hold")

    def take_back(self, name: str, word: str) -> None:
        (self.tmp_path / name / word).unlink()

    async def serving(self, *names: str, version: int = 0) -> None:
        def able() -> bool:
            told = {one["instance"]: one for one in self.plane.manager.status()["instances"]}
            return all(told.get(name, {}).get("version") == version for name in names)

        await until(able)

    async def generated(self, tokens: int) -> None:
        await until(lambda: self.plane.manager.groups.account.generated >= tokens)

    def cut(self, name: str) -> None:
        cut(self.plane.manager.links[name].connection)

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
