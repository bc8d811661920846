"""What workers ask DLRover's master, as far as a worker of Gyre's has anything to ask."""

from __future__ import annotations

from gyre.errors import nearest
from gyre_dlrover.api.runtime.queue import QUEUE_OWNER, REGISTER_QUEUE, ask
from gyre_dlrover.raised import Mistake
from gyre_dlrover.station import ActorInfo, actor_info, here


class PrimeMasterApi:
    """The job's workers by role and name. What acts on the job as a whole is on Gyre's handle, `job.handle`."""

    @staticmethod
    def get_all_roles() -> dict[str, list[ActorInfo]]:
        """Every worker, by role."""
        return {
            role.name: [actor_info(role, rank) for rank in range(role.workload.total)]
            for role in here().description.roles
        }

    @staticmethod
    def get_workers_by_role(role: str, optional: bool = False) -> list[ActorInfo]:
        """Raises Mistake for a role that is none, unless it is `optional`."""
        roles = PrimeMasterApi.get_all_roles()
        if role not in roles and not optional:
            raise Mistake(f"No actors found for role {role!r}; {nearest(role, roles)}")
        return roles.get(role, [])

    @staticmethod
    def get_actor_info(name: str) -> ActorInfo:
        """Raises Mistake."""
        found = here().description.worker(name)
        if found is None:
            raise Mistake(f"There is no worker {name!r} in this job.")
        return actor_info(*found)

    @staticmethod
    def register_data_queue(name: str, owner_actor: str, size: int) -> None:
        """As `DataQueue` does it; `size` is the owner's to keep."""
        ask(REGISTER_QUEUE, name, owner_actor)

    @staticmethod
    def get_data_queue_owner(name: str) -> str:
        """The name of the worker that owns the queue, once there is one."""
        return str(ask(QUEUE_OWNER, name))


def _not_for_workers(name: str) -> Mistake:
    return Mistake(
        f"PrimeMasterApi.{name}: a worker of Gyre's commands no master.",
        hint="After submit, job.handle has status(), wait(), stop(), scale(); the command line has them too.",
    )


def _refused(name: str) -> staticmethod[..., object]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise _not_for_workers(name)

    return staticmethod(refuse)


for _name in (
    "get_status",
    "start",
    "restart",
    "wait",
    "stop",
    "shutdown",
    "restart_actors",
    "report_actor_restarted",
    "report_execution_result",
):
    setattr(PrimeMasterApi, _name, _refused(_name))
