"""Which slot holds the longest prefix of a prompt, for many slots and many prompts at once.

The first tokens of all slots are compared in one step, and the rest only where those agree. This module must not know
about torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np

_HEAD = 32
"""Tokens that are compared for all slots together: most prompts that differ do so within them."""


class Prefixes:
    """The tokens of slots, as they are while requests are admitted. `slots` is their number; `held` are the tokens of
    some, each with how many of them have keys and values."""

    def __init__(
        self, slots: int, held: Mapping[int, tuple[Sequence[int], int]] = MappingProxyType({})
    ) -> None:
        self._tokens: list[Sequence[int]] = [()] * slots
        self._heads = np.full((slots, _HEAD), -1)
        self._filled = np.zeros(slots, dtype=np.int64)
        self._asked: Sequence[int] = ()
        self._common = np.zeros(slots, dtype=np.int64)
        """Tokens that each slot shares with `_asked`: the samples of a group ask for the same one after another."""
        if held:
            self._put_all(held)

    def _put_all(self, held: Mapping[int, tuple[Sequence[int], int]]) -> None:
        heads = [tokens[:_HEAD] for tokens, _ in held.values()]
        slots = np.fromiter(held, np.int64, len(held))
        lengths = np.fromiter(map(len, heads), np.int64, len(heads))
        rows = np.full((len(held), _HEAD), -1)
        rows[np.arange(_HEAD) < lengths[:, None]] = np.fromiter(chain.from_iterable(heads), np.int64)
        self._heads[slots] = rows
        for slot, (tokens, filled) in held.items():
            self._tokens[slot], self._filled[slot] = tokens, filled

    def put(self, slot: int, tokens: Sequence[int], filled: int) -> None:
        """Slot `slot` stands for `tokens`, of which the first `filled` have keys and values."""
        head = tokens[:_HEAD]
        self._tokens[slot] = tokens
        self._heads[slot, : len(head)] = head
        self._heads[slot, len(head) :] = -1
        self._filled[slot] = filled
        most = min(len(self._asked) - 1, len(tokens))
        self._common[slot] = common_prefix(self._asked, tokens, most) if most > 0 else 0

    def drop(self, slot: int) -> None:
        self.put(slot, (), 0)

    def longest(self, tokens: Sequence[int], running: int) -> tuple[int, int, int]:
        """The slot that holds most of `tokens`, how many, and the most that a slot below `running` will soon hold.

        Never the last token, whose logits are needed. (0, 0, ...) where no slot holds any.
        """
        if tokens != self._asked:
            self._asked = list(tokens)  # a copy: a request's own list grows
            self._compare()
        ready = np.minimum(self._common, self._filled)
        best = int(ready.argmax())
        return best, int(ready[best]), int(self._common[:running].max(initial=0))

    def _compare(self) -> None:
        tokens = self._asked
        most = len(tokens) - 1
        compared = min(most, _HEAD)
        if compared <= 0:
            self._common[:] = 0
            return
        differs = self._heads[:, :compared] != tokens[:compared]
        self._common = np.where(differs.any(axis=1), differs.argmax(axis=1), compared)
        if most > compared:
            for slot in np.flatnonzero(self._common == compared):
                held = self._tokens[slot]
                self._common[slot] = common_prefix(tokens, held, min(most, len(held)))


def common_prefix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """The number of tokens that both start with, up to `most`, by bisection."""
    if a[:most] == b[:most]:
        return most
    same, different = 0, most
    while different - same > 1:
        middle = (same + different) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            different = middle
    return same
