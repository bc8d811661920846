"""Checks of a Ray cluster's machines, each made on the machine itself, before any job is: `gyre doctor --cluster`.

Invariant *nothing stays*: a check starts no vertex and reserves nothing; the file by which the machines tell whether
they share a home is removed.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gyre.api.home import Home

ANSWER_S = 90.0
"""For all machines together: a worker starts in some ten seconds, and GPUs that hang are waited for."""

REACHED_S = 5.0
"""For a connection back to this machine; a lost packet is sent again after 1 s and 3 s."""

CLOCK_OFF_S = 2.0
"""Clocks that differ by more are told. Waiting, tokens and certificates go by them, no order of events does."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `advice` is what to do; empty if all is well."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a machine found of itself. Times in seconds since 1970, by its own clock."""

    wrong: list[str]
    sees_home: bool
    reaches: str
    """Why it cannot connect to the machine that asked; "" if it can."""
    began_at: float
    ended_at: float


def look(needs: Any, marker: str, address: tuple[str, int]) -> Findings:
    """The findings of the machine that this runs on. `marker` is a file in the home of who asks, `address` where that
    one listens."""
    from gyre.workloads.vertex.preflight import examine

    began_at = time.time()
    reaches = ""
    try:
        socket.create_connection(address, timeout=REACHED_S).close()
    except OSError as error:
        reaches = str(error)
    return Findings(examine(needs), not marker or Path(marker).is_file(), reaches, began_at, time.time())


def judged(name: str, found: Findings, has: str, asked_at: float, answered_at: float) -> Check:
    """What is said of a machine that has `has`, was asked and answered at these times of our clock."""
    ahead_s = max(found.ended_at - answered_at, min(found.began_at - asked_at, 0.0))
    wrong = [*found.wrong]
    advice = "" if not wrong else "Put that right, or leave the machine out of the cluster."
    if not wrong and not found.sees_home:
        wrong = ["GYRE_HOME is a folder of its own there, and not this machine's."]
        advice = "Set GYRE_HOME to a folder that all machines share: checkpoints and logs are there."
    if not wrong and found.reaches:
        wrong = [f"This machine cannot be reached from there: {found.reaches}."]
        advice = "Open ports between the machines: samples and weights go over any free port."
    if wrong:
        return Check(name, "fail", " ".join(wrong), advice)
    if abs(ahead_s) > CLOCK_OFF_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        return Check(
            name, "warn", f"its clock is {abs(ahead_s):.0f} s {way} this machine's", "Run NTP there."
        )
    return Check(name, "ok", has)


def check_machines(place: Home, ray_address: str | None) -> list[Check]:
    """A check of each machine of the cluster. Raises Unreachable and Unauthorized as `ray_session.connect`."""
    from gyre.api.ray_session import connect, disconnect

    connect(ray_address or "auto", start_local=False, place=place)
    try:
        return _check_all(place)
    finally:
        disconnect()


def _check_all(place: Home) -> list[Check]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from gyre.master.ray_cluster import living_nodes
    from gyre.workloads.vertex.preflight import needs_of

    checks, asked = [], []
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    with _marker(place) as marker, socket.create_server(("", 0), backlog=1024) as listening:
        here: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        address = here, listening.getsockname()[1]
        for node in living_nodes():
            needs = needs_of(place.path if marker else "", gpus=int(node.gpu))
            where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            has = f"{node.cpu:g} CPUs, {node.gpu:g} GPUs, {node.memory_bytes / 2**30:.0f} GiB of memory"
            answer = remote.options(scheduling_strategy=where).remote(needs, marker, address)
            asked.append((f"machine {node.ip}", answer, has, time.time()))
        deadline = time.monotonic() + ANSWER_S
        for name, answer, has, asked_at in asked:
            try:
                found = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:  # it hangs, is gone, or cannot import Gyre: that is what is to be told
                checks.append(
                    Check(name, "fail", _first_line(error), "See `ray status`, and install Gyre there.")
                )
                continue
            checks.append(judged(name, found, has, asked_at, time.time()))
    if not marker:
        note = f"{place.path} is not made yet, so whether the machines share it was not looked at"
        checks = [replace(one, found=f"{one.found}; {note}") if one.status == "ok" else one for one in checks]
    return checks


@contextlib.contextmanager
def _marker(place: Home) -> Iterator[str]:
    """A file in the home while the block runs; "" where there is no home yet, which a check does not make."""
    if not place.path.is_dir():
        yield ""
        return
    file = place.path / f".doctor-{secrets.token_hex(8)}"
    file.touch(mode=0o600)
    try:
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {told[-1] if told else 'no answer'}"[:300]
