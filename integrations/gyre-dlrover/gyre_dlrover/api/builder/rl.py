"""A job with the roles of RL: trainer, actor, rollout, reference, reward, critic."""

from __future__ import annotations

from gyre.errors import ConfigError, nearest
from gyre_dlrover.api.builder.base import (
    DLJob,
    DLJobBuilder,
    ElasticTrainBuilder,
    SimpleWorkloadBuilder,
)
from gyre_dlrover.common.enums import DLStreamType, RLRoleType

TRAINER_CORES = 4
"""What DLRover's trainer takes unless `resource` says otherwise."""


class RLJob(DLJob):
    """A job whose roles are those of RL, the actor among them."""

    def check(self) -> None:
        super().check()
        if self.stream_type is not DLStreamType.TASK_STREAM:
            raise ConfigError("as_data_stream: an RL job is a stream of tasks.", hint="Leave it out.")
        if RLJobBuilder.ACTOR_ROLE not in self.workloads:
            raise ConfigError("workloads.ACTOR: is missing.", hint='Add .actor("module.Class").')
        for role in self.workloads:
            if role not in RLJobBuilder.ROLES:
                raise ConfigError(
                    f"workloads.{role}: is no role of an RL job; {nearest(role, RLJobBuilder.ROLES)}",
                    hint="DLJobBuilder takes roles of any name.",
                )


class RLJobBuilder(DLJobBuilder):
    """Collects a job with the roles of RL. The trainer drives the others, which serve its calls."""

    TRAINER_ROLE = RLRoleType.TRAINER.name
    ACTOR_ROLE = RLRoleType.ACTOR.name
    REF_ROLE = RLRoleType.REFERENCE.name
    REW_ROLE = RLRoleType.REWARD.name
    CRITIC_ROLE = RLRoleType.CRITIC.name
    ROLLOUT_ROLE = RLRoleType.ROLLOUT.name
    ROLES = (TRAINER_ROLE, ACTOR_ROLE, REF_ROLE, REW_ROLE, CRITIC_ROLE, ROLLOUT_ROLE)

    job_class = RLJob

    def trainer(self, entrypoint: str) -> SimpleWorkloadBuilder:
        """One driver, with four cores unless `resource` says otherwise."""
        return self.role(self.TRAINER_ROLE).run(entrypoint).total(1).per_group(1).resource(cpu=TRAINER_CORES)

    def actor(self, entrypoint: str) -> ElasticTrainBuilder:
        return self.role(self.ACTOR_ROLE).train(entrypoint).not_driver()

    def rollout(self, entrypoint: str) -> SimpleWorkloadBuilder:
        return self.role(self.ROLLOUT_ROLE).run(entrypoint).not_driver()

    def reference(self, entrypoint: str) -> SimpleWorkloadBuilder:
        return self.role(self.REF_ROLE).run(entrypoint).not_driver()

    def reward(self, entrypoint: str) -> SimpleWorkloadBuilder:
        return self.role(self.REW_ROLE).run(entrypoint).not_driver()

    def critic(self, entrypoint: str) -> ElasticTrainBuilder:
        return self.role(self.CRITIC_ROLE).train(entrypoint).not_driver()

    def with_collocation_all(self, *exclude_roles: str) -> RLJobBuilder:
        """All roles so far, but the trainer, share devices."""
        super().with_collocation_all(self.TRAINER_ROLE, *exclude_roles)
        return self
