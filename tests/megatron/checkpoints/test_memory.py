"""States in host memory: a killed rank's gang goes on from them bit by bit, or not at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gyre.workloads.megatron import MegatronCritic
from tests.megatron import work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STEPS = [[random_groups(0, 4)], [random_groups(4, 3), random_groups(7, 2)], [random_groups(9, 4)]]


def memory_config(layout: str, dtype: str = "float32") -> dict[str, Any]:
    config = config_of(layout)
    config["megatron"] |= {"memory_checkpoint_share": 1.0, "dtype": dtype}
    return config


def killed(pool: RankPool, config: dict[str, Any], ranks: int, job: Path) -> None:
    """A gang whose last rank dies by SIGKILL after its second step; the others end with it."""
    with pytest.raises(AssertionError, match=f"rank {ranks - 1} died"):
        pool.run(partial(checkpoint_work.train_in_memory, dies=ranks - 1), ranks, config, STEPS, job)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("pp2-dp2", "float32"), ("tp2", "bfloat16"), ("dp2-whole", "float32")],
)
def test_a_gang_whose_rank_was_killed_goes_on_from_memory_bit_by_bit(
    pool: RankPool, tmp_path: Path, layout: str, dtype: str
) -> None:
    ranks, config = LAYOUTS[layout][0], memory_config(layout, dtype)
    calm = pool.run(checkpoint_work.train_in_memory, ranks, config, STEPS, tmp_path / "calm")
    killed(pool, config, ranks, tmp_path / "job")
    found = pool.run(checkpoint_work.restore_from_memory, ranks, config, STEPS, tmp_path / "job")
    for was, came in zip(calm, found, strict=True):
        assert (came["step"], came["at"]) == (2, was["at"])
        assert came["metrics"] == was["metrics"][2:]
        assert came["after"] == was["after"]
    for name, expected in calm[0]["weights"].items():
        np.testing.assert_array_equal(found[0]["weights"][name], expected)


def test_what_is_written_after_a_state_came_from_memory_is_that_state(pool: RankPool, tmp_path: Path) -> None:
    """It was written as "the model that training began with": without any weights, and with the step of others."""
    config = memory_config("tp2")
    config["megatron"]["model_path"] = str(work.write_folder(tmp_path / "model", FAMILIES["qwen3-tied"]))
    calm = pool.run(checkpoint_work.train_in_memory, 2, config, STEPS, tmp_path / "calm")
    killed(pool, config, 2, tmp_path / "job")
    again = partial(checkpoint_work.restore_from_memory, folder=tmp_path / "folder")
    found = pool.run(again, 2, config, STEPS, tmp_path / "job")
    for was, came in zip(calm, found, strict=True):
        assert (came["at"], came["metrics"], came["after"]) == (was["at"], was["metrics"][2:], was["after"])


@pytest.mark.parametrize("layout", ["tp2", "dp2-whole"])
def test_no_step_changes_a_state_that_is_being_copied(pool: RankPool, tmp_path: Path, layout: str) -> None:
    work = checkpoint_work.keeps_what_it_copies
    assert pool.run(work, 2, memory_config(layout), STEPS, tmp_path) == [True, True]


def test_a_state_counts_only_where_every_rank_has_it(pool: RankPool, tmp_path: Path) -> None:
    config = memory_config("tp2")
    killed(pool, config, 2, tmp_path)
    restore = partial(checkpoint_work.restore_from_memory, newer_than=1)
    found = pool.run(partial(restore, forgetful=1), 2, config, STEPS, tmp_path)
    assert found == [{"step": None, "unchanged": True}] * 2, (
        "rank 0 alone has step 2, and step 1 is not wanted"
    )
    found = pool.run(checkpoint_work.restore_from_memory, 2, config, STEPS, tmp_path)
    assert [one["step"] for one in found] == [1, 1], "both have the one before"


def test_nobody_goes_on_with_a_state_one_of_whose_bits_is_another(pool: RankPool, tmp_path: Path) -> None:
    """The bytes are compared as they are copied back, so the rank's tensors have them already."""
    config = memory_config("tp2")
    calm = pool.run(checkpoint_work.train_in_memory, 2, config, STEPS, tmp_path / "calm")
    killed(pool, config, 2, tmp_path / "job")
    restore = checkpoint_work.restore_from_memory
    found = pool.run(partial(restore, damaged=2), 2, config, STEPS, tmp_path / "job")
    assert found == [{"step": None, "spoilt": -1, "then": 0}] * 2, "the next source, or the first weights"
    killed(pool, config, 2, tmp_path / "again")
    found = pool.run(partial(restore, damaged=1), 2, config, STEPS, tmp_path / "again")
    for was, came in zip(calm, found, strict=True):
        assert (came["step"], came["after"]) == (1, was["after"]), "the one before is whole"


def test_a_step_that_the_ledger_has_not_and_another_layout_are_left_alone(
    pool: RankPool, tmp_path: Path
) -> None:
    killed(pool, memory_config("tp2"), 2, tmp_path)
    found = pool.run(
        partial(checkpoint_work.restore_from_memory, at_most=0), 2, memory_config("tp2"), STEPS, tmp_path
    )
    assert [one["step"] for one in found] == [None, None]
    found = pool.run(checkpoint_work.restore_from_memory, 2, memory_config("dp2"), STEPS, tmp_path)
    assert [one["step"] for one in found] == [None, None]
    found = pool.run(
        partial(checkpoint_work.restore_from_memory, at_most=1), 2, memory_config("tp2"), STEPS, tmp_path
    )
    assert [one["step"] for one in found] == [1, 1]


@pytest.mark.parametrize("job_ends", [False, True])
def test_what_is_in_host_memory_stays_for_the_next_rank_unless_the_job_ends(job_ends: bool) -> None:
    kept: list[bool] = []
    critic = MegatronCritic()
    critic.context = SimpleNamespace(job_ends=job_ends)  # type: ignore[assignment]  # all that is asked of it here
    critic.backend = SimpleNamespace(close=lambda *, keep: kept.append(keep))  # type: ignore[assignment]
    critic.teardown()
    assert kept == [not job_ends]


def test_a_rank_that_is_stuck_when_the_job_ends_removes_its_own_beside_the_call() -> None:
    told: list[str] = []
    critic = MegatronCritic()
    critic.abandoned()
    critic.backend = SimpleNamespace(unlink=lambda: told.append("removed"))  # type: ignore[assignment]
    critic.abandoned()
    assert told == ["removed"]
