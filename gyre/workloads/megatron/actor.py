"""The trained policy in Megatron-core: tensor, pipeline and data parallel, with the steps of every learner here.

How a step is made, repeated and refused is `gyre.workloads.torch.learner`; the loss is `gyre.workloads.losses`. This is
what is Megatron's of it. The trainer deals groups out to ranks; those that share a replica put theirs together.

Invariants, beside the learner's:
- *all of a replica or none*: what can be refused is refused by all ranks of a replica together, before any of them
  waits for another;
- *an accumulation is whole*: gradients are summed where the backward pass leaves them, so a micro-batch that failed
  half way has spoiled the sum; nothing goes on from it but `begin`;
- *asking is cheap*: the first rank holds the last step's weights in host memory; exports are a call to it alone.

This module imports Megatron when it is set up, not before: naming the class costs nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.weights.manifest import pack_weights
from gyre.workloads.base import operator
from gyre.workloads.megatron.settings import MegatronSettings
from gyre.workloads.tasks import task_of
from gyre.workloads.torch.accumulation import Accumulation, Tally
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.errors import CheckpointMismatch, MicroBatchMismatch, WeightsNotLoaded
from gyre.workloads.torch.folder import first_weights, read_config
from gyre.workloads.torch.gradients import counted, trained_samples
from gyre.workloads.torch.hugging_face import config_of, from_names, to_names
from gyre.workloads.torch.learner import TorchLearner
from gyre.workloads.torch.model import Decoder, ModelConfig
from gyre.workloads.torch.policy import model_config

if TYPE_CHECKING:
    from gyre.rollouts.engines.embedded.architecture import Architecture
    from gyre.workloads.losses import LossSum
    from gyre.workloads.megatron.checkpoint_memory import MemoryCheckpoints
    from gyre.workloads.megatron.packing import Pass, Row
    from gyre.workloads.megatron.snapshot import Snapshot


Source = Callable[[str], torch.Tensor]
"""Gives a whole tensor by its Hugging Face name."""


class MegatronLearner(TorchLearner):
    """What actor and critic share. Every operator goes to every rank.

    With `config.megatron.model_path` the model is that folder's. Without, it is the small decoder of `config.model`.
    """

    VALUES: ClassVar[bool] = False
    """Whether the model gives values instead of logits."""

    hugging_face_config: dict[str, Any]
    """The content of the model's `config.json`."""
    decoder_config: ModelConfig | None = None
    """The small decoder's shape, where the model is not a folder's."""

    def setup(self) -> None:
        self.layout = MegatronSettings.read(self.config)
        self.device = device_of(self.layout)
        self.dtype = dtype_of(self.layout, self.device)
        self._spoiled = False
        self._known_digest: str | None = None
        self.timings: dict[str, float] = {}
        """Seconds of the last step's `update` and `snapshot`, the device's work included."""
        super().setup()
        self._changed()
        self._memory: MemoryCheckpoints | None = None
        if self.layout.memory_checkpoint_share:
            from gyre.workloads.megatron.checkpoint_memory import MemoryCheckpoints

            purpose = f"{self.context.job_id} {self.context.directory.resolve()} {self.role}"
            self._memory = MemoryCheckpoints(self.policy, purpose, share=self.layout.memory_checkpoint_share)

    def teardown(self) -> None:
        """What is in host memory stays for whoever comes in this rank's place; see `forget_memory`."""
        if getattr(self, "_memory", None) is not None:
            self._memory.close(keep=True)  # type: ignore[union-attr]
        super().teardown()

    def health(self) -> dict[str, Any]:
        told = {"memory_checkpoint": self._memory.told()} if self._memory is not None else {}
        return {**super().health(), **told}

    def build(self) -> None:
        from gyre.workloads.megatron.seam import open_seam

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.layout.deterministic:
            make_deterministic()
        self._seam = open_seam(self.device)
        from gyre.workloads.megatron.checkpoint import CheckpointWriter
        from gyre.workloads.megatron.parallel import Ranks
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

    def first_model(self) -> tuple[Architecture, Source]:
        """The folder's model, or the small decoder. Raises ConfigError."""
        from gyre.workloads.megatron.config import architecture_from

        path = self.layout.model_path
        if path:
            self.hugging_face_config = read_config(Path(path))
            architecture = architecture_from(self.hugging_face_config, path)
            return architecture, first_weights(Path(path), architecture, self.settings.seed, self.device)
        task = task_of(self.config)
        self.decoder_config = model_config(self.settings, task)
        self.hugging_face_config = config_of(self.decoder_config, eos_id=task.tokenizer.eos_id)
        architecture = architecture_from(self.hugging_face_config, "config.model")
        decoder = Decoder(self.decoder_config, seed=self.settings.seed)
        return architecture, to_names(decoder.state_dict(), self.decoder_config).__getitem__

    # -- one optimizer step --------------------------------------------------------------------------

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """As `TorchActor.accumulate`; what it returns is of this rank's whole replica."""
        if not self._is_applied(step) and index not in self._pending.records:
            groups = self.ranks.pool_shares(groups)
        return super().accumulate(groups, step=step, index=index)

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        """As `TorchActor.apply`; the state after it goes to host memory where that is due."""
        fresh = not self._is_applied(step)
        metrics = super().apply(step=step, indices=indices, group_ids=group_ids)
        if fresh and self._memory is not None:
            self._memory.save_if_due(step, self._book())
        return metrics

    def add_gradient(
        self, groups: list[Group], rows: list[Row], backward: Callable[[list[Pass]], list[LossSum]]
    ) -> tuple[None, Tally]:
        """Adds to Megatron's own sum of gradients what `backward` makes of the packed rows."""
        from gyre.workloads.megatron.gradients import summed

        self._refuse_spoiled()
        tally = counted(groups)
        passes = self.packed(rows)
        self._spoiled = True
        told = backward(passes)
        tally = tally.plus(summed(told))
        self._spoiled = False
        return None, tally

    def packed(self, rows: list[Row]) -> list[Pass]:
        from gyre.workloads.megatron.packing import pack

        multiple = self.ranks.tensor if self.layout.sequence_parallel else 1
        return list(pack(rows, max_tokens=self.layout.pass_tokens, multiple=multiple))

    def by_group(
        self, groups: list[Group], compute: Callable[[list[Pass]], list[torch.Tensor]]
    ) -> list[NDArray[np.float32]]:
        """A number for each token of each sample, float32 `[t]`, in the order of groups and samples, on every rank of
        the replica. Passes hold samples of one group alone, so that a group's bits do not depend on others."""
        from gyre.workloads.megatron.packing import Row

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
        """A replica's samples are counted by one of its ranks, its losses by one that has them."""
        self._refuse_spoiled()
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
        verdicts, *totals = self.ranks.sum([verdict, *mine.to_list(self.SUMS)])
        return gradient, verdicts, Tally.from_list(totals, self.SUMS)

    def update(self, gradient: torch.Tensor, count: float, lr: float) -> float:
        """Steps by the gradient that Megatron holds."""
        self._spoiled = True  # it is divided and clipped where it stands
        started = time.monotonic()
        norm = self.policy.step(count=count, lr=lr)
        self._spoiled = False
        self._known_digest = None
        self._settle()
        self.timings["update"] = time.monotonic() - started
        return norm

    @property
    def place(self) -> tuple[int, int]:
        return self.ranks.replica, self.ranks.replica_count

    def everybodys(self, groups: Sequence[Group]) -> list[Group]:
        """A replica's ranks hold the same groups: one of them tells."""
        mine = list(groups) if self.ranks.speaks_for_samples else []
        return [group for blob in self.ranks.exchange(pack_groups(mine)) for group in unpack_groups(blob)]

    def _settle(self) -> None:
        """What was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _accumulation(self, step: int) -> Accumulation:
        self.policy.zero()
        self._spoiled = False
        return Accumulation(step, torch.zeros(0))

    def _refuse_spoiled(self) -> None:
        if self._spoiled:
            raise MicroBatchMismatch(
                f"rank {self.rank} failed in a micro-batch of step {self.step + 1}, part of its gradient added.",
                hint=f"Call begin({self.step + 1}) on every rank and accumulate again.",
            )

    def _changed(self) -> None:
        """The weights are new: a collective of all ranks."""
        self._known_digest = None

    def _digest(self) -> str:
        """The checksum of the weights, the same in every layout. A collective of all ranks, where it is not known."""
        if self._known_digest is None:
            self._known_digest = self.ranks.from_first(self.checksum())
        return self._known_digest

    def checksum(self) -> str:
        """On the first rank; anything on others. A collective of the first replica."""
        from gyre.workloads.megatron.snapshot import checksum_of

        return checksum_of(self.policy)

    # -- checkpoints ---------------------------------------------------------------------------------

    def checkpoint(  # type: ignore[override]  # the light learner never writes in the background
        self, path: Path, *, background: bool = False
    ) -> bool:
        """Write the actor's state below `path`; see `megatron.checkpoint`. It is on the disk when this returns, but
        with `background`: then training goes on meanwhile, True says so, and `checkpoint_written` when it is whole."""
        self._writer.abandon()  # of a controller that died before it was written
        path.mkdir(parents=True, exist_ok=True)
        self._writer.begin(
            path,
            {
                **self._book(),
                "policy_version": self.step,
                "digest": self._digest(),
                "layout": {
                    "ranks": self.world_size,
                    "tensor_parallel": self.layout.tensor_parallel,
                    "pipeline_parallel": self.layout.pipeline_parallel,
                },
            },
        )
        return background or not self.checkpoint_written(wait=True)

    def _book(self) -> dict[str, Any]:
        """What belongs to a state beside its tensors; the same on every rank."""
        return {
            "step": self.step,
            "trained": self.trained,
            "metrics": self._metrics,
            "warm": self._warm,
        }

    def _take(self, book: dict[str, Any]) -> None:
        """The weights are those of this book now; drops what was accumulated."""
        self.step = book["step"]
        self.trained = [(start, end) for start, end in book["trained"]]
        self._metrics = book["metrics"]
        self._warm = book["warm"]
        self._half_updated = False
        self._pending = self._accumulation(self.step + 1)
        self._changed()

    @operator(kind="control")
    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether what `checkpoint` began is on the disk, on every rank; with `wait`, when it is.

        Raises CheckpointMismatch, on all ranks together, where it cannot be written.
        """
        return self._writer.is_written(wait=wait)

    def restore(self, path: Path) -> None:
        """Take back what `checkpoint` wrote, in whatever layout; drops what was accumulated.

        Raises CheckpointMismatch where it is absent, of another format, or not what its digest says.
        """
        from gyre.workloads.megatron.checkpoint import restore

        book = restore(self.policy, self._seam, path)
        self._take(book)
        if self._digest() != book["digest"]:
            raise CheckpointMismatch(f"the weights in {path} are not those that were written.")

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        """As every learner's; `memory`, where this rank keeps states in host memory: ask `restore_from_memory`."""
        kept = {"memory": True} if self._memory is not None and self._memory.is_on else {}
        return {**super().state(), **kept}

    @operator(kind="control")
    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        """Take back the newest state that every rank has in its machine's memory, whole, of a step beyond `newer_than`
        and up to `at_most`. That step, or None; nothing has changed then."""
        if self._memory is None:
            return None
        book = self._memory.restore(newer_than=newer_than, at_most=at_most)
        if book is None:
            return None
        self._take(book)
        return self.step

    @operator(kind="control")
    def forget_memory(self) -> None:
        """The job is done: nobody will come back for what is in host memory."""
        if self._memory is not None:
            self._memory.close(keep=False)


