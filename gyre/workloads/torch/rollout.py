"""Rollouts that are called by the graph, without a rollout plane: the embedded engine's core in the vertex itself.

Invariants:
- *every token knows its policy*: a sample carries the version of the weights that were loaded when its call
  began; a load takes effect between calls;
- *repeatable*: the same groups, weights and seed give the same samples, bit for bit, whatever else is in the call.

This module must not know how weights travel or who trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gyre.config.sections import WorkloadSettings
from gyre.engines.dialect import FinishKind
from gyre.engines.embedded.core import EngineCore, Limits, Swap
from gyre.engines.embedded.decoder_model import DecoderModel
from gyre.engines.embedded.engine_requests import EngineRequest, RequestUpdate
from gyre.engines.embedded.token_sampling import Sampling
from gyre.philox import uniforms
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.weights.version.manifest import WeightManifest
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.learner.errors import NotFinite, WeightsNotLoaded
from gyre.workloads.learner.trained_model import trained_model
from gyre.workloads.tasks.task import task_of
from gyre.workloads.torch.served_policy import Policy, next_policy

_SEED_STREAM = 16
_SEEDS = 1 << 31


class TorchRollout(BaseWorkload):
    """Generates `sampling.n` samples a group, and answers held-out groups as `evaluation` says."""

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.task = task_of(self.config)
        model = trained_model(self.config, self.task)
        stops = self.task.stop_token_ids if model.folder is not None else (self.task.tokenizer.eos_id,)
        ends = model.architecture.eos_token_ids | frozenset(stops)
        self.architecture = replace(model.architecture, eos_token_ids=ends)
        self._policy: Policy | None = None
        self._core: EngineCore | None = None

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
        WeightsNotLoaded before the first load, and IndexError for a prompt that leaves no room for new tokens.
        """
        sampling = self.settings.sampling
        found = self._complete(
            groups, sampling.n, sampling.temperature, lambda: self.report_progress(step=step)
        )
        return [replace(group, samples=row) for group, row in zip(groups, found, strict=True)]

    @operator(kind="weights")
    @torch.inference_mode()
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Serve the version in `buffer` from now on, and return it. A repeated version is acknowledged again.

        Raises WeightMismatch where bytes and manifest disagree, OlderWeights for an older version; either way
        the served policy stays.
        """
        policy = next_policy(self.architecture, self._policy, WeightManifest.from_dict(manifest), buffer)
        weights = policy.model.weights()
        if self._core is None:
            positions, running = self.architecture.max_positions, self.settings.sampling.max_rows
            limits = Limits(running, running * positions, positions)
            self._core = EngineCore(DecoderModel(self.architecture), weights, limits)
        else:
            self._core.swap(Swap(weights, None, flush=True, done=lambda _: None))
        self._policy = policy
        return policy.version

    @operator
    def evaluate(self, groups: list[Group]) -> list[Group]:
        """The held-out groups with samples as `evaluation` says, which the reward role scores."""
        settings = self.settings.evaluation
        found = self._complete(
            groups, settings.n, settings.temperature, self.report_progress, longest=settings.max_new_tokens
        )
        return [replace(group, samples=row) for group, row in zip(groups, found, strict=True)]

    @torch.inference_mode()
    def _complete(
        self,
        groups: list[Group],
        n: int,
        temperature: float,
        on_step: Callable[[], None],
        *,
        longest: int | None = None,
    ) -> list[list[Sample]]:
        core, policy = self._core, self._policy
        if core is None or policy is None:
            raise WeightsNotLoaded(
                f"{self.role}[{self.rank}] was asked for samples before any weights were loaded.",
                hint="Call load_weights first.",
            )
        longest = longest or self.settings.sampling.max_new_tokens
        ended: dict[str, RequestUpdate] = {}
        requests = [
            [
                self._request(
                    group,
                    index,
                    seed,
                    Sampling(max_new_tokens=group.token_limit(longest), temperature=temperature),
                    lambda update: ended.update({update.request.rid: update}),
                )
                for index, seed in enumerate(self._seeds(group, n))
            ]
            for group in groups
        ]
        core.submit(*(request for row in requests for request in row))
        try:
            while core.can_step:
                core.step()
                on_step()
                for update in core.take_updates():
                    update.request.deliver(update)
        finally:
            core.abort_all()  # what a call that failed has left, so that the next one does not generate it
            core.take_updates()
        return [[_sample(ended[request.rid], policy.version) for request in row] for row in requests]

    def _seeds(self, group: Group, n: int) -> list[int]:
        """A seed for each sample of a group: a function of the job's seed, the group's id and the sample's index."""
        drawn = uniforms(self.settings.seed, _SEED_STREAM, np.full(n, group.id), np.arange(n), 0)
        return [int(seed) for seed in drawn * _SEEDS]

    def _request(
        self,
        group: Group,
        index: int,
        seed: int,
        sampling: Sampling,
        deliver: Callable[[RequestUpdate], None],
    ) -> EngineRequest:
        tokens, limit = group.prompt_ids.tolist(), self.architecture.max_positions
        if len(tokens) + sampling.max_new_tokens > limit:
            raise IndexError(
                f"{len(tokens)} prompt tokens and {sampling.max_new_tokens} new ones exceed "
                f"max_positions={limit}"
            )
        return EngineRequest(f"{group.id}-{index}", tokens, sampling, seed, 0, deliver)


def _sample(ended: RequestUpdate, version: int) -> Sample:
    assert ended.ending is not None
    if ended.ending.kind is FinishKind.ABORT:
        raise NotFinite(ended.ending.message, hint="Restore the actor's last checkpoint.")
    return Sample(
        token_ids=np.array(ended.tokens, np.int32),
        logprobs=np.array(ended.logprobs, np.float32),
        versions=(VersionRun(version, 0, len(ended.tokens)),),
        finish_reason=ended.ending.kind.value,
    )
