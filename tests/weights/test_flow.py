"""The link does not idle between two chunks, and receivers that wait for a slot are served."""

from __future__ import annotations

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gyre.weights.transfer.chunk_transports import TcpTransport, Want
from gyre.weights.transfer.fetch import WeightsUnreachable
from gyre.weights.transfer.protocol import PeerConnection, Stalled
from gyre.weights.transfer.upload_slots import LEAST, UploadSlots
from tests.waits import GENEROUS_S
from tests.weights.plane import TOKEN, content, until


@pytest.fixture
def chunks(peer):
    """An origin, a transport to it, its wants, and somewhere to put them."""
    origin = peer()
    manifest = origin.publish(1)
    transport = TcpTransport(origin.address, TOKEN, stall_s=5.0)
    yield origin, transport, [Want(manifest, chunk) for chunk in manifest.chunks()], bytearray(1 << 20)
    transport.close()


def pull(transport, want, buffer, *ahead):
    into = memoryview(buffer)[: want.chunk.nbytes]
    return transport.pull(want, into, lambda: next(iter(ahead), None))


def test_the_next_chunk_is_on_its_way_before_this_one_is_there(chunks):
    origin, transport, wants, buffer = chunks
    for want, following in itertools.pairwise(wants):
        assert pull(transport, want, buffer, following).digest == want.chunk.digest
        # Nobody has said a word since, and the source sends on.
        until(lambda want=want: origin.server.sent_bytes > (want.chunk.index + 1) * want.chunk.nbytes)
    assert pull(transport, wants[-1], buffer).digest == wants[-1].chunk.digest


def test_what_was_asked_for_ahead_is_not_taken_for_another_chunk(chunks):
    _, transport, wants, buffer = chunks
    assert pull(transport, wants[0], buffer, wants[1]).digest == wants[0].chunk.digest
    assert pull(transport, wants[2], buffer, wants[3]).digest == wants[2].chunk.digest
    reply = transport.ask({"op": "have", "checksum": wants[0].manifest.checksum})
    assert (reply["status"], reply["have"]) == ("ok", "all")


def test_a_fetch_asks_ahead_where_there_is_one_source_and_spreads_where_there_are_two(peer, monkeypatch):
    asked: list[str] = []
    inner = TcpTransport.pull

    def spy(transport, want, into, ahead=lambda: None):
        def look():
            found = ahead()
            asked.append("ahead" if found is not None else "not")
            return found

        return inner(transport, want, into, look)

    monkeypatch.setattr(TcpTransport, "pull", spy)
    origin, first, second = peer(), peer(codecs=("none",)), peer(codecs=("none",))
    manifest = origin.publish(1)
    first.fetch(manifest, origin)
    count = len(manifest.digests)
    # Not at the ends: a stream that has nothing to do takes what another would have asked for.
    assert asked.count("ahead") >= count - 3 * first.receiver.streams
    asked.clear()
    origin.server.forget(set())  # now a source like any other
    fetched = second.fetch(manifest, origin, first)
    assert "ahead" not in asked
    assert len(fetched.by) == 2


def test_a_receiver_without_a_slot_waits_and_is_served(peer):
    origin, receiver = peer(), peer()
    manifest = origin.publish(1)
    held = [origin.server._slots.take(f"another {at}") for at in range(LEAST)]
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(receiver.fetch, manifest, origin)
        until(lambda: origin.server._slots._waiting)
        assert origin.server.sent_bytes == 0
        for slot in held:
            slot.release()
        assert content(fetching.result(60).files) == content(origin.arena.versions[1])
    assert receiver.incidents == []


def test_a_receiver_without_a_slot_asks_another_source(peer):
    origin, relay, receiver = peer(), peer(), peer(codecs=("none",))
    manifest = origin.publish(1)
    relay.fetch(manifest, origin)
    before = sum(chunk.nbytes for chunk in manifest.chunks())
    # The last chunk arrives before it is counted and its slot is released.
    until(lambda: origin.server.sent_bytes == before and not origin.server._slots._sending)
    held = [origin.server._slots.take(f"another {at}") for at in range(LEAST)]
    fetched = receiver.fetch(manifest, origin, relay)
    assert (origin.server.sent_bytes, set(fetched.by)) == (before, {relay.address})
    assert all(held)


def test_a_receiver_that_never_gets_a_slot_gives_up(peer):
    origin, receiver = peer(), peer(give_up_s=0.1)
    manifest = origin.publish(1)
    held = [origin.server._slots.take(f"another {at}") for at in range(LEAST)]
    with pytest.raises(WeightsUnreachable):
        receiver.fetch(manifest, origin)
    assert all(held)


def test_a_slot_lapses_while_its_chunk_goes_on(peer, monkeypatch):
    lapsed: list[str] = []
    inner = UploadSlots._lapse

    def spy(slots, slot):
        lapsed.append(slot.caller)
        inner(slots, slot)

    monkeypatch.setattr(UploadSlots, "_lapse", spy)
    monkeypatch.setattr("gyre.weights.transfer.upload_slots.LONGEST_S", -1.0)  # too old from the beginning
    origin, receiver = peer(), peer()
    fetched = receiver.fetch(origin.publish(1), origin)
    assert set(lapsed) == {receiver.address}
    assert content(fetched.files) == content(origin.arena.versions[1])
    until(lambda: not origin.server._slots._sending)


def test_a_slow_reader_is_noticed_while_it_reads():
    """Its slot can then lapse."""
    moved: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname())
        link, _ = listener.accept()
        connection = PeerConnection(link, stall_s=30.0)

        def read() -> None:
            while len(moved) < 3:
                reader.recv(256 << 10)
            reader.close()

        thread = threading.Thread(target=read)
        thread.start()
        with pytest.raises(ConnectionError):
            connection.send(bytes(64 << 20), went_on=lambda: moved.append(True))
        thread.join(GENEROUS_S)
        assert len(moved) >= 3
        connection.close()


def test_a_reader_that_stands_still_is_noticed_before_it_is_given_up():
    """Its slot can then be given to another."""
    idle = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname())
        link, _ = listener.accept()
        connection = PeerConnection(link, stall_s=0.6)
        with pytest.raises(Stalled):
            connection.send(bytes(64 << 20), idle=idle.set)
        assert idle.is_set()
        for end in (connection, reader):
            end.close()
