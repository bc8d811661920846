"""Starts the firings that the graph's flow enables, and hands them to whoever runs them.

Prompts are drawn here. Everything else is run by a `FiringRunner`: one vertex of a role, all ranks of a gang, or the
rollout plane. What the gangs train is not started here but in `gyre.workloads.trainer.learning.gang_dispatch`; only the
optimizer's step is a firing like any other.

This module must not know how a firing is run, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Firing, Flow
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.prompts import CheckedPrompts
from gyre.workloads.trainer.retries import Retries


class FiringRunner(Protocol):
    def send(self, operator: Operator, firings: Sequence[Firing], step: int) -> None:
        """Start as many of these firings of one operator as there is room for; their groups are for `step`."""


class StepsOptimizer(Protocol):
    def step_optimizer(self, operator: Operator, firing: Firing) -> None:
        """Start this firing of a gang's operator, if the gang can."""


class FiringScheduler:
    """`own_runners` run the operators of these names, `runners` all others but the gangs'."""

    def __init__(
        self,
        graph: JobGraph,
        flow: Flow,
        groups: GroupState,
        retries: Retries,
        runners: Mapping[Dispatch, FiringRunner],
        *,
        gangs: StepsOptimizer,
        prompts: CheckedPrompts,
        own_runners: Mapping[str, FiringRunner] = MappingProxyType({}),
    ) -> None:
        self._graph = graph
        self._flow = flow
        self._groups = groups
        self._retries = retries
        self._runners = runners
        self._gangs = gangs
        self._prompts = prompts
        self._own_runners = own_runners

    def start_enabled(self, now: float, *, optimizer: bool = True) -> None:
        """Start what may start at `now`, in monotonic seconds; the optimizer's steps only with `optimizer`. Prompts
        that are drawn enable further firings."""
        again = True
        while again:
            again = False
            together: dict[tuple[str, int], list[Firing]] = {}
            for firing in sorted(self._flow.enabled(), key=self._graph.urgency):
                operator = self._graph.operators[firing.operator]
                if operator.dispatch is Dispatch.CONTROLLER:
                    self._draw(firing)
                    again = True
                elif operator.dispatch is Dispatch.GANG:
                    if optimizer:
                        self._gangs.step_optimizer(operator, firing)
                elif self._retries.may((firing.operator, firing.index), now):
                    step = self._graph.step_of(firing, self._groups.step)
                    together.setdefault((firing.operator, step), []).append(firing)
            for (ref, step), firings in together.items():
                operator = self._graph.operators[ref]
                runner = self._own_runners.get(ref) or self._runners[operator.dispatch]
                runner.send(operator, firings, step)

    def _draw(self, firing: Firing) -> None:
        self._flow.start(firing)
        self._groups.record_drawn([self._prompts.prompt(self._groups.id_at(slot)) for slot in firing.groups])
        self._flow.complete(firing)
