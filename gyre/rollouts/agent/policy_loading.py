"""An agent's policy: it fetches a version, verifies it and brings the engine to serve it.

Invariants:
- *first the weights*: a version is loaded after all its bytes matched their checksums, and the manager hears of it
  after it is loaded. Tensors that lie on this machine are compared by the engine's loader, if it has one;
- *one at a time*: of several versions that were published meanwhile, only the newest is loaded; a newer version ends
  an older one's fetch, of which nothing is served;
- *what is served stays*: the pages of the version that the engine serves are not written to until it serves another;
- *ahead is not served*: a version that was fetched ahead is kept; it is served after the order to load it;
- *a source too*: chunks are served to other agents, who verify them, while the rest is fetched.

This module must not know about samples, or how an engine is started.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

from gyre.clock import Clock
from gyre.config import WeightsSpec
from gyre.config.plugins import CODEC
from gyre.engines.errors import EngineNotStarted, EngineRefused
from gyre.engines.weight_loading import LoadReport
from gyre.errors import ConfigError, GyreError
from gyre.rollouts.agent.owner import HasWeights
from gyre.rollouts.protocol.frames import FetchFault, Loaded, LoadFailed, Weights
from gyre.rollouts.weight_dirs import of_instance
from gyre.rollouts.weight_peer import WeightPeer, check_transports
from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.fetch import Superseded
from gyre.weights.transfer.receiver import Fetched, HearsIncidents
from gyre.weights.version.manifest import WeightMismatch

ENGINE_STARTS = 3
"""Starts in a row that may fail before an agent that is nobody's vertex gives up: the fault is then its machine's. Of a
vertex the master counts them, and decides."""


class Holdings:
    """This agent's weights: a folder, its server, and the receiver that fills it. Raises ConfigError."""

    def __init__(
        self,
        root: Path,
        key: str,
        url: str,
        *,
        plane: WeightsSpec,
        give_up_s: float,
        listener: HearsIncidents,
    ) -> None:
        self.key = key
        self.plane = plane
        self.peer = WeightPeer(root, of_instance(key), key, plane, url=url)
        self.receiver = self.peer.receiver(give_up_s=give_up_s, listener=listener)

    @property
    def address(self) -> str:
        return self.peer.server.address

    def close(self) -> None:
        self.peer.close()


