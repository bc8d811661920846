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

    prefixes, held = Prefixes(SLOTS), []
    for slot in range(SLOTS):
        held.append((tokens(), 0) if dice.random() < 0.8 else None)
        if held[slot] is not None:
            mine = held[slot][0]
            held[slot] = (mine, dice.randint(0, len(mine)))
            prefixes.put(slot, *held[slot])
        else:
            prefixes.put(slot, [1, 2, 3], 3)
            prefixes.drop(slot)
    running = dice.randint(0, SLOTS)
    for _ in range(20):
        asked = tokens()
        common = [
            common_prefix(asked, one[0], min(len(asked) - 1, len(one[0]))) if one else 0 for one in held
        ]
        ready = [min(length, one[1]) if one else 0 for length, one in zip(common, held, strict=True)]
        best, longest, soon = prefixes.longest(asked, running)
        assert longest == max(ready)
        assert ready[best] == longest
        assert soon == max(common[:running], default=0)
