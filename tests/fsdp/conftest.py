"""One pool of rank processes for all tests of this folder, and the folders of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fsdp.work import save_model
from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool(4, preload="tests.fsdp.preload")
    yield made
    made.close()


@pytest.fixture(scope="session")
def folder_of(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a kind, as transformers saves it."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            pool.run(save_model, 1, kind, root / kind)
        return root / kind

    return folder
