"""Samples side by side in one row of tokens: each is read as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.workloads.fsdp.passes import rows_of as passes_of_one
from gyre.workloads.learner.packing import (
    PATH_KEYS,
    Node,
    Pass,
    TrainingRow,
    laid_out,
    pack,
    pack_all_but_rest,
    paths_of,
)
from tests.workloads.learner.trees import drawn_tree, rows_of_tree

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8)
"""Of prompts and answers."""


def rows_of(lengths: list[tuple[int, int]]) -> list[TrainingRow]:
    """No token is in two of them."""
    rows, first = [], 1
    for number, (prompt, answer) in enumerate(lengths):
        ids = np.arange(first, first + prompt + answer, dtype=np.int32)
        values = {"logprobs": ids[prompt:].astype(np.float32)}
        rows.append(TrainingRow(ids[:prompt], ids[prompt:], values, tag=(number, 0)))
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


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=5)), min_size=1, max_size=5
)
"""Of each its prompt's tokens, and those of its answers."""


def grouped(groups: list[tuple[int, list[int]]]) -> list[TrainingRow]:
    """No two groups have the same prompt, no two rows the same answer."""
    rows, first = [], 1000
    for number, (prompt_tokens, answers) in enumerate(groups):
        prompt = np.arange(prompt_tokens, dtype=np.int32) + 100 * number
        for sample, length in enumerate(answers):
            answer = np.arange(first, first + length, dtype=np.int32)
            first += length
            rows.append(
                TrainingRow(prompt, answer, {"logprobs": answer.astype(np.float32)}, tag=(number, sample))
            )
    return rows


def read_back(one: Pass, rows: Sequence[TrainingRow]) -> None:
    """Each row is its path through the pass."""
    paths = paths_of(one.lengths, one.parents or [-1] * len(one.lengths))
    by_end = {path[-1]: path for path in paths}
    first = 0
    for number, row in enumerate(rows):
        predicted = slice(first, first + len(row.token_ids))
        path = by_end[int(one.columns[predicted][-1])]
        assert one.tokens[path].tolist() == [*row.prompt_ids, *row.token_ids[:-1]]
        assert one.positions[path].tolist() == list(range(row.length))
        assert one.columns[predicted].tolist() == path[len(row.prompt_ids) - 1 :].tolist()
        assert one.targets[predicted].tolist() == row.token_ids.tolist()
        assert one.rows[predicted].tolist() == [number] * len(row.token_ids)
        for name, value in row.values.items():
            assert one.values[name][predicted].tolist() == value.tolist()
        first = predicted.stop
    assert first == len(one.targets)
    assert len(set(one.columns.tolist())) == first, "a token predicts for one row alone"
    assert list(one.tags) == [row.tag for row in rows]
    assert list(one.counts) == [len(row.token_ids) for row in rows]


@given(GROUPS, st.integers(1, 40), st.integers(1, 4))
def test_every_row_of_a_tree_is_read_back_as_its_path(
    groups: list[tuple[int, list[int]]], max_tokens: int, multiple: int
) -> None:
    rows = grouped(groups)
    left = rows
    for one in pack(rows, max_tokens=max_tokens, multiple=multiple, prompts_once=True):
        mine, left = left[: len(one.tags)], left[len(one.tags) :]
        read_back(one, mine)
        width = len(one.tokens)
        assert width % multiple == 0
        assert len(mine) == 1 or width < max_tokens + multiple
        keys = sum(map(len, paths_of(one.lengths, one.parents))) if one.parents else width
        assert len(mine) == 1 or keys < PATH_KEYS * max_tokens + multiple
        prompts = [row.tag[0] for row in mine if row.tag]
        shared = sum((prompts.count(group) - 1) * (groups[group][0] - 1) for group in set(prompts))
        needed = sum(row.length for row in mine) - shared
        assert width == needed + -needed % multiple
        apart = [again for row in mine for again in pack([row], max_tokens=1)]
        for found, wanted in zip(passes_of_one(one), apart, strict=True):
            same(found, wanted)
    assert not left


def same(found: Pass, wanted: Pass) -> None:
    for name in ("tokens", "positions", "columns", "targets", "rows"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    assert found.values["logprobs"].tolist() == wanted.values["logprobs"].tolist()
    assert (found.lengths, list(found.tags), list(found.counts), found.parents) == (
        wanted.lengths,
        list(wanted.tags),
        list(wanted.counts),
        wanted.parents,
    )


@given(LENGTHS, st.integers(1, 20), st.integers(1, 4))
def test_rows_that_share_nothing_are_packed_as_ever(
    lengths: list[tuple[int, int]], max_tokens: int, multiple: int
) -> None:
    rows = rows_of(lengths)
    found, wanted = (
        list(pack(rows, max_tokens=max_tokens, multiple=multiple, prompts_once=once))
        for once in (True, False)
    )
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


@given(GROUPS, st.integers(1, 20))
def test_what_is_left_of_groups_is_less_than_a_small_pass(
    groups: list[tuple[int, list[int]]], least_tokens: int
) -> None:
    rows = grouped(groups)
    passes, rest = pack_all_but_rest(rows, max_tokens=30, least_tokens=least_tokens, prompts_once=True)
    assert [tag for one in passes for tag in one.tags] + [row.tag for row in rest] == [
        row.tag for row in rows
    ]
    assert sum(len(one.tokens) for one in pack(rest, max_tokens=30, prompts_once=True)) < least_tokens


def test_a_pass_with_more_keys_than_kernels_should_get_is_cut() -> None:
    """Answers are short beside their prompt: a pass would have sixteen times as many keys as tokens."""
    rows = grouped([(100, [1] * 16)])
    passes = list(pack(rows, max_tokens=150, prompts_once=True))
    assert [len(one.counts) for one in passes] == [5, 5, 5, 1]
    for one in passes[:3]:
        assert sum(map(len, paths_of(one.lengths, one.parents))) <= PATH_KEYS * 150


def test_the_rows_of_a_tree_of_any_depth_are_its_paths() -> None:
    nodes = drawn_tree(48)
    for multiple in (1, 8):
        one = laid_out(nodes, multiple)
        assert len(one.tokens) % multiple == 0
        ends = np.cumsum(one.lengths)
        rows = rows_of_tree(nodes)
        paths = paths_of(one.lengths, one.parents)
        assert max(len(set(np.searchsorted(ends, path, side="right"))) for path in paths) == 4
        read_back(one, rows)


def test_a_node_goes_on_after_the_whole_of_its_parent() -> None:
    one = laid_out([Node(np.array([5, 6, 7], np.int32)), *branches(0, [8, 9], [10])])
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert [path.tolist() for path in paths_of(one.lengths, one.parents)] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5],
    ]


def branches(parent: int, *tokens: list[int]) -> list[Node]:
    ids = [np.array(some, np.int32) for some in tokens]
    return [Node(one, parent, TrainingRow(one[:1], one)) for one in ids]
