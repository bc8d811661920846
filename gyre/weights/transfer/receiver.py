"""Fetches a version: its chunks in random order from whoever has them, verified, recorded, and served on.

Invariants:
- *verified before committed*: a version appears when each of its chunks had the manifest's checksum;
- *bytes before record*: see `gyre.weights.version.arena`; who is killed goes on with the chunks that are missing;
- *no mixture*: all threads that write into a slot have ended before `fetch` returns, whatever it returns;
- *nobody is waited for alone*: a source that dies, stalls or sends other bytes is left for a while and its chunk is
  asked of another; only when nothing came from anybody for `give_up_s` the fetch fails. Where sources are busy with
  others that is `QUEUED` times as long, and no longer;
- *local first*: what another process of this machine published is linked, not copied.

This module must not know who tells it of versions and sources, or what loads them.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gyre.errors import GyreError, Unauthorized
from gyre.weights.codecs.adaptive import (
    PRIOR,
    CodecChoice,
    Cost,
    TransportChoice,
    blend,
    choose_codec,
    choose_transport,
    faded,
)
from gyre.weights.codecs.encoding import Codec
from gyre.weights.codecs.link_rate import MEASURED_BYTES, LinkRate
from gyre.weights.transfer.address import is_address
from gyre.weights.transfer.connections import ConnectionPool
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.mooncake import MooncakeEngine, MooncakeFailed, MooncakeMissing, MooncakeTransport
from gyre.weights.transfer.protocol import Abandoned, Stalled, is_allowed
from gyre.weights.transfer.server import ChunkServer, are_alike, word_of
from gyre.weights.transfer.transport import Pulled, SharedTransport, Source, TcpTransport, Transport, Want
from gyre.weights.version.arena import Arena, ArenaFull, Slot, read_manifest
from gyre.weights.version.manifest import Chunk, WeightManifest, WeightMismatch

WORSE_EACH_TIME = 2.0
FIRST_REST_S = 0.2
LONGEST_REST_S = 5.0
"""A source that failed is left alone so long, doubling; a publisher that restarts is back in seconds."""

DAMAGED_REST_S = 60.0
"""A source that sent other bytes twice."""

LOOK_AROUND_S = 0.25
LOOKS = 4
"""After so long a relay is asked what it has by now, even where there is something else to fetch; but so many of them
in that time, however many there are."""

TURN_WAIT_S = 0.25
"""For a turn at a source, where no other source is known to have one."""

QUEUED = 3.0
"""Times `give_up_s` that a fetch waits for turns while sources say that they are busy: turns lapse, so ours comes."""

FULL_FOR_S = 0.05
"""A source that had no turn free is asked after all others."""

ASK_AGAIN_S = 0.02
"""Before a source is asked again for what it did not have yet; doubling up to ten times that."""

OLD_RATE = 0.3
"""What the link carried in earlier fetches counts for so much beside what it carries in this one."""


class WeightsUnreachable(GyreError):
    """No source gave anything for too long."""

    code = "weights.unreachable"


class Superseded(GyreError):
    """A newer version is wanted; what was fetched of this one is not committed."""

    code = "weights.superseded"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch took. `by` are wire bytes by source, `resumed` chunks that were there already."""

    slot: Slot
    seconds: float
    wire_bytes: int
    resumed: int
    way: str
    by: dict[str, int]
    codecs: dict[str, int]
    reason: str = ""


@dataclass(slots=True)
class _Peer:
    source: Source
    have: int | None = None
    """Bits of the chunks that it has; None: all, or not known yet."""
    given: int = 0
    """Chunks that it would rather have others serve, for they were sent to them."""
    given_since: dict[int, float] = field(default_factory=dict)
    asked_at: float = float("-inf")
    again_s: float = ASK_AGAIN_S
    busy: int = 0
    """Requests of this fetch that are with it now."""
    full_until: float = 0.0
    """It had no turn free for us a moment ago."""
    rest_until: float = 0.0
    rest_s: float = FIRST_REST_S
    damaged: int = 0
    lacks_memory: bool = False
    """That Mooncake could read."""

    @property
    def mask(self) -> int:
        """`have`; of those who may have all, all bits that there are."""
        return -1 if self.have is None else self.have

    def learn(self, have: str, given: str, now: float) -> None:
        if have:
            self.have = None if have == "all" else int(have, 16)
        if given:
            fresh = int(given, 16) & ~self.given
            self.given = int(given, 16)
            self.given_since.update(dict.fromkeys(_each_bit(fresh), now))


