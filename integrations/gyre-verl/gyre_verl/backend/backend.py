"""verl's worker as a learner's back end: passes in, a gradient summed over the ranks, one step out.

Invariants:
- *one gradient*: the step is that of the sum of all passes' losses over all ranks, divided once by a number that the
  caller gives, however the passes were cut and dealt;
- *nobody computes alone*: a pass gathers parameters from all ranks, so they agree on how many passes there are before
  the first one, and who has fewer computes dummies whose loss is multiplied by 0;
- *no error inside verl's pass*: verl forgets the whole gradient, and says nothing, where a loss raises. So what a loss
  raises is kept until all passes are done, and told on all ranks;
- *finite or untouched*: a gradient that is not finite is refused, and no weight has changed.

This module must not know about groups, rewards or steps' numbers.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.errors import ConfigError, GyreError
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_folder import SafetensorsFolder, TensorSource
from gyre.models.saving import save_model_folder
from gyre.models.tensor_names import HEAD, expected_shapes
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import WorkloadContext
from gyre.workloads.fsdp.first_model import FirstModel
from gyre.workloads.fsdp.passes import dummy
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.learner.backend import TokenLoss
from gyre.workloads.learner.base_backend import BaseBackend
from gyre.workloads.learner.errors import NotFinite
from gyre.workloads.learner.losses import detached
from gyre.workloads.learner.packing import Pass, TrainingRow, pack
from gyre_verl.backend import checkpoints, tensors
from gyre_verl.backend.batches import batch_of, predicted
from gyre_verl.backend.settings import VerlSettings
from gyre_verl.backend.worker import device_of_verl, dtype_of, make_worker

_CHECKED_LENGTHS = (24, 17)
"""Of the two sequences that show whether a model keeps a pass's sequences apart."""


class LossFailed(GyreError):
    """The loss raised on another rank."""

    code = "verl.loss_failed"


