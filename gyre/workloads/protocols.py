"""What the built-in trainer calls on each role's class, as types: what a call may assume, and what it must promise.

A class need not inherit from these. It conforms when it has the methods, which mypy checks and a job's submission too.
It keeps the contract when `gyre.testing.contracts` finds nothing to say against it.

What holds for every call:
- *thread*: calls run one after another on the vertex's work thread, in the order in which they were sent, after
  `setup()` has returned. No method of a protocol runs beside another;
- *arguments*: groups and buffers come from another process. Their arrays are read-only, and nobody else sees an object
  that a method changes or adds to;
- *results*: they are pickled and sent back, so they are plain data, numpy arrays, or groups;
- *repetition*: a call whose answer was lost is made again with the same arguments, on the same process or on its
  replacement. Each method says what it does the second time;
- *errors*: an exception fails the call and leaves the vertex alive. The call is made again a bounded number of times.

What also holds for a gang (the ranks of an actor or a critic): every rank gets the same calls in the same order, so a
method may enter a collective, except those that say *first rank alone*. `groups` are the rank's own share, which may be
empty. What one rank refuses every rank refuses, or the others wait in their next collective for ever.

`step` and `index` are offered: a method whose signature does not name them is called without. The methods of `Learner`
must name theirs, because a replay passes them by name.

This module must not import torch or Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from gyre.rollouts.samples import Group

# -- gangs that are trained -------------------------------------------------------------------------


class Learner(Protocol):
    """A rank of a gang that is trained: what actor and critic share.

    Steps are counted from 1. A step is `begin`, `accumulate` for each micro-batch, `apply`. The numbers in the calls
    make a repetition safe; how often one comes, and from which trainer, must not matter.
    """

    def begin(self, step: int) -> dict[str, Any]:
        """Forget what was accumulated for `step`, which is the next one or was applied.

        Called before each step, after every restore, and by a new trainer. The second time it forgets again. For a step
        that was applied it changes nothing. Raises for a step beyond the next. What it returns is for people.
        """
        ...

    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """Add the gradient of micro-batch `index` of `step` to the sum.

        Every sample of `groups` has what the graph gives it: a `reward`, and in `extras` what reference and critic
        added, float32 `[tokens]`. The second time, by `step` and `index`, it adds nothing and returns what the first
        returned; for a step that was applied it changes nothing. Raises for a step beyond the next, and for a group
        that was trained before. What it returns is for people.
        """
        ...

    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        """Step the optimizer by what `indices` micro-batches gave, which hold the groups `group_ids` over all ranks.

        Returns the step's metrics; those that are finite numbers are told to the journal, and `reward_mean` is shown.
        The second time, for the step just applied, it returns them again and changes nothing, whatever `indices` and
        `group_ids` are, also after a restore. Raises and leaves weights and step as they were where `indices` or
        `group_ids` are not what was accumulated, where a group was trained before, and where the gradient is not
        finite.
        """
        ...

    def state(self) -> dict[str, Any]:
        """`{"step", "digest"}`: the last step that was applied (0 before the first), and a text that stands for the
        weights.

        Equal weights have equal digests on every rank, and other weights have others. The step is -1 where the weights
        are of no step, and only `restore` helps. It changes nothing, and may be called again.
        """
        ...

    def checkpoint(self, path: Path) -> bool | None:
        """Write this rank's state below the folder `path`, which exists and is the same for every rank.

        The state is weights, optimizer, step, the metrics of that step, and the ids of all groups that were trained.
        It is on the disk when this returns None or False. It may be called again for the same step and another folder.
        """
        ...

    def restore(self, path: Path) -> None:
        """Take back what the ranks wrote to `path`, and drop what was accumulated. The second time it does so again.

        Called on any rank after `setup()`, whatever its state; the same calls from there give the same weights, bit by
        bit. Raises where the folder is not there or not whole; the step is then -1, or the state as it was.
        """
        ...


class Actor(Learner, Protocol):
    """The policy that is trained, and whose weights go out."""

    def warm_start(self) -> dict[str, Any]:
        """Whatever comes before step 1, once: a supervised start, or nothing.

        Called before the first checkpoint of the job is written. The second time, and after a step, it changes nothing
        and returns what the first returned. All ranks end with the same weights.
        """
        ...

    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: a manifest and a buffer, as `load_weights` of the other roles takes them.

        *First rank alone*. The manifest is plain data with at least `version`, `step` (that of `state()`), `checksum`
        and `size_bytes`. The checksum stands for the weights alone: it is the same for equal weights of any version,
        on every rank and after every restore, and the ledger compares it. It changes nothing, and may be called again.
        """
        ...


class PublishesModel(Protocol):
    """An actor beside the default rollout plane, whose instances fetch weights themselves."""

    def publish_model(self, *, version: int) -> dict[str, Any]:
        """Put the weights where instances fetch them, in the layout that engines load.

        *First rank alone*, after every step, and after a restore. The rollout manager's address stands in the job's
        directory. Returns what the manager is told: `version`, `checksum`, `size_bytes`, `source` (host:port), `path`
        and `model`, as `gyre.workloads.gang.weight_source.WeightSource.publish` does. The second time it has the same
        checksum. It stays fetchable until two newer versions are out.
        """
        ...


