"""How a step's batch becomes several updates: which groups each of them trains, and on which copy of the model.

`optim.epochs` passes over the batch, each cut into `optim.mini_batches` (PPO, arXiv 1707.06347).

Invariants:
- *each group once a pass*: the mini-batches of a pass have every group, each in one of them;
- *from the numbers alone*: order and cut follow from the seed, the step, the pass and the groups' ids. Nothing is
  drawn from a generator, so there is nothing to keep: a step that is trained again is cut the same way, by whatever
  number of ranks.

This module must not know about models, gradients or collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import xxhash

from gyre.config.sections import OptimSettings
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.micro_batcher import deal


def mini_batches_of(
    group_ids: Sequence[int], optim: OptimSettings, *, seed: int, step: int
) -> Iterator[list[int]]:
    """The ids that each update of step `step` trains, in the order in which they are made: `optim.epochs` times
    `optim.mini_batches` lists, whose lengths within a pass differ by one at most; fewer lists of fewer groups."""
    for epoch in range(optim.epochs):
        shuffled = sorted(group_ids, key=lambda one: (_draw(seed, step, epoch, one), one))
        size, longer = divmod(len(shuffled), optim.mini_batches)
        start = 0
        for index in range(optim.mini_batches):
            end = start + size + (index < longer)
            if end > start:  # an update of no group would move the weights by momentum alone
                yield shuffled[start:end]
            start = end


def share_of(group_ids: Sequence[int], groups: Mapping[int, Group], *, copy: int, copies: int) -> list[Group]:
    """The groups among `group_ids` that copy `copy` of `copies` of the model trains: about as many tokens on each."""
    tokens = {one: _tokens_of(groups[one]) for one in group_ids}
    return [groups[one] for one in deal(tokens, copies)[copy]]


def _draw(seed: int, step: int, epoch: int, group_id: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{step}/{epoch}/{group_id}".encode())


def _tokens_of(group: Group) -> int:
    """What goes through the model: each sample with its prompt."""
    return len(group.prompt_ids) * len(group.samples) + group.positions
