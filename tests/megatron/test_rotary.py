"""The rotation of queries and keys is Megatron's own, in fewer kernels."""

from __future__ import annotations

import pytest

from tests.megatron import rotary_work
from tests.rank_pool import RankPool


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_it_is_megatrons_in_fewer_kernels(pool: RankPool, dtype: str, within: float) -> None:
    (found,) = pool.run(rotary_work.rotations, 1, dtype)
    mine, theirs = found["mine"], found["megatrons"]
    assert mine["rotated"] == pytest.approx(theirs["rotated"], abs=within, rel=within)
    assert mine["gradient"] == pytest.approx(theirs["gradient"], abs=within, rel=within)
    assert mine["kernels"] == 8 + 2, "and those two for the slice that the test takes"
    assert theirs["kernels"] >= 2 * 10
