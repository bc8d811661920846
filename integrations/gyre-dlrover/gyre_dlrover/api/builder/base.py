"""DLRover's job builder, by its methods and their arguments; what it builds is a job of Gyre's.

    job = (
        DLJobBuilder()
        .node_num(1).device_per_node(2).device_type("CPU")
        .config({"steps": 10})
        .train("my.module.run").nnodes(1).nproc_per_node(2)
        .end()
        .build()
    )
    job.submit("sft")

Invariants:
- *until it is submitted*: a built job's `workloads` may be changed, as DLRover's examples do;
- *told*: what has no meaning here warns (`HasNoMeaning`), and what cannot be is refused with a ConfigError. What
  DLRover ignores in silence, such as an unknown keyword, is refused too.

This module must not import Ray or torch.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gyre.config import plain_config
from gyre.errors import ConfigError, JobFailed, nearest
from gyre_dlrover.api.builder.options import JobConfig
from gyre_dlrover.common.enums import ACCELERATOR_TYPE, DLStreamType
from gyre_dlrover.common.workload_desc import (
    AnyWorkloadDesc,
    ElasticWorkloadDesc,
    ResourceDesc,
    SimpleWorkloadDesc,
)
from gyre_dlrover.notes import has_no_meaning

ELASTIC_ROLE = "ELASTIC"
"""The role of `train` where none was named."""

NOSET_VISIBLE_DEVICES = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": "true"
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "ONEAPI_DEVICE_SELECTOR",
    )
}
"""What DLRover sets for a worker that is to see all devices of its machine."""

_RESOURCES = ("cpu", "memory", "mem", "disk", "accelerator", "acc", "gpu", "user_defined", "ud_resource")


class DLJob(BaseModel):
    """A job that is described and not yet submitted. `handle` is Gyre's handle on it, once it is."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)

    user_config: dict[str, Any] = Field(default_factory=dict)
    workloads: dict[str, AnyWorkloadDesc]
    """By role, in the order of their declaration."""
    global_envs: dict[str, str] = Field(default_factory=dict)
    node_number: int = Field(default=1, ge=1)
    device_per_node: int = Field(default=8, ge=1)
    accelerator_type: ACCELERATOR_TYPE = ACCELERATOR_TYPE.GPU
    stream_type: DLStreamType = DLStreamType.TASK_STREAM
    collocations: list[set[str]] = Field(default_factory=list)
    handle: Any = Field(default=None, exclude=True)
    """A `gyre.JobHandle` after `submit`: its status, events, logs, and `stop`."""

    @property
    def node_num(self) -> int:
        return self.node_number

    @property
    def device_type(self) -> str:
        return self.accelerator_type.value

    @property
    def config(self) -> dict[str, Any]:
        return self.user_config

    @property
    def env(self) -> dict[str, str]:
        return self.global_envs

    def get_workload(self, role: str) -> AnyWorkloadDesc:
        """Raises KeyError for a role that the job does not have."""
        return self.workloads[role]

    def check(self) -> None:
        """Raise ConfigError where this cannot be a job. What only a cluster can show, `to_gyre` and `submit` check."""
        if not self.workloads:
            raise ConfigError("workloads: the job has no role.", hint='Add one: .train("module.function").')
        if self.accelerator_type is ACCELERATOR_TYPE.TPU:
            raise ConfigError("device_type: TPU given, but Gyre places CPUs and GPUs.")
        if self.stream_type is DLStreamType.DATA_STREAM:
            raise ConfigError(
                "as_data_stream: Gyre runs streams of tasks.", hint="Leave it out; a DataQueue carries data."
            )

    def to_gyre(self, job_name: str | None = None, **options: Any) -> Any:
        """The same job as a `gyre.RLJob`, whose `plan()` shows where everything stands. Arguments as of `submit`.
        Raises ConfigError."""
        from gyre_dlrover.api.builder.compiling import compile_job

        self.check()
        return compile_job(self, _job_config(job_name, options))

    def submit(self, job_name: str | None = None, /, blocking: bool = True, **options: Any) -> int:
        """Run the job on the cluster that this process is connected to, on RAY_ADDRESS, or on one of its own.

        `options` are fields of DLRover's JobConfig; DLROVER_UNIFIED_<FIELD> in the environment gives them too. `gyre`
        among them is a mapping of what Gyre's `submit` takes, such as `{"home_path": …}`.

        Returns 0 for a job that succeeded, or, without `blocking`, that was started; 1 for one that failed, whose error
        and the user's traceback are on standard error. Raises ConfigError, GraphError, Conflict (a running job has the
        name) and Unreachable.
        """
        own = options.pop("gyre", {})
        job = self.to_gyre(job_name, **options)
        self.handle = job.submit(**own)
        if not blocking:
            return 0
        try:
            self.handle.wait()
        except JobFailed as error:
            print(error.details.get("traceback", ""), error, sep="\n", file=sys.stderr)
            return 1
        finally:
            self.handle.close()
        return 0


