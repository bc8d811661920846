"""Traces of faults: the input of a simulation, and of tests that inject the same faults into a real master.

A trace is a list of `Fault`s ordered by time. `spot_trace` makes a trace of instances that the cloud takes back and
gives again, `random_faults` one of everything that can happen to a process.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

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


def spot_trace(
    vertices: Sequence[str], *, seed: int, until_s: float, mean_up_s: float, mean_away_s: float
) -> list[Fault]:
    """Faults of machines that are taken back and given again, each by itself, with exponential times."""
    out = []
    for vertex in vertices:
        draw = random.Random(f"{seed}/{vertex}")
        at_s = draw.expovariate(1.0 / mean_up_s)
        while at_s < until_s:
            out.append(Fault(at_s, vertex, FaultKind.PREEMPTED))
            at_s += draw.expovariate(1.0 / mean_away_s)
            out.append(Fault(at_s, vertex, FaultKind.AVAILABLE))
            at_s += draw.expovariate(1.0 / mean_up_s)
    return sorted(out)