class AgentWeights:
    """The policy versions of one agent, `owner`; `cache` holds the folders."""

    def __init__(
        self,
        cache: Path,
        owner: HasWeights,
        *,
        fetch_timeout_s: float,
        bind: str | None = None,
        ports: str | None = None,
        codec: str = "",
        starts: int | None = ENGINE_STARTS,
        clock: Clock = time,
    ) -> None:
        """`starts` is how many starts of the engine in a row may fail, None for any number. `bind` and `ports` are this
        machine's settings and override the manager's. `codec` is the user's codec that may be imported here."""
        self.version = -1
        """The version that the engine serves; -1 if none."""
        self.checksum = ""
        self._root = cache
        self._owner = owner
        self._fetch_timeout_s = fetch_timeout_s
        self._clock = clock
        self._plane = WeightsSpec()
        self._bind, self._ports, self._codec = bind, ports, codec
        self._loading = asyncio.Lock()
        self._wanted: Weights | None = None
        self._holdings: Holdings | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starts = starts
        self._failed_starts = 0
        self._ahead: tuple[int, str, Fetched] | None = None
        """Version and checksum of the weights that were fetched ahead, and how they came."""

    @property
    def source(self) -> str:
        """The address where others can fetch this agent's chunks; "" before it has any."""
        return self._holdings.address if self._holdings is not None else ""

    def settle(self, plane: WeightsSpec) -> None:
        """Take over the job's settings of the weight plane. Raises ConfigError if this machine cannot follow them."""
        own = {"bind": self._bind, "ports": self._ports}
        given = {key: value for key, value in own.items() if value is not None}
        if plane.codec not in (*CODEC.built_in, self._codec):
            given["codec"] = "none"
        self._plane = WeightsSpec.model_validate({**plane.model_dump(), **given})
        check_transports(self._plane)

    def lost(self) -> None:
        """Note that there is no engine any more."""
        self.version, self.checksum = -1, ""

    def close(self) -> None:
        self._wanted = None  # ends a fetch that is under way
        if self._holdings is not None:
            self._holdings.close()

    def load(self, weights: Weights, url: str, key: str) -> Awaitable[None]:
        """Fetch, verify and load a version, and tell the manager. The awaitable raises EngineNotStarted when too many
        starts in a row have failed, and ConfigError if this machine cannot follow the settings."""
        self._wanted = weights  # before the lock, so that an older fetch ends
        return self._load(weights, url, key)

    def fetch_ahead(self, weights: Weights, url: str, key: str) -> Awaitable[None]:
        """Fetch and verify a version that is to be loaded later. If that fails, `load` tries again and tells the
        manager. The awaitable raises ConfigError."""
        self._wanted = weights
        return self._fetch_ahead(weights, url, key)

    async def _fetch_ahead(self, weights: Weights, url: str, key: str) -> None:
        async with self._loading:
            if self._wanted is not weights:
                return  # `load` was called meanwhile, or there is a newer version
            self._loop = asyncio.get_running_loop()
            try:
                fetched = await self._loop.run_in_executor(None, self._fetch, weights, url, key)
            except ConfigError:
                raise
            except (GyreError, OSError, ValueError):
                return  # `load` fetches again and tells the error
            self._ahead = (weights.version, weights.checksum, self._fetched_ahead(weights) or fetched)

    def _fetched_ahead(self, weights: Weights) -> Fetched | None:
        ahead = self._ahead
        known = ahead is not None and ahead[:2] == (weights.version, weights.checksum)
        return ahead[2] if ahead is not None and known else None

    async def _load(self, weights: Weights, url: str, key: str) -> None:
        async with self._loading:
            if self._wanted is not weights:
                return  # a newer version was published meanwhile
            began = self._clock.monotonic()
            if self._owner.is_serving and (self.version, self.checksum) == (
                weights.version,
                weights.checksum,
            ):
                self._tell_loaded(weights)  # again: the last word may have been lost with its connection
                return
            try:
                fetched, came, report = await self._bring(weights, url, key)
            except Superseded:
                return
            except ConfigError:  # another attempt would fail the same way
                raise
            except EngineRefused as error:
                self._failed(weights, error)
                return
            except EngineNotStarted as error:
                self._failed_starts += 1
                self._failed(weights, error)
                if self._starts is not None and self._failed_starts >= self._starts:
                    raise
                return
            except (GyreError, OSError, ValueError) as error:
                self._failed(weights, error)
                return
            self._failed_starts = 0
            fetched = self._fetched_ahead(weights) or fetched  # the real transfer, if it was fetched ahead
            self._ahead = None
            self.version, self.checksum = weights.version, weights.checksum
            self._tell_loaded(
                weights,
                fetch_s=round(came - began, 4),
                load_s=round(self._clock.monotonic() - came, 4),
                pause_s=round(report.pause_s, 4) if report is not None else 0.0,
                how=report.how if report is not None else "start",
                note=(report.why_disk if report is not None else self._owner.why_disk)[:1000],
                fetched=_told(fetched),
                way=fetched.way,
                codec=_codec_of(fetched),
                why=fetched.reason[:1000],
            )

    async def _bring(self, weights: Weights, url: str, key: str) -> tuple[Fetched, float, LoadReport | None]:
        """Fetch the version and have the engine serve it: how, when it was fetched, and how it was loaded. Where the
        loader finds other bytes than the manifest says, whatever is wrong here is fetched again, once. Raises what
        `_fetch` and `serve` do."""
        self._loop = asyncio.get_running_loop()
        fetched = await self._loop.run_in_executor(None, self._fetch, weights, url, key)
        came = self._clock.monotonic()
        try:
            report = await self._owner.serve(fetched.files.path, weights, partial(self._check, fetched))
        except WeightMismatch:
            fetched.files.is_verified = False
            fetched = await self._loop.run_in_executor(None, self._fetch, weights, url, key, True)
            came = self._clock.monotonic()
            report = await self._owner.serve(fetched.files.path, weights, partial(self._check, fetched))
        return fetched, came, report

    def _tell_loaded(self, weights: Weights, **told: Any) -> None:
        known: dict[str, Any] = {"fetch_s": 0.0, "load_s": 0.0, **told}
        self._owner.tell(
            Loaded(version=weights.version, checksum=weights.checksum, source=self.source, **known)
        )

    def _failed(self, weights: Weights, error: BaseException) -> None:
        if isinstance(error, EngineNotStarted):
            said, words = str(error.details["said"]), str(error.details["traceback"])
            frame = LoadFailed(
                version=weights.version, error=error.message[:4000], starting=True, said=said, words=words
            )
        else:
            frame = LoadFailed(version=weights.version, error=f"{type(error).__name__}: {error}"[:4000])
        self._owner.tell(frame)

    # -- the fetching thread ---------------------------------------------------------------------------

    def _fetch(self, weights: Weights, url: str, key: str, verify_links: bool = False) -> Fetched:
        """Fetch the version into this agent's folder and verify it, unless it is linked and that is done when it is
        loaded (`serve`): by the engine's loader, or while an engine starts.
        Raises Superseded, WeightsUnreachable, ArenaFull, ConfigError."""
        holdings = self._holdings
        if holdings is None or holdings.key != key or holdings.plane != self._plane:
            if holdings is not None:
                holdings.close()
                self._holdings = None  # in case the new ones cannot be made
            holdings = self._holdings = Holdings(
                self._root,
                key,
                url,
                plane=self._plane,
                give_up_s=self._fetch_timeout_s,
                listener=self,
            )

        def superseded() -> bool:
            wanted = self._wanted
            return wanted is None or (wanted.version, wanted.checksum) != (weights.version, weights.checksum)

        def sources() -> list[Source]:
            wanted = self._wanted or weights  # a later order for the same version may name other sources
            told = [Source(address) for address in wanted.sources if address != holdings.address]
            return [Source("", wanted.local_path), *told] if wanted.local_path else told

        receiver = holdings.receiver
        ahead = self._fetched_ahead(weights)
        manifest = ahead.files.manifest if ahead is not None else None
        if manifest is None:
            manifest = receiver.manifest_of(weights.version, weights.checksum, sources, superseded=superseded)
        serving = self.version if self.version >= 0 else None
        reads_disk = self._owner.is_serving and bool(self._owner.why_disk)
        fetched = receiver.fetch(
            manifest,
            sources,
            serving=serving,
            superseded=superseded,
            verify_links=verify_links or reads_disk,
        )
        holdings.peer.settle()
        return fetched

    async def _check(self, fetched: Fetched) -> None:
        """Verify what was linked and is not verified. Raises WeightMismatch."""
        files, holdings = fetched.files, self._holdings
        if files.is_verified or files.manifest is None or holdings is None:
            return
        version = files.manifest.version
        checked = await asyncio.get_running_loop().run_in_executor(None, holdings.peer.arena.check, version)
        if checked is None:
            raise WeightMismatch(f"version {version} in {files.path} has other bytes than its manifest says.")

    def incident(self, kind: str, evidence: dict[str, Any]) -> None:
        """Tell the manager of trouble with the version that is wanted; callable from any thread."""
        wanted = self._wanted
        version = wanted.version if wanted is not None else -1
        frame = FetchFault(version=version, what=kind, evidence=json.dumps(evidence)[:4000])
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._owner.tell, frame)


def _codec_of(fetched: Fetched) -> str:
    """The codec of most of the encoded chunks; "none" if none was encoded."""
    return max(fetched.codecs, key=lambda codec: (codec != "none", fetched.codecs[codec]), default="none")


def _told(fetched: Fetched) -> str:
    """One line for the log: the transport, the bytes, the codecs and the reason for them."""
    codecs = ", ".join(f"{count} {codec}" for codec, count in sorted(fetched.codecs.items()))
    return (
        f"{fetched.way}: {fetched.wire_bytes} bytes in {fetched.seconds:.3f} s from {len(fetched.by)} sources"
        + (f"; chunks: {codecs}" if codecs else "")
        + (f"; {fetched.resumed} were there" if fetched.resumed else "")
        + (f"; {fetched.reason}" if fetched.reason else "")
    )[:1000]
