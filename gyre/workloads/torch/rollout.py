"""Rollouts in plain torch: samples from the policy version that was last loaded.

Invariants:
- *every token knows its policy*: a sample carries the version of the weights that were loaded when its call
  began; a load takes effect between calls;
- *repeatable*: the same groups, weights and seed in one call give the same samples, bit for bit.

This module must not know how weights travel or who trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gyre.config.sections import WorkloadSettings
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.weights.version.manifest import WeightManifest
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.rewards import exact_match
from gyre.workloads.tasks.task import task_of
from gyre.workloads.torch.errors import WeightsNotLoaded
from gyre.workloads.torch.generate import Completion, Prompt, generate
from gyre.workloads.torch.policy import Policy, next_policy, small_architecture


class TorchRollout(BaseWorkload):
    """Generates `sampling.n` samples a group, and evaluates greedily."""

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.task = task_of(self.config)
        self.architecture = small_architecture(self.settings, self.task)
        self._policy: Policy | None = None

    @property
    def version(self) -> int | None:
        """The policy version that is served; None before the first load."""
        return self._policy.version if self._policy is not None else None

    def health(self) -> dict[str, Any]:
        return {"version": self.version}

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        """The groups with fresh `samples`, all of the loaded version. The groups passed in are left as they were.

        `step` is the optimizer step that the groups are meant for; it does not influence the samples. Raises
        WeightsNotLoaded before the first load.
        """
        policy = self._loaded("generate")
        sampling = self.settings.sampling
        completions = self._complete(
            policy, groups, sampling.n, sampling.temperature, lambda: self.report_progress(step=step)
        )
        return [
            replace(group, samples=[_sample(completion, policy.version) for completion in row])
            for group, row in zip(groups, completions, strict=True)
        ]

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Serve the version in `buffer` from now on, and return it. A repeated version is acknowledged again.

        Raises WeightMismatch where bytes and manifest disagree, OlderWeights for an older version; either way
        the served policy stays.
        """
        self._policy = next_policy(
            self.architecture, self._policy, WeightManifest.from_dict(manifest), buffer
        )
        return self._policy.version

    @operator
    def evaluate(self, groups: list[Group]) -> dict[str, Any]:
        """Greedy exact-match accuracy on `groups`: `{"accuracy", "count", "version"}`. Accuracy of none is 0."""
        policy = self._loaded("evaluate")
        right = 0.0
        for group, row in zip(
            groups, self._complete(policy, groups, 1, 0.0, self.report_progress), strict=True
        ):
            if row[0].finish_reason == "stop":
                said = self.task.answer_of(_sample(row[0], policy.version))
                right += exact_match("", said, group.meta)
        return {"accuracy": right / max(len(groups), 1), "count": len(groups), "version": policy.version}

    def _complete(
        self, policy: Policy, groups: list[Group], n: int, temperature: float, on_token: Callable[[], None]
    ) -> list[list[Completion]]:
        sampling = self.settings.sampling
        per_call = max(1, sampling.max_rows // n)
        completions: list[list[Completion]] = []
        for start in range(0, len(groups), per_call):
            completions += generate(
                policy.model,
                [Prompt(group.id, group.prompt_ids) for group in groups[start : start + per_call]],
                n=n,
                temperature=temperature,
                max_new_tokens=sampling.max_new_tokens,
                eos_id=self.task.tokenizer.eos_id,
                seed=self.settings.seed,
                on_token=on_token,
            )
        return completions

    def _loaded(self, what: str) -> Policy:
        if self._policy is None:
            raise WeightsNotLoaded(
                f"{what} was called on {self.role}[{self.rank}] before any weights were loaded.",
                hint="Call load_weights first.",
            )
        return self._policy


def _sample(completion: Completion, version: int) -> Sample:
    return Sample(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=(VersionRun(version, 0, len(completion.token_ids)),),
        finish_reason=completion.finish_reason,
    )
