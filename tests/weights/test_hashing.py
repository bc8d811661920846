"""Checksums on several threads find what one finds."""

from __future__ import annotations

import threading

import pytest

from gyre.weights.version.manifest import Chunk, first_wrong
from tests.waits import GENEROUS_S

CHUNKS = [Chunk(index, 0, index * 8, 8, f"{index:016x}") for index in range(40)]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_wrong_chunk_is_told(threads: int) -> None:
    assert first_wrong(CHUNKS, lambda chunk: chunk.index not in (7, 30), threads=threads) == CHUNKS[7]
    assert first_wrong(CHUNKS, lambda chunk: True, threads=threads) is None
    assert first_wrong([], lambda chunk: False, threads=threads) is None


def test_they_are_looked_at_side_by_side() -> None:
    together = threading.Barrier(4)

    def is_right(chunk: Chunk) -> bool:
        together.wait(GENEROUS_S)  # breaks where fewer than four are looked at at once
        return True

    assert first_wrong(CHUNKS, is_right, threads=4) is None
