"""The learner of every trained model in Megatron-core: tensor, pipeline and data parallel.

`gyre.workloads.torch.learner` makes, repeats and refuses steps; this module has Megatron's part. The trainer deals
groups out to ranks; ranks of one replica join their shares.

Invariants, beside the learner's:
- *all of a replica or none*: all ranks of a replica refuse a call together, before any of them waits for another;
- *an accumulation is whole*: gradients are summed where the backward pass leaves them, so a micro-batch that failed
  half way has spoiled the sum, and only `begin` helps;
- *put off, not forgotten*: what would make a small pass waits for the next micro-batch, or for the optimizer's step.
  It follows from the micro-batches alone, so that a step that is made again has the same passes;
- *a group's numbers are its own*: log-probs and values come from passes of one group's samples, so that their bits do
  not depend on the other groups of a call.

This module imports Megatron when it is set up, not before. It must not know what is learned, or who asks for weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.config.sections import WorkloadSettings
from gyre.errors import GyreError
from gyre.models.modules import Decoder
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import to_names
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.workloads.base import operator
from gyre.workloads.learner.accumulation import Accumulation, Tally
from gyre.workloads.learner.errors import CheckpointMismatch, MicroBatchMismatch
from gyre.workloads.learner.trained_model import trained_model
from gyre.workloads.megatron.model.devices import device_of, dtype_of, make_deterministic, seed_everything
from gyre.workloads.torch.learner import TorchLearner
from gyre.workloads.torch.steps.gradients import counted

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture
    from gyre.workloads.algorithms.losses import LossSum
    from gyre.workloads.learner.packing import Pass, Row
    from gyre.workloads.megatron.checkpoints.in_memory import MemoryCheckpoints
    from gyre.workloads.megatron.checkpoints.on_disk import CheckpointWriter


LEAST_SHARE = 0.5
"""A pass with less than this share of `pass_tokens` waits for more samples: a small model's pass takes as long as its
kernels take to be launched, however few its tokens are. What is put off to the optimizer's step is so little."""


