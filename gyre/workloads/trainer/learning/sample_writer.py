"""The writer of a run's samples, with what only its trainer knows: what tokens say, and what the loss makes of rewards.

This module must not know how samples are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config import JobSpec
from gyre.config.sections import LossSettings, read_section
from gyre.errors import ConfigError
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.texts import Texts
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group
from gyre.workloads.algorithms.advantages import GROUP_ESTIMATORS, advantages_of
from gyre.workloads.trainer.groups.group_state import GroupState

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
        entrypoint = spec.roles[learner].entrypoint
        if entrypoint is None or entrypoint.module.startswith(OWN_CLASSES):
            with contextlib.suppress(ConfigError):  # the learner has told it, or does not read the section
                self._settings = read_section(LossSettings, spec.config, "loss")

    def __call__(self, group: Group) -> Sequence[NDArray[np.float32]] | None:
        loss = self._settings
        if loss is None or loss.adv_estimator not in (*GROUP_ESTIMATORS, "gae"):
            return None
        try:
            return advantages_of([group], loss)
        except ValueError:  # a sample without what the estimator needs: it was not trained either
            return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a disk without room: the log is on it, too
        print(f"! {text}", flush=True)
