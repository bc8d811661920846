"""The calls of the jobs in `ppo.py` and `sft.py`: stubs, as DLRover's users write them in a module of their own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from gyre_dlrover.api.runtime import FutureSequence, RoleGroup
from gyre_dlrover.common.enums import RLRoleType


def prepare(role: RLRoleType, name: str) -> Future[list[Any]]:
    return RoleGroup(role.name).call(prepare, name)


def generate(prompts: list[str], length: int) -> FutureSequence[str]:
    return RoleGroup(RLRoleType.ROLLOUT.name).call_batch(generate, len(prompts), prompts, length)


def score(answers: list[str]) -> FutureSequence[float]:
    return RoleGroup(RLRoleType.REWARD.name).call_batch(score, len(answers), answers)


def update(rewards: list[float]) -> FutureSequence[float]:
    return RoleGroup(RLRoleType.ACTOR.name).call_batch(update, len(rewards), rewards)


def publish() -> Future[list[Any]]:
    return RoleGroup(RLRoleType.ACTOR.name).call(publish)


def load(version: int, weight: float) -> Future[list[Any]]:
    return RoleGroup(RLRoleType.ROLLOUT.name).call(load, version, weight)


def end_job() -> None: ...
