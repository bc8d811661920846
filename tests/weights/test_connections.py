"""Connections outlast a fetch, are given up in time, and nobody notices where one has ended meanwhile."""

from __future__ import annotations

import gc
import socket

import pytest

from gyre.testing.clock import VirtualClock
from gyre.weights.transfer import chunk_transports, server
from gyre.weights.transfer.address import split_address
from gyre.weights.transfer.chunk_transports import TcpTransport, Want
from gyre.weights.transfer.connections import KEPT_CONNECTIONS, KEPT_S, ConnectionPool
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.protocol import PeerConnection
from tests.waits import GENEROUS_S
from tests.weights.plane import TOKEN, content, until


@pytest.fixture
def dials(monkeypatch):
    """The addresses that were dialled."""
    made: list[str] = []
    inner = chunk_transports.dial

    def dial(address, *given, **options):
        made.append(address)
        return inner(address, *given, **options)

    monkeypatch.setattr(chunk_transports, "dial", dial)
    return made


@pytest.mark.parametrize("encrypted", [False, True])
def test_manifest_and_versions_come_over_one_connection(peer, dials, encrypted):
    options = {"encryption": Encryption()} if encrypted else {}
    origin, receiver = peer(**options), peer(streams=1, forced_codec="none", **options)
    for version in (1, 2, 3):
        checksum = origin.publish(version).checksum
        manifest = receiver.receiver.manifest_of(version, checksum, lambda: [origin.source])
        assert content(receiver.fetch(manifest, origin).files) == content(origin.arena.versions[version])
    assert dials == [origin.address]


@pytest.fixture
def answering(monkeypatch):
    """The lines of all servers."""
    made: list[PeerConnection] = []
    inner = server.receive_caller

    def receive_caller(*given, **options):
        made.append(inner(*given, **options))
        return made[-1]

    monkeypatch.setattr(server, "receive_caller", receive_caller)
    return made


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_connection_that_has_ended_is_no_lost_source(
    peer, dials, answering, monkeypatch, encrypted, is_seen
):
    """Before it is looked at, or a moment later."""
    options = {"encryption": Encryption()} if encrypted else {}
    origin, receiver = peer(**options), peer(streams=1, **options)
    receiver.fetch(origin.publish(1), origin)
    answering[0]._link.shutdown(socket.SHUT_RDWR)
    until(lambda: not origin.server._connections)
    if not is_seen:
        monkeypatch.setattr(PeerConnection, "is_at_rest", lambda connection: True)
    fetched = receiver.fetch(origin.publish(2), origin)
    assert content(fetched.files) == content(origin.arena.versions[2])
    assert (dials, receiver.incidents) == ([origin.address] * 2, [])


def test_a_connection_with_an_answer_on_its_way_is_not_kept(peer):
    origin = peer()
    manifest = origin.publish(1)
    first, second, third = [Want(manifest, chunk) for chunk in manifest.chunks()[:3]]
    pool, buffer = ConnectionPool(), memoryview(bytearray(first.chunk.nbytes))
    one = TcpTransport(origin.address, TOKEN, pool=pool)
    assert one.pull(first, buffer, lambda: second).status == "ok"
    one.close()
    assert len(pool) == 0
    other = TcpTransport(origin.address, TOKEN, pool=pool)
    assert other.pull(third, buffer).digest == third.chunk.digest
    other.close()
    assert len(pool) == 1
    pool.close()


def test_a_receiver_that_is_closed_has_no_connections(peer):
    origin, receiver = peer(), peer()
    receiver.fetch(origin.publish(1), origin)
    assert origin.server._connections
    receiver.receiver.close()
    until(lambda: not origin.server._connections)
    receiver.fetch(origin.publish(2), origin)  # as one that is under way while its owner ends
    until(lambda: not origin.server._connections)


def test_strangers_who_say_nothing_keep_nobody_out(peer, monkeypatch):
    monkeypatch.setattr(server, "UNKNOWN_CALLERS", 4)
    origin, receiver = peer(stall_s=60.0), peer()
    manifest = origin.publish(1)
    silent = [socket.create_connection(split_address(origin.address)) for _ in range(12)]
    until(lambda: len(origin.server._unknown) == 4)
    monkeypatch.setattr(server, "PROVES_WITHIN_S", 0.0)
    assert content(receiver.fetch(manifest, origin).files) == content(origin.arena.versions[1])
    assert receiver.incidents == []
    assert len(origin.server._connections) <= 4 + receiver.receiver.streams
    for link in silent:
        link.close()
    until(lambda: not origin.server._unknown)


