"""The back end in Megatron-core: tensor, pipeline and data parallel, with checkpoints on the disk and in host memory.

`MegatronPolicy` computes; this puts it together with its ranks and its files. This module imports Megatron when a back
end is made, not before. It must not know about groups, rewards or steps' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.errors import GyreError
from gyre.models.safetensors_folder import TensorSource
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.backend import TokenLoss, begin_anew
from gyre.workloads.learner.checkpoint_identity import (
    config_in,
    refuse_another_model,
    refuse_another_writer,
)
from gyre.workloads.learner.checkpoint_writer import CheckpointWriter
from gyre.workloads.learner.devices import device_of, dtype_of, make_deterministic, seed_everything
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.learner.laps import Laps
from gyre.workloads.learner.losses import detached
from gyre.workloads.learner.memory_choice import choice_of, now_said
from gyre.workloads.learner.packing import Pass
from gyre.workloads.learner.trained_model import TrainedModel
from gyre.workloads.megatron.kind import MEGATRON
from gyre.workloads.memory.megatron import whole
from gyre.workloads.memory.parameters import parameters_of

if TYPE_CHECKING:
    from gyre.workloads.learner.memory_checkpoints import MemoryCheckpoints
    from gyre.workloads.megatron.checkpoints.parts import MegatronPart


class MegatronBackend:
    """A `gyre.workloads.learner.backend.LearnerBackend`. `first` gives the weights that training begins with, for the
    device; they are asked for later where ranks are started again, and where a checkpoint says that it is of those.
    Unless it `trains` the model is whole on this rank, has no optimizer, and `forward` is all that it does."""

    def __init__(
        self,
        context: WorkloadContext,
        settings: WorkloadSettings,
        optim: OptimSettings,
        model: TrainedModel,
        first: Callable[[torch.device], TensorSource],
        *,
        values: bool,
        trains: bool = True,
    ) -> None:
        laps = Laps()
        self.layout = layout = settings.megatron if trains else whole(settings.megatron)
        self.settings, self.values, self.context = settings, values, context
        self.device = device_of(layout)
        self._first, self._model = first, model
        self._is_first_model = True
        """Whether weights and optimizer are still those that `first` gives."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if layout.deterministic:
            make_deterministic()
        from gyre.workloads.megatron.model.seam import open_seam

        self._seam = open_seam(self.device)
        from gyre.workloads.megatron.model.config import architecture_from
        from gyre.workloads.megatron.model.parallel import MegatronRanks
        from gyre.workloads.megatron.policy import MegatronPolicy

        laps.lap("imports")
        where = str(model.folder / "config.json") if model.folder is not None else "config.model"
        architecture = architecture_from(model.config, where)
        if values:  # the head is a value's, and shares nothing
            architecture = replace(architecture, tied=False)
        # Where it is refused, nobody is waited for.
        source = first(self.device) if context.incarnation == 1 or not trains else None
        seed_everything(settings.seed)
        self.ranks = MegatronRanks(
            context, layout, device=self.device, timeout_s=settings.collective_timeout_s, seed=settings.seed
        )
        self.has_weights = not trains or begin_anew(context, self.ranks)
        laps.lap("ranks")
        dtype = dtype_of(layout, self.device)
        self.dtype = str(dtype).removeprefix("torch.")
        self.weight_bytes = parameters_of(architecture, values=values).total * dtype.itemsize
        try:
            self._choice = choice_of(
                "megatron",
                architecture,
                settings,
                context,
                self.device,
                ranks=context.world_size,
                exchange=self.ranks.exchange,
                trains=trains,
                values=values,
            )
            self.pass_tokens, self.may_recompute = self._choice.tokens, self._choice.may_change
            self.policy = MegatronPolicy(
                architecture,
                layout,
                optim,
                self.ranks,
                source if self.has_weights else None,
                device=self.device,
                dtype=dtype,
                seam=self._seam,
                trains=trains,
                values=values,
            )
            self.recompute(on=self._choice.recompute)
        except BaseException:
            self.ranks.close()  # a set-up that is tried again joins them anew
            raise
        self.width_multiple = self.ranks.tensor if layout.sequence_parallel else 1
        self.prompts_once = layout.prompts_once
        self.writer = CheckpointWriter(self.ranks, self.device)
        laps.lap("model and weights" if self.has_weights else "model")
        self.memory: MemoryCheckpoints[MegatronPart] | None = None
        if trains and layout.memory_checkpoint_share:
            from gyre.workloads.learner.memory_checkpoints import MemoryCheckpoints, purpose_of
            from gyre.workloads.megatron.checkpoints.parts import MegatronState

            state = MegatronState(self.policy, self._taken_from_memory)
            share = layout.memory_checkpoint_share
            self.memory = MemoryCheckpoints(
                state, self.ranks, purpose_of(context), device=self.device, share=share
            )
        laps.lap("host memory")
        print(f"Megatron is set up after {laps}", flush=True)

    def recompute(self, *, on: bool) -> None:
        """See `Backend.recompute`."""
        self._recomputes = on
        self.policy.recompute(on=on)

    def _taken_from_memory(self) -> None:
        self.has_weights, self._is_first_model = True, False

    # -- one step ------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.policy.zero()

    def backward(self, passes: Sequence[Pass], loss: TokenLoss) -> list[LossSum]:
        def of(part: Pass, numbers: Tensor, entropies: Tensor) -> tuple[Tensor, LossSum]:
            found = loss(part, numbers, entropies)
            return found.loss, detached(found)

        if self.values:
            return self.policy.backward_values(
                passes, lambda part, values: of(part, values, torch.zeros_like(values))
            )
        return self.policy.backward(
            passes,
            of,
            temperature=self.settings.sampling.temperature,
            entropy_gradient=self.settings.loss.entropy_coeff != 0,
        )

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        if self.values:
            found = self.policy.token_values(passes)
        else:
            found = [
                one for one, _ in self.policy.logprobs(passes, temperature=self.settings.sampling.temperature)
            ]
        told = [one.float().cpu() for one in found]
        counts = [len(part.targets) for part in passes]
        flat = self.ranks.from_last_stage(torch.cat(told) if told else None, sum(counts))
        return list(torch.split(flat, counts))

    def update(self, *, count: float, lr: float) -> float:
        self._settle()
        norm = self.policy.step(count=count, lr=lr)
        self._is_first_model = False
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # so that whoever measures has the device's work in it
        return norm

    def _settle(self) -> None:
        """The state is about to be changed."""
        if self.memory is not None:
            self.memory.settle()

    # -- weights -------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from gyre.workloads.megatron.model.hugging_face import export_weights

        ranks, policy = self.ranks, self.policy
        if ranks.replica != 0:
            return
        for named in export_weights(policy.module, policy.architecture, ranks, values=policy.values):
            if ranks.rank == 0:
                yield named

    def take_first(self) -> None:
        self._load(self._first(self.device))

    def load(self, source: TensorSource) -> None:
        self._load(source)
        if self.memory is not None:
            self.memory.drop()  # of the same steps, and of another history
        self._is_first_model = False

    def _load(self, source: TensorSource) -> None:
        from gyre.workloads.megatron.checkpoints.parts import begin_optimizer_anew

        self._settle()
        self.policy.load(source)
        begin_optimizer_anew(self.policy)
        self.has_weights = True

    # -- checkpoints ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Begin to take the memory for copies of the state, so that the first need not wait for it."""
        if self.memory is not None and self.memory.is_on:
            self.memory.prepare()
        else:
            from gyre.workloads.megatron.checkpoints import on_disk

            on_disk.prepare(self.writer, self.policy)

    def save(self, path: Path, metadata: dict[str, Any], digest: Callable[[], str | None]) -> None:
        """See `checkpoints.on_disk`. The weights of a folder's first model are not written."""
        from gyre.workloads.megatron.checkpoints import on_disk

        self.writer.abandon()  # a checkpoint of a controller that died before it was written, or gave it up
        is_first_model = self._is_first_model and self._model.small is None
        copied = None
        if self.memory is not None and not is_first_model:
            copied = self.memory.copied(metadata["step"], metadata)
        layout = {
            "ranks": self.ranks.world_size,
            "tensor_parallel": self.layout.tensor_parallel,
            "pipeline_parallel": self.layout.pipeline_parallel,
        }
        on_disk.begin(
            self.writer,
            self.policy,
            self._seam,
            path,
            {**metadata, "layout": layout},
            digest,
            is_first_model=is_first_model,
            copied=copied,
        )

    def saved(self, *, wait: bool) -> bool:
        return self.writer.is_written(wait=wait)

    def restore(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint of any layout. Raises CheckpointMismatch also if it would be unpickled and does not lie in
        the job's own folder."""
        from gyre.workloads.megatron.checkpoints.formats import read_metadata, refuse_strangers_pickle

        refuse_another_writer(path, MEGATRON)
        refuse_strangers_pickle(path, own=self.context.directory)
        refuse_another_model(path, config_in(read_metadata(path)), self.policy.architecture)
        from gyre.workloads.megatron.checkpoints.on_disk import restore

        self._settle()
        metadata = restore(self.policy, self._seam, path, load_first_model=self._load_first_model)
        self._is_first_model = metadata.get("first_model", False)
        self.has_weights = True
        if self.memory is not None:
            self.memory.changed()
        return metadata

    def _load_first_model(self) -> None:
        try:
            self._load(self._first(self.device))
        except GyreError as error:
            raise CheckpointMismatch(
                f"the checkpoint is of the model that training began with, which cannot be read any more: {error}",
                hint=f"Have the folder {self.settings.first_policy} as it was.",
            ) from error

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = {"checkpoint": self.writer.status()}
        if said := now_said(self._choice, recompute=self._recomputes):
            told["passes"] = said
        if self.memory is not None:
            told["memory_checkpoint"] = self.memory.status()
        return told

    def close(self, *, keep: bool) -> None:
        self.writer.close()  # it may be reading the states
        if self.memory is not None:
            self.memory.close(keep=keep)
        self.policy.close()
        self.ranks.close()

    def unlink(self) -> None:
        if self.memory is not None:
            self.memory.unlink()
