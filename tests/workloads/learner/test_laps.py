"""What a set-up consists of, in a line of the log."""

from __future__ import annotations

from gyre.workloads.learner.laps import Laps


def test_each_part_has_its_seconds_and_all_of_them_their_sum() -> None:
    clock = iter([10.0, 14.1, 15.1, 15.3])
    laps = Laps(lambda: next(clock))
    for name in ("imports", "ranks", "imports"):
        laps.lap(name)
    assert str(laps) == "5.3 s: imports 4.3, ranks 1.0"
