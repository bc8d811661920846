"""The trainer's client: what a manager sends that cannot be is refused, and does not end the client's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgpack
import numpy as np
import pytest

from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import PROTOCOL, Attached, Done, GroupsStored, Request
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.rollouts.trainer import plane_client
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


def test_the_next_manager_hears_again_of_what_was_taken(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may have died with that. What is asked for once more is not closed after it was asked for."""
    monkeypatch.setattr(plane_client, "MOST_TAKEN", 3)
    ask(client, [0, 1, 2, 3])
    client.taken("train", [0, 1, 2, 3])
    client._outbox.clear()  # sent to a manager
    ask(client, [2])
    client.taken("eval", [7])
    client.welcomed(Attached(protocol=PROTOCOL, epoch=2, version=0), "http://127.0.0.1:1", "secret")
    stored = [(one.purpose, list(one.ids)) for one in client._outbox if isinstance(one, GroupsStored)]
    assert stored == [("train", [1, 3]), ("eval", [7]), ("eval", [7])]
    (asked,) = (one for one in client._outbox if isinstance(one, Request))
    assert [group.id for group in unpack_groups(asked.groups)] == [2]
    assert client._outbox[-1] is asked, "what is asked for anew comes after what was taken"


def ask(client: RolloutClient, ids: Sequence[int]) -> None:
    groups = [Group(one, np.array([1], np.int32)) for one in ids]
    client.request("train", groups, n=1, sampling={"max_new_tokens": 1}, seed=0, min_version=0)
