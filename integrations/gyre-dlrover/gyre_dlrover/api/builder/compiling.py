"""From a DLRover job to Gyre's: every role becomes a role, elastic ones gangs, and the trainer one that drives them.

Invariants:
- *one runtime*: what comes out is a `JobSpec` like any other; Gyre's scheduler, journal and failover run it;
- *nothing imported*: the user's functions and classes are named, and imported where they run.

This module must not import Ray or torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre.api.definition.entrypoints import import_roots
from gyre.api.definition.rl_job import RLJob
from gyre.config import LOCAL_ROLLOUT, ROLLOUT_MANAGER, SPARE_ROLLOUT, TRAINER, Entrypoint, Resources
from gyre.config.parse import parse_job
from gyre.errors import ConfigError
from gyre_dlrover.api.builder.options import NO_FAILOVER, WHOLE_JOB, JobConfig
from gyre_dlrover.common.enums import WorkloadEntrypointType
from gyre_dlrover.common.workload_desc import AnyWorkloadDesc
from gyre_dlrover.description import JobDescription, RoleDescription, Scope
from gyre_dlrover.notes import has_no_meaning

if TYPE_CHECKING:
    from gyre_dlrover.api.builder.base import DLJob

CONDUCTOR = "gyre_dlrover.conductor:Conductor"
WORKER = "gyre_dlrover.worker:Worker"

NO_DEADLINE_S = 30 * 86_400.0
"""DLRover ends no call, and takes no silence for a fault. Gyre's deadlines for those are this far away; a process that
is stopped or gone is noticed all the same, in seconds."""

WINDOW_S = 30 * 86_400.0
"""DLRover counts restarts over the whole job."""

WORKING_DIR = "DLROVER_WORKING_DIR"
"""The variable of the job's environment that names the folder to import from."""


def compile_job(job: DLJob, options: JobConfig) -> RLJob:
    """Raises ConfigError for what is no job; what does not fit on the machines is raised by `plan` and `submit`."""
    roles = _named(job)
    description = JobDescription(
        user_config=job.user_config,
        accelerator_type=job.accelerator_type,
        roles=roles,
        scope=_scope(options, roles),
        restarts=options.job_max_restart,
    )
    isolated = options.worker_isolation_schedule_resource
    spec: dict[str, Any] = {
        "name": options.job_name,
        "node_num": job.node_number,
        "device_per_node": job.device_per_node,
        "device_type": job.accelerator_type.value,
        "env": {"JOB": options.job_name, **job.global_envs},
        "config": description.as_config(),
        "roles": {TRAINER: _trainer(description, isolated)}
        | {role.gyre: _role(role, job, isolated) for role in roles if not role.hosted},
        "affinity": {"collocate": _collocations(job, description)},
        "failover": _failover(description),
        "run": {"call_timeout_s": NO_DEADLINE_S},
        "python_path": _python_path(job),
    }
    return RLJob(parse_job(spec))


# -- roles ------------------------------------------------------------------------------------------


def _named(job: DLJob) -> list[RoleDescription]:
    """Each role with its name in Gyre. Raises ConfigError where two would have the same one."""
    found: list[RoleDescription] = []
    for name, workload in job.workloads.items():
        if not workload.total:
            continue
        if name.lower() == TRAINER and _may_be_hosted(workload):
            gyre = TRAINER
        else:
            gyre = re.sub(r"\W", "_", name.lower())
            if not re.fullmatch(r"[a-z]\w{0,31}", gyre, re.ASCII) or gyre in (
                TRAINER,
                ROLLOUT_MANAGER,
                LOCAL_ROLLOUT,
                SPARE_ROLLOUT,
            ):
                gyre = f"role_{gyre}"[:32]
        other = next((one.name for one in found if one.gyre == gyre), None)
        if other is not None:
            raise ConfigError(
                f"workloads.{name}: is {gyre!r} in Gyre, as {other} is.", hint="Rename one of them."
            )
        found.append(RoleDescription(name=name, gyre=gyre, workload=workload))
    return found


def _may_be_hosted(workload: AnyWorkloadDesc) -> bool:
    return (
        workload.backend == "simple"
        and workload.total == 1
        and workload.is_driver
        and not workload.resource.accelerator
        and workload.group is None
    )