def test_a_crowd_that_dials_at_once_does_not_push_itself_out(peer, monkeypatch):
    monkeypatch.setattr(server, "UNKNOWN_CALLERS", 4)
    origin = peer(stall_s=60.0)
    first = [socket.create_connection(split_address(origin.address)) for _ in range(4)]
    until(lambda: len(origin.server._unknown) == 4)
    monkeypatch.setattr(server, "PROVES_WITHIN_S", 60.0)
    with socket.create_connection(split_address(origin.address)) as refused:
        refused.settimeout(GENEROUS_S)
        assert refused.recv(1) == b""
    assert len(origin.server._unknown) == 4
    for link in first:
        link.close()


def test_of_those_who_asked_for_a_version_the_last_are_remembered(peer, monkeypatch):
    monkeypatch.setattr(server, "RELAYS_KNOWN", 3)
    origin = peer()
    files = origin.arena.find(origin.publish(1).checksum)
    for number in (1, 2, 3, 1, 4):
        origin.server._told(files, f"10.0.0.{number}:7000")
    told = origin.server._told(files, "")["peers"]
    assert sorted(told) == ["10.0.0.1:7000", "10.0.0.3:7000", "10.0.0.4:7000"]


def test_a_source_that_many_keep_lines_to_ends_those_that_nobody_uses(peer, monkeypatch):
    """Each has a thread there."""
    monkeypatch.setattr(server, "IDLE_CONNECTIONS", 0)
    monkeypatch.setattr(server, "CROWDED_IDLE_S", 0.0)
    origin, receiver = peer(), peer()
    receiver.fetch(origin.publish(1), origin)
    until(lambda: not origin.server._connections)


# -- what is kept --------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """Makes lines over loopback: (line, the other end)."""
    made: list = []

    def make():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        made.extend([PeerConnection(near, stall_s=1.0), far])
        return made[-2:]

    yield make
    for one in made:
        one.close()


def is_closed(far: socket.socket) -> bool:
    far.settimeout(30.0)
    try:
        return far.recv(1) == b""
    except ConnectionResetError:  # with something unread on the other side
        return True


def test_the_last_line_to_an_address_is_taken_and_held_by_nobody_else(ends):
    pool = ConnectionPool()
    (one, _), (two, _), (other, _) = ends(), ends(), ends()
    one.abandoned = lambda: True  # of a fetch that is over
    for address, connection in (("a", one), ("a", two), ("b", other)):
        pool.keep(address, connection)
    assert [pool.take("a"), pool.take("a"), pool.take("a"), pool.take("b")] == [two, one, None, other]
    assert one.abandoned() is False


def test_a_line_that_ended_or_on_which_something_came_is_not_taken(ends):
    pool = ConnectionPool()
    (ended, gone), (spoken, far) = ends(), ends()
    pool.keep("a", ended)
    pool.keep("a", spoken)
    gone.close()
    far.send(b"x")
    until(lambda: not ended.is_at_rest() and not spoken.is_at_rest())
    assert pool.take("a") is None
    assert is_closed(far)


def test_lines_of_an_owner_that_was_dropped_are_closed(ends):
    pool = ConnectionPool()
    connection, far = ends()
    pool.keep("a", connection)
    pool.itself = pool  # in a circle, as owners are
    del pool, connection
    gc.collect()
    assert is_closed(far)


def test_lines_are_not_kept_for_long_nor_many_nor_after_the_end(ends):
    clock = VirtualClock()
    pool = ConnectionPool(clock=clock)
    made = [ends() for _ in range(KEPT_CONNECTIONS + 2)]
    for connection, _ in made[:-1]:
        pool.keep("a", connection)
    assert is_closed(made[0][1])
    assert len(pool) == KEPT_CONNECTIONS
    clock.advance(KEPT_S)
    assert pool.take("a") is None
    assert is_closed(made[1][1])
    assert server.IDLE_S > KEPT_S
    pool.close()
    pool.keep("a", made[-1][0])
    assert is_closed(made[-1][1])
    assert len(pool) == 0


def test_a_relay_that_is_no_address_is_told_to_nobody(peer):
    """Whoever is told of a relay dials it."""
    origin, liar, honest = peer(), peer(), peer()
    manifest = origin.publish(1)
    liar.receiver.address = "x"
    liar.fetch(manifest, origin)
    assert content(honest.fetch(manifest, origin).files) == content(origin.arena.versions[1])
    assert not any("x" in known for known in origin.server._relays.values())


@pytest.mark.parametrize(
    "address", ["", "x", "host:", ":1", "host:0", "host:65536", "a b:1", "host:1\n", "[x]:1"]
)
def test_what_is_no_address_is_not_dialled(address):
    with pytest.raises(ConnectionAbortedError, match="no address"):
        split_address(address)
