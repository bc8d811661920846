"""Leases: who may report tokens of a sample now, and what is known of leases that ended.

An instance gets a lease with each sample that it is given, and names it whenever it reports. A sample that goes on
elsewhere gets a new one, so what a former holder still reports is recognised.

Invariants:
- *one lease*: at most one lease of a sample is valid;
- *a claim is checked*: an instance that comes back is believed to have a sample only under a lease that this manager,
  or an earlier one, granted that incarnation for that sample; and it has no more tokens than the sample may get;
- *the last ones*: a lease of this manager that ended is known until one whose number is `SLOTS` further ends, or it is
  forgotten;
- *stored with the next commit*: each lease is handed to the ledger with the first batch after it was granted, in order.
  So a manager that dies leaves its successor all of its leases but those after the newest stored one. The holder of
  such a lease is believed only while nobody has the sample; otherwise it costs the tokens that it did not report;
- *not beyond a reset*: no lease from before a sample was begun anew is stored, or known to the next manager.

Leases are numbered one after another, so that a lease's number names its slot in a table of fixed size. The table is
made once: a manager ends a thousand leases a second, and a table that grew and shrank with them would leave holes in
its memory.

This module must not know why a lease ended, or how one is stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gyre.rollouts.plane.requests import EarlierLease, InFlightSample
from gyre.rollouts.plane.sample_rows import SampleRows
from gyre.rollouts.protocol.frames import Held
from gyre.rollouts.scheduling.fleet import Instance
from gyre.rollouts.token_log.records import LeaseRecord

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
        self._unstored: list[tuple[int, LeaseRecord]] = []
        """Granted since the last batch, each with its sample's row."""
        self._newest_stored: dict[int, int] = {}
        """The newest lease in the ledger of each earlier manager, by its epoch."""

    def grant(self, sample: InFlightSample, instance: Instance) -> None:
        self._last += 1
        sample.lease = self._last
        sample.length_at_lease = length = sample.length
        self._rows.lease_to(sample.row, sample.lease, instance.number)
        sample.hold(instance.name, length)
        record = LeaseRecord(sample.key, self._last, instance.incarnation, length, instance.name)
        self._unstored.append((sample.row, record))

    @property
    def is_dirty(self) -> bool:
        return bool(self._unstored)

    def take_unstored(self) -> list[tuple[int, LeaseRecord]]:
        """The leases that were granted since this was called last, each with its sample's row at that time."""
        unstored, self._unstored = self._unstored, []
        return unstored

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
        if _find_earlier(sample, claim.lease, incarnation) is not None:
            return True
        return self._may_be_unstored(claim.lease) and sample.placed.holder is None

    def _may_be_unstored(self, lease: int) -> bool:
        """Whether an earlier manager may have granted this lease and died before the commit."""
        return self._newest_stored.get(lease >> _EPOCH_SHIFT, 0) < lease <= self._first

    def take_lost_tokens(self, claim: Held, incarnation: str, sample: InFlightSample | None) -> int:
        """How many tokens the incarnation has of the sample, beyond what was known when its lease ended. They are told
        once, and are no more than the sample could get. `sample` is None where its group is closed."""
        known = self._ended.find(claim.lease, incarnation, claim.key)
        if known is not None:
            self._ended.forget(claim.lease)
        elif sample is not None and (earlier := _find_earlier(sample, claim.lease, incarnation)) is not None:
            sample.earlier_leases = tuple(one for one in sample.earlier_leases if one is not earlier)
            known = EndedLease(earlier.length, sample.request.max_new_tokens)
        else:
            return 0
        return max(min(claim.length, known.limit) - known.length, 0)

    def begin_anew(self, sample: InFlightSample) -> None:
        """The sample is reset: what anybody generated of it so far belongs to it no more."""
        sample.earlier_leases = ()
        sample.holders = ()
        self._unstored = [one for one in self._unstored if one[0] != sample.row]

    # -- restoring ----------------------------------------------------------------------------------

    def restore_newest(self, lease: int) -> None:
        """The ledger has this lease of an earlier manager."""
        epoch = lease >> _EPOCH_SHIFT
        self._newest_stored[epoch] = max(lease, self._newest_stored.get(epoch, 0))

    def restore(self, sample: InFlightSample, granted: Sequence[LeaseRecord]) -> None:
        """Earlier managers granted these of the sample, in this order. It has all its tokens again."""
        for one in granted:
            sample.hold(one.instance, one.length)
        ended_at = [*(one.length for one in granted[1:]), sample.length]
        sample.earlier_leases = tuple(
            EarlierLease(one.lease, one.incarnation, length)
            for one, length in zip(granted, ended_at, strict=True)
        )


def _find_earlier(sample: InFlightSample, lease: int, incarnation: str) -> EarlierLease | None:
    for one in sample.earlier_leases:
        if one.lease == lease and one.incarnation == incarnation:
            return one
    return None
