"""Peers that are silent: however many they are and whoever names them, a version comes from the source that lives, in
about the time that this source takes by itself."""

from __future__ import annotations

import contextlib
import heapq
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.protocol import HANDSHAKE_S, Stalled, dial
from gyre.weights.transfer.swarm import SCOUTS, Swarm, SwarmPeer
from gyre.weights.version.manifest import WeightManifest
from tests.examples import examples
from tests.waits import GENEROUS_S
from tests.weights.plane import TOKEN, Elsewhere

ROUND_TRIP_S, STALL_S, WAKE_S = 0.01, 5.0, 0.1


@dataclass(frozen=True)
class Silent:
    """A peer that says nothing any more from `since_s` on, nor before if that is 0; or that says what it has, and gives
    nothing (`tells`)."""

    since_s: float
    by_the_manager: bool
    tells: bool = False


KINDS = [
    *(Silent(since_s, by) for since_s in (0.0, 0.3, 2.0) for by in (False, True)),
    Silent(0.0, False, True),
]
NAMED_BY_THE_MANAGER = 16
"""At one time (`gyre.rollouts.plane.updates.SOURCES_TOLD`)."""


class VirtualFetch:
    """A fetch from one source that lives, beside silent ones: the streams and scouts of `Fetch`, in virtual time."""

    def __init__(self, silent: list[Silent], *, streams: int, chunks: int, chunk_s: float, seed: int) -> None:
        self.swarm = Swarm("10.9.9.9:1", Elsewhere(), random.Random(seed))
        self.living = Source("10.0.0.1:1")
        self.silent = {Source(f"10.1.{n >> 8}.{n & 255}:1"): one for n, one in enumerate(silent)}
        self.streams, self.chunk_s = streams, chunk_s
        self.needed, self.flying = (1 << chunks) - 1, 0
        by_manager = [source for source, one in self.silent.items() if one.by_the_manager][
            : NAMED_BY_THE_MANAGER - 1
        ]
        self.swarm.add([*by_manager, self.living])
        self.work: list[tuple[float, int, str, SwarmPeer | None, int]] = []
        self.count = 0

    def took_s(self, limit_s: float) -> float:
        """Seconds until all chunks are there; `limit_s` at most."""
        for worker in ["stream"] * self.streams + ["scout"] * SCOUTS:
            self.at(0.0, worker)
        while self.needed:
            now, _, worker, peer, chunk = heapq.heappop(self.work)
            if now > limit_s:
                break
            if peer is not None:
                self.end(now, worker, peer, chunk)
            self.go_on(now, worker)
        return now

    def at(self, when: float, worker: str, peer: SwarmPeer | None = None, chunk: int = -1) -> None:
        self.count += 1
        heapq.heappush(self.work, (when, self.count, worker, peer, chunk))

    def go_on(self, now: float, worker: str) -> None:
        if worker == "scout":
            asked = self.swarm.look(now)
            if asked is None:
                self.at(now + WAKE_S, worker)
            elif self.is_heard(asked, now):
                self.at(now + ROUND_TRIP_S, worker, asked)
            else:  # a dial, or a question over a connection that was open
                waits_s = asked.dial_s(HANDSHAKE_S) if asked.heard_at < 0 else STALL_S
                self.at(now + waits_s, worker, asked)
            return
        job = self.swarm.pick(self.needed & ~self.flying, now, STALL_S + self.chunk_s, self.streams)
        if job is None:
            self.at(now + WAKE_S, worker)
            return
        peer, chunk = job
        peer.busy += 1
        self.flying |= 1 << chunk
        gives = peer.source == self.living or (
            self.is_heard(peer, now) and not self.silent[peer.source].tells
        )
        self.at(now + (self.chunk_s if gives else STALL_S), worker, peer, chunk)

    def is_heard(self, peer: SwarmPeer, now: float) -> bool:
        one = self.silent.get(peer.source)
        return one is None or one.tells or now < one.since_s

    def end(self, now: float, worker: str, peer: SwarmPeer, chunk: int) -> None:
        lives = self.is_heard(peer, now)
        if chunk >= 0:
            peer.busy -= 1
            self.flying &= ~(1 << chunk)
            lives = lives and (peer.source == self.living or not self.silent[peer.source].tells)
            if lives:
                self.needed &= ~(1 << chunk)
                peer.sent_a_chunk()
        else:
            peer.asking = False
        if not lives:
            peer.rest(now)
            return
        peer.heard(now)
        if peer.source == self.living:
            others = [source.address for source in self.silent]
            named = random.Random(now).sample(others, min(64, len(others)))
            self.swarm.add_addresses(named)
            self.swarm.add_holders(dict.fromkeys(named, format(self.needed, "x")))


