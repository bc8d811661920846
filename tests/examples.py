"""How many examples a property is tried with: a part before a commit, all in the long suite, more in a search."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("GYRE_TEST_EXAMPLES", "0.3"))
"""Of the number that a property asks for. The Makefile sets it."""

FEWEST = 5


def examples(count: int) -> int:
    return max(min(count, FEWEST), round(count * SHARE))
