"""The tokens of all samples on their way, by row: a few large arrays instead of many small objects.

A report brings some tokens for each of hundreds of samples. They are scattered into pages of 256 tokens in one
operation, and a sample's tokens are put together once, when its group is complete. None of this is an object of its own
that the garbage collector would have to look at.

Invariants:
- *pages are owned*: each page is free or belongs to one row, and a row has as many as its length needs;
- *as large as its content*: beyond its first size, at least a quarter of the table's pages is in use;
- *runs cover*: a row's version runs begin at 0 and each ends where the next begins, the last at the row's length;
- *read from any thread*: the tokens of a row that neither grows nor is cleared, whatever one thread does to others.

This module must not know what a sample is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_TOKENS = 256
_WITHIN = PAGE_TOKENS - 1

_FIRST_PAGES = 1024
"""Two MiB. Doubled, by copying, whenever all are taken, and halved when three quarters are free."""

_FEW_ROWS = 4
"""Up to this many rows are written one by one, which is faster than all together."""


class TokenTable:
    def __init__(self, rows: int) -> None:
        self.lengths: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """Tokens of each row."""
        self._versions: NDArray[np.int32] = np.zeros(0, np.int32)
        """The policy of each row's last token, -1 without one."""
        self._next: NDArray[np.int64] = np.zeros(0, np.int64)
        """Where in the pages each row's next token goes, unless it needs a new page."""
        self._runs: dict[int, list[tuple[int, int]]] = {}
        """(version, start) of the runs of each row that has tokens."""
        self._pages: dict[int, list[int]] = {}
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._logprobs: NDArray[np.float32] = np.empty(0, np.float32)
        self._free: list[int] = []
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Make room for this many rows."""
        more = rows - len(self.lengths)
        self.lengths = np.concatenate((self.lengths, np.zeros(more, np.uint32)))
        self._versions = np.concatenate((self._versions, np.full(more, -1, np.int32)))
        self._next = np.concatenate((self._next, np.zeros(more, np.int64)))

    @property
    def last_versions(self) -> NDArray[np.int32]:
        """The policy of each row's last token, -1 without one."""
        return self._versions

    def append(
        self,
        rows: NDArray[np.uint32],
        counts: NDArray[np.uint32],
        versions: NDArray[np.int32],
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        """`counts` tokens to each of `rows`, which are all different; `ids` and `logprobs` one row after another."""
        starts = self.lengths[rows]
        changed = np.flatnonzero(self._versions[rows] != versions)
        for at in changed.tolist():
            self._runs.setdefault(int(rows[at]), []).append((int(versions[at]), int(starts[at])))
        if changed.size:
            self._versions[rows] = versions
        if len(rows) <= _FEW_ROWS:
            first = 0
            for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
                at, within = int(self._next[row]), start & _WITHIN
                where: slice | NDArray[np.int64]
                if within and within + count <= PAGE_TOKENS:
                    where = slice(at, at + count)
                    self._next[row] = at + count
                else:
                    where = self._extend(row, start, count)
                self._ids[where] = ids[first : first + count]
                self._logprobs[where] = logprobs[first : first + count]
                first += count
        else:
            ends = np.cumsum(counts, dtype=np.int64)
            firsts = ends - counts
            within = starts & _WITHIN
            # Where each token goes, as if every row's page had room; then put right for those that need another.
            places = np.repeat(self._next[rows] - firsts, counts)
            places += np.arange(len(ids))
            self._next[rows] += counts
            for at in np.flatnonzero((within == 0) | (within + counts > PAGE_TOKENS)).tolist():
                places[firsts[at] : ends[at]] = self._extend(int(rows[at]), int(starts[at]), int(counts[at]))
            self._ids[places] = ids
            self._logprobs[places] = logprobs
        self.lengths[rows] += counts

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """int32 `[t]` ids and float32 `[t]` log-probs, as copies of their own."""
        return self.ids(row), self._row_of("_logprobs", row)

    def ids(self, row: int, since: int = 0) -> NDArray[np.int32]:
        """int32 `[t - since]`, from this token on, as a copy of its own."""
        return self._row_of("_ids", row, since)

    def runs(self, row: int) -> list[list[int]]:
        """[version, start, end] of the row's tokens."""
        runs = self._runs.get(row, [])
        ends = [start for _, start in runs[1:]] + [int(self.lengths[row])]
        return [[version, start, end] for (version, start), end in zip(runs, ends, strict=False)]

    def correct(self, row: int, since: int, runs: Iterable[tuple[int, int]]) -> None:
        """The row's tokens from `since` on have these versions, as (version, tokens) one after another; together
        they reach to its end."""
        kept = [(version, start) for version, start in self._runs.get(row, ()) if start < since]
        for version, count in runs:
            if count and not (kept and kept[-1][0] == version):
                kept.append((version, since))
            since += count
        self._runs[row] = kept
        self._versions[row] = kept[-1][0] if kept else -1

    def clear(self, row: int) -> int:
        """Forget the row's tokens. Returns how many there were."""
        length = int(self.lengths[row])
        self.lengths[row] = 0
        self._versions[row] = -1
        self._free.extend(self._pages.pop(row, ()))
        self._runs.pop(row, None)
        size = pages = len(self._ids) // PAGE_TOKENS
        while size > _FIRST_PAGES and pages - len(self._free) < size // 4:
            size //= 2
        if size < pages:
            self._resize(size)
        return length

    def _row_of(self, name: str, row: int, since: int = 0) -> NDArray[Any]:
        while True:
            column: NDArray[Any] = getattr(self, name)
            length = int(self.lengths[row])
            pages = self._pages.get(row)
            if not length or pages is None:
                return np.empty(0, column.dtype)
            if length <= PAGE_TOKENS:
                at = pages[0] * PAGE_TOKENS
                found = column[at + since : at + length].copy()
            else:
                skipped = since // PAGE_TOKENS
                parts = column.reshape(-1, PAGE_TOKENS)[pages[skipped:]].reshape(-1)
                found = parts[since - skipped * PAGE_TOKENS : length - skipped * PAGE_TOKENS]
            if column is getattr(self, name):
                return found
            # resized by another thread meanwhile: the pages may be those of the new column

    def _extend(self, row: int, start: int, count: int) -> NDArray[np.int64]:
        """Where in the pages the row's next `count` tokens go."""
        pages = self._pages.setdefault(row, [])
        end = start + count
        while len(pages) * PAGE_TOKENS < end:
            pages.append(self._new_page())
        self._next[row] = pages[-1] * PAGE_TOKENS + (end & _WITHIN)
        at = pages[start // PAGE_TOKENS] * PAGE_TOKENS + (start & _WITHIN)
        if (start & _WITHIN) + count <= PAGE_TOKENS:
            return np.arange(at, at + count)
        position = np.arange(start, end)
        bases: NDArray[np.int64] = np.array(pages, np.int64) * PAGE_TOKENS
        return bases[position // PAGE_TOKENS] + (position & _WITHIN)

    def _new_page(self) -> int:
        if not self._free:
            self._resize(2 * len(self._ids) // PAGE_TOKENS or _FIRST_PAGES)
        return self._free.pop()

    def _resize(self, size: int) -> None:
        """Have `size` pages. Where that is fewer, the contents of the others move to free ones first."""
        old = len(self._ids) // PAGE_TOKENS
        if size < old:
            self._free = [page for page in self._free if page < size]
            self._move_pages(size)
        for name in ("_ids", "_logprobs"):
            column = getattr(self, name)
            resized = np.empty(size * PAGE_TOKENS, column.dtype)
            kept = min(len(column), len(resized))
            resized[:kept] = column[:kept]
            setattr(self, name, resized)
        self._free.extend(range(size - 1, old - 1, -1))

    def _move_pages(self, size: int) -> None:
        """Have no contents in pages from `size` on."""
        moved = [
            (row, at, page, self._free.pop())
            for row, pages in self._pages.items()
            for at, page in enumerate(pages)
            if page >= size
        ]
        sources, targets = [source for *_, source, _ in moved], [target for *_, target in moved]
        for column in (self._ids, self._logprobs):
            by_page = column.reshape(-1, PAGE_TOKENS)
            by_page[targets] = by_page[sources]
        for row, at, source, target in moved:  # after their contents: somebody may be reading the row
            pages = self._pages[row]
            pages[at] = target
            if at == len(pages) - 1:
                self._next[row] += (target - source) * PAGE_TOKENS
