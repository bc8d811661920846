"""What a source says, or leads to, fails that source alone: the version comes from the others."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.weights.transfer.chunk_transports import Source, TcpTransport
from gyre.weights.transfer.protocol import dial
from tests.weights.plane import TOKEN


class Raising:
    """In the place of a transport to a source."""

    name = "tcp"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def pull(self, *given: Any) -> Any:
        raise self.error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "error",
    [
        UnicodeError("label empty or too long"),
        ValueError("bad"),
        KeyError("codec"),
        OverflowError("int too large"),
        MemoryError(),
        RecursionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_source_raises_is_a_failed_load_of_that_source(peer, error):
    origin, receiver = peer(), peer(streams=2, forced_codec="none")
    manifest = origin.publish(1)
    bad = Source("10.0.0.1:1")
    inner = receiver.receiver.remote
    receiver.receiver.remote = lambda address, gone: (
        Raising(error) if address == bad.address else inner(address, gone)
    )
    fetched = receiver.receiver.fetch(manifest, lambda: [bad, origin.source])
    assert fetched.by.keys() == {str(origin.source)}


@pytest.mark.parametrize("address", ["a..b:80", f"{'a' * 64}.b:80", "[1::2::3]:80", "nonsense"])
def test_an_address_that_is_none_is_a_failed_load_of_that_source(peer, address):
    origin, receiver = peer(), peer()
    manifest = origin.publish(1)
    fetched = receiver.receiver.fetch(manifest, lambda: [Source(address), origin.source])
    assert fetched.by.keys() == {str(origin.source)}
    known = receiver.receiver.manifest_of(1, manifest.checksum, lambda: [Source(address), origin.source])
    assert known.checksum == manifest.checksum


@pytest.mark.parametrize(
    ("relay", "told"),
    [
        ("127.0.0.1:7001", True),
        ("10.0.0.9:7001", False),
        ("a..b:80", False),
        ("localhost:80", False),
        (7, False),
    ],
)
def test_others_hear_of_a_receiver_only_where_it_dialled_from(peer, relay, told):
    origin = peer()
    manifest = origin.publish(1)
    request = {"op": "have", "checksum": manifest.checksum}
    for at in (relay, ""):
        line = dial(origin.address, TOKEN, stall_s=5.0)
        line.send_json({**request, "relay": at})
        reply = line.receive_json(limit=1 << 20)
        line.close()
    assert reply["peers"] == ([relay] if told else [])


def test_where_a_peer_sends_receivers_is_no_machine_of_their_own(peer, monkeypatch):
    """A peer elsewhere that names loopback and link-local addresses would have them dial their own services."""
    receiver = peer()
    manifest = peer().publish(1)
    fetch = _fetch_of(receiver, manifest)
    source = Source("10.0.0.7:7000")
    fetch._swarm.add([source])
    told = {"have": "0", "peers": ["127.0.0.1:22", "169.254.169.254:80", "a..b:80", 7, None, "10.0.0.8:7000"]}
    fetch._learn(fetch._swarm.peers[source], told)
    assert {peer.address for peer in fetch._swarm.peers} == {"10.0.0.7:7000", "10.0.0.8:7000"}


def _fetch_of(receiver: Any, manifest: Any) -> Any:
    from gyre.weights.transfer.fetch import Fetch

    files = receiver.receiver.arena.stage_manifest(manifest, keep=None)
    return Fetch(receiver.receiver, manifest, files, list, lambda: False)


def test_a_transport_dials_no_such_address():
    with pytest.raises(ConnectionAbortedError):
        TcpTransport("a..b:80", TOKEN).ask({"op": "have"})
