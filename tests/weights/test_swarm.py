"""The swarm: which chunk is asked of whom, with no thread and no clock."""

from __future__ import annotations

import random

import pytest

from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.swarm import (
    DAMAGED_REST_S,
    FIRST_DIAL_S,
    FIRST_REST_S,
    FRESH_S,
    LONGEST_REST_OF_NAMED_S,
    LOOK_AROUND_S,
    MOST_SILENT,
    Swarm,
    SwarmPeer,
    bits_of,
    check_bits,
    each_bit,
)
from tests.weights.plane import Elsewhere

PUBLISHER, ONE, OTHER = Source("10.0.0.1:1"), Source("10.0.0.2:1"), Source("10.0.0.3:1")
CHUNKS = 8
ALL = (1 << CHUNKS) - 1
PATIENCE_S = 5.0


def swarm_of(*sources: Source, seed: int = 0) -> Swarm:
    swarm = Swarm("10.0.0.9:1", Elsewhere(), random.Random(seed))
    assert swarm.add(sources) == []
    heard(swarm, 0.0)
    return swarm


def heard(swarm: Swarm, now: float) -> None:
    for peer in swarm.peers.values():
        peer.heard(now)


def picked(swarm: Swarm, now: float, open_: int = ALL) -> tuple[SwarmPeer, int]:
    job = swarm.pick(open_, now, PATIENCE_S)
    assert job is not None
    return job


def test_bits_are_indices() -> None:
    assert sorted(each_bit(bits_of([0, 3, 70]))) == [0, 3, 70]


@pytest.mark.parametrize("text", ["-1", "-ff", "100", "f" * 100_000, "all", "0x"])
def test_bits_of_other_chunks_are_refused(text: str) -> None:
    """A negative number has bits without end: whoever counted them would never come back."""
    check_bits(["", "0", "ff"], CHUNKS)
    with pytest.raises(ValueError, match=r"bits of other chunks|invalid literal"):
        check_bits(["1", text], CHUNKS)


@pytest.mark.parametrize("seed", range(20))
def test_the_rarest_chunks_come_first(seed: int) -> None:
    """Another peer has half of the chunks: of the publisher, the other half is asked for."""
    swarm = swarm_of(PUBLISHER, ONE, seed=seed)
    swarm.peers[ONE].bitfield = 0b00001111
    swarm.peers[ONE].busy = 1
    swarm.peers[ONE].asked_at = 0.0
    peer, index = picked(swarm, now=0.0)
    assert peer.source == PUBLISHER
    assert index in {4, 5, 6, 7}


def test_what_a_publisher_super_seeded_is_asked_of_the_peer_that_got_it() -> None:
    swarm = swarm_of(PUBLISHER, ONE)
    swarm.peers[PUBLISHER].learn("all", f"{ALL:x}", now=0.0)
    swarm.peers[ONE].bitfield = ALL
    swarm.peers[ONE].asked_at = 0.0
    peer, index = picked(swarm, now=0.0)
    assert peer.source == ONE
    assert index is not None


def test_super_seeding_ends_when_nobody_else_has_it_for_long() -> None:
    swarm = swarm_of(PUBLISHER, ONE)
    publisher, one = swarm.peers[PUBLISHER], swarm.peers[ONE]
    publisher.learn("all", f"{ALL:x}", now=0.0)
    one.bitfield = 0
    publisher.asked_at = one.asked_at = 0.1
    assert swarm.pick(ALL, 0.1, PATIENCE_S) is None
    heard(swarm, PATIENCE_S + 0.2)
    peer, index = picked(swarm, now=PATIENCE_S + 0.2)
    assert peer is publisher
    assert index is not None


def test_a_peer_without_a_free_upload_slot_is_asked_last() -> None:
    swarm = swarm_of(PUBLISHER, OTHER)
    swarm.peers[PUBLISHER].full_until = 1.0
    assert all(picked(swarm, now=0.0)[0].source == OTHER for _ in range(20))


