"""The token table against lists, and which deltas are kept against sets."""

from __future__ import annotations

import sys
from itertools import pairwise
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rollouts.plane.token_table import PAGE_TOKENS, TokenTable
from gyre.rollouts.token_log.write_buffer import Retention

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
        for since in {0, len(ids) // 3, max(0, len(ids) - 1), len(ids)}:
            assert table.ids(row, since).tolist() == ids[since:].tolist()
        assert (logprobs == -ids.astype(np.float32)).all()
        runs = table.runs(row)
        assert [version for version, start, end in runs for _ in range(end - start)] == [v for _, v in tokens]
        assert all(one[0] != other[0] for one, other in pairwise(runs))
        assert all(one[2] == other[1] for one, other in pairwise(runs))


@pytest.mark.parametrize("attempt", range(5))
def test_a_row_is_read_while_the_table_shrinks(attempt):
    """Its pages move meanwhile."""
    rows, kept = 2000, 400
    table = TokenTable(rows + kept)
    for row in range(rows + kept):
        one = np.array([row], np.uint32), np.array([PAGE_TOKENS], np.uint32), np.array([0], np.int32)
        table.append(*one, np.full(PAGE_TOKENS, row, np.int32), np.zeros(PAGE_TOKENS, np.float32))
    wrong: list[int] = []
    is_over = Event()

    def read() -> None:
        while not is_over.is_set():
            wrong.extend(row for row in range(rows, rows + kept) if not (table.ids(row) == row).all())

    reader = Thread(target=read)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for row in range(rows):
            table.clear(row)
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(interval_s)
    assert not wrong


def test_a_large_table_takes_its_pages_again_and_gives_them_back():
    table = TokenTable(4)
    tokens = np.arange(4 * 1_000_000, dtype=np.int32)
    rows = np.arange(4, dtype=np.uint32)
    sizes = set()
    for _ in range(2):
        table.append(
            rows, np.full(4, 1_000_000, np.uint32), np.zeros(4, np.int32), tokens, tokens.astype(np.float32)
        )
        sizes.add(len(table._ids))
        assert table.tokens(3)[0].tolist() == tokens[3_000_000:].tolist()
        for row in range(4):
            table.clear(row)
        assert len(table._ids) == len(table._logprobs) == 1024 * PAGE_TOKENS
    assert sizes == {1 << 22}


def test_what_is_left_of_a_large_table_goes_on_in_a_small_one():
    """Rows of half a page and of three, most of which end; the others go on from where they were."""
    table = TokenTable(4096)
    rows = np.arange(4096, dtype=np.uint32)
    counts = np.where(rows % 2, PAGE_TOKENS // 2, 3 * PAGE_TOKENS).astype(np.uint32)
    before = np.arange(int(counts.sum()), dtype=np.int32)
    table.append(rows, counts, np.zeros(4096, np.int32), before, before.astype(np.float32))
    left = rows[(rows % 41 == 0) | (rows > 4080)]
    for row in set(rows.tolist()) - set(left.tolist()):
        table.clear(row)
    assert len(table._ids) <= 1024 * PAGE_TOKENS
    more = np.full(len(left), 5, np.uint32)
    after = -np.arange(5 * len(left), dtype=np.int32)
    table.append(left, more, np.zeros(len(left), np.int32), after, after.astype(np.float32))
    firsts = np.cumsum(counts) - counts
    for at, row in enumerate(left.tolist()):
        expected = [*range(firsts[row], firsts[row] + counts[row]), *after[5 * at : 5 * at + 5].tolist()]
        assert table.tokens(row)[0].tolist() == expected
        assert table.tokens(row)[1].tolist() == expected
    used = [page for pages in table._pages.values() for page in pages]
    assert sorted(used + table._free) == list(range(len(table._ids) // PAGE_TOKENS))


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