class WritesInBackground(Protocol):
    """A learner that goes on training while its checkpoint is written: `checkpoint` names the parameter."""

    def checkpoint(self, path: Path, *, background: bool = False) -> bool | None:
        """As `Learner.checkpoint`. With `background` it may copy what is to be written, return True, and write on."""
        ...

    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether all that `checkpoint` began is on the disk, on every rank; with `wait`, when it is.

        Called after each step until it says True, and then perhaps again. Raises, on every rank, where it
        cannot be written.
        """
        ...


class KeepsStates(Protocol):
    """A learner that keeps states in its machine's memory beyond its process: `state()` has `memory` True."""

    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        """Take back the newest state that every rank has, whole, of a step beyond `newer_than` and up to `at_most`.

        That step, the same on every rank, or None; nothing has changed then. The second time it is taken again.
        """
        ...

    def forget_memory(self) -> None:
        """The job is done and nobody comes back for what is in memory. The second time it does nothing."""
        ...


class TakesInstanceWeights(Protocol):
    """An actor that can go on from an instance's weights where its checkpoint is lost (`run.lost_checkpoint`)."""

    def fetch_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]]
    ) -> tuple[str, str]:
        """Fetch a policy version from `sources`, (host:port, folder), and hold it until `restore_weights`.

        *First rank alone*, before `restore_weights` is called on every rank. Returns where other ranks have it from, as
        (host:port, folder). The second time it returns what it holds. Raises where nobody gives it within a deadline.
        """
        ...

    def restore_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]], trained: list[list[int]]
    ) -> None:
        """Take the weights of `version`, begin a new optimizer, and stand at step `version`, where the groups `trained`
        (half-open intervals of ids) were trained. It drops what was accumulated.

        The second time it does all of it again. Raises where they cannot be had, or are another model's; then nothing
        has changed.
        """
        ...


class Critic(Learner, Protocol):
    """What estimates returns, trained beside the actor. Its steps have the actor's numbers."""

    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups in the same order, each sample with `extras["values"]`, float32 `[tokens]`.

        `step` is the one that will train on them, the next after the last that was applied; it raises for any other.
        Called on every rank, each with its share. The second time, and in a replay after a restore, it gives the same
        bits, whatever other groups are asked beside them.
        """
        ...


class TakesPolicy(Protocol):
    """A reference or a critic that is given the policy that training began with. One that has no such method is not."""

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Begin with the policy in `buffer`, as the actor's `export_weights` gave it, and return its version.

        Called on a new process before its first other call. The second time it changes nothing; a critic that was
        trained or restored since keeps its own. Raises where the bytes are not the manifest's.
        """
        ...


# -- vertices that are called one by one ------------------------------------------------------------


class Rollout(Protocol):
    """A rollout class of one's own, called by the trainer. The default one is an instance of the rollout plane, and
    nobody calls it."""

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Serve the policy in `buffer` from now on, and return its version.

        Called before `generate` and `evaluate` wherever the vertex may not have the version. The second time it is
        acknowledged again. Raises for an older version than the one that is served, and where the bytes are not the
        manifest's; the policy that is served stays.
        """
        ...

    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups in the same order, each with its `samples`; id, prompt and meta as they were.

        A sample has at least one token; `versions` name the policy that produced each, and `logprobs` are under it.
        The second time, with the same policy, the samples are the same: they depend on the group's id and the job's
        seed, not on `step`, the vertex or earlier calls.
        """
        ...

    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        """`{"version", "accuracy", "count"}` of the policy that is served, on held-out groups. The second time it is
        the same."""
        ...


class Reward(Protocol):
    """What scores samples."""

    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups in the same order with the same samples, `reward` set on each: a finite number.

        A sample may have been cut off, or have no tokens. The second time, on whatever vertex, it is the same number.
        Called for held-out groups of an evaluation too, whose ids are negative; there a reward of 1 or more is right.
        """
        ...


class Reference(Protocol):
    """The policy that the trained one is kept near to."""

    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups in the same order, each sample with `extras["ref_logprobs"]`, float32 `[tokens]`, at the
        sampling temperature. The second time, on whatever vertex, they are the same."""
        ...


# -- by role ----------------------------------------------------------------------------------------

REQUIRED: Mapping[str, type] = MappingProxyType(
    {"actor": Actor, "critic": Critic, "rollout": Rollout, "reward": Reward, "reference": Reference}
)
"""What a class must have where the built-in trainer calls it."""

OPTIONAL: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "actor": (PublishesModel, WritesInBackground, KeepsStates, TakesInstanceWeights),
        "critic": (WritesInBackground, KeepsStates, TakesPolicy),
        "reference": (TakesPolicy,),
    }
)
"""What a class may have besides. `PublishesModel` is required of an actor beside the default rollout plane."""


def methods_of(protocol: type) -> Iterator[str]:
    """The names of a protocol's methods, those that it inherits from other protocols first."""
    seen: set[str] = set()
    for base in reversed(protocol.__mro__):
        if base is Protocol or not getattr(base, "_is_protocol", False):
            continue
        for name, value in vars(base).items():
            if callable(value) and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name
