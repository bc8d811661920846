"""Micro-batches: every group leaves once, within bounds, and none waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.trainer.micro_batcher import BatchSettings, Counts, MicroBatch, MicroBatcher, deal

Finished = list[tuple[int, int, int]]
"""(group, samples, tokens)"""


def stream(batcher: MicroBatcher, finished: Finished) -> list[MicroBatch]:
    found = []
    for group, samples, tokens in finished:
        batcher.add(group, samples=samples, tokens=tokens)
        while (batch := batcher.take()) is not None:
            found.append(batch)
    return found


# -- by example -------------------------------------------------------------------------------------


def test_a_micro_batch_leaves_the_moment_the_lower_bound_is_met() -> None:
    batcher = MicroBatcher(BatchSettings(min_samples=3))
    assert [batch.groups for batch in stream(batcher, [(group, 1, 5) for group in range(7)])] == [
        (0, 1, 2),
        (3, 4, 5),
    ]
    assert batcher.ready == Counts(1, 5, 1)


def test_batches_are_dense() -> None:
    random_ = random.Random(3)
    batcher = MicroBatcher(BatchSettings(min_tokens=30_000, max_tokens=32_768))
    for group in range(400):
        batcher.add(group, samples=1, tokens=random_.randint(200, 6000))
    batches = []
    while (batch := batcher.take()) is not None:
        batches.append(batch)
    densities = [batch.counts.tokens / 32_768 for batch in batches]
    assert sum(densities) / len(densities) > 0.97


def test_the_last_group_of_a_mini_batch_leaves_though_it_is_below_the_bounds() -> None:
    batcher = MicroBatcher(BatchSettings(min_groups=2, max_groups=3, mini_batch_groups=5))
    batcher.add(7, samples=4, tokens=40)
    assert batcher.take() is None
    for group, samples in ((3, 4), (9, 0), (1, 4), (5, 4)):
        batcher.add(group, samples=samples, tokens=10 * samples)
    batches = [batcher.take(), batcher.take(), batcher.take()]
    assert [batch and batch.groups for batch in batches] == [(7, 3, 1), (9, 5), None]
    assert [batch.completes_mini_batch for batch in batches if batch] == [False, True]
    assert batches[0] is not None
    assert batches[0].counts == Counts(12, 120, 3)


@given(st.dictionaries(st.integers(0, 99), st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_groups_are_dealt_to_ranks_by_their_tokens(tokens: dict[int, int], ranks: int) -> None:
    shares = deal(tokens, ranks)
    assert len(shares) == ranks
    assert sorted(group for share in shares for group in share) == sorted(tokens)
    loads = [sum(tokens[group] for group in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens.values(), default=0)
    if len(tokens) >= ranks and all(tokens.values()):
        assert all(shares)
    reordered = dict(reversed(list(tokens.items())))
    assert deal(reordered, ranks) == shares


def test_the_oldest_is_never_passed_over() -> None:
    batcher = MicroBatcher(BatchSettings(min_tokens=10, max_tokens=12))
    assert stream(batcher, [(0, 1, 1), (1, 1, 12)])[0].groups == (0,)  # full: the other does not fit


def test_no_mini_batch_boundary_is_crossed() -> None:
    batcher = MicroBatcher(BatchSettings(min_samples=4, mini_batch_groups=3))
    batches = stream(batcher, [(group, 2, 2) for group in range(12)])
    assert [(len(batch.groups), batch.completes_mini_batch) for batch in batches] == [
        (2, False),
        (1, True),
    ] * 4


@pytest.mark.parametrize(
    "wrong",
    [{"min_samples": 5, "max_samples": 4}, {"min_tokens": -1}, {"max_tokens": 0}, {"mini_batch_groups": 0}],
)
def test_bounds_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"bound|at least 1"):
        BatchSettings(**wrong)


# -- for whatever comes -----------------------------------------------------------------------------


@st.composite
def bounds(draw: st.DrawFn) -> BatchSettings:
    min_samples, min_tokens = draw(st.integers(0, 9)), draw(st.integers(0, 200))
    min_groups = draw(st.integers(0, 3))
    return BatchSettings(
        min_samples=min_samples,
        min_tokens=min_tokens,
        max_samples=draw(st.none() | st.integers(max(min_samples, 1), 20)),
        max_tokens=draw(st.none() | st.integers(max(min_tokens, 1), 500)),
        min_groups=min_groups,
        max_groups=draw(st.none() | st.integers(max(min_groups, 1), 6)),
        mini_batch_groups=draw(st.none() | st.integers(1, 9)),
    )


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 300)), max_size=48)


@settings(deadline=None)
@given(limits=bounds(), found=sizes)
def test_each_group_leaves_once_and_within_bounds(
    limits: BatchSettings, found: list[tuple[int, int]]
) -> None:
    finished = [(group, samples, tokens) for group, (samples, tokens) in enumerate(found)]
    batcher = MicroBatcher(limits)
    batches = stream(batcher, finished)
    left = [group for batch in batches for group in batch.groups]
    assert len(left) == len(set(left)) == len(finished) - batcher.ready.groups
    for batch in batches:
        samples = sum(found[group][0] for group in batch.groups)
        tokens = sum(found[group][1] for group in batch.groups)
        assert batch.counts == (samples, tokens, len(batch.groups))
        within = (
            (limits.max_samples is None or samples <= limits.max_samples)
            and (limits.max_tokens is None or tokens <= limits.max_tokens)
            and (limits.max_groups is None or len(batch.groups) <= limits.max_groups)
        )
        assert within or len(batch.groups) == 1
        enough = (
            samples >= limits.min_samples
            and tokens >= limits.min_tokens
            and len(batch.groups) >= limits.min_groups
        )
        has_upper = (limits.max_samples, limits.max_tokens, limits.max_groups) != (None, None, None)
        assert enough or batch.completes_mini_batch or has_upper
    ready = batcher.ready
    assert (
        not ready.groups
        or ready.samples < limits.min_samples
        or ready.tokens < limits.min_tokens
        or ready.groups < limits.min_groups
    )
    if limits.mini_batch_groups is not None:
        count = 0
        for batch in batches:
            count += len(batch.groups)
            assert count <= limits.mini_batch_groups
            assert batch.completes_mini_batch == (count == limits.mini_batch_groups)
            if batch.completes_mini_batch:
                count = 0
