"""The back end in plain torch: the decoder in float32, whole on each rank, its gradient summed over Gloo.

It runs the demo, the tests and the chaos suite on CPUs, and is the reference that the other back ends are compared
with. Invariant *all or nothing*: the gradient of a call's passes is added when all of them are computed.

This module must not know about groups, rewards or steps' numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.models.architecture import Architecture
from gyre.models.modules import Decoder, ValueModel
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import VALUE_BIAS, VALUE_WEIGHT, to_names
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.peers import Peers
from gyre.workloads.learner.backend import TokenLoss
from gyre.workloads.learner.base_backend import BaseBackend
from gyre.workloads.learner.checkpoint_identity import refuse_another_model, refuse_another_writer
from gyre.workloads.learner.errors import CheckpointMismatch, NotFinite
from gyre.workloads.learner.losses import detached
from gyre.workloads.learner.packing import Pass
from gyre.workloads.learner.trained_model import own_parameters
from gyre.workloads.torch.kind import TORCH
from gyre.workloads.torch.saved_policy import CHECKPOINT_FORMAT, checkpoint_file, read_checkpoint, write_sum
from gyre.workloads.torch.served_policy import load_parameters


class TorchBackend(BaseBackend):
    """A `gyre.workloads.learner.backend.LearnerBackend`. With `values` the model says values instead of log-probs.
    Unless it `trains` it has no optimizer and no gradient, and `forward` is all that it does."""

    ranks: Peers

    def __init__(
        self,
        context: WorkloadContext,
        settings: WorkloadSettings,
        optim: OptimSettings,
        architecture: Architecture,
        source: TensorSource,
        *,
        values: bool,
        trains: bool = True,
    ) -> None:
        self.settings = settings
        self.optim = optim
        self.values = values
        # Whatever output layer a value model's policy has is the policy's alone.
        self.architecture = replace(architecture, tied=True) if values else architecture
        self.model: Decoder | ValueModel
        self.model = ValueModel(self.architecture) if values else Decoder(self.architecture)
        load_parameters(self.model, self._own(source))
        self.ranks = Peers(context, settings.collective_timeout_s)
        if not trains:
            self.model.eval().requires_grad_(False)
            return
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.rate,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.gradient = torch.zeros(sum(parameter.numel() for parameter in self.model.parameters()))
        """Flat, in the order of the parameters."""

    def _own(self, source: TensorSource) -> dict[str, Tensor]:
        """The source's tensors as this model's parameters."""
        tensors = own_parameters(source, self.architecture)
        if not self.values:
            return tensors
        heads = {name: source(name).float() for name in (VALUE_WEIGHT, VALUE_BIAS)}
        return {f"decoder.{name}": one for name, one in tensors.items()} | heads

    # -- one step ------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.gradient = torch.zeros_like(self.gradient)

    def backward(self, passes: Sequence[Pass], loss: TokenLoss) -> list[LossSum]:
        found, total = [], None
        for part in passes:
            one = loss(part, *self._numbers(part))
            gradients = torch.autograd.grad(one.loss, list(self.model.parameters()))
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            total = flat if total is None else total.add_(flat)
            found.append(detached(one))
        if total is not None:
            self.gradient += total
        return found

    @torch.no_grad()
    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        return [self._numbers(part)[0] for part in passes]

    def _numbers(self, part: Pass) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, or values and zeros, of the pass's predicted tokens, float32 `[n]`."""
        inputs = pad_sequence(list(torch.split(part.tokens, part.lengths)), batch_first=True)
        starts = torch.tensor(part.lengths).cumsum(0) - torch.tensor(part.lengths)
        said = self.model(inputs)[part.rows, part.columns - starts[part.rows]]
        if self.values:
            return said, torch.zeros_like(said)
        temperature = self.settings.sampling.temperature
        everything = torch.log_softmax(said / temperature if temperature > 0 else said, dim=-1)
        counted = everything if self.settings.loss.entropy_coeff != 0 else everything.detach()
        entropies = -(counted.exp() * counted).sum(dim=-1)
        return everything.gather(1, part.targets[:, None])[:, 0], entropies

    def update(self, *, count: float, lr: float) -> float:
        gradient = self.gradient
        self.ranks.all_reduce_sum(gradient)
        gradient /= count
        norm = float(gradient.norm())
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient has norm {norm}.", hint="Lower optim.lr.")
        gradient *= min(1.0, self.optim.clip_norm / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter, part in zip(self.model.parameters(), _split(self.model, gradient), strict=True):
            parameter.grad = part
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.zero()
        return norm

    # -- weights and files ---------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.ranks.rank != 0:
            return
        decoder = self.model.decoder if isinstance(self.model, ValueModel) else self.model
        yield from to_names(dict(decoder.named_parameters()), self.architecture).items()
        if isinstance(self.model, ValueModel):
            yield VALUE_WEIGHT, self.model.value_head.weight
            yield VALUE_BIAS, self.model.value_head.bias

    def load(self, source: TensorSource) -> None:
        load_parameters(self.model, self._own(source))
        self.optimizer.state.clear()

    def save(self, path: Path, metadata: dict[str, Any], digest: Callable[[], str | None]) -> None:
        """Rank 0 writes the whole state to `rank_00000.pt`; every other rank a marker with what it holds. Each has the
        checksum of its bytes beside it. All of it is on the disk when this returns."""
        content: dict[str, Any] = {"format": CHECKPOINT_FORMAT, "step": metadata["step"], "digest": digest()}
        if self.ranks.rank == 0:
            described = metadata["model"] or {}
            content |= {
                "config": described.get("config"),
                "path": described.get("path", ""),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                **{name: metadata[name] for name in ("trained", "metrics", "warm")},
            }
        with open(checkpoint_file(path, self.ranks.rank), "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        write_sum(checkpoint_file(path, self.ranks.rank))

    def restore(self, path: Path) -> dict[str, Any]:
        """Take rank 0's state, on every rank and for any number of ranks. Raises CheckpointMismatch also where the file
        is not what its checksum says, and WeightMismatch where it is another model's."""
        refuse_another_writer(path, TORCH)
        file = checkpoint_file(path, 0)
        if not file.exists():
            raise CheckpointMismatch(
                f"there is no checkpoint of this role at {file}.",
                hint="Is its disk there? The checkpoint before it may be whole.",
            )
        content = read_checkpoint(file)
        refuse_another_model(path, content.get("config"), self.architecture)
        load_parameters(self.model, content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        return {name: content[name] for name in ("step", "trained", "metrics", "warm", "digest")}


def _split(model: nn.Module, flat: Tensor) -> list[Tensor]:
    """Views of `flat` in the shapes of the model's parameters."""
    parameters = list(model.parameters())
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
