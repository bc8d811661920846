"""The order in which rows are drawn: in each epoch a permutation of all rows, by the seed.

Invariant *resumable*: the row at an index is a function of `(seed, rows, index)` alone, so the sample ledger's cursor
is the sampler's whole state.

This module must not know what a row is.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from gyre.philox import words

_STREAM_ORDER = 48
_KEPT_EPOCHS = 2


class EpochOrder:
    """The order of `rows` ≥ 1 rows; without `shuffle`, every epoch has the rows in their stored order."""

    def __init__(self, rows: int, *, seed: int, shuffle: bool = True) -> None:
        if rows < 1:
            raise ValueError("there are no rows to draw from")
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def row_at(self, index: int) -> int:
        """The row of prompt `index` ≥ 0."""
        epoch, at = divmod(index, self.rows)
        return int(self._permutation(epoch)[at]) if self._shuffle else at

    def epoch_of(self, index: int) -> int:
        return index // self.rows

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epochs:
            # Random words are sorted because NumPy's shuffle may change with its version.
            lots = words(self._seed, _STREAM_ORDER, np.arange(self.rows), epoch & 0xFFFFFFFF, 0)
            self._epochs[epoch] = np.argsort(lots, kind="stable").astype(np.int64)
            while len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]
