"""What rows of sessions say, read back."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.rollouts.samples import Sample, VersionRun
from gyre.rollouts.session_extras import PATH, RowTurn, row_turns, spent


def row(path: object) -> Sample:
    return Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), (VersionRun(0, 0, 1),), extras={PATH: path})


@pytest.mark.parametrize("path", [None, "turns", 3, [[1, 2]], [5], [None]])
def test_what_somebody_else_put_there_is_no_path(path: object) -> None:
    assert row_turns(row(path)) == []


def test_a_path_comes_back() -> None:
    assert row_turns(row([[0, 0, 1, 4, None]])) == [RowTurn(0, 0, 1, 4, None)]


def test_the_time_of_turns_that_overlap_counts_once() -> None:
    assert spent([(0.0, 2.0), (3.0, 4.0)]) == (1.0, 3.0)
    assert spent([(0.0, 2.0), (1.0, 5.0), (1.5, 3.0), (6.0, 7.0)]) == (1.0, 6.0)
    assert spent([]) == (0.0, 0.0)
    assert spent([(0.0, 2.0), (None, 4.0)]) is None
    assert spent([(0.0, None)]) is None