def _job_config(job_name: str | None, options: dict[str, Any]) -> JobConfig:
    given = {"job_name": f"dlrover-{random.randbytes(3).hex()}", **JobConfig.from_environment(os.environ)}
    given |= options if job_name is None else {**options, "job_name": job_name}
    return JobConfig.read(given)


T = TypeVar("T", bound="RoleBuilder")


class RoleBuilder:
    """One role. Whatever it has no method for goes on at the job's builder, so `end` is optional."""

    def __init__(self, parent: DLJobBuilder, role: str, entrypoint: str) -> None:
        self.role, self.entrypoint = role, entrypoint
        self._parent = parent
        self._fields: dict[str, Any] = {}
        self._total, self._per_group = 1, 1
        self._env: dict[str, str] = {}
        self._resource: dict[str, Any] = {}

    def total(self: T, num: int = 1) -> T:
        """How many workers."""
        self._total = num
        return self

    def per_group(self: T, num: int = 1) -> T:
        """How many of them share a machine."""
        self._per_group = num
        return self

    def env(self: T, env: dict[str, str] | None = None) -> T:
        """Environment of this role, over the job's."""
        self._env |= env or {}
        return self

    def resource(
        self: T,
        cpu: float = 0,
        memory: int = 0,
        disk: int = 0,
        accelerator: float = 0,
        **kwargs: Any,
    ) -> T:
        """What one worker takes; memory in MB. Also `mem`, `gpu`, `acc`, and `user_defined`, Ray's resources of the
        user's own. Raises ConfigError for any other keyword, which DLRover ignores."""
        for name in kwargs:
            if name not in _RESOURCES:
                raise ConfigError(
                    f"workloads.{self.role}.resource.{name}: unknown; {nearest(name, _RESOURCES)}"
                )
        if disk:
            has_no_meaning("resource(disk=…)", "Gyre reserves no disk, and waits where one is full")
        self._resource = {
            "cpu": cpu,
            "memory": memory or kwargs.get("mem", 0),
            "disk": disk,
            "accelerator": accelerator or kwargs.get("acc", 0) or kwargs.get("gpu", 0),
            "user_defined": kwargs.get("user_defined") or kwargs.get("ud_resource") or {},
        }
        return self

    def disable_ray_auto_visible_device(self: T) -> T:
        """The worker sees every device of its machine."""
        self._env |= NOSET_VISIBLE_DEVICES
        return self

    def not_driver(self: T) -> T:
        """The job ends without waiting for this role."""
        self._fields["is_driver"] = False
        return self

    def sub_stage(self: T, sub_stage: list[str] | None = None) -> T:
        """Accepted as DLRover accepts it, which does nothing with it."""
        if sub_stage:
            has_no_meaning("sub_stage", "DLRover reads it nowhere either")
        return self

    def end(self) -> Any:
        """Back to the job."""
        return self._parent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._parent, name)

    def _described(self) -> AnyWorkloadDesc:
        """Raises ConfigError."""
        try:
            return self._describe(
                entry_point=self.entrypoint,
                envs=self._env,
                resource=ResourceDesc.get_or_default(self._resource),
                total=self._total,
                per_group=self._per_group,
                **self._fields,
            )
        except ValidationError as error:
            raise _config_error(f"workloads.{self.role}", error) from None

    def _describe(self, **fields: Any) -> AnyWorkloadDesc:
        raise NotImplementedError


