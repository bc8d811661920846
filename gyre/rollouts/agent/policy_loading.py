"""How an agent gets a policy version, and how its engine gets to serve it.

Invariants:
- *first the weights*: a version is loaded after every byte of it was compared with its checksums, and only then the
  manager is told that it is loaded;
- *one at a time*: of the versions that were published meanwhile, only the newest is loaded; a fetch that a newer one
  overtakes ends, and nothing of it is served;
- *what is served stays*: the pages of the version that the engine has are not written to until it has another;
- *ahead is not served*: what was fetched ahead is verified and lies there; only who is told to load it serves it;
- *a source too*: chunks that were verified are served to other agents while the rest is fetched.

This module must not know about samples, or how an engine is started.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from gyre.config import WeightsSpec
from gyre.config.plugins import CODEC
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.weight_loading import LoadReport
from gyre.errors import ConfigError, GyreError
from gyre.rollouts.protocol.frames import Frame, Loaded, LoadFailed, Weights, WeightsTrouble
from gyre.rollouts.weight_dirs import of_instance
from gyre.rollouts.weight_peer import WeightPeer, check_transports
from gyre.weights.transfer.fetch import Superseded
from gyre.weights.transfer.receiver import Fetched
from gyre.weights.transfer.transport import Source

ENGINE_STARTS = 3
"""Starts in a row that may fail before the agent gives up: its machine is not able."""


class Holdings:
    """What this agent has of weights: a folder, its server, and the receiver that fills it. Raises ConfigError."""

    def __init__(
        self,
        root: Path,
        token: str,
        url: str,
        *,
        plane: WeightsSpec,
        give_up_s: float,
        incident: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.token = token
        self.plane = plane
        self.peer = WeightPeer(root, of_instance(token), token, plane, url=url)
        self.receiver = self.peer.receiver(give_up_s=give_up_s, incident=incident)

    @property
    def address(self) -> str:
        return self.peer.server.address

    def close(self) -> None:
        self.peer.close()


class AgentWeights:
    """`serve(folder, weights)` brings the engine to serve a verified folder and says how (None: by starting it),
    `is_serving()` says whether there is an engine, `send(frame)` tells the manager. `cache` is where folders are made.
    """

    def __init__(
        self,
        cache: Path,
        *,
        serve: Callable[[Path, Weights], Awaitable[LoadReport | None]],
        is_serving: Callable[[], bool],
        send: Callable[[Frame], None],
        fetch_timeout_s: float,
        bind: str | None = None,
        ports: str | None = None,
        codec: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bind` and `ports` are this machine's own, before what the manager says. `codec` is the codec of the job's
        own that may be imported here."""
        self.version = -1
        """What the engine serves; -1 without."""
        self.checksum = ""
        self._root = cache
        self._serve = serve
        self._is_serving = is_serving
        self._send = send
        self._fetch_timeout_s = fetch_timeout_s
        self._now = monotonic
        self._plane = WeightsSpec()
        self._bind, self._ports, self._codec = bind, ports, codec
        self._loading = asyncio.Lock()
        self._wanted: Weights | None = None
        self._holdings: Holdings | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed_starts = 0
        self._ahead: tuple[int, str, Fetched] | None = None
        """The version and checksum of what was fetched ahead, and how it came."""

    @property
    def source(self) -> str:
        """Where others can fetch what this agent has; "" before it has anything."""
        return self._holdings.address if self._holdings is not None else ""

    def settle(self, plane: WeightsSpec) -> None:
        """How the job wants weights to travel. Raises ConfigError where this machine cannot do it."""
        own = {"bind": self._bind, "ports": self._ports}
        given = {key: value for key, value in own.items() if value is not None}
        if plane.codec not in (*CODEC.built_in, self._codec):
            given["codec"] = "none"
        self._plane = WeightsSpec.model_validate({**plane.model_dump(), **given})
        check_transports(self._plane)

    def lost(self) -> None:
        """There is no engine any more."""
        self.version, self.checksum = -1, ""

    def close(self) -> None:
        self._wanted = None  # ends a fetch that is under way
        if self._holdings is not None:
            self._holdings.close()

    def load(self, weights: Weights, url: str, token: str) -> Awaitable[None]:
        """Fetch, verify, load, and tell. What is awaited raises EngineError where no engine can be started, time
        after time, and ConfigError where this machine cannot do what the settings say."""
        self._wanted = weights  # now, and not when its turn comes
        return self._load(weights, url, token)

    def fetch_ahead(self, weights: Weights, url: str, token: str) -> Awaitable[None]:
        """Fetch and verify what is to be loaded later. Where that cannot be, whoever loads it tries again, and tells.
        What is awaited raises ConfigError."""
        self._wanted = weights
        return self._fetch_ahead(weights, url, token)

    async def _fetch_ahead(self, weights: Weights, url: str, token: str) -> None:
        async with self._loading:
            if self._wanted is not weights:
                return  # it is to be loaded by now, or there is a newer one
            self._loop = asyncio.get_running_loop()
            try:
                fetched = await self._loop.run_in_executor(None, self._fetch, weights, url, token)
            except ConfigError:
                raise
            except (GyreError, OSError):
                return  # `load` fetches it again, and says what is wrong
            self._ahead = (weights.version, weights.checksum, self._fetched_ahead(weights) or fetched)

    def _fetched_ahead(self, weights: Weights) -> Fetched | None:
        ahead = self._ahead
        known = ahead is not None and ahead[:2] == (weights.version, weights.checksum)
        return ahead[2] if ahead is not None and known else None

    async def _load(self, weights: Weights, url: str, token: str) -> None:
        async with self._loading:
            if self._wanted is not weights:
                return  # a newer one was published meanwhile
            began = self._now()
            if self._is_serving() and (self.version, self.checksum) == (weights.version, weights.checksum):
                self._tell_loaded(weights)  # told over another connection, or not heard
                return
            try:
                self._loop = asyncio.get_running_loop()
                fetched = await self._loop.run_in_executor(None, self._fetch, weights, url, token)
                came = self._now()
                report = await self._serve(fetched.slot.path, weights)
            except Superseded:
                return
            except ConfigError:  # it would be so again each time
                raise
            except EngineRefused as error:
                self._failed(weights, error)
                return
            except EngineError as error:
                self._failed_starts += 1
                if self._failed_starts >= ENGINE_STARTS:
                    raise
                self._failed(weights, error)
                return
            except (GyreError, OSError) as error:
                self._failed(weights, error)
                return
            self._failed_starts = 0
            fetched = self._fetched_ahead(weights) or fetched  # how it came, where it was there already
            self._ahead = None
            self.version, self.checksum = weights.version, weights.checksum
            self._tell_loaded(
                weights,
                fetch_s=round(came - began, 4),
                load_s=round(self._now() - came, 4),
                pause_s=round(report.pause_s, 4) if report is not None else 0.0,
                how=report.how if report is not None else "start",
                note=report.why_disk[:1000] if report is not None else "",
                fetched=_told(fetched),
                way=fetched.way,
                codec=_codec_of(fetched),
                why=fetched.reason[:1000],
            )

    def _tell_loaded(self, weights: Weights, **told: Any) -> None:
        known: dict[str, Any] = {"fetch_s": 0.0, "load_s": 0.0, **told}
        self._send(Loaded(version=weights.version, checksum=weights.checksum, source=self.source, **known))

    def _failed(self, weights: Weights, error: BaseException) -> None:
        self._send(LoadFailed(version=weights.version, error=f"{type(error).__name__}: {error}"[:4000]))

    # -- the fetching thread ---------------------------------------------------------------------------

    def _fetch(self, weights: Weights, url: str, token: str) -> Fetched:
        """The version, verified, in this agent's own folder. Raises Superseded, WeightsUnreachable, ArenaFull,
        ConfigError."""
        holdings = self._holdings
        if holdings is None or holdings.token != token or holdings.plane != self._plane:
            if holdings is not None:
                holdings.close()
                self._holdings = None  # should there be no other
            holdings = self._holdings = Holdings(
                self._root,
                token,
                url,
                plane=self._plane,
                give_up_s=self._fetch_timeout_s,
                incident=lambda what, evidence: self._trouble(weights.version, what, evidence),
            )

        def superseded() -> bool:
            wanted = self._wanted
            return wanted is None or (wanted.version, wanted.checksum) != (weights.version, weights.checksum)

        def sources() -> list[Source]:
            wanted = self._wanted or weights  # the same version, told again with other sources
            told = [Source(address) for address in wanted.sources if address != holdings.address]
            return [Source("", wanted.local_path), *told] if wanted.local_path else told

        receiver = holdings.receiver
        ahead = self._fetched_ahead(weights)
        manifest = ahead.slot.manifest if ahead is not None else None
        if manifest is None:
            manifest = receiver.manifest_of(weights.version, weights.checksum, sources, superseded=superseded)
        serving = self.version if self.version >= 0 else None
        fetched = receiver.fetch(manifest, sources, serving=serving, superseded=superseded)
        holdings.peer.settle()
        return fetched

    def _trouble(self, version: int, what: str, evidence: Mapping[str, Any]) -> None:
        """On any thread."""
        frame = WeightsTrouble(version=version, what=what, evidence=json.dumps(dict(evidence))[:4000])
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, frame)


def _codec_of(fetched: Fetched) -> str:
    """Of those chunks that did not go as they are, most; "none" where all did."""
    return max(fetched.codecs, key=lambda codec: (codec != "none", fetched.codecs[codec]), default="none")


def _told(fetched: Fetched) -> str:
    """One line for the log: which way, how much, in which codec and why."""
    codecs = ", ".join(f"{count} {codec}" for codec, count in sorted(fetched.codecs.items()))
    return (
        f"{fetched.way}: {fetched.wire_bytes} bytes in {fetched.seconds:.3f} s from {len(fetched.by)} sources"
        + (f"; chunks: {codecs}" if codecs else "")
        + (f"; {fetched.resumed} were there" if fetched.resumed else "")
        + (f"; {fetched.reason}" if fetched.reason else "")
    )[:1000]
