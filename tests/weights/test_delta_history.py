"""Deltas reach back over several versions, as the sum of steps that are kept; what comes out is verified like all."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.weights.codecs.delta_history import STEPS, DeltaSteps
from gyre.weights.codecs.encoding import chain, decode, encode
from tests.weights.plane import content, until

SMALL = 0.01
"""Of the values change from one version to the next."""


def checksum(peer, version):
    return peer.arena.versions[version].manifest.checksum


def kept(peer, base, target, count):
    """Whether all chunks of the step are there that are worth it: those of tensors."""
    steps = peer.server.encoded.steps
    return sum(steps.path(base, target, index, 1e9) is not None for index in range(count)) >= count - 2


def history(origin, versions, *, asked=True):
    """Manifests of versions that differ a little, with the steps between them where deltas were `asked` for."""
    manifests = []
    for version in versions:
        if asked:
            origin.server.encoded.steps.asked()
        manifests.append(origin.publish(version, changed=SMALL))
        if asked and len(manifests) > 1:
            base, target = manifests[-2].checksum, manifests[-1].checksum
            until(lambda base=base, target=target: kept(origin, base, target, len(manifests[0].digests)))
    return manifests


# -- what is kept ------------------------------------------------------------------------------------------


def delta(old: bytes, new: bytes) -> bytes:
    return bytes(encode("delta", new, word=2, base=old))


def versions_of(count):
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**16, 5000, np.uint16)
    made = [words.tobytes()]
    for _ in range(count - 1):
        words[generator.random(len(words)) < SMALL] += 1
        made.append(words.tobytes())
    return made


def test_a_path_is_the_sum_of_steps_and_the_shortest_one_where_there_are_two():
    made = versions_of(4)
    steps = DeltaSteps()
    for at in range(3):
        steps.add(f"v{at}", f"v{at + 1}", 0, delta(made[at], made[at + 1]))
    long_way = steps.path("v0", "v3", 0, 1e9)
    into = bytearray(len(made[0]))
    decode("delta", long_way, memoryview(into), word=2, base=made[0])
    assert bytes(into) == made[3]
    steps.add("v1", "v3", 0, delta(made[1], made[3]))
    assert len(steps.path("v0", "v3", 0, 1e9)) < len(long_way)
    steps.add("v0", "v3", 0, delta(made[0], made[3]))
    assert steps.path("v0", "v3", 0, 1e9) == delta(made[0], made[3])


def test_there_is_no_path_over_too_many_bytes_or_from_another_base_or_of_another_chunk():
    made = versions_of(3)
    steps = DeltaSteps()
    for at in range(2):
        steps.add(f"v{at}", f"v{at + 1}", 0, delta(made[at], made[at + 1]))
    size = sum(len(delta(made[at], made[at + 1])) for at in range(2))
    assert steps.path("v0", "v2", 0, size) is None
    assert steps.path("v0", "v2", 0, size + 1) is not None
    assert steps.path("other", "v2", 0, 1e9) is None
    assert steps.path("v0", "v2", 1, 1e9) is None


def test_there_is_no_path_of_more_steps_than_a_delta_can_have():
    """Where what relays passed on are long chains already."""
    made = versions_of(2)
    long = chain([delta(*made)] * 200)
    steps = DeltaSteps()
    steps.add("a", "b", 0, long)
    steps.add("b", "c", 0, long)
    assert steps.path("a", "b", 0, 1e9) is not None
    assert steps.path("a", "c", 0, 1e9) is None


def test_steps_that_lead_in_a_circle_end():
    steps = DeltaSteps()
    for base, target in (("a", "b"), ("b", "a"), ("b", "b")):
        steps.add(base, target, 0, b"\0")
    assert steps.path("c", "a", 0, 1e9) is None


@pytest.mark.parametrize("limit_bytes", [10**9, 5000])
def test_the_oldest_steps_go(limit_bytes):
    steps = DeltaSteps(limit_bytes)
    for at in range(50):
        steps.add(f"v{at}", f"v{at + 1}", 0, b"\0" * 1000)
        assert steps._size() <= min(limit_bytes, STEPS * 1000)
    assert steps.path("v49", "v50", 0, 1e9) is not None
    assert steps.path("v0", "v1", 0, 1e9) is None


def test_steps_are_made_beforehand_only_while_somebody_asks_for_deltas():
    steps = DeltaSteps()
    assert not steps.is_wanted()
    steps.asked()
    assert [steps.is_wanted() for _ in range(6)] == [True] * 4 + [False] * 2


# -- receivers that are behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [2, 3, 5])
def test_a_receiver_that_is_behind_gets_the_sum_of_the_steps(peer, behind):
    origin, receiver = peer(), peer(forced_codec="delta")
    first, *_, last = history(origin, range(1, behind + 2))
    assert 1 not in origin.arena.versions  # no more than two are held
    old = peer()
    old.publish(1, changed=SMALL)
    receiver.fetch(first, old)
    fetched = receiver.fetch(last, origin)
    assert content(fetched.files) == content(origin.arena.versions[behind + 1])
    assert fetched.codecs["delta"] >= len(last.digests) - 2
    assert fetched.wire_bytes < 0.08 * behind * last.size_bytes
    assert receiver.incidents == [("behind", {"version": behind + 1, "have": 1})]


def test_who_stays_behind_tells_it_once_until_it_has_kept_up(peer):
    origin, receiver = peer(), peer()
    told = {}
    for version in (3, 4, 6, 8, 9, 12):
        receiver.fetch(origin.publish(version), origin)
        told[version] = [evidence["version"] for kind, evidence in receiver.incidents if kind == "behind"]
    assert told == {3: [], 4: [], 6: [6], 8: [6], 9: [6], 12: [6, 12]}


def test_the_last_step_is_made_when_it_is_asked_for(peer):
    """A receiver asks before the publisher's thread has come to it."""
    origin, receiver = peer(), peer(forced_codec="delta")
    first, _ = history(origin, [1, 2])
    receiver.fetch(first, origin)
    origin.server.prepare = lambda older, files: None
    last = origin.publish(3, changed=SMALL)
    fetched = receiver.fetch(last, origin)
    assert "delta" in fetched.codecs
    assert content(fetched.files) == content(origin.arena.versions[3])


