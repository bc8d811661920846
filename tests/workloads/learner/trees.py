"""Trees of tokens for tests: sessions of several turns that branch, and the sequences that are their paths."""

from __future__ import annotations

import numpy as np

from gyre.workloads.learner.packing import Node, TrainingRow

SHAPE = ((-1, 9, 0), (0, 6, 0), (1, 7, 3), (1, 1, 1), (0, 5, 0), (4, 12, 9), (4, 3, 0), (6, 4, 4), (6, 2, 1),
         (-1, 8, 5), (-1, 3, 0), (10, 2, 2), (10, 30, 21))  # fmt: skip
"""Of each node its parent, how many tokens it has, and how many tokens its last ones predict."""


def drawn_tree(vocab: int, *, seed: int = 0) -> list[Node]:
    """The nodes of `SHAPE`; the rows at its leaves have their whole path."""
    draw = np.random.default_rng(seed)
    nodes: list[Node] = []
    paths: list[np.ndarray] = []
    for number, (parent, count, predicts) in enumerate(SHAPE):
        tokens = draw.integers(3, vocab, count).astype(np.int32)
        paths.append(np.concatenate([paths[parent], tokens]) if parent >= 0 else tokens)
        row = None
        if predicts:
            start = len(paths[-1]) - predicts + 1
            answer = np.append(paths[-1][start:], draw.integers(3, vocab)).astype(np.int32)
            values = {"advantages": draw.standard_normal(predicts).astype(np.float32)}
            row = TrainingRow(paths[-1][:start], answer, values, tag=(number, 0))
        nodes.append(Node(tokens, parent, row))
    return nodes


def rows_of_tree(nodes: list[Node]) -> list[TrainingRow]:
    return [node.row for node in nodes if node.row is not None]
