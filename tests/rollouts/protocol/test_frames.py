"""Frames: what is one comes back as it was, and what is none is refused with a code and does nothing.

`tests/fuzz` throws many more at them.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.protocol import codec, frames
from gyre.rollouts.protocol.codec import checked, decode, encode
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import (
    Assignment,
    Frame,
    Request,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from tests.examples import examples
from tests.fuzz.inputs import damaged
from tests.rollouts.frames import HELLO, SELDOM, WEIGHTS, empty_progress, progress

FUZZED = 2000


@pytest.mark.parametrize("frame", SELDOM, ids=lambda frame: type(frame).__name__)
def test_every_kind_comes_back_as_it_was(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


def test_every_kind_is_tried() -> None:
    assert {type(frame) for frame in SELDOM} == set(frames.KINDS.values())


def same(one: GenerationProgress, other: GenerationProgress) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        if isinstance(getattr(one, field.name), np.ndarray)
        else getattr(one, field.name) == getattr(other, field.name)
        for field in fields(GenerationProgress)
    )


def test_progress_comes_back_as_it_was() -> None:
    for frame in (progress(), empty_progress(1)):
        back = decode(encode(frame))
        assert isinstance(back, GenerationProgress)
        assert same(back, frame)


def _has_code(error: FrameError) -> None:
    assert error.details["reason"]


def body_of(frame: Frame | GenerationProgress) -> list[Any]:
    return msgpack.unpackb(encode(frame), raw=False)


def packed(kind: Any, body: Any) -> bytes:
    return bytes(msgpack.packb([kind, body], use_bin_type=True))


def changed(frame: Frame, **other: Any) -> bytes:
    kind, body = body_of(frame)
    return packed(kind, body | other)


NAN, INFINITE = float("nan"), float("inf")
CUT = encode(progress())[:-3]
MALFORMED: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "malformed"),
    ("cut", CUT, "malformed"),
    ("more behind it", encode(HELLO) + b"\0", "malformed"),
    ("no text", b"\x92\xa1\xff\xc0", "malformed"),
    ("a number", msgpack.packb(7), "malformed"),
    ("a timestamp", b"\xd6\xff\0\0\0\0", "malformed"),
    ("three parts", msgpack.packb([1, 2, 3]), "malformed"),
    ("a list said to be long", b"\x92\xa8progress\xdd\xff\xff\xff\xff", "malformed"),
    ("lists in lists", b"\x91" * 5000, "malformed"),
    ("unknown kind", packed("nonsense", {}), "unknown_kind"),
    ("kind of another type", packed([], {}), "unknown_kind"),
    ("no map", packed("hello", []), "malformed"),
    ("a field too many", changed(HELLO, more=1), "invalid"),
    ("a field too few", packed("ack", {}), "invalid"),
    ("text for a number", changed(frames.Ack(seq=1), seq="1"), "invalid"),
    ("a truth for a number", changed(frames.Ack(seq=1), seq=True), "invalid"),
    ("too large a number", changed(frames.Ack(seq=1), seq=2**63), "invalid"),
    ("a negative count", changed(frames.Ack(seq=1), seq=-1), "invalid"),
    ("a name with a space", changed(HELLO, instance="a b"), "invalid"),
    ("a name without end", changed(HELLO, instance="a" * 300), "invalid"),
    ("an instance without slots", changed(HELLO, max_running=0), "invalid"),
    (
        "a source with a space in it",
        changed(WEIGHTS, sources=["10.0.0.5 :7001"]),
        "invalid",
    ),
    ("a source that is no address", changed(HELLO, source="x"), "invalid"),
    ("a source with a port that is none", changed(SELDOM[9], source="a:b"), "invalid"),
    ("a source with too large a port", changed(WEIGHTS, sources=["a:65536"]), "invalid"),
    ("a source on two lines", changed(WEIGHTS, sources=["a:1\n"]), "invalid"),
    ("a deadline that never comes", changed(frames.Drain(deadline_s=1.0), deadline_s=INFINITE), "invalid"),
    ("a clock that says nothing", changed(SELDOM[9], load_s=NAN), "invalid"),
    ("a clock that went back", changed(SELDOM[9], load_s=-1.0), "invalid"),
    ("sampling that is NaN", changed(SELDOM[3], sampling={"temperature": NAN}), "invalid"),
    ("sampling that is deep", changed(SELDOM[3], sampling={"a": [[[1]]]}), "invalid"),
]


@pytest.mark.parametrize(("data", "code"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_what_is_no_frame_is_refused_with_a_code(data: bytes, code: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(data)
    assert caught.value.details["reason"] == code


@pytest.mark.parametrize("address", ["10.0.0.5:7001", "host-1.example:1", "[fe80::1%eth0]:65535", "[::1]:80"])
def test_what_is_an_address_is_taken(address: str) -> None:
    assert decode(changed(HELLO, source=address)).source == address  # type: ignore[union-attr]


def wide(kind: str, body: Any) -> bytes:
    """The frame with 15,000 lists of 250 empty lists in the place of "wide"; to pack lists would take seconds."""
    lists = (
        b"\xdc" + (15_000).to_bytes(2, "big") + (b"\xdc" + (250).to_bytes(2, "big") + b"\x90" * 250) * 15_000
    )
    data = packed(kind, body).replace(msgpack.packb("wide"), lists)
    assert len(data) > len(lists)
    return data


@pytest.mark.parametrize(
    "make",
    [
        lambda: wide("cancel", {"rows": "wide"}),
        lambda: wide("hello", {"held": "wide"}),
        lambda: wide("progress", [1, *[b""] * 7, "wide", [0, 0, 0, 0.0]]),
        lambda: packed("groups_stored", {"purpose": "train", "ids": [1] * (4 << 20)}),
        lambda: b"\x92\xa6cancel" + b"\x91" * (4 << 20),
    ],
    ids=["cancel", "hello", "progress", "many ids", "deep"],
)
def test_lists_of_lists_cost_nothing_before_they_are_refused(make: Callable[[], bytes]) -> None:
    data = make()
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_cannot_be_is_not_made() -> None:
    for wrong in ({"deadline_s": NAN}, {"deadline_s": "soon"}, {}, {"deadline_s": 1.0, "more": 1}):
        with pytest.raises(FrameError):
            checked(frames.Drain, **wrong)


def test_the_bytes_on_the_wire_are_those_of_the_protocol() -> None:
    """A frame that is encoded otherwise is another protocol."""
    digest = xxhash.xxh3_64(b"".join(encode(frame) for frame in (*SELDOM, progress(), empty_progress(1))))
    assert (frames.PROTOCOL, digest.hexdigest()) == (14, "3c02766e0144d867")


def test_an_oversized_frame_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError) as caught:
        decode(b"\0" * 101)
    assert caught.value.details["reason"] == "oversized"


WRONG_PROGRESS: list[tuple[str, int, Any, str]] = [
    ("no number", 0, "1", "invalid"),
    ("a negative number", 0, -1, "invalid"),
    ("rows that are no bytes", 1, [1, 2, 3], "invalid"),
    ("half a row", 1, b"\0\0\0", "invalid"),
    ("rows in another order", 1, np.array([5, 2, 9], "<u4").tobytes(), "invalid"),
    ("a row twice", 1, np.array([2, 2, 9], "<u4").tobytes(), "invalid"),
    ("a lease too few", 2, np.array([1, 2], "<u8").tobytes(), "invalid"),
    ("a sample without tokens", 4, np.array([0, 3, 1], "<u4").tobytes(), "invalid"),
    ("counts that do not add up", 4, np.array([1, 2, 2], "<u4").tobytes(), "lengths"),
    ("counts that wrap around", 4, np.array([2**32 - 1, 4, 1], "<u4").tobytes(), "lengths"),
    ("a negative version", 5, np.array([-1, 0, 0], "<i4").tobytes(), "invalid"),
    ("a token too few", 6, np.array([1, 2, 3], "<i4").tobytes(), "lengths"),
    ("a negative token", 6, np.array([1, 2, 3, -4], "<i4").tobytes(), "invalid"),
    ("half a log-prob", 7, b"\0" * 15, "invalid"),
    ("a log-prob too few", 7, b"\0" * 12, "lengths"),
    ("a log-prob too many", 7, b"\0" * 20, "lengths"),
    ("NaN", 7, np.array([0, NAN, 0, 0], "<f4").tobytes(), "not_finite"),
    ("infinite", 7, np.array([0, -INFINITE, 0, 0], "<f4").tobytes(), "not_finite"),
    ("a log-prob above 0", 7, np.array([0, 0.5, 0, 0], "<f4").tobytes(), "invalid"),
    ("ends that are no list", 8, {}, "invalid"),
    ("an end of another shape", 8, [[1, 2, "stop"]], "invalid"),
    ("an unknown end", 8, [[1, 2, "eaten", "", []]], "invalid"),
    ("an end that is no text", 8, [[1, 2, ["stop"], "", []]], "invalid"),
    ("an end with too much to say", 8, [[1, 2, "failed", "x" * 70_000, []]], "invalid"),
    ("runs of another shape", 8, [[1, 2, "stop", "", [[1]]]], "invalid"),
    ("runs of a negative version", 8, [[1, 2, "stop", "", [[-1, 2]]]], "invalid"),
    ("a load of another shape", 9, [1, 2], "invalid"),
    ("a negative load", 9, [-1, 0, 0, 0.0], "invalid"),
    ("a rate that is NaN", 9, [1, 0, 0, NAN], "invalid"),
]


@pytest.mark.parametrize(
    ("at", "value", "code"), [row[1:] for row in WRONG_PROGRESS], ids=[row[0] for row in WRONG_PROGRESS]
)
def test_progress_that_cannot_be_is_refused_with_a_code(at: int, value: Any, code: str) -> None:
    kind, body = body_of(progress())
    body[at] = value
    with pytest.raises(FrameError) as caught:
        decode(packed(kind, body))
    assert caught.value.details["reason"] == code


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=20)
        | st.binary(max_size=40),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
        max_leaves=20,
    ),
    st.sampled_from([*frames.KINDS, "progress"]),
)
@settings(max_examples=examples(400), deadline=None)
def test_any_body_under_any_kind_is_a_frame_or_refused(body: Any, kind: str) -> None:
    try:
        data = packed(kind, body)
    except (ValueError, OverflowError):
        return
    try:
        assert isinstance(decode(data), Frame | GenerationProgress)
    except FrameError as error:
        _has_code(error)


def live_groups() -> tuple[OpenGroups, list[Assignment]]:
    open_groups = OpenGroups(epoch=1)
    open_groups.newest_version = 3
    open_groups.promote(3)
    open_groups.open(
        Request(
            purpose="train",
            groups=pack_groups([Group(index, np.arange(1, 4, dtype=np.int32)) for index in range(4)]),
            n=2,
            sampling={"max_new_tokens": 64},
            seed=1,
            min_version=0,
        )
    )
    for name in ("r0", "r1"):
        open_groups.join(msgspec.structs.replace(HELLO, instance=name, max_running=3, held=[]))
        open_groups.serve(name, 3)
    return open_groups, [
        work for _, works in open_groups.assign().values() for work in works if open_groups.instances
    ]


def test_fuzz_frames_thrown_at_live_groups_leave_its_account_exact() -> None:
    """Whatever comes from a peer that may join: the account stays exact, and what others generated is untouched."""
    draw = random.Random(2)
    open_groups, _ = live_groups()
    taken = refused = 0
    tokens = np.arange(64, dtype=np.int32)
    for turn in range(FUZZED):
        name = draw.choice(list(open_groups.instances))
        held = sorted(open_groups.held_by(name), key=lambda state: state.row)
        other = next((one for one in open_groups.instances if one != name), None)
        before = {s.key: (s.length, s.lease) for s in open_groups.held_by(other)} if other is not None else {}
        some = draw.sample(held, min(len(held), draw.randrange(1, 4))) if held else []
        some.sort(key=lambda state: state.row)
        counts = [draw.randrange(1, 5) for _ in some]
        good = GenerationProgress(
            turn,
            np.array([s.row for s in some], np.uint32),
            np.array([s.lease for s in some], np.uint64),
            np.array([s.length for s in some], np.uint32),
            np.array(counts, np.uint32),
            np.array([3] * len(some), np.int32),
            tokens[: sum(counts)],
            -tokens[: sum(counts)].astype(np.float32),
            [End(s.row, s.lease, draw.choice(("stop", "released", "failed", "died")), "", ()) for s in some]
            if turn % 7 == 0
            else [],
        )
        data = encode(good)
        try:
            frame = decode(damaged(data, draw) if turn % 4 else data)
            if not isinstance(frame, GenerationProgress):
                continue
            open_groups.progress(name, frame)
            taken += 1
        except FrameError as error:
            _has_code(error)
            refused += 1
        if other is not None:
            assert before == {s.key: (s.length, s.lease) for s in open_groups.held_by(other)}
        if turn % 16 == 0:
            assert open_groups.missing_tokens() == 0
            open_groups.assign()
            batch = open_groups.take_batch()
            batch.encoded()
        if all(state.finish for state in open_groups.samples()) or open_groups.given_up:
            assert open_groups.missing_tokens() == 0
            open_groups, _ = live_groups()
    assert open_groups.missing_tokens() == 0
    assert taken > FUZZED // 10
    assert refused > FUZZED // 10
