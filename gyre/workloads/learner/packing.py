"""Samples as packed passes: sequences side by side in one row of tokens, with what the loss needs of each token.

What sequences have in common need not be there for each: a pass is of *nodes*, some of which go on after another
one's tokens, and a sequence is the *path* from a root to a leaf. Where a sequence goes on after another one's tokens,
these predict nothing of its own: it has the prompt in common, or what was drawn for the other one and is only read
here. So each token that predicts is of one sequence.

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
    mask: NDArray[np.bool_] | None = None
    """bool `[t]`: which of the tokens are predicted, the others being read alone; None where all are."""

    @property
    def length(self) -> int:
        """Inputs: the last token is predicted, not read."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    @property
    def predicted(self) -> NDArray[np.intp]:
        """Which of its tokens are predicted: their places, int64 `[n]`."""
        return np.arange(len(self.token_ids)) if self.mask is None else np.flatnonzero(self.mask)

    @property
    def count(self) -> int:
        """How many are predicted."""
        return len(self.token_ids) if self.mask is None else int(np.count_nonzero(self.mask))


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
    """Tokens int32 `[w]` that go on after those of the node with number `parent`, or begin a sequence. Where it has a
    `row` its path is the row's, and some of the path's tokens predict the row's."""

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
    have there once what they have in common. Raises ValueError for a row without a prompt or without tokens that are
    predicted."""
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
    width = keys = 0
    ends: list[int] = []
    """Of the nodes on the last row's path, where they end."""
    for row in rows:
        if len(row.prompt_ids) == 0 or row.count == 0:
            raise ValueError("log-probs need rows with at least one prompt token and one sampled token")
        shared = _shared(held[-1], row) if prompts_once and held else 0
        ends = [end for end in ends if end <= shared]
        splits = shared > 0 and shared not in ends  # what they share becomes a node, which attends to itself
        tokens, path = row.length - shared, row.length + (shared if splits else 0)
        if held and (width + tokens > max_tokens or keys + path > PATH_KEYS * max_tokens):
            yield held
            held, width, keys, ends, splits = [], 0, 0, [], False
            tokens = path = row.length
        held.append(row)
        width += tokens
        keys += path
        ends += [shared, row.length] if splits else [row.length]
    if held:
        yield held


def _shared(one: TrainingRow, other: TrainingRow) -> int:
    """After how many of the inputs of a row the next one may go on: they are the same, none of them predicts a token of
    the next one, and at least one more is the row's own. 0 where they have not the same prompt."""
    mine, its = one.prompt_ids, other.prompt_ids
    if mine is not its and not np.array_equal(mine, its):
        return 0
    if other.mask is None or other.mask[0]:
        return len(its) - 1
    most = len(its) - 1 + int(other.mask.argmax())
    count = min(len(one.token_ids), len(other.token_ids))
    differs = one.token_ids[:count] != other.token_ids[:count]
    same = int(differs.argmax()) if differs.any() else count
    return min(most, len(its) + same, one.length - 1)


@dataclass(slots=True)
class _Branch:
    """The inputs `start..end` of a row, which other rows go on after where it has children. `ends` is whether it is the
    row's last node."""

    row: TrainingRow
    start: int
    end: int
    ends: bool = True
    children: list[_Branch] = field(default_factory=list)

    def split(self, at: int) -> None:
        """End before input `at`; the rest is a child."""
        rest = _Branch(self.row, at, self.end, self.ends, self.children)
        self.end, self.ends, self.children = at, False, [rest]

    @property
    def tokens(self) -> NDArray[np.int32]:
        prompt = self.row.prompt_ids
        answer = self.row.token_ids[max(0, self.start - len(prompt)) : max(0, self.end - len(prompt))]
        return np.concatenate([prompt[self.start : self.end], answer])


def nodes_of(rows: Sequence[TrainingRow], *, prompts_once: bool) -> list[Node]:
    """The nodes of a pass of these rows: a sequence each, or, with `prompts_once`, what several that stand beside each
    other have in common, and then their branches."""
    roots: list[_Branch] = []
    path: list[_Branch] = []
    for at, row in enumerate(rows):
        shared = _shared(rows[at - 1], row) if prompts_once and at else 0
        while path and path[-1].start >= shared:
            path.pop()
        if path and path[-1].end > shared:
            path[-1].split(shared)
        branch = _Branch(row, shared, row.length)
        (path[-1].children if path else roots).append(branch)
        path.append(branch)
    nodes: list[Node] = []
    left = [(root, -1) for root in reversed(roots)]
    while left:
        branch, parent = left.pop()
        left += [(child, len(nodes)) for child in reversed(branch.children)]
        nodes.append(Node(branch.tokens, parent, branch.row if branch.ends else None))
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
    predicted = [row.predicted for row in rows]
    counts = [len(places) for places in predicted]
    paths = [
        path for path, node in zip(paths_of(lengths, parents), nodes, strict=False) if node.row is not None
    ]

    def joined(parts: Sequence[NDArray[np.generic]], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    def picked(parts: Sequence[NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        return [part[of] for part, of in zip(parts, predicted, strict=True)]

    return Pass(
        tokens=joined(inputs, np.int64),
        positions=joined(positions_of(lengths, parents), np.int64),
        lengths=lengths,
        columns=joined(
            [
                path[len(row.prompt_ids) - 1 + of]
                for path, row, of in zip(paths, rows, predicted, strict=True)
            ],
            np.int64,
        ),
        targets=joined(picked([row.token_ids for row in rows]), np.int64),
        rows=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)),
        values={
            name: joined(picked([row.values[name] for row in rows]), np.float32) for name in rows[0].values
        },
        tags=[row.tag for row in rows],
        counts=counts,
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
