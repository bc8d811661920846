"""The adapters in an engine, by policy version: a new one is loaded beside those that samples still use.

Invariants:
- *asked with it, ended with it*: an adapter is unloaded when every sample that was asked of the engine with it has
  ended here;
- *bounded*: before one more than `MOST` would be loaded, the samples of the oldest are called off. They go on under a
  newer one, with the tokens that they have.

This module must not know about frames, or how an engine is started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gyre.engines.dialect import ADAPTERS_AT_ONCE
from gyre.engines.errors import EngineError
from gyre.engines.http_client import EngineClient
from gyre.rollouts.agent.owner import EngineSamples

MOST = ADAPTERS_AT_ONCE - 1
"""One place is that of the model alone."""


class EngineAdapters:
    """Those of the engine behind `client`, which generates `samples`."""

    def __init__(self, client: EngineClient, samples: EngineSamples) -> None:
        self._client = client
        self._samples = samples
        self._loaded: list[str] = []
        """Oldest first."""

    async def load(self, name: str, folder: Path) -> None:
        """Have the engine take the adapter in `folder`, so that requests can name it; nothing else changes. Raises
        EngineRefused where it does not, and another EngineError where nobody knows whether it did."""
        if name in self._loaded:  # other bytes came under this name before
            await self._free(name)
        await self._drop_unused()
        while len(self._loaded) >= MOST:
            await self._free(self._loaded[0])
        await self._client.load_adapter(name, folder)
        self._loaded.append(name)

    async def _drop_unused(self) -> None:
        """The newest stays: the next requests name it until another is there."""
        for name in self._loaded[:-1]:
            if name not in self._samples.adapters_in_use():
                with contextlib.suppress(EngineError):  # it costs memory; the next load tries again
                    await self._unload(name)

    async def _free(self, name: str) -> None:
        await self._samples.recall_adapter(name)
        await self._unload(name)

    async def _unload(self, name: str) -> None:
        await self._client.unload_adapter(name)
        self._loaded.remove(name)
