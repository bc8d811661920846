"""The trained policy in Megatron-core, with the losses of `gyre.workloads.algorithms.losses`.

How a step is made, repeated, checkpointed and restored: `gyre.workloads.megatron.learner`.

Invariant *asking is cheap*: the first rank holds the last step's weights in host memory; exports are a call to that
rank alone.

This module imports Megatron when it is set up, not before: naming the class costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.models.modules import Decoder
from gyre.models.tensor_names import from_names, to_names
from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import checksum_of_weights, pack_weights
from gyre.workloads.base import operator
from gyre.workloads.learner.accumulation import Accumulation, Tally
from gyre.workloads.learner.errors import WeightsNotLoaded
from gyre.workloads.megatron.learner import MegatronLearner
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.steps.gradients import trained_samples

if TYPE_CHECKING:
    from gyre.workloads.algorithms.losses import LossSum
    from gyre.workloads.learner.packing import Pass
    from gyre.workloads.megatron.model.snapshot import Snapshot


class MegatronActor(MegatronLearner, TorchActor):
    """The operators of `TorchActor`; all of them go to every rank, but for the exports, which the first rank answers.

    Of the small decoder `export_weights` has the names, so that the other torch roles go with it.
    """

    def setup(self) -> None:
        self.takes_snapshots = True
        """Set it False where weights are read from the device, by `hugging_face.export_weights`."""
        self._snapshot: Snapshot | None = None
        super().setup()

    def build(self) -> None:
        from gyre.workloads.megatron.model.snapshot_buffers import SnapshotBuffers

        super().build()
        self._buffers = SnapshotBuffers(self.device)

    def teardown(self) -> None:
        super().teardown()
        self._buffers.close()

    # -- the supervised start ------------------------------------------------------------------------

    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        """As `TorchActor.warm_start`, of the small decoder in plain torch, whose weights Megatron then takes. A model
        from a folder has none, nor has one that begins with another job's weights: `{"steps": 0}`."""
        if self._warm is not None or self.step > 0:
            return super().warm_start()
        if self.small_architecture is None or self.settings.first_weights.path:
            self._warm = {"steps": 0}
        else:
            self.model = Decoder(self.small_architecture, seed=self.settings.seed)
            super().warm_start()
            self.policy.load(to_names(self.model.state_dict(), self.small_architecture).__getitem__)
            del self.model
        self._changed()
        return self._warm or {}

    # -- one step ------------------------------------------------------------------------------------

    def gradient(self, groups: list[Group]) -> tuple[None, Tally]:
        from gyre.workloads.megatron.steps.gradients import policy_rows

        return self.add_gradient(groups, policy_rows(groups, self.settings))

    def backward(self, passes: list[Pass]) -> list[LossSum]:
        from gyre.workloads.megatron.steps.gradients import packed_policy_loss

        def loss(part: Pass, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, LossSum]:
            if self.seen is not None and self.ranks.speaks_for_losses:
                tags = [tag for tag in part.tags if tag is not None]
                self.seen.add(tags, part.counts, logprobs)
            return packed_policy_loss(part, logprobs, entropies, self.settings)

        return self.policy.backward(
            passes,
            loss,
            temperature=self.settings.sampling.temperature,
            entropy_gradient=self.settings.loss.entropy_coeff != 0,
        )

    def own_logprobs(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        def logprobs(passes: list[Pass]) -> list[torch.Tensor]:
            found = self.policy.logprobs(passes, temperature=self.settings.sampling.temperature)
            return [one for one, _ in found]

        trained_samples(groups, self.settings)
        return self.by_group(groups, logprobs)

    # -- what others see of it -----------------------------------------------------------------------

    def _accumulation(self, step: int) -> Accumulation:
        self._seen.forget()
        return super()._accumulation(step)

    def _changed(self) -> None:
        from gyre.workloads.megatron.model.snapshot import Snapshot

        super()._changed()
        started = time.monotonic()
        self._snapshot = None  # before the next one, which then has its memory unless it is being published
        if self.takes_snapshots:
            self._snapshot = Snapshot.take(self.policy, buffers=self._buffers)
        self.timings["snapshot"] = time.monotonic() - started
        self._seen.made(self.step + 1)

    def weights(self) -> dict[str, torch.Tensor]:
        """On the first rank, the weights after the last step by Hugging Face's names, in host memory, in the model's
        dtype; nothing changes them. Empty on other ranks."""
        if self._snapshot is None:
            raise WeightsNotLoaded(
                "the actor was told to keep no host copy of its weights.",
                hint="Set takes_snapshots, or read them from the device.",
            )
        return self._snapshot.tensors

    @operator(kind="control")
    def restore_weights(
        self,
        *,
        version: int,
        checksum: str,
        sources: list[tuple[str, str]],
        trained: list[list[int]],
    ) -> None:
        """See `TorchActor.restore_weights`; the layout may be any."""
        from gyre.models.safetensors_folder import SafetensorsFolder
        from gyre.workloads.megatron.checkpoints.parts import begin_optimizer_anew

        self.policy.load(SafetensorsFolder(self.fetched(version, checksum, sources).path))
        begin_optimizer_anew(self.policy)
        self.ranks.sum([0.0])  # nobody takes a folder away that others may have linked, or still fetch
        self.let_go()
        self._is_first_model = False
        if self._memory is not None:
            self._memory.drop()  # of the same steps, and of another history
        self._take({"step": version, "trained": trained, "metrics": {}, "warm": {"steps": 0}})

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: the manifest as a dict, and its buffer. The first rank has them."""
        manifest, buffer = pack_weights(self._exported(self.weights()), version=version, step=self.step)
        return manifest.to_dict(), buffer

    def servable(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `TorchActor.servable`. The first rank has the weights."""
        return self.weights(), self.hugging_face_config

    def lasts(self, named: Mapping[str, torch.Tensor]) -> bool:
        """See `TorchActor.lasts`; a subclass may serve something else than the snapshot."""
        return self._snapshot is not None and named is self._snapshot.tensors

    def _later_digest(self) -> Callable[[], str | None]:
        if self._known_digest is not None or self._snapshot is None or self.rank != 0:
            return super()._later_digest()
        named = self._exported(self._snapshot.tensors)  # nothing changes them
        return lambda: checksum_of_weights(named)

    def checksum(self) -> str:
        """The checksum of what `export_weights` gives."""
        from gyre.workloads.megatron.model.snapshot import Snapshot

        if self._snapshot is None:
            self._snapshot = Snapshot.take(self.policy, buffers=self._buffers)
        return checksum_of_weights(self._exported(self._snapshot.tensors)) if self.rank == 0 else ""

    def _exported(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights by the names that `export_weights` has."""
        if self.small_architecture is not None:
            return from_names(named, self.small_architecture)
        return named
