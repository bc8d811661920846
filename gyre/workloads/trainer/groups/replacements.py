"""Groups that are not trained as they are: replaced by a newly drawn prompt, or drawn again.

| why | what becomes of the group |
| --- | --- |
| `quarantined`: it cannot be generated | it is quarantined, and a new prompt takes its slot |
| `stale`: its tokens are too old | its prompt is answered again, or a new prompt takes its slot (`staleness.dropped`) |
| `no_gradient`: all of its samples earned the same | a new prompt takes its slot (dynamic sampling) |

Invariant *a fault of the job is not taken for one of its prompts*: without a step in between, only so many groups are
given up before the run ends with the reason.

This module must not know how groups are generated or trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.errors import UserCodeError
from gyre.graph.flow import Flow
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.staleness import Verdict
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.micro_batches import NO_GRADIENT
from gyre.workloads.trainer.prompts import CheckedPrompts

EVIDENCE_LENGTH = 4000
"""Characters of the evidence that the event keeps; the ledger has all of it."""


class StepCount:
    """A number that begins anew with each step."""

    def __init__(self) -> None:
        self._step, self._count = -1, 0

    def add(self, step: int) -> None:
        self._step, self._count = step, self.at(step) + 1

    def at(self, step: int) -> int:
        return self._count if step == self._step else 0


class Replacements:
    """`refs_before_training` are the operators that a group passes before it is scored; `samples` keeps the groups for
    people to see."""

    def __init__(
        self,
        groups: GroupState,
        flow: Flow,
        *,
        refs_before_training: Sequence[str],
        arrival: ArrivalOrder | None,
        redraw_stale: bool,
        dynamic_sampling: int,
        tokens_discarded: dict[str, int],
        prompts: CheckedPrompts,
        reports: HearsEvents,
        samples: SampleWriter,
    ) -> None:
        self._samples = samples
        self.tokens_discarded = tokens_discarded
        """Tokens that were not trained on, by reason, of this trainer and those before it."""
        self._groups = groups
        self._flow = flow
        self._refs_before_training = refs_before_training
        self._arrival = arrival
        self._redraw_stale = redraw_stale
        self._dynamic_sampling = dynamic_sampling
        self._prompts = prompts
        self._reports = reports
        self._quarantined = StepCount()
        """Groups that this trainer quarantined since the last step."""
        self._without_gradient = StepCount()
        """Groups without gradient that this trainer replaced since the last step."""

    @property
    def too_many_quarantined(self) -> bool:
        """Whether more than a step's groups were quarantined since the last step: that is not the prompts' fault."""
        return self._quarantined.at(self._groups.step) > self._groups.per_step

    def quarantine(self, group_id: int, *, evidence: str, delivered: Group | None = None) -> Group:
        """Quarantine a group that cannot be generated, or that was `delivered` and cannot be trained. Returns the group
        that takes its slot."""
        group = self._groups[group_id] if delivered is None else delivered
        by = self._replace(group_id, reason="quarantined", evidence=evidence)
        self._quarantined.add(self._groups.step)
        self._samples.quarantined(self._groups.step + 1, group, evidence)
        return by

    def drop(self, group_id: int, verdict: Verdict) -> None:
        """A scored group is too old, or has no gradient. Raises UserCodeError where too many have none."""
        slot, group = self._groups.slot_of(group_id), self._groups[group_id]
        if verdict is NO_GRADIENT:
            self._samples.not_trained(group, "no_gradient", verdict.reason)
            self._replace(group_id, reason="no_gradient", evidence=verdict.reason)
            self._check_dynamic_sampling()
        elif self._redraw_stale:
            self._samples.not_trained(group, "stale", verdict.reason)
            tokens = self._groups.record_redrawn(group_id, reason="stale", evidence=verdict.reason)
            self._count("stale", tokens)
        else:
            self._samples.not_trained(group, "stale", verdict.reason)
            self._replace(group_id, reason="stale", evidence=verdict.reason)
        for ref in self._refs_before_training:
            self._flow.undo(ref, slot)

    def _replace(self, group_id: int, *, reason: str, evidence: str) -> Group:
        by = self._prompts.prompt(self._groups.cursor)
        if self._arrival is not None:
            self._arrival.forget(group_id)
        tokens = self._groups.record_replaced(group_id, by, reason=reason, evidence=evidence)
        self._count(reason, tokens)
        self._reports.report(
            "GroupReplaced",
            group=group_id,
            replaced_by=by.id,
            reason=reason,
            tokens=tokens,
            evidence=evidence[:EVIDENCE_LENGTH],
        )
        return by

    def _count(self, reason: str, tokens: int) -> None:
        self.tokens_discarded[reason] = self.tokens_discarded.get(reason, 0) + tokens

    def _check_dynamic_sampling(self) -> None:
        self._without_gradient.add(self._groups.step)
        step, count = self._groups.step + 1, self._without_gradient.at(self._groups.step)
        if count > self._dynamic_sampling * self._groups.per_step:
            raise UserCodeError(
                f"step {step}: of {count} groups all samples earned the same, more than "
                f"run.dynamic_sampling ({self._dynamic_sampling}) times prompts_per_step.",
                hint="The prompts are too easy or too hard for the policy, or the reward does not tell answers apart.",
            )
