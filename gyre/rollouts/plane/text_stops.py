"""Samples that a text ends: engines know none, so what they drew is looked at as it comes in.

Invariants:
- *before the ledger*: what an engine drew after the text is in no delta, so whoever folds them has the same end;
- *however it comes*: see `gyre.chat.stop_texts`.

This module must not know who asked for the texts, or what follows when a sample ends.
"""

from __future__ import annotations

import numpy as np

from gyre.chat.stop_texts import Words, first_end, since_when
from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.plane.token_table import TokenTable
from gyre.rollouts.protocol.columns import ReportColumns

STOP = "stop"
"""Key of a request's sampling: the list of its texts."""

LOOKED_AT = 64
"""Tokens before the new ones that are looked at first: few texts begin before them."""


class TextStops:
    """`words` is None where tokens have no text: nobody may ask for one then."""

    def __init__(self, words: Words | None) -> None:
        self._words = words
        self._texts: dict[int, list[str]] = {}
        """Of the samples that one may end, by row."""

    def watch(self, sample: InFlightSample) -> None:
        if self._words is not None and (texts := sample.request.sampling.get(STOP)):
            self._texts[sample.row] = texts

    def forget(self, sample: InFlightSample) -> None:
        self._texts.pop(sample.row, None)

    def found(self, columns: ReportColumns, tokens: TokenTable) -> dict[int, int]:
        """How many of its new tokens each sample has that a text ends with them, by the sample's place in the columns,
        whose tokens follow those that are known."""
        if not self._texts or self._words is None:
            return {}
        found = {}
        for at, row in enumerate(columns.rows.tolist()):
            if (texts := self._texts.get(row)) is None:
                continue
            first, count = int(columns.counts[:at].sum()), int(columns.counts[at])
            length, looked_at = int(tokens.lengths[row]), LOOKED_AT
            known: list[int] = tokens.ids(row, max(0, length - looked_at)).tolist()
            while looked_at < length and not since_when(known, len(known), texts, self._words):
                looked_at *= 2
                known = tokens.ids(row, max(0, length - looked_at)).tolist()
            ids = known + columns.tokens[first : first + count].tolist()
            end = first_end(ids, len(known), texts, self._words)
            if end is not None:
                found[at] = end - len(known)
        return found


def cut(columns: ReportColumns, kept: dict[int, int]) -> ReportColumns:
    """The columns with so many of the tokens of some samples, which are at these places, the first ones."""
    counts = columns.counts.copy()
    counts[list(kept)] = list(kept.values())
    firsts = np.cumsum(columns.counts, dtype=np.int64) - columns.counts
    within = np.arange(len(columns.tokens)) - np.repeat(firsts, columns.counts)
    new = within < np.repeat(counts, columns.counts)
    return columns._replace(counts=counts, tokens=columns.tokens[new], logprobs=columns.logprobs[new])
