"""A local instance's engine between windows: it gives its memory back, and takes it again.

What is given back is the KV memory, which is most of an engine's; its weights stay, so that it has them when it wakes.
The embedded engine has nothing to give and says so. SGLang gives memory back where it was started with
`--enable-memory-saver`, and does nothing else.

This module must not know when windows are, or about samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gyre.rollouts.engines.client import EngineClient
from gyre.rollouts.engines.errors import EngineError
from gyre.rollouts.frames import Asleep, Awake


async def fall_asleep(client: EngineClient | None, now: Callable[[], float] = time.monotonic) -> Asleep:
    """After its last request has ended. Says so in any case: the trainer waits for it."""
    began = now()
    if client is None:
        return Asleep(seconds=0.0, error="there is no engine")
    try:
        await client.release_memory()
    except EngineError as error:
        return Asleep(seconds=round(now() - began, 4), error=f"{type(error).__name__}: {error}"[:2000])
    return Asleep(seconds=round(now() - began, 4))


async def wake_up(client: EngineClient | None, now: Callable[[], float] = time.monotonic) -> Awake:
    """Raises EngineError where the engine does not take its memory again: it is of no use then."""
    began = now()
    if client is not None:
        await client.resume_memory()
    return Awake(seconds=round(now() - began, 4))
