"""Groups to check a class with: prompts of the job's task, answers drawn at random, and everything that judges add.

Equal arguments give equal groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.tasks.task import task_of

MakeGroups = Callable[[int, int], list[Group]]
"""`(first id, count)`: that many groups from that id on, whole and scored."""

SAMPLES = 4
LONGEST = 6


_ANY_TASK: Mapping[str, Any] = {"task": {}}
"""Arithmetic, where the job's `config` names neither a task nor a data set."""


def groups_of(config: Mapping[str, Any] | None) -> MakeGroups:
    """Over the prompts and the vocabulary of the job's `config`. Lengths differ within a group, and so do rewards."""
    task = task_of({**_ANY_TASK, **(config or {})})

    def make(first: int, count: int) -> list[Group]:
        return [
            _answered(task.prompt(group_id), task.tokenizer.vocab_size)
            for group_id in range(first, first + count)
        ]

    return make


def prompts_of(config: Mapping[str, Any] | None) -> MakeGroups:
    """The same groups without samples."""
    task = task_of({**_ANY_TASK, **(config or {})})
    return lambda first, count: [task.prompt(group_id) for group_id in range(first, first + count)]


def _answered(group: Group, vocab: int) -> Group:
    draw = np.random.default_rng([7, group.id])
    for number in range(SAMPLES):
        length = 1 + (number + group.id) % LONGEST
        group.samples.append(
            Sample(
                token_ids=draw.integers(0, vocab, length).astype(np.int32),
                logprobs=(-2.0 + 0.3 * draw.standard_normal(length)).astype(np.float32),
                versions=(VersionRun(0, 0, length),),
                finish_reason="length" if number % 2 else "stop",
                reward=float((number + group.id) % 3 == 0),
                extras={
                    "ref_logprobs": (-2.0 + 0.3 * draw.standard_normal(length)).astype(np.float32),
                    "values": (0.1 * draw.standard_normal(length)).astype(np.float32),
                },
            )
        )
    return group


def ids_of(groups: list[Group]) -> list[int]:
    return [group.id for group in groups]
