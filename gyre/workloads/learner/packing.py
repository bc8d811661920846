"""Samples as packed passes: sequences side by side in one row of tokens, with what the loss needs of each token.

What sequences have in common need not be there for each: a pass is of *nodes*, some of which go on after another
one's tokens, and a sequence is the *path* from a root to a leaf. A branch begins with the token that predicts the first
of its targets, so each token that predicts is of one sequence.

Invariants:
- *whole sequences*: a sequence is in one pass, so what is normalised by its length can be;
- *the same on every rank of a replica*: a function of the samples and the settings alone;
- *a path is its sequence*: its nodes' tokens, one after the other, are the prompt and the answer, at the positions that
  they have alone.

This module must not know about models or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PATH_KEYS = 4
"""Where prompts are computed once, a pass attends to at most so many times `max_tokens` keys: those of its nodes'
paths, which kernels get side by side. Prompts of 1,000 tokens with answers of 10 would have 14 times as many keys as
tokens; prompts of 1,024 with answers of 190, in groups of 8, have 4.2 times as many."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A prompt int32 `[p]`, the tokens int32 `[t]` that followed it, and values by name, float32 `[t]` each."""

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    tag: tuple[int, int] | None = None
    """A group's id, and the number of the sample in it."""

    @property
    def length(self) -> int:
        """Inputs: the last token is predicted, not read."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Pass:
    """What goes through the model at once.

    `tokens`, `positions` int64 `[width]`; `lengths` of the nodes in it, depth first, padding included as one of its
    own. Where no node has a parent, the nodes are the sequences. Per predicted token, `[n]`: `columns` (which input
    predicts it), `targets`, `rows` (which sequence it is of), all int64, and `values` by name, float32.
    """

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    columns: Tensor
    targets: Tensor
    rows: Tensor
    values: dict[str, Tensor]
    tags: Sequence[tuple[int, int] | None] = ()
    """Of each sequence but padding, whose it is."""
    counts: Sequence[int] = ()
    """How many predicted tokens each has."""
    parents: Sequence[int] = ()
    """Of each node the number of the one whose tokens its own go on after, -1 where it begins a sequence; () where each
    does."""

    @property
    def own_tokens(self) -> int:
        """How many tokens are of sequences: the padding, which is the last node then, is of none."""
        trunks = {parent for parent in self.parents if parent >= 0}
        is_padded = len(self.lengths) - len(trunks) > len(self.counts) > 0
        return sum(self.lengths) - (self.lengths[-1] if is_padded else 0)

    def to(self, device: torch.device) -> Pass:
        """On the device; the host does not wait for it. A copy from pageable memory would wait for all that the device
        has to do before."""

        def moved(tensor: Tensor) -> Tensor:
            return on_device(tensor, device)

        return Pass(
            moved(self.tokens),
            moved(self.positions),
            self.lengths,
            moved(self.columns),
            moved(self.targets),
            moved(self.rows),
            {name: moved(value) for name, value in self.values.items()},
            self.tags,
            self.counts,
            self.parents,
        )


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens int32 `[w]` that go on after those of the node with number `parent`, or begin a sequence. The last of them
    predict the tokens of `row`, where it has one."""

    tokens: NDArray[np.int32]
    parent: int = -1
    row: TrainingRow | None = None


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor in host memory, made in the order of the device's work: the host goes on at once."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pack(
    rows: Sequence[TrainingRow], *, max_tokens: int, multiple: int = 1, prompts_once: bool = False
) -> Iterator[Pass]:
    """Passes of at most `max_tokens` inputs, in the order of the rows; a longer row is a pass of its own. The width of
    each is a multiple of `multiple`. With `prompts_once` rows of the same prompt that stand beside each other in a pass
    have it there once. Raises ValueError for a row without a prompt or without tokens."""
    for some in _together(rows, max_tokens, prompts_once):
        yield laid_out(nodes_of(some, prompts_once=prompts_once), multiple)


def pack_all_but_rest(
    rows: Sequence[TrainingRow],
    *,
    max_tokens: int,
    multiple: int = 1,
    least_tokens: int,
    prompts_once: bool = False,
) -> tuple[list[Pass], list[TrainingRow]]:
    """As `pack`, but the rows of a last pass of fewer than `least_tokens` inputs are returned as they are."""
    parts = [nodes_of(some, prompts_once=prompts_once) for some in _together(rows, max_tokens, prompts_once)]
    rest = parts.pop() if parts and sum(len(node.tokens) for node in parts[-1]) < least_tokens else []
    return [laid_out(some, multiple) for some in parts], [node.row for node in rest if node.row is not None]


