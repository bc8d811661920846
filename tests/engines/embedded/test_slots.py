"""Slots: the longest prefix among them, and moves that are made at once, both against the plain way of doing it."""

from __future__ import annotations

import random

import pytest
import torch

from gyre.engines.embedded.batch_step import KVCache
from gyre.engines.embedded.prefixes import Prefixes, common_prefix
from gyre.engines.embedded.row_moves import RowMoves
from gyre.models.architecture import Architecture

SLOTS, CAPACITY = 7, 9


SHAPE = Architecture.qwen3(vocab=8, layers=2, hidden=8, heads=2, kv_heads=1, mlp=8, max_positions=CAPACITY)


@pytest.mark.parametrize("seed", range(20))
def test_moves_made_at_once_are_as_moves_made_one_by_one(seed: int) -> None:
    """And nothing stays behind what was moved, not even NaN."""
    dice = random.Random(seed)
    cache = KVCache(SHAPE, SLOTS, CAPACITY)
    moves, filled = RowMoves(SLOTS), []
    for slot in range(SLOTS):
        filled.append(dice.randint(0, CAPACITY))
        for tensor in (*cache.keys, *cache.values):
            tensor[slot, :, : filled[slot]] = torch.randn(tensor.shape[1], filled[slot], tensor.shape[3])
            if filled[slot] and dice.random() < 0.3:
                tensor[slot, :, filled[slot] - 1] = float("nan")
        moves.wrote(slot, filled[slot])
    plain = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    for _ in range(dice.randint(1, 12)):
        source, target = dice.randrange(SLOTS), dice.randrange(SLOTS)
        length = dice.randint(0, filled[source])
        moves.move(source, target, length)
        for tensor in plain:
            kept = tensor[source, :, :length].clone()
            tensor[target] = 0.0
            tensor[target, :, :length] = kept
        filled[target] = length
    moves.apply(cache)
    for tensor, expected in zip((*cache.keys, *cache.values), plain, strict=True):
        assert torch.equal(tensor.nan_to_num(77.0), expected.nan_to_num(77.0))
    assert moves.written == filled


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_is_that_of_a_search_slot_by_slot(seed: int) -> None:
    dice = random.Random(seed)
    stems = [[dice.randint(1, 3) for _ in range(dice.choice([3, 40, 70]))] for _ in range(3)]

    def tokens() -> list[int]:
        stem = dice.choice(stems)
        return [
            *stem[: dice.randint(1, len(stem))],
            *(dice.randint(1, 2) for _ in range(dice.randint(0, 40))),
        ]

    held: list[tuple[list[int], int] | None] = [None] * SLOTS
    for slot in range(SLOTS):
        if dice.random() < 0.8:
            mine = tokens()
            held[slot] = (mine, dice.randint(0, len(mine)))
    prefixes = Prefixes(SLOTS, {slot: one for slot, one in enumerate(held) if one is not None})
    running, asked = dice.randint(0, SLOTS), tokens()
    for _ in range(40):
        if dice.random() < 0.5:  # else what the slots hold has changed since the same was asked
            asked = tokens()
        common = [
            common_prefix(asked, one[0], min(len(asked) - 1, len(one[0]))) if one else 0 for one in held
        ]
        ready = [min(length, one[1]) if one else 0 for length, one in zip(common, held, strict=True)]
        best, longest, soon = prefixes.longest(asked, running)
        assert longest == max(ready)
        assert ready[best] == longest
        assert soon == max(common[:running], default=0)
        slot = dice.randrange(SLOTS)
        if dice.random() < 0.3:
            held[slot] = None
            prefixes.drop(slot)
        else:
            mine = list(asked) if dice.random() < 0.5 else tokens()
            held[slot] = (mine, dice.randint(0, len(mine)))
            prefixes.put(slot, mine, held[slot][1])
        asked.extend([1] * dice.randint(0, 1))  # a request's own list grows
