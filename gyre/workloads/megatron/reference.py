"""The reference policy in Megatron-core: log-probs of samples under the weights of a folder, which never change.

A vertex of this role holds the whole model; several of them share the samples, not the model.

This module must not know what the log-probs are used for. It imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.megatron.devices import device_of, dtype_of
from gyre.workloads.megatron.settings import MegatronSettings
from gyre.workloads.torch.settings import TorchSettings


class MegatronReference(BaseWorkload):
    """Adds `extras["ref_logprobs"]` to samples. It reads `config.megatron.model_path` by itself, which is what the
    actor begins with; so it takes no weights from anybody."""

    def setup(self) -> None:
        self.settings = TorchSettings.read(self.config)
        layout = MegatronSettings.read(self.config)
        if not layout.model_path:
            raise ConfigError(
                "MegatronReference has no model: config.megatron.model_path is not set.",
                hint="Without it the actor's model is the small decoder, whose reference is "
                "gyre.workloads.torch:TorchReference.",
            )
        self.layout = replace(layout, tensor_parallel=1, pipeline_parallel=1, sequence_parallel=False)
        torch.set_num_threads(self.settings.threads)
        device = device_of(self.layout)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        from gyre.workloads.megatron.seam import open_seam

        seam = open_seam(device)
        from gyre.workloads.megatron.config import architecture_from
        from gyre.workloads.megatron.parallel import Ranks
        from gyre.workloads.megatron.policy import MegatronPolicy
        from gyre.workloads.torch.folder import first_weights, read_config

        path = Path(self.layout.model_path)
        architecture = architecture_from(read_config(path), str(path))
        self.ranks = Ranks(
            replace(self.context, rank=0, world_size=1),
            self.layout,
            device=device,
            timeout_s=self.settings.collective_timeout_s,
            seed=self.settings.seed,
        )
        self.policy = MegatronPolicy(
            architecture,
            self.layout,
            self.settings.optim,
            self.ranks,
            first_weights(path, architecture, self.settings.seed, device),
            device=device,
            dtype=dtype_of(self.layout, device),
            seam=seam,
            trains=False,
        )

    def teardown(self) -> None:
        self.ranks.close()

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups, each sample with `extras["ref_logprobs"]`, float32 `[t]` at the sampling temperature."""
        from gyre.workloads.megatron.packing import Row, pack

        samples = [(group, sample) for group in groups for sample in group.samples]
        rows = [Row(group.prompt_ids, sample.token_ids) for group, sample in samples if len(sample.token_ids)]
        values = []
        for part in pack(rows, max_tokens=self.layout.pass_tokens):
            ((logprobs, _),) = self.policy.logprobs([part], temperature=self.settings.sampling.temperature)
            values.append(logprobs.cpu())
            self.report_progress()
        flat = torch.cat(values).numpy() if values else torch.zeros(0).numpy()
        at = 0
        for _, sample in samples:
            sample.extras["ref_logprobs"] = flat[at : at + len(sample.token_ids)].copy()
            at += len(sample.token_ids)
        return groups
