"""Recorded histories: of each event a manager does today what it did when they were recorded, frame by frame, and
writes the same rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gyre.rollouts.protocol.codec import decode
from tests.rollouts.machine.player import Player, Rows, Step, in_order, unpacked
from tests.rollouts.machine.record import GOLDEN, life, read

FILES = sorted(GOLDEN.glob("*.json.gz"))


def legible(done: dict[str, Any]) -> dict[str, Any]:
    """With frames in place of their bytes."""
    return {
        to: [str(decode(unpacked(step[2]))) if step[0] == "send" else step for step in steps]
        if to.startswith("to ")
        else steps
        for to, steps in done.items()
    }


async def play(history: list[Step]) -> None:
    (_, kind, began), *events = history
    rows = Rows()
    player = Player(kind, rows, 1, began)
    for at, (now, event, recorded) in enumerate(events):
        if event[0] == "killed":
            player = Player(kind, rows, event[1], now)
            done = player.restored
        else:
            done = await player.play(event, now)
        did = json.loads(json.dumps(in_order(done), default=str))
        assert legible(did) == legible(recorded), f"event {at}, at {now}: {event}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
async def test_of_each_event_the_same_is_done(path: Path) -> None:
    await play(read(path))


def test_histories_have_what_matters() -> None:
    """What never happens in them proves nothing."""
    seen: Counter[str] = Counter()
    for path in FILES:
        for _, event, done in read(path)[1:]:
            seen[event[0]] += 1
            for steps in done.values():
                seen.update(str(step[1]) for step in steps if step[0] == "event")
                seen.update(type(decode(unpacked(step[2]))).__name__ for step in steps if step[0] == "send")
    wanted = [
        "Assign",
        "Cancel",
        "Weights",
        "Ack",
        "Welcome",
        "Reject",
        "Sleep",
        "Wake",
        "Done",
        "Failed",
        "Finished",
        "WindowStatus",
        "DevicesReturned",
        "SampleCounts",
        "InstanceJoined",
        "InstanceLeft",
        "InstanceDraining",
        "InstanceSuspended",
        "WeightsLoaded",
        "WeightsRefused",
        "EngineStartFailed",
        "EngineDied",
        "EngineStarted",
        "EngineLimited",
        "LoaderFallback",
        "TransferChosen",
        "AddressIgnored",
        "SparePromoted",
        "SpareRelieved",
        "WindowOpened",
        "WindowClosed",
        "DevicesFree",
        "ScaleAdvised",
        "PeerRefused",
        "PolicyServed",
        "killed",
        "ask",
        "delete",
        "abort",
        "publish",
        "revoke",
        "looked_at",
    ]
    assert not [one for one in wanted if not seen[one]]


async def test_a_life_is_the_same_again() -> None:
    """Nothing in a manager depends on the time of day, on a random number, or on the order of a set."""
    assert await life("trainer", 9, 120) == await life("trainer", 9, 120)