def _trainer(description: JobDescription, isolated: str) -> dict[str, Any]:
    hosted = description.hosted
    spec: dict[str, Any] = {"entrypoint": CONDUCTOR, "stall_timeout_s": NO_DEADLINE_S}
    if hosted is not None:
        spec |= {"env": _environment(hosted), "resources": _resources(hosted.workload, isolated)}
    return spec


def _role(role: RoleDescription, job: DLJob, isolated: str) -> dict[str, Any]:
    workload = role.workload
    if workload.rank_based_gpu_selection:
        has_no_meaning("rank_based_gpu_selection", "each worker gets devices of its own")
    return {
        "entrypoint": WORKER,
        "total": workload.total,
        "per_node": _per_node(workload, job),
        "env": _environment(role),
        "resources": _resources(workload, isolated),
        "gang": role.gang,
        "stall_timeout_s": NO_DEADLINE_S,
    }


def _environment(role: RoleDescription) -> dict[str, str]:
    return {"ROLE": role.name, **role.workload.envs}


def _resources(workload: AnyWorkloadDesc, isolated: str) -> dict[str, Any]:
    given = workload.resource
    # Of collocated roles each takes the whole device here, which Gyre divides by how many they are.
    shared = workload.group is not None
    custom = {**given.user_defined, **({isolated: 1.0} if isolated else {})}
    return Resources(
        cpu=given.cpu,
        memory_bytes=given.memory << 20,
        accelerator=1.0 if shared else given.accelerator,
        custom={name: amount for name, amount in custom.items() if amount},
    ).model_dump()


def _per_node(workload: AnyWorkloadDesc, job: DLJob) -> int | None:
    """How many workers stand on a machine, if groups of more than one are to stay together: as many whole groups as it
    takes to need no more machines than the job has. None leaves it to the planner."""
    if workload.per_group == 1:
        return None
    groups = workload.total // workload.per_group
    fewest = -(-groups // job.node_number)
    together = next(count for count in range(fewest, groups + 1) if groups % count == 0)
    return together * workload.per_group


def _collocations(job: DLJob, description: JobDescription) -> list[list[str]]:
    gyre = {role.name: role.gyre for role in description.roles}
    return [
        [gyre[name] for name in job.workloads if name in roles and name in gyre] for roles in job.collocations
    ]


# -- failover ---------------------------------------------------------------------------------------


def _scope(options: JobConfig, roles: list[RoleDescription]) -> Scope:
    """A job that is one role alone is that role: restarting it is restarting the job."""
    if options.strategy == NO_FAILOVER:
        return "none"
    alone = len(roles) == 1 and (roles[0].gang or roles[0].workload.total == 1)
    return "job" if options.strategy == WHOLE_JOB and not alone else "role"


def _failover(description: JobDescription) -> dict[str, Any]:
    workloads = [role.workload for role in description.roles]

    def budget(most: int) -> dict[str, Any]:
        return {"max": most, "attempts": most, "window_s": WINDOW_S}

    whole = budget(description.restarts if description.scope != "none" else 0)
    narrow = budget(max(one.max_restart for one in workloads) if description.scope == "role" else 0)
    if description.scope == "role" and len(workloads) == 1:
        narrow = whole  # the role is the job
    return {
        "retry": budget(0),  # calls are repeated on who replaces a worker, and exceptions not at all
        "vertex": narrow,
        "region": narrow,
        "job": whole,
        "user_code": whole if description.scope == "role" else budget(0),
        "silent_attempts": narrow["max"],
        "machine": {"max": min(one.per_node_max_failure for one in workloads), "window_s": 3600.0},
        "step_timeout_s": NO_DEADLINE_S,
    }


# -- the user's code --------------------------------------------------------------------------------


def _python_path(job: DLJob) -> list[str]:
    """The folders that the entrypoints and this package are imported from, and the job's working directory, where
    scripts are."""
    modules = [Entrypoint.parse(CONDUCTOR)]
    for name, workload in job.workloads.items():
        if workload.entry_point_type is WorkloadEntrypointType.PY_CMD:
            continue
        module, _, attribute = workload.entry_point.rpartition(".")
        if module.partition(".")[0] == "__main__":
            raise ConfigError(
                f"workloads.{name}.entry_point: {workload.entry_point!r} is of the script that submits, which no "
                "worker can import.",
                hint="Put the function into a module of its own.",
            )
        modules.append(Entrypoint(module=module, name=attribute))
    working = Path(job.global_envs.get(WORKING_DIR, os.getcwd())).resolve()
    return list(dict.fromkeys([str(working), *import_roots(modules)]))
