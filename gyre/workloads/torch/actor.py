"""The trained policy in plain torch, with the losses of `gyre.workloads.algorithms.losses`.

How a step is made, repeated, checkpointed and restored: `gyre.workloads.torch.learner`.

This module must not know where groups come from or where weights go.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.config import WeightsSpec
from gyre.config.plugins import LOSS
from gyre.config.sections import OptimSettings
from gyre.models.modules import Decoder
from gyre.models.saving import save_model_folder
from gyre.models.tensor_names import from_names, to_names
from gyre.rollouts.samples import Group
from gyre.rollouts.weight_peer import check_transports
from gyre.weights.version.manifest import pack_weights
from gyre.workloads.algorithms.losses import metrics_of
from gyre.workloads.base import operator
from gyre.workloads.gang.weight_copy import FetchedCopy
from gyre.workloads.gang.weight_source import WeightSource
from gyre.workloads.learner.accumulation import Accumulation, Tally
from gyre.workloads.learner.errors import StepGap
from gyre.workloads.learner.seen_logprobs import SeenLogprobs
from gyre.workloads.learner.trained_model import TrainedModel, own_parameters, trained_model
from gyre.workloads.tasks.arithmetic import ArithmeticTask
from gyre.workloads.tasks.task import task_of
from gyre.workloads.torch.learner import TorchLearner, flat_parameters, set_flat_parameters
from gyre.workloads.torch.served_policy import load_parameters
from gyre.workloads.torch.steps.gradients import (
    keeps_old_logprobs,
    old_logprobs,
    policy_gradient,
    tags_of,
    trained_samples,
    with_old_logprobs,
)
from gyre.workloads.torch.warm_start import warm_steps

_BEACON_EVERY = 10


class TorchActor(TorchLearner):
    """Metrics of a step beyond the learner's: `policy_loss`, `entropy` (over tokens that carry a gradient), `clipped`
    (their fraction at the clip), `old_kl` (from the policy that generated, or from before the step), and `kl`,
    `tis_weight`, `tis_capped` and `rollout_kl` where those terms are on."""

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

    model: Decoder
    trained_model: TrainedModel

    def setup(self) -> None:
        self.task = task_of(self.config)
        check_transports(WeightsSpec.model_validate(self.context.weights))
        self._source: WeightSource | None = None
        self._copy: FetchedCopy | None = None
        self._seen = SeenLogprobs()
        self._publishing: tuple[int, Future[dict[str, Any]]] | None = None
        """The version that was published last, and what is said of it."""
        super().setup()

    def teardown(self) -> None:
        super().teardown()
        self.let_go()
        if self._source is not None:
            self._source.close()

    def abandoned(self) -> None:
        super().abandoned()
        held: list[WeightSource | FetchedCopy | None]
        held = [getattr(self, "_source", None), getattr(self, "_copy", None)]  # none before it is set up
        for one in held:
            if one is not None:
                one.unlink()

    def make_model(self) -> Decoder:
        return Decoder(self.trained_model.architecture, seed=self.settings.seed)

    def build(self) -> None:
        """Raises ConfigError where the folder that training begins with holds no weights of this model."""
        self.trained_model = trained_model(self.config, self.task)
        source = self.trained_model.first_weights(self.settings)  # before memory is taken for the model
        super().build()
        if source is not None:
            load_parameters(self.model, own_parameters(source, self.model.architecture))

    def model_config(self) -> dict[str, Any]:
        return self.trained_model.config

    def tokenizer_folder(self) -> str:
        folder = self.trained_model.folder
        return str(folder.resolve()) if folder is not None else ""

    @property
    def optim(self) -> OptimSettings:
        return self.settings.optim

    def gradient(self, groups: list[Group]) -> tuple[torch.Tensor | None, Tally]:
        return policy_gradient(self.model, groups, self.settings, passes=self.passes, seen=self.seen)

    @property
    def seen(self) -> SeenLogprobs | None:
        """What the log-probs of a gradient's passes go to; None where a later update computes it, of other weights."""
        return self._seen if self.optim.updates == 1 else None

    def _accumulation(self, step: int) -> Accumulation:
        self._seen.forget()
        return super()._accumulation(step)

    def _changed(self) -> None:
        super()._changed()
        self._seen.made(self.step + 1)

    @operator(kind="control", control=True)
    def step_logprobs(self, *, step: int) -> dict[str, Any]:
        """The policy's own log-probs, before step `step`, of the samples of this rank that had a gradient; see
        `SeenLogprobs.of_step`."""
        return self._seen.of_step(step)

    def prepared(self, groups: list[Group]) -> list[Group]:
        """The groups, with the policy's own log-probs where the ratio is to those."""
        if not keeps_old_logprobs(self.settings):
            trained_samples(groups, self.settings)
            return groups
        return self._with_own_logprobs(groups)

    def _with_own_logprobs(self, groups: list[Group]) -> list[Group]:
        found = self.own_logprobs(groups)
        needed = {id(sample) for _, sample, _ in trained_samples(groups, self.settings)}
        for (sample, tag), values in zip(tags_of(groups).items(), found, strict=True):
            if sample in needed:
                self._seen.add([tag], [len(values)], torch.from_numpy(values))
        return with_old_logprobs(groups, found)

    def own_logprobs(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        """The policy's log-probs of every sample, float32 `[t]`; meaningless for samples without a gradient."""
        return old_logprobs(self.model, groups, self.settings)

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
        and returns the recorded result. Only the small decoder has one, of arithmetic, where the job asks for it
        (`config.warm_start`) and begins with no other job's weights; else the weights stay as they are.
        """
        if self._warm is not None or self.step > 0:
            return self._warm or {"already_applied": True}
        beacon = torch.zeros(5, dtype=torch.float64)  # done, steps, loss, agreement, seconds
        asked = None if self.settings.first_policy else self.settings.warm_start
        if asked is None or not isinstance(self.task, ArithmeticTask):
            beacon[0] = 1.0
        elif self.rank == 0:
            started = time.monotonic()
            for warm in warm_steps(self.model, self.task, asked):
                self.report_progress(warm_start_step=warm.steps, agreement=warm.agreement)
                seconds = time.monotonic() - started
                beacon[:] = torch.tensor([0.0, warm.steps, warm.loss, warm.agreement, seconds])
                if warm.steps % _BEACON_EVERY == 0:
                    self.peers.broadcast(beacon)
            beacon[0] = 1.0
            self.peers.broadcast(beacon)
        while beacon[0] == 0.0:
            self.peers.broadcast(beacon)
            self.report_progress(warm_start_step=int(beacon[1]), agreement=float(beacon[3]))
        parameters = flat_parameters(self.model)
        self.peers.broadcast(parameters)
        set_flat_parameters(self.model, parameters)
        _, steps, loss, agreement, seconds = beacon.tolist()
        self._warm = {"steps": int(steps), "loss": loss, "agreement": agreement, "seconds": seconds}
        return self._warm

    # -- what others see of it -----------------------------------------------------------------------

    @operator(kind="weights")
    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        """The weights as policy `version`: the manifest as a dict, and its buffer. Equal on every rank."""
        manifest, buffer = pack_weights(dict(self.model.named_parameters()), version=version, step=self.step)
        return manifest.to_dict(), buffer

    def servable(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The weights in Hugging Face's names, and the content of `config.json`: what engines can load."""
        return to_names(dict(self.model.named_parameters()), self.model.architecture), self.model_config()

    def lasts(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether steps leave these tensors, which `servable` returned, as they are."""
        return False

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
        begun = self._source.begin(named, config, version=version, step=self.step, lasting=self.lasts(named))
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
        drops what was accumulated. `sources` are (host:port, folder).

        Raises WeightsUnreachable, and WeightMismatch where it is another model's; then nothing has changed.
        """
        named = self.fetched(version, checksum, sources).tensors()
        own = {name: tensor.float() for name, tensor in from_names(named, self.model.architecture).items()}
        load_parameters(self.model, own)
        self.optimizer.state.clear()
        self.peers.all_reduce_sum(torch.zeros(1))  # nobody takes a folder away that others still fetch
        self.let_go()
        self.step = version
        self.trained = [(start, end) for start, end in trained]
        self._metrics, self._warm = {}, {"steps": 0}
        self._half_updated = False
        self._pending = self._accumulation(version + 1)

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
