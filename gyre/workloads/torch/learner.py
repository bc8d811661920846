"""What every trained model in plain torch does: data-parallel optimizer steps with AdamW over Gloo, exactly once.

One step is `begin(step)`, `accumulate(groups, step=, index=)` for each micro-batch, `apply(step=, …)`.
Every rank gets every call; a rank's `groups` are its own share, possibly none.

With `optim.epochs` and `optim.mini_batches` at 1 a step is one update of the weights, whose gradient is summed as the
micro-batches come. With more, micro-batches are held, and `apply` makes all updates (`steps.updates`).

Invariants:
- *once*: a repeated call returns what the first returned and changes nothing; a step out of order is refused;
- *trained once*: the ids of trained groups are part of the state, and of its checkpoint; none enters twice;
- *one gradient*: an update is that of its whole mini-batch, however it was cut and spread over ranks;
- *whole or restored*: a step of several updates that fails between two of them leaves weights that are of no step; the
  learner says so (`state` has the step -1) and does nothing more until `restore`;
- *bit-exact continuation*: a restored checkpoint followed by the same calls gives the same bits.

This module must not know what is learned, where groups come from or where weights go.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.weights.version.manifest import pack_weights
from gyre.workloads.algorithms.losses import mini_batch_weight
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.gang.peers import Peers
from gyre.workloads.learner.accumulation import Accumulation, Tally
from gyre.workloads.learner.errors import (
    CheckpointMismatch,
    HalfUpdated,
    MicroBatchMismatch,
    NotFinite,
    StepGap,
    TrainedTwice,
)
from gyre.workloads.learner.intervals import Interval, contains, merge
from gyre.workloads.learner.updates import mini_batches_of, share_of
from gyre.workloads.torch.saved_policy import CHECKPOINT_FORMAT, checkpoint_file, read_checkpoint, write_sum
from gyre.workloads.torch.served_policy import load_parameters
from gyre.workloads.torch.steps.gradients import counted


@dataclass(frozen=True, slots=True)
class _Update:
    """One update of the weights: the tally of its mini-batch over all ranks, what its loss was divided by, and the
    gradient's norm before the clip."""

    tally: Tally
    count: float
    grad_norm: float


