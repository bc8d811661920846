"""Protocols of the roles' classes: the methods that the built-in trainer calls, with what they may assume and must
promise.

A class need not inherit from these. It conforms if it has the methods, which mypy and a job's submission check. It
keeps the contract if `gyre.testing.contracts` finds no fault with it.

What holds for every call:
- *thread*: calls run one after another on the vertex's work thread, in the order in which they were sent, after
  `setup()` has returned. No method of a protocol runs beside another;
- *arguments*: groups and buffers come from another process. Their arrays are read-only, and nobody else sees an object
  that a method changes or adds to;
- *results*: they are pickled and sent back, so they are plain data, numpy arrays, or groups;
- *repetition*: a call whose answer was lost is made again with the same arguments, on the same process or on its
  replacement. Each method says what it does the second time;
- *errors*: an exception fails the call and leaves the vertex alive. The call is made again a bounded number of times.

For a gang (the ranks of an actor or a critic) also holds: every rank gets the same calls in the same order, so a method
may enter a collective, except methods marked *first rank alone*. `groups` are the rank's own share, which may be empty.
If one rank refuses a call, every rank must refuse it, or the others wait in their next collective for ever.

`step` and `index` are offered (`gyre.workloads.vertex.call_info`): a method whose signature does not name them is
called without them. The methods of `Learner` must name theirs, because a replay passes them by name.

This module must not import torch or Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gyre.rollouts.samples import Group

# -- gangs that are trained -------------------------------------------------------------------------


class Learner(Protocol):
    """A rank of a gang that is trained: the methods that actor and critic share.

    Steps are counted from 1. A step is `begin`, `accumulate` for each micro-batch, `apply`. The numbers in the calls
    make a repetition safe; how often one comes, and from which trainer, must not matter.
    """

    def begin(self, step: int) -> dict[str, Any]:
        """Forget the gradients accumulated for `step`, which is the next one or was applied.

        Called before each step, after every restore, and by a new trainer. The second time it forgets again. For a step
        that was applied it changes nothing. Raises for a step beyond the next. The result is shown to people.
        """
        ...

    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """Add the gradient of micro-batch `index` of `step` to the sum.

        Every sample of `groups` has a `reward`, and in `extras` the results of reference and critic, float32
        `[tokens]`, as the graph has them. The second time, by `step` and `index`, it adds nothing and returns the first
        result; for a step that was applied it changes nothing. Raises for a step beyond the next, and for a group that
        was trained before. The result is shown to people.
        """
        ...

    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        """Step the optimizer by the gradients of `indices` micro-batches, with the groups `group_ids` over all ranks.

        Returns the step's metrics; the journal gets those that are finite numbers, and `reward_mean` is shown. The
        second time, for the step just applied, it returns them again and changes nothing, whatever `indices` and
        `group_ids` are, also after a restore. Raises, and leaves weights and step as they were, if `indices` or
        `group_ids` are not what was accumulated, if a group was trained before, or if the gradient is not finite.
        """
        ...

    def state(self) -> dict[str, Any]:
        """`{"step", "digest"}`: the last step that was applied (0 before the first), and a text that identifies the
        weights.

        Equal weights have equal digests on every rank, and different weights different ones. The step is -1 if the
        weights are of no step, and only `restore` helps. It changes nothing, and may be called again.
        """
        ...

    def checkpoint(self, path: Path) -> bool | None:
        """Write this rank's state below the folder `path`, which exists and is the same for every rank.

        The state is weights, optimizer, step, the metrics of that step, and the ids of all groups that were trained.
        It is on the disk when this returns None or False. It may be called again for the same step and another folder.
        """
        ...

    def restore(self, path: Path) -> None:
        """Load the state that the ranks wrote to `path`, and drop accumulated gradients. The second time it does so
        again.

        Called on any rank after `setup()`, whatever its state; the same calls from there give the same weights, bit by
        bit. Raises if the folder is missing or incomplete; the step is then -1, or the state as it was. If all ranks
        raise `gyre.workloads.learner.errors.CheckpointMismatch`, they are given the checkpoint before it.
        """
        ...


class Actor(Learner, Protocol):
    """The policy that is trained, and whose weights go out."""

    def warm_start(self) -> dict[str, Any]:
        """Prepare the policy before step 1, once: by a supervised start, or not at all.

        Called before the first checkpoint of the job is written. The second time, and after a step, it changes nothing
        and returns what the first returned. All ranks end with the same weights.
        """
        ...

    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: a manifest and a buffer, as `load_weights` of the other roles takes them.

        *First rank alone*. The manifest is plain data with at least `version`, `step` (that of `state()`), `checksum`
        and `size_bytes`. The checksum stands for the weights alone: it is the same for equal weights of any version,
        on every rank and after every restore. The ledger compares it, or that of `publish_model` where there is a
        rollout plane. It changes nothing, and may be called again.
        """
        ...