def test_a_relay_that_took_the_steps_itself_gives_their_sum(peer):
    origin, relay, receiver = peer(), peer(forced_codec="delta"), peer(forced_codec="delta")
    for version in (1, 2, 3):
        manifest = origin.publish(version, changed=SMALL)
        relay.fetch(manifest, origin)
        if version == 1:
            receiver.fetch(manifest, origin)
    origin.server.close()
    fetched = receiver.fetch(manifest, relay)
    assert "delta" in fetched.codecs
    assert fetched.wire_bytes < 0.2 * manifest.size_bytes
    assert content(fetched.files) == content(relay.arena.versions[3])


def test_who_is_further_behind_than_steps_are_kept_gets_the_whole_and_asks_once(peer):
    origin, receiver = peer(), peer(forced_codec="delta", streams=1)
    receiver.fetch(origin.publish(1, changed=SMALL), origin)
    origin.publish(2, changed=SMALL)
    *_, last = history(origin, [3, 4])
    asked = []
    path = origin.server.encoded.steps.path
    origin.server.encoded.steps.path = lambda *given: asked.append(given) or path(*given)
    fetched = receiver.fetch(last, origin)
    assert set(fetched.codecs) == {"none"}
    assert len({index for _, _, index, _ in asked}) == 1
    assert content(fetched.files) == content(origin.arena.versions[4])


def test_steps_that_come_to_more_than_half_are_not_taken(peer):
    origin, receiver = peer(), peer(forced_codec="delta")
    old = peer()
    first = old.publish(1)
    receiver.fetch(first, old)
    origin.server.encoded.steps.asked()
    for version in (1, 2, 3):
        manifest = origin.publish(version, changed=1.0)
    fetched = receiver.fetch(manifest, origin)
    assert set(fetched.codecs) == {"none"}
    assert content(fetched.files) == content(origin.arena.versions[3])


# -- bytes that are not what they should be ------------------------------------------------------------------


def behind_by_two(peer):
    origin, receiver, old = peer(), peer(forced_codec="delta"), peer()
    first, _, last = history(origin, [1, 2, 3])
    old.publish(1, changed=SMALL)
    receiver.fetch(first, old)
    return origin, receiver, last


def test_a_flipped_bit_in_the_base_of_a_sum(peer):
    origin, receiver, last = behind_by_two(peer)
    files = receiver.arena.versions[1]
    files.view(files.chunks[3])[100] ^= 1
    fetched = receiver.fetch(last, origin)
    assert content(fetched.files) == content(origin.arena.versions[3])
    assert fetched.codecs["none"] < len(last.digests) / 2  # only what is damaged comes whole
    assert [told["chunk"] for kind, told in receiver.incidents if kind == "base_damaged"] == [3]


def test_a_base_that_is_not_what_it_says(peer):
    """Its manifest is version 1's, its bytes are another's: a delta over them is never served."""
    origin, receiver, last = behind_by_two(peer)
    other = peer()
    other.publish(9)
    files, wrong = receiver.arena.versions[1], other.arena.versions[9]
    for chunk in files.chunks:
        files.view(chunk)[:] = wrong.view(chunk)
    fetched = receiver.fetch(last, origin)
    assert content(fetched.files) == content(origin.arena.versions[3])
    assert receiver.kinds() == {"base_damaged", "behind"}


@pytest.mark.parametrize("at", [1, 60, 300])
def test_a_flipped_bit_in_a_step_that_is_kept(peer, at):
    """In its frame, and in what is compressed."""
    origin, receiver, last = behind_by_two(peer)
    step = origin.server.encoded.steps._steps[checksum(origin, 2)][0]
    damaged = bytearray(step.chunks[2])
    damaged[at] ^= 1
    step.chunks[2] = bytes(damaged)
    fetched = receiver.fetch(last, origin)
    assert content(fetched.files) == content(origin.arena.versions[3])
    assert [told["chunk"] for kind, told in receiver.incidents if kind == "base_damaged"] == [2]
