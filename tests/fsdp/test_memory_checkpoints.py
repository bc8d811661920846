"""FSDP2's states in host memory: a killed rank's gang goes on from them bit by bit, and so does what it writes then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fsdp.learner_work import CONFIG, bound, of_folder
from tests.megatron.checkpoints.checkpoint_work import (
    keeps_what_it_copies,
    restore_from_memory,
    train_in_memory,
    train_without_host_memory,
)
from tests.megatron.work import random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [[random_groups(0, 4)], [random_groups(4, 3), random_groups(7, 2)], [random_groups(9, 4)]]
ACTOR_ON = partial(bound, "FsdpActor")
LORA = {"lora": {"rank": 2, "alpha": 4.0}}


@pytest.mark.parametrize("sections", [{}, LORA], ids=["all weights", "an adapter"])
def test_a_gang_whose_rank_was_killed_goes_on_from_memory_bit_by_bit(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = of_folder(folder_of("qwen3"), **sections)
    config["fsdp"] = {**CONFIG["fsdp"], "memory_checkpoint_share": 1.0}
    train = partial(train_in_memory, actor_on=ACTOR_ON)
    calm = pool.run(train, 2, config, STEPS, tmp_path / "calm")
    with pytest.raises(AssertionError, match="rank 1 died"):
        pool.run(partial(train, dies=1), 2, config, STEPS, tmp_path / "job")
    again = partial(restore_from_memory, actor_on=ACTOR_ON, folder=tmp_path / "folder")
    found = pool.run(again, 2, config, STEPS, tmp_path / "job")
    for was, came in zip(calm, found, strict=True):
        assert (came["step"], came["at"]) == (2, was["at"])
        assert came["metrics"] == was["metrics"][2:]
        assert came["after"] == was["after"]
    for name, expected in calm[0]["weights"].items():
        np.testing.assert_array_equal(found[0]["weights"][name], expected)


def test_where_one_machine_has_no_memory_to_spare_all_ranks_go_on_without(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = of_folder(folder_of("qwen3"))
    config["fsdp"] = {**CONFIG["fsdp"], "memory_checkpoint_share": 1.0}
    calm = pool.run(partial(train_in_memory, actor_on=ACTOR_ON), 2, config, STEPS, tmp_path / "calm")
    found = pool.run(
        partial(train_without_host_memory, actor_on=ACTOR_ON), 2, config, STEPS, tmp_path / "job"
    )
    for was, came in zip(calm, found, strict=True):
        assert came["metrics"] == was["metrics"]
        assert "memory" not in came["state"], "nobody restores from there"
    assert "another rank has no room" in found[0]["said"]["trouble"]
    assert "would leave less than 10% of the machine's memory" in found[1]["said"]["trouble"]


def test_no_step_changes_a_state_that_is_being_copied(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = of_folder(folder_of("qwen3"))
    config["fsdp"] = {**CONFIG["fsdp"], "memory_checkpoint_share": 1.0}
    work = partial(keeps_what_it_copies, actor_on=ACTOR_ON)
    assert pool.run(work, 2, config, STEPS, tmp_path) == [True, True]
