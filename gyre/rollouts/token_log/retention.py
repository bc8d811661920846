"""Which of the ledger's deltas are still needed: those that hold something of a sample whose group is open.

A delta holds tokens of hundreds of samples and is needed until the last of them is closed. Counting them down would
cost a step for each sample of each delta. Instead each delta is watched through one of its open samples, and only
when that one is closed another is looked for. The newest is chosen, which most likely stays longest, so that a delta
is looked at a few times in all.

This module must not know what a delta looks like.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Retention:
    """A sample is its `row` and its `key`: it is closed when its row has another key."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[NDArray[np.uint32], NDArray[np.int64]]] = {}
        """Rows and keys of each delta's samples, by its number."""
        self._watched: dict[int, list[int]] = {}
        """The deltas that are watched through a sample, by its key."""

    def __contains__(self, seq: int) -> bool:
        return seq in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, seq: int, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        """The delta `seq` holds something of these samples, all open. At least one."""
        self._samples[seq] = rows, keys
        self._watched.setdefault(int(keys.max()), []).append(seq)

    def extend(self, seq: int, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        """The delta holds something of these samples as well."""
        more_rows, more_keys = self._samples[seq]
        self._samples[seq] = np.concatenate((more_rows, rows)), np.concatenate((more_keys, keys))

    def join(self, seq: int, row: int, key: int) -> None:
        """The delta holds something of this sample as well."""
        if not (self._samples[seq][1] == key).any():
            self.extend(seq, np.array([row], np.uint32), np.array([key]))

    def closed(self, key: int, key_of: NDArray[np.int64]) -> list[int]:
        """The sample is closed; `key_of` are the keys by row as they are now. Returns the deltas that nobody needs."""
        gone = []
        for seq in self._watched.pop(key, ()):
            rows, keys = self._samples[seq]
            left = keys[key_of[rows] == keys]
            if left.size:
                self._watched.setdefault(int(left.max()), []).append(seq)
            else:
                del self._samples[seq]
                gone.append(seq)
        return gone