@dataclass(slots=True)
class _Stream:
    """What one thread has asked for ahead of its turn, and by which connection."""

    asked: tuple[_Peer, Want] | None = None
    transport: Transport | None = None


class Receiver:
    """`incident(kind, evidence)` hears of everything that went wrong and was mended: source_lost, source_stalled,
    chunk_damaged, base_damaged, source_refused, transport_failed, arena_full, superseded, resumed, behind. It is called
    on any thread."""

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
        incident: Callable[[str, dict[str, Any]], None] = lambda kind, evidence: None,
        remote: Callable[[str, Callable[[], bool]], Transport] | None = None,
        mooncake: MooncakeEngine | None = None,
        transports: Sequence[str] = ("auto",),
        networks: Sequence[str] = (),
        encryption: Encryption | None = None,
        seed: int | None = None,
    ) -> None:
        """`address` is where others reach `server`. `remote(address, abandoned)` makes a transport (None: plain TCP).
        With `mooncake` its reads are measured beside TCP, and the faster is used; the network must be a trusted one.
        `transports` other than `auto` are the only ones, the preferred first, whatever is faster. Of `forced_codec`
        the first that can be used is. `networks`: of sources, in CIDR notation. `seed` decides the order of chunks."""
        self.arena = arena
        self.server = server
        self.address = address
        self.streams = streams
        self.stall_s = stall_s
        self.give_up_s = give_up_s
        self.link_bytes_s: float | None = None
        self.costs: dict[Codec, Cost] = dict(PRIOR)
        self._codecs = tuple(codecs)
        self._forced: Sequence[Codec] = (
            (forced_codec,) if isinstance(forced_codec, str) else tuple(forced_codec)
        )
        self._token = token
        self._incident = incident
        self._remote = remote or self._tcp
        self._random = random.Random(seed)
        self._mooncake = mooncake
        self._order = () if "auto" in transports else tuple(transports)
        self._networks = tuple(networks)
        self._encryption = encryption
        self._lines = ConnectionPool()
        self.rates: dict[str, float | None] = {}
        """Bytes a second of one stream."""
        if not self._order or "tcp" in self._order:
            self.rates["tcp"] = None
        if mooncake is not None:
            self.rates["mooncake"] = None
        self.broken: dict[str, str] = {}
        """Transports that failed here, and how: they are not tried again."""
        self._is_behind = False
        self._other_bytes: set[str] = set()
        """Folders that have the name of a version and are not it: of another machine, or another job."""

    def close(self) -> None:
        """Ends its connections to sources; those of a fetch that is under way end with it. Safe to call twice."""
        self._lines.close()

    def _tcp(self, address: str, abandoned: Callable[[], bool]) -> Transport:
        return TcpTransport(
            address,
            self._token,
            relay=self.address,
            stall_s=self.stall_s,
            abandoned=abandoned,
            encryption=self._encryption,
            lines=self._lines,
        )

    def _choose_transport(self) -> TransportChoice:
        rates = {name: rate for name, rate in self.rates.items() if name not in self.broken}
        return choose_transport(rates, self.broken, order=self._order)

    def fetch(
        self,
        manifest: WeightManifest,
        sources: Callable[[], Sequence[Source]],
        *,
        serving: int | None = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        """The version, whole and verified. `sources()` is asked again and again: they may come and go. `serving` is
        the version that must not make room. Raises Superseded, WeightsUnreachable, ArenaFull, Unauthorized."""
        began = time.monotonic()
        found = self.arena.versions.get(manifest.version)
        if found is not None and found.manifest == manifest:
            found = self.arena.check(manifest.version)
        if found is not None and found.manifest == manifest:
            return Fetched(found, 0.0, 0, len(manifest.digests), "here", {}, {})
        self._notice_lag(manifest.version)
        try:
            linked = self._link(manifest, sources(), serving)
            if linked is not None:
                return Fetched(
                    linked, time.monotonic() - began, 0, 0, "linked", {}, {}, "it lies on this machine"
                )
            slot = self.arena.stage_manifest(manifest, keep=serving)
        except ArenaFull as error:
            self._incident("arena_full", {"version": manifest.version, **error.details})
            raise
        resumed = len(slot.have)
        if resumed:
            self._incident(
                "resumed", {"version": manifest.version, "chunks": resumed, "of": len(manifest.digests)}
            )
        work = _Fetch(self, manifest, slot, sources, superseded)
        work.run()
        self.arena.commit(manifest)
        return Fetched(
            slot,
            time.monotonic() - began,
            sum(work.by.values()),
            resumed,
            "+".join(sorted(work.ways)) or "here",
            work.by,
            work.codecs,
            "; ".join(part for part in (work.choice.reason, work.transport.reason, work.lacking) if part),
        )

    def _notice_lag(self, wanted: int) -> None:
        """Tell of versions that this one was not here for: once, until it has kept up again. Who joins has none."""
        newest = max(self.arena.versions, default=wanted)
        was_behind, self._is_behind = self._is_behind, wanted - newest > 1
        if self._is_behind and not was_behind:
            self._incident("behind", {"version": wanted, "have": newest})

    def manifest_of(
        self,
        version: int,
        checksum: str,
        sources: Callable[[], Sequence[Source]],
        *,
        superseded: Callable[[], bool] = lambda: False,
    ) -> WeightManifest:
        """What belongs to `checksum`, from whichever source has it: it proves itself. Raises Superseded, and
        WeightsUnreachable after `give_up_s`."""
        until = time.monotonic() + self.give_up_s
        told: set[str] = set()
        while True:
            for source in sources():
                try:
                    found = self._ask_manifest(source, checksum, superseded)
                    if found is not None:
                        return replace(found, version=version)
                except (OSError, GyreError) as error:
                    if superseded():
                        break
                    if str(source) not in told:
                        told.add(str(source))
                        kind = "source_stalled" if isinstance(error, Stalled) else "source_lost"
                        evidence = {"version": version, "source": str(source), "error": str(error)[:500]}
                        self._incident(kind, evidence)
            if superseded():
                raise Superseded(f"version {version} is not wanted any more.")
            if time.monotonic() > until:
                raise WeightsUnreachable(
                    f"nobody has the manifest of version {version} ({checksum}).",
                    hint="Are its sources alive, and can this machine open their addresses?",
                    details={"sources": [str(source) for source in sources()]},
                )
            time.sleep(10 * ASK_AGAIN_S)

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
            self._token,
            stall_s=self.stall_s,
            abandoned=abandoned,
            encryption=self._encryption,
            lines=self._lines,
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
            return is_allowed(address.rpartition(":")[0].strip("[]"), self._networks)
        except ValueError:  # a name: who it stands for is not known before it is dialled
            return False

    def _may_pull(self, source: Source) -> bool:
        """Whether there is a way to a source of another machine at all, and this one may be dialled."""
        return bool(self.rates and source.address) and self._may_dial(source.address)

    def _is_here(self, source: Source) -> bool:
        if self._order and "shm" not in self._order:
            return False
        return bool(source.path) and source.path not in self._other_bytes and Path(source.path).is_dir()

    def _link(self, manifest: WeightManifest, sources: Sequence[Source], serving: int | None) -> Slot | None:
        for source in sources:
            if self._is_here(source):
                try:
                    slot = self.arena.adopt(Path(source.path), manifest, keep=serving)
                except WeightMismatch as error:
                    self._other_bytes.add(source.path)
                    self._incident(
                        "chunk_damaged",
                        {"version": manifest.version, "source": source.path, "error": error.message},
                    )
                    continue
                if slot is not None:
                    return slot
        return None


class _Fetch:
    """One fetch: its threads, and what they share under one lock."""

    def __init__(
        self,
        receiver: Receiver,
        manifest: WeightManifest,
        slot: Slot,
        sources: Callable[[], Sequence[Source]],
        superseded: Callable[[], bool],
    ) -> None:
        self.receiver = receiver
        self.manifest = manifest
        self.slot = slot
        self.by: dict[str, int] = {}
        self.codecs: dict[str, int] = {}
        self.ways: set[str] = set()
        self.choice = CodecChoice("none", "")
        receiver.costs = faded(receiver.costs)
        self.transport = receiver._choose_transport()
        self._superseded = superseded
        self._sources = sources
        self._word = word_of(manifest.tensors)
        self._base = self._find_base()
        self._plain: set[int] = set()
        """Chunks whose delta gave other bytes: they come as they are."""
        self.lacking = ""
        """Who has no Mooncake, and why."""
        self._no_delta = False
        """The sources know no way from our base."""
        self._needed = _bits({chunk.index for chunk in slot.chunks} - slot.have)
        self._link = LinkRate()
        self._link_before = receiver.link_bytes_s
        self._flying = 0
        """Chunks that are asked for now. As `_needed`, bits."""
        self._peers: dict[Source, _Peer] = {}
        self._idle: dict[Source, list[Transport]] = {}
        lock = threading.RLock()
        self._lock = threading.Condition(lock)
        """Told when there may be something to pick."""
        self._over = threading.Condition(lock)
        """Told when all is there, or nothing more will come: the supervisor is not woken by each chunk."""
        self._looked_at = float("-inf")
        self._moved = self._busy_at = time.monotonic()
        """When the last chunk came, and when somebody last said that he sends to others now."""
        self._failure: BaseException | None = None
        self._ended = False
        self._told: set[tuple[str, str]] = set()

    def _find_base(self) -> Slot | None:
        """The newest whole version here whose chunks are at the same places."""
        for _, slot in sorted(self.receiver.arena.versions.items(), reverse=True):
            if slot is not self.slot and are_alike(slot, self.slot) and not slot.revoked:
                return slot
        return None

    # -- the threads -----------------------------------------------------------------------------------

    def run(self) -> None:
        self._look_at_sources()
        threads = [
            threading.Thread(target=self._work, name=f"gyre-fetch-{number}", daemon=True)
            for number in range(max(1, min(self.receiver.streams, self._needed.bit_count())))
        ]
        for thread in threads:
            thread.start()
        try:
            self._supervise()
        finally:
            with self._lock:
                self._ended = True
                self._lock.notify_all()
            for thread in threads:
                thread.join()  # ends within a look at `abandoned`: each wait of a transport is short
            for transports in self._idle.values():
                for transport in transports:
                    transport.close()
        if self._failure is not None:
            raise self._failure

    def _supervise(self) -> None:
        while True:
            with self._lock:
                if self._failure is not None or not self._needed:
                    return
                self._over.wait(0.1)
                now = time.monotonic()
                idle_s, silent_s = now - self._moved, now - max(self._moved, self._busy_at)
                missing = self._needed.bit_count()
            if self._superseded():
                self.receiver._incident(
                    "superseded", {"version": self.manifest.version, "missing_chunks": missing}
                )
                raise Superseded(f"version {self.manifest.version} is not wanted any more.")
            if silent_s > self.receiver.give_up_s or idle_s > QUEUED * self.receiver.give_up_s:
                shared_only = not self.receiver.rates
                raise WeightsUnreachable(
                    f"nothing of version {self.manifest.version} came for {idle_s:.0f} s; {missing} of "
                    f"{len(self.manifest.digests)} chunks are missing."
                    + (" weights.transports has no other way than shared memory." if shared_only else ""),
                    hint="Add tcp to weights.transports, for sources on other machines."
                    if shared_only
                    else "Are its sources alive, and can this machine open their addresses?",
                    details={"sources": [str(source) for source in self._sources()]},
                )
            self._look_at_sources()

    def _abandoned(self) -> bool:
        return self._ended

    def _refused(self, source: Source) -> None:
        why = {
            "error": "it is in none of the networks that weights may come from"
            if self.receiver.rates
            else "it is not on this machine, and weights.transports has no other way than shared memory"
        }
        self._tell("source_refused", _Peer(source), why, once=True)

    def _look_at_sources(self) -> None:
        told = list(self._sources())
        refused: list[Source] = []
        with self._lock:
            for source in told:
                here = self.receiver._is_here(source)
                if source in self._peers or (source.address == self.receiver.address and source.address):
                    continue
                if here or self.receiver._may_pull(source):
                    self._peers[source] = _Peer(source)
                elif source.address:
                    refused.append(source)
            if self._peers and not self.receiver.rates:
                refused = []  # whoever is on this machine too has an address beside its folder
        for source in refused:
            self._refused(source)

    def _hear_of(self, addresses: Sequence[str]) -> None:
        with self._lock:
            known = {peer.address for peer in self._peers}
            for address in addresses:
                fresh = address and address != self.receiver.address and address not in known
                if fresh and self.receiver._may_pull(Source(address)):
                    self._peers[Source(address)] = _Peer(Source(address), have=0)

    def _hear_who_has(self, holders: Mapping[str, str]) -> None:
        """What the origin has sent to others is theirs by now, or soon: they say so if it is not."""
        with self._lock:
            for peer in self._peers.values():
                bits = holders.get(peer.source.address)
                if bits and peer.have is not None:
                    peer.have |= int(bits, 16)

    def _work(self) -> None:
        stream = _Stream()
        try:
            while self._go_on(stream):
                pass
        except Abandoned:
            pass
        except BaseException as error:  # the supervisor raises it
            with self._lock:
                self._failure = self._failure or error
                self._lock.notify_all()
                self._over.notify_all()
        finally:
            if stream.transport is not None:
                stream.transport.close()

    def _go_on(self, stream: _Stream) -> bool:
        """One chunk, or one question, or a short wait. Whether there is more to do."""
        with self._lock:
            if self._ended or self._failure is not None or not self._needed:
                return False
            want: Want | None = None
            if stream.asked is not None:
                (peer, want), stream.asked = stream.asked, None
                index: int | None = want.chunk.index
            else:
                job = self._pick()
                if job is None:
                    self._lock.wait(ASK_AGAIN_S)
                    return True
                peer, index = job
                if index is not None:
                    self._flying |= 1 << index
            peer.busy += 1
        good = False
        try:
            transport, stream.transport = stream.transport or self._transport(peer), None
            good = self._step(peer, index, transport, want, stream)
            if not good:
                transport.close()  # the next time by another way, if there is one
            elif stream.asked is not None:
                stream.transport = transport
            else:
                with self._lock:
                    self._idle.setdefault(peer.source, []).append(transport)
        finally:
            with self._lock:
                peer.busy -= 1
                self._flying &= ~(1 << index) if index is not None else -1
                if not good and stream.asked is not None:
                    self._flying &= ~(1 << stream.asked[1].chunk.index)
                    stream.asked = None
                self._lock.notify_all()
        return True

    def _transport(self, peer: _Peer) -> Transport:
        """One that is open and idle, of whichever stream it was, or a new one."""
        source = peer.source
        with self._lock:
            idle = self._idle.get(source)
            if idle:
                return idle.pop()
        receiver = self.receiver
        if (
            receiver._is_here(source) or not receiver.rates
        ):  # a folder that is gone by now: the transport says so
            return SharedTransport(source.path, abandoned=self._abandoned)
        if receiver._mooncake is not None and self._way(peer) == "mooncake":
            return MooncakeTransport(
                source.address,
                receiver._token,
                receiver._mooncake,
                self.slot,
                relay=receiver.address,
                stall_s=receiver.stall_s,
                abandoned=self._abandoned,
                lines=receiver._lines,
            )
        return receiver._remote(source.address, self._abandoned)

    # -- what next ---------------------------------------------------------------------------------------

    def _pick(self) -> tuple[_Peer, int | None] | None:
        """Some chunk that is needed, of a source that may have it: of one that has a turn free, as far as is known,
        and of those of the least busy. Or, where none has any, a source to ask what it has by now. Under the lock."""
        now = time.monotonic()
        open_ = self._needed & ~self._flying
        if not open_:
            return None
        able = [peer for peer in self._peers.values() if peer.rest_until <= now]
        self.receiver._random.shuffle(able)
        stale = self._stalest(able, now)
        if stale is not None:
            stale.asked_at = now
            return stale, None
        patience_s = self._patience_s()
        for peer in sorted(able, key=lambda peer: (peer.full_until > now, peer.busy, not peer.given)):
            here = self._may_ask(peer, open_ & peer.mask, able, now, patience_s)
            if here:
                return peer, self._rarest(here, peer)
        for peer in sorted(able, key=lambda peer: peer.asked_at):
            told_little = peer.have is not None or peer.given
            if told_little and peer.source.address and not peer.busy and now - peer.asked_at > peer.again_s:
                peer.asked_at = now
                return peer, None
        return None

    def _ask_ahead(self, peer: _Peer, stream: _Stream) -> Want | None:
        """What this stream asks the same source for while a chunk of it is on its way, so that the link does not idle
        between two. Nothing where another source has something, for it may be the better one by then, or where another
        stream would be left without work."""
        with self._lock:
            now = time.monotonic()
            open_ = self._needed & ~self._flying
            if self._ended or peer.rest_until > now or open_.bit_count() < self.receiver.streams:
                return None
            able = [other for other in self._peers.values() if other.rest_until <= now]
            if any(other.mask & open_ for other in able if other is not peer):
                return None
            here = self._may_ask(peer, open_ & peer.mask, able, now, self._patience_s())
            if not here:
                return None
            want = self._want(self.slot.chunks[self._rarest(here, peer)], peer)
            if want.codec != "none" or self._way(peer) != "tcp":
                return None
            self._flying |= 1 << want.chunk.index
            stream.asked = peer, want
            return want

    def _stalest(self, able: Sequence[_Peer], now: float) -> _Peer | None:
        """A relay that has not said for long what it has: it gets chunks from others too, and nobody tells."""
        if now - self._looked_at < LOOK_AROUND_S / LOOKS:
            return None
        relays = [p for p in able if p.have is not None and p.source.address and not p.busy]
        oldest = min(relays, key=lambda peer: peer.asked_at, default=None)
        if oldest is None or now - oldest.asked_at < LOOK_AROUND_S:
            return None
        self._looked_at = now
        return oldest

    def _may_ask(self, peer: _Peer, here: int, able: Sequence[_Peer], now: float, patience_s: float) -> int:
        """Of the chunks `here`, as bits, those to ask this source for: what it has given to others is asked of them as
        long as one has it, and for a while if none does."""
        given = here & peer.given
        others = [other for other in able if other is not peer]
        if not given or not others:
            return here
        waiting = given
        for other in others:
            waiting &= ~(other.mask & ~other.given)
        for index in _each_bit(waiting):
            if now - peer.given_since.get(index, now) > patience_s:
                given &= ~(1 << index)
        return here & ~given

    def _rarest(self, here: int, peer: _Peer) -> int:
        """One of these chunks at random, of those that nobody else is known to have where there are such: they are
        what others will want."""
        common = 0
        for other in self._peers.values():
            if other is not peer and other.have is not None:
                common |= other.have
        bits = list(_each_bit(here & ~common or here))
        return self.receiver._random.choice(bits)

    def _patience_s(self) -> float:
        """Two chunks' time on this link, and a stall."""
        rate = self.receiver.link_bytes_s
        return self.receiver.stall_s + (
            2 * self.receiver.streams * self.manifest.chunk_bytes / rate if rate else 0.0
        )

    def _way(self, peer: _Peer) -> str:
        """Only TCP carries codecs, and every source has it. Where the ways have an order no codec goes before it,
        unless one was asked for: what was chosen for a source that only TCP reaches says nothing of the others."""
        receiver = self.receiver
        encoded = self.choice.codec != "none" and not (receiver._order and not receiver._forced)
        if "tcp" in receiver.rates and (encoded or peer.lacks_memory):
            return "tcp"
        return self.transport.name

    def _want(self, chunk: Chunk, peer: _Peer) -> Want:
        receiver = self.receiver
        able: list[Codec] = [codec for codec in receiver._codecs if codec != "delta"]
        base = self._base
        if base is not None and not base.revoked and "delta" in receiver._codecs and not self._no_delta:
            able.append("delta")
        if "tcp" not in receiver.rates or (
            receiver._order and not receiver._forced and self._way(peer) != "tcp"
        ):
            able = []  # only TCP carries codecs, and another was preferred
        choice = choose_codec(able, receiver.link_bytes_s, receiver.costs)
        forced = next((codec for codec in receiver._forced if codec in (*able, "none")), None)
        if forced is not None:
            choice = CodecChoice(forced, f"{forced} was asked for")
        elif receiver._forced:
            choice = CodecChoice("none", "no base is shared")
        self.choice = choice
        codec: Codec = "none" if chunk.index in self._plain else choice.codec
        with_base = codec == "delta" and base is not None and base.manifest is not None
        return Want(
            self.manifest,
            chunk,
            codec,
            self._word,
            base.manifest.checksum if with_base and base is not None and base.manifest is not None else "",
            base.view(chunk) if with_base and base is not None else None,
            insist=bool(peer.given >> chunk.index & 1),
            wait_s=TURN_WAIT_S if peer.full_until > time.monotonic() else 0.0,
        )

    # -- one chunk -----------------------------------------------------------------------------------------

    def _step(
        self, peer: _Peer, index: int | None, transport: Transport, want: Want | None, stream: _Stream
    ) -> bool:
        """Whether the transport is good for the next. `want` is what was asked for ahead."""
        try:
            if index is None:
                self._ask_what(peer, transport)
                return True
            chunk = self.slot.chunks[index]
            want = want or self._want(chunk, peer)
            if transport.name != "tcp":
                want = replace(want, codec="none", base="", base_view=None)
            with (
                self._base.reading()
                if want.base_view is not None and self._base
                else contextlib.nullcontext()
            ):
                into = self.slot.view(chunk)
                if isinstance(transport, TcpTransport):
                    pulled = transport.pull(want, into, lambda: self._ask_ahead(peer, stream))
                else:
                    pulled = transport.pull(want, into)
            self._take(peer, chunk, want, pulled, transport.name)
            return pulled.status != "gone" and transport.name in (self._way(peer), "shared")
        except Abandoned:
            raise
        except (OSError, GyreError) as error:
            alone = len(self.receiver.rates) == 1
            if isinstance(error, MooncakeMissing) and not alone:
                peer.lacks_memory = True
                self.lacking = f"mooncake not from {peer.source}: {error.message}"
            elif isinstance(error, MooncakeFailed) and not alone:
                self._do_without(transport.name, error)
            elif isinstance(error, WeightMismatch) and want is not None:
                self._damaged(peer, index, str(error), want)
            else:
                kind = "source_stalled" if isinstance(error, Stalled) else "source_lost"
                self._rest(peer, "source_refused" if isinstance(error, Unauthorized) else kind, error, index)
        return False

    def _ask_what(self, peer: _Peer, transport: Transport) -> None:
        if isinstance(transport, TcpTransport | MooncakeTransport):
            before = peer.have
            reply = transport.ask({"op": "have", "checksum": self.manifest.checksum})
            self._learn(peer, reply)
            peer.again_s = ASK_AGAIN_S if peer.have != before else min(10 * ASK_AGAIN_S, 2 * peer.again_s)

    def _learn(self, peer: _Peer, told: Mapping[str, Any]) -> None:
        """Raises ConnectionError where that is nonsense."""
        try:
            with self._lock:
                peer.learn(str(told.get("have", "")), str(told.get("given", "")), time.monotonic())
                if told.get("status") == "gone":
                    peer.have = 0
            self._hear_of([address for address in told.get("peers", ()) if is_address(address)])
            self._hear_who_has(told.get("holders") or {})
        except (ValueError, TypeError, AttributeError) as error:
            raise ConnectionAbortedError(f"no such reply: {error}") from error

    def _take(self, peer: _Peer, chunk: Chunk, want: Want, pulled: Pulled, way: str) -> None:
        now = time.monotonic()
        self._learn(peer, pulled.told)
        if pulled.status != "ok":
            with self._lock:
                if pulled.status == "gone":
                    peer.rest_until = now + FIRST_REST_S
                elif pulled.status == "busy":
                    peer.full_until = now + FULL_FOR_S
                    self._busy_at = now  # it lives, and sends: our turn comes
            return
        if pulled.digest != chunk.digest:
            self._damaged(peer, chunk.index, f"checksum {pulled.digest}, not {chunk.digest}", want)
            return
        self.slot.record(chunk.index)
        server = self.receiver.server
        if server is not None and pulled.encoded is not None:
            base = want.base if pulled.codec == "delta" else ""
            server.encoded.put((self.manifest.checksum, chunk.index, pulled.codec, base), pulled.encoded)
        with self._lock:
            self._needed &= ~(1 << chunk.index)
            self._moved = now
            peer.rest_s, peer.damaged = FIRST_REST_S, 0
            where = str(peer.source)
            self.by[where] = self.by.get(where, 0) + pulled.wire_bytes
            self.codecs[pulled.codec] = self.codecs.get(pulled.codec, 0) + 1
            self.ways.add(way)
            self._measure(chunk, want, pulled, way)
            if not self._needed:
                self._over.notify_all()

    def _measure(self, chunk: Chunk, want: Want, pulled: Pulled, way: str) -> None:
        """Under the lock. The link's rate is of all streams together; of a fetch of deltas that are small nothing is
        learnt of it, and what it was before stands."""
        receiver = self.receiver
        if pulled.seconds > 0 and pulled.wire_bytes >= MEASURED_BYTES:
            if way in receiver.rates:
                known = receiver.rates[way]
                found = pulled.wire_bytes / pulled.seconds
                receiver.rates[way] = found if known is None else 0.7 * known + 0.3 * found
                self._choose_again()
            ended = time.monotonic() - pulled.decode_s
            self._link.add(ended - pulled.seconds, ended, pulled.wire_bytes)
            rate = self._link.bytes_s()
            # Before each stream has sent twice, what is half there of the others would count as time alone.
            if rate is not None and self._link.count >= min(2 * receiver.streams, len(self.slot.chunks)):
                before = self._link_before
                receiver.link_bytes_s = rate if before is None else OLD_RATE * before + (1 - OLD_RATE) * rate
        asked = want.codec
        if asked == "delta" and pulled.told.get("has_base") is False:
            self._no_delta = True  # for this version; nothing was learnt of what deltas cost
        elif asked != "none" and chunk.nbytes >= 1 << 16:  # of less, it is the call that is measured
            ratio = pulled.wire_bytes / chunk.nbytes  # 1 where the source found it not worth it
            before_cost = receiver.costs[asked]
            encode_s = pulled.encode_s / chunk.nbytes or before_cost.encode_s  # 0: it was encoded before
            measured = Cost(ratio, encode_s, pulled.decode_s / chunk.nbytes or before_cost.decode_s)
            receiver.costs[asked] = blend(before_cost, measured, 0.5)

    def _choose_again(self) -> None:
        """Under the lock."""
        self.transport = self.receiver._choose_transport()

    def _do_without(self, name: str, error: BaseException) -> None:
        with self._lock:
            first = name not in self.receiver.broken
            self.receiver.broken[name] = f"{type(error).__name__}: {error}"[:500]
            self._choose_again()
        if first:
            evidence = {"version": self.manifest.version, "transport": name, "error": str(error)[:500]}
            self.receiver._incident("transport_failed", evidence)

    # -- what went wrong -----------------------------------------------------------------------------------

    def _damaged(self, peer: _Peer, index: int | None, why: str, want: Want) -> None:
        kind = "base_damaged" if want.codec == "delta" and index not in self._plain else "chunk_damaged"
        self._tell(kind, peer, {"chunk": index, "error": why}, once=False)
        with self._lock:
            if kind == "base_damaged" and index is not None:
                self._plain.add(index)  # it may be ours that is wrong
                return
            peer.damaged += 1
            now = time.monotonic()
            peer.rest_until = now + (FIRST_REST_S if peer.damaged < 2 else DAMAGED_REST_S)

    def _rest(self, peer: _Peer, kind: str, error: BaseException, index: int | None) -> None:
        with self._lock:
            peer.rest_until = time.monotonic() + peer.rest_s
            peer.rest_s = min(LONGEST_REST_S, peer.rest_s * WORSE_EACH_TIME)
        self._tell(kind, peer, {"chunk": index, "error": f"{type(error).__name__}: {error}"[:500]}, once=True)

    def _tell(self, kind: str, peer: _Peer, evidence: dict[str, Any], *, once: bool) -> None:
        """Of each source each kind once a fetch: one that is away is away for each of its chunks."""
        key = (kind, str(peer.source))
        with self._lock:
            if once and key in self._told:
                return
            self._told.add(key)
        self.receiver._incident(
            kind, {"version": self.manifest.version, "source": str(peer.source), **evidence}
        )


def _bits(indices: Iterable[int]) -> int:
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits


def _each_bit(bits: int) -> Iterator[int]:
    """Highest first."""
    while bits:
        index = bits.bit_length() - 1
        yield index
        bits ^= 1 << index
