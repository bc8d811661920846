"""An agent with an engine, for a test that kills it. Prints the engine's output when the engine is ready."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gyre.engines.process import EngineCommand, EngineProcess

STAND_IN = Path(__file__).with_name("stand_in.py")


async def main() -> None:
    command = (sys.executable, str(STAND_IN), "--port", "{port}", "--stubborn", "--children")
    async with EngineProcess(EngineCommand(command), stop_within_s=0.2) as engine:
        print(f"pid {engine.pid}\n{engine.tail}ready", flush=True)
        await asyncio.sleep(600)


asyncio.run(main())
