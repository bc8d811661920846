"""Which slot holds the longest prefix of a prompt, for many slots and many prompts at once.

The first tokens of all slots are compared in one step, and the rest only where those agree. This module must not know
about torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_HEAD = 32
"""Tokens that are compared for all slots together: most prompts that differ do so within them."""


class Prefixes:
    """The tokens of slots, as they are while requests are admitted. `slots` is their number."""

    def __init__(self, slots: int) -> None:
        self._tokens: list[Sequence[int]] = [()] * slots
        self._heads = np.full((slots, _HEAD), -1)
        self._filled = np.zeros(slots, dtype=np.int64)

    def put(self, slot: int, tokens: Sequence[int], filled: int) -> None:
        """Slot `slot` stands for `tokens`, of which the first `filled` have keys and values."""
        head = tokens[:_HEAD]
        self._tokens[slot] = tokens
        self._heads[slot, : len(head)] = head
        self._heads[slot, len(head) :] = -1
        self._filled[slot] = filled

    def drop(self, slot: int) -> None:
        self.put(slot, (), 0)

    def longest(self, tokens: Sequence[int], running: int) -> tuple[int, int, int]:
        """The slot that holds most of `tokens`, how many, and the most that a slot below `running` will soon hold.

        Never the last token, whose logits are needed. (0, 0, ...) where no slot holds any.
        """
        most = len(tokens) - 1
        compared = min(most, _HEAD)
        if not compared:
            return 0, 0, 0
        differs = self._heads[:, :compared] != tokens[:compared]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), compared)
        if most > compared:
            for slot in np.flatnonzero(common == compared):
                held = self._tokens[slot]
                common[slot] = common_prefix(tokens, held, min(most, len(held)))
        ready = np.minimum(common, self._filled)
        best = int(ready.argmax())
        return best, int(ready[best]), int(common[:running].max(initial=0))


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
