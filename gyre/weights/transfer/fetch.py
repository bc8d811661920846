"""One fetch of a version: threads that ask peers for chunks, verify what comes, and record it. The streams pull chunks;
the scouts dial peers, and ask what they have.

Invariants:
- *bytes before record*: a chunk is recorded after its checksum was right, so the successor of a killed process fetches
  only the missing chunks;
- *no mixture*: all threads that write into the version's files have ended before `run` returns or raises;
- *nobody is waited for alone*: a peer that dies, stalls or sends other bytes rests, and its chunk is asked of another.
  So is a chunk that comes much slower than others do, if another peer has it;
- *no stream dials who may be dead*: scouts do.
  The fetch fails only when nothing came from anybody for `give_up_s`, or for `QUEUED` times as long where peers say
  that their upload slots are taken.

Which chunk is asked of whom is decided in `gyre.weights.transfer.swarm`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gyre.errors import GyreError, Unauthorized
from gyre.weights.codecs.adaptive import CodecChoice, Cost, blend, choose_codec, faded
from gyre.weights.codecs.encoding import Codec
from gyre.weights.codecs.link_rate import MEASURED_BYTES, LinkRate
from gyre.weights.transfer.address import may_pass_on
from gyre.weights.transfer.chunk_transports import (
    Pulled,
    SharedTransport,
    Source,
    TcpTransport,
    Transport,
    Want,
)
from gyre.weights.transfer.mooncake import MooncakeFailed, MooncakeMissing, MooncakeTransport
from gyre.weights.transfer.protocol import HANDSHAKE_S, Abandoned, Stalled
from gyre.weights.transfer.server import PEERS_TOLD, are_alike, word_of
from gyre.weights.transfer.swarm import (
    ASK_AGAIN_S,
    FIRST_REST_S,
    FULL_FOR_S,
    SCOUTS,
    Swarm,
    SwarmPeer,
    bits_of,
    check_bits,
)
from gyre.weights.version.arena import VersionFiles
from gyre.weights.version.manifest import Chunk, WeightManifest, WeightMismatch

if TYPE_CHECKING:
    from gyre.weights.transfer.receiver import Receiver

SLOT_WAIT_S = 0.25
"""How long a request waits for an upload slot if no other peer is known to have a free one."""

QUEUED = 3.0
"""Times `give_up_s` that a fetch waits while peers say that their upload slots are taken: slots lapse, so one comes."""

MOST_TOLD = 128
"""Most incidents of one fetch. A peer may name hundreds that are not there."""

OLD_RATE = 0.3
"""Weight of the link's rate in earlier fetches against its rate in this one."""


class WeightsUnreachable(GyreError):
    """No source gave anything for too long."""

    code = "weights.unreachable"


class Superseded(GyreError):
    """A newer version is wanted, so this one is not committed."""

    code = "weights.superseded"


