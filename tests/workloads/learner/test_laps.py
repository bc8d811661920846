"""What a set-up consists of, in a line of the log."""

from __future__ import annotations

from gyre.testing.clock import VirtualClock
from gyre.workloads.learner.laps import Laps


def test_each_part_has_its_seconds_and_all_of_them_their_sum() -> None:
    clock = VirtualClock()
    laps = Laps(clock)
    for name, took_s in (("imports", 4.1), ("ranks", 1.0), ("imports", 0.2)):
        clock.advance(took_s)
        laps.lap(name)
    assert str(laps) == "5.3 s: imports 4.3, ranks 1.0"
