"""The samples on their way as a table: a row each, with columns that whole reports are checked against at once.

Invariant *a row is one sample's*: from `give` to `free`; what still comes for the sample before it is recognised by
its lease.

This module must not know what happens to samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.plane.token_table import TokenTable

_FIRST_ROWS = 1024
"""Doubled whenever all are taken."""


class SampleRows:
    def __init__(self) -> None:
        self.tokens = TokenTable(0)
        self.samples: list[InFlightSample | None] = []
        self.keys: NDArray[np.int64] = np.zeros(0, np.int64)
        """0 in a free row."""
        self.limits: NDArray[np.int64] = np.zeros(0, np.int64)
        """`max_new_tokens`."""
        self.leases: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.owners: NDArray[np.int64] = np.zeros(0, np.int64)
        """The number of the instance that has the sample; 0 for none."""
        self.deltas: NDArray[np.int64] = np.zeros(0, np.int64)
        """The last delta that holds something of the sample; 0 for none."""
        self._free: list[int] = []
        self._grow(_FIRST_ROWS)

    def __len__(self) -> int:
        return len(self.samples)

    def give(self, sample: InFlightSample) -> None:
        if not self._free:
            self._grow(2 * len(self.samples))
        row = sample.row = self._free.pop()
        self.samples[row] = sample
        self.keys[row] = sample.key
        self.limits[row] = sample.request.max_new_tokens
        self.deltas[row] = 0
        self.lease_to(row, 0, 0)

    def lease_to(self, row: int, lease: int, owner: int) -> None:
        self.leases[row] = lease
        self.owners[row] = owner

    def free(self, sample: InFlightSample) -> None:
        sample.forget_tokens()
        self.samples[sample.row] = None
        self.keys[sample.row] = 0
        self.lease_to(sample.row, 0, 0)
        self._free.append(sample.row)

    def _grow(self, size: int) -> None:
        old = len(self.samples)
        for name in ("keys", "limits", "leases", "owners", "deltas"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(size - old, column.dtype))))
        self.tokens.grow(size)
        self.samples.extend([None] * (size - old))
        self._free.extend(range(size - 1, old - 1, -1))
