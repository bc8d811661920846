"""The gangs that the built-in trainer trains, called by the methods of their roles' protocols.

A method has the name, the parameters and the result of the method of `gyre.workloads.protocols` that it calls on the
ranks; where each rank gets its own share, `shares` has the groups of each. It returns at once, with the call on its way
(`Sent`). The ranks check what their method returns.

This module must not know when a method is called, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from gyre.graph.elements import Operator
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Gang, Outcome
from gyre.workloads.protocols import (
    Actor,
    HalvesPasses,
    KeepsStates,
    Learner,
    PublishesInBackground,
    TakesInstanceWeights,
    TellsLogprobs,
    WritesInBackground,
)
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.returns import Expected
from gyre.workloads.vertex.transport import NO_KEYWORDS

R = TypeVar("R")
P = ParamSpec("P")
Method = Callable[Concatenate[Any, P], R]
"""A method as its protocol declares it, which is called by its name."""


@dataclass(frozen=True, slots=True)
class Sent(Generic[R]):
    """A call of `method` on its way to the ranks of a gang, or to the first of them: `futures` are by rank."""

    gang: Gang
    method: str
    futures: Sequence[Future[Outcome]]

    def results(self, *, timeout_s: float) -> list[R]:
        """What the ranks returned, in rank order. Waits; raises as `Gang.gather`."""
        return self.gang.gather(self.method, self.futures, timeout_s=timeout_s)

    def first(self, *, timeout_s: float) -> R:
        """What the first rank returned. Waits for all that were called; raises as `Gang.gather`."""
        return self.results(timeout_s=timeout_s)[0]


@dataclass(frozen=True, slots=True)
class LearnerGang(Gang):
    """The ranks of a `Learner`. `accumulate_name` and `apply_name` are what the graph calls these two operators."""

    accumulate_name: str = field(default=Learner.accumulate.__name__, kw_only=True)
    apply_name: str = field(default=Learner.apply.__name__, kw_only=True)

    def begin(self, step: int, halved: int | None = None) -> Sent[dict[str, Any]]:
        return self._to_all(CallInfo(halved=halved), HalvesPasses.begin, step)

    def accumulate(self, shares: Sequence[list[Group]], *, step: int, index: int) -> Sent[dict[str, Any]]:
        expected = Expected(Learner.accumulate.__name__)
        info = CallInfo(step=step, index=index, expected=expected)
        return self._send(self.accumulate_name, _of_each(shares), info=info)

    def apply(
        self, *, step: int, indices: int, group_ids: Sequence[int], skip: bool | None = None
    ) -> Sent[dict[str, Any]]:
        expected = Expected(Learner.apply.__name__)
        info = CallInfo(step=step, indices=indices, group_ids=group_ids, skip=skip, expected=expected)
        return self._send(self.apply_name, [()] * self.size, info=info)

    def fire(
        self,
        operator: Operator,
        shares: Sequence[list[Group]],
        *,
        step: int,
        index: int,
        expected: Expected | None = None,
    ) -> Sent[list[Group]]:
        """Have the ranks run an operator of the graph together, such as a critic's `values`. `expected` is what they
        check."""
        info = CallInfo(step=step, index=index, expected=expected)
        return self._send(operator.method, _of_each(shares), info=info)

    def state(self) -> Sent[dict[str, Any]]:
        return self._to_all(NOTHING_OFFERED, Learner.state)

    def take_policy(self, bundle: Any) -> Sent[dict[str, Any]]:
        """Have the ranks load the policy that `bundle` stands for, where their class `TakesPolicy`, and then say their
        `state`."""
        name = Learner.state.__name__
        return self._send(name, [()] * self.size, info=CallInfo(expected=Expected(name)), bundle=bundle)

    def checkpoint(self, path: Path, *, background: bool) -> Sent[bool | None]:
        return self._to_all(CallInfo(background=background), WritesInBackground.checkpoint, path)

    def checkpoint_written(self, *, wait: bool) -> Sent[bool]:
        return self._to_all(NOTHING_OFFERED, WritesInBackground.checkpoint_written, wait=wait)

    def restore(self, path: Path) -> Sent[None]:
        return self._to_all(NOTHING_OFFERED, Learner.restore, path)

    def restore_from_memory(self, *, newer_than: int, at_most: int) -> Sent[int | None]:
        method = KeepsStates.restore_from_memory
        return self._to_all(NOTHING_OFFERED, method, newer_than=newer_than, at_most=at_most)

    def forget_memory(self) -> Sent[None]:
        return self._to_all(NOTHING_OFFERED, KeepsStates.forget_memory)

    def _to_all(self, info: CallInfo, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Sent[R]:
        name = method.__name__
        info = replace(info, expected=Expected(name))
        return self._send(name, [args] * self.size, kwargs, info=info)

    def _send(
        self,
        method: str,
        per_rank: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
        *,
        info: CallInfo,
        bundle: Any = None,
    ) -> Sent[Any]:
        return Sent(self, method, self.submit(method, per_rank, kwargs, info=info, bundle=bundle))


@dataclass(frozen=True, slots=True)
class ActorGang(LearnerGang):
    """The ranks of an `Actor`, or of another learner whose weights go out. What is equal on every rank the first one is
    asked for alone; its `Sent` has one future."""

    def warm_start(self) -> Sent[dict[str, Any]]:
        return self._to_all(NOTHING_OFFERED, Actor.warm_start)

    def export_weights(self, *, version: int) -> Sent[tuple[dict[str, Any], bytes]]:
        return self._to_first(NOTHING_OFFERED, Actor.export_weights, version=version)

    def publish_model(self, *, version: int, background: bool | None = None) -> Sent[dict[str, Any] | None]:
        method = PublishesInBackground.publish_model
        return self._to_first(CallInfo(background=background), method, version=version)

    def model_published(self, *, version: int, timeout_s: float) -> Sent[dict[str, Any]]:
        """Asked beside whatever else the rank does."""
        name = PublishesInBackground.model_published.__name__
        asked = {"version": version, "timeout_s": timeout_s}
        info = CallInfo(expected=Expected(name))
        future = self.transport.submit(*self.members[0], name, (), asked, info=info, control=True)
        return Sent(self, name, [future])

    def step_logprobs(self, *, step: int) -> Sent[dict[str, Any]]:
        """Asked beside whatever else the ranks do, so it is none of their common calls."""
        name = TellsLogprobs.step_logprobs.__name__
        asked = [
            self.transport.submit(*member, name, (), {"step": step}, control=True) for member in self.members
        ]
        return Sent(self, name, asked)

    def fetch_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]]
    ) -> Sent[tuple[str, str]]:
        method = TakesInstanceWeights.fetch_weights
        return self._to_first(NOTHING_OFFERED, method, version=version, checksum=checksum, sources=sources)

    def restore_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]], trained: list[list[int]]
    ) -> Sent[None]:
        return self._to_all(
            NOTHING_OFFERED,
            TakesInstanceWeights.restore_weights,
            version=version,
            checksum=checksum,
            sources=sources,
            trained=trained,
        )

    def _to_first(self, info: CallInfo, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Sent[R]:
        name = method.__name__
        info = replace(info, expected=Expected(name))
        return Sent(self, name, [self.transport.submit(*self.members[0], name, args, kwargs, info=info)])


def _of_each(shares: Sequence[list[Group]]) -> list[tuple[list[Group]]]:
    """The positional arguments of each rank."""
    return [(share,) for share in shares]
