"""What the trainer reports of its run: the progress shown while it runs, and the result at its end.

The keys of both are part of the product: the command line, REST and users read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gyre.rollouts.trainer.sample_ledger import PromptAccount
from gyre.workloads.trainer.evaluation.evaluations import Evaluations
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.wait_causes import Shares
from gyre.workloads.trainer.wait_stats import waits_in


class ShowsProgress(Protocol):
    def report_progress(self, **fields: Any) -> None:
        """Show values under their keys."""


class ProgressReport:
    """`tokens_discarded` is by reason, and changes during the run."""

    def __init__(
        self,
        groups: GroupState,
        steps: OptimizerSteps,
        policies: ServedPolicies,
        evaluations: Evaluations,
        tokens_discarded: Mapping[str, int],
        *,
        steps_planned: int,
        prompts_per_step: int,
        shown_by: ShowsProgress,
    ) -> None:
        self._groups = groups
        self._steps = steps
        self._policies = policies
        self._evaluations = evaluations
        self._tokens_discarded = tokens_discarded
        self._steps_planned = steps_planned
        self._prompts_per_step = prompts_per_step
        self._shown_by = shown_by

    def report(
        self, times: Mapping[str, Shares], spent_s: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """`times` are the shares of recent time of what each role did, `spent_s` the seconds since the trainer
        began."""
        groups, metrics, published = self._groups, self._steps.metrics, self._policies.published
        rows = self._rows()
        self._shown_by.report_progress(
            step=groups.step,
            steps=self._steps_planned,
            version=published.version if published else -1,
            reward=metrics.get("reward_mean"),
            accuracy=rows[-1]["accuracy"] if rows else None,
            accuracy_first=rows[0]["accuracy"] if rows else None,
            accuracy_version=rows[-1]["version"] if rows else None,
            held_out_reward=rows[-1]["reward_mean"] if rows else None,
            held_out_reward_first=rows[0]["reward_mean"] if rows else None,
            tokens=groups.tokens,
            tokens_per_s=round(self._steps.tokens_per_s, 1),
            step_s=metrics.get("seconds"),
            staleness=metrics.get("staleness_max"),
            staleness_mean=metrics.get("staleness_mean"),
            groups_waiting=len(groups.scored),
            groups_dropped=groups.replaced_count + groups.skipped_count,
            tokens_discarded=dict(self._tokens_discarded),
            times={role: dict(shares) for role, shares in times.items()},
            waits=waits_in(times),
            spent_s={role: dict(spent) for role, spent in (spent_s or {}).items()},
            checkpoint_step=groups.checkpoint_step,
        )

    def result(self, account: PromptAccount, *, stopped: bool) -> dict[str, Any]:
        """The result of `fit()`, with the account of every prompt. A run that was `stopped` has untrained prompts that
        are not lost."""
        groups, rows = self._groups, self._rows()
        planned = max(self._steps_planned, groups.step) * self._prompts_per_step
        ahead = max(account.drawn - account.dropped - planned, 0)  # drawn before fewer steps were planned
        untrained = account.drawn - account.trained - account.dropped - ahead
        return {
            "steps": groups.step,
            "prompts": account.drawn,
            "prompts_lost": len(account.lost) if stopped else max(untrained, len(account.lost)),
            "prompts_dropped": account.dropped,
            "trained_twice": len(account.trained_twice),
            "accuracy_first": rows[0]["accuracy"] if rows else None,
            "accuracy_last": rows[-1]["accuracy"] if rows else None,
            "held_out_reward_first": rows[0]["reward_mean"] if rows else None,
            "held_out_reward_last": rows[-1]["reward_mean"] if rows else None,
            "tokens": groups.tokens,
            "tokens_discarded": account.discarded,
            "digest": groups.digests.get(groups.step, ""),
        }

    def _rows(self) -> list[dict[str, Any]]:
        """The first and the last evaluation of the first held-out set; they may be the same one."""
        rows, name = self._evaluations.rows, self._evaluations.first_set

        def of_the_set(row: dict[str, Any]) -> bool:
            return name is None or row.get("set", name) == name

        first = next(filter(of_the_set, rows), None)
        last = next(filter(of_the_set, reversed(rows)), None)
        return [{"reward_mean": None, **row} for row in (first, last) if row is not None]