class MegatronActor(MegatronLearner, TorchActor):
    """The operators of `TorchActor`; all of them go to every rank, but for the exports, which the first rank answers.

    Of the small decoder `export_weights` has the names, so that the other torch roles go with it.
    """

    def setup(self) -> None:
        self.takes_snapshots = True
        """Set it False where weights are read from the device, by `hugging_face.export_weights`."""
        super().setup()

    # -- the supervised start ------------------------------------------------------------------------

    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        """As `TorchActor.warm_start`, of the small decoder in plain torch, whose weights Megatron then takes. A model
        from a folder has none: `{"steps": 0}`."""
        if self._warm is not None or self.step > 0:
            return super().warm_start()
        if self.decoder_config is None:
            self._warm = {"steps": 0}
        else:
            self.model = Decoder(self.decoder_config, seed=self.settings.seed)
            super().warm_start()
            self.policy.load(to_names(self.model.state_dict(), self.decoder_config).__getitem__)
            del self.model
        self._changed()
        return self._warm or {}

    # -- one step ------------------------------------------------------------------------------------

    def gradient(self, groups: list[Group]) -> tuple[None, Tally]:
        from gyre.workloads.megatron.gradients import packed_policy_loss, policy_rows

        return self.add_gradient(
            groups,
            policy_rows(groups, self.settings),
            lambda passes: self.policy.backward(
                passes,
                lambda part, logprobs, entropies: packed_policy_loss(
                    part, logprobs, entropies, self.settings
                ),
                temperature=self.settings.sampling.temperature,
                entropy_gradient=self.settings.loss.entropy_coeff != 0,
            ),
        )

    def own_logprobs(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        def logprobs(passes: list[Pass]) -> list[torch.Tensor]:
            found = self.policy.logprobs(passes, temperature=self.settings.sampling.temperature)
            return [one for one, _ in found]

        trained_samples(groups, self.settings)
        return self.by_group(groups, logprobs)

    # -- what others see of it -----------------------------------------------------------------------

    def _changed(self) -> None:
        from gyre.workloads.megatron.snapshot import Snapshot

        super()._changed()
        started = time.monotonic()
        self._snapshot: Snapshot | None = None  # before the next one, which can then have its memory
        if self.takes_snapshots:
            self._snapshot = Snapshot.take(self.policy)
        self.timings["snapshot"] = time.monotonic() - started

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
        """As `TorchActor.restore_weights`, into whatever layout."""
        from gyre.workloads.megatron.checkpoint import begin_optimizer_anew
        from gyre.workloads.torch.folder import SafetensorsFolder

        self.policy.load(SafetensorsFolder(self.fetched(version, checksum, sources).path))
        begin_optimizer_anew(self.policy)
        self.ranks.sum([0.0])  # nobody takes a folder away that others may have linked, or still fetch
        self.let_go()
        if self._memory is not None:
            self._memory.drop()  # of the same steps, and of another history
        self._take({"step": version, "trained": trained, "metrics": {}, "warm": {"steps": 0}})

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: the manifest as a dict, and its buffer. The first rank has them."""
        named = self.weights()
        if self.decoder_config is not None:
            named = from_names(named, self.decoder_config)
        manifest, buffer = pack_weights(named, version=version, step=self.step)
        return manifest.to_dict(), buffer

    def servable(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """As `TorchActor`. The first rank has the weights."""
        return self.weights(), self.hugging_face_config

    @operator(kind="weights")
    def save_model(self, path: Path) -> None:
        """Write the weights after the last step as a folder in Hugging Face's layout. The first rank does it; the
        folder is there when it is whole, and must not be there before."""
        if self.rank != 0:
            return
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(self.weights(), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(self.hugging_face_config, indent=1))
        partial.rename(path)

    def checksum(self) -> str:
        """Of what `export_weights` gives."""
        from gyre.workloads.megatron.snapshot import Snapshot

        if self._snapshot is None:
            self._snapshot = Snapshot.take(self.policy)
        return str(self.export_weights(version=0)[0]["checksum"]) if self.rank == 0 else ""


def device_of(layout: MegatronSettings) -> torch.device:
    """This process's device. `GYRE_DEVICES` is what the plan gave it, by number on its machine; where the process sees
    one device only, it is that one. Raises ConfigError where there is none."""
    kind = layout.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "config.megatron.device is cuda, but this process sees no CUDA device.",
            hint="Check the driver and CUDA_VISIBLE_DEVICES.",
        )
    planned = os.environ.get("GYRE_DEVICES", "").split(",")[0]
    return torch.device("cuda", int(planned) if planned and torch.cuda.device_count() > 1 else 0)


def dtype_of(layout: MegatronSettings, device: torch.device) -> torch.dtype:
    """What the weights are computed with. The optimizer's own are float32 in any case."""
    name = layout.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    found: torch.dtype = getattr(torch, name)
    return found


def make_deterministic() -> None:
    """Kernels that give the same bits each time; what has none raises. Before the first product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not `warn_only`: with it the backward pass of flash attention stays as it is, and warns.
    torch.use_deterministic_algorithms(True)
    # Else each new tensor is filled first, which costs a pass over it and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_everything(seed: int) -> None:
    """Nothing here draws at random after the first weights; what a user's loss may draw is then the same, too."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
