"""Leases: who may report tokens of a sample now, and what is known of leases that ended.

An instance gets a lease with each sample that it is given, and names it whenever it reports. A sample that goes on
elsewhere gets a new one, so what a former holder still reports is recognised.

Invariants:
- *one lease*: at most one lease of a sample is valid;
- *a claim is checked*: an instance that comes back is believed to have a sample only under a lease that this manager
  gave that incarnation for that sample, or under one of an earlier manager; and it has no more tokens than the sample
  may get;
- *the last ones*: a lease that ended is known until one whose number is `SLOTS` further ends, or it is forgotten.

Leases are numbered one after another, so that a lease's number names its slot in a table of fixed size. The table is
made once: a manager ends a thousand leases a second, and a table that grew and shrank with them would leave holes in
its memory.

This module must not know why a lease ended.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.core.sample_rows import SampleRows
from gyre.rollouts.protocol.frames import Held
from gyre.rollouts.scheduling.fleet import Instance

SLOTS = 1 << 17
"""32 bytes each. A former holder is away for seconds, and a manager gives out some thousand leases a second."""

_EPOCH_SHIFT = 40
"""A manager's leases begin at its epoch, shifted by this, so that no two managers give out the same number."""


class EndedLease(NamedTuple):
    length: int
    """Tokens of the sample that were known here when the lease ended."""
    limit: int
    """Its `max_new_tokens`."""


class EndedLeases:
    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._leases = array("Q", bytes(8 * slots))
        self._holders = array("q", bytes(8 * slots))
        self._keys = array("Q", bytes(8 * slots))
        self._lengths = array("I", bytes(4 * slots))
        self._limits = array("I", bytes(4 * slots))

    def note(self, lease: int, incarnation: str, key: int, ended: EndedLease) -> None:
        slot = lease % self._slots
        self._leases[slot] = lease
        self._holders[slot] = hash(incarnation)
        self._keys[slot] = key
        self._lengths[slot] = ended.length
        self._limits[slot] = min(ended.limit, 2**32 - 1)

    def find(self, lease: int, incarnation: str, key: int) -> EndedLease | None:
        """What was noted of the lease. None where nothing is known, or not any more, or where it was another
        incarnation's or another sample's."""
        slot = lease % self._slots
        if not lease or self._leases[slot] != lease:
            return None
        if self._holders[slot] != hash(incarnation) or self._keys[slot] != key:
            return None
        return EndedLease(self._lengths[slot], self._limits[slot])

    def forget(self, lease: int) -> None:
        slot = lease % self._slots
        if self._leases[slot] == lease:
            self._leases[slot] = 0


class Leases:
    def __init__(self, rows: SampleRows, *, epoch: int) -> None:
        self._rows = rows
        self._first = epoch << _EPOCH_SHIFT
        self._last = self._first
        self._ended = EndedLeases()

    def grant(self, sample: InFlightSample, instance: Instance) -> None:
        self._last += 1
        sample.lease = self._last
        sample.length_at_lease = sample.length
        self._rows.lease_to(sample.row, sample.lease, instance.number)

    def end(self, sample: InFlightSample, incarnation: str) -> None:
        """End the lease that an incarnation has. Harmless for a sample that is not leased."""
        if sample.lease:
            ended = EndedLease(sample.length, sample.request.max_new_tokens)
            self._ended.note(sample.lease, incarnation, sample.key, ended)
            sample.lease = 0
            self._rows.lease_to(sample.row, 0, 0)

    def is_believed(self, claim: Held, incarnation: str, sample: InFlightSample) -> bool:
        """Whether the incarnation may have the sample as it says."""
        if not claim.start <= sample.length <= claim.length <= sample.request.max_new_tokens:
            return False
        if self._ended.find(claim.lease, incarnation, claim.key) is not None:
            return True
        # An earlier manager's leases died with it. Whoever has the sample from this one has a better right.
        return 0 < claim.lease <= self._first and sample.placed.holder is None

    def take_lost_tokens(self, claim: Held, incarnation: str) -> int:
        """How many tokens the incarnation has of the sample, beyond what was known here when its lease ended. They
        are told once, and are no more than the sample could get."""
        known = self._ended.find(claim.lease, incarnation, claim.key)
        if known is None:
            return 0
        self._ended.forget(claim.lease)
        return max(min(claim.length, known.limit) - known.length, 0)
