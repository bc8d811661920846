"""One pool of rank processes for all tests of this folder, and what plain torch makes of the same groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4, preload="tests.megatron.preload")
    yield made
    made.close()
