"""Admission: whether an instance may be given samples now, and the reason where it may not.

Admission is computed from the present state whenever samples are given out. Nobody stores it as a fact of its own, so
no order of events (a redial, the late end of an old connection, a window that closes) leaves it wrong.

Invariants:
- *admitted means verified*: an admitted instance is connected and has acknowledged a policy version that is not newer
  than the served one;
- *wishes are samples'*: which versions a request accepts decides which instances its samples go to, and nobody's
  admission;
- *lent or not*: an instance on the trainer's devices is admitted only inside of a window, awake and together with the
  others of that window.

This module must not know about sockets, samples or who computes admission.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple


class NotAdmitted(StrEnum):
    """Why an instance is given nothing. The value is the code that the status shows."""

    SUPERSEDED = "superseded"
    """A later process or connection has joined under its name."""
    DISCONNECTED = "disconnected"
    DRAINING = "draining"
    HANDOVER = "handover"
    """It loads a policy, and the job's update mode keeps samples away meanwhile."""
    NO_POLICY = "no_policy"
    """It has not acknowledged any policy version."""
    POLICY_TOO_NEW = "policy_too_new"
    """The served version is older: a pinned request is open."""
    POLICY_REFUSED = "policy_refused"
    """It could not load the served version, and has no other."""
    NO_WINDOW = "no_window"
    """It is on the trainer's devices, which are not lent."""
    ASLEEP = "asleep"
    """It is on the trainer's devices, and its engine has given its memory back."""
    GATHERING = "gathering"
    """It is on the trainer's devices, and waits for the others that wake for this window."""
    SPARE = "spare"
    """It is a spare (`gyre.rollouts.plane.spares`), and the instances that are wanted serve."""


class DeviceUse(StrEnum):
    """How an instance may use its devices now."""

    OWN = "own"
    """They are its own."""
    LENT = "lent"
    """They are the trainer's, and it generates on them."""
    NO_WINDOW = "no_window"
    ASLEEP = "asleep"
    GATHERING = "gathering"


class PolicyBounds(NamedTuple):
    """Which policy versions may generate now."""

    served: int
    """The version that instances are to have."""

    def admit(self, version: int) -> bool:
        return 0 <= version <= self.served


_DEVICES = {
    DeviceUse.NO_WINDOW: NotAdmitted.NO_WINDOW,
    DeviceUse.ASLEEP: NotAdmitted.ASLEEP,
    DeviceUse.GATHERING: NotAdmitted.GATHERING,
}


def why_not_admitted(
    *,
    is_current: bool,
    connected: bool,
    draining: bool,
    version: int,
    bounds: PolicyBounds,
    loading: bool = False,
    handover: bool = False,
    refused: Collection[int] = (),
    devices: DeviceUse = DeviceUse.OWN,
) -> NotAdmitted | None:
    """None where the instance is admitted, else the reason that has to go first.

    `is_current`: its link is the newest under its name. `version` is the policy version that it acknowledged, -1 for
    none; `loading` another is under way; `handover` is the update mode that hands samples over before a load. `refused`
    are the versions that it said it cannot load.
    """
    if not is_current:
        return NotAdmitted.SUPERSEDED
    if not connected:
        return NotAdmitted.DISCONNECTED
    if draining:
        return NotAdmitted.DRAINING
    if devices in _DEVICES:
        return _DEVICES[devices]
    if loading and handover:
        return NotAdmitted.HANDOVER
    if bounds.admit(version):
        return None
    if version > bounds.served:
        return NotAdmitted.POLICY_TOO_NEW
    return NotAdmitted.POLICY_REFUSED if bounds.served in refused else NotAdmitted.NO_POLICY
