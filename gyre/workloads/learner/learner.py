"""What every trained model does, whatever computes it: data-parallel optimizer steps, exactly once.

One step is `begin(step)`, `accumulate(groups, step=, index=)` for each micro-batch, `apply(step=, …)`. Every rank gets
every call; a rank's `groups` are its own share, possibly none. Ranks of one replica put their shares together.

With `optim.epochs` and `optim.mini_batches` at 1 a step is one update of the weights, whose gradient is summed as the
micro-batches come. With more, micro-batches are held, and `apply` makes all updates (`updates`).

Invariants:
- *once*: a repeated call returns what the first returned and changes nothing; a step out of order is refused;
- *trained once*: the ids of trained groups are part of the state, and of its checkpoint; none enters twice;
- *one gradient*: an update is that of its whole mini-batch, however it was cut and spread over ranks;
- *together or not at all*: ranks that compute a pass together refuse a call together, before any waits for another;
- *a sum is whole*: a pass that failed half way has spoiled the sum of the step, and only `begin` helps;
- *put off, not forgotten*: what would make a small pass waits for the next micro-batch, or for the optimizer's step.
  It follows from the micro-batches alone, so that a step that is made again has the same passes;
- *a group's numbers are its own*: log-probs and values come from passes of one group's samples, so that their bits do
  not depend on the other groups of a call;
- *whole or restored*: a step of several updates that fails between two of them leaves weights that are of no step; the
  learner says so (`state` has the step -1) and does nothing more until `restore`;
- *bit-exact continuation*: a restored checkpoint followed by the same calls gives the same bits.

This module must not know how anything is computed (`backend`), what is learned, where groups come from or where
weights go.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.models.flops import flops_of
from gyre.rollouts.drawn import at_drawn
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.weights.version.manifest import WeightMismatch
from gyre.workloads.algorithms.losses import LossSum, mini_batch_weight
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.learner.accumulation import Accumulation, Tally
from gyre.workloads.learner.backend import LearnerBackend, Ranks, StateMemory
from gyre.workloads.learner.cards import peak_flops
from gyre.workloads.learner.errors import (
    CheckpointMismatch,
    HalfUpdated,
    MicroBatchMismatch,
    StepGap,
    TrainedTwice,
)
from gyre.workloads.learner.intervals import Interval, contains, merge
from gyre.workloads.learner.laps import Laps
from gyre.workloads.learner.losses import counted, summed
from gyre.workloads.learner.packing import Pass, TrainingRow, pack, pack_all_but_rest
from gyre.workloads.learner.snapshot import checksum_of
from gyre.workloads.learner.trained_model import LearnedModel
from gyre.workloads.learner.updates import mini_batches_of, share_of
from gyre.workloads.memory.choice import smaller

T = TypeVar("T")

LEAST_SHARE = 0.5
"""A pass with less than this share of `pass_tokens` waits for more samples: a small model's pass takes as long as its
kernels take to be launched, however few its tokens are. What is put off to the optimizer's step is so little."""

REHEARSED_TOKENS = 1024
"""Of a pass that only makes a device ready: enough for the kernels that real ones use, and less memory than these."""


@dataclass(frozen=True, slots=True)
class _Update:
    """One update of the weights: the tally of its mini-batch over all ranks, what its loss was divided by, and the
    gradient's norm before the clip."""

    tally: Tally
    count: float
    grad_norm: float


