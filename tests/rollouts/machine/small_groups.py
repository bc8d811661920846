"""Open groups of a few instances, and what happens to them in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from tests.rollouts.machine.simulated_agents import SimAgent


def asked(groups: int, n: int = 1, limit: int = 1000, **other: Any) -> Request:
    return Request(
        purpose="train",
        groups=pack_groups([Group(index, np.array([1, 2], np.int32)) for index in range(groups)]),
        n=n,
        sampling={"max_new_tokens": limit},
        seed=1,
        **({"min_version": 0} | other),
    )


def groups_with(*names: str, slots: int = 32) -> OpenGroups:
    open_groups = OpenGroups(epoch=1)
    open_groups.newest_version = 5
    open_groups.promote(0)
    for name in names:
        join(open_groups, name, slots)
    return open_groups


def join(open_groups: OpenGroups, name: str, slots: int = 32) -> None:
    hello = SimAgent(name, 0, 0).hello()
    open_groups.join(msgspec.structs.replace(hello, max_running=slots, kv_tokens=1 << 30))
    open_groups.serve(name, open_groups.served_version)


def report(
    open_groups: OpenGroups,
    name: str,
    grown: dict[InFlightSample, int],
    ends: dict[InFlightSample, str] | None = None,
) -> list[InFlightSample]:
    some = sorted(grown, key=lambda state: state.row)
    total = sum(grown.values())
    return open_groups.progress(
        name,
        GenerationProgress(
            1,
            np.array([s.row for s in some], np.uint32),
            np.array([s.lease for s in some], np.uint64),
            np.array([s.length for s in some], np.uint32),
            np.array([grown[s] for s in some], np.uint32),
            np.zeros(len(some), np.int32),
            np.zeros(total, np.int32),
            np.zeros(total, np.float32),
            [End(s.row, s.lease, kind, f"{name} said so", ()) for s, kind in (ends or {}).items()],
        ),
    )


def die(open_groups: OpenGroups, name: str) -> None:
    report(open_groups, name, {}, dict.fromkeys(open_groups.held_by(name), "died"))
    open_groups.engine_died(name)
    open_groups.serve(name, open_groups.served_version)


def all_samples(open_groups: OpenGroups) -> Iterator[InFlightSample]:
    return open_groups.samples()
