"""The frames of the rollout protocol, as either side decodes them: a frame, or refused by a FrameError with a code."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import msgpack
import numpy as np

from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import KINDS, Done, Frame, Request
from gyre.rollouts.protocol.progress import GenerationProgress
from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups, unpack_groups
from tests.fuzz.inputs import damaged, hostile, noise, packed, twisted
from tests.fuzz.target import Broken, Target
from tests.rollouts.frames import SELDOM, empty_progress, progress


@cache
def good_frames() -> list[bytes]:
    """A frame of each kind, and the frequent one several times, by the real encoder."""
    own = [progress(), progress(), progress(), empty_progress(1)]
    groups = pack_groups(good_groups())
    request = Request(
        purpose="train", groups=groups, n=2, sampling={"max_new_tokens": 9}, seed=1, min_version=0
    )
    return [encode(frame) for frame in (*SELDOM, *own, request, Done(purpose="train", groups=groups))]


@cache
def good_trees() -> list[Any]:
    return [msgpack.unpackb(data, raw=False, strict_map_key=False) for data in good_frames()]


def good_groups() -> list[Group]:
    samples = [
        Sample(
            np.arange(5, dtype=np.int32),
            -np.ones(5, np.float32),
            (VersionRun(0, 0, 2), VersionRun(1, 2, 5)),
            "stop",
            0.5,
            {"values": np.zeros(5, np.float32), "score": 1.0},
        )
    ]
    return [
        Group(4, np.arange(1, 7, dtype=np.int32), {"answer": "7"}, samples),
        Group(-1, np.ones(3, np.int32)),
    ]


def hostile_frame(draw: Random) -> bytes:
    """Bytes where a frame belongs."""
    match draw.randrange(8):
        case 0:
            return noise(draw)
        case 1:
            return packed([draw.choice([*KINDS, "progress", "", "nonsense"]), hostile(draw)])
        case 2 | 3 | 4:
            return packed(twisted(draw.choice(good_trees()), draw))
        case _:
            return damaged(draw.choice(good_frames()), draw)


class Frames(Target):
    name = "frames"

    def start(self) -> None:
        good_trees()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        data = hostile_frame(draw)
        sent.append(data)
        try:
            frame = decode(data)
        except FrameError as error:
            if not error.details.get("reason"):
                raise Broken("a refusal without a code") from error
            return False
        if not isinstance(frame, Frame | GenerationProgress):
            raise Broken(f"{type(frame).__name__} is no frame")
        if encode(decode(encode(frame))) != encode(frame):
            raise Broken("what was taken is another frame when it is sent on")
        return True


class Groups(Target):
    """The groups inside Request and Done frames, and in the ledger's rows."""

    name = "groups"
    share = 0.2

    def start(self) -> None:
        self._good = pack_groups(good_groups())
        self._tree = msgpack.unpackb(self._good, raw=False, strict_map_key=False)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        match draw.randrange(6):
            case 0:
                data = noise(draw)
            case 1 | 2:
                data = damaged(self._good, draw)
            case _:
                data = packed(twisted(self._tree, draw))
        sent.append(data)
        try:
            groups = unpack_groups(data)
        except ValueError:
            return False
        if any(not isinstance(group, Group) for group in groups):
            raise Broken("no groups")
        return True
