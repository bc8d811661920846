"""The end of an optimizer step: the ledger first, then the weights go out.

Invariant *a step is in the ledger before its weights are out*: no policy version is served that a restart could lose.

This module must not know how a step was put together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from gyre.workloads.gang.gang import Gang
from gyre.workloads.trainer.group_state import GroupState
from gyre.workloads.trainer.learning.publishing import ServedPolicies


class OptimizerSteps:
    """`report` tells the journal of an event."""

    def __init__(
        self, book: GroupState, policies: ServedPolicies, *, timeout_s: float, report: Callable[..., None]
    ) -> None:
        self._book = book
        self._policies = policies
        self._timeout_s = timeout_s
        self._report = report
        self._last_at = time.monotonic()
        self.metrics: dict[str, Any] = {}
        """Of the last step that this trainer ended."""
        self.tokens_per_s = 0.0
        self._beside: dict[str, Any] = {}

    def begin_clock(self) -> None:
        """The gang is ready: what went before was not training."""
        self._last_at = time.monotonic()

    def tell_earlier(self) -> None:
        """The last steps of earlier trainers, which may not have lived to be heard. The master knows which it has."""
        for step, told in self._book.last_metrics.items():
            self._report("StepCompleted", step=step, version=step, metrics=told, again=True)
        self._book.last_metrics = {}

    def beside(self, role: str, metrics: dict[str, Any]) -> None:
        """A gang beside the leading one has stepped; its metrics are told with the step's, as `role_…`."""
        self._beside |= {f"{role}_{key}": value for key, value in metrics.items() if key != "step"}

    def ended(self, gang: Gang, metrics: dict[str, Any]) -> None:
        """The optimizer has stepped. Raises as the gang's calls, and Fenced."""
        book = self._book
        step = book.step + 1
        manifest, buffer = gang.call_rank0("export_weights", version=step, timeout_s=self._timeout_s)
        groups = [book.groups[group_id] for group_id in book.ids_of(step)]
        lag = [step - 1 - group.versions[0] for group in groups if group.versions is not None]
        ages = sum(
            (step - 1 - run.version) * (run.end - run.start)
            for group in groups
            for sample in group.samples
            for run in sample.versions
        )
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        tokens = sum(group.token_count for group in groups)
        rate = tokens / max(seconds, 1e-9)
        self.tokens_per_s = rate if not self.tokens_per_s else 0.8 * self.tokens_per_s + 0.2 * rate
        told = {
            **{
                key: value
                for key, value in (metrics | self._beside).items()
                if isinstance(value, int | float) and math.isfinite(value)
            },
            "tokens": tokens,
            "seconds": seconds,
            "staleness_max": max(lag, default=0),
            "staleness_mean": ages / max(tokens, 1),
        }
        self._beside = {}
        book.trained(step, manifest["checksum"], told)
        self.metrics = told
        self._report("StepCompleted", step=step, version=step, metrics=told)
        self._policies.publish(gang, manifest, buffer)
