"""A local instance's engine between windows: it gives its memory back, and takes it again.

What is given back is the KV memory, which is most of an engine's; its weights stay, so that it has them when it wakes.
The embedded engine has nothing to give and says so. SGLang gives memory back where it was started with
`--enable-memory-saver`, and does nothing else.

Invariant *idle first*: memory is asked of an engine that has just flushed its cache, which it refuses while anything is
left of a request. SGLang's scheduler dies of an assertion where it is not idle, and it is not for some milliseconds
after it sent the last token.

This module must not know when windows are, or about samples.
"""

from __future__ import annotations

import asyncio
import time

from gyre.clock import Clock
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.rollouts.protocol.frames import Asleep, Awake

IDLE_WITHIN_S = 5.0
"""For an engine to be idle after its last request. Half of what the manager gives it to fall asleep."""

_AGAIN_S = 0.02


async def fall_asleep(client: EngineClient | None, clock: Clock = time) -> Asleep:
    """After its last request has ended. Says so in any case: the trainer waits for it."""
    began = clock.monotonic()
    if client is None:
        return Asleep(seconds=0.0, error="there is no engine")
    try:
        await _idle(client, began + IDLE_WITHIN_S, clock)
        await client.release_memory()
    except EngineError as error:
        return Asleep(
            seconds=round(clock.monotonic() - began, 4), error=f"{type(error).__name__}: {error}"[:2000]
        )
    return Asleep(seconds=round(clock.monotonic() - began, 4))


async def wake_up(client: EngineClient | None, clock: Clock = time) -> Awake:
    """Raises EngineError where the engine does not take its memory again: it is of no use then."""
    began = clock.monotonic()
    if client is not None:
        await client.resume_memory()
    return Awake(seconds=round(clock.monotonic() - began, 4))


async def _idle(client: EngineClient, until: float, clock: Clock) -> None:
    """Raises EngineRefused where it is still not, with what it says."""
    while True:
        try:
            await client.flush_cache()
            return
        except EngineRefused as error:
            if error.details.get("status") != 400 or clock.monotonic() > until:
                raise
        await asyncio.sleep(_AGAIN_S)
