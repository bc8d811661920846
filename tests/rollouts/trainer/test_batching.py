"""Micro-batches: every sample leaves once, within bounds, and the gradient is that of the whole batch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gyre.rollouts.trainer.batching import (
    BatchSettings,
    Counts,
    LossMean,
    MicroBatch,
    MicroBatcher,
    deal,
    late_scale,
    loss_scale,
)

Finished = list[tuple[int, int, int]]
"""(sample, group, tokens)"""


def stream(batcher: MicroBatcher, finished: Finished) -> list[MicroBatch]:
    found = []
    for sample, group, tokens in finished:
        assert batcher.add(sample, group=group, tokens=tokens)
        while (batch := batcher.take()) is not None:
            found.append(batch)
    return found


def groups_of(size: int, lengths: list[int]) -> Finished:
    return [(sample, sample // size, tokens) for sample, tokens in enumerate(lengths)]


# -- by example -------------------------------------------------------------------------------------


def test_a_micro_batch_leaves_the_moment_the_lower_bound_is_met() -> None:
    batcher = MicroBatcher(BatchSettings(min_samples=3))
    assert [batch.samples for batch in stream(batcher, groups_of(1, [5] * 7))] == [(0, 1, 2), (3, 4, 5)]
    assert batcher.ready == Counts(1, 5, 1)
    assert [batch.samples for batch in batcher.flush()] == [(6,)]


def test_a_group_leaves_when_it_is_whole() -> None:
    batcher = MicroBatcher(BatchSettings(group_size=2))
    assert stream(batcher, [(0, 0, 5), (2, 1, 5)]) == []
    assert batcher.waiting_samples == 2
    assert batcher.flush() == []
    assert [batch.samples for batch in stream(batcher, [(3, 1, 5)])] == [(2, 3)]


def test_a_group_that_lost_a_sample_leaves_without_it() -> None:
    batcher = MicroBatcher(BatchSettings(group_size=3))
    stream(batcher, [(0, 0, 5), (1, 0, 5), (3, 1, 5)])
    batcher.expect(0, 2)
    (batch,) = batcher.flush()
    assert batch.samples == (0, 1)
    stream(batcher, [(6, 2, 1), (7, 2, 1)])
    with pytest.raises(ValueError, match="group 2 has 2"):
        batcher.expect(2, 1)
    batcher.expect(1, 0)
    assert batcher.waiting_samples == 2


def test_batches_are_dense() -> None:
    random_ = random.Random(3)
    lengths = [random_.randint(200, 6000) for _ in range(400)]
    batcher = MicroBatcher(BatchSettings(min_tokens=30_000, max_tokens=32_768))
    for sample, group, tokens in groups_of(1, lengths):
        batcher.add(sample, group=group, tokens=tokens)
    batches = []
    while (batch := batcher.take()) is not None:
        batches.append(batch)
    densities = [batch.counts.tokens / 32_768 for batch in batches]
    assert sum(densities) / len(densities) > 0.97


def test_groups_that_come_whole_are_units_of_their_own() -> None:
    batcher = MicroBatcher(BatchSettings(min_units=2, max_units=3, mini_batch_units=5))
    batcher.add_whole(7, samples=4, tokens=40)
    assert batcher.take() is None
    for group, samples in ((3, 4), (9, 0), (1, 4), (5, 4)):
        batcher.add_whole(group, samples=samples, tokens=10 * samples)
    batches = [batcher.take(), batcher.take(), batcher.take()]
    assert [batch and batch.units for batch in batches] == [(7, 3, 1), (9, 5), None]
    assert [batch.completes_mini_batch for batch in batches if batch] == [False, True]
    assert batches[0] is not None
    assert batches[0].counts == Counts(12, 120, 3)


@given(st.dictionaries(st.integers(0, 99), st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_units_are_dealt_to_ranks_by_their_tokens(tokens: dict[int, int], ranks: int) -> None:
    shares = deal(tokens, ranks)
    assert len(shares) == ranks
    assert sorted(unit for share in shares for unit in share) == sorted(tokens)
    loads = [sum(tokens[unit] for unit in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens.values(), default=0)
    if len(tokens) >= ranks and all(tokens.values()):
        assert all(shares)
    reordered = dict(reversed(list(tokens.items())))
    assert deal(reordered, ranks) == shares


def test_the_oldest_is_never_passed_over() -> None:
    batcher = MicroBatcher(BatchSettings(min_tokens=10, max_tokens=12))
    assert stream(batcher, [(0, 0, 1), (1, 1, 12)])[0].samples == (0,)  # full: the other does not fit


def test_no_mini_batch_boundary_is_crossed() -> None:
    batcher = MicroBatcher(BatchSettings(min_samples=4, group_size=2, mini_batch_units=3))
    batches = stream(batcher, groups_of(2, [1] * 24))
    assert [(batch.mini_batch, len(batch.samples), batch.completes_mini_batch) for batch in batches] == [
        (mini, count, last) for mini in range(4) for count, last in ((4, False), (2, True))
    ]


def test_a_sample_that_comes_again_is_refused_until_its_mini_batch_is_trained() -> None:
    batcher = MicroBatcher(BatchSettings(mini_batch_units=1))
    assert batcher.add(0, group=0, tokens=1)
    assert not batcher.add(0, group=0, tokens=1)
    assert batcher.take() is not None
    assert not batcher.add(0, group=0, tokens=1)
    batcher.trained(0)
    assert batcher._known == set()


@pytest.mark.parametrize(
    "wrong",
    [{"min_samples": 5, "max_samples": 4}, {"min_tokens": -1}, {"max_tokens": 0}, {"group_size": 0}],
)
def test_bounds_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"bound|at least 1"):
        BatchSettings(**wrong)


# -- for whatever comes -----------------------------------------------------------------------------


@st.composite
def bounds(draw: st.DrawFn) -> BatchSettings:
    min_samples, min_tokens = draw(st.integers(0, 9)), draw(st.integers(0, 200))
    min_units = draw(st.integers(0, 3))
    return BatchSettings(
        min_samples=min_samples,
        min_tokens=min_tokens,
        max_samples=draw(st.none() | st.integers(max(min_samples, 1), 20)),
        max_tokens=draw(st.none() | st.integers(max(min_tokens, 1), 500)),
        min_units=min_units,
        max_units=draw(st.none() | st.integers(max(min_units, 1), 6)),
        group_size=draw(st.sampled_from([None, 1, 2, 4])),
        mini_batch_units=draw(st.none() | st.integers(1, 9)),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Finished:
    finished = groups_of(4, draw(st.lists(st.integers(1, 300), max_size=48)))
    return draw(st.permutations(finished))


@settings(deadline=None)
@given(limits=bounds(), finished=arrivals(), flush_after=st.integers(0, 60))
def test_each_sample_leaves_once_whole_and_within_bounds(
    limits: BatchSettings, finished: Finished, flush_after: int
) -> None:
    if limits.group_size is not None:
        finished = [(sample, sample // limits.group_size, tokens) for sample, _, tokens in finished]
    tokens_of = {sample: tokens for sample, _, tokens in finished}
    unit_of = {sample: group if limits.group_size else sample for sample, group, _ in finished}
    batcher = MicroBatcher(limits)
    batches = [(batch, False) for batch in stream(batcher, finished[:flush_after])]
    batches += [(batch, True) for batch in batcher.flush()]
    batches += [(batch, False) for batch in stream(batcher, finished[flush_after:])]
    batches += [(batch, True) for batch in batcher.flush()]

    left = [sample for batch, _ in batches for sample in batch.samples]
    came = [unit_of[sample] for sample in tokens_of]
    whole = {sample for sample in tokens_of if came.count(unit_of[sample]) == (limits.group_size or 1)}
    assert sorted(left) == sorted(whole)
    for batch, flushed in batches:
        units = {unit_of[sample] for sample in batch.samples}
        assert len(batch.samples) == len(units) * (limits.group_size or 1)
        tokens = sum(tokens_of[sample] for sample in batch.samples)
        assert batch.counts == (len(batch.samples), tokens, len(units))
        assert set(batch.units) == units
        assert batch.samples
        within = (
            (limits.max_samples is None or batch.counts.samples <= limits.max_samples)
            and (limits.max_tokens is None or batch.counts.tokens <= limits.max_tokens)
            and (limits.max_units is None or batch.counts.units <= limits.max_units)
        )
        assert within or len(units) == 1
        enough = (
            batch.counts.samples >= limits.min_samples
            and batch.counts.tokens >= limits.min_tokens
            and batch.counts.units >= limits.min_units
        )
        has_upper = (limits.max_samples, limits.max_tokens, limits.max_units) != (None, None, None)
        assert enough or flushed or batch.completes_mini_batch or has_upper
    if limits.mini_batch_units is not None:
        sizes: dict[int, set[int]] = {}
        for batch, _ in batches:
            sizes.setdefault(batch.mini_batch, set()).update(unit_of[sample] for sample in batch.samples)
        assert all(
            len(units) == limits.mini_batch_units for mini, units in sizes.items() if mini + 1 in sizes
        )
        assert all(len(units) <= limits.mini_batch_units for units in sizes.values())
        completed = [batch.mini_batch for batch, _ in batches if batch.completes_mini_batch]
        assert completed == [mini for mini in sizes if len(sizes[mini]) == limits.mini_batch_units]


@settings(deadline=None)
@given(limits=bounds(), finished=arrivals(), order=st.randoms(use_true_random=False))
def test_the_union_does_not_depend_on_the_order(
    limits: BatchSettings, finished: Finished, order: random.Random
) -> None:
    limits = replace(limits, group_size=limits.group_size and 4)
    unions = []
    for _ in range(2):
        batcher = MicroBatcher(limits)
        batches = stream(batcher, finished) + batcher.flush()
        unions.append({sample for batch in batches for sample in batch.samples})
        finished = finished.copy()
        order.shuffle(finished)
    assert unions[0] == unions[1]


# -- the gradient -----------------------------------------------------------------------------------


def gradient(
    weights: NDArray[np.float64],
    samples: list[NDArray[np.float64]],
    advantages: NDArray[np.float64],
    mean: LossMean,
) -> NDArray[np.float64]:
    """Of a policy-gradient loss whose token log-probs are those of a logistic model: d/dw -A log s(w.x)."""
    per_token = [
        -advantage * (1 - 1 / (1 + np.exp(-tokens @ weights)))[:, None] * tokens
        for tokens, advantage in zip(samples, advantages, strict=True)
    ]
    if mean is LossMean.SAMPLE:
        return np.mean([part.mean(axis=0) for part in per_token], axis=0)
    return np.concatenate(per_token).mean(axis=0)


def grpo(rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = rewards[groups == group]
        found[groups == group] = (own - own.mean()) / (own.std() + 1e-6)
    return found


@pytest.mark.parametrize("mean", list(LossMean))
def test_streamed_groups_give_the_advantages_and_the_gradient_of_the_whole_batch(mean: LossMean) -> None:
    random_ = np.random.default_rng(5)
    size, count = 4, 48
    lengths = random_.integers(1, 40, count)
    samples = [random_.normal(size=(length, 6)) for length in lengths]
    rewards, groups = random_.normal(size=count), np.arange(count) // size
    weights = random_.normal(size=6)
    advantages = grpo(rewards, groups)
    whole = gradient(weights, samples, advantages, mean)

    batcher = MicroBatcher(
        BatchSettings(min_samples=5, max_tokens=250, group_size=size, mini_batch_units=count // size)
    )
    order = random_.permutation(count)
    batches = stream(batcher, [(int(i), int(groups[i]), int(lengths[i])) for i in order])
    assert len(batches) > 3
    total = Counts(count, int(lengths.sum()))
    assumed = Counts(count, 1000)
    summed, late = np.zeros(6), np.zeros(6)
    for batch in batches:
        chosen = np.array(batch.samples)
        streamed = grpo(rewards[chosen], groups[chosen])
        np.testing.assert_array_equal(streamed, advantages[chosen])
        part = gradient(weights, [samples[i] for i in chosen], streamed, mean)
        summed += loss_scale(batch.counts, total, mean) * part
        late += loss_scale(batch.counts, assumed, mean) * part
    np.testing.assert_allclose(summed, whole, rtol=1e-12)
    np.testing.assert_allclose(late * late_scale(assumed, total, mean), whole, rtol=1e-12)


def test_a_part_is_no_larger_than_its_whole() -> None:
    with pytest.raises(ValueError, match="a micro-batch of 5 samples"):
        loss_scale(Counts(5, 1), Counts(4, 10), LossMean.SAMPLE)
