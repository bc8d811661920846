"""The writer of a run's samples, with what only its trainer knows: what tokens say, and what the loss makes of rewards.

This module must not know how samples are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import wait
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config import JobSpec
from gyre.config.sections import LossSettings, read_section
from gyre.errors import ConfigError
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.texts import Texts
from gyre.observe.samples.writer import Logprobs, SampleWriter
from gyre.rollouts.samples import Group
from gyre.workloads.algorithms.advantages import advantages_of
from gyre.workloads.gang.learner_gang import ActorGang
from gyre.workloads.trainer.groups.group_state import GroupState

LOGPROBS_S = 10.0
"""How long the samples of a step wait for the ranks' log-probs. They are there: only who stands still is late."""

OWN_CLASSES = "gyre.workloads."
"""Where the learners are whose advantages are those of `config.loss`."""


def sample_writer(spec: JobSpec, trainer: Any, directory: Path, learner: str) -> SampleWriter:
    """`learner` is the role whose weights are published; `trainer.data` is asked for texts."""
    return SampleWriter(
        folder_of(directory),
        spec.observe.samples,
        texts=Texts(getattr(trainer, "data", None)),
        advantages=_Advantages(spec, learner),
        say=_say,
    )


def is_own(spec: JobSpec, learner: str) -> bool:
    """Whether the role is filled by a class of Gyre's own."""
    entrypoint = spec.roles[learner].entrypoint
    return entrypoint is None or entrypoint.module.startswith(OWN_CLASSES)


def asked_of(gang: ActorGang, step: int) -> Logprobs | None:
    """Ask the ranks, beside whatever they do, for their own log-probs of the step that they have just made. None where
    they cannot be asked."""
    try:
        futures = gang.step_logprobs(step=step).futures
    except (
        Exception
    ):  # whatever it is, the next call of the gang's meets it too: no step fails for people to look at
        return None

    def answered() -> dict[tuple[int, int], NDArray[np.float32]]:
        wait(futures, timeout=LOGPROBS_S)
        found: dict[tuple[int, int], NDArray[np.float32]] = {}
        for future in futures:
            if future.done() and future.exception() is None:
                status, value = future.result()
                if status == "ok":
                    found |= _by_sample(value)
        return found

    return answered


def _by_sample(value: Any) -> dict[tuple[int, int], NDArray[np.float32]]:
    """What `SeenLogprobs.of_step` returned; nothing where it is something else."""
    if not isinstance(value, dict) or not value:
        return {}
    logprobs, ends = value["logprobs"], np.cumsum(value["lengths"]).tolist()
    keys = zip(*np.asarray(value["samples"]).T.tolist(), strict=True) if ends else ()
    return {
        (group, sample): logprobs[start:end]
        for (group, sample), (start, end) in zip(keys, pairwise([0, *ends]), strict=True)
    }


def recorded_steps(groups: GroupState) -> dict[int, list[Group]]:
    """The steps in the ledger whose samples it still has, with their groups."""
    return {
        step: [groups[group_id] for group_id in groups.ids_of(step)]
        for step in sorted(groups.batches)
        if step <= groups.step
    }


class _Advantages:
    """The advantages of a group, as Gyre's own learners have them. None of a learner or an estimator of the user's own,
    whose code is not called here."""

    def __init__(self, spec: JobSpec, learner: str) -> None:
        self._settings: LossSettings | None = None
        if is_own(spec, learner):
            with contextlib.suppress(ConfigError):  # the learner has told it, or does not read the section
                self._settings = read_section(LossSettings, spec.config, "loss")

    def __call__(self, groups: Sequence[Group]) -> Sequence[Sequence[NDArray[np.float32]] | None]:
        loss = self._settings
        if loss is None or loss.estimator is None:
            return [None] * len(groups)
        try:
            advantages = iter(advantages_of(groups, loss))
        except ValueError:  # a sample without what the estimator needs: it was not trained either
            if len(groups) == 1:
                return [None]
            return [one for group in groups for one in self([group])]
        return [list(islice(advantages, len(group.samples))) for group in groups]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a disk without room: the log is on it, too
        print(f"! {text}", flush=True)
