"""Groups of rollouts of several turns for tests: rows with tokens that nobody drew, several a rollout."""

from __future__ import annotations

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun

MOST_SHARED = 8
"""Tokens that a row has in common with the one before, so that all of them fit into a small model."""


def sessions(
    start: int, count: int, *, seed: int = 0, n: int = 3, vocab: int = 17, most_turns: int = 3
) -> list[Group]:
    """Scored groups of `n` rollouts, in rows of up to `most_turns` turns with something between them that was not
    drawn. The second and third row of a rollout go on from a beginning of the row before, in which they drew nothing;
    of the first group's first rollout there are three. There are log-probs of an engine and a reference, and values."""
    draw = np.random.default_rng([seed, start])
    groups = []
    for group_id in range(start, start + count):
        prompt = draw.integers(0, vocab, int(draw.integers(2, 6))).astype(np.int32)
        group = Group(group_id, prompt)
        for rollout in range(n):
            before: Sample | None = None
            for _ in range(3 if group_id == start and rollout == 0 else int(draw.integers(1, 4))):
                before = _row(draw, before, vocab, most_turns)
                before.rollout, before.reward = rollout, float((rollout + group_id) % 3 == 0)
                group.samples.append(before)
        groups.append(group)
    return groups


def _row(draw: np.random.Generator, before: Sample | None, vocab: int, most_turns: int) -> Sample:
    tokens: list[int] = []
    if before is not None:
        tokens += before.token_ids[: draw.integers(1, min(len(before.token_ids), MOST_SHARED) + 1)].tolist()
    mask = [False] * len(tokens)
    for turn in range(int(draw.integers(1, most_turns + 1))):
        said = int(draw.integers(1, 4))
        between = int(draw.integers(1, 3)) if turn or before is not None else int(draw.integers(0, 2))
        tokens += draw.integers(0, vocab, between + said).tolist()
        mask += [False] * between + [True] * said
    drawn, length = np.array(mask), len(tokens)
    cut = int(draw.integers(0, length + 1))
    return Sample(
        np.array(tokens, np.int32),
        _logprobs(draw, drawn),
        (VersionRun(0, 0, cut), VersionRun(1, cut, length)),
        extras={
            "ref_logprobs": _logprobs(draw, drawn),
            "values": np.where(drawn, draw.standard_normal(length), 0.0).astype(np.float32),
        },
        mask=drawn,
    )


def _logprobs(draw: np.random.Generator, drawn: np.ndarray) -> np.ndarray:
    return np.where(drawn, -2.8 + 0.3 * draw.standard_normal(len(drawn)), 0.0).astype(np.float32)
