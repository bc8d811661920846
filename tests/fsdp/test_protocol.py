"""FSDP2's back end has what a learner asks of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fsdp.work import CONFIG, backend_on
from tests.rank_pool import RankPool


def members(rank: int, ranks: int, port: int, folder: Path) -> tuple[list[str], list[str], dict[str, Any]]:
    """What the protocols name and the back end or its ranks lack; and its facts for people."""
    from gyre.workloads.learner.backend import Backend, Ranks

    def lacking(protocol: Any, thing: Any) -> list[str]:
        names = [name for name in vars(protocol) if not name.startswith("_")]
        return [name for name in names if not hasattr(thing, name)]

    with backend_on(rank, ranks, port, folder, CONFIG) as backend:
        backend.prepare()
        backend.unlink()
        return lacking(Backend, backend), lacking(Ranks, backend.ranks), backend.status()


def test_nothing_of_the_protocol_is_missing(pool: RankPool, folder_of: Callable[[str], Path]) -> None:
    ((backend, ranks, status),) = pool.run(members, 1, folder_of("qwen3"))
    assert (backend, ranks) == ([], [])
    assert status["packing"] == "sequences are packed, and told apart by their position ids"
