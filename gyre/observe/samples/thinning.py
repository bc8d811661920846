"""Which steps' samples are given up when they take more room than the job may have.

Of the old steps first every second is kept, then every fourth, and so on, the oldest first: a long run keeps a view of
all of it, and the dense one of what it does now. Invariant *never*: neither the first step nor the newest are given up.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

NEWEST_KEPT = 50
"""Steps at the end of the run that are kept, however large they are."""


def given_up(sizes: Mapping[int, int], at_most_bytes: int, *, newest: int = NEWEST_KEPT) -> list[int]:
    """The steps to give up so that the rest takes at most so many bytes, in the order in which they go. `sizes` are the
    bytes of each step that is there. The rest takes more where the steps that are never given up do.

    A step goes before one whose number can be halved more often, so that what is left is spread evenly whatever was
    given up before.
    """
    steps = sorted(sizes)
    excess = sum(sizes.values()) - at_most_bytes
    candidates = steps[1 : max(1, len(steps) - newest)]
    found: list[int] = []
    for step in sorted(candidates, key=lambda step: (_halvings(step), step)):
        if excess <= 0:
            break
        found.append(step)
        excess -= sizes[step]
    return found


def _halvings(step: int) -> int:
    """How often the number can be halved: 0 if it is odd."""
    return (step & -step).bit_length() - 1 if step else 64