class SimpleWorkloadBuilder(RoleBuilder):
    """A role whose workers stand alone."""

    def _describe(self, **fields: Any) -> AnyWorkloadDesc:
        return SimpleWorkloadDesc(**fields)


class ElasticTrainBuilder(RoleBuilder):
    """A role whose workers are the ranks of one process group."""

    def nnodes(self, num: int) -> ElasticTrainBuilder:
        """How many machines, with as many ranks on each as `nproc_per_node` says."""
        self._total = num * self._per_group
        return self

    def nproc_per_node(self, num: int) -> ElasticTrainBuilder:
        """How many ranks on each machine."""
        self._total = self._total // self._per_group * num
        self._per_group = num
        return self

    def _describe(self, **fields: Any) -> AnyWorkloadDesc:
        job = self._parent
        return ElasticWorkloadDesc(
            comm_auto_setup_process_group=not job._no_setup_process_group,
            comm_pre_check=not job._skip_node_check,
            **fields,
        )


B = TypeVar("B", bound="DLJobBuilder")


class DLJobBuilder:
    """Collects a job with roles of any name."""

    job_class: type[DLJob] = DLJob

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._env: dict[str, str] = {}
        self._roles: dict[str, RoleBuilder] = {}
        self._collocations: list[list[str]] = []
        self._last_role: str | None = None
        self._no_setup_process_group = False
        self._skip_node_check = False

    # -- the job ------------------------------------------------------------------------------------

    def node_num(self: B, num: int = 1) -> B:
        """The most machines that the job uses."""
        return self._set("node_number", num)

    def device_per_node(self: B, num: int = 8) -> B:
        """Devices of a machine that the job may use."""
        return self._set("device_per_node", num)

    def device_type(self: B, device_type: str = "GPU") -> B:
        """`CPU` or `GPU`; with `CPU` a device is a number for placement."""
        return self._set("accelerator_type", device_type)

    def config(self: B, config: Any) -> B:
        """What workers read as `current_worker().job_info.user_config`: a mapping, an OmegaConf object, or a namespace,
        of plain data. Raises ConfigError."""
        return self._set("user_config", {} if config is None else plain_config(config))

    def global_env(self: B, env: dict[str, str]) -> B:
        """Environment of every worker."""
        self._env |= env
        return self

    def as_task_stream(self: B) -> B:
        """What every job is."""
        return self._set("stream_type", DLStreamType.TASK_STREAM)

    def as_data_stream(self: B) -> B:
        """Refused by `build`, as DLRover's RL jobs refuse it."""
        return self._set("stream_type", DLStreamType.DATA_STREAM)

    def no_setup_process_group(self: B) -> B:
        """Elastic roles get MASTER_ADDR and MASTER_PORT, and make their process group themselves."""
        self._no_setup_process_group = True
        return self

    def skip_node_check(self: B) -> B:
        """Leave out DLRover's check of the network between the ranks, which Gyre does not have."""
        has_no_meaning(
            "skip_node_check", "each worker's machine is examined before it starts, which takes no time"
        )
        self._skip_node_check = True
        return self

    # -- roles --------------------------------------------------------------------------------------

    def role(self: B, role: str) -> B:
        """The name of the role that the next `run` or `train` declares."""
        self._last_role = role
        return self

    def run(self, entrypoint: str) -> SimpleWorkloadBuilder:
        """A role whose workers stand alone."""
        if self._last_role is None:
            raise ConfigError("run: no role was named.", hint='Call .role("name") before it.')
        return self._added(SimpleWorkloadBuilder(self, self._last_role, entrypoint))

    def train(self, entrypoint: str) -> ElasticTrainBuilder:
        """A role whose workers are the ranks of one process group; `ELASTIC` where no role was named."""
        return self._added(ElasticTrainBuilder(self, self._last_role or ELASTIC_ROLE, entrypoint))

    def workload(self, role: str, entrypoint: str) -> SimpleWorkloadBuilder:
        """`role` and `run` in one."""
        return self.role(role).run(entrypoint)

    def add_role_builder(self, role: str, role_builder: RoleBuilder) -> None:
        """Raises ConfigError for a role that is declared already."""
        if role in self._roles:
            raise ConfigError(f"workloads.{role}: is declared twice.", hint="Name another role before it.")
        self._roles[role] = role_builder

    # -- where roles stand --------------------------------------------------------------------------

    def with_collocation(self: B, *roles: str) -> B:
        """These roles share devices, worker by worker. Their names in any case, before or after the roles are
        declared."""
        self._collocations.append(list(roles))
        return self

    def with_collocation_all(self: B, *exclude_roles: str) -> B:
        """All roles so far but these share devices."""
        excluded = {name.upper() for name in exclude_roles}
        self._collocations.append([name for name in self._roles if name.upper() not in excluded])
        return self

    # -- and then -----------------------------------------------------------------------------------

    def build(self) -> Any:
        """The job: a `DLJob`, or an `RLJob` of an `RLJobBuilder`. Raises ConfigError."""
        workloads = {name: role._described() for name, role in self._roles.items()}
        try:
            job = self.job_class(
                workloads=workloads,
                global_envs=self._env,
                collocations=[],
                **self._fields,
            )
        except ValidationError as error:
            raise _config_error("job", error) from None
        for number, names in enumerate(self._collocations):
            _collocate(job, number, names)
        job.check()
        return job

    def submit(self, job_name: str | None = None, /, blocking: bool = True, **options: Any) -> int:
        """Build and submit."""
        return int(self.build().submit(job_name, blocking, **options))

    def _set(self: B, field: str, value: Any) -> B:
        self._fields[field] = value
        return self

    def _added(self, builder: R) -> R:
        self.add_role_builder(builder.role, builder)
        return builder


