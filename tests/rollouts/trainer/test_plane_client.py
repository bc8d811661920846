"""The trainer's client: what a manager sends that cannot be is refused, and does not end the client's thread."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest

from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Done
from gyre.rollouts.samples import pack_groups
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from tests.rollouts.owners import NowhereKnown


@pytest.fixture
def client() -> Iterator[RolloutClient]:
    client = RolloutClient(NowhereKnown(), HearsOfRollouts(), term=1)
    yield client
    client.close()


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        b"",
        b"\xc1",
        pack_groups([]),
        msgpack.packb([1, [[[], {"__nd__": "<i4", "shape": [0], "data": b""}, {}, []]]]),
    ],
    ids=["nothing", "no msgpack", "none", "a list for a number"],
)
def test_groups_that_cannot_be_are_refused(client: RolloutClient, groups: bytes, more: bool) -> None:
    with pytest.raises(FrameError, match=r"done\.groups"):
        client.received(Done(purpose="train", groups=groups, more=more))
