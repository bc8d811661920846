"""Samples side by side in one row of tokens: each is read as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.workloads.learner.packing import Pass, Row, pack, pack_all_but_rest

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8)
"""Of prompts and answers."""


def rows_of(lengths: list[tuple[int, int]]) -> list[Row]:
    """No token is in two of them."""
    rows, first = [], 1
    for number, (prompt, answer) in enumerate(lengths):
        ids = np.arange(first, first + prompt + answer, dtype=np.int32)
        values = {"logprobs": ids[prompt:].astype(np.float32)}
        rows.append(Row(ids[:prompt], ids[prompt:], values, tag=(number, 0)))
        first += prompt + answer
    return rows


def sequences_of(one: Pass) -> list[tuple[list[int], list[int]]]:
    """The tokens and positions of each sequence in it, padding included."""
    ends = np.cumsum(one.lengths).tolist()
    return [
        (one.tokens[end - length : end].tolist(), one.positions[end - length : end].tolist())
        for end, length in zip(ends, one.lengths, strict=True)
    ]


@given(LENGTHS, st.integers(1, 20), st.integers(1, 4))
def test_each_sequence_is_read_from_its_beginning_and_each_token_predicted_by_the_one_before(
    lengths: list[tuple[int, int]], max_tokens: int, multiple: int
) -> None:
    rows = rows_of(lengths)
    left = list(rows)
    for one in pack(rows, max_tokens=max_tokens, multiple=multiple):
        width = len(one.tokens)
        assert width % multiple == 0
        mine, left = left[: len(one.tags)], left[len(one.tags) :]
        assert len(mine) == 1 or sum(row.length for row in mine) <= max_tokens
        assert list(one.tags) == [row.tag for row in mine]
        for row, (tokens, positions) in zip(mine, sequences_of(one), strict=False):
            assert tokens == [*row.prompt_ids, *row.token_ids[:-1]]
            assert positions == list(range(row.length))
        # Within a row tokens follow on each other, so the one before has the number before.
        assert one.tokens[one.columns].tolist() == [target - 1 for target in one.targets.tolist()]
        assert one.targets.tolist() == [token for row in mine for token in row.token_ids]
        assert one.values["logprobs"].tolist() == one.targets.tolist()
        assert one.rows.tolist() == [at for at, row in enumerate(mine) for _ in row.token_ids]
        assert list(one.counts) == [len(row.token_ids) for row in mine]
    assert left == []


@given(LENGTHS, st.integers(1, 20))
def test_a_last_pass_that_is_too_small_is_left_and_nothing_else(
    lengths: list[tuple[int, int]], least_tokens: int
) -> None:
    rows = rows_of(lengths)
    passes, rest = pack_all_but_rest(rows, max_tokens=20, least_tokens=least_tokens)
    assert [tag for one in passes for tag in one.tags] + [row.tag for row in rest] == [
        row.tag for row in rows
    ]
    assert sum(row.length for row in rest) < least_tokens


@pytest.mark.parametrize("lengths", [(0, 2), (2, 0)])
def test_a_row_without_prompt_or_tokens_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one prompt token and one sampled token"):
        list(pack(rows_of([(1, 1), lengths]), max_tokens=8))
