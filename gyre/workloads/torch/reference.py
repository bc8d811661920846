"""The reference policy in plain torch; what one is, is `gyre.workloads.learner.frozen`."""

from __future__ import annotations

from typing import Any

from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import WeightManifest
from gyre.workloads.base import operator
from gyre.workloads.learner.errors import WeightsNotLoaded
from gyre.workloads.learner.frozen import ReferenceModel
from gyre.workloads.learner.trained_model import first_source, trained_model
from gyre.workloads.torch.backend import TorchBackend
from gyre.workloads.torch.served_policy import Policy, next_policy


class TorchReference(ReferenceModel):
    """The model of `config.model_path` it reads by itself, as the actor does; the small decoder's weights come from the
    actor."""

    backend: TorchBackend

    def make_backend(self) -> TorchBackend:
        model = trained_model(self.config)
        self._policy: Policy | None = None
        self._is_read = model.folder is not None
        """Whether the weights are a folder's; else they come from the actor."""
        source = first_source(model, self.settings)
        return TorchBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            model.architecture,
            source,
            values=False,
            trains=False,
        )

    @property
    def version(self) -> int | None:
        """The policy version of the reference; None before the first load."""
        if self._policy is not None:
            return self._policy.version
        return 0 if self._is_read else None

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Take the version in `buffer` as the reference; see `next_policy` for what it refuses."""
        self._policy = next_policy(
            self.backend.architecture, self._policy, WeightManifest.from_dict(manifest), buffer
        )
        self.backend.model = self._policy.model
        return self._policy.version

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """See `ReferenceModel.logprobs`. Raises WeightsNotLoaded before the first load."""
        if self.version is None:
            raise WeightsNotLoaded(
                f"logprobs was called on {self.role}[{self.rank}] before any weights were loaded.",
                hint="Call load_weights first.",
            )
        return super().logprobs(groups)
