"""FSDP2's back end has what a learner asks of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fsdp.work import members
from tests.rank_pool import RankPool


def test_nothing_of_the_protocol_is_missing(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    ((backend, ranks, status),) = pool.run(members, 1, folder_of("qwen3"))
    assert (backend, ranks) == ([], [])
    assert status["packing"] == (
        "sequences are packed, and each attends to itself alone; a prompt is computed once for its group"
    )
