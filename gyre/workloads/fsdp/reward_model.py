"""A reward model in FSDP2's back end; what one is, is `gyre.workloads.torch.reward_model`.

This module imports transformers when it is set up, not before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from gyre.rollouts.samples import Group
from gyre.workloads.base import operator
from gyre.workloads.fsdp.frozen import FrozenModel
from gyre.workloads.torch.reward_model import ends_of, reward_model_folder, scored_tokens, take_rewards

if TYPE_CHECKING:
    from gyre.models.safetensors_folder import TensorSource
    from gyre.workloads.fsdp.first_model import FirstModel


class FsdpRewardModel(FrozenModel):
    """`TorchRewardModel` for any decoder of transformers with a score of one label, on `config.fsdp`'s device and in
    its precision, with packed samples. A vertex holds all of it."""

    VALUES: ClassVar[bool] = True

    def model(self) -> FirstModel:
        from gyre.workloads.fsdp.first_model import FirstModel

        return FirstModel.of_folder(reward_model_folder(self.config), "config.reward_model.path")

    def weights_of(self, model: FirstModel) -> tuple[TensorSource, Collection[str]]:
        return model.score_source()

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """See `TorchRewardModel.score`."""
        from gyre.workloads.learner.packing import Row

        asked = scored_tokens(groups, self.trained_model.vocab)
        said = self.said_of([Row(row.prompt_ids, row.token_ids) for row in asked])
        return take_rewards(groups, ends_of(asked, said))
