"""Which samples are responsible for the death of an engine.

Invariants:
- *alone*: a sample is convicted only of a death at which it was on trial and every other sample had got on; among
  several that got nowhere all are suspected, and none is convicted;
- *cleared by progress*: a sample that got further than where an engine died with it did not kill that engine;
- *a cut is no death*: an incarnation that comes back had not died, and its samples are suspected as before.

This module must not know where samples are tried, or what follows upon a conviction.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.rollouts.plane.requests import FailureRecord, InFlightSample

QUARANTINE_AFTER = 3
"""Engines that died with a sample, or failed at it, before it is quarantined."""

CLEARED_AFTER_TOKENS = 64
"""A sample that got this much further than where an engine died with it did not kill that engine. It is more than
what is on its way between an engine and the manager."""

REMEMBERED_INCARNATIONS = 256
"""Lost incarnations that are remembered: the network may have been cut, and they come back."""


def is_suspect(sample: InFlightSample) -> bool:
    """Whether one death more quarantines it, so that it is tried alone."""
    return sample.deaths >= QUARANTINE_AFTER - 1


def clear(sample: InFlightSample) -> bool:
    """Clear the sample if it got on. Returns whether it had been suspected, and is not any more."""
    if sample.deaths and sample.length > sample.died_at + CLEARED_AFTER_TOKENS:
        sample.deaths, sample.failed_at = 0, ""
        return True
    return False


def record_failure(sample: InFlightSample, failed_at: str, *, most: int = QUARANTINE_AFTER) -> bool:
    """Record that an engine died with it, or that the instance `failed_at` failed at it. Returns whether it is to be
    quarantined."""
    sample.deaths = min(sample.deaths + 1, most)
    sample.died_at, sample.failed_at = sample.length, failed_at
    return sample.deaths >= QUARANTINE_AFTER


def record_engine_death(
    dead: Sequence[InFlightSample], on_trial: InFlightSample | None
) -> list[InFlightSample]:
    """Record that an engine died with these. If one of them was on trial already, it alone may be responsible. Returns
    those that are to be quarantined."""
    for sample in dead:
        clear(sample)
    stuck = [sample for sample in dead if sample.length <= sample.length_at_lease + CLEARED_AFTER_TOKENS]
    if on_trial is not None and is_suspect(on_trial) and stuck == [on_trial]:
        return [on_trial] if record_failure(on_trial, "") else []
    for sample in stuck or dead:
        record_failure(sample, "", most=QUARANTINE_AFTER - 1)
    return []


class LostIncarnations:
    """What samples answered for before and after an incarnation was lost with them."""

    def __init__(self) -> None:
        self._records: dict[str, dict[int, tuple[FailureRecord, FailureRecord]]] = {}

    def add(
        self, incarnation: str, samples: Sequence[InFlightSample], before: Sequence[FailureRecord]
    ) -> None:
        if len(self._records) >= REMEMBERED_INCARNATIONS:
            del self._records[next(iter(self._records))]
        self._records[incarnation] = {
            sample.key: (earlier, sample.record) for sample, earlier in zip(samples, before, strict=True)
        }

    def came_back(self, incarnation: str, sample: InFlightSample) -> bool:
        """The incarnation is back with the sample: nobody had died. Returns whether its record is another now; a
        record that changed since then stands."""
        before, after = self._records.get(incarnation, {}).pop(sample.key, (None, None))
        if before is None or sample.record != after:
            return False
        sample.record = before
        return True