R = TypeVar("R", bound=RoleBuilder)


def _collocate(job: DLJob, number: int, names: list[str]) -> None:
    """Put the roles into one group, each with its share of the devices. Raises ConfigError."""
    known = {name.upper(): name for name in job.workloads}
    roles = []
    for name in names:
        if name.upper() not in known:
            raise ConfigError(
                f"with_collocation: {name!r} is not defined as a role; {nearest(name, job.workloads)}"
            )
        roles.append(known[name.upper()])
    if len(set(roles)) < 2:
        raise ConfigError(f"with_collocation: {names} given, expected two or more different roles.")
    for role in roles:
        workload = job.workloads[role]
        if workload.group is not None:
            raise ConfigError(f"with_collocation: {role} has already been assigned to a collocation.")
        workload.group = f"collocation_{number}"
        workload.resource = workload.resource.model_copy(update={"accelerator": round(1 / len(roles), 2)})
    job.collocations.append(set(roles))


def _config_error(path: str, error: ValidationError) -> ConfigError:
    """The first complaint as a sentence that begins with the key."""
    first = error.errors()[0]
    key = ".".join([path, *(str(part) for part in first["loc"])])
    said = str(first["msg"]).removeprefix("Value error, ")
    return ConfigError(f"{key}: {first['input']!r} given, {said[:1].lower()}{said[1:]}.")