def _together(
    rows: Sequence[TrainingRow], max_tokens: int, prompts_once: bool
) -> Iterator[list[TrainingRow]]:
    """The rows of each pass."""
    held: list[TrainingRow] = []
    width = keys = sharing = 0
    for row in rows:
        if len(row.prompt_ids) == 0 or len(row.token_ids) == 0:
            raise ValueError("log-probs need rows with at least one prompt token and one sampled token")
        tokens = path = row.length
        if prompts_once and held and _share(held[-1], row):
            shared = len(row.prompt_ids) - 1
            tokens = row.length - shared
            path += shared if sharing == 1 else 0  # the row before becomes a branch too, which attends to it
            sharing += 1
        else:
            sharing = 1
        if held and (width + tokens > max_tokens or keys + path > PATH_KEYS * max_tokens):
            yield held
            held, width, keys, sharing = [], 0, 0, 1
            tokens = path = row.length
        held.append(row)
        width += tokens
        keys += path
    if held:
        yield held


def _share(one: TrainingRow, other: TrainingRow) -> bool:
    """Whether they have the same prompt, and more of it than the token that predicts."""
    mine, its = one.prompt_ids, other.prompt_ids
    return len(mine) > 1 and (mine is its or np.array_equal(mine, its))


def nodes_of(rows: Sequence[TrainingRow], *, prompts_once: bool) -> list[Node]:
    """The nodes of a pass of these rows: a sequence each, or, with `prompts_once`, what the prompts of several that
    stand beside each other have in common, and then their branches."""
    nodes: list[Node] = []
    trunk = -1
    for at, row in enumerate(rows):
        goes_on = prompts_once and at > 0 and _share(rows[at - 1], row)
        branches = goes_on or (prompts_once and at + 1 < len(rows) and _share(row, rows[at + 1]))
        if branches and not goes_on:
            trunk = len(nodes)
            nodes.append(Node(row.prompt_ids[:-1]))
        own = row.prompt_ids[-1:] if branches else row.prompt_ids
        nodes.append(Node(np.concatenate([own, row.token_ids[:-1]]), trunk if branches else -1, row))
    return nodes


def laid_out(nodes: Sequence[Node], multiple: int = 1) -> Pass:
    """A pass of the nodes, which stand in depth-first order; its width is a multiple of `multiple`."""
    rows = [node.row for node in nodes if node.row is not None]
    inputs = [node.tokens for node in nodes]
    parents = [node.parent for node in nodes]
    padding = -sum(len(one) for one in inputs) % multiple
    if padding:
        inputs.append(np.zeros(padding, dtype=np.int32))
        parents.append(-1)
    lengths = [len(one) for one in inputs]
    ends = np.cumsum(lengths)
    columns = [
        np.arange(end - len(node.row.token_ids), end)
        for node, end in zip(nodes, ends, strict=False)
        if node.row is not None
    ]

    def joined(parts: Sequence[NDArray[np.generic]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    return Pass(
        tokens=joined(inputs, np.int64),
        positions=joined(positions_of(lengths, parents), np.int64),
        lengths=lengths,
        columns=joined(columns, np.int64),
        targets=joined([row.token_ids for row in rows], np.int64),
        rows=torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor([len(row.token_ids) for row in rows])
        ),
        values={name: joined([row.values[name] for row in rows], np.float32) for name in rows[0].values},
        tags=[row.tag for row in rows],
        counts=[len(row.token_ids) for row in rows],
        parents=parents if max(parents) >= 0 else (),
    )


def positions_of(lengths: Sequence[int], parents: Sequence[int]) -> list[NDArray[np.int64]]:
    """Of each node, where its tokens stand in their sequences."""
    ends: list[int] = []
    found = []
    for length, parent in zip(lengths, parents, strict=True):
        start = ends[parent] if parent >= 0 else 0
        ends.append(start + length)
        found.append(np.arange(start, start + length))
    return found


def paths_of(lengths: Sequence[int], parents: Sequence[int]) -> list[NDArray[np.int64]]:
    """Of each node, which tokens of the pass its path has: those of the nodes that it goes on after, and its own."""
    found: list[NDArray[np.int64]] = []
    end = 0
    for length, parent in zip(lengths, parents, strict=True):
        own = np.arange(end, end + length)
        found.append(np.concatenate([found[parent], own]) if parent >= 0 else own)
        end += length
    return found
