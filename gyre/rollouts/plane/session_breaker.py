"""When sessions are handed out more slowly, because infrastructure ends one after another.

A tool, a sandbox or a grader that everybody needs ends all sessions alike, within seconds, and each end takes one of
the attempts at a prompt. So after some such ends in a row nothing is handed out for a while; then one session finds
out whether it goes again, and after it another one, each time after a longer pause.

Invariant *one finds out*: while it is open, at most one session is handed out for each pause.

This module reads no clock: `now` is an argument. It must not know what a session is.
"""

from __future__ import annotations

FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""A service that was started again is back within seconds. One that is away for long is asked for once a minute, so
that the attempts at a prompt last for hours of it."""


class Breaker:
    """`faults` in a row open it."""

    def __init__(self, faults: int) -> None:
        self._faults = faults
        self.in_a_row = 0
        """Sessions that infrastructure ended since one ended otherwise."""
        self.pause_s = 0.0
        """0 while it is closed."""
        self._until = 0.0
        self._is_told = True
        """Whether the end of the pause was told."""
        self._is_tried = False
        """Whether a session was handed out since the pause was made longer: those that ran before say nothing new."""

    def fault(self, now: float) -> bool:
        """Infrastructure ended a session. Returns whether this opens it."""
        self.in_a_row += 1
        opens = not self.pause_s and self.in_a_row >= self._faults
        if opens or self._is_tried:
            self.pause_s = FIRST_PAUSE_S if opens else min(2 * self.pause_s, MOST_PAUSE_S)
            self._pause(now, is_tried=False)
        return opens

    def fine(self) -> bool:
        """A session ended otherwise. Returns whether it was open."""
        was_open = bool(self.pause_s)
        self.in_a_row, self.pause_s, self._is_tried = 0, 0.0, False
        return was_open

    def allowed(self, most: int, now: float) -> int:
        """How many of `most` sessions may be handed out now; `took` is to be called where some are."""
        if not self.pause_s:
            return most
        return min(most, 1) if now >= self._until else 0

    def took(self, now: float) -> None:
        """Some were handed out."""
        if self.pause_s:
            self._pause(now, is_tried=True)

    def _pause(self, now: float, *, is_tried: bool) -> None:
        self._until, self._is_told, self._is_tried = now + self.pause_s, False, is_tried

    def is_over(self, now: float) -> bool:
        """Whether a pause has ended since this was asked last: whoever waits may ask again."""
        if self._is_told or now < self._until:
            return False
        self._is_told = True
        return True
