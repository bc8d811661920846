"""What a job is about, as its workloads see it: the tokenizer, and texts of prompts and samples.

A job whose `config` has a section `data` is about a prepared data set (`gyre.data`), one with a section `task` about
arithmetic, the rows of a small file, or whatever the class is about that `task.name` names.

This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gyre.config.plugins import TASK
from gyre.config.sections import TaskSettings, read_section
from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, Sample


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What a supervised start learns from: a prompt int32 `[p]`, what follows it int32 `[t]`, its end token included,
    and which of that is the pupil's own, bool `[t]`."""

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]


@runtime_checkable
class DemonstratedTask(Protocol):
    """A task that has a supervised start (`config.warm_start`)."""

    def demonstrations(self, start: int, count: int, slips: float) -> list[Demonstration]:
        """Those of the training prompts `start .. start + count`, by a pupil who errs in a part `slips` of them."""
        ...


class TaskTokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...


class Task(Protocol):
    """Prompts by index, and what their tokens say."""

    @property
    def tokenizer(self) -> TaskTokenizer: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    def prompt(self, index: int) -> Group: ...
    def held_out(self, count: int) -> list[Group]: ...
    def prompt_text(self, group: Group) -> str: ...
    def answer_of(self, sample: Sample) -> str: ...


def task_of(config: Mapping[str, Any]) -> Task:
    """The task that the job's `config` names. Raises ConfigError where it names none."""
    if "data" in config:
        from gyre.data.prepared import PreparedData

        return PreparedData(config)
    if "task" not in config:
        raise ConfigError(
            "The job has no task: neither config.data nor config.task is given.",
            hint="Prepare a data set with `gyre data prepare` and give config.data.path.",
        )
    settings = read_section(TaskSettings, config, "task")
    if settings.name not in TASK.built_in:
        made: Task = TASK.load(settings.name)(config, **settings.options)
        return made
    if settings.name == "rows":
        from gyre.workloads.tasks.rows import RowsTask

        return RowsTask(config)
    from gyre.workloads.tasks.arithmetic import ArithmeticTask

    return ArithmeticTask(config)