class PublishesModel(Protocol):
    """An actor beside the default rollout plane, whose instances fetch weights themselves."""

    def publish_model(self, *, version: int) -> dict[str, Any] | None:
        """Publish the weights for instances to fetch, in the layout that engines load.

        *First rank alone*, after every step, and after a restore. The rollout manager's address is in the job's
        directory. Returns what the manager needs: `version`, `checksum`, `size_bytes`, `source` (host:port), `path` and
        `model`, as `gyre.workloads.gang.weight_source.WeightSource.publish` does. The second time the checksum is the
        same. The version stays fetchable until two newer ones are published. It returns None only as
        `PublishesInBackground` says.
        """
        ...


class PublishesInBackground(PublishesModel, Protocol):
    """An actor that makes its weights ready while the next step's micro-batches are trained: `publish_model` names the
    parameter."""

    def publish_model(self, *, version: int, background: bool = False) -> dict[str, Any] | None:
        """As `PublishesModel.publish_model`. With `background` it may return None as soon as the next step may change
        the weights, and go on publishing them as they were."""
        ...

    def model_published(self, *, version: int, timeout_s: float) -> dict[str, Any]:
        """What `publish_model` returns, once the version is published, which it was begun to be.

        *First rank alone*, and an operator with `control=True`: it runs beside `accumulate`. The second time it returns
        the same. Raises what kept the version from being published, and after `timeout_s`; the gang is then replaced.
        """
        ...


class SkipsSteps(Protocol):
    """A learner that can pass over a step whose gradient is not finite: `apply` names the parameter."""

    def apply(self, *, step: int, indices: int, group_ids: list[int], skip: bool = False) -> dict[str, Any]:
        """As `Learner.apply`. It refuses a gradient that is not finite by an error with the code
        `gyre.errors.NOT_FINITE`, and may then be called again with `skip`: the step counts as applied, the weights stay
        as they are, and the metrics are `{"step": step, "skipped": 1}`, whatever `indices` and `group_ids` are."""
        ...


class HalvesPasses(Protocol):
    """A learner that can make its passes smaller when one did not fit into memory: `begin` names the parameter."""

    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        """As `Learner.begin`. From then on a pass is half as large as it is configured to be, `halved` times. The
        result tells its size as `pass_tokens`, or as `passes` how many a micro-batch is computed in. One that says
        `recompute` too computes activations again, which it kept, where it is asked for the first time, and halves its
        passes once less."""
        ...


class WritesInBackground(Protocol):
    """A learner that goes on training while its checkpoint is written: `checkpoint` names the parameter."""

    def checkpoint(self, path: Path, *, background: bool = False) -> bool | None:
        """As `Learner.checkpoint`. With `background` it may copy the state, return True, and go on writing. Called
        again before that is written, it gives the first up."""
        ...

    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether all that `checkpoint` began is on the disk, on every rank; with `wait` it returns when that is so.

        Called after each step until it returns True, and then perhaps again. Raises, on every rank, if the checkpoint
        cannot be written.
        """
        ...


class KeepsStates(Protocol):
    """A learner that keeps states in its machine's memory beyond its process: `state()` has `memory` True."""

    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        """Load the newest whole state that every rank has, of a step beyond `newer_than` and up to `at_most`.

        Returns that step, the same on every rank; or None, and changes nothing. The second time it loads it again.
        """
        ...

    def forget_memory(self) -> None:
        """Free the states in memory, because the job is done. The second time it does nothing."""
        ...


class TellsLogprobs(Protocol):
    """An actor that tells its own log-probs of what it trained, for [samples](samples.md)."""

    def step_logprobs(self, *, step: int) -> dict[str, Any]:
        """Of the samples of this rank that had a gradient in `step`, before it: `samples`, int64 `[n, 2]` of group and
        sample; `lengths`, int64 `[n]`; `logprobs`, float32 `[tokens of all]`. Empty where they are not known (any
        more). Asked beside whatever the rank does, of Gyre's own classes alone; again
        it answers the same."""
        ...


class TakesInstanceWeights(Protocol):
    """An actor that can go on from an instance's weights if its checkpoint is lost (`run.lost_checkpoint`)."""

    def fetch_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]]
    ) -> tuple[str, str]:
        """Fetch a policy version from `sources`, (host:port, folder), and hold it until `restore_weights`.

        *First rank alone*, before `restore_weights` is called on every rank. Returns the (host:port, folder) from which
        other ranks fetch it. The second time it returns the version that it holds. Raises if no source gives it within
        a deadline.
        """
        ...

    def restore_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]], trained: list[list[int]]
    ) -> None:
        """Load the weights of `version` with a new optimizer, at step `version`, with the groups `trained` (half-open
        intervals of ids) trained. Drops accumulated gradients.

        The second time it does all of it again. Raises, and changes nothing, if the weights cannot be fetched or are of
        another model.
        """
        ...


