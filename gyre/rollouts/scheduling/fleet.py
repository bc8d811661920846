"""Instances and samples as scheduling sees them: plain state. `Placement` changes where samples are, `FleetLoad` the
estimates, and everybody else only reads.

This module must not know what a sample consists of, or how anything is decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from gyre.rollouts.scheduling.loaded_versions import LoadedVersions
from gyre.rollouts.scheduling.step_time import StepTime

_LIGHT_USE = 0.25
"""Below this share of its slots an instance's samples do not slow each other down much."""


class QueueKey(NamedTuple):
    """The order of the queue: continued samples first, then by their own order, then the order of arrival."""

    fresh: bool
    order: tuple[int, int]
    arrival: int


class Prefix(NamedTuple):
    """So many of a prompt's tokens were read or drawn at this instance, under that policy version: other weights make
    other keys and values of them."""

    instance: str
    version: int
    tokens: int


@dataclass(slots=True, eq=False)
class PlacedSample:
    """A sample as scheduling sees it. `group` is a number that grows with the job; lower ones go first."""

    key: int
    group: int
    prompt_tokens: int
    max_new_tokens: int
    """The limit of its tokens, those that it has included."""
    min_version: int = -1
    """The oldest policy version that may generate it."""
    order: tuple[int, int] | None = None
    """Its place among others that wait, lower ones first; None for that of its group."""
    prefix: Prefix | None = None
    """Who has what its prompt begins with, of an agent's turn that is not the first."""

    holder: Instance | None = None
    """The instance that has it."""
    counted_at: Instance | None = None
    """The instance whose load includes it: its holder, or its destination while it migrates."""
    recalled: bool = False
    """Whether it was recalled from its holder. It then migrates, or goes wherever there is room."""
    stays: bool = False
    """Whether it must not migrate, because an engine died with it and it is being tried where it is."""
    queue_key: QueueKey | None = None
    """Its place in the queue; None if it is not queued."""
    moved_at: float = -math.inf
    """When it last began to migrate."""
    moves: int = 0
    """How often it began to."""

    done_tokens: float = 0.0
    """Tokens that it had at `clock`; exact when it was queued or placed, inferred after that."""
    expected: float = 0.0
    """Tokens predicted to remain, as of `clock`."""
    kv_tokens: float = 0.0
    """KV memory that it will take when done, in tokens, without its prompt."""
    clock: float = 0.0
    """Its instance's clock at the last prediction."""

    @property
    def destination(self) -> Instance | None:
        """The instance that it migrates to; None if it stays, or goes anywhere."""
        return self.counted_at if self.counted_at is not self.holder else None


@dataclass(slots=True, eq=False)
class Instance:
    name: str
    incarnation: str
    number: int
    """Number of its join among those of all instances: an instance that comes back gets another number."""
    max_running: int
    slots: int
    """`max_running` plus the overcommit."""
    kv_tokens: int

    version: int = -1
    """The policy version that it serves; -1 for none."""
    loaded: LoadedVersions = field(default_factory=LoadedVersions)
    generated_tokens: int = 0
    """Tokens that it has generated since it joined."""

    admitted: bool = True
    """Whether its policy, its connection and its devices allow it samples."""
    on_trial: PlacedSample | None = None
    """The one sample here that two engines died with; nothing new comes here while it is."""
    held: dict[int, PlacedSample] = field(default_factory=dict)
    """The samples that it has, by key, in the order in which it got them."""
    counted: dict[int, PlacedSample] = field(default_factory=dict)
    """The samples that count as its load: those that it has, less those that migrate away, plus those that migrate
    here."""
    staying: int = 0
    """The number of samples that it has and that count here."""

    rate_tokens_s: float = 1.0
    """Estimated tokens/s with all slots in use."""
    measured: bool = False
    """Whether the rate was measured here. Otherwise it is the typical rate of measured instances."""
    step_time: StepTime = field(default_factory=StepTime)
    """How long its steps take, where it was measured while as many samples ran before and after."""
    sample_tokens_s: float = 0.0
    """Tokens/s of one sample at light load; 0 before measured."""
    present_sample_tokens_s: float = 0.0
    """Tokens/s of one sample at the present load."""
    told_tokens_s: float = 0.0
    """The rate that it told last."""
    running_before: int = 0
    """The fewest samples that ran since it measured that, when it told."""
    promised: float = 0.0
    """Predicted remaining tokens of all counted samples, as of their last prediction."""
    made: float = 0.0
    """Tokens generated since, out of `promised`."""
    clock: float = 0.0
    """Tokens that one running sample has got so far: a decode step gives each sample one."""
    kv_reserved: float = 0.0
    """KV memory in use when all counted samples are done, in tokens; a group's prompt counts once."""
    kv_margin: float = 0.9
    """Share of `kv_tokens` that may be reserved. It adapts, since not all samples are at their longest at once."""
    adapted_at: float = 0.0
    """The clock when `kv_margin` was last adapted."""

    wanted_groups: list[int] = field(default_factory=list)
    """Heap of groups whose prompt is here and that have queued samples. Entries of other groups are void."""
    heap_entry: int = 0
    """The number of its entry in the heap of instances with room; earlier entries are void."""

    @property
    def accepting(self) -> bool:
        return self.admitted and self.on_trial is None

    @property
    def running(self) -> int:
        """What is taken to run there: also what was recalled and is not back yet."""
        return min(len(self.held), self.max_running)

    @property
    def has_room(self) -> bool:
        """Whether it may get a sample. An empty instance has room for a sample of any size."""
        if not self.accepting or len(self.counted) >= self.slots:
            return False
        return not self.counted or self.kv_reserved < self.kv_tokens * self.kv_margin

    @property
    def has_free_slot(self) -> bool:
        """Whether a sample that it gets now begins at once."""
        return len(self.counted) < self.max_running and self.has_room

    def accepts(self, sample: PlacedSample) -> bool:
        """Whether it may be given the sample: it accepts new ones, and its policy is not too old."""
        return self.accepting and self.version >= sample.min_version

    def has_prefix_of(self, sample: PlacedSample) -> bool:
        """Whether it has what the sample's prompt begins with."""
        prefix = sample.prefix
        return prefix is not None and prefix.instance == self.name and prefix.version == self.version

    @property
    def is_lightly_used(self) -> bool:
        return len(self.counted) < self.max_running * _LIGHT_USE

    @property
    def outstanding_tokens(self) -> float:
        """Predicted tokens that it still has to generate."""
        return max(self.promised - self.made, float(len(self.counted)))

    def done_tokens(self, sample: PlacedSample) -> float:
        """The inferred number of tokens of a sample that is counted here."""
        return min(sample.done_tokens + self.clock - sample.clock, float(sample.max_new_tokens))
