"""What is published arrives, whole, verified, from whoever has it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch

from gyre.errors import Conflict, Unauthorized
from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.fetch import WeightsUnreachable
from gyre.weights.transfer.protocol import PeerConnection, dial, is_allowed
from gyre.weights.version.manifest import WeightMismatch, layout_of
from tests.waits import GENEROUS_S
from tests.weights.plane import TOKEN, content, until, weights


def test_a_version_arrives_with_all_its_bytes(peer):
    origin, receiver = (
        peer(),
        peer(codecs=("none",)),
    )  # a busy machine's link may look slow enough for another
    manifest = origin.publish(1)
    fetched = receiver.fetch(manifest, origin)
    assert content(fetched.files) == content(origin.arena.versions[1])
    assert fetched.wire_bytes == manifest.size_bytes
    assert receiver.incidents == []


def test_what_arrived_is_a_model_folder(peer):
    origin, receiver = peer(), peer()
    files = receiver.fetch(origin.publish(1), origin).files
    found = safetensors.torch.load_file(files.path / "model.safetensors")
    for name, tensor in weights(1).items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16))
    assert (files.path / "config.json").read_bytes() == b'{"model_type": "qwen3"}'


def test_fetching_what_is_here_moves_nothing(peer):
    origin, receiver = peer(), peer()
    manifest = origin.publish(1)
    receiver.fetch(manifest, origin)
    before = origin.server.sent_bytes
    assert receiver.fetch(manifest, origin).way == "here"
    assert origin.server.sent_bytes == before


def test_on_one_machine_nothing_is_copied(peer):
    origin, receiver = peer(), peer()
    manifest = origin.publish(1)
    path = origin.arena.versions[1].path
    fetched = receiver.receiver.fetch(manifest, lambda: [Source(origin.address, str(path))])
    assert fetched.way == "linked"
    assert (path / "model.safetensors").stat().st_ino == (
        fetched.files.path / "model.safetensors"
    ).stat().st_ino
    origin.publish(2)
    origin.publish(3)  # would have version 1's pages, if nobody had a link to them
    assert content(fetched.files)[-1000:] != content(origin.arena.versions[3])[-1000:]
    assert all(fetched.files.is_right(chunk) for chunk in fetched.files.chunks)


def test_where_links_cannot_be_made_files_are_read(peer, monkeypatch):
    origin, receiver = peer(), peer()
    manifest = origin.publish(1)

    def refuse(*_):
        raise OSError(18, "another file system")

    monkeypatch.setattr("os.link", refuse)
    path = str(origin.arena.versions[1].path)
    fetched = receiver.receiver.fetch(manifest, lambda: [Source("", path)])
    assert (fetched.way, origin.server.sent_bytes) == ("shared", 0)


def test_a_source_that_shared_memory_does_not_reach_does_not_end_a_fetch_of_one_that_it_does(
    peer, monkeypatch
):
    monkeypatch.setattr("gyre.weights.version.arena.Arena.adopt", lambda *_, **__: None)
    origin, far, receiver = peer(), peer(), peer(transports=["shm"])
    manifest = origin.publish(1)
    far.publish(1)
    sources = [far.source, Source("", str(origin.arena.versions[1].path))]
    fetched = receiver.receiver.fetch(manifest, lambda: sources)
    assert (fetched.way, far.server.sent_bytes, receiver.incidents) == ("shared", 0, [])


def test_where_only_shared_memory_is_permitted_another_machine_is_waited_for(peer):
    """It may be on this one after all, a moment later; in the end the setting is named."""
    origin, receiver = peer(), peer(transports=["shm"], give_up_s=0.3)
    manifest = origin.publish(1)
    looks: list[int] = []

    def sources():
        looks.append(1)
        return [origin.source]

    with pytest.raises(WeightsUnreachable, match=r"weights\.transports") as told:
        receiver.receiver.fetch(manifest, sources)
    assert "tcp" in told.value.hint
    assert len(looks) > 3
    ((kind, evidence),) = receiver.incidents  # at once, and once
    assert kind == "source_refused"
    assert "weights.transports" in evidence["error"]


def test_a_folder_of_that_name_with_other_bytes_is_not_taken(peer):
    origin, other, receiver = peer(), peer(), peer()
    manifest = origin.publish(1)
    other.publish(2)
    path = str(other.arena.versions[2].path)
    fetched = receiver.receiver.fetch(manifest, lambda: [Source(origin.address, path)])
    assert content(fetched.files) == content(origin.arena.versions[1])
    assert receiver.kinds() == {"chunk_damaged"}


def test_eight_receivers_take_less_than_two_copies_from_the_origin(peer):
    origin = peer()
    receivers = [peer(seed=seed, forced_codec="none") for seed in range(8)]
    manifest = origin.publish(1, layers=24)
    with ThreadPoolExecutor(8) as pool:
        fetched = list(pool.map(lambda receiver: receiver.fetch(manifest, origin), receivers))
    assert all(content(one.files) == content(origin.arena.versions[1]) for one in fetched)
    assert origin.server.sent_bytes <= 2 * manifest.size_bytes
    assert sum(one.wire_bytes for one in fetched) == 8 * manifest.size_bytes


def test_a_reply_of_an_origin_with_a_thousand_relays_is_small_and_each_is_told_of(peer):
    origin = peer()
    manifest = origin.publish(1)
    relays = [f"10.0.{at >> 8}.{at & 255}:7100" for at in range(1000)]
    files, told, holders = origin.arena.versions[1], set(), set()
    for relay in relays:
        origin.server._told(files, relay)
        origin.server._given.setdefault(manifest.checksum, {})[relay] = (1 << 2000) - 1
    for _ in range(300):
        reply = origin.server._told(files, relays[0])
        assert len(json.dumps(reply)) < 20_000
        assert set(reply["holders"]) <= set(reply["peers"])  # whom else it does not know
        told.update(reply["peers"])
        holders.update(reply["holders"])
    assert told == set(relays[1:])
    assert len(holders) > 900


def test_a_receiver_is_a_source(peer):
    origin, first, second = peer(), peer(), peer()
    manifest = origin.publish(1)
    first.fetch(manifest, origin)
    origin.server.close()
    assert content(second.fetch(manifest, first).files) == content(first.arena.versions[1])


@pytest.mark.parametrize("codec", ["none", "planes", "delta"])
def test_every_codec_brings_the_same_bytes(peer, codec):
    origin, receiver = peer(), peer(forced_codec=codec)
    receiver.fetch(origin.publish(1, changed=0.02), origin)
    manifest = origin.publish(2, changed=0.02)
    fetched = receiver.fetch(manifest, origin)
    assert content(fetched.files) == content(origin.arena.versions[2])
    assert codec in fetched.codecs
    limit = {"none": 1.0, "planes": 0.8, "delta": 0.15}[codec]
    assert fetched.wire_bytes <= limit * manifest.size_bytes


def test_a_delta_that_is_no_smaller_goes_as_it_is(peer):
    origin, receiver = peer(), peer(forced_codec="delta")
    receiver.fetch(origin.publish(1), origin)
    fetched = receiver.fetch(origin.publish(2), origin)
    assert "delta" not in fetched.codecs
    assert content(fetched.files) == content(origin.arena.versions[2])


def test_a_receiver_two_versions_behind_gets_the_whole_where_nobody_asked_for_deltas(peer):
    origin, receiver = peer(), peer(forced_codec="delta")
    receiver.fetch(origin.publish(1, changed=0.01), origin)
    origin.publish(2, changed=0.01)
    manifest = origin.publish(3, changed=0.01)
    fetched = receiver.fetch(manifest, origin)
    assert set(fetched.codecs) == {"none"}  # the origin has no version 1 any more
    assert content(fetched.files) == content(origin.arena.versions[3])


def test_a_relay_passes_a_delta_on(peer):
    origin, first, second = peer(), peer(forced_codec="delta"), peer(forced_codec="delta")
    manifest = origin.publish(1, changed=0.01)
    first.fetch(manifest, origin)
    second.fetch(manifest, first)
    manifest = origin.publish(2, changed=0.01)
    first.fetch(manifest, origin)
    before = first.server.sent_bytes
    fetched = second.fetch(manifest, first)
    assert first.server.sent_bytes - before < 0.1 * manifest.size_bytes
    assert content(fetched.files) == content(origin.arena.versions[2])


def test_fp8_is_rounded_when_published_and_carried_in_half_the_bytes(peer):
    origin, receiver = peer(), peer(forced_codec="fp8", codecs=("none", "fp8"))
    manifest = origin.publish(1, rounding="fp8")
    fetched = receiver.fetch(manifest, origin)
    assert content(fetched.files) == content(origin.arena.versions[1])
    assert fetched.wire_bytes < 0.6 * manifest.size_bytes
    found = safetensors.torch.load_file(fetched.files.path / "model.safetensors")
    exact = weights(1)["layers.3.weight"]
    assert 0 < (found["layers.3.weight"].float() - exact).abs().max() < exact.abs().max() / 15


# -- who may ----------------------------------------------------------------------------------------------


def test_a_wrong_token_gets_nothing_and_is_an_incident(peer):
    origin, receiver = peer(), peer(receiver_token="another", give_up_s=0.5)
    with pytest.raises(WeightsUnreachable):
        receiver.fetch(origin.publish(1), origin)
    assert receiver.kinds() == {"source_refused"}
    assert origin.server.sent_bytes == 0


def test_the_token_does_not_go_over_the_wire(peer, monkeypatch):
    said = bytearray()
    send, receive = PeerConnection.send, PeerConnection.receive_into

    def spy_send(connection, data):
        said.extend(memoryview(data).cast("B"))
        send(connection, data)

    def spy_receive(connection, view, seen=None):
        receive(connection, view, seen)
        said.extend(view)

    monkeypatch.setattr(PeerConnection, "send", spy_send)
    monkeypatch.setattr(PeerConnection, "receive_into", spy_receive)
    origin = peer()
    origin.publish(1)
    dial(origin.address, TOKEN, stall_s=1.0).close()
    assert len(said) > 100
    assert TOKEN.encode() not in said


def test_a_source_that_does_not_know_the_token_is_not_believed(peer):
    impostor = peer(token="another")
    with pytest.raises(Unauthorized):
        dial(impostor.address, TOKEN, stall_s=1.0)


@pytest.mark.parametrize(
    ("host", "networks", "allowed"),
    [
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("10.1.2.3", ["192.168.0.0/16", "10.1.2.3/32"], True),
        ("10.1.2.3", ["192.168.0.0/16"], False),
        ("::ffff:10.1.2.3", ["10.0.0.0/8"], True),
        ("fd00::1", ["10.0.0.0/8"], False),
        ("1.2.3.4", [], True),
    ],
)
def test_networks(host, networks, allowed):
    assert is_allowed(host, networks) is allowed


def test_a_caller_of_another_network_is_not_heard(peer):
    origin = peer(networks=["10.0.0.0/8"])
    receiver = peer(give_up_s=0.5)
    with pytest.raises(WeightsUnreachable):
        receiver.fetch(origin.publish(1), origin)
    assert origin.server.sent_bytes == 0


# -- publishing --------------------------------------------------------------------------------------------


def test_versions_only_grow(peer):
    origin = peer()
    origin.publish(3)
    with pytest.raises(Conflict):
        origin.publish(2)
    again = origin.publish(3)
    assert again == origin.arena.versions[3].manifest


def test_a_publisher_that_is_started_again_serves_what_it_finds_and_forgets_what_is_newer(peer, folder):
    first = peer("origin")
    manifest, _ = first.publish(3), first.publish(4)
    first.server.close()
    again = peer("origin")
    assert again.publish(3) == manifest
    assert set(again.arena.versions) == {3}
    assert content(peer().fetch(manifest, again).files) == content(again.arena.versions[3])


def test_a_publish_without_all_tensors_is_none(peer):
    origin = peer()
    layout, own = layout_of(weights(1), floats="bfloat16")
    publication = origin.publisher.begin(1, 1, layout)
    publication.put("norm.weight", own["norm.weight"])
    with pytest.raises(WeightMismatch, match="were not put"):
        publication.finish().result(GENEROUS_S)
    with pytest.raises(WeightMismatch, match="second time"):
        publication.put("norm.weight", own["norm.weight"])
    assert origin.arena.versions == {}


def test_a_publish_that_breaks_off_leaves_no_thread_and_the_next_one_is_whole(peer):
    origin = peer()
    layout, own = layout_of(weights(1), floats="bfloat16")

    def broken():
        yield "norm.weight", own["norm.weight"]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        origin.publisher.publish(1, 1, layout, broken())
    until(lambda: not any(thread.name == "gyre-publish" for thread in threading.enumerate()))
    assert origin.arena.versions == {}
    manifest = origin.publish(1)
    assert content(peer().fetch(manifest, origin).files) == content(origin.arena.versions[1])


def test_two_hundred_publishes_take_the_memory_of_two(peer):
    origin, receiver = peer(), peer()
    sizes = set()
    for version in range(200):
        manifest = origin.publish(version, layers=2)
        path = str(origin.arena.versions[version].path)
        if version % 2:
            receiver.receiver.fetch(manifest, lambda path=path: [Source("", path)])
        else:
            receiver.fetch(manifest, origin)
        if version > 3:
            sizes.add(origin.arena.size_bytes() // manifest.size_bytes)
            assert receiver.arena.size_bytes() < 2.3 * manifest.size_bytes
        assert len(origin.arena.versions) <= 2
    assert sizes <= {2}


def test_a_publish_does_not_wait_for_a_receiver_that_reads(peer):
    """A receiver that takes a chunk a minute holds on to version 1 while 2, 3 and 4 are published."""
    gate = threading.Event()
    origin = peer(pace=lambda sent: gate.wait(GENEROUS_S) if sent > 4096 else None)
    receiver = peer()
    ended = []
    manifest = origin.publish(1)

    def fetch():
        try:
            receiver.fetch(manifest, origin, superseded=gate.is_set)
        except Exception as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        for version in (2, 3, 4):
            origin.publish(version)
        assert sorted(origin.arena.versions) == [3, 4]
    finally:
        gate.set()
        thread.join(GENEROUS_S)
    assert ended == ["Superseded"]
    assert receiver.arena.versions == {}
