"""The end of an optimizer step: it is recorded in the ledger, reported, and its weights are published.

Invariants:
- *a step is in the ledger before its weights are out*: no policy version is served that a restart could lose;
- *a digest is in the ledger before its weights are out*: it is recorded when the weights are ready, after the step. A
  step without one was served to nobody, so whatever a replay makes of it is right.

This module must not know how a step was assembled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gyre.observe.samples.writer import Logprobs, SampleWriter
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.sample_ledger import NOT_FINITE_BATCH
from gyre.workloads.gang.learner_gang import ActorGang
from gyre.workloads.owner import HearsEvents
from gyre.workloads.plain_data import plain
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.learning.job_devices import JobDevices
from gyre.workloads.trainer.learning.publishing import PreparedVersion, ServedPolicies
from gyre.workloads.trainer.learning.sample_writer import asked_of
from gyre.workloads.trainer.learning.step_log import StepLog
from gyre.workloads.trainer.learning.step_metrics import step_metrics


class OptimizerSteps:
    """Of the learner `role`, whose weights are published. `discarded` counts tokens that were not trained on, by
    reason; `log` and `samples` show the step to people. Whether the learner `knows_logprobs`: has the operator
    `step_logprobs`."""

    def __init__(
        self,
        groups: GroupState,
        policies: ServedPolicies,
        *,
        role: str,
        discarded: dict[str, int],
        reports: HearsEvents,
        log: StepLog,
        samples: SampleWriter,
        devices: JobDevices,
        knows_logprobs: bool = False,
    ) -> None:
        self._devices = devices
        self._log = log
        self._knows_logprobs = knows_logprobs
        self._samples = samples
        self._role = role
        self._discarded = discarded
        self.why_skipped = ""
        """What the ranks said of the batch that is skipped next."""
        self._groups = groups
        self._policies = policies
        self._reports = reports
        self._last_at = time.monotonic()
        self.metrics: dict[str, Any] = {}
        """The metrics of the last step that this trainer ended."""
        self.tokens_per_s = 0.0
        self._auxiliary_metrics: dict[str, Any] = {}

    def begin_clock(self) -> None:
        """Time the next step from now on: the gang is ready, and the time before was not training."""
        self._last_at = time.monotonic()

    def report_earlier(self) -> None:
        """Report the last steps of earlier trainers again, which may have died before the master heard of them. The
        master ignores those that it has."""
        for step, metrics in self._groups.earlier_metrics.items():
            self._reports.report("StepCompleted", step=step, version=step, metrics=metrics, again=True)
        self._groups.earlier_metrics = {}

    def auxiliary_stepped(self, role: str, metrics: dict[str, Any]) -> None:
        """An auxiliary gang has stepped. Its metrics are reported with the step's, as `role_…`."""
        self._auxiliary_metrics |= {f"{role}_{key}": value for key, value in metrics.items() if key != "step"}

    def leader_stepped(self, gang: ActorGang, metrics: dict[str, Any]) -> int:
        """The leader's optimizer has stepped, after those of the auxiliary gangs: record and report the step, which is
        returned. Raises Fenced."""
        step = self._groups.step + 1
        trained = [self._groups[group_id] for group_id in self._groups.ids_of(step)]
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        plain_metrics = plain(metrics | self._auxiliary_metrics)  # a NaN is a text by now, and no metric
        reserved = self._devices.reserved()
        reported = step_metrics(
            plain_metrics, trained, step, at=time.time(), seconds=seconds, reserved=reserved
        )
        rate = reported["tokens_per_s"]
        self.tokens_per_s = rate if not self.tokens_per_s else 0.8 * self.tokens_per_s + 0.2 * rate
        self._auxiliary_metrics = {}
        if reported.get("skipped"):
            self._skip(step, reported, trained)
        else:
            self._groups.record_trained(step, reported)
        if reported.get("skipped"):
            self._samples.step_recorded(step, trained, NOT_FINITE_BATCH)
        else:
            self._samples.step_recorded(step, trained, logprobs=self._own_logprobs(step, gang))
        self.metrics = reported
        self._reports.report("StepCompleted", step=step, version=step, metrics=reported)
        self._log.completed(reported)
        return step

    def _own_logprobs(self, step: int, gang: ActorGang) -> Logprobs | None:
        """Ask the ranks for them, if anybody wants to see them and they have them."""
        if not self._knows_logprobs or not self._samples.wants(step):
            return None
        return asked_of(gang, step)

    def _skip(self, step: int, metrics: dict[str, Any], groups: Sequence[Group]) -> None:
        """Record a step whose batch was skipped. The ledger comes first, as for any step; a trainer that dies before
        it has reported the skip leaves it in the ledger and in the step's metrics."""
        tokens, metrics["groups_skipped"] = metrics.pop("tokens"), len(groups)
        metrics["tokens"] = 0
        metrics.pop("cost_per_million_tokens", None)
        self._groups.record_skipped(step, metrics, evidence=self.why_skipped)
        self._discarded[NOT_FINITE_BATCH] = self._discarded.get(NOT_FINITE_BATCH, 0) + tokens
        self._reports.report(
            "BatchSkipped",
            step=step,
            groups=len(groups),
            tokens=tokens,
            role=self._role,
            error=self.why_skipped,
        )

    def publish(self, gang: ActorGang, prepared: PreparedVersion) -> None:
        """Serve the weights of a step that is recorded. Raises Fenced, and OtherBytes."""
        if prepared.version > 0:
            self._groups.record_digest(prepared.version, prepared.checksum)
        self._policies.publish(gang, prepared)
