"""How an agent gets a policy version, and how its engine gets to serve it.

Invariants:
- *first the weights*: a version is loaded after every byte of it was compared with the manager's checksums, and only
  then the manager is told that it is loaded;
- *one at a time*: of the versions that were published meanwhile, only the newest is loaded;
- *a folder of its own*: the publisher's is removed when newer versions are there, and an engine takes its time.

This module must not know about samples, or how an engine is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp

from gyre.rollouts.engines.errors import EngineError, EngineRefused
from gyre.rollouts.engines.loading import LoadReport
from gyre.rollouts.frames import Frame, Loaded, LoadFailed, Weights
from gyre.rollouts.model_folder import ModelFolder, file_checksum
from gyre.rollouts.weight_cache import WeightCache
from gyre.weights.manifest import WeightMismatch

ENGINE_STARTS = 3
"""Starts in a row that may fail before the agent gives up: its machine is not able."""


class AgentWeights:
    """`serve(folder, weights)` brings the engine to serve a verified folder and says how (None: by starting it),
    `is_serving()` says whether there is an engine, `send(frame)` tells the manager. `cache` is where folders are made,
    one below it for each `incarnation`."""

    def __init__(
        self,
        cache: Path,
        incarnation: str,
        *,
        serve: Callable[[Path, Weights], Awaitable[LoadReport | None]],
        is_serving: Callable[[], bool],
        send: Callable[[Frame], None],
        fetch_timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = -1
        """What the engine serves; -1 without."""
        self.checksum = ""
        self._root = cache
        self._incarnation = incarnation
        self._serve = serve
        self._is_serving = is_serving
        self._send = send
        self._fetch_timeout_s = fetch_timeout_s
        self._now = monotonic
        self._loading = asyncio.Lock()
        self._wanted: Weights | None = None
        self._cache: WeightCache | None = None
        self._failed_starts = 0

    def lost(self) -> None:
        """There is no engine any more."""
        self.version, self.checksum = -1, ""

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def load(self, weights: Weights, url: str, headers: Mapping[str, str]) -> Awaitable[None]:
        """Fetch, verify, load, and tell. What is awaited raises EngineError where no engine can be started, time
        after time."""
        self._wanted = weights  # now, and not when its turn comes
        return self._load(weights, url, headers)

    async def _load(self, weights: Weights, url: str, headers: Mapping[str, str]) -> None:
        async with self._loading:
            if self._wanted is not weights:
                return  # a newer one was published meanwhile
            began = self._now()
            if self._is_serving() and (self.version, self.checksum) == (weights.version, weights.checksum):
                self._send(
                    Loaded(version=self.version, checksum=self.checksum, fetch_s=0.0, load_s=0.0)
                )  # told over another connection, or not heard
                return
            try:
                folder = await self._fetch(weights, url, headers)
                fetched = self._now()
                report = await self._serve(folder.path, weights)
            except (WeightMismatch, EngineRefused, OSError, aiohttp.ClientError, TimeoutError) as error:
                self._failed(weights, error)
                return
            except EngineError as error:
                self._failed_starts += 1
                if self._failed_starts >= ENGINE_STARTS:
                    raise
                self._failed(weights, error)
                return
            self._failed_starts = 0
            self.version, self.checksum = weights.version, weights.checksum
            self._send(
                Loaded(
                    version=weights.version,
                    checksum=weights.checksum,
                    fetch_s=round(fetched - began, 4),
                    load_s=round(self._now() - fetched, 4),
                    pause_s=round(report.pause_s, 4) if report is not None else 0.0,
                    how=report.how if report is not None else "start",
                    note=report.why_disk[:1000] if report is not None else "",
                )
            )

    def _failed(self, weights: Weights, error: BaseException) -> None:
        self._send(LoadFailed(version=weights.version, error=f"{type(error).__name__}: {error}"[:4000]))

    async def _fetch(self, weights: Weights, url: str, headers: Mapping[str, str]) -> ModelFolder:
        """The version's folder, verified. Raises WeightMismatch."""
        loop = asyncio.get_running_loop()
        if self._cache is None:
            self._cache = WeightCache(self._root, self._incarnation)
        target = self._cache.path / f"v{weights.version:08d}"
        target.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob("v*"):  # what is served is gone back to where a load breaks
            if old.name not in (target.name, f"v{self.version:08d}"):
                shutil.rmtree(old, ignore_errors=True)
        mine = ModelFolder(target, weights.files, weights.checksum)
        if weights.local_path:
            with contextlib.suppress(WeightMismatch):  # then this is another machine
                await loop.run_in_executor(None, mine.copy_of, Path(weights.local_path))
                return mine
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self._fetch_timeout_s)
        async with aiohttp.ClientSession(headers=dict(headers), timeout=timeout) as session:
            for file in weights.files:
                async with session.get(f"{url.rstrip('/')}{weights.path}/{file.name}") as response:
                    if response.status != 200:
                        raise WeightMismatch(
                            f"version {weights.version} is no longer at the manager: {response.status}."
                        )
                    with open(target / file.name, "wb") as out:  # noqa: ASYNC230 - memory-backed, a block at a time
                        async for block in response.content.iter_chunked(1 << 22):
                            out.write(block)
                digest, size_bytes = await loop.run_in_executor(None, file_checksum, target / file.name)
                if digest != file.checksum or size_bytes != file.size_bytes:
                    raise WeightMismatch(f"{file.name} of version {weights.version} came damaged: {digest}.")
        return mine
