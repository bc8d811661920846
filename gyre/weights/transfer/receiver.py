"""Receiver of versions: from another process of this machine, or chunk by chunk from peers.

Invariants:
- *verified before committed*: a version appears after each of its chunks had the manifest's checksum, unless its
  loader is to compare them;
- *local first*: a version that another process of this machine published is linked, not copied.

The threads of one fetch are in `gyre.weights.transfer.fetch`, the choice of peers in `gyre.weights.transfer.swarm`.
This module must not know who tells it of versions and sources, or what loads them.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gyre.errors import Unauthorized
from gyre.weights.codecs.adaptive import PRIOR, UNKNOWN, Cost, TransportChoice, choose_transport
from gyre.weights.codecs.encoding import Codec
from gyre.weights.transfer.address import parse_address
from gyre.weights.transfer.chunk_transports import Source, TcpTransport, Transport
from gyre.weights.transfer.connections import ConnectionPool
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.fetch import Fetch, Superseded, WeightsUnreachable
from gyre.weights.transfer.mooncake import MooncakeEngine
from gyre.weights.transfer.protocol import Stalled, is_allowed
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.transfer.swarm import ASK_AGAIN_S, FIRST_REST_S, LONGEST_REST_S
from gyre.weights.version.arena import Arena, ArenaFull, VersionFiles, is_folder, read_manifest
from gyre.weights.version.manifest import WeightManifest, WeightMismatch

ASKED_AT_ONCE = 16
"""Most sources that are asked for a manifest at one time, each on a thread of its own."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch. `by` holds wire bytes by source, `resumed` counts chunks that were already there."""

    files: VersionFiles
    seconds: float
    wire_bytes: int
    resumed: int
    way: str
    by: dict[str, int]
    codecs: dict[str, int]
    reason: str = ""


class _Asking:
    """Who is asked for a manifest: several sources at once, so that those which are silent hold up nobody, and each of
    them less often each time."""

    def __init__(self) -> None:
        self.over = False
        self.found: queue.SimpleQueue[WeightManifest] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Source] = set()
        self._tries: dict[Source, int] = {}
        self._again_at: dict[Source, float] = {}
        self._told: set[Source] = set()

    def due(self, sources: Sequence[Source], now: float) -> list[Source]:
        """The sources to ask now, those first that were asked least often."""
        with self._lock:
            due = [
                one
                for one in dict.fromkeys(sources)
                if one not in self._open and self._again_at.get(one, now) <= now
            ]
            due.sort(key=lambda one: self._tries.get(one, 0))
            due = due[: max(0, ASKED_AT_ONCE - len(self._open))]
            self._open.update(due)
        return due

    def ended(self, source: Source, now: float) -> None:
        with self._lock:
            self._open.discard(source)
            tries = self._tries[source] = self._tries.get(source, 0) + 1
            self._again_at[source] = now + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(tries - 1, 16))

    def is_first_of(self, source: Source) -> bool:
        with self._lock:
            first = source not in self._told
            self._told.add(source)
        return first


class HearsIncidents(Protocol):
    def incident(self, kind: str, evidence: dict[str, Any]) -> None:
        """Something went wrong and was mended: source_lost, source_stalled, chunk_damaged, base_damaged,
        source_refused, transport_failed, arena_full, superseded, resumed, behind. On any thread."""


