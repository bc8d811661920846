"""FSDP2 as a learner's back end: passes in, a gradient summed over the ranks, one step out.

Invariants:
- *one gradient*: the step is that of the sum of all passes' losses over all ranks, divided once by a number that the
  caller gives, however the passes were cut and dealt;
- *nobody computes alone*: a pass gathers parameters from all ranks, so they agree on how many passes there are before
  the first one, and who has fewer computes dummies whose loss is multiplied by 0;
- *one error, all ranks*: a loss that raises on one rank leaves none of the others waiting;
- *finite or untouched*: a gradient that is not finite, or missing, is refused before any weight changes;
- *float32 where it adds up*: gradients are summed, and the weights that are trained are kept, in float32;
- *an adapter alone*: with `config.lora` the model stays as it is, in the dtype that it computes in.

This module must not know about groups, rewards or steps' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.models.safetensors_folder import TensorSource
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.fsdp import checkpoints
from gyre.workloads.fsdp.errors import LossFailed, NoGradient
from gyre.workloads.fsdp.formats import ADAPTER
from gyre.workloads.fsdp.fused import fuse
from gyre.workloads.fsdp.lora import (
    AdapterShards,
    adapter_off,
    add_adapter,
    first_adapter,
    problem_with,
    record_of,
)
from gyre.workloads.fsdp.model import Recomputation, build_causal, shard, take_buffers
from gyre.workloads.fsdp.packing_check import choose
from gyre.workloads.fsdp.parts import (
    UPDATES,
    FsdpPart,
    parts_of,
    take_random,
    updates_in,
    updates_part,
    written_by,
)
from gyre.workloads.fsdp.passes import dummy, rows_of
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.fsdp.shards import Shards, local_of
from gyre.workloads.fsdp.small_check import pattern_of, try_small
from gyre.workloads.fsdp.token_model import TokenModel
from gyre.workloads.learner.backend import TokenLoss, begin_anew
from gyre.workloads.learner.checkpoint_identity import another_config, config_in
from gyre.workloads.learner.checkpoint_writer import CheckpointWriter
from gyre.workloads.learner.devices import device_of, dtype_of, make_deterministic, seed_everything
from gyre.workloads.learner.errors import NotFinite
from gyre.workloads.learner.laps import Laps
from gyre.workloads.learner.losses import detached
from gyre.workloads.learner.memory_checkpoints import MemoryCheckpoints, purpose_of
from gyre.workloads.learner.memory_choice import choice_of, known_shape, now_said
from gyre.workloads.learner.packing import Pass

_CLIP_EPS = 1e-6
"""As torch's and Megatron's clip have it."""


class FsdpBackend:
    """Implements `gyre.workloads.learner.backend.LearnerBackend` for causal language models of transformers.

    The model is that of `hugging_face_config`, the content of a `config.json`; its weights are `source`'s, by the names
    that files have. With `values` it has a value head instead of its output layer. Unless it `trains` it has no
    optimizer, and `forward`, `weights`, `load` and `restore` are all that it does. `held` are the names of all tensors
    in the files. Raises ConfigError, WeightMismatch, also for a tensor in `held` that the model does not have,
    ModelFolderError and RanksMissing.

    `packs` says whether sequences share passes, `prompts_once` whether also the tokens that they have in common, and
    `packing` in a sentence why.
    """

    width_multiple = 1

    def __init__(
        self,
        context: WorkloadContext,
        settings: WorkloadSettings,
        optim: OptimSettings,
        hugging_face_config: dict[str, Any],
        source: TensorSource,
        *,
        values: bool,
        trains: bool = True,
        held: Collection[str] = (),
    ) -> None:
        laps = Laps()
        own = settings.fsdp
        self.device = device_of(own)
        self._dtype = dtype_of(own, self.device)
        self.dtype = str(self._dtype).removeprefix("torch.")
        self.trains = trains
        self._optim = optim
        self._whole_gradient = own.whole_gradient
        temperature = settings.sampling.temperature
        self._updates = 0
        """Optimizer steps since its beginning."""
        self._scale = 1.0 / temperature if temperature > 0 else 1.0
        self._entropy_gradient = settings.loss.entropy_coeff != 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if own.deterministic:
            make_deterministic()
        seed_everything(settings.seed)
        causal = build_causal(hugging_face_config, own.attention)
        if self._dtype != torch.float32:
            take_buffers(causal, hugging_face_config, self._dtype)
        self._config = hugging_face_config
        self._tried = try_small(
            causal.config,
            attention=own.attention,
            values=values,
            device=self.device,
            seed=settings.seed,
            fuses=own.fused_kernels and self.device.type == "cuda",
        )
        fuse(causal, self._tried.fused)
        self._lora = settings.lora if trains and not values else None
        self._layers = add_adapter(causal, self._lora) if self._lora is not None else []
        self._model: Any = TokenModel(causal, values=values)
        laps.lap("layers")
        self.ranks = FsdpRanks(context, device=self.device, timeout_s=settings.collective_timeout_s)
        laps.lap("ranks")
        self._writer = CheckpointWriter(self.ranks, self.device)
        self.memory: MemoryCheckpoints[FsdpPart] | None = None
        self._first, self._seed = source, settings.seed
        self.has_weights = False
        self.packs, self.prompts_once, self.packing = False, False, ""
        self._asked_once = own.prompts_once
        try:
            self._choice = choice_of(
                "fsdp",
                known_shape(hugging_face_config, attention=own.attention),
                settings,
                context,
                self.device,
                ranks=context.world_size,
                exchange=self.ranks.exchange,
                trains=trains,
                values=values,
            )
            self.pass_tokens, self.may_recompute = self._choice.tokens, self._choice.may_change
            self._recomputation = Recomputation(self._choice.recompute)
            self._set_up(held)
            laps.lap("shards")
            if not trains or self._lora is not None or begin_anew(context, self.ranks):
                self.take_first()
                laps.lap("weights")
            if trains and own.memory_checkpoint_share:
                share, purpose = own.memory_checkpoint_share, purpose_of(context)
                self.memory = MemoryCheckpoints(self, self.ranks, purpose, device=self.device, share=share)
                laps.lap("host memory")
            print(f"FSDP2 is set up after {laps}", flush=True)
        except BaseException:
            self.close(keep=False)
            raise

    def _set_up(self, held: Collection[str]) -> None:
        self._shards = Shards(self._model, self.ranks)
        self._shards.refuse_unknown(held)
        self._trained = self._shards
        """Those of the tensors that are trained, kept and published."""
        if self._lora is not None:
            self._adapter = AdapterShards(self._model, self.ranks, self._layers, self._lora)
            self._trained = self._adapter
        shard(
            self._model,
            self.ranks.mesh,
            device=self.device,
            dtype=self._dtype,
            trains=self.trains,
            recomputation=self._recomputation if self.trains else None,
            seldom=self._tried.seldom,
        )
        self.recompute(on=self._choice.recompute)
        self._shards.bind(self._model)
        self.adapter_record: dict[str, Any] | None = None
        """What checkpoints say of the adapter; None of a whole model."""
        if self._lora is not None:
            self._adapter.bind(self._model)
        self._parameters: dict[str, Any] = {
            name: tensor
            for name, tensor in self._trained.tensors.items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        self._locals = {name: local_of(parameter) for name, parameter in self._parameters.items()}
        """This rank's part of each, the memory itself: what the optimizer steps, for it takes as long over a DTensor's
        dispatch as over a step."""
        if self.trains:
            self._optimizer = self._new_optimizer()
            self._begin_optimizer()

    def recompute(self, *, on: bool) -> None:
        """See `Backend.recompute`. The keys of a tree's paths are kept where layers are computed again anyway."""
        self._recomputation.on = self._model.keeps_paths = on

    @property
    def weight_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self._trained.shapes.values()) * self._dtype.itemsize

    def take_first(self) -> None:
        self._shards.take_first(self._first)
        if self._lora is not None:
            self._adapter.take_first(first_adapter(self._adapter.shapes, self._seed))
            self.adapter_record = record_of(self._lora, self._layers, self._shards.fingerprint())
        self._took()

    def _took(self) -> None:
        """There are weights now. Whether they may be packed is asked of the first ones."""
        self.has_weights = True
        if not self.packing:
            found = choose(
                self._model,
                self._tried,
                device=self.device,
                dtype=self._dtype,
                seed=self._seed,
                any_rank=self.ranks.any,
                prompts_once=self._asked_once,
            )
            self._model.reshard()
            self.packs, self.packing = found.packs, found.said
            self.prompts_once = found.prompts_once

    def _new_optimizer(self) -> torch.optim.AdamW:
        """Weight decay is for matrices."""
        decayed: list[Any] = []
        others: list[Any] = []
        for name, local in self._locals.items():
            (others if local.ndim == 1 or name.endswith("bias") else decayed).append(local)
        optim = self._optim
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optim.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=optim.rate,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )

    def _begin_optimizer(self) -> None:
        """It knows of no step. Its states exist from the start, so that their memory is known to suffice."""
        self._updates = 0
        for local in self._locals.values():
            self._optimizer.state[local] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": torch.zeros_like(local),
                "exp_avg_sq": torch.zeros_like(local),
            }

    # -- one optimizer step ----------------------------------------------------------------------------

    def zero(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = self._locals[name].grad = None

    def backward(self, passes: Sequence[Pass], loss: TokenLoss) -> list[LossSum]:
        """See `Backend.backward`. Where a loss raises, it is raised when the other passes are done, and LossFailed on
        the other ranks."""
        pieces = self._pieces(passes)
        found: list[list[LossSum]] = [[] for _ in passes]
        failure: Exception | None = None
        for number, (index, piece) in enumerate(pieces):
            if self._whole_gradient:
                self._model.set_requires_gradient_sync(number == len(pieces) - 1)
            part = piece.to(self.device)
            said = self._said(part)
            total = said[0].sum() * 0.0
            if index is not None and failure is None:
                try:
                    lost = loss(part, *said)
                    total = lost.loss if lost.loss.requires_grad else total
                    found[index].append(detached(lost))
                except Exception as error:  # a user's loss; the others wait for this rank's gradient
                    failure = error
            total.backward()  # type: ignore[no-untyped-call]
        if pieces and self.ranks.any(failure is not None):
            raise failure or LossFailed("the loss raised on another rank.", hint="Its log says what.")
        return [_joined(parts) for parts in found]

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        pieces = self._pieces(passes)
        found: list[list[Tensor]] = [[] for _ in passes]
        with torch.no_grad():
            for index, piece in pieces:
                said = self._said(piece.to(self.device))[0]
                if index is not None:
                    found[index].append(said)
        self._model.reshard()  # the next step would not reach what stays gathered
        return [torch.cat(parts).cpu() for parts in found]

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """In the block `forward` is that of the model without its adapter: what a reference says."""
        with adapter_off(self._model):
            yield

    def _pieces(self, passes: Sequence[Pass]) -> list[tuple[int | None, Pass]]:
        """What goes through the model, with the number of the pass that it is of: as many pieces on every rank."""
        pieces: list[tuple[int | None, Pass]] = []
        for index, part in enumerate(passes):
            whole = self.packs and (self.prompts_once or not part.parents)
            pieces += [(index, piece) for piece in ([part] if whole else rows_of(part))]
        missing = self.ranks.max(len(pieces)) - len(pieces)
        return pieces + [(None, dummy())] * missing

    def _said(self, part: Pass) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._model(
            part.tokens,
            part.positions,
            part.columns,
            part.targets,
            lengths=part.lengths,
            parents=part.parents,
            scale=self._scale,
            entropy_gradient=self._entropy_gradient,
        )
        return found

    def update(self, *, count: float, lr: float) -> float:
        """See `Backend.update`. Raises NoGradient too, where a parameter that is trained got none from any pass."""
        self._refuse_without_gradient()
        gradients: list[Tensor] = []
        for name, parameter in self._parameters.items():
            local, found = self._locals[name], parameter.grad
            local.grad = torch.zeros_like(local) if found is None else local_of(found)
            gradients.append(local.grad)
        torch._foreach_mul_(gradients, 1.0 / max(count, 1.0))
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        norm = math.sqrt(self.ranks.sum([float(norms.square().sum())])[0])
        if not math.isfinite(norm):
            self.zero()
            raise NotFinite(f"the gradient has norm {norm}.", hint="Lower optim.lr.")
        torch._foreach_mul_(gradients, min(1.0, self._optim.clip_norm / (norm + _CLIP_EPS)))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._settle()
        self._optimizer.step()
        self._updates += 1
        self.zero()
        return norm

    def _refuse_without_gradient(self) -> None:
        """Those that transformers, too, gives none may be without; and all of them, where there was no pass."""
        missing = [name for name, one in self._parameters.items() if one.requires_grad and one.grad is None]
        wanted = [name for name in missing if pattern_of(name) not in self._tried.unreached]
        if len(missing) < len(self._parameters) and wanted:
            self.zero()
            raise NoGradient(
                f"{len(wanted)} parameters got no gradient from any pass, {wanted[0]} among them: nothing that the "
                "model says depends on them.",
                hint="Train another kind of model, and report this one.",
            )

    def _settle(self) -> None:
        """The state is about to be changed."""
        if self.memory is not None:
            self.memory.settle()

    # -- weights ---------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.weights`, in the dtype that the model computes in. With `config.lora` they are the adapter's, in
        float32, by PEFT's names."""
        return self._trained.gathered(self._dtype if self._lora is None else torch.float32)

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, of the whole model, with its adapter added to it where it has one."""
        if self._lora is None:
            return self.weights()
        return self._adapter.merged_into(self._shards, self._dtype)

    def load(self, source: TensorSource) -> None:
        """See `Backend.load`. With `config.lora` the source gives an adapter, by PEFT's names."""
        self._settle()
        self._trained.load(source)
        if self.memory is not None:
            self.memory.drop()  # of the same steps, and of another history
        if self.trains:
            self._begin_optimizer()
            self.zero()
        self._took()

    # -- checkpoints -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Begin to take the memory for copies of the state, so that the first need not wait for it."""
        if self.memory is not None and self.memory.is_on:
            self.memory.prepare()
        else:
            checkpoints.prepare(self._writer, self._parts, self.ranks)

    def save(self, path: Path, metadata: dict[str, Any], digest: Callable[[], str | None]) -> None:
        self._writer.abandon()  # a checkpoint of a controller that died before it was written, or gave it up
        copied = None if self.memory is None else self.memory.copied(metadata["step"], metadata)
        if self.adapter_record is not None:
            metadata = {**metadata, ADAPTER: self.adapter_record}
        checkpoints.begin(
            self._writer,
            path,
            self._parts(),
            self.ranks,
            updates=self._updates,
            metadata=metadata,
            digest=digest,
            copied=copied,
        )

    def saved(self, *, wait: bool) -> bool:
        return self._writer.is_written(wait=wait)

    def restore(self, path: Path) -> dict[str, Any]:
        """See `Backend.restore`. A model that does not train takes the weights of one that does. An adapter is refused
        that was trained beside another model, or is of another `config.lora`."""
        self._settle()
        parts = self._parts()
        metadata, self._updates = checkpoints.restore(path, parts, self.ranks, judge=self._problem_with)
        self._restored(parts)
        if self.memory is not None:
            self.memory.changed()
        return metadata

    def _restored(self, parts: Sequence[FsdpPart]) -> None:
        """The parts have other values, of after `_updates` optimizer steps."""
        take_random(parts)
        if self.trains:
            for state in self._optimizer.state.values():
                state["step"].fill_(self._updates)
            self.zero()
        self._took()

    @property
    def layout(self) -> str:
        return f"fsdp {self.dtype}, adapter {self.adapter_record is not None}"

    def parts(self) -> list[FsdpPart]:
        """What is kept in host memory; see `memory_checkpoints.RankState`."""
        return [*self._parts(), updates_part(self._updates)]

    def written(self, parts: Sequence[FsdpPart]) -> list[FsdpPart]:
        return written_by((part for part in parts if part.key != UPDATES), self.ranks.rank)

    def taken(self, parts: Sequence[FsdpPart]) -> None:
        self._updates = updates_in(parts)
        self._restored(parts)

    def _problem_with(self, told: dict[str, Any]) -> str:
        """Why a checkpoint is not this job's, by its metadata; "" where it is."""
        return another_config(config_in(told), self._config) or problem_with(
            told.get(ADAPTER), self.adapter_record
        )

    def _parts(self) -> list[FsdpPart]:
        if not self.trains:
            return parts_of(self._trained, {})
        moments = {name: self._optimizer.state[local] for name, local in self._locals.items()}
        return parts_of(self._trained, moments)

    def status(self) -> dict[str, Any]:
        """How sequences are packed, which parts of the model are Gyre's kernels, how the last checkpoints were written,
        and for `auto` how large passes are, and whether their activations are kept."""
        fused = sorted(name.rpartition(".")[2] for name in self._tried.fused)
        told: dict[str, Any] = {"packing": self.packing, "fused": fused, "checkpoint": self._writer.status()}
        if self.memory is not None:
            told["memory_checkpoint"] = self.memory.status()
        said = now_said(self._choice, recompute=self._recomputation.on)
        return told | ({"passes": said} if said else {})

    def close(self, *, keep: bool) -> None:
        self._writer.close()  # it may be reading the states
        if self.memory is not None:
            self.memory.close(keep=keep)
        self.ranks.close()

    def unlink(self) -> None:
        if self.memory is not None:
            self.memory.unlink()


def _joined(parts: Sequence[LossSum]) -> LossSum:
    """The loss of a pass from those of its sequences: everything in it is a sum."""
    first, *rest = parts
    for part in rest:
        metrics = {name: value + part.metrics[name] for name, value in first.metrics.items()}
        first = LossSum(first.loss + part.loss, first.weight + part.weight, metrics)
    return first
