"""The job as its workers know it: DLRover's names and numbers, carried in the `config` of Gyre's job.

DLRover's roles have names in capitals; Gyre's have not, and the one that drives a job is `trainer`. So each role has
both names here. A role that drives alone, takes no device and is called `trainer` is Gyre's trainer itself (`hosted`);
any other is a role of its own beside one that only starts and joins them.

This module must not import Ray or torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gyre.config import TRAINER
from gyre_dlrover.common.enums import ACCELERATOR_TYPE
from gyre_dlrover.common.workload_desc import AnyWorkloadDesc

KEY = "dlrover"
"""Where the description stands in the job's `config`."""

Scope = Literal["none", "job", "role"]


class RoleDescription(BaseModel):
    """A role: DLRover's name, Gyre's, and what its workers are."""

    name: str
    gyre: str
    workload: AnyWorkloadDesc = Field(discriminator="backend")

    @property
    def hosted(self) -> bool:
        """Whether the role's one worker is in the process of Gyre's trainer."""
        return self.gyre == TRAINER

    @property
    def gang(self) -> bool:
        return self.workload.backend == "elastic"

    def worker_name(self, rank: int) -> str:
        """As DLRover names its actors: `ACTOR_4-3_2-1` is rank 3 of 4, and 1 of the 2 on its machine."""
        total, per_group = self.workload.total, self.workload.per_group
        return f"{self.name}_{total}-{rank}_{per_group}-{rank % per_group}"


class JobDescription(BaseModel):
    """The whole job."""

    user_config: dict[str, Any]
    accelerator_type: ACCELERATOR_TYPE
    roles: list[RoleDescription]
    scope: Scope
    """What a failure restarts."""
    restarts: int
    """How often an exception of the user's restarts the job, where `scope` is `job`."""

    def as_config(self) -> dict[str, Any]:
        """The `config` of Gyre's job."""
        return {KEY: self.model_dump(mode="json")}

    @classmethod
    def of(cls, config: dict[str, Any]) -> JobDescription:
        return cls.model_validate(config[KEY])

    def role(self, name: str) -> RoleDescription | None:
        """By DLRover's name; None if the job has no such role, or none of its workers."""
        return next((role for role in self.roles if role.name == name), None)

    def role_of(self, gyre: str) -> RoleDescription | None:
        """By Gyre's name."""
        return next((role for role in self.roles if role.gyre == gyre), None)

    @property
    def hosted(self) -> RoleDescription | None:
        return self.role_of(TRAINER)

    def worker(self, name: str) -> tuple[RoleDescription, int] | None:
        """The role and rank of a worker, by its name as `worker_name` makes it."""
        for role in self.roles:
            for rank in range(role.workload.total):
                if role.worker_name(rank) == name:
                    return role, rank
        return None
