"""The token table against lists, and the live deltas against sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.rollouts.core.token_table import PAGE_TOKENS, TokenTable
from gyre.rollouts.token_log.retention import Retention

ROWS = 12

counts = st.one_of(st.integers(1, 20), st.sampled_from([PAGE_TOKENS - 1, PAGE_TOKENS, 3 * PAGE_TOKENS + 1]))
reports = st.dictionaries(st.integers(0, ROWS - 1), st.tuples(counts, st.integers(0, 2)), min_size=1)
steps = st.lists(st.one_of(reports, st.integers(0, ROWS - 1)), max_size=12)


@given(steps)
def test_what_was_appended_is_what_is_there(steps):
    table = TokenTable(ROWS // 2)
    table.grow(ROWS)
    expected = [[] for _ in range(ROWS)]
    made = 0
    for step in steps:
        if isinstance(step, int):
            assert table.clear(step) == len(expected[step])
            expected[step] = []
            continue
        rows = sorted(step)
        for row in rows:
            count, version = step[row]
            expected[row] += [(made + number, version) for number in range(count)]
            made += count
        ids = np.arange(made - sum(step[row][0] for row in rows), made, dtype=np.int32)
        table.append(
            np.array(rows, np.uint32),
            np.array([step[row][0] for row in rows], np.uint32),
            np.array([step[row][1] for row in rows], np.int32),
            ids,
            -ids.astype(np.float32),
        )
    for row, tokens in enumerate(expected):
        ids, logprobs = table.tokens(row)
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        assert ids.tolist() == [token for token, _ in tokens]
        assert (logprobs == -ids.astype(np.float32)).all()
        runs = table.runs(row)
        assert [version for version, start, end in runs for _ in range(end - start)] == [v for _, v in tokens]
        assert all(one[0] != other[0] for one, other in pairwise(runs))
        assert all(one[2] == other[1] for one, other in pairwise(runs))


def test_a_large_table_takes_its_pages_again():
    table = TokenTable(4)
    tokens = np.arange(4 * 1_000_000, dtype=np.int32)
    rows = np.arange(4, dtype=np.uint32)
    for _ in range(3):
        table.append(
            rows, np.full(4, 1_000_000, np.uint32), np.zeros(4, np.int32), tokens, tokens.astype(np.float32)
        )
        size = len(table._ids)
        assert table.tokens(3)[0].tolist() == tokens[3_000_000:].tolist()
        for row in range(4):
            table.clear(row)
    assert len(table._ids) == size


def test_a_correction_holds_from_where_it_begins():
    table = TokenTable(1)
    tokens = np.arange(10, dtype=np.int32)
    for version, first, end in ((1, 0, 4), (2, 4, 10)):
        table.append(
            np.array([0], np.uint32),
            np.array([end - first], np.uint32),
            np.array([version], np.int32),
            tokens[first:end],
            tokens[first:end].astype(np.float32),
        )
    table.correct(0, 2, [(1, 1), (3, 0), (2, 7)])
    assert table.runs(0) == [[1, 0, 3], [2, 3, 10]]
    table.correct(0, 0, [(5, 10)])
    assert table.runs(0) == [[5, 0, 10]]
    table.append(
        np.array([0], np.uint32),
        np.array([1], np.uint32),
        np.array([5], np.int32),
        tokens[:1],
        np.zeros(1, np.float32),
    )
    assert table.runs(0) == [[5, 0, 11]]


@given(
    st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=12),
    st.permutations(range(10)),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9)), max_size=6),
)
def test_a_delta_is_needed_until_its_last_sample_is_closed(deltas, order, joined):
    live = Retention()
    key_of = np.arange(100, 110, dtype=np.int64)  # sample i is in row i, with key 100 + i
    users = {seq: set(delta) for seq, delta in enumerate(deltas)}
    for seq, delta in users.items():
        rows = np.array(sorted(delta), np.uint32)
        live.add(seq, rows, key_of[rows])
    for seq, sample in joined:
        if seq in live:
            live.join(seq, sample, 100 + sample)
            users[seq].add(sample)
    closed = set()
    for sample in order:
        closed.add(sample)
        key_of[sample] = 200 + sample  # the row has another sample at once
        gone = live.closed(100 + sample, key_of)
        assert set(gone) == {seq for seq, delta in users.items() if sample in delta and delta <= closed}
    assert not len(live)
