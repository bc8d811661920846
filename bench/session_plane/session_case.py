"""What the sessions of `bench/turns.py` do: prompts, how long tools take, and what they add.

All of it follows from the number of a session and of its turn, so that two sides that are compared do the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOOL_S = 0.5
"""Median of a tool's time."""

SPREAD = 0.8
"""Of its logarithm: one tool in a hundred takes over 3 s."""


def name_of(number: int, vocabulary: int) -> list[int]:
    """The two tokens that a session's first prompt begins with, of a small vocabulary, too: two that begin alike would
    share a prefix."""
    base = vocabulary - 32
    return [16 + number // base, 16 + number % base]


def session_of(ids: Sequence[int]) -> int:
    """What stands for those two tokens."""
    return int(ids[0]) << 20 | int(ids[1])


@dataclass(frozen=True)
class Case:
    turns: int = 8
    first_tokens: int = 200
    added_tokens: int = 72
    drawn_tokens: int = 128
    """Of one turn: with `added_tokens` a prompt grows by 200 tokens a turn."""
    vocabulary: int = 151_936
    tool_s: float = TOOL_S

    def tool_of(self, session: int, turn: int) -> float:
        """Seconds."""
        drawn = np.random.default_rng((session, turn, 1)).standard_normal()
        return self.tool_s * math.exp(SPREAD * float(drawn))

    def tokens_of(self, session: int, turn: int) -> list[int]:
        """What the turn adds; its first token names the session in the first turn."""
        count = self.added_tokens if turn else self.first_tokens
        drawn = np.random.default_rng((session, turn, 2)).integers(16, self.vocabulary - 16, count)
        return [int(one) for one in drawn]
