"""Whatever dies, stalls or lies in mid-transfer: what is committed is whole, and there is an incident."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.fetch import Superseded, WeightsUnreachable
from gyre.weights.version.arena import STAGING, Arena, ArenaFull
from gyre.weights.version.manifest import FileSpec, WeightManifest
from tests.machine import small_disk
from tests.weights.plane import content, until
from tests.weights.process import Child, held, slow

pytestmark = pytest.mark.landing

SOME = 800_000
"""Bytes of the megabyte, seventeen chunks, that a link carries before it stands: eight chunks at least, and not all."""


@pytest.fixture
def child():
    made: list[Child] = []

    def start(*words: object) -> Child:
        made.append(Child(*words))
        return made[-1]

    yield start
    for one in made:
        one.close()


def publisher(child, folder, version=1, held_after=0):
    """A publisher in its own process, its source and its manifest. Held, its link stands until there is a file
    `folder.go`."""
    process = child("publish", folder, version, held_after)
    port, text = process.line().split(" ", 1)
    return process, Source(f"127.0.0.1:{port}"), WeightManifest.from_dict(json.loads(text))


class Fetching:
    """A fetch on a thread, from sources that a test adds to."""

    def __init__(self, peer, manifest, *sources: Source, **options) -> None:
        self.peer, self.sources = peer, list(sources)
        self._pool = ThreadPoolExecutor(1)
        self.future = self._pool.submit(peer.receiver.fetch, manifest, lambda: list(self.sources), **options)
        self._count = len(manifest.digests)

    def until_part(self, part: float) -> None:
        def there() -> bool:
            files = self.peer.arena.staging
            return self.future.done() or (files is not None and len(files.have) >= part * self._count)

        until(there)

    def result(self):
        return self.future.result(60)


# -- the sender ----------------------------------------------------------------------------------------


def test_the_sender_is_killed_and_another_goes_on(peer, child, folder):
    process, source, manifest = publisher(child, folder / "a", held_after=SOME)
    receiver = peer(stall_s=30.0)
    fetching = Fetching(receiver, manifest, source)
    fetching.until_part(0.25)
    process.kill()
    had = len(receiver.arena.staging.have)
    _, again, same = publisher(child, folder / "b")
    assert same == manifest
    fetching.sources.append(again)
    fetched = fetching.result()
    assert content(fetched.files) == content(Arena(folder / "b").versions[1])
    sizes = sorted(chunk.nbytes for chunk in fetched.files.chunks)
    assert fetched.by[str(again)] <= sum(sizes[had - len(sizes) :])
    assert "source_lost" in receiver.kinds()


@pytest.mark.slow
def test_a_sender_that_is_stopped_is_left_for_another(peer, child, folder):
    process, source, manifest = publisher(child, folder / "a", held_after=SOME)
    receiver, other = peer(stall_s=1.0), peer()
    other.publish(1)
    fetching = Fetching(receiver, manifest, source)
    fetching.until_part(0.25)
    process.process.send_signal(signal.SIGSTOP)
    fetching.sources.append(other.source)
    assert content(fetching.result().files) == content(other.arena.versions[1])
    assert "source_stalled" in receiver.kinds()


@pytest.mark.slow
def test_what_a_stopped_sender_sends_afterwards_lands_nowhere(peer, child, folder):
    """Version 1 is in the sockets while version 2 is fetched into the same pages."""
    process, source, manifest = publisher(child, folder / "a", held_after=SOME)
    receiver, other = peer(stall_s=30.0), peer()
    newer = other.publish(2)
    wanted = threading.Event()
    fetching = Fetching(receiver, manifest, source, superseded=wanted.is_set)
    fetching.until_part(0.25)
    process.process.send_signal(signal.SIGSTOP)
    wanted.set()
    with pytest.raises(Superseded):
        fetching.result()
    (folder / "a.go").touch()
    process.process.send_signal(signal.SIGCONT)
    fetched = receiver.fetch(newer, other)
    assert content(fetched.files) == content(other.arena.versions[2])
    assert set(receiver.arena.versions) == {2}


def test_without_any_source_a_fetch_ends(peer, child, folder):
    process, source, manifest = publisher(child, folder / "a", held_after=SOME)
    receiver = peer(give_up_s=1.0)
    fetching = Fetching(receiver, manifest, source)
    fetching.until_part(0.1)
    process.kill()
    with pytest.raises(WeightsUnreachable, match="nothing of version 1 came"):
        fetching.result()
    assert receiver.arena.versions == {}


# -- the receiver, and relays -----------------------------------------------------------------------------


def test_a_receiver_that_was_killed_goes_on_where_it_was(peer, child, folder):
    go = threading.Event()
    origin = peer(pace=held(SOME, go.is_set))
    manifest = origin.publish(1)
    (folder / "manifest").write_text(json.dumps(manifest.to_dict()))
    first = child("receive", folder / "r", folder / "manifest", "alone", origin.address)
    first.line()
    journal = folder / "r" / STAGING / ".journal"
    until(lambda: journal.exists() and journal.read_bytes().count(1) >= len(manifest.digests) // 2)
    first.kill()
    there = journal.read_bytes().count(1)
    go.set()
    second = peer("r")
    fetched = second.fetch(manifest, origin)
    assert fetched.resumed == there
    missing = [chunk.nbytes for chunk in fetched.files.chunks]
    assert fetched.wire_bytes <= sum(sorted(missing)[-(len(missing) - there) :])
    assert content(fetched.files) == content(origin.arena.versions[1])
    assert second.kinds() == {"resumed"}


def test_a_journal_is_not_believed(peer):
    origin, receiver = peer(), peer("r")
    manifest = origin.publish(1)
    files = receiver.arena.stage_manifest(manifest, keep=None)
    for chunk in files.chunks[:4]:
        files.record(chunk.index)  # their bytes are not there
    files.view(files.chunks[5])[:] = origin.arena.versions[1].view(files.chunks[5])
    files.record(5)
    again = peer("r")
    fetched = again.fetch(manifest, origin)
    assert fetched.resumed == 1
    assert content(fetched.files) == content(origin.arena.versions[1])


def test_a_relay_is_killed_and_the_others_do_without(peer, child, folder):
    origin = peer(pace=slow(4_000_000))
    manifest = origin.publish(1)
    (folder / "manifest").write_text(json.dumps(manifest.to_dict()))
    relay = child("receive", folder / "relay", folder / "manifest", "relay", origin.address)
    relay.line()
    journal = folder / "relay" / STAGING / ".journal"
    until(lambda: journal.exists() and journal.read_bytes().count(1) >= 3)
    receivers = [peer(seed=1, stall_s=1.0), peer(seed=2, stall_s=1.0)]
    fetching = [Fetching(one, manifest, origin.source) for one in receivers]
    fetching[0].until_part(0.1)
    relay.kill()
    for one in fetching:
        assert content(one.result().files) == content(origin.arena.versions[1])


# -- bytes that are not right --------------------------------------------------------------------------------


def flip(files, index=3):
    view = files.view(files.chunks[index])
    view[100] ^= 1


def test_a_flipped_bit_is_noticed_and_fetched_again_elsewhere(peer):
    bad, good = peer(), peer()
    manifest = bad.publish(1)
    good.publish(1)
    flip(bad.arena.versions[1])
    receiver = peer(streams=1)
    fetching = Fetching(receiver, manifest, bad.source)
    until(lambda: "chunk_damaged" in receiver.kinds())
    fetching.sources.append(good.source)
    assert content(fetching.result().files) == content(good.arena.versions[1])
    assert next(told["chunk"] for kind, told in receiver.incidents if kind == "chunk_damaged") == 3


def test_a_flipped_bit_that_everybody_has_is_never_served(peer):
    bad, receiver = peer(), peer(give_up_s=1.0)
    manifest = bad.publish(1)
    flip(bad.arena.versions[1])
    with pytest.raises(WeightsUnreachable):
        receiver.fetch(manifest, bad)
    assert receiver.arena.versions == {}
    assert list(receiver.arena.root.glob("v*")) == []


def test_a_flipped_bit_in_the_base_of_a_delta(peer):
    origin, receiver = peer(), peer(forced_codec="delta")
    receiver.fetch(origin.publish(1, changed=0.01), origin)
    flip(receiver.arena.versions[1])
    fetched = receiver.fetch(origin.publish(2, changed=0.01), origin)
    assert content(fetched.files) == content(origin.arena.versions[2])
    assert "base_damaged" in receiver.kinds()


# -- room -------------------------------------------------------------------------------------------------


@pytest.fixture
def disk():
    """A real file system of 2 MB where mounting is permitted."""
    with small_disk(2048) as made:
        yield made.path


def test_a_full_file_system_is_an_error_and_not_a_signal(disk):
    arena = Arena(disk)
    with pytest.raises(ArenaFull) as caught:
        arena.stage([FileSpec("model.safetensors", 4 << 20)], keep=None)
    assert caught.value.details["needed_bytes"] == 4 << 20
    assert arena.size_bytes() < 1 << 16
    arena.stage([FileSpec("model.safetensors", 1 << 20)], keep=None)


def test_a_receiver_without_room_keeps_what_it_serves(peer):
    origin, receiver = peer(), peer("r")
    receiver.fetch(origin.publish(1), origin)

    def full(descriptor: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    receiver.arena._reserve = full
    manifest = origin.publish(2)
    with pytest.raises(ArenaFull):
        receiver.fetch(manifest, origin)
    assert receiver.kinds() == {"arena_full"}
    assert set(receiver.arena.versions) == {1}
    assert all(files.is_right(chunk) for files in receiver.arena.versions.values() for chunk in files.chunks)
    receiver.arena._reserve = os.truncate
    assert content(receiver.fetch(manifest, origin).files) == content(origin.arena.versions[2])


# -- versions that overtake each other ---------------------------------------------------------------------


def test_a_newer_version_ends_a_fetch_and_is_whole(peer):
    go, newer = threading.Event(), threading.Event()
    origin, receiver = peer(pace=held(SOME, go.is_set)), peer("r", stall_s=30.0)
    manifest = origin.publish(1)
    fetching = Fetching(receiver, manifest, origin.source, superseded=newer.is_set)
    fetching.until_part(0.4)
    second = origin.publish(2)
    newer.set()
    with pytest.raises(Superseded):
        fetching.result()
    assert "superseded" in receiver.kinds()
    go.set()
    fetched = receiver.fetch(second, origin)
    assert content(fetched.files) == content(origin.arena.versions[2])
    assert fetched.resumed == 0
    assert set(receiver.arena.versions) == {2}


def test_a_version_that_makes_room_at_the_origin_is_found_at_a_relay(peer):
    """The origin is two versions on before the second receiver has asked."""
    origin, first, second = peer(), peer(), peer(give_up_s=20.0)
    manifest = origin.publish(1)
    first.fetch(manifest, origin)
    origin.publish(2)
    origin.publish(3)
    assert content(second.fetch(manifest, origin, first).files) == content(first.arena.versions[1])