class MegatronLearner(TorchLearner):
    """The learner that actor and critic share. Every operator goes to every rank.

    With `config.model_path` the model is that folder's. Without, it is the small decoder of `config.model`.
    """

    VALUES: ClassVar[bool] = False
    """Whether the model's outputs are values instead of logits."""

    hugging_face_config: dict[str, Any]
    """The content of the model's `config.json`."""
    small_architecture: Architecture | None = None
    """The small decoder's shape, unless the model is a folder's."""

    def setup(self) -> None:
        self.layout = WorkloadSettings.read(self.config).megatron
        self.pass_tokens = self.layout.pass_tokens
        """The most tokens in a pass."""
        self.device = device_of(self.layout)
        self.dtype = dtype_of(self.layout, self.device)
        self._spoiled = False
        self._put_off: list[Row] = []
        """Of the step's samples, those whose gradient is not in the sum yet."""
        self._losses: list[LossSum] = []
        """What was lost in the step's passes, on the device: reading it there waits for all of them."""
        self._known_digest: str | None = None
        self._is_first_model = True
        """Whether weights and optimizer are still those that `first_model` gives."""
        self.timings: dict[str, float] = {}
        """Seconds of the last `update`, with the device's work, and of an actor's work after a step."""
        super().setup()
        self._changed()
        self._memory: MemoryCheckpoints | None = None
        if self.layout.memory_checkpoint_share:
            from gyre.workloads.megatron.checkpoints.in_memory import MemoryCheckpoints

            purpose = f"{self.context.job_id} {self.context.directory.resolve()} {self.role}"
            self._memory = MemoryCheckpoints(self.policy, purpose, share=self.layout.memory_checkpoint_share)

    def teardown(self) -> None:
        """Close the rank's parts. Its states in host memory stay for its successor, unless the job ends."""
        writer: CheckpointWriter | None = getattr(self, "_writer", None)  # none before it is set up
        if writer is not None:
            writer.close()  # it may be reading the states
        memory: MemoryCheckpoints | None = getattr(self, "_memory", None)  # none before it is set up
        if memory is not None:
            memory.close(keep=not self.context.job_ends)
        super().teardown()

    def abandoned(self) -> None:
        super().abandoned()
        memory: MemoryCheckpoints | None = getattr(self, "_memory", None)  # none before it is set up
        if memory is not None:
            memory.unlink()

    def health(self) -> dict[str, Any]:
        told = {"checkpoint": self._writer.status()}
        if self._memory is not None:
            told["memory_checkpoint"] = self._memory.status()
        return {**super().health(), **told}

    def build(self) -> None:
        from gyre.workloads.megatron.model.seam import open_seam

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.layout.deterministic:
            make_deterministic()
        self._seam = open_seam(self.device)
        from gyre.workloads.megatron.checkpoints.on_disk import CheckpointWriter
        from gyre.workloads.megatron.model.parallel import Ranks
        from gyre.workloads.megatron.policy import MegatronPolicy

        architecture, source = self.first_model()
        seed_everything(self.settings.seed)
        self.ranks = Ranks(
            self.context,
            self.layout,
            device=self.device,
            timeout_s=self.settings.collective_timeout_s,
            seed=self.settings.seed,
        )
        self.peers = self.ranks  # type: ignore[assignment]  # as far as a learner needs them
        self.policy = MegatronPolicy(
            architecture,
            self.layout,
            self.optim,
            self.ranks,
            source,
            device=self.device,
            dtype=self.dtype,
            seam=self._seam,
            values=self.VALUES,
        )
        self._writer = CheckpointWriter(self.policy, self._seam)

    def first_model(self) -> tuple[Architecture, TensorSource]:
        """The folder's model, or the small decoder; with the weights of `config.first_weights`, if there are any.
        Raises ConfigError."""
        from gyre.workloads.megatron.model.config import architecture_from

        model = trained_model(self.config)
        self.hugging_face_config = model.config
        where = str(model.folder / "config.json") if model.folder is not None else "config.model"
        architecture = architecture_from(model.config, where)
        source = model.first_weights(self.settings, self.device, head=not self.VALUES)
        if model.folder is None:
            self.small_architecture = model.architecture
        if source is not None:
            return architecture, source
        assert self.small_architecture is not None
        decoder = Decoder(self.small_architecture, seed=self.settings.seed)
        return architecture, to_names(decoder.state_dict(), self.small_architecture).__getitem__

    # -- one optimizer step --------------------------------------------------------------------------

    @operator(kind="control")
    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        """See `TorchLearner.begin`; the memory for copies of the state is taken beside the first step. Passes hold
        `megatron.pass_tokens`, halved so many times, which the result tells as `pass_tokens`."""
        self.pass_tokens = max(1, self.layout.pass_tokens >> halved)
        if self._memory is not None and self._memory.is_on:
            self._memory.prepare()
        else:
            self._writer.prepare()
        return super().begin(step)

    @property
    def pass_size(self) -> dict[str, int]:
        return {"pass_tokens": self.pass_tokens}

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """See `TorchLearner.accumulate`; the result is that of this rank's whole replica."""
        if not self._is_applied(step) and index not in self._pending.records:
            groups = self.ranks.pool_shares(groups)
        return super().accumulate(groups, step=step, index=index)

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int], skip: bool = False) -> dict[str, Any]:
        """See `TorchLearner.apply`; the state after it goes to host memory when that is due."""
        fresh = not self._is_applied(step)
        metrics = super().apply(step=step, indices=indices, group_ids=group_ids, skip=skip)
        if fresh and self._memory is not None:
            self._memory.save_if_due(step, self._metadata())
        return metrics

    def backward(self, passes: list[Pass]) -> list[LossSum]:
        """Add the gradient of these passes to Megatron's own sum, and say what was lost."""
        raise NotImplementedError

    def add_gradient(self, groups: list[Group], rows: list[Row]) -> tuple[None, Tally]:
        """Add the gradient of the rows, which are those of the groups, to Megatron's own sum; a small rest is put off.
        The tally counts the groups; the losses are told when the gradient is finished."""
        from gyre.workloads.learner.packing import pack_all_but_rest

        self._refuse_spoiled()
        passes, rest = pack_all_but_rest(
            [*self._put_off, *rows],
            max_tokens=self.pass_tokens,
            multiple=self._width_multiple,
            least_tokens=round(LEAST_SHARE * self.pass_tokens),
        )
        self._go_through(passes)
        self._put_off = rest
        return None, counted(groups)

    def finish_gradient(self, *, refused: bool) -> Tally:
        if self.ranks.replica_size > 1:  # no rank begins a pass for which another does not come
            refused = self.ranks.sum([float(refused)])[0] > 0
        if refused:
            return Tally()
        from gyre.workloads.megatron.steps.gradients import summed

        passes = self.packed(self._put_off)
        self._put_off = []
        self._go_through(passes)
        losses, self._losses = self._losses, []
        return summed(losses)

    def _go_through(self, passes: list[Pass]) -> None:
        self._spoiled = True
        self._losses += self.backward(passes)
        self._spoiled = False

    @property
    def _width_multiple(self) -> int:
        return self.ranks.tensor if self.layout.sequence_parallel else 1

    def packed(self, rows: list[Row]) -> list[Pass]:
        from gyre.workloads.learner.packing import pack

        return list(pack(rows, max_tokens=self.pass_tokens, multiple=self._width_multiple))

    def by_group(
        self, groups: list[Group], compute: Callable[[list[Pass]], list[torch.Tensor]]
    ) -> list[NDArray[np.float32]]:
        """A number for each token of each sample, float32 `[t]`, in the order of groups and samples, on every rank of
        the replica. Passes hold samples of one group alone, so that a group's bits do not depend on others."""
        from gyre.workloads.learner.packing import Row

        passes: list[Pass] = []
        for group in groups:
            kept = [sample for sample in group.samples if len(sample.token_ids)]
            passes += self.packed([Row(group.prompt_ids, sample.token_ids) for sample in kept])
        lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
        found = [value.float().cpu() for value in compute(passes)]
        self.report_progress()
        flat = self.ranks.from_last_stage(torch.cat(found) if found else None, sum(lengths)).numpy()
        return [part.copy() for part in np.split(flat, np.cumsum(lengths)[:-1])] if lengths else []

    def sum_over_ranks(
        self, gradient: torch.Tensor, verdict: float, tally: Tally
    ) -> tuple[torch.Tensor, float, Tally]:
        """Sum over ranks. One rank of a replica counts its samples, and one that has the losses counts these."""
        samples = tally if self.ranks.speaks_for_samples else Tally()
        losses = tally if self.ranks.speaks_for_losses else Tally()
        mine = Tally(
            groups=samples.groups,
            samples=samples.samples,
            sequences=samples.sequences,
            tokens=samples.tokens,
            reward=samples.reward,
            loss=losses.loss,
            scored_tokens=losses.scored_tokens,
            sums=losses.sums,
        )
        names = self.summed_metrics
        verdicts, *totals = self.ranks.sum([verdict, *mine.to_list(names)])
        return gradient, verdicts, Tally.from_list(totals, names)

    def update(self, gradient: torch.Tensor, count: float, lr: float) -> float:
        """Step by the gradient that Megatron holds."""
        self._spoiled = True  # the gradient is divided and clipped in place
        started = time.monotonic()
        norm = self.policy.step(count=count, lr=lr)
        self._spoiled = False
        self._is_first_model = False
        self._known_digest = None
        self._settle()
        self.timings["update"] = time.monotonic() - started
        return norm

    @property
    def place(self) -> tuple[int, int]:
        return self.ranks.replica, self.ranks.replica_count

    def everybodys(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of all replicas. One rank of each replica sends them, because its ranks hold the same groups."""
        mine = list(groups) if self.ranks.speaks_for_samples else []
        return [group for blob in self.ranks.exchange(pack_groups(mine)) for group in unpack_groups(blob)]

    def _settle(self) -> None:
        """Wait for the device's work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _accumulation(self, step: int) -> Accumulation:
        self.policy.zero()
        self._spoiled = False
        self._put_off = []
        self._losses = []
        return Accumulation(step, torch.zeros(0))

    def spoiled(self) -> str:
        return "it failed in a micro-batch, part of its gradient added" if self._spoiled else ""

    def _refuse_spoiled(self) -> None:
        if self._spoiled:
            raise MicroBatchMismatch(
                f"step {self.step + 1} on rank {self.rank}: {self.spoiled()}.",
                hint=f"Call begin({self.step + 1}) on every rank and accumulate again.",
            )

    def _changed(self) -> None:
        """Note that the weights have changed. A collective of all ranks."""
        self._known_digest = None

    def _later_digest(self) -> Callable[[], str | None]:
        """What gives the checksum of the weights as they are now, later and on any thread; None where the bytes' own
        checksums must do. Not a collective."""
        known = self._known_digest
        return lambda: known

    def _digest(self) -> str:
        """The checksum of the weights, the same in every layout. A collective of all ranks unless it is known."""
        if self._known_digest is None:
            self._known_digest = self.ranks.from_first(self.checksum())
        return self._known_digest

    def checksum(self) -> str:
        """The checksum of the weights on the first rank; no meaning on others. A collective of the first replica."""
        from gyre.workloads.megatron.model.snapshot import checksum_of

        return checksum_of(self.policy)

    # -- checkpoints ---------------------------------------------------------------------------------

    def checkpoint(  # type: ignore[override]  # the light learner never writes in the background
        self, path: Path, *, background: bool = False
    ) -> bool:
        """Write the state below `path`; see `checkpoints.on_disk`. It is on the disk when this returns. With
        `background` this may return True before that, and training goes on; `checkpoint_written` says when it is
        whole."""
        self._writer.abandon()  # a checkpoint of a controller that died before it was written, or gave it up
        path.mkdir(parents=True, exist_ok=True)
        metadata = self._metadata()
        is_first_model = self._is_first_model and self.small_architecture is None
        copied = None
        if self._memory is not None and not is_first_model:
            copied = self._memory.copied(self.step, metadata)
        self._writer.begin(
            path,
            {
                **metadata,
                "policy_version": self.step,
                "model": self._model(),
                "layout": {
                    "ranks": self.world_size,
                    "tensor_parallel": self.layout.tensor_parallel,
                    "pipeline_parallel": self.layout.pipeline_parallel,
                },
            },
            self._later_digest(),
            is_first_model=is_first_model,
            copied=copied,
        )
        return background or not self.checkpoint_written(wait=True)

    def _model(self) -> dict[str, Any] | None:
        """The description with which `checkpoints.conversion` writes a folder of the weights; None for a critic."""
        if self.VALUES:
            return None
        path = self.settings.model_path and self.settings.first_policy
        return {
            "config": self.hugging_face_config,
            "decoder": True if self.small_architecture is not None else None,
            "path": str(Path(path).resolve()) if path else "",
            "dtype": str(self.dtype).removeprefix("torch."),
            "seed": self.settings.seed,
        }

    def _metadata(self) -> dict[str, Any]:
        """The part of a state that is not tensors; the same on every rank."""
        return {
            "step": self.step,
            "trained": self.trained,
            "metrics": self._metrics,
            "warm": self._warm,
        }

    def _take(self, metadata: dict[str, Any]) -> None:
        """Take the step and the record of restored weights from their metadata; drops accumulated gradients."""
        self.step = metadata["step"]
        self.trained = [(start, end) for start, end in metadata["trained"]]
        self._metrics = metadata["metrics"]
        self._warm = metadata["warm"]
        self._half_updated = False
        self._pending = self._accumulation(self.step + 1)
        self._changed()

    @operator(kind="control")
    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether the checkpoint is on the disk, on every rank; with `wait` it returns when that is so.

        Raises CheckpointMismatch, on all ranks together, if it cannot be written.
        """
        return self._writer.is_written(wait=wait)

    def restore(self, path: Path) -> None:
        """Load a checkpoint of any layout; drops accumulated gradients.

        Raises CheckpointMismatch if it is absent, of another format, or does not match its digest, and if it would be
        unpickled and does not lie in the job's own folder.
        """
        from gyre.workloads.megatron.checkpoints.formats import refuse_strangers_pickle

        refuse_strangers_pickle(path, own=self.context.directory)
        from gyre.workloads.megatron.checkpoints.on_disk import restore

        before, self._half_updated = self._half_updated, True  # while a part of it may be loaded
        try:
            metadata = restore(self.policy, self._seam, path, load_first_model=self._load_first_model)
        except CheckpointMismatch:
            self._half_updated = before  # nothing was changed
            raise
        self._take(metadata)
        self._is_first_model = metadata.get("first_model", False)
        if self._memory is not None:
            self._memory.changed()
        if metadata["digest"] not in (None, self._digest()):
            self._half_updated = True  # the weights are of no step
            raise CheckpointMismatch(f"the weights in {path} are not those that were written.")

    def _load_first_model(self) -> None:
        from gyre.workloads.megatron.checkpoints.parts import begin_optimizer_anew

        try:
            _, source = self.first_model()
            self.policy.load(source)
        except GyreError as error:
            raise CheckpointMismatch(
                f"the checkpoint is of the model that training began with, which cannot be read any more: {error}",
                hint=f"Have the folder {self.settings.first_policy} as it was.",
            ) from error
        begin_optimizer_anew(self.policy)

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        """See `TorchLearner.state`; with `memory` if this rank keeps states in host memory."""
        kept = {"memory": True} if self._memory is not None and self._memory.is_on else {}
        return {**super().state(), **kept}

    @operator(kind="control")
    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        """Load the newest whole state that every rank has in its machine's memory, of a step beyond `newer_than` and up
        to `at_most`. Returns that step; or None, and changes nothing."""
        if self._memory is None:
            return None
        metadata = self._memory.restore(newer_than=newer_than, at_most=at_most)
        if metadata is None:
            return None
        self._take(metadata)
        self._is_first_model = False
        return self.step

    @operator(kind="control")
    def forget_memory(self) -> None:
        """Free the states in host memory, because the job is done."""
        if self._memory is not None:
            self._memory.close(keep=False)
