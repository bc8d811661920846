"""Chunks grow with the number of samples that run, so that the messages do not."""

from __future__ import annotations

import pytest

from gyre.rollouts.agent.engine_limits import CHUNKS_A_STEP, LARGEST, chunk_tokens


@pytest.mark.parametrize(
    ("running", "tokens"), [(0, 0), (1, 0), (128, 0), (160, 10), (256, 16), (512, 32), (4096, LARGEST)]
)
def test_a_chunk_is_longer_where_more_run(running: int, tokens: int) -> None:
    assert chunk_tokens(running) == tokens


def test_up_to_the_largest_a_decode_step_brings_no_more_chunks_than_that() -> None:
    for running in range(160, CHUNKS_A_STEP * LARGEST):
        assert running / chunk_tokens(running) < CHUNKS_A_STEP + 2