class BaseLearner(BaseWorkload):
    """Holds a back end, the number of the last applied step and the ids of all trained groups. Every operator goes to
    every rank.

    A subclass says what is learned: `optim`, `check`, `rows`, `loss`, `step_metrics` and the names in `SUMS`; and its
    subclass by what it is computed: `make_backend`.
    """

    SUMS: ClassVar[tuple[str, ...]] = ()
    """The loss's metrics that are summed over ranks."""

    VALUES: ClassVar[bool] = False
    """Whether the model says values instead of log-probs."""

    backend: LearnerBackend
    trained_model: LearnedModel
    passes = 1
    """In how many passes a micro-batch is computed, where the back end has no size for a pass."""
    _flops: int
    """The model's operations in the passes that were made of the step since they were summed last."""

    # -- what a subclass says ------------------------------------------------------------------------

    def make_backend(self) -> LearnerBackend:
        """The model, as training begins with it, from the settings alone: the same on every rank. Sets `trained_model`.
        Raises ConfigError."""
        raise NotImplementedError

    @property
    def optim(self) -> OptimSettings:
        raise NotImplementedError

    def check(self, groups: list[Group]) -> None:
        """Raises ValueError for what the groups lack. It computes nothing on the model."""
        raise NotImplementedError

    def rows(self, groups: list[Group]) -> list[TrainingRow]:
        """The samples that have a gradient, with what the loss needs. Raises ValueError as `check`."""
        raise NotImplementedError

    def loss(self, part: Pass, numbers: torch.Tensor, entropies: torch.Tensor) -> LossSum:
        """The loss of a pass, with a gradient: see `backend.TokenLoss`."""
        raise NotImplementedError

    def judged(self, groups: list[Group]) -> list[Group]:
        """The groups with what a part of the model that is not trained says of them; `groups` stay as they are. Every
        rank calls it."""
        return groups

    def prepared(self, groups: list[Group]) -> list[Group]:
        """The groups with whatever must be of the weights before a step's first update; `groups` stay as they are."""
        return groups

    def step_metrics(self, tally: Tally) -> dict[str, Any]:
        """A step's metrics beyond those that every learner has."""
        raise NotImplementedError

    @property
    def summed_metrics(self) -> tuple[str, ...]:
        """`SUMS`, and those that the job's own loss has."""
        return self.SUMS

    def description(self) -> dict[str, Any] | None:
        """What a checkpoint says of its model, for a folder to be made of it; None unless it is a policy."""
        return None

    def outdated(self) -> None:
        """What is known of the weights is of earlier ones. No collective."""
        self._known_digest: str | None = None

    def changed(self) -> None:
        """The weights are new. A call of all ranks."""
        self.outdated()

    @property
    def is_frozen(self) -> bool:
        """Whether an adapter is trained beside weights that stay."""
        return self.settings.lora is not None and not self.VALUES

    # -- a process's life ----------------------------------------------------------------------------

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.timings: dict[str, float] = {}
        """Seconds of the last `update`, with the device's work, and of an actor's work after a step."""
        self.backend = self.make_backend()
        self._model_flops = flops_of(self.trained_model.config, values=self.VALUES)
        self._peak_flops = self._peak_of_device()
        self.step = 0
        self.trained: list[Interval] = []
        self._metrics: dict[str, Any] = {}
        self._warm: dict[str, Any] | None = None
        self._half_updated = False
        self._begin_anew(1)
        self._pass_size(0)
        if self.backend.has_weights:
            self.changed()
        else:
            self.outdated()

    def _peak_of_device(self) -> float:
        """Of this rank's device, NaN where it is not known: one of them makes the sum of all not known."""
        if self.backend.device.type != "cuda":
            return math.nan
        card = torch.cuda.get_device_name(self.backend.device)
        return peak_flops(card, self.backend.dtype) or math.nan

    def begin_with_first(self) -> None:
        """Take the weights that training begins with, where there are none yet. A call of all ranks."""
        if not self.backend.has_weights:
            self.backend.take_first()
            self._half_updated = False  # whatever a damaged state has left
            self.changed()

    @property
    def ranks(self) -> Ranks:
        return self.backend.ranks

    @property
    def memory(self) -> StateMemory | None:
        """Where states are kept beyond this process, if they are."""
        memory = self.backend.memory
        return memory if memory is not None and memory.is_on else None

    def teardown(self) -> None:
        """Close the back end. Its states in host memory stay for a successor, unless the job ends."""
        backend: LearnerBackend | None = getattr(self, "backend", None)  # none before it is set up
        if backend is not None:
            backend.close(keep=not self.context.job_ends)

    def abandoned(self) -> None:
        backend: LearnerBackend | None = getattr(self, "backend", None)  # none before it is set up
        if backend is not None:
            backend.unlink()

    def health(self) -> dict[str, Any]:
        return {"step": self.step, "accumulated": len(self._pending.records), **self.backend.status()}

    # -- one optimizer step --------------------------------------------------------------------------

    @operator(kind="control")
    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        """Forget what was accumulated for `step`: `{"step", "dropped"}`, the number of micro-batches dropped, and how
        large a pass is from now on, made smaller so many times: the most tokens in it as `pass_tokens`, or as `passes`
        in how many each micro-batch is computed; and `recompute`, where activations are kept by the rank's own choice,
        and are the first thing to be spared. See `gyre.workloads.memory.choice.smaller`.

        A controller calls it before it accumulates, so that what an earlier one left behind does not count.
        """
        self.begin_with_first()
        size = self._pass_size(halved)
        self.backend.prepare()
        if self._is_applied(step):
            return {"already_applied": True}
        dropped = len(self._pending.records)
        self._begin_anew(step)
        return {"step": step, "dropped": dropped, **size}

    def _pass_size(self, halved: int) -> dict[str, int]:
        tokens = self.backend.pass_tokens
        whole = {"passes": 1} if tokens is None else {"pass_tokens": tokens}
        if self.backend.may_recompute:
            whole["recompute"] = False
        size = smaller(whole, halved)
        if "recompute" in size:
            self.backend.recompute(on=bool(size["recompute"]))
        self.passes, self.pass_tokens = size.get("passes", 1), size.get("pass_tokens")
        return size

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        """Add the gradient of micro-batch `index` of step `step`: `{"index", "groups", "samples", "tokens", …}` of this
        rank's replica.

        Groups are scored and whole. Raises StepGap for a step beyond the next, TrainedTwice for a group that was
        trained, or that another micro-batch of this step holds.
        """
        if self._is_applied(step):
            return {"already_applied": True}
        if index in self._pending.records:
            return self._pending.records[index]
        groups = self.judged(self.ranks.pool_shares(groups))
        rows = self._together(lambda: self._admitted(groups))
        self.report_progress(step=step, index=index)
        ids = [group.id for group in groups]
        if self.optim.updates > 1:
            return self._pending.add(index, counted(groups), ids, held=self.prepared(groups))
        return self._pending.add(index, self.gradient(groups, rows), ids)

    def _admitted(self, groups: list[Group]) -> list[TrainingRow]:
        """The rows of the micro-batch, none where a step has several updates. Raises what is wrong with it."""
        self._refuse_trained([*self._pending.group_ids, *(group.id for group in groups)])
        self._refuse_spoiled()
        if self.optim.updates > 1:
            self.check(groups)
            return []
        return self.rows(groups)

    def _together(self, work: Callable[[], T]) -> T:
        """What `work` returns, unless it raises on a rank without which this one cannot compute."""
        try:
            found = work()
        except Exception:
            self.ranks.any(True)
            raise
        if self.ranks.any(False):
            raise MicroBatchMismatch(
                f"step {self.step + 1} on rank {self.rank}: another rank refuses its share.",
                hint="Its own error says why.",
            )
        return found

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
            self._metrics = {"step": step, "skipped": 1}
        else:
            self._refuse_trained(group_ids)
            batch = self._reduce(step, indices, group_ids)
            self._metrics = self._trained(step, group_ids, batch)
            self.trained = merge(self.trained, group_ids)
        self.step = step
        self._begin_anew(step + 1)
        self.report_progress(step=step)
        if self.memory is not None:
            self.memory.save_if_due(step, self._metadata())
        return self._metrics

    def _trained(self, step: int, group_ids: list[int], batch: Tally) -> dict[str, Any]:
        """Make the step's updates; its metrics. `batch` is the sum over all ranks."""
        lr = learning_rate(self.optim, step)
        made = [self._update(batch, lr)] if self.optim.updates == 1 else self._updates(step, group_ids, lr)
        self.changed()
        metrics = {
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
        if self._model_flops is not None:
            of_updates = sum(one.tally.flops for one in made) if self.optim.updates > 1 else 0.0
            metrics["model_flops"] = batch.flops + of_updates
        if batch.peak_flops > 0.0:
            metrics["peak_flops"] = batch.peak_flops
        return metrics | ({"updates": len(made)} if self.optim.updates > 1 else {})

    def _loss_metrics(self, tally: Tally) -> dict[str, Any]:
        """None where no token went through the model: a mean over nothing is not 0."""
        return self.step_metrics(tally) if tally.scored_tokens else {}

    def _updates(self, step: int, group_ids: list[int], lr: float) -> list[_Update]:
        """All updates of a step, each on its own part of the batch, which is dealt out anew."""
        groups = {group.id: group for group in self._everybodys(self._pending.held)}
        ranks, made = self.ranks, []
        for part in mini_batches_of(group_ids, self.optim, seed=self.settings.seed, step=step):
            share = share_of(part, groups, copy=ranks.replica, copies=ranks.replica_count)
            tally = self.gradient(share, self.rows(share)).plus(self._finish_gradient())
            _, tally = self._sum(0.0, tally)
            made.append(self._update(tally, lr))
            self._half_updated = True
            self.report_progress(step=step, update=len(made))
        self._half_updated = False
        return made

    def _update(self, tally: Tally, lr: float) -> _Update:
        """One update by the gradient that the back ends hold, whose tally over all ranks this is."""
        mode = self.settings.loss.loss_agg_mode
        count = mini_batch_weight(mode, tokens=tally.tokens, sequences=tally.sequences)
        self._spoiled = True  # the gradient is divided and clipped in place
        started = time.monotonic()
        norm = self.backend.update(count=max(count, 1.0), lr=lr)
        self.timings["update"] = time.monotonic() - started
        self._spoiled = False
        self.outdated()
        return _Update(tally, count, norm)

    def _everybodys(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of all replicas, the same on each rank. One rank of each replica sends them."""
        mine = list(groups) if self.ranks.speaks_for_samples else []
        return [group for blob in self.ranks.exchange(pack_groups(mine)) for group in unpack_groups(blob)]

    def _reduce(self, step: int, indices: int, group_ids: list[int]) -> Tally:
        """Finish the gradient, and sum the tally over ranks, in one exchange that also carries each rank's verdict."""
        problem = self._spoiled_how() or self._mismatch(indices, group_ids)
        tally, raised = self._pending.tally, None
        try:
            if not self.ranks.any(bool(problem)):  # no rank begins a pass for which another does not come
                tally = tally.plus(self._finish_gradient())
        except Exception as error:  # told after the exchange, for which the others wait
            raised, problem = error, f"{type(error).__name__}: {error}"
        problems, total = self._sum(float(bool(problem)), tally)
        if raised is not None:
            raise raised
        if not problems and int(total.groups) != len(group_ids):
            problem = f"the ranks accumulated {int(total.groups)} groups, {len(group_ids)} were to be applied"
        if problems or problem:
            raise MicroBatchMismatch(
                f"step {step} on rank {self.rank}: {problem or 'another rank holds other micro-batches'}.",
                hint=f"Call begin({step}) on every rank and accumulate again.",
            )
        return total

    def _sum(self, verdict: float, tally: Tally) -> tuple[float, Tally]:
        """Both, summed over ranks. One rank of a replica counts its samples, and one that has the losses counts
        these."""
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
            flops=float(self._flops) if self.ranks.speaks_for_samples else 0.0,
            peak_flops=self._peak_flops,
            sums=losses.sums,
        )
        self._flops = 0
        names = self.summed_metrics
        verdicts, *totals = self.ranks.sum([verdict, *mine.to_list(names)])
        return verdicts, Tally.from_list(totals, names)

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

    def _spoiled_how(self) -> str:
        return "it failed in a micro-batch, part of its gradient added" if self._spoiled else ""

    def _refuse_spoiled(self) -> None:
        if self._spoiled:
            raise MicroBatchMismatch(
                f"step {self.step + 1} on rank {self.rank}: {self._spoiled_how()}.",
                hint=f"Call begin({self.step + 1}) on every rank and accumulate again.",
            )

    def _begin_anew(self, step: int) -> None:
        """Nothing of `step` is accumulated."""
        self.backend.zero()
        self._pending = Accumulation(step)
        self._spoiled = False
        self._put_off: list[TrainingRow] = []
        """Of the step's samples, those whose gradient is not in the sum yet."""
        self._flops = 0
        self._losses: list[LossSum] = []
        """What was lost in the step's passes, on the device: reading it there waits for all of them."""

    # -- passes --------------------------------------------------------------------------------------

    def gradient(self, groups: list[Group], rows: list[TrainingRow]) -> Tally:
        """Add the gradient of the rows, which are those of the groups; a small rest is put off. The tally counts the
        groups; the losses are told when the gradient is finished."""
        if self.pass_tokens is None:
            self._go_through([part for some in _dealt(rows, self.passes) for part in self._packed(some)])
        else:
            passes, self._put_off = pack_all_but_rest(
                [*self._put_off, *rows],
                max_tokens=self.pass_tokens,
                multiple=self.backend.width_multiple,
                least_tokens=round(LEAST_SHARE * self.pass_tokens),
                prompts_once=self.backend.prompts_once,
            )
            self._go_through(passes)
        return counted(groups)

    def _finish_gradient(self) -> Tally:
        """Compute what was put off, and say what was lost in all passes."""
        rest, self._put_off = self._put_off, []
        self._go_through(self._packed(rest))
        losses, self._losses = self._losses, []
        return summed(losses)

    def _go_through(self, passes: list[Pass]) -> None:
        self._spoiled = True
        self._losses += self.backend.backward(passes, self.loss)
        self._spoiled = False
        self._count_flops(passes, trains=True)

    def _count_flops(self, passes: Sequence[Pass], *, trains: bool) -> None:
        if self._model_flops is None:
            return
        for part in passes:
            positions, predicted = part.positions[: part.own_tokens].numpy(), len(part.targets)
            self._flops += (
                self._model_flops.training(positions, predicted, frozen=self.is_frozen)
                if trains
                else self._model_flops.forward(positions, predicted)
            )

    def _packed(self, rows: Sequence[TrainingRow]) -> list[Pass]:
        most = sys.maxsize if self.pass_tokens is None else self.pass_tokens
        return list(
            pack(
                rows,
                max_tokens=most,
                multiple=self.backend.width_multiple,
                prompts_once=self.backend.prompts_once,
            )
        )

    def by_group(
        self, groups: list[Group], wanted: Collection[int] | None = None
    ) -> list[NDArray[np.float32]]:
        """What the model says of each token of each sample, float32 `[t]`, in the order of groups and samples, on every
        rank of the replica: zeros where a token was not drawn, and for a sample whose `id()` is not `wanted`. No pass
        has samples of two groups, so that the bits do not depend on who else is asked for."""
        return self._said_of(groups, [[group] for group in groups], wanted)

    def by_sample(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        """The same of all samples, in as few passes as they fit into: the bits depend on all of them."""
        return self._said_of(groups, [groups], None)

    def _said_of(
        self, groups: list[Group], apart: list[list[Group]], wanted: Collection[int] | None
    ) -> list[NDArray[np.float32]]:
        """`apart` are the groups whose samples may share passes."""
        passes: list[Pass] = []
        kept: list[int] = []
        for some in apart:
            rows = []
            for group in some:
                for sample in group.samples:
                    if sample.drawn and (wanted is None or id(sample) in wanted):
                        kept.append(id(sample))
                        rows.append(TrainingRow(group.prompt_ids, sample.token_ids, mask=sample.mask))
            passes += self._packed(rows)
        said = self.backend.forward(passes)
        self._count_flops(passes, trains=False)
        self.report_progress()
        samples = [sample for group in groups for sample in group.samples]
        flat = torch.cat(said).numpy() if said else np.empty(0, np.float32)
        lengths = {id(sample): sample.drawn for sample in samples}
        parts = np.split(flat, np.cumsum([lengths[one] for one in kept])[:-1]) if kept else []
        found = dict(zip(kept, parts, strict=True))
        return [
            at_drawn(sample, found[id(sample)].copy())
            if id(sample) in found
            else np.zeros(len(sample.token_ids), np.float32)
            for sample in samples
        ]

    # -- state and checkpoints -----------------------------------------------------------------------

    @operator(kind="control")
    def state(self) -> dict[str, Any]:
        """`{"step", "trained", "digest"}`: trained ids as `[start, end)` intervals, and a checksum of the weights, ""
        where there are none yet; with `memory` if this rank keeps states in its machine's memory.

        The step is -1 where the weights are of none: some of a step's updates were made, and the next one failed."""
        step = -1 if self._half_updated else self.step
        digest = self.digest() if self.backend.has_weights else ""
        told = {"step": step, "trained": [list(pair) for pair in self.trained], "digest": digest}
        return told | ({"memory": True} if self.memory is not None else {})

    def digest(self) -> str:
        """The checksum of the weights, the same in every layout. A call of all ranks, unless it is known."""
        if self._known_digest is None:
            self._known_digest = self.ranks.from_first(self.checksum())
        return self._known_digest

    def checksum(self) -> str:
        """The checksum of the weights on the first rank; no meaning on others. A call of all ranks."""
        return checksum_of(self.backend.weights())

    def later_digest(self) -> Callable[[], str | None]:
        """What gives the checksum of the weights as they are now, later and on any thread; None where the bytes' own
        checksums must do. No collective."""
        known = self._known_digest
        return lambda: known

    def checkpoint(self, path: Path, *, background: bool = False) -> bool:
        """Write the state below `path`. It is on the disk when this returns. With `background` this may return True
        before that, and training goes on; `checkpoint_written` says when it is whole."""
        self.begin_with_first()
        path.mkdir(parents=True, exist_ok=True)
        self.backend.save(path, {**self._metadata(), "model": self.description()}, self.later_digest())
        return not self.checkpoint_written(wait=not background)

    @operator(kind="control")
    def checkpoint_written(self, *, wait: bool) -> bool:
        """Whether the checkpoint is on the disk, on every rank; with `wait` it returns when that is so.

        Raises CheckpointMismatch, on all ranks together, if it cannot be written.
        """
        return self.backend.saved(wait=wait)

    def _metadata(self) -> dict[str, Any]:
        """The part of a state that is not tensors; the same on every rank."""
        return {
            "step": self.step,
            "policy_version": self.step,
            "trained": self.trained,
            "metrics": self._metrics,
            "warm": self._warm,
        }

    def restore(self, path: Path) -> None:
        """Load a checkpoint that any number of ranks wrote; drops what was accumulated.

        Raises CheckpointMismatch where it is absent, of another format, or does not match its digest, and
        WeightMismatch where it is another model's.
        """
        before, self._half_updated = self._half_updated, True  # while a part of it may be loaded
        try:
            metadata = self.backend.restore(path)
        except (CheckpointMismatch, WeightMismatch):
            self._half_updated = before  # nothing was changed
            raise
        self.take(metadata)
        if metadata.get("digest") not in (None, self.digest()):
            self._half_updated = True  # they are of no step, whatever their number says
            raise CheckpointMismatch(f"the weights in {path} are not those that were written.")

    def take(self, metadata: dict[str, Any]) -> None:
        """Take the step and the record of restored weights from their metadata; drops what was accumulated."""
        self.step = metadata["step"]
        self.trained = [(start, end) for start, end in metadata["trained"]]
        self._metrics = metadata["metrics"]
        self._warm = metadata["warm"]
        self._half_updated = False
        self._begin_anew(self.step + 1)
        self.changed()

    @operator(kind="control")
    def restore_from_memory(self, *, newer_than: int, at_most: int) -> int | None:
        """Load the newest whole state that every rank has in its machine's memory, of a step beyond `newer_than` and up
        to `at_most`. Returns that step; or None where there is none, and where those that there are turned out to be
        damaged, the step of this rank is -1 then."""
        if self.memory is None:
            return None

        def before() -> None:
            self._half_updated = True

        laps = Laps()
        metadata = self.memory.restore(
            newer_than=newer_than, at_most=at_most, before=before, beside=self._first_pass
        )
        if metadata is None:
            return None
        laps.lap("copied and compared")
        self.take(metadata)
        laps.lap("snapshot")
        print(f"the state of step {self.step} is back from host memory after {laps}", flush=True)
        return self.step

    def _first_pass(self) -> None:
        """Make a pass on a GPU and forget its gradient: there the first one loads the kernels and has the ranks meet,
        which takes seconds. What it computes means nothing, so the weights may change under it."""
        if self.backend.device.type == "cuda":
            self.rehearse()

    def rehearse(self) -> None:
        """A pass whose gradient is forgotten. A call of all ranks."""
        tokens = np.zeros(min(self.pass_tokens or REHEARSED_TOKENS, REHEARSED_TOKENS), np.int32)
        self.backend.backward(self._packed([TrainingRow(tokens[:1], tokens)]), _sum_of_all)
        self.backend.zero()

    @operator(kind="control")
    def forget_memory(self) -> None:
        """Free the states in host memory, because the job is done."""
        if self.backend.memory is not None:
            self.backend.memory.close(keep=False)


def _sum_of_all(_part: Pass, numbers: torch.Tensor, _entropies: torch.Tensor) -> LossSum:
    """A loss by which every weight gets a gradient."""
    return LossSum(numbers.sum(), torch.ones((), device=numbers.device))


def learning_rate(optim: OptimSettings, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1."""
    rising = min(1.0, step / max(optim.warmup_steps, 1))
    done = min(1.0, step / optim.decay_steps) if optim.decay_steps else 0.0
    return optim.rate * rising * (1.0 - done * (1.0 - optim.final_lr_ratio))


def _dealt(rows: Sequence[TrainingRow], passes: int) -> list[Sequence[TrainingRow]]:
    """The rows in at most so many parts of the same size, in order; none of them is empty."""
    size = max(1, math.ceil(len(rows) / passes))
    return [rows[start : start + size] for start in range(0, len(rows), size)]
