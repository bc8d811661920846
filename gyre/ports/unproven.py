"""The callers of a port who have not shown a token yet, and which of them make room for the next: pure.

Invariant *a newcomer has a place*: a new caller is always taken in. If there are too many, the oldest caller of the
address with the most makes room: a crowd at one address harms no caller at another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Caller = TypeVar("Caller", bound=Hashable)


class Unproven(Generic[Caller]):
    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = max(1, most)
        self._most_per_address = max(1, most_per_address)
        self._by_address: dict[str, OrderedDict[Caller, None]] = {}
        self._address_of: dict[Caller, str] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._address_of

    def add(self, caller: Caller, address: str) -> list[Caller]:
        """Take a caller in. Returns those who make room, and who are no longer counted."""
        out: list[Caller] = []
        here = self._by_address.get(address)
        if here is not None and len(here) >= self._most_per_address:
            out.append(self._remove_oldest(address))
        elif len(self) >= self._most and (evicted := self.oldest()) is not None:
            out.append(evicted)
        self._by_address.setdefault(address, OrderedDict())[caller] = None
        self._address_of[caller] = address
        return out

    def oldest(self) -> Caller | None:
        """Remove and return the oldest caller of the address with the most; None if there is none."""
        if not self._by_address:
            return None
        return self._remove_oldest(max(self._by_address, key=lambda one: len(self._by_address[one])))

    def discard(self, caller: Caller) -> None:
        """The caller has shown its token, or has gone."""
        address = self._address_of.pop(caller, None)
        if address is not None:
            self._drop(address, caller)

    def _remove_oldest(self, address: str) -> Caller:
        caller = next(iter(self._by_address[address]))
        self._drop(address, caller)
        del self._address_of[caller]
        return caller

    def _drop(self, address: str, caller: Caller) -> None:
        here = self._by_address[address]
        del here[caller]
        if not here:
            del self._by_address[address]
