"""Encoded deltas of the last versions, so that who is several versions behind needs no more than their sum.

A step is what changed from one version to the next, chunk by chunk, as it went over the wire. Steps that follow on each
other are one delta (`codecs.chain`): nothing is decoded for it, and no older version need be there.

Invariants:
- *sum of steps*: a path leads from exactly the base that was asked for to exactly the version, by their checksums;
- *bounded*: at most `STEPS` steps and `limit_bytes` of them are kept; the oldest go first.

This module must not know who makes steps, or who asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from gyre.weights.codecs.encoding import chain

STEPS = 8
"""A sum of more of them is seldom less than half of the version."""

LEAST_LIMIT_BYTES = 256 << 20
PART_OF_VERSION = 8
"""An eighth of the version's bytes for all steps: where each changes a hundredth, that is all of them."""

ASKED_WITHIN = 4
"""After so many versions without a request for a delta, none is made beforehand."""


def limit_for(size_bytes: int) -> int:
    """Of memory for the steps of a version of this size."""
    return max(LEAST_LIMIT_BYTES, size_bytes // PART_OF_VERSION)


@dataclass(slots=True)
class _Step:
    base: str
    chunks: dict[int, bytes] = field(default_factory=dict)
    size_bytes: int = 0


class DeltaSteps:
    """By checksums of versions. Thread-safe."""

    def __init__(self, limit_bytes: int = LEAST_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._steps: dict[str, list[_Step]] = {}
        """Steps by target version, oldest first."""
        self._quiet = ASKED_WITHIN
        self._lock = threading.Lock()

    def add(self, base: str, target: str, index: int, data: bytes) -> None:
        """Chunk `index` of `target` as a delta against `base`."""
        with self._lock:
            steps = self._steps.setdefault(target, [])
            step = next((step for step in steps if step.base == base), None)
            if step is None:
                step = _Step(base)
                steps.append(step)
            step.size_bytes += len(data) - len(step.chunks.get(index, b""))
            step.chunks[index] = data
            while len(self._steps) > STEPS or self._size() > self.limit_bytes:
                del self._steps[next(iter(self._steps))]

    def path(self, base: str, target: str, index: int, within_bytes: float) -> bytes | None:
        """Chunk `index` of `target` as a delta against `base` over the least bytes of steps; None where none is of
        fewer than `within_bytes`, or it has more steps than one delta can."""
        with self._lock:
            found = self._least(base, target, index, within_bytes, frozenset())
        return chain(found[1]) if found is not None else None

    def _least(
        self, base: str, target: str, index: int, within: float, seen: frozenset[str]
    ) -> tuple[int, list[bytes]] | None:
        best: tuple[int, list[bytes]] | None = None
        for step in self._steps.get(target, ()):
            data = step.chunks.get(index)
            if data is None or step.base in seen or len(data) >= within:
                continue
            before: tuple[int, list[bytes]] | None = (0, [])
            if step.base != base:
                before = self._least(base, step.base, index, within - len(data), seen | {target})
            if before is not None and before[0] + len(data) < within:
                within = before[0] + len(data)
                best = (within, [*before[1], data])
        return best

    def reaches(self, base: str, targets: Collection[str]) -> bool:
        """Whether steps lead from `base` to one of these, or it is one; in which chunks, and how large, aside."""
        with self._lock:
            open_, seen = list(targets), set(targets)
            while open_:
                target = open_.pop()
                if target == base:
                    return True
                fresh = {step.base for step in self._steps.get(target, ())} - seen
                seen |= fresh
                open_ += fresh
        return False

    # -- whether to make them beforehand ------------------------------------------------------------------

    def asked(self) -> None:
        """Somebody wanted a delta, whether there was one or not."""
        with self._lock:
            self._quiet = 0

    def is_wanted(self) -> bool:
        """Whether deltas were asked for lately. Once for each version."""
        with self._lock:
            self._quiet += 1
            return self._quiet <= ASKED_WITHIN

    def _size(self) -> int:
        return sum(step.size_bytes for steps in self._steps.values() for step in steps)
