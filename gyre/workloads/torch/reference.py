"""The reference policy in plain torch: log-probs of samples under weights that do not change with the steps.

This module must not know what the log-probs are used for.
"""

from __future__ import annotations

from typing import Any

import torch

from gyre.config.sections import WorkloadSettings
from gyre.models.modules import Decoder
from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import WeightManifest
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.learner.errors import WeightsNotLoaded
from gyre.workloads.learner.padded import TokenRow, pad_rows, token_logprobs
from gyre.workloads.learner.trained_model import own_parameters, trained_model
from gyre.workloads.torch.served_policy import Policy, load_parameters, next_policy


class TorchReference(BaseWorkload):
    """Adds `extras["ref_logprobs"]` to samples. The model of `config.model_path` it reads by itself, as the actor does;
    the small decoder's weights come from the actor."""

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        found = trained_model(self.config)
        self.architecture = found.architecture
        self._policy: Policy | None = None
        self._own: Decoder | None = None
        """The folder's model; None where the weights come from the actor."""
        if found.folder is not None:
            source = found.first_weights(self.settings)
            assert source is not None, "a folder has weights, or the seed has"
            self._own = Decoder(self.architecture).eval().requires_grad_(False)
            load_parameters(self._own, own_parameters(source, self.architecture))

    @property
    def version(self) -> int | None:
        """The policy version of the reference; None before the first load."""
        if self._own is not None:
            return 0
        return self._policy.version if self._policy is not None else None

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Take the version in `buffer` as the reference; see `next_policy` for what it refuses."""
        self._policy = next_policy(
            self.architecture, self._policy, WeightManifest.from_dict(manifest), buffer
        )
        return self._policy.version

    @operator
    @torch.no_grad()
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups, each sample with `extras["ref_logprobs"]`, float32 `[t]` at the sampling temperature.

        Raises WeightsNotLoaded before the first load.
        """
        model = self._policy.model if self._policy is not None else self._own
        if model is None:
            raise WeightsNotLoaded(
                f"logprobs was called on {self.role}[{self.rank}] before any weights were loaded.",
                hint="Call load_weights first.",
            )
        for group in groups:
            if not group.samples:
                continue
            batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for sample in group.samples])
            values, _ = token_logprobs(model, batch, self.settings.sampling.temperature)
            for sample, row in zip(group.samples, values, strict=True):
                sample.extras["ref_logprobs"] = row[: len(sample.token_ids)].numpy().copy()
            self.report_progress()
        return groups
