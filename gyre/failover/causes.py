"""A record of each cause of faults: how what failed is told to be of it, and what follows besides its repair.

A cause without a record is told by where the fault is found alone, and nothing follows from its name. Processes that
are gone are told apart by `gyre.master.evidence`, silent and stuck ones by `gyre.failover.suspicions`.

Pure. This module must not know what a repair is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gyre.errors import NO_SPACE_CODES, NO_SPACE_SAID, NOT_FINITE, OUT_OF_MEMORY
from gyre.failover.incidents import Fault
from gyre.failover.state import Cause, Reason

TELLING = ("error", "traceback", "reason")
"""The evidence in which the words of a cause are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRecord:
    """`codes` are those of errors of this cause; `words` are what a library or the operating system says of it, by
    which a fault is of this cause whatever the event calls it. Both are folded: with a new one old journals give other
    states. `ends_by`: the reason of a job that it ended, where that says more than that budgets are spent;
    `blames_machine`: a death by it may be the fault of its machine. An exception in the user's code is none."""

    codes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    ends_by: Reason | None = None
    blames_machine: bool = False


CAUSES: dict[Cause, CauseRecord] = {
    Cause.DIED: CauseRecord(blames_machine=True),
    Cause.SILENT: CauseRecord(blames_machine=True),
    Cause.UNHEALTHY: CauseRecord(blames_machine=True),
    Cause.START_FAILED: CauseRecord(blames_machine=True),
    Cause.ENGINE_START_FAILED: CauseRecord(blames_machine=True),
    Cause.CONFIG: CauseRecord(ends_by=Reason.CONFIG),
    Cause.NOT_FINITE: CauseRecord(codes=(NOT_FINITE,), ends_by=Reason.NOT_FINITE),
    Cause.OUT_OF_MEMORY: CauseRecord(codes=(OUT_OF_MEMORY,), ends_by=Reason.OUT_OF_MEMORY),
    Cause.DISK_FULL: CauseRecord(codes=NO_SPACE_CODES, words=NO_SPACE_SAID),
}

_NOTHING = CauseRecord()


def record_of(cause: Cause) -> CauseRecord:
    return CAUSES.get(cause, _NOTHING)


def cause_of_code(code: str) -> Cause | None:
    """The cause that an error's code says; None where it says none."""
    return next((cause for cause, record in CAUSES.items() if code in record.codes), None)


def as_told(fault: Fault) -> Fault:
    """The fault, of the cause that what failed says itself; it is then nobody's code."""
    told = [str(fault.evidence.get(key, "")) for key in TELLING]
    for cause, record in CAUSES.items():
        if any(word in text for word in record.words for text in told) or (
            record.words and fault.cause is cause
        ):
            return replace(fault, cause=cause, user_code=False)
    return fault