@settings(max_examples=examples(200), deadline=None)
@given(
    silent=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40)), max_size=6),
    streams=st.integers(1, 4),
    chunks=st.integers(1, 20),
    chunk_s=st.sampled_from([0.05, 0.5]),
    seed=st.integers(0, 2**32),
)
def test_any_number_of_silent_peers_costs_each_stream_one_wait(silent, streams, chunks, chunk_s, seed):
    """One stream alone has the source that lives after that, whatever the others try."""
    many = [kind for kind, count in silent for _ in range(count)]
    fetch = VirtualFetch(many, streams=streams, chunks=chunks, chunk_s=chunk_s, seed=seed)
    # One wait for those who fell silent, one for the last chunk.
    limit_s = chunks * chunk_s + 2 * STALL_S + 3.0
    assert fetch.took_s(limit_s + 1.0) <= limit_s


@contextlib.contextmanager
def holes(count: int) -> Iterator[list[str]]:
    """Addresses of listeners whose queue is full, some of IPv6: the kernel answers no SYN any more."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for number in range(count):
            family, host = (socket.AF_INET6, "::1") if number % 2 else (socket.AF_INET, "127.0.0.1")
            listener = stack.enter_context(socket.socket(family))
            listener.bind((host, 0))
            listener.listen(0)
            for _ in range(3):
                caller = stack.enter_context(socket.socket(family))
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    caller.connect(listener.getsockname()[:2])
            port = listener.getsockname()[1]
            addresses.append(f"[::1]:{port}" if number % 2 else f"127.0.0.1:{port}")
        yield addresses


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("by", ["publisher", "relay", "manager"])
def test_machines_without_power_hold_up_no_load(peer, by, streams):
    """They asked a moment ago, or are said to have every chunk, or the manager still names them."""
    origin, relay, receiver = peer(), peer(), peer(streams=streams, stall_s=5.0)
    manifest = origin.publish(1, layers=16)
    relay.fetch(manifest, origin)
    with holes(12) as dead:
        honest = relay.server._told
        sources = [origin.source, relay.source]
        if by == "publisher":
            origin.server._relays.setdefault(manifest.checksum, {}).update(
                dict.fromkeys(dead, time.monotonic())
            )
        elif by == "manager":
            sources = [*map(Source, dead), *sources]
        else:
            every = format((1 << len(manifest.digests)) - 1, "x")
            relay.server._told = lambda files, caller: {
                **honest(files, caller),
                "peers": dead,
                "holders": dict.fromkeys(dead, every),
            }
        began = time.monotonic()
        found = receiver.receiver.manifest_of(1, manifest.checksum, lambda: sources)
        receiver.receiver.fetch(found, lambda: sources)
        assert time.monotonic() - began < HANDSHAKE_S  # of one dial of a dead machine


def test_a_manifest_comes_from_who_lives_behind_many_that_do_not(peer):
    origin, receiver = peer(), peer(stall_s=1.0, give_up_s=GENEROUS_S)
    manifest = origin.publish(1)
    with holes(20) as dead:
        sources = [*map(Source, dead), origin.source]
        found = receiver.receiver.manifest_of(1, manifest.checksum, lambda: sources)
    assert isinstance(found, WeightManifest)
    assert found == manifest


def test_who_drips_a_greeting_is_waited_for_no_longer_than_who_says_nothing():
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        link, _ = listener.accept()
        with link, contextlib.suppress(OSError):
            while not over.wait(0.05):
                link.send(b"g")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    try:
        with pytest.raises(Stalled):
            dial(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, stall_s=0.5)
        assert time.monotonic() - began < 2.0
    finally:
        over.set()
        dripping.join()
        listener.close()


def test_a_chunk_that_drips_is_asked_of_who_gives(peer):
    """The relay sends a byte at a time, which is progress: the chunk is taken from the publisher."""
    origin, relay = peer(), peer()
    receiver = peer(streams=2, stall_s=0.3, forced_codec="none")
    manifest = origin.publish(1)
    relay.fetch(manifest, origin)
    over = threading.Event()
    slow = relay.server._send_chunk

    def dripping(connection, request, files, caller_relay, caller):
        chunk = files.chunks[request["index"]]
        connection.send_json({"status": "ok", "codec": "none", "nbytes": chunk.nbytes})
        view = memoryview(files.view(chunk))
        for at in range(chunk.nbytes):
            if over.wait(0.05):
                raise ConnectionResetError("the test is over")
            connection.send(view[at : at + 1])

    relay.server._send_chunk = dripping
    try:
        began = time.monotonic()
        fetched = receiver.fetch(manifest, origin, relay)
        assert fetched.by.keys() == {str(origin.source)}
        assert time.monotonic() - began < GENEROUS_S
    finally:
        over.set()
        relay.server._send_chunk = slow
