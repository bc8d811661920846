"""The trained policy, whatever computes it, with the losses of `gyre.workloads.algorithms.losses`.

How a step is made, repeated, checkpointed and restored: `gyre.workloads.learner.learner`.

Invariant *asking is cheap*: the first rank holds the last step's weights in host memory; exports are a call to that
rank alone.

This module must not know where groups come from or where weights go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.config import WeightsSpec
from gyre.config.plugins import LOSS
from gyre.config.sections import OptimSettings
from gyre.models.architecture import Architecture
from gyre.models.modules import Decoder
from gyre.models.saving import save_model_folder
from gyre.models.tensor_names import from_names, to_names
from gyre.rollouts.drawn import of_drawn
from gyre.rollouts.samples import OLD_LOGPROBS, Group
from gyre.rollouts.weight_peer import check_transports
from gyre.weights.version.manifest import checksum_of_weights, pack_weights
from gyre.workloads.algorithms.losses import LossSum, metrics_of
from gyre.workloads.base import operator
from gyre.workloads.gang.weight_copy import FetchedCopy
from gyre.workloads.gang.weight_source import WeightSource
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.errors import StepGap, WeightsNotLoaded
from gyre.workloads.learner.learner import BaseLearner
from gyre.workloads.learner.losses import (
    keeps_old_logprobs,
    policy_pass_loss,
    policy_rows,
    tags_of,
    trained_samples,
    with_extras,
)
from gyre.workloads.learner.packing import Pass, TrainingRow
from gyre.workloads.learner.seen_logprobs import SeenLogprobs
from gyre.workloads.learner.snapshot import snapshot_of
from gyre.workloads.learner.snapshot_buffers import SnapshotBuffers
from gyre.workloads.learner.warm_start import warm_steps
from gyre.workloads.tasks.task import DemonstratedTask, task_of

_BEACON_EVERY = 10


class PolicyLearner(BaseLearner):
    """An actor. Metrics of a step beyond the learner's: `policy_loss`, `entropy` (over tokens that carry a gradient),
    `clipped` (their fraction at the clip), `old_kl` (from the policy that generated, or from before the step), and
    `kl`, `tis_weight`, `tis_capped` and `rollout_kl` where those terms are on.

    All operators go to every rank, but for the exports, which the first rank answers.
    """

    SUMS: ClassVar[tuple[str, ...]] = (
        "policy_loss",
        "entropy",
        "clipped_low",
        "clipped_high",
        "old_kl",
        "kl",
        "tis_weight",
        "tis_capped",
        "rollout_kl",
    )

    copies_root: ClassVar[Path | None] = None
    """Where copies of policy versions are made; None: in memory, where the machine has such a place."""
    copy_within_s: ClassVar[float] = 60.0
    """A fetch to which nothing comes for so long has failed."""

    takes_snapshots = True
    """Set it False where weights are read from the back end."""

    def setup(self) -> None:
        self.task = task_of(self.config)
        check_transports(WeightsSpec.model_validate(self.context.weights))
        self._source: WeightSource | None = None
        self._copy: FetchedCopy | None = None
        self._seen = SeenLogprobs()
        self._buffers: SnapshotBuffers | None = None
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._publishing: tuple[int, Future[dict[str, Any]]] | None = None
        """The version that was published last, and what is said of it."""
        super().setup()
        if not self.backend.has_weights:  # as after a restart: it is made while the state comes back
            self._snapshot_memory()

    def teardown(self) -> None:
        super().teardown()
        self.let_go()
        if self._source is not None:
            self._source.close()
        if self._buffers is not None:
            self._buffers.close()

    def abandoned(self) -> None:
        super().abandoned()
        held: list[WeightSource | FetchedCopy | None]
        held = [getattr(self, "_source", None), getattr(self, "_copy", None)]  # none before it is set up
        for one in held:
            if one is not None:
                one.unlink()

    @property
    def optim(self) -> OptimSettings:
        return self.settings.optim

    # -- one step ------------------------------------------------------------------------------------

    def check(self, groups: list[Group]) -> None:
        trained_samples(groups, self.settings)

    def rows(self, groups: list[Group]) -> list[TrainingRow]:
        return policy_rows(groups, self.settings)

    def loss(self, part: Pass, numbers: torch.Tensor, entropies: torch.Tensor) -> LossSum:
        if self.seen is not None and self.ranks.speaks_for_losses:
            self.seen.add([tag for tag in part.tags if tag is not None], part.counts, numbers)
        return policy_pass_loss(part, numbers, entropies, self.settings)

    @property
    def seen(self) -> SeenLogprobs | None:
        """What the log-probs of a gradient's passes go to; None where a later update computes it, of other weights."""
        return self._seen if self.optim.updates == 1 else None

    def _begin_anew(self, step: int) -> None:
        self._seen.forget()
        super()._begin_anew(step)

    def _trained(self, step: int, group_ids: list[int], batch: Tally) -> dict[str, Any]:
        metrics = super()._trained(step, group_ids, batch)
        self._seen.made(step)
        return metrics

    def outdated(self) -> None:
        super().outdated()
        self._snapshot = None  # the next one has its memory, unless it is being published

    def changed(self) -> None:
        super().changed()
        started = time.monotonic()
        if self.takes_snapshots:
            self._snapshot = snapshot_of(self.backend.weights(), self._snapshot_memory())
        self.timings["snapshot"] = time.monotonic() - started

    def _snapshot_memory(self) -> SnapshotBuffers:
        if self._buffers is None:
            self._buffers = SnapshotBuffers(self.backend.device)
            if self.rank == 0 and self.takes_snapshots:
                self._buffers.prepare(self.backend.weight_bytes)
        return self._buffers

    @operator(kind="control", control=True)
    def step_logprobs(self, *, step: int) -> dict[str, Any]:
        """The policy's own log-probs, before step `step`, of the samples of this rank that had a gradient; see
        `SeenLogprobs.of_step`."""
        return self._seen.of_step(step)

    def prepared(self, groups: list[Group]) -> list[Group]:
        """The groups, with the policy's own log-probs where the ratio is to those."""
        if not keeps_old_logprobs(self.settings):
            return groups
        found = self.own_logprobs(groups)
        needed = self._needed(groups)
        samples = (sample for group in groups for sample in group.samples)
        for sample, (_, tag), values in zip(samples, tags_of(groups).items(), found, strict=True):
            if id(sample) in needed:
                drawn = of_drawn(sample, values)
                self._seen.add([tag], [len(drawn)], torch.from_numpy(drawn))
        return with_extras(groups, OLD_LOGPROBS, found)

    def own_logprobs(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        """The policy's log-probs of every sample, float32 `[t]`; zeros where a token was not drawn, and for samples
        without a gradient."""
        return self.by_group(groups, self._needed(groups))

    def _needed(self, groups: list[Group]) -> set[int]:
        return {id(sample) for _, sample, _ in trained_samples(groups, self.settings)}

    @property
    def summed_metrics(self) -> tuple[str, ...]:
        return (*self.SUMS, *metrics_of(self.settings.loss))

    def step_metrics(self, tally: Tally) -> dict[str, Any]:
        loss = self.settings.loss
        names = ["old_kl", *metrics_of(loss)]
        if loss.loss_mode in LOSS.built_in:
            names.append("policy_loss")
        if loss.kl_loss_coef > 0:
            names.append("kl")
        if loss.tis_imp_ratio_cap > 0:
            names += ["tis_weight", "tis_capped", "rollout_kl"]
        return {
            "entropy": tally.mean("entropy"),
            "clipped": tally.mean("clipped_low") + tally.mean("clipped_high"),
            **{name: tally.mean(name) for name in names},
        }

    # -- the supervised start ------------------------------------------------------------------------

    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        """Supervised steps on rank 0, its weights to every rank: `{"steps", "loss", "agreement", "seconds"}`.

        Rank 0 alone computes, so that ranks which share cores do not do the same work side by side; the others
        hear of its progress every few steps. A second call, or one after the first optimizer step, does nothing
        and returns the recorded result. Only the small decoder has one, of a task with demonstrations, where the job
        asks for it (`config.warm_start`) and begins with no other job's weights; else the weights stay as they are:
        `{"steps": 0}`.
        """
        self.begin_with_first()
        if self._warm is not None or self.step > 0:
            return self._warm or {"already_applied": True}
        small, asked = self.trained_model.small, self.settings.warm_start
        if small is None or asked is None or self.settings.first_policy:
            self._warm = {"steps": 0}
        elif isinstance(self.task, DemonstratedTask):
            model = Decoder(small, seed=self.settings.seed)
            self._warm = self._warmed(model, self.task)
            self.backend.load(to_names(model.state_dict(), small).__getitem__)
            self.changed()
        else:
            self._warm = {"steps": 0}
        return self._warm

    def _warmed(self, model: Decoder, task: DemonstratedTask) -> dict[str, Any]:
        asked = self.settings.warm_start
        assert asked is not None
        beacon = torch.zeros(5, dtype=torch.float64)  # done, steps, loss, agreement, seconds
        if self.rank == 0:
            started = time.monotonic()
            for warm in warm_steps(model, task, asked):
                self.report_progress(warm_start_step=warm.steps, agreement=warm.agreement)
                seconds = time.monotonic() - started
                beacon[:] = torch.tensor([0.0, warm.steps, warm.loss, warm.agreement, seconds])
                if warm.steps % _BEACON_EVERY == 0:
                    self.ranks.broadcast(beacon)
            beacon[0] = 1.0
            self.ranks.broadcast(beacon)
        while beacon[0] == 0.0:
            self.ranks.broadcast(beacon)
            self.report_progress(warm_start_step=int(beacon[1]), agreement=float(beacon[3]))
        with torch.no_grad():
            for parameter in model.parameters():
                self.ranks.broadcast(parameter.data)
        _, steps, loss, agreement, seconds = beacon.tolist()
        return {"steps": int(steps), "loss": loss, "agreement": agreement, "seconds": seconds}

    # -- what others see of it -----------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """On the first rank, the weights after the last step by the names that engines know, in host memory, in the
        model's dtype; nothing changes them. Empty on other ranks."""
        if self._snapshot is None:
            raise WeightsNotLoaded(
                "the actor was told to keep no host copy of its weights.",
                hint="Set takes_snapshots, or read them from the back end.",
            )
        return self._snapshot

    def exports_names_of(self) -> Architecture | None:
        """The shape of the decoder by whose own names `export_weights` has the weights, which is the small one: the
        plain torch roles take no others. None for the names that engines know."""
        return self.trained_model.small

    def exported(self, named: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights by the names that `export_weights` has."""
        own = self.exports_names_of()
        return from_names(named, own) if own is not None and named else named

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: the manifest as a dict, and its buffer."""
        manifest, buffer = pack_weights(dict(self.exported(self.weights())), version=version, step=self.step)
        return manifest.to_dict(), buffer

    def servable(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The weights in Hugging Face's names, and the content of `config.json`: what engines can load."""
        return self.weights(), self.trained_model.config

    def servable_files(self) -> dict[str, bytes]:
        """What goes beside the tensors and `config.json` of a policy version. Where there is something, the tensors are
        published in their own dtype, whatever `weights.dtype` and `weights.codec` say."""
        return {}

    def lasts(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether steps leave these tensors, which `servable` returned, as they are: a subclass may serve something
        else than the snapshot."""
        return self._snapshot is not None and named is self._snapshot

    def checksum(self) -> str:
        """The checksum of what `export_weights` gives."""
        if self._snapshot is None:
            return super().checksum()
        return checksum_of_weights(self.exported(self._snapshot)) if self._snapshot else ""

    def later_digest(self) -> Callable[[], str | None]:
        if self._known_digest is not None or not self._snapshot:
            return super().later_digest()
        named = self.exported(self._snapshot)  # nothing changes them
        return lambda: checksum_of_weights(named)

    def description(self) -> dict[str, Any]:
        model, path = self.trained_model, self.settings.model_path and self.settings.first_policy
        return {
            "config": model.config,
            "decoder": True if model.small is not None else None,
            "path": str(Path(path).resolve()) if path else "",
            "dtype": self.backend.dtype,
            "seed": self.settings.seed,
        }

    @operator(kind="weights")
    def publish_model(self, *, version: int, background: bool = False) -> dict[str, Any] | None:
        """Put what is servable as policy `version` where instances fetch it: what `WeightSource.publish` says of it.

        With `background` this returns None as soon as the next step may change the weights, and `model_published` has
        the rest."""
        named, config = self.servable()
        if self._source is None:
            self._source = WeightSource(
                self.context.directory, settings=WeightsSpec.model_validate(self.context.weights)
            )
        begun = self._source.begin(
            named,
            config,
            version=version,
            step=self.step,
            lasting=self.lasts(named),
            files=self.servable_files(),
        )
        self._publishing = (version, begun)
        return None if background else begun.result()

    @operator(kind="weights", control=True)
    def model_published(self, *, version: int, timeout_s: float) -> dict[str, Any]:
        """Wait for the version that `publish_model` began, beside other calls. Raises what kept it from being
        published, and TimeoutError."""
        if self._publishing is None or self._publishing[0] != version:
            raise StepGap(f"version {version} is not being published here.")
        return self._publishing[1].result(timeout=timeout_s)

    @operator(kind="weights")
    def export_model(self, *, version: int) -> tuple[dict[str, Any], dict[str, Any], bytes]:
        """The same as values: the content of `config.json`, and manifest and buffer."""
        named, config = self.servable()
        manifest, buffer = pack_weights(named, version=version, step=self.step)
        return config, manifest.to_dict(), buffer

    @operator(kind="weights")
    def save_model(self, path: Path) -> None:
        """Write the weights after the last step as a folder in Hugging Face's layout, with the tokenizer of the folder
        that training began with. The first rank does it; the folder is there when it is whole. Raises ConfigError
        where it was there before."""
        if self.rank == 0:
            named, config = self.servable()
            beside = Path(self.settings.model_path) if self.settings.model_path else None
            save_model_folder(path, config, named, beside=beside)

    # -- weights from an instance ---------------------------------------------------------------------

    @operator(kind="weights")
    def fetch_weights(
        self, *, version: int, checksum: str, sources: list[tuple[str, str]]
    ) -> tuple[str, str]:
        """Fetch a policy version from instances, verified, and hold it until `restore_weights`. Where other ranks have
        it from: (host:port, folder). The first rank is asked before all of them, so that instances send one copy."""
        copy = self.fetched(version, checksum, sources)
        return copy.address, str(copy.path)

    @operator(kind="control")
    def restore_weights(
        self,
        *,
        version: int,
        checksum: str,
        sources: list[tuple[str, str]],
        trained: list[list[int]],
    ) -> None:
        """Take the weights of a policy version, begin a new optimizer, and stand at step `version` with `trained` ids;
        drops what was accumulated. `sources` are (host:port, folder); any number of ranks may take them.

        Raises WeightsUnreachable, and WeightMismatch or ModelFolderError where it is another model's; then nothing has
        changed.
        """
        self.backend.load(self.fetched(version, checksum, sources).source())
        self.ranks.sum([0.0])  # nobody takes a folder away that others may have linked, or still fetch
        self.let_go()
        self.take({"step": version, "trained": trained, "metrics": {}, "warm": {"steps": 0}})

    def fetched(self, version: int, checksum: str, sources: list[tuple[str, str]]) -> FetchedCopy:
        if self._copy is not None and self._copy.checksum != checksum:
            self.let_go()  # of an earlier attempt, which ended on another rank
        if self._copy is None:
            self._copy = FetchedCopy(
                self.context.directory,
                f"{self.role}-{self.rank}",
                version=version,
                checksum=checksum,
                sources=sources,
                settings=WeightsSpec.model_validate(self.context.weights),
                root=self.copies_root,
                give_up_s=self.copy_within_s,
            )
        return self._copy

    def let_go(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None
