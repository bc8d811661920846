"""The devices of a logical node: what is free, and who takes what.

Invariants:
- *no over-subscription*: the shares of one device never sum to more than 1, counted in whole 1/10,000;
- *whole ranks*: a rank of a host group has its devices on one node, or none at all.

This module must not know machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.graph.units import SHARE, HostGroup


@dataclass(slots=True)
class LogicalNode:
    """Free devices of a logical node: untouched ones, the lowest last, and the remainders of shared ones."""

    index: int
    free: list[int]
    remainders: dict[int, list[int]] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)
    load: int = 0

    def room(self, width: int) -> int:
        """How many more bundles of this width (not 0) fit."""
        if width >= SHARE:
            return len(self.free) * SHARE // width
        shared = sum(amount // width * len(found) for amount, found in self.remainders.items())
        return shared + len(self.free) * (SHARE // width)

    def take(self, width: int) -> tuple[int, ...]:
        """Device numbers for a bundle; a share goes to the fullest device that still has room."""
        if width >= SHARE:
            return tuple(self.free.pop() for _ in range(width // SHARE))
        if width == 0:
            return ()
        best = min((amount for amount in self.remainders if amount >= width), default=None)
        if best is None:
            device, left = self.free.pop(), SHARE - width
        else:
            device, left = self.remainders[best].pop(0), best - width
            if not self.remainders[best]:
                del self.remainders[best]
        if left:
            self.remainders.setdefault(left, []).append(device)
        return (device,)


def untouched(index: int, devices: int) -> LogicalNode:
    """A logical node on which nothing stands."""
    return LogicalNode(index, list(range(devices - 1, -1, -1)))


Taken = dict[str, list[tuple[int, ...]]]
"""The devices of each bundle, by unit."""


def ranks_with_room(node: LogicalNode, group: HostGroup) -> int:
    """How many ranks of a host group fit on the node, at most all of them."""
    if group.width == 0:
        return group.ranks
    if len(group.units) == 1:
        return min(node.room(group.width), group.ranks)
    trial = LogicalNode(node.index, [*node.free], {left: [*found] for left, found in node.remainders.items()})
    ranks = 0
    while ranks < group.ranks and take_rank(trial, group, {}):
        ranks += 1
    return ranks


def take_rank(node: LogicalNode, group: HostGroup, taken: Taken) -> bool:
    """Give one rank of a host group its devices, which are added to `taken`. Returns whether there was room; where
    there was none, the node is of no further use."""
    # The widest first: whole devices are not to be had from remainders.
    for unit in sorted(group.units, key=lambda one: -one.width):
        for _ in range(unit.each):
            if unit.width and not node.room(unit.width):
                return False
            taken.setdefault(unit.id, []).append(node.take(unit.width))
    return True
