"""Random faults with a seed, over a job on a `FakeCluster`, and news that come twice, late and out of order.

    injector = FaultInjector(seed=1, vertices=["rollout-0", "trainer-0"], count=10, mean_gap_s=5.0)
    injector.arm(world)                              # kills, hangs and stalls strike when their time comes
    for at_s in injector.master_deaths: ...          # the masters' deaths are the test's to carry out

Equal arguments give equal faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from tests.doubles.fake_cluster import FakeCluster

T = TypeVar("T")

MASTER = "master"
"""The target of the master's faults, in place of a vertex's id."""


class FaultKind(StrEnum):
    KILL = "kill"
    """The process is gone at once."""
    HANG = "hang"
    """It lives and does not answer: it is stopped, or its node is cut off."""
    STALL = "stall"
    """It answers, and its running call makes no progress."""
    FAIL_START = "fail_start"
    """Its next start finds no room."""
    USER_CODE = "user_code"
    """The user's own code raises in its next call."""
    PREEMPTED = "preempted"
    """Its machine is taken away: it dies, and cannot be placed again until AVAILABLE."""
    AVAILABLE = "available"


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One fault, `at_s` seconds after the job's submission."""

    at_s: float
    vertex: str
    kind: FaultKind


def random_faults(
    vertices: Sequence[str],
    *,
    seed: int,
    count: int,
    mean_gap_s: float,
    kinds: Iterable[FaultKind] = (FaultKind.KILL, FaultKind.HANG, FaultKind.STALL),
    master_share: float = 0.0,
    start_s: float = 10.0,
) -> list[Fault]:
    """`count` faults with exponential gaps. `master_share` of them kill the master."""
    draw = random.Random(seed)
    permitted = sorted(kinds)
    at_s = start_s
    out = []
    for _ in range(count):
        at_s += draw.expovariate(1.0 / mean_gap_s)
        if draw.random() < master_share:
            out.append(Fault(at_s, MASTER, FaultKind.KILL))
        else:
            out.append(Fault(at_s, draw.choice(list(vertices)), draw.choice(permitted)))
    return out


class FaultInjector:
    """A fault plan: equal arguments give equal faults."""

    def __init__(
        self,
        *,
        seed: int,
        vertices: Sequence[str],
        count: int,
        mean_gap_s: float,
        kinds: Iterable[FaultKind] = (FaultKind.KILL, FaultKind.HANG, FaultKind.STALL),
        master_share: float = 0.0,
        start_s: float = 3.0,
    ) -> None:
        self._draw = random.Random(f"news/{seed}")
        self.faults: list[Fault] = random_faults(
            vertices,
            seed=seed,
            count=count,
            mean_gap_s=mean_gap_s,
            kinds=kinds,
            master_share=master_share,
            start_s=start_s,
        )

    @property
    def master_deaths(self) -> list[float]:
        """When a master is to die, in seconds of the clock."""
        return [fault.at_s for fault in self.faults if fault.vertex == MASTER]

    def arm(self, world: FakeCluster) -> None:
        """Plan every fault of a vertex. One that finds its vertex dead strikes nothing."""
        for fault in self.faults:
            if fault.vertex != MASTER:
                world.at(fault.at_s, strike, world, fault)

    def disturb(self, news: Iterable[T], *, duplicate: float = 0.2, reorder: float = 0.2) -> list[T]:
        """All of the news, some twice, some moved behind later ones."""
        out: list[tuple[float, int, T]] = []
        for place, item in enumerate(news):
            late = self._draw.uniform(1, 10) if self._draw.random() < reorder else 0.0
            out.append((place + late, len(out), item))
            if self._draw.random() < duplicate:
                out.append((place + self._draw.uniform(0, 10), len(out), item))
        return [item for _, _, item in sorted(out, key=lambda entry: entry[:2])]


def strike(world: FakeCluster, fault: Fault) -> None:
    """Do to the world what the fault says. Raises ValueError for a kind that a cluster does not know."""
    match fault.kind:
        case FaultKind.KILL:
            world.kill(fault.vertex)
        case FaultKind.HANG:
            world.hang(fault.vertex)
        case FaultKind.STALL:
            world.stall(fault.vertex)
        case FaultKind.FAIL_START:
            world.fail_setup(fault.vertex, user_code=False)
        case FaultKind.USER_CODE:
            world.fail_operator(fault.vertex, user_code=True)
        case FaultKind.PREEMPTED:
            world.no_room.add(fault.vertex)
            world.kill(fault.vertex)
        case FaultKind.AVAILABLE:
            world.no_room.discard(fault.vertex)
        case _:
            raise ValueError(f"{fault.kind} is no fault of a cluster")