class VerlBackend(BaseBackend):
    """Implements `gyre.workloads.learner.backend.LearnerBackend` for any dense causal language model of transformers.
    Raises ConfigError, WeightMismatch, ModelFolderError and RanksMissing."""

    def __init__(
        self,
        context: WorkloadContext,
        settings: WorkloadSettings,
        optim: OptimSettings,
        own: VerlSettings,
        model: FirstModel,
    ) -> None:
        self.pass_tokens = own.pass_tokens
        self.device = device_of_verl()
        self._dtype = dtype_of(own, self.device)
        self.dtype = str(self._dtype).removeprefix("torch.")
        self._own = own
        self._config = model.config
        temperature = settings.sampling.temperature
        self._temperature = temperature if temperature > 0 else 1.0
        self._entropy_gradient = settings.loss.entropy_coeff != 0
        self._updates = 0
        """Optimizer steps since its beginning."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        source, held = model.source(settings)
        self.ranks = FsdpRanks(context, device=self.device, timeout_s=settings.collective_timeout_s)
        try:
            with _weights_on_disk(model, settings, source) as weights:
                self._worker = make_worker(
                    context,
                    settings,
                    optim,
                    own,
                    config=model.folder or weights,
                    weights=weights,
                    device=self.device,
                    dtype=self._dtype,
                )
            self._engine = self._worker.engine
            self._module = self._engine.module
            self._tied = model.tied
            self._tensors = self._named_tensors()
            names = expected_shapes(model.known) if model.known is not None else held
            tensors.refuse_unknown(self._tensors, names)
            self._refuse_broken()
            self._begin_optimizer()
            if own.use_remove_padding:
                self._refuse_neighbours(settings.seed, model.vocab)
        except BaseException:
            self.close(keep=False)
            raise

    def _named_tensors(self) -> dict[str, Any]:
        """The model's tensors by the names in files; a tied output layer is the embedding."""
        found = self._module.state_dict()
        return {name: tensor for name, tensor in found.items() if not (self._tied and name == HEAD)}

    def _refuse_broken(self) -> None:
        """Raises ModelFolderError, on all ranks, where a weight that verl loaded is not finite."""
        broken = [name for name, tensor in self._tensors.items() if not is_finite(tensors.local_of(tensor))]
        everybodys = [
            name for blob in self.ranks.exchange("\n".join(broken).encode()) for name in blob.decode().split()
        ]
        refuse_not_finite(sorted(set(everybodys)))

    def _begin_optimizer(self) -> None:
        """It knows of no step. Its states are there from the start: torch's state dicts would make them by a step,
        which counts as one."""
        self._updates = 0
        for parameter in self._module.parameters():
            self._engine.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _refuse_neighbours(self, seed: int, vocab: int) -> None:
        """Raises ConfigError, on all ranks, where a packed sequence sees its neighbour: such a model would train on
        wrong log-probs, and say nothing."""
        drawn = np.random.default_rng(seed)
        rows = []
        for length in _CHECKED_LENGTHS:
            tokens = drawn.integers(0, vocab, length + 1).astype(np.int32)
            rows.append(TrainingRow(tokens[:1], tokens[1:]))
        together = self.forward(list(pack(rows, max_tokens=sum(_CHECKED_LENGTHS))))[0][_CHECKED_LENGTHS[0] :]
        (alone,) = self.forward(list(pack(rows[1:], max_tokens=sum(_CHECKED_LENGTHS))))
        difference = float(torch.nan_to_num((together - alone).norm() / alone.norm(), nan=math.inf))
        if self.ranks.any(difference > float(torch.finfo(self._dtype).eps) ** 0.5):  # half of the digits
            raise ConfigError(
                f"This model does not keep packed sequences apart in verl: log-probs beside another sequence differ by "
                f"{difference:.2g} of their size.",
                hint="Set config.verl.use_remove_padding: false.",
            )

    # -- one optimizer step ----------------------------------------------------------------------------

    def zero(self) -> None:
        self._worker.optimizer_zero_grad()

    def backward(self, passes: Sequence[Pass], loss: TokenLoss) -> list[LossSum]:
        """See `Backend.backward`. Where a loss raises, it is raised when the other passes are done, and LossFailed on
        the other ranks."""
        pieces = self._pieces(passes)
        found: list[LossSum] = []
        failures: list[Exception] = []

        def loss_of(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
            logprobs = predicted(model_output["log_probs"], there)
            entropies = predicted(model_output["entropy"], there)
            total = logprobs.sum() * 0.0
            if counts and not failures:
                try:
                    lost = loss(there, logprobs, entropies if self._entropy_gradient else entropies.detach())
                    total = lost.loss if lost.loss.requires_grad else total
                    found.append(detached(lost))
                except Exception as error:  # a user's loss; the others wait for this rank's gradient
                    failures.append(error)
            return total * self.ranks.world_size, {}  # FSDP2 takes the mean over ranks

        for part, counts in pieces:
            there = part.to(self.device)
            batch = self._batch(part, entropies=True, counts=counts)
            with self._engine.train_mode(zero_grad_on_exit=False):
                self._engine.forward_backward_batch(batch, loss_of)
        if pieces and self.ranks.any(bool(failures)):
            elsewhere = LossFailed("the loss raised on another rank.", hint="Its log says what.")
            raise failures[0] if failures else elsewhere
        return found

    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        found = []
        for part, counts in self._pieces(passes):
            with self._engine.eval_mode(), torch.no_grad():
                batch = self._batch(part, entropies=False, counts=counts)
                told = self._engine.forward_backward_batch(batch, None, forward_only=True)
            if counts:
                found.append(predicted(told["model_output"]["log_probs"], part).cpu())
        self._module.reshard()  # the next step would not reach what stays gathered
        return found

    def _batch(self, part: Pass, *, entropies: bool, counts: bool) -> Any:
        return batch_of(
            part,
            temperature=self._temperature,
            packed=self._own.use_remove_padding,
            entropies=entropies,
            counts=counts,
        )

    def _pieces(self, passes: Sequence[Pass]) -> list[tuple[Pass, bool]]:
        """What goes through the model, and whether it counts: as many pieces on every rank."""
        missing = self.ranks.max(len(passes)) - len(passes)
        return [(part, True) for part in passes] + [(dummy(), False)] * missing

    def update(self, *, count: float, lr: float) -> float:
        for parameter in self._module.parameters():
            if parameter.grad is None:  # no rank had a pass: the moments decay nevertheless
                parameter.grad = torch.zeros_like(parameter)
            tensors.local_of(parameter.grad).div_(count)
        norm = float(self._worker.optimizer_step({"lr": float(lr)})["grad_norm"])
        self.zero()
        if not math.isfinite(norm):  # verl has left the weights as they were
            raise NotFinite(f"the gradient has norm {norm}.", hint="Lower optim.lr.")
        self._updates += 1
        return norm

    # -- weights ---------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.weights`, in the dtype that the model computes in."""
        for name, tensor in self._engine.get_per_tensor_param()[0]:
            if self.ranks.rank == 0 and not (self._tied and name == HEAD):
                yield name, tensor.detach().to(self._dtype).contiguous()

    def load(self, source: TensorSource) -> None:
        ranks = self.ranks

        def together(problem: Exception | None) -> None:
            if ranks.any(problem is not None):
                raise problem or ConfigError(
                    "another rank cannot read the weights.", hint="Its log says why."
                )

        tensors.load(self._tensors, source, rank=ranks.rank, ranks=ranks.world_size, together=together)
        self._begin_optimizer()
        self.zero()

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, path: Path, metadata: dict[str, Any], digest: Callable[[], str | None]) -> None:
        checkpoints.save(
            path,
            self._state(),
            self.ranks,
            updates=self._updates,
            metadata={**metadata, "digest": digest()},
        )

    def restore(self, path: Path) -> dict[str, Any]:
        self.zero()
        metadata, self._updates = checkpoints.restore(path, self._state(), self.ranks, config=self._config)
        for state in self._engine.optimizer.state.values():
            state["step"].fill_(self._updates)
        return metadata

    def _state(self) -> dict[str, Any]:
        """The tensors that a later step depends on, by name: those of the model, and of the optimizer's moments."""
        found = {f"model.{name}": tensor for name, tensor in self._tensors.items()}
        for name, parameter in self._module.named_parameters():
            state = self._engine.optimizer.state[parameter]
            found |= {f"optimizer.{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        return found

    def status(self) -> dict[str, Any]:
        return {"engine": f"verl, {self._own.strategy}", "packed": self._own.use_remove_padding}


@contextmanager
def _weights_on_disk(model: FirstModel, settings: WorkloadSettings, source: TensorSource) -> Iterator[Path]:
    """A folder that verl can load the first weights from: the job's, or where they are drawn, one that lasts for the
    block."""
    folder = Path(settings.first_policy) if model.folder is not None else None
    if folder is not None and SafetensorsFolder(folder):
        yield folder
        return
    assert model.known is not None, "only a decoder that Gyre knows is drawn"
    with tempfile.TemporaryDirectory(prefix="gyre-verl-") as temporary:
        drawn = Path(temporary) / "model"
        save_model_folder(
            drawn, model.config, ((name, source(name)) for name in expected_shapes(model.known))
        )
        yield drawn
