"""A reward model in FSDP2's back end; what one is, is `gyre.workloads.learner.frozen`.

This module imports transformers when it is set up, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.workloads.learner.frozen import RewardModel, reward_model_folder

if TYPE_CHECKING:
    from gyre.workloads.fsdp.backend import FsdpBackend


class FsdpRewardModel(RewardModel):
    """For any decoder of transformers with a score of one label, on the device and in the precision of `config.fsdp`,
    with packed samples."""

    backend: FsdpBackend

    def make_backend(self) -> FsdpBackend:
        from gyre.workloads.fsdp.backend import FsdpBackend
        from gyre.workloads.fsdp.first_model import FirstModel

        model = FirstModel.of_folder(reward_model_folder(self.config), "config.reward_model.path")
        self.vocab = model.vocab
        source, held = model.score_source()
        return FsdpBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            model.config,
            source,
            values=True,
            trains=False,
            held=held,
        )
