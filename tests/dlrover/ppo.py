"""A small RL job as DLRover's users write one: a trainer drives by RPC, the actor's ranks are in a process group and
push what they learned to the rollouts themselves."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from gyre_dlrover.api.builder import RLJob, RLJobBuilder
from gyre_dlrover.api.runtime import RoleGroup, current_worker, rpc
from gyre_dlrover.common.enums import RLRoleType
from tests.dlrover import stubs


class Serving:
    """Serves calls until the trainer says that the job ends."""

    def __init__(self) -> None:
        self.name = ""
        self.over = threading.Event()

    @rpc(stubs.prepare)
    def prepare(self, name: str) -> str:
        self.name = name
        return f"{current_worker().actor_info.name} is {name}"

    @rpc(stubs.end_job)
    def end(self) -> None:
        self.over.set()

    def run(self) -> None:
        self.over.wait()


class Actor(Serving):
    """Its weight is the sum of all rewards, which its ranks sum up by a collective where there is a group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.version = 0.0, 0
        self.grouped = "MASTER_PORT" in os.environ and not current_worker().job_info.user_config["alone"]

    @rpc(stubs.update)
    def update(self, rewards: list[float]) -> list[float]:
        assert self.name, "prepare comes first"
        total = sum(rewards)
        if self.grouped:
            import torch
            import torch.distributed as dist

            tensor = torch.tensor([total], dtype=torch.float64)
            dist.all_reduce(tensor)
            total = float(tensor)
        self.weight, self.version = self.weight + total, self.version + 1
        return [self.weight] * len(rewards)

    @rpc(stubs.publish)
    def publish(self) -> int:
        if current_worker().actor_info.rank == 0:
            stubs.load(self.version, self.weight).result()
        return self.version


class Rollout(Serving):
    def __init__(self) -> None:
        super().__init__()
        self.version, self.weight = 0, 0.0

    @rpc(stubs.generate)
    def generate(self, prompts: list[str], length: int) -> list[str]:
        assert self.name, "prepare comes first"
        rank = current_worker().actor_info.rank
        return [f"{prompt} {'x' * length} by {rank} with {self.version}" for prompt in prompts]

    @rpc(stubs.load)
    def load(self, version: int, weight: float) -> None:
        self.version, self.weight = version, weight


class Reward:
    @rpc(stubs.score)
    def score(self, answers: list[str]) -> list[float]:
        return [float(answer.count("x")) for answer in answers]


class Trainer:
    def __init__(self) -> None:
        self.config = current_worker().job_info.user_config

    def run(self) -> dict[str, Any]:
        said: list[Any] = []
        for role in (RLRoleType.ACTOR, RLRoleType.ROLLOUT):
            said += stubs.prepare(role, f"the {role.value.lower()}").result()
        weights, answers = [], []
        for step in range(self.config["steps"]):
            prompts = [f"prompt {step}.{index}" for index in range(5)]
            answers = stubs.generate(prompts, step + 1).wait()
            rewards = list(stubs.score(answers))
            weights.append(stubs.update(rewards)[-1])
            stubs.publish().result()
            current_worker().report_progress(step=step + 1)
            (Path(self.config["folder"]) / "step").write_text(str(step + 1))
        for role in (RLRoleType.ACTOR, RLRoleType.ROLLOUT):
            RoleGroup(role.name).call(stubs.end_job).result()
        result = {"said": said, "weights": weights, "answers": answers}
        (Path(self.config["folder"]) / "result.json").write_text(json.dumps(result))
        return result


def described(folder: Path, *, steps: int = 3, alone: bool = False) -> RLJob:
    """The job; `alone` leaves the actor's ranks without a process group, for a test in one process."""
    here = __name__
    builder = RLJobBuilder().device_per_node(8).device_type("CPU")
    if alone:
        builder.no_setup_process_group()
    builder.config({"steps": steps, "folder": str(folder), "alone": alone})
    builder.trainer(f"{here}.Trainer").resource(cpu=0.5)
    builder.actor(f"{here}.Actor").total(2).per_group(2).resource(accelerator=0.5)
    builder.rollout(f"{here}.Rollout").total(2).resource(accelerator=0.5)
    builder.reward(f"{here}.Reward")
    job: RLJob = builder.build()
    return job


def expected(steps: int) -> list[float]:
    """The actor's weight after each step."""
    weights, weight = [], 0.0
    for step in range(steps):
        weight += 5.0 * (step + 1)
        weights.append(weight)
    return weights