class Critic(Learner, Protocol):
    """The value model, trained beside the actor. Its steps have the actor's numbers."""

    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups in the same order, each sample with `extras["values"]`, float32 `[tokens]`.

        `step` will train on them; it is the next after the last that was applied, and any other raises. Called on every
        rank, each with its share. The second time, and in a replay after a restore, it returns the same bits, whatever
        other groups are in the call.
        """
        ...


class TakesPolicy(Protocol):
    """A reference or a critic that gets the policy that training began with; one without this method does not."""

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Begin with the policy in `buffer`, as the actor's `export_weights` returned it, and return its version.

        Called on a new process before its first other call. The second time it changes nothing; a critic that was
        trained or restored since keeps its own weights. Raises if the bytes are not the manifest's.
        """
        ...


# -- vertices that are called one by one ------------------------------------------------------------


class Rollout(Protocol):
    """A rollout class of the user's own, which the trainer calls. The default class is an instance of the rollout
    plane, which nobody calls."""

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Serve the policy in `buffer` from now on, and return its version.

        Called before `generate` and `evaluate` if the vertex may not have the version. The second time it returns the
        version again. Raises, and keeps the served policy, for an older version, and if the bytes are not the
        manifest's.
        """
        ...

    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups in the same order, each with its `samples`; id, prompt and meta as they were.

        A sample has at least one token; `versions` name the policy that produced each token, and `logprobs` are that
        policy's.
        The second time, with the same policy, the samples are the same: they depend on the group's id and the job's
        seed, not on `step`, the vertex or earlier calls.
        """
        ...

    def evaluate(self, groups: list[Group]) -> list[Group] | dict[str, Any]:
        """Of the prompts of one held-out set, either the same groups with samples of the served policy, drawn as the
        section `evaluation` says, which the reward role scores; or a result of its own: `{"version", "accuracy",
        "count"}`, with `reward_mean` and `reward_std` if it has them, and an accuracy of None where that has no
        meaning. The second time the same."""
        ...


class Reward(Protocol):
    """The reward, which scores samples.

    It gets whole groups, so it may compare the samples of one. A class with the attribute `SCORES_EACH_SAMPLE = True`
    says that it scores each sample by itself: by the group's id, prompt and meta, the sample's tokens and its
    `finish_reason`. It is then given samples as soon as they have finished, together with others that have, as groups
    that lack the rest; their log-probs are NaN and their versions -1. A subclass with a `score` of its own says so
    anew.
    """

    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups in the same order with the same samples, `reward` set on each: a finite number.

        A sample may have been cut off, or have no tokens. The second time, on any vertex, it is the same number. Called
        for held-out groups of an evaluation too, whose ids are negative; `config.evaluation.threshold` says which
        rewards are right there.
        """
        ...


class Reference(Protocol):
    """The policy to which the trained one is kept close."""

    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups in the same order, each sample with `extras["ref_logprobs"]`, float32 `[tokens]`, at the
        sampling temperature. The second time, on any vertex, they are the same."""
        ...


# -- by role ----------------------------------------------------------------------------------------

REQUIRED: Mapping[str, type] = MappingProxyType(
    {"actor": Actor, "critic": Critic, "rollout": Rollout, "reward": Reward, "reference": Reference}
)
"""The protocol that a role's class must have if the built-in trainer calls it."""

OPTIONAL: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "actor": (
            PublishesModel,
            PublishesInBackground,
            SkipsSteps,
            HalvesPasses,
            WritesInBackground,
            KeepsStates,
            TellsLogprobs,
            TakesInstanceWeights,
        ),
        "critic": (HalvesPasses, WritesInBackground, KeepsStates, TakesPolicy),
        "reference": (TakesPolicy,),
    }
)
"""Protocols that a role's class may have besides. An actor beside the default rollout plane must have
`PublishesModel`."""


def scores_each_sample(cls: type) -> bool:
    """Whether a reward's class says so of its own `score`; see `Reward`."""
    for base in cls.__mro__:
        if "SCORES_EACH_SAMPLE" in vars(base):
            return bool(vars(base)["SCORES_EACH_SAMPLE"])
        if "score" in vars(base):
            return False
    return False


def methods_of(protocol: type) -> Iterator[str]:
    """The names of a protocol's methods, inherited ones first."""
    seen: set[str] = set()
    for base in reversed(protocol.__mro__):
        if base is Protocol or not getattr(base, "_is_protocol", False):
            continue
        for name, value in vars(base).items():
            if callable(value) and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name
