"""The integrations conform to their protocols: mypy checks this file with the package, and nothing runs it.

Where a class would not conform, the assignment is an error. The last ones must be errors, so that an assignment proves
something: `warn_unused_ignores` complains of an ignored error that is none.
"""

from __future__ import annotations

from typing import Any

from gyre.engines.contract import Engine
from gyre.engines.http_client import EngineClient
from gyre.rollouts.samples import Group
from gyre.workloads.megatron.actor import MegatronActor
from gyre.workloads.megatron.critic import MegatronCritic
from gyre.workloads.megatron.reference import MegatronReference
from gyre.workloads.megatron.reward_model import MegatronRewardModel
from gyre.workloads.protocols import (
    Actor,
    Critic,
    KeepsStates,
    PublishesInBackground,
    PublishesModel,
    Reference,
    Reward,
    Rollout,
    TakesInstanceWeights,
    TakesPolicy,
    TellsLogprobs,
    WritesInBackground,
)
from gyre.workloads.rewards import ExactMatchReward, PythonReward
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from gyre.workloads.torch.reference import TorchReference
from gyre.workloads.torch.reward_model import TorchRewardModel
from gyre.workloads.torch.rollout import TorchRollout
from tests.workloads.toy_policy import ToyActor

ACTORS: list[type[Actor]] = [TorchActor, MegatronActor]
PUBLISHERS: list[type[PublishesModel]] = [TorchActor, MegatronActor]
BESIDE_TRAINING: list[type[PublishesInBackground]] = [TorchActor, MegatronActor]
FETCHERS: list[type[TakesInstanceWeights]] = [TorchActor, MegatronActor]
TELLERS: list[type[TellsLogprobs]] = [TorchActor, MegatronActor]
IN_BACKGROUND: list[type[WritesInBackground]] = [MegatronActor, MegatronCritic]
IN_MEMORY: list[type[KeepsStates]] = [MegatronActor, MegatronCritic]
CRITICS: list[type[Critic]] = [TorchCritic, MegatronCritic]
ROLLOUTS: list[type[Rollout]] = [TorchRollout]
REWARDS: list[type[Reward]] = [ExactMatchReward, PythonReward, TorchRewardModel, MegatronRewardModel]
REFERENCES: list[type[Reference]] = [TorchReference, MegatronReference]
FED: list[type[TakesPolicy]] = [TorchReference, TorchCritic, MegatronCritic]
ENGINES: list[type[Engine]] = [EngineClient]


class NamesNoIndex(TorchActor):
    def accumulate(self, groups: list[Group], *, step: int) -> dict[str, Any]:  # type: ignore[override]
        return {}


class ScoresText:
    def score(self, groups: list[str]) -> list[str]:
        return groups


BROKEN_ACTOR: type[Actor] = NamesNoIndex  # type: ignore[assignment]
BROKEN_REWARD: type[Reward] = ScoresText  # type: ignore[assignment]
NO_PUBLISHER: type[PublishesModel] = TorchCritic  # type: ignore[assignment]
NO_BACKGROUND: type[WritesInBackground] = ToyActor  # type: ignore[assignment]
