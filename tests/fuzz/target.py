"""What is fuzzed, and how: `run` feeds a target one case after another and judges what it does.

A target fails where it raises anything but its own documented error, does not end in time, takes more memory than its
input could need, or does not serve an honest peer afterwards. The first three are looked at here, the last by the
target itself (`Broken`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import random
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0
"""Most seconds of a case. What an input costs is milliseconds; the rest is for a busy machine."""

STUCK_S = 90.0
"""After so long, code that no signal interrupts ends the process, with its stacks."""

MOST_BYTES = 256 << 20
"""Most memory that a case may add to the process."""

ADDRESS_BYTES = 4 << 30
"""Most addresses: who asks for more gets a MemoryError, which is no documented error."""

TRACED_EACH = 64
"""Every so manieth case is measured allocation by allocation, which takes several times as long."""

TRACED_BYTES, TRACED_PER_BYTE = 4 << 20, 80
"""What a measured case may allocate at once, and for each byte of its input: the smallest list takes 64 for one."""


class Broken(Exception):
    """The target did what it must not."""


class TooSlow(BaseException):
    """A case took longer than its deadline. No `except Exception` stops it."""


class Target(ABC):
    """One place where bytes of strangers come in. `start` and `stop` are called once for all cases."""

    name: str
    share = 1.0
    """Of the number of cases that a run asks for: what needs sockets or files gets fewer."""
    traced = True
    """Whether allocations can be told from those of other threads."""

    def start(self) -> None:  # noqa: B027 - most need nothing
        pass

    def stop(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def feed(self, draw: random.Random, sent: list[bytes]) -> bool:
        """One case: note in `sent` what is sent, and send it. Returns whether it was accepted; raises whatever the
        target raises beyond its documented error."""


@dataclass
class Failure:
    target: str
    seed: int
    index: int
    why: str
    sent: list[bytes]

    def __str__(self) -> str:
        shown = "\n".join(
            f"  input {at}: {data[:600].hex()}{f' … {len(data)} bytes' if len(data) > 600 else ''}"
            for at, data in enumerate(self.sent[-20:])
        )
        again = f"python -m tests.fuzz --target {self.target!r} --seed {self.seed} --only {self.index}"
        return f"{self.target}, case {self.index}: {self.why}\n{shown}\n  again: {again}"


@dataclass
class Result:
    target: str
    cases: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)


def every_target() -> dict[str, type[Target]]:
    """The targets by name, of all modules of this room."""
    found: dict[str, type[Target]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in ("__init__", "__main__", "inputs", "target") or path.stem.startswith("test_"):
            continue
        module = importlib.import_module(f"tests.fuzz.{path.stem}")
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, Target) and "name" in vars(one):
                found[one.name] = one
    return found


def run(
    kind: type[Target],
    indices: range,
    seed: int,
    *,
    most_failures: int = 5,
    told: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Feed a target these cases. Ends early where it fails too often."""
    result = Result(kind.name)
    target = kind()
    target.start()
    gc.collect()
    began = told_at = time.monotonic()
    watched_at = float("-inf")
    peak = resident_peak()
    try:
        with _address_limit(), _deadlines():
            for index in indices:
                if time.monotonic() - watched_at > STUCK_S / 10:
                    watched_at = time.monotonic()
                    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=sys.__stderr__)
                sent: list[bytes] = []
                accepted, why = _one(target, f"{seed}/{kind.name}/{index}", index, sent)
                result.cases += 1
                after = resident_peak()
                if not why and after - peak > MOST_BYTES:
                    why = f"it took {(after - peak) >> 20} MiB of memory"
                peak = after
                if why:
                    result.failures.append(Failure(kind.name, seed, index, why, sent))
                    if len(result.failures) >= most_failures:
                        break
                result.accepted += accepted
                result.refused += not accepted
                if time.monotonic() - told_at > 20:
                    told_at = time.monotonic()
                    result.seconds, result.peak_bytes = told_at - began, peak
                    told(result)
    finally:
        result.seconds = time.monotonic() - began
        result.peak_bytes = peak
        target.stop()
    return result


def _one(target: Target, name: str, index: int, sent: list[bytes]) -> tuple[bool, str]:
    """Whether the case was accepted, and why it failed, "" where it did not."""
    draw = random.Random(name)
    traced = target.traced and index % TRACED_EACH == 0
    if traced:
        tracemalloc.start()
    try:
        with _deadline():
            accepted = target.feed(draw, sent)
        if traced:
            most = TRACED_BYTES + TRACED_PER_BYTE * sum(map(len, sent))
            if (took := tracemalloc.get_traced_memory()[1]) > most:
                return accepted, f"it allocated {took} bytes, and {most} would do"
        return accepted, ""
    except TooSlow:
        return False, f"it took more than {DEADLINE_S:g} s, here:\n{_where(sys.exc_info()[2])}"
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"[:1500] + f"\n{_where(error.__traceback__)}"
    finally:
        if traced:
            tracemalloc.stop()


def _where(trace: Any) -> str:
    return "".join(traceback.format_tb(trace)[-6:]).rstrip()


@contextlib.contextmanager
def _deadlines() -> Iterator[None]:
    """Within the block `_deadline` may be used."""

    def late(signum: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, late)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _address_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    wanted = used + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft < 0 else min(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def resident_peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