@dataclass(slots=True)
class _Stream:
    """The chunk that one thread has asked for ahead, and on which connection."""

    asked: tuple[SwarmPeer, Want] | None = None
    transport: Transport | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A chunk on its way from a peer."""

    peer: SwarmPeer
    transport: TcpTransport
    since: float


class Fetch:
    """One fetch: its threads, and what they share under one lock."""

    def __init__(
        self,
        receiver: Receiver,
        manifest: WeightManifest,
        files: VersionFiles,
        sources: Callable[[], Sequence[Source]],
        superseded: Callable[[], bool],
    ) -> None:
        self.receiver = receiver
        self.manifest = manifest
        self.files = files
        self.by: dict[str, int] = {}
        self.codecs: dict[str, int] = {}
        self.ways: set[str] = set()
        self.choice = CodecChoice("none", "")
        receiver.costs = faded(receiver.costs)
        self.transport = receiver.choose_transport()
        self._superseded = superseded
        self._sources = sources
        self._word = word_of(manifest.tensors)
        self._base = self._find_base()
        self._plain: set[int] = set()
        """Chunks whose delta gave other bytes: they are fetched raw."""
        self.lacking = ""
        """The source without Mooncake, and why."""
        self._no_delta = False
        """Whether the sources have no delta from our base."""
        self._needed = bits_of({chunk.index for chunk in files.chunks} - files.have)
        self._link = LinkRate()
        self._link_before = receiver.link_bytes_s
        self._flying = 0
        """Chunks that are asked for now, as bits."""
        self._flights: dict[int, _Flight] = {}
        self._cuts: dict[int, int] = {}
        """How often each chunk was cut off because it came too slowly."""
        self._scouts = 0
        self._swarm = Swarm(receiver.address, receiver, receiver.random)
        self._idle: dict[Source, list[Transport]] = {}
        lock = threading.RLock()
        self._lock = threading.Condition(lock)
        """Notified when there may be something to pick."""
        self._over = threading.Condition(lock)
        """Notified when all chunks are there or nothing more will come, so that not each chunk wakes the supervisor."""
        self._moved = self._busy_at = time.monotonic()
        """When the last chunk came, and when a peer last said that its upload slots are taken."""
        self._failure: BaseException | None = None
        self._ended = False
        self._told: set[tuple[str, str]] = set()

    def _find_base(self) -> VersionFiles | None:
        """The newest whole version here whose chunks are at the same places."""
        for _, files in sorted(self.receiver.arena.versions.items(), reverse=True):
            if files is not self.files and are_alike(files, self.files) and not files.revoked:
                return files
        return None

    # -- the threads -----------------------------------------------------------------------------------

    def run(self) -> None:
        self._look_at_sources()
        self._send_scouts()
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
            with self._lock:
                idle, self._idle = self._idle, {}
            for transports in idle.values():
                for transport in transports:
                    transport.close()
        if self._failure is not None:
            raise self._failure

    def _send_scouts(self) -> None:
        """One for each peer, up to `SCOUTS`. They write nothing, so nobody waits for their end."""
        with self._lock:
            missing = min(SCOUTS, len(self._swarm.peers)) - self._scouts
            self._scouts += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._scout, name="gyre-scout", daemon=True).start()

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
                self.receiver.incident(
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
            self._send_scouts()
            self._cut_off(now)

    def _cut_off(self, now: float) -> None:
        """End the transfer of chunks that come so slowly that another peer is the better source. A chunk has twice as
        long each time, for the link itself may be slow."""
        with self._lock:
            for index, flight in self._flights.items():
                patience_s = self._patience_s() * 2.0 ** (1 + self._cuts.get(index, 0))
                if now - flight.since > patience_s and self._swarm.has_other(index, flight.peer, now):
                    self._cuts[index] = self._cuts.get(index, 0) + 1
                    flight.transport.cut_off = True

    def _abandoned(self) -> bool:
        return self._ended

    def _refused(self, source: Source) -> None:
        why = {
            "error": "it is in none of the networks that weights may come from"
            if self.receiver.rates
            else "it is not on this machine, and weights.transports has no other way than shared memory"
        }
        self._tell("source_refused", SwarmPeer(source), why, once=True)

    def _look_at_sources(self) -> None:
        receiver = self.receiver
        told = list(self._sources())
        with self._lock:
            refused = self._swarm.add(told)
            if self._swarm.peers and not receiver.rates:
                refused = []  # whoever is on this machine too has an address beside its folder
        for source in refused:
            self._refused(source)

    def _work(self) -> None:
        stream = _Stream()
        self._run_until_over(lambda: self._go_on(stream))
        if stream.transport is not None:
            stream.transport.close()

    def _scout(self) -> None:
        self._run_until_over(self._look_around)

    def _run_until_over(self, go_on: Callable[[], bool]) -> None:
        try:
            while go_on():
                pass
        except Abandoned:
            pass
        except BaseException as error:  # the supervisor raises it
            with self._lock:
                self._failure = self._failure or error
                self._lock.notify_all()
                self._over.notify_all()

    def _look_around(self) -> bool:
        """Ask one peer what it has, or wait briefly; returns whether there is more to do."""
        with self._lock:
            if self._ended or self._failure is not None or not self._needed:
                return False
            peer = self._swarm.look(time.monotonic())
            if peer is None:
                self._lock.wait(ASK_AGAIN_S)
                return True
        within_s = peer.dial_s(HANDSHAKE_S)
        try:
            transport = self._transport(peer)
            if isinstance(transport, TcpTransport | MooncakeTransport):
                transport.dial_s = within_s
            self._ask_what(peer, transport)
        except Abandoned:
            raise
        except Exception as error:  # whatever a peer's words lead to is that peer's failure
            early = within_s < HANDSHAKE_S and isinstance(error, TimeoutError | Stalled)
            self._failed(peer, error, None, tell=not early)
        else:
            self._keep(peer, transport)
        finally:
            with self._lock:
                peer.asking = False
                self._lock.notify_all()
        return True

    def _keep(self, peer: SwarmPeer, transport: Transport) -> None:
        """For the next that asks this peer."""
        with self._lock:
            if not self._ended:
                self._idle.setdefault(peer.source, []).append(transport)
                return
        transport.close()

    def _go_on(self, stream: _Stream) -> bool:
        """Fetch one chunk or wait briefly; returns whether there is more to do."""
        with self._lock:
            if self._ended or self._failure is not None or not self._needed:
                return False
            want: Want | None = None
            if stream.asked is not None:
                (peer, want), stream.asked = stream.asked, None
                index = want.chunk.index
            else:
                job = self._swarm.pick(
                    self._needed & ~self._flying, time.monotonic(), self._patience_s(), self.receiver.streams
                )
                if job is None:
                    self._lock.wait(ASK_AGAIN_S)
                    return True
                peer, index = job
                if peer.is_here and not self._is_here(peer.source):
                    peer.is_here = False  # its folder is gone: a scout dials it
                    return True
                self._flying |= 1 << index
            peer.busy += 1
        good = False
        try:
            try:
                transport, stream.transport = stream.transport or self._transport(peer), None
            except (OSError, ValueError, GyreError) as error:
                self._rest(peer, "source_lost", error, index)
                return True
            good = self._step(peer, index, transport, want, stream)
            if not good:
                transport.close()  # the next attempt takes another transport, if there is one
            elif stream.asked is not None:
                stream.transport = transport
            else:
                self._keep(peer, transport)
        finally:
            with self._lock:
                peer.busy -= 1
                self._flying &= ~(1 << index)
                self._flights.pop(index, None)
                if not good and stream.asked is not None:
                    self._flying &= ~(1 << stream.asked[1].chunk.index)
                    stream.asked = None
                self._lock.notify_all()
        return True

    def _is_here(self, source: Source) -> bool:
        return self.receiver.is_here(source) or not self.receiver.rates

    def _transport(self, peer: SwarmPeer) -> Transport:
        """An idle open transport to the peer, of any stream, or a new one."""
        source = peer.source
        with self._lock:
            idle = self._idle.get(source)
            if idle:
                return idle.pop()
        receiver = self.receiver
        if self._is_here(source):  # a folder that is gone by now: the transport says so
            return SharedTransport(source.path, abandoned=self._abandoned)
        if receiver.mooncake is not None and self._way(peer) == "mooncake":
            return MooncakeTransport(
                source.address,
                receiver.token,
                receiver.mooncake,
                self.files,
                relay=receiver.address,
                stall_s=receiver.stall_s,
                abandoned=self._abandoned,
                pool=receiver.connections,
            )
        return receiver.remote(source.address, self._abandoned)

    # -- what next ---------------------------------------------------------------------------------------

    def _ask_ahead(self, peer: SwarmPeer, stream: _Stream) -> Want | None:
        """What this stream asks the same peer for while a chunk is on its way; None if there is nothing, or if another
        stream would be left without work."""
        with self._lock:
            open_ = self._needed & ~self._flying
            if self._ended or open_.bit_count() < self.receiver.streams:
                return None
            index = self._swarm.pick_ahead(peer, open_, time.monotonic(), self._patience_s())
            if index is None:
                return None
            want = self._want(self.files.chunks[index], peer)
            if want.codec != "none" or self._way(peer) != "tcp":
                return None
            self._flying |= 1 << index
            stream.asked = peer, want
            return want

    def _patience_s(self) -> float:
        """The time of two chunks on this link, and a stall."""
        rate = self.receiver.link_bytes_s
        return self.receiver.stall_s + (
            2 * self.receiver.streams * self.manifest.chunk_bytes / rate if rate else 0.0
        )

    def _way(self, peer: SwarmPeer) -> str:
        """The transport for a peer. A codec needs TCP, which every source has. If the job orders the transports, only a
        codec that the job asks for overrides the order: the codec chosen for a source that only TCP reaches says
        nothing about the others."""
        receiver = self.receiver
        encoded = self.choice.codec != "none" and not (receiver.order and not receiver.forced)
        if "tcp" in receiver.rates and (encoded or peer.lacks_memory):
            return "tcp"
        return self.transport.name

    def _want(self, chunk: Chunk, peer: SwarmPeer) -> Want:
        receiver = self.receiver
        able: list[Codec] = [codec for codec in receiver.codecs if codec != "delta"]
        base = self._base
        if base is not None and not base.revoked and "delta" in receiver.codecs and not self._no_delta:
            able.append("delta")
        if "tcp" not in receiver.rates or (
            receiver.order and not receiver.forced and self._way(peer) != "tcp"
        ):
            able = []  # only TCP carries codecs, and another was preferred
        choice = choose_codec(able, receiver.link_bytes_s, receiver.costs)
        forced = next((codec for codec in receiver.forced if codec in (*able, "none")), None)
        if forced is not None:
            choice = CodecChoice(forced, f"{forced} was asked for")
        elif receiver.forced:
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
            insist=bool(peer.super_seeded >> chunk.index & 1),
            wait_s=SLOT_WAIT_S if peer.full_until > time.monotonic() else 0.0,
        )

    # -- one chunk -----------------------------------------------------------------------------------------

    def _step(
        self, peer: SwarmPeer, index: int, transport: Transport, want: Want | None, stream: _Stream
    ) -> bool:
        """Whether the transport is good for the next. `want` is what was asked for ahead."""
        try:
            chunk = self.files.chunks[index]
            want = want or self._want(chunk, peer)
            if transport.name != "tcp":
                want = replace(want, codec="none", base="", base_view=None)
            with (
                self._base.reading()
                if want.base_view is not None and self._base
                else contextlib.nullcontext()
            ):
                into = self.files.view(chunk)
                if isinstance(transport, TcpTransport):
                    with self._lock:
                        self._flights[index] = _Flight(peer, transport, time.monotonic())
                    pulled = transport.pull(want, into, lambda: self._ask_ahead(peer, stream))
                else:
                    pulled = transport.pull(want, into)
            self._take(peer, chunk, want, pulled, transport.name)
            return pulled.status != "gone" and transport.name in (self._way(peer), "shared")
        except Exception as error:  # whatever a source's words lead to is that source's failure
            if isinstance(error, Abandoned) and self._ended:
                raise
            alone = len(self.receiver.rates) == 1
            if isinstance(error, MooncakeMissing) and not alone:
                peer.lacks_memory = True
                self.lacking = f"mooncake not from {peer.source}: {error.message}"
            elif isinstance(error, MooncakeFailed) and not alone:
                self._do_without(transport.name, error)
            elif isinstance(error, WeightMismatch) and want is not None:
                self._damaged(peer, index, str(error), want)
            else:
                self._failed(peer, error, index)
        return False

    def _ask_what(self, peer: SwarmPeer, transport: Transport) -> None:
        if isinstance(transport, TcpTransport | MooncakeTransport):
            before = peer.bitfield
            reply = transport.ask({"op": "have", "checksum": self.manifest.checksum})
            self._learn(peer, reply)
            with self._lock:
                peer.heard(time.monotonic())
            peer.again_s = ASK_AGAIN_S if peer.bitfield != before else min(10 * ASK_AGAIN_S, 2 * peer.again_s)

    def _learn(self, peer: SwarmPeer, told: Mapping[str, Any]) -> None:
        """Raises ConnectionError where that is nonsense."""
        try:
            have, given = str(told.get("have", "")), str(told.get("given", ""))
            holders = told.get("holders") or {}
            teller = peer.source.address.rpartition(":")[0]
            peers = [address for address in told.get("peers", ()) if may_pass_on(address, teller)]
            bits = ("" if have == "all" else have, given, *holders.values())
            check_bits(bits, len(self.files.chunks))
            with self._lock:
                peer.learn(have, given, time.monotonic())
                if told.get("status") == "gone":
                    peer.bitfield = 0
                self._swarm.add_addresses(peers[:PEERS_TOLD])
                self._swarm.add_holders(holders)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConnectionAbortedError(f"no such reply: {error}") from error

    def _take(self, peer: SwarmPeer, chunk: Chunk, want: Want, pulled: Pulled, way: str) -> None:
        now = time.monotonic()
        self._learn(peer, pulled.told)
        with self._lock:
            peer.heard(now)
        if pulled.status != "ok":
            with self._lock:
                if pulled.status == "gone":
                    peer.rest_until = now + FIRST_REST_S
                elif pulled.status == "busy":
                    peer.full_until = now + FULL_FOR_S
                    self._busy_at = now  # it lives and sends to others: a slot gets free
            return
        if pulled.digest != chunk.digest:
            self._damaged(peer, chunk.index, f"checksum {pulled.digest}, not {chunk.digest}", want)
            return
        self.files.record(chunk.index)
        server = self.receiver.server
        if server is not None and pulled.encoded is not None:
            base = want.base if pulled.codec == "delta" else ""
            server.encoded.put((self.manifest.checksum, chunk.index, pulled.codec, base), pulled.encoded)
        with self._lock:
            self._needed &= ~(1 << chunk.index)
            self._moved = now
            peer.sent_a_chunk()
            where = str(peer.source)
            self.by[where] = self.by.get(where, 0) + pulled.wire_bytes
            self.codecs[pulled.codec] = self.codecs.get(pulled.codec, 0) + 1
            self.ways.add(way)
            self._measure(chunk, want, pulled, way)
            if not self._needed:
                self._over.notify_all()

    def _measure(self, chunk: Chunk, want: Want, pulled: Pulled, way: str) -> None:
        """Measure the link and the codec; call under the lock. The link's rate is that of all streams together. Small
        deltas say nothing about the link, so its earlier rate stands."""
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
            # Before each stream has had two chunks, unfinished chunks would add time and no bytes.
            if rate is not None and self._link.count >= min(2 * receiver.streams, len(self.files.chunks)):
                before = self._link_before
                receiver.link_bytes_s = rate if before is None else OLD_RATE * before + (1 - OLD_RATE) * rate
        asked = want.codec
        if asked == "delta" and pulled.told.get("has_base") is False:
            self._no_delta = True  # for this version; the cost of deltas stays unknown
        elif asked != "none" and chunk.nbytes >= 1 << 16:  # a smaller chunk would measure the call
            ratio = pulled.wire_bytes / chunk.nbytes  # 1 if the source found encoding not worth it
            before_cost = receiver.costs[asked]
            encode_s = pulled.encode_s / chunk.nbytes or before_cost.encode_s  # 0: it was encoded before
            measured = Cost(ratio, encode_s, pulled.decode_s / chunk.nbytes or before_cost.decode_s)
            receiver.costs[asked] = blend(before_cost, measured, 0.5)

    def _choose_again(self) -> None:
        """Under the lock."""
        self.transport = self.receiver.choose_transport()

    def _do_without(self, name: str, error: BaseException) -> None:
        with self._lock:
            first = name not in self.receiver.broken
            self.receiver.broken[name] = f"{type(error).__name__}: {error}"[:500]
            self._choose_again()
        if first:
            evidence = {"version": self.manifest.version, "transport": name, "error": str(error)[:500]}
            self.receiver.incident("transport_failed", evidence)

    # -- what went wrong -----------------------------------------------------------------------------------

    def _damaged(self, peer: SwarmPeer, index: int | None, why: str, want: Want) -> None:
        kind = "base_damaged" if want.codec == "delta" and index not in self._plain else "chunk_damaged"
        self._tell(kind, peer, {"chunk": index, "error": why}, once=False)
        with self._lock:
            if kind == "base_damaged" and index is not None:
                self._plain.add(index)  # our base may be the wrong one
                return
            peer.sent_wrong_bytes(time.monotonic())

    def _failed(self, peer: SwarmPeer, error: BaseException, index: int | None, *, tell: bool = True) -> None:
        kind = "source_stalled" if isinstance(error, Stalled | Abandoned) else "source_lost"
        self._rest(
            peer, "source_refused" if isinstance(error, Unauthorized) else kind, error, index, tell=tell
        )

    def _rest(
        self, peer: SwarmPeer, kind: str, error: BaseException, index: int | None, *, tell: bool = True
    ) -> None:
        with self._lock:
            peer.rest(time.monotonic())
        if not tell:
            return
        self._tell(kind, peer, {"chunk": index, "error": f"{type(error).__name__}: {error}"[:500]}, once=True)

    def _tell(self, kind: str, peer: SwarmPeer, evidence: dict[str, Any], *, once: bool) -> None:
        """Tell an incident; with `once`, each kind once per source and fetch, because a lost source fails every
        chunk."""
        key = (kind, str(peer.source))
        with self._lock:
            if (once and key in self._told) or len(self._told) >= MOST_TOLD:
                return
            self._told.add(key)
        self.receiver.incident(
            kind, {"version": self.manifest.version, "source": str(peer.source), **evidence}
        )
