"""The back end that docs/bring-your-own.md shows has plain torch's gradient, on any number of ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gyre.rollouts.samples import Group
from gyre.workloads.torch.actor import TorchActor
from tests.megatron.work import random_groups
from tests.rank_pool import RankPool
from tests.test_docs import FILES
from tests.workloads.torch_workloads import CONFIG, bind

NAME = "sgd_backend"


def step_of(actor: Any, groups: Sequence[Group], ids: Sequence[int]) -> dict[str, Any]:
    """A step's metrics; the gradient's norm is that before the clip."""
    actor.accumulate(list(groups), step=1, index=0)
    metrics: dict[str, Any] = actor.apply(step=1, indices=1, group_ids=list(ids))
    return metrics


def take_a_step(rank: int, ranks: int, port: int, folder: str, groups: list[Group]) -> dict[str, Any]:
    """The last rank has no groups."""
    sys.path.insert(0, folder)
    try:
        kind = importlib.import_module(NAME).SgdActor
    finally:
        sys.path.remove(folder)
    actor = bind(kind(), rank=rank, world_size=ranks, master_addr="127.0.0.1", master_port=port)
    try:
        share = groups if ranks == 1 else groups[rank :: ranks - 1] if rank < ranks - 1 else []
        metrics = step_of(actor, share, [group.id for group in groups])
        return {"metrics": metrics, "digest": actor.state()["digest"]}
    finally:
        actor.teardown()


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("count", [3, 1])
def test_its_step_is_plain_torchs_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, count: int) -> None:
    (tmp_path / f"{NAME}.py").write_text(FILES[f"{NAME}.py"].text)
    groups = random_groups(0, 6)
    plain = bind(TorchActor(), CONFIG)
    try:
        wanted, before = step_of(plain, groups, [group.id for group in groups]), plain.digest()
    finally:
        plain.teardown()
    told = ranks.run(take_a_step, count, str(tmp_path), groups)
    assert len({one["digest"] for one in told}) == 1
    assert told[0]["digest"] != before
    for one in told:
        assert one["metrics"] == told[0]["metrics"]
    found = told[0]["metrics"]
    assert found["grad_norm"] > 0
    assert {name: pytest.approx(value, rel=1e-4) for name, value in wanted.items()} == found
