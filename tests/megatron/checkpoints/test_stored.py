"""A checkpoint whose records say what cannot be is damaged, by the same error on each rank: one that ended by another
one would leave the others waiting."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from gyre.workloads.gang.state_files import record_path, sealed, write_state
from tests.megatron.checkpoints import checkpoint_work
from tests.rank_pool import RankPool

PART = ["w", "value", "float32", [4], 0, 4, 0]
DAMAGES = [
    {"parts": None},
    {"parts": [["w"]]},
    {"parts": [[[], *PART[1:]]]},
    {"parts": [[*PART[:2], "add", *PART[3:]]]},
    {"parts": [[*PART[:2], "float13", *PART[3:]]]},
    {"parts": [[*PART[:3], [-4], *PART[4:]]]},
    {"parts": [[*PART[:5], 2**60, 0]]},
    {"parts": [[*PART[:6], 4]]},
    {"parts": [[*PART[:4], 3, 2, 0]]},
    {"place": None},
]


def test_a_record_of_parts_that_cannot_be_is_damaged(pool: RankPool, tmp_path: Path) -> None:
    state = tmp_path / "rank_00000.state"
    content = {"place": 0, "parts": [PART]}
    write_state(state, [memoryview(bytes(16))], content, stop=threading.Event(), threads=1)
    whole = json.loads(record_path(state).read_text())
    records = [whole, *(sealed({**whole, **damage}) for damage in DAMAGES)]
    (said,) = pool.run(checkpoint_work.refusals, 1, tmp_path, records)
    assert said[0] == ""
    for damage, problem in zip(DAMAGES, said[1:], strict=True):
        assert "has a record that is none" in problem, damage


def test_a_layout_that_cannot_be_is_damaged(pool: RankPool) -> None:
    layouts = [
        {"ranks": 4, "tensor_parallel": 2},
        None,
        [],
        {},
        {"ranks": 2**60, "tensor_parallel": 1},
        {"ranks": "1"},
    ]
    (refused,) = pool.run(checkpoint_work.layouts_refused, 1, layouts)
    assert refused == [False, True, True, True, True, True]
