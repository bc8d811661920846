"""Log-probs from a split vocabulary are those of the whole one."""

from __future__ import annotations

import pytest

from tests.megatron import work
from tests.rank_pool import RankPool

pytestmark = pytest.mark.landing


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_split_logits_give_torchs_logprobs_entropies_and_gradients(pool: RankPool, ranks: int) -> None:
    """Of 16 columns 13 are true, so of four ranks the last one has a single true column."""
    pool.run(work.check_vocab_parallel, ranks, 3)
