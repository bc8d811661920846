"""What a rank process does to try a class's contract. Nothing here imports Megatron by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check(rank: int, ranks: int, port: int, name: str, config: dict[str, Any], directory: Path) -> None:
    from gyre.testing import contracts
    from gyre.workloads import megatron
    from gyre.workloads.torch.actor import TorchActor
    from tests.workloads.torch_workloads import bind

    if name == "actor":
        contracts.check_actor(megatron.MegatronActor, config=config, directory=directory, publishes=True)
    elif name == "critic":
        policy = bind(TorchActor(), config).export_weights(version=0)
        contracts.check_critic(megatron.MegatronCritic, config=config, directory=directory, policy=policy)
    elif name == "reference":
        contracts.check_reference(megatron.MegatronReference, config=config)
    else:
        contracts.check_reward(megatron.MegatronRewardModel, config=config)