class TorchLearner(BaseWorkload):
    """Holds a model, its optimizer, the number of the last applied step and the ids of all trained groups.

    A subclass says what is learned: `make_model`, `optim`, `gradient`, `step_metrics` and the names in `SUMS`.
    """

    SUMS: ClassVar[tuple[str, ...]] = ()
    """The loss's metrics that are summed over ranks."""

    @property
    def summed_metrics(self) -> tuple[str, ...]:
        """`SUMS`, and those that the job's own loss has."""
        return self.SUMS

    model: nn.Module
    passes = 1
    """In how many passes a micro-batch is computed."""

    def make_model(self) -> nn.Module:
        """The model before any step, from the settings alone: the same on every rank."""
        raise NotImplementedError

    @property
    def optim(self) -> OptimSettings:
        raise NotImplementedError

    def gradient(self, groups: list[Group]) -> tuple[torch.Tensor | None, Tally]:
        """The flat gradient of the summed loss, None where there is none, and the tally. It is computed in `passes`
        passes, each of a part of the samples."""
        raise NotImplementedError

    def finish_gradient(self, *, refused: bool) -> Tally:
        """Compute what `gradient` has put off, before the sum is used, unless any rank has `refused` it. Returns what
        there is to say of it beyond what `gradient` has said. All ranks call it together."""
        return Tally()

    def spoiled(self) -> str:
        """Why the accumulated sum is of no use; "" if it is whole."""
        return ""

    def prepared(self, groups: list[Group]) -> list[Group]:
        """The groups with whatever must be of the weights before a step's first update; `groups` stay as they are.

        Raises ValueError as `gradient` would for what they lack."""
        raise NotImplementedError

    def step_metrics(self, tally: Tally) -> dict[str, Any]:
        """A step's metrics beyond those that every learner has."""
        raise NotImplementedError

    def model_config(self) -> dict[str, Any] | None:
        """The content of `config.json` of the model, if it is a policy."""
        return None

    def tokenizer_folder(self) -> str:
        """The folder that the model came from, which has its tokenizer; "" if there is none."""
        return ""

    def _changed(self) -> None:
        """A step's updates are made: the weights are new."""

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.build()
        self.step = 0
        self.trained: list[Interval] = []
        self._metrics: dict[str, Any] = {}
        self._warm: dict[str, Any] | None = None
        self._half_updated = False
        self._pending = self._accumulation(1)

    def build(self) -> None:
        """Model, optimizer and peers."""
        self.model = self.make_model()
        optim = self.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.rate,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.peers = Peers(self.context, self.settings.collective_timeout_s)

    def teardown(self) -> None:
        self.peers.close()

    def health(self) -> dict[str, Any]:
        return {"step": self.step, "accumulated": len(self._pending.records)}

    # -- one optimizer step --------------------------------------------------------------------------

    @operator(kind="control")
    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        """Forget what was accumulated for `step`: `{"step", "dropped", "passes"}`, the number of micro-batches dropped,
        and in how many passes each is computed from now on: twice as many for each time that they are `halved`.

        A controller calls it before it accumulates, so that what an earlier one left behind does not count.
        """
        self.passes = 1 << halved
        if self._is_applied(step):
            return {"already_applied": True}
        dropped = len(self._pending.records)
        self._pending = self._accumulation(step)
        return {"step": step, "dropped": dropped, **self.pass_size}

    @property
    def pass_size(self) -> dict[str, int]:
        """How large a pass is, as `begin` tells it."""
        return {"passes": self.passes}

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """Add the gradient of micro-batch `index` of step `step`: `{"index", "groups", "samples", "tokens", …}`.

        Groups are scored and whole. Raises StepGap for a step beyond the next, TrainedTwice for a group that was
        trained, or that another micro-batch of this step holds.
        """
        if self._is_applied(step):
            return {"already_applied": True}
        if index in self._pending.records:
            return self._pending.records[index]
        ids = [group.id for group in groups]
        self._refuse_trained([*self._pending.group_ids, *ids])
        self.report_progress(step=step, index=index)
        if self.optim.updates > 1:
            return self._pending.add(index, None, counted(groups), ids, held=self.prepared(groups))
        gradient, tally = self.gradient(groups)
        return self._pending.add(index, gradient, tally, ids)

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int], skip: bool = False) -> dict[str, Any]:
        """Step the optimizer with the batch's gradient over all ranks, or make the batch's updates; return the metrics.

        `indices` is how many micro-batches this and every rank must have accumulated; `group_ids` are the groups
        in them over all ranks. Metrics: `step`, `loss`, `grad_norm`, `lr`, `reward_mean`, `groups`, `samples`,
        `tokens`, and the learner's own; of several updates `updates`, the means of their losses and norms. Raises, on
        all ranks together, MicroBatchMismatch, TrainedTwice and NotFinite; the weights are then as they were, but
        where NotFinite comes of a later update: see *whole or restored*. With `skip` the step leaves the weights and
        the optimizer as they are, whatever was accumulated, and the metrics are `step` and `skipped`.
        """
        if self._is_applied(step):
            return self._metrics if step == self.step else {"already_applied": True}
        if skip:
            self.step = step
            self._pending = self._accumulation(step + 1)
            self._metrics = {"step": step, "skipped": 1}
            return self._metrics
        self._refuse_trained(group_ids)
        gradient, batch = self._reduce(step, indices, group_ids)
        lr = learning_rate(self.optim, step)
        if self.optim.updates == 1:
            made = [self._update(gradient, batch, lr)]
        else:
            made = self._updates(step, group_ids, lr)
        self._changed()

        self.step = step
        self.trained = merge(self.trained, group_ids)
        self._pending = self._accumulation(step + 1)
        self._metrics = {
            "step": step,
            "loss": sum(one.tally.loss for one in made) / max(sum(one.count for one in made), 1.0),
            "grad_norm": sum(one.grad_norm for one in made) / max(len(made), 1),
            "lr": lr,
            "reward_mean": batch.reward / max(batch.samples, 1.0),
            "groups": int(batch.groups),
            "samples": int(batch.samples),
            "tokens": int(batch.tokens),
            **self._loss_metrics(reduce(Tally.plus, (one.tally for one in made), Tally())),
        }
        if self.optim.updates > 1:
            self._metrics["updates"] = len(made)
        self.report_progress(step=step)
        return self._metrics

    def _loss_metrics(self, tally: Tally) -> dict[str, Any]:
        """None where no token went through the model: a mean over nothing is not 0."""
        return self.step_metrics(tally) if tally.scored_tokens else {}

    def _updates(self, step: int, group_ids: list[int], lr: float) -> list[_Update]:
        """All updates of a step, each on its own part of the batch, which is dealt out anew."""
        groups = {group.id: group for group in self.everybodys(self._pending.held)}
        copy, copies = self.place
        made = []
        for part in mini_batches_of(group_ids, self.optim, seed=self.settings.seed, step=step):
            share = share_of(part, groups, copy=copy, copies=copies)
            found, tally = self.gradient(share)
            tally = tally.plus(self.finish_gradient(refused=False))
            gradient = torch.zeros_like(self._pending.gradient) if found is None else found
            gradient, _, tally = self.sum_over_ranks(gradient, 0.0, tally)
            made.append(self._update(gradient, tally, lr))
            self._half_updated = True
            self.report_progress(step=step, update=len(made))
        self._half_updated = False
        return made

    def _update(self, gradient: torch.Tensor, tally: Tally, lr: float) -> _Update:
        """One update by a gradient that is summed over all ranks."""
        mode = self.settings.loss.loss_agg_mode
        count = mini_batch_weight(mode, tokens=tally.tokens, sequences=tally.sequences)
        return _Update(tally, count, self.update(gradient, max(count, 1.0), lr))

    @property
    def place(self) -> tuple[int, int]:
        """Which copy of the model this rank computes with, and how many there are."""
        return self.rank, self.world_size

    def everybodys(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that all ranks hold, together: the same on each rank."""
        return [group for blob in self.peers.exchange(pack_groups(groups)) for group in unpack_groups(blob)]

    def update(self, gradient: torch.Tensor, count: float, lr: float) -> float:
        """Step the optimizer with the summed `gradient` over `count`. Returns its norm before the clip. Raises
        NotFinite, on all ranks together; the weights are then as they were."""
        gradient /= count
        norm = float(gradient.norm())
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient of step {self.step + 1} has norm {norm}.", hint="Lower optim.lr.")
        gradient *= min(1.0, self.optim.clip_norm / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter, part in zip(self.model.parameters(), _split(self.model, gradient), strict=True):
            parameter.grad = part
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def sum_over_ranks(
        self, gradient: torch.Tensor, verdict: float, tally: Tally
    ) -> tuple[torch.Tensor, float, Tally]:
        """All three summed, in one exchange."""
        sums = torch.tensor([verdict, *tally.to_list(self.summed_metrics)])
        buffer = torch.cat([gradient, sums])
        self.peers.all_reduce_sum(buffer)
        verdicts, *totals = buffer[-len(sums) :].tolist()
        return buffer[: -len(sums)], verdicts, Tally.from_list(totals, self.summed_metrics)

    def _reduce(self, step: int, indices: int, group_ids: list[int]) -> tuple[torch.Tensor, Tally]:
        """The gradient and the tally summed over ranks, in one exchange that also carries each rank's verdict."""
        pending, raised = self._pending, None
        problem = self.spoiled() or self._mismatch(indices, group_ids)
        try:
            pending.tally = pending.tally.plus(self.finish_gradient(refused=bool(problem)))
        except Exception as error:  # told after the exchange, for which the others wait
            raised, problem = error, f"{type(error).__name__}: {error}"
        gradient, problems, tally = self.sum_over_ranks(pending.gradient, float(bool(problem)), pending.tally)
        if raised is not None:
            raise raised
        if not problems and int(tally.groups) != len(group_ids):
            problem = f"the ranks accumulated {int(tally.groups)} groups, {len(group_ids)} were to be applied"
        if problems or problem:
            raise MicroBatchMismatch(
                f"step {step} on rank {self.rank}: {problem or 'another rank holds other micro-batches'}.",
                hint=f"Call begin({step}) on every rank and accumulate again.",
            )
        return gradient, tally

    def _mismatch(self, indices: int, group_ids: list[int]) -> str:
        """How what was accumulated differs from what is to be applied; "" if it does not."""
        pending = self._pending
        if len(pending.records) != indices:
            return f"{len(pending.records)} micro-batches were accumulated, {indices} were to be applied"
        if strays := sorted(pending.group_ids - set(group_ids)):
            return f"groups {strays[:10]} were accumulated but are not among those to be applied"
        return ""

    def _is_applied(self, step: int) -> bool:
        if self._half_updated:
            raise HalfUpdated(
                f"{self.role}[{self.rank}] failed between two updates of step {self.step + 1}.",
                hint="Restore its last checkpoint.",
            )
        if step > self.step + 1:
            raise StepGap(
                f"step {step} was called while the last applied step is {self.step}.",
                hint=f"The next step is {self.step + 1}.",
            )
        return step <= self.step

    def _refuse_trained(self, group_ids: list[int]) -> None:
        seen: set[int] = set()
        for group_id in group_ids:
            if group_id in seen or contains(self.trained, group_id):
                raise TrainedTwice(
                    f"group {group_id} would be trained a second time.",
                    hint="The ledger delivered it although a committed step covers it.",
                    details={"group_id": group_id, "step": self.step},
                )
            seen.add(group_id)

    def _accumulation(self, step: int) -> Accumulation:
        return Accumulation(step, torch.zeros(sum(p.numel() for p in self.model.parameters())))

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        """`{"step", "trained", "digest"}`: trained ids as `[start, end)` intervals, xxh3-128 of the weights.

        The step is -1 where the weights are of none: some of a step's updates were made, and the next one failed."""
        step = -1 if self._half_updated else self.step
        return {"step": step, "trained": [list(pair) for pair in self.trained], "digest": self._digest()}

    def _digest(self) -> str:
        manifest, _ = pack_weights(dict(self.model.named_parameters()), version=0, step=self.step)
        return manifest.checksum

    # -- checkpoints ---------------------------------------------------------------------------------

    def checkpoint(self, path: Path) -> None:
        """Rank 0 writes the whole state to `rank_00000.pt`; every other rank a marker with what it holds. Each has the
        checksum of its bytes beside it."""
        path.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"format": CHECKPOINT_FORMAT, "step": self.step, "digest": self._digest()}
        if self.rank == 0:
            content |= {
                "config": self.model_config(),
                "path": self.tokenizer_folder(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "trained": self.trained,
                "metrics": self._metrics,
                "warm": self._warm,
            }
        with open(checkpoint_file(path, self.rank), "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        write_sum(checkpoint_file(path, self.rank))

    def restore(self, path: Path) -> None:
        """Take rank 0's state, on every rank and for any number of ranks; drops what was accumulated.

        Raises CheckpointMismatch where the file is absent, of another format, or not what its digest says, and
        WeightMismatch where it is another model's.
        """
        file = checkpoint_file(path, 0)
        if not file.exists():
            raise CheckpointMismatch(f"there is no checkpoint of {self.role} at {file}.")
        content = read_checkpoint(file)
        load_parameters(self.model, content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step = content["step"]
        self.trained = [(start, end) for start, end in content["trained"]]
        self._metrics = content["metrics"]
        self._warm = content["warm"]
        self._half_updated = False
        self._pending = self._accumulation(self.step + 1)
        if self._digest() != content["digest"]:
            self._half_updated = True  # they are of no step, whatever their number says
            raise CheckpointMismatch(f"the weights in {file} are not those that were written.")


def learning_rate(optim: OptimSettings, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1."""
    rising = min(1.0, step / max(optim.warmup_steps, 1))
    done = min(1.0, step / optim.decay_steps) if optim.decay_steps else 0.0
    return optim.rate * rising * (1.0 - done * (1.0 - optim.final_lr_ratio))


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@torch.no_grad()
def set_flat_parameters(model: nn.Module, flat: torch.Tensor) -> None:
    for parameter, part in zip(model.parameters(), _split(model, flat), strict=True):
        parameter.copy_(part)


def _split(model: nn.Module, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of `flat` in the shapes of the model's parameters."""
    parameters = list(model.parameters())
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