class Receiver:
    """Fetches versions into `arena`. `listener` hears of incidents; None where nobody wants to."""

    def __init__(
        self,
        arena: Arena,
        token: str,
        *,
        server: ChunkServer | None = None,
        address: str = "",
        streams: int = 2,
        stall_s: float = 5.0,
        give_up_s: float = 60.0,
        codecs: Sequence[Codec] = ("none", "delta", "planes"),
        forced_codec: Codec | Sequence[Codec] = (),
        listener: HearsIncidents | None = None,
        remote: Callable[[str, Callable[[], bool]], Transport] | None = None,
        mooncake: MooncakeEngine | None = None,
        transports: Sequence[str] = ("auto",),
        networks: Sequence[str] = (),
        encryption: Encryption | None = None,
        seed: int | None = None,
    ) -> None:
        """`address` is where others reach `server`. `remote(address, abandoned)` makes a transport (None: plain TCP).
        With `mooncake`, on a trusted network only, its reads are measured beside TCP and the faster is used.
        `transports` other than `auto` are the only ones, the preferred first, whatever is faster. The first usable one
        of `forced_codec` is used. `networks` are those of sources, in CIDR notation. `seed` decides the order of
        chunks."""
        self.arena = arena
        self.server = server
        self.address = address
        self.streams = streams
        self.stall_s = stall_s
        self.give_up_s = give_up_s
        self.link_bytes_s: float | None = None
        self.costs: dict[Codec, Cost] = {**dict.fromkeys(codecs, UNKNOWN), **PRIOR}
        self.codecs = tuple(codecs)
        self.forced: Sequence[Codec] = (
            (forced_codec,) if isinstance(forced_codec, str) else tuple(forced_codec)
        )
        self.token = token
        self._listener = listener
        self.remote = remote or self._tcp
        self.random = random.Random(seed)
        self.mooncake = mooncake
        self.order = () if "auto" in transports else tuple(transports)
        self._networks = tuple(networks)
        self._encryption = encryption
        self.connections = ConnectionPool()
        self.rates: dict[str, float | None] = {}
        """Bytes per second of one stream."""
        if not self.order or "tcp" in self.order:
            self.rates["tcp"] = None
        if mooncake is not None:
            self.rates["mooncake"] = None
        self.broken: dict[str, str] = {}
        """Transports that failed here, with the error; they are not tried again."""
        self._is_behind = False
        self._other_bytes: set[str] = set()
        """Folders with a version's name and other bytes, of another machine or job."""

    def close(self) -> None:
        """Close the idle connections to sources; a running fetch closes its own. Safe to call twice."""
        self.connections.close()

    def incident(self, kind: str, evidence: dict[str, Any]) -> None:
        """As `HearsIncidents.incident`."""
        if self._listener is not None:
            self._listener.incident(kind, evidence)

    def _tcp(self, address: str, abandoned: Callable[[], bool]) -> Transport:
        return TcpTransport(
            address,
            self.token,
            relay=self.address,
            stall_s=self.stall_s,
            abandoned=abandoned,
            encryption=self._encryption,
            pool=self.connections,
        )

    def choose_transport(self) -> TransportChoice:
        rates = {name: rate for name, rate in self.rates.items() if name not in self.broken}
        return choose_transport(rates, self.broken, order=self.order)

    def fetch(
        self,
        manifest: WeightManifest,
        sources: Callable[[], Sequence[Source]],
        *,
        serving: int | None = None,
        superseded: Callable[[], bool] = lambda: False,
        verify_links: bool = True,
    ) -> Fetched:
        """Fetch and verify a whole version. `sources()` is called repeatedly, because sources come and go. `serving` is
        the version that must not make room. Without `verify_links` one that is linked is not verified, because whoever
        loads it does that. Raises Superseded, WeightsUnreachable, ArenaFull, Unauthorized."""
        began = time.monotonic()
        found = self.arena.versions.get(manifest.version)
        if found is not None and found.manifest == manifest and verify_links:
            found = self.arena.check(manifest.version)
        if found is not None and found.manifest == manifest:
            return Fetched(found, 0.0, 0, len(manifest.digests), "here", {}, {})
        self._notice_lag(manifest.version)
        try:
            linked = self._link(manifest, sources(), serving, verify_links)
            if linked is not None:
                return Fetched(
                    linked, time.monotonic() - began, 0, 0, "linked", {}, {}, "it lies on this machine"
                )
            files = self.arena.stage_manifest(manifest, keep=serving)
        except ArenaFull as error:
            self.incident("arena_full", {"version": manifest.version, **error.details})
            raise
        resumed = len(files.have)
        if resumed:
            self.incident(
                "resumed", {"version": manifest.version, "chunks": resumed, "of": len(manifest.digests)}
            )
        work = Fetch(self, manifest, files, sources, superseded)
        work.run()
        self.arena.commit(manifest)
        return Fetched(
            files,
            time.monotonic() - began,
            sum(work.by.values()),
            resumed,
            "+".join(sorted(work.ways)) or "here",
            work.by,
            work.codecs,
            "; ".join(part for part in (work.choice.reason, work.transport.reason, work.lacking) if part),
        )

    def _notice_lag(self, wanted: int) -> None:
        """Tell that this receiver missed versions: once, until it has caught up. A new receiver has missed none."""
        newest = max(self.arena.versions, default=wanted)
        was_behind, self._is_behind = self._is_behind, wanted - newest > 1
        if self._is_behind and not was_behind:
            self.incident("behind", {"version": wanted, "have": newest})

    def manifest_of(
        self,
        version: int,
        checksum: str,
        sources: Callable[[], Sequence[Source]],
        *,
        superseded: Callable[[], bool] = lambda: False,
    ) -> WeightManifest:
        """The manifest with this checksum, which it proves by itself, from any source. Raises Superseded, and
        WeightsUnreachable after `give_up_s`."""
        asking = _Asking()

        def ask(source: Source) -> None:
            try:
                found = self._ask_manifest(source, checksum, lambda: asking.over or superseded())
                if found is not None:
                    asking.found.put(replace(found, version=version))
            except Exception as error:  # whatever a source's words lead to is that source's failure
                if not asking.over and not superseded() and asking.is_first_of(source):
                    kind = "source_stalled" if isinstance(error, Stalled) else "source_lost"
                    evidence = {"version": version, "source": str(source), "error": str(error)[:500]}
                    self.incident(kind, evidence)
            finally:
                asking.ended(source, time.monotonic())

        until = time.monotonic() + self.give_up_s
        try:
            while True:
                for source in asking.due(sources(), time.monotonic()):
                    threading.Thread(target=ask, args=(source,), name="gyre-manifest", daemon=True).start()
                with contextlib.suppress(queue.Empty):
                    return asking.found.get(timeout=ASK_AGAIN_S)
                if superseded():
                    raise Superseded(f"version {version} is not wanted any more.")
                if time.monotonic() > until:
                    raise WeightsUnreachable(
                        f"nobody has the manifest of version {version} ({checksum}).",
                        hint="Are its sources alive, and can this machine open their addresses?",
                        details={"sources": [str(source) for source in sources()]},
                    )
        finally:
            asking.over = True

    def _ask_manifest(
        self, source: Source, checksum: str, abandoned: Callable[[], bool]
    ) -> WeightManifest | None:
        if source.path:
            with contextlib.suppress(WeightMismatch):  # another machine's path, or a version that is gone
                manifest = read_manifest(Path(source.path))
                if manifest.checksum == checksum:
                    return manifest
        if not source.address:
            return None
        if not self._may_dial(source.address):
            raise Unauthorized(f"{source.address} is in none of the networks that weights may come from.")
        transport = TcpTransport(
            source.address,
            self.token,
            stall_s=self.stall_s,
            abandoned=abandoned,
            encryption=self._encryption,
            pool=self.connections,
        )
        try:
            reply = transport.ask({"op": "manifest", "checksum": checksum})
        finally:
            transport.close()
        if reply.get("status") != "ok":
            return None
        manifest = WeightManifest.from_dict(reply.get("manifest") or {})
        if manifest.checksum != checksum:
            raise WeightMismatch(f"{source} has another manifest under {checksum}.")
        return manifest

    def _may_dial(self, address: str) -> bool:
        try:
            return is_allowed(parse_address(address).host, self._networks)
        except ValueError:  # no address, or a name, whose address is not known before it is dialled
            return False

    def may_pull(self, source: Source) -> bool:
        """Whether a transport reaches other machines, and this source may be dialled."""
        return bool(self.rates and source.address) and self._may_dial(source.address)

    def is_here(self, source: Source) -> bool:
        if self.order and "shm" not in self.order:
            return False
        return bool(source.path) and source.path not in self._other_bytes and is_folder(source.path)

    def _link(
        self, manifest: WeightManifest, sources: Sequence[Source], serving: int | None, verify: bool
    ) -> VersionFiles | None:
        for source in sources:
            if self.is_here(source):
                try:
                    files = self.arena.adopt(Path(source.path), manifest, keep=serving, verify=verify)
                except WeightMismatch as error:
                    self._other_bytes.add(source.path)
                    self.incident(
                        "chunk_damaged",
                        {"version": manifest.version, "source": source.path, "error": error.message},
                    )
                    continue
                if files is not None:
                    return files
        return None
