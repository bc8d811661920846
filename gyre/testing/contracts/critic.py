"""Whether a critic keeps its contract: that of every learner, and the values that it gives."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group
from gyre.testing.contracts.broken import promise, refused
from gyre.testing.contracts.class_under_test import VertexUnderTest
from gyre.testing.contracts.example_groups import MakeGroups, groups_of
from gyre.testing.contracts.judges import check_extras
from gyre.testing.contracts.learner import LearnerCheck, state_of, take_step
from gyre.workloads.protocols import Critic
from gyre.workloads.vertex.call_info import CallInfo

ExportedPolicy = tuple[dict[str, Any], bytes]
"""What the actor's `export_weights` gives."""


def check_critic(
    cls: type,
    *,
    config: Mapping[str, Any] | None = None,
    groups: MakeGroups | None = None,
    directory: Path | None = None,
    policy: ExportedPolicy | None = None,
) -> None:
    """Raises ContractBroken at the first promise of `Critic` that the class does not keep.

    Arguments as in `check_actor`. `policy` is given to a class with `load_weights`, which begins with it.
    """

    def ready(vertex: VertexUnderTest) -> None:
        vertex.require(Critic)
        if policy is not None and vertex.has("load_weights"):
            vertex.call("load_weights", *policy)
            before = state_of(vertex)
            version = vertex.call("load_weights", *policy)
            promise(
                version == policy[0]["version"], "load_weights(…)", "return the policy's version", version
            )
            promise(
                state_of(vertex) == before, "load_weights(…), repeated,", "change nothing", state_of(vertex)
            )

    with tempfile.TemporaryDirectory(prefix="gyre-contract-") as temporary:
        check = LearnerCheck(
            cls, "critic", config, directory or Path(temporary), groups or groups_of(config), ready
        )
        check.check(lambda vertex: _check_values(check, vertex))
        if policy is not None:
            _check_late_policy(check, policy)


def _check_values(check: LearnerCheck, vertex: VertexUnderTest) -> None:
    state = state_of(vertex)
    step = state["step"] + 1
    groups = check.step_groups(step)
    first = _values(vertex, groups, step)
    check_extras("values(groups)", groups, first, "values")
    again = _values(vertex, groups, step)
    alone = _values(vertex, groups[1:2], step)
    promise(_same(first, again), "values(groups), repeated,", "give the same bits", "it gave others")
    promise(
        _same(first[1:2], alone),
        "values(…) of one group",
        "give the bits that it has among others",
        "others came",
    )
    for other in (step - 1, step + 1):
        with refused(f"values(…, step={other})", f"for the next step is {step}"):
            _values(vertex, groups, other)
    promise(state_of(vertex) == state, "values(…)", "change nothing", state_of(vertex))


def _values(vertex: VertexUnderTest, groups: list[Group], step: int) -> list[Group]:
    for group in groups:
        for sample in group.samples:
            sample.extras.pop("values", None)
    answered: list[Group] = vertex.call("values", groups, info=CallInfo(step=step, index=0))
    return answered


def _same(first: list[Group], again: list[Group]) -> bool:
    return all(
        np.array_equal(one.extras["values"], other.extras["values"])
        for group, same in zip(first, again, strict=True)
        for one, other in zip(group.samples, same.samples, strict=True)
    )


def _check_late_policy(check: LearnerCheck, policy: ExportedPolicy) -> None:
    with check.vertex() as vertex:
        for step in (1, 2):  # the first may leave all but a new head as it was
            take_step(vertex, check.step_groups(step), step)
        after = state_of(vertex)
        if vertex.has("load_weights"):
            vertex.call("load_weights", *policy)
        promise(state_of(vertex) == after, "load_weights(…) after a step", "change nothing", state_of(vertex))