def test_a_peer_that_fails_rests_longer_each_time_and_is_asked_again() -> None:
    swarm = swarm_of(PUBLISHER)
    peer = swarm.peers[PUBLISHER]
    peer.rest(0.0)
    assert swarm.look(0.9 * FIRST_REST_S) is None
    assert swarm.look(FIRST_REST_S) is peer
    assert swarm.pick(ALL, FIRST_REST_S, PATIENCE_S) is None
    peer.heard(FIRST_REST_S)
    assert picked(swarm, now=FIRST_REST_S)[0] is peer
    peer.rest(1.0)
    assert peer.rest_until == pytest.approx(1.0 + 2 * FIRST_REST_S)


def test_a_peer_that_sends_wrong_bytes_twice_is_left_alone() -> None:
    peer = SwarmPeer(PUBLISHER)
    peer.sent_wrong_bytes(0.0)
    assert peer.rest_until == FIRST_REST_S
    peer.sent_wrong_bytes(1.0)
    assert peer.rest_until == 1.0 + DAMAGED_REST_S


def test_an_old_bitfield_is_asked_for_again_even_where_there_is_work() -> None:
    swarm = swarm_of(PUBLISHER, ONE)
    swarm.peers[ONE].bitfield = 0
    swarm.peers[ONE].asked_at = 0.0
    assert swarm.look(2 * LOOK_AROUND_S) is swarm.peers[ONE]
    assert swarm.look(2 * LOOK_AROUND_S) is None
    assert picked(swarm, now=2 * LOOK_AROUND_S)[0].source == PUBLISHER


def test_nothing_is_asked_ahead_where_another_peer_has_something() -> None:
    swarm = swarm_of(PUBLISHER, ONE)
    publisher = swarm.peers[PUBLISHER]
    swarm.peers[ONE].bitfield = 0
    assert swarm.pick_ahead(publisher, ALL, 0.0, PATIENCE_S) is not None
    swarm.peers[ONE].bitfield = 1
    assert swarm.pick_ahead(publisher, ALL, 0.0, PATIENCE_S) is None


def test_nobody_asks_themselves_and_who_may_not_be_dialled_is_told() -> None:
    swarm = Swarm("10.0.0.9:1", Elsewhere(PUBLISHER), random.Random(0))
    assert swarm.add([Source("10.0.0.9:1"), PUBLISHER, OTHER]) == [OTHER]
    swarm.add_addresses(["10.0.0.9:1", PUBLISHER.address, OTHER.address])
    assert set(swarm.peers) == {PUBLISHER}


def test_whom_nobody_has_heard_is_a_scouts_and_no_streams() -> None:
    swarm = Swarm("10.0.0.9:1", Elsewhere(), random.Random(0))
    swarm.add([PUBLISHER])
    assert swarm.pick(ALL, 0.0, PATIENCE_S) is None
    peer = swarm.look(0.0)
    assert peer is swarm.peers[PUBLISHER]
    assert swarm.look(0.0) is None
    peer.heard(0.0)
    assert picked(swarm, now=0.0)[0] is peer
    assert swarm.pick(ALL, 2 * FRESH_S, PATIENCE_S) is None


def test_who_is_silent_rests_longer_each_time() -> None:
    named = SwarmPeer(ONE, named=True)
    rests = []
    for _ in range(12):
        named.rest(0.0)
        rests.append(named.rest_until)
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_OF_NAMED_S
    assert named.dial_s(5.0) == 5.0
    assert SwarmPeer(ONE).dial_s(5.0) == FIRST_DIAL_S


def test_who_names_others_without_end_is_not_remembered_without_end() -> None:
    swarm = swarm_of(PUBLISHER)
    for first in range(0, 3_000, 64):
        swarm.add_addresses([f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:7" for n in range(first, first + 64)])
        for _ in range(64):
            peer = swarm.look(float(first))
            if peer is not None:
                peer.asking = False
                peer.rest(float(first))
    assert len(swarm.peers) <= 1 + MOST_SILENT


@pytest.mark.parametrize("streams", [2, 4])
def test_a_stream_is_left_for_who_gives(streams: int) -> None:
    """Peers that answer, and give nothing, are tried by all streams but one."""
    many = [Source(f"10.0.1.{n}:1") for n in range(10)]
    swarm = swarm_of(PUBLISHER, *many)
    swarm.peers[PUBLISHER].sent_a_chunk()
    given = []
    for _ in range(streams):
        peer = swarm.pick(ALL, 0.0, PATIENCE_S, streams)
        assert peer is not None
        peer[0].busy += 1
        given.append(peer[0].source)
    assert PUBLISHER in given
