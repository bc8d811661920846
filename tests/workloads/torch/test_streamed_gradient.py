"""Streamed, permuted and unequal micro-batches over two Gloo ranks give the gradient of the whole batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.micro_batcher import BatchSettings, MicroBatch, MicroBatcher, deal
from gyre.workloads.algorithms.advantages import advantages_of
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.trainer.groups.group_state import tokens_of
from tests.rank_pool import RankPool
from tests.workloads.torch_workloads import CONFIG, PLAIN_GRADIENT, bind, rolled_out, step_of, steps_as_peer

TOLERANCE = {"rtol": 1e-4, "atol": 1e-7}
"""Of float32 sums in another order; the gradient's largest entries are near 0.1."""


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Twelve, of four samples down to one, and of different lengths."""
    found = rolled_out(bind(TorchActor()), 0, 12)
    for number, group in enumerate(found):
        group.samples = group.samples[: 4 - number % 4]
    assert len({tokens_of(group) for group in found}) > 4
    return found


def streamed(groups: list[Group], seed: int) -> list[MicroBatch]:
    """As they come, in some order: of at most five groups and 60 tokens, and never of one alone but at the end."""
    order = groups.copy()
    random.Random(seed).shuffle(order)
    batcher = MicroBatcher(
        BatchSettings(min_groups=2, max_groups=5, max_tokens=60, mini_batch_groups=len(groups))
    )
    batches: list[MicroBatch] = []
    for group in order:
        batcher.add(group.id, samples=len(group.samples), tokens=tokens_of(group))
        if random.Random(seed + group.id).random() < 0.5:  # the gang has room
            while (batch := batcher.take()) is not None:
                batches.append(batch)
    while (batch := batcher.take()) is not None:
        batches.append(batch)
    assert batches[-1].completes_mini_batch
    return batches


def shares_of(groups: list[Group], batches: list[MicroBatch], rank: int) -> list[list[Group]]:
    by_id = {group.id: group for group in groups}
    dealt = [deal({one: tokens_of(by_id[one]) for one in batch.groups}, 2)[rank] for batch in batches]
    return [[by_id[group_id] for group_id in share] for share in dealt]


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean-token-mean"])
def test_whatever_the_stream_the_gradient_is_that_of_the_whole_batch(
    groups: list[Group], ranks: RankPool, mean: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {**CONFIG, **PLAIN_GRADIENT, "loss": {"loss_agg_mode": mean}}
    ids = [group.id for group in groups]
    alone = bind(TorchActor(), config)
    alone.checkpoint(tmp_path)
    whole, metrics = step_of(alone, [groups], ids)
    assert np.abs(whole).max() > 1e-3

    cuts = [streamed(groups, seed) for seed in range(4)]
    assert len({tuple(batch.groups for batch in cut) for cut in cuts}) == 4
    assert len({batch.counts.samples for cut in cuts for batch in cut}) > 3
    shares = [[shares_of(groups, cut, rank) for cut in cuts] for rank in range(2)]
    results = ranks.run(steps_as_peer, 2, tmp_path, config, shares, ids)
    for (mine, told), (other, _) in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, whole, **TOLERANCE)
        assert told["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
        assert told["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)
        assert (told["groups"], told["samples"], told["tokens"]) == (
            metrics["groups"],
            metrics["samples"],
            metrics["tokens"],
        )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_advantages_on_a_stream_are_those_on_the_whole_batch_bit_by_bit(
    groups: list[Group], estimator: str
) -> None:
    settings = bind(TorchActor(), {**CONFIG, "loss": {"adv_estimator": estimator}}).settings.loss
    whole = iter(advantages_of(groups, settings))
    expected = {(group.id, at): next(whole) for group in groups for at in range(len(group.samples))}
    by_id = {group.id: group for group in groups}
    seen = 0
    for seed in range(5):
        for batch in streamed(groups, seed):
            part = [by_id[one] for one in batch.groups]
            found = iter(advantages_of(part, settings))
            for group in part:
                for at in range(len(group.samples)):
                    np.testing.assert_array_equal(next(found), expected[(group.id, at)])
                    seen += 1
    assert seen == 5 * len(expected)
