"""One role of a DLRover job, as data that may be changed until the job is submitted."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from gyre_dlrover.common.enums import WorkloadEntrypointType

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def get_entrypoint_type(entry_point: str) -> WorkloadEntrypointType | None:
    """A script (`train.py --lr 1`) or `module.name`; None for a text that is neither."""
    words = entry_point.split()
    if words and (words[0].endswith(".py") or "/" in words[0]):
        return WorkloadEntrypointType.PY_CMD
    return WorkloadEntrypointType.MODULE_FUNC if _DOTTED.fullmatch(entry_point.strip()) else None


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class ResourceDesc(_Described):
    """What one worker takes of its machine. Memory in MB (2^20 bytes)."""

    cpu: float = Field(default=0.0, ge=0)
    memory: int = Field(default=0, ge=0, validation_alias=AliasChoices("memory", "mem"))
    disk: int = Field(default=0, ge=0)
    accelerator: float = Field(default=0.0, ge=0, validation_alias=AliasChoices("accelerator", "acc", "gpu"))
    user_defined: dict[str, float] = Field(
        default_factory=dict, validation_alias=AliasChoices("user_defined", "ud_resource")
    )

    @classmethod
    def get_or_default(cls, given: dict[str, Any]) -> ResourceDesc:
        """These resources; one device where they name neither cores, nor devices, nor any of the user's own."""
        made = cls.model_validate(given)
        return made.model_copy(update={"accelerator": 1.0}) if made.is_empty() else made

    def is_empty(self) -> bool:
        return not (self.cpu or self.accelerator or self.user_defined)


class WorkloadDesc(_Described):
    """What `job.workloads[role]` holds."""

    total: int = Field(default=1, ge=0)
    """Workers. With 0 the role is left out of the job, and its `RoleGroup` is empty."""
    per_group: int = Field(default=1, ge=1)
    """Workers that share a machine; divides `total`."""
    resource: ResourceDesc = Field(default_factory=lambda: ResourceDesc(accelerator=1.0))
    envs: dict[str, str] = Field(default_factory=dict)
    entry_point: str
    """`module.name` (a function, or a class that is made without arguments), or `script.py` with its arguments."""
    is_driver: bool = True
    """Whether the job ends only when this role's workers have ended."""
    max_restart: int = Field(default=10, ge=0)
    """Restarts of one worker, or of the gang that it is in, before the whole job is restarted."""
    per_node_max_failure: int = Field(default=3, ge=0)
    """Deaths on one machine, after which it is left alone."""
    group: str | None = None
    """The collocation that the role is part of."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Data for the worker, which reads it from `current_worker().actor_info.spec.config`."""
    rank_based_gpu_selection: bool = False
    """Known by name; Gyre gives each worker its own devices."""

    @property
    def entry_point_type(self) -> WorkloadEntrypointType:
        kind = get_entrypoint_type(self.entry_point)
        assert kind is not None, "checked when it was set"
        return kind

    @field_validator("entry_point", mode="before")
    @classmethod
    def _entry_point_with_dots(cls, value: Any) -> Any:
        return value.strip().replace("::", ".") if isinstance(value, str) else value

    @field_validator("entry_point")
    @classmethod
    def _entry_point_is_one(cls, value: str) -> str:
        if get_entrypoint_type(value) is None:
            raise ValueError('expected "module.name", or "script.py" with its arguments')
        return value

    @field_validator("resource")
    @classmethod
    def _resource_is_something(cls, value: ResourceDesc) -> ResourceDesc:
        if value.is_empty():
            raise ValueError("Resource must not be empty; name cores, devices, or a resource of your own")
        return value

    @model_validator(mode="after")
    def _groups_are_whole(self) -> WorkloadDesc:
        if self.total % self.per_group:
            raise ValueError(f"total {self.total} is not divisible by per_group {self.per_group}")
        if self.rank_based_gpu_selection and (self.per_group == 1 or self.resource.accelerator > 1):
            raise ValueError("rank_based_gpu_selection wants a per_group beyond 1, and one GPU for each")
        return self


class SimpleWorkloadDesc(WorkloadDesc):
    """A role whose workers stand alone: one is replaced without the others."""

    backend: Literal["simple"] = "simple"


class ElasticWorkloadDesc(WorkloadDesc):
    """A role whose workers are the ranks of one process group: a gang, which starts and restarts as a whole."""

    backend: Literal["elastic"] = "elastic"
    comm_pre_check: bool = True
    """Known by name; Gyre examines the machine of each worker before it starts, whatever this says."""
    comm_auto_setup_process_group: bool = True
    """Whether the ranks are in torch's default process group when the entrypoint begins. Otherwise they get
    MASTER_ADDR and MASTER_PORT alone."""
    comm_backend: str = "auto"
    """`auto` (Gloo, and NCCL where there are GPUs), or what `torch.distributed` knows."""
    comm_timeout_s: int | None = Field(default=None, ge=0)
    """How long ranks wait for each other; None for half an hour."""


AnyWorkloadDesc = SimpleWorkloadDesc | ElasticWorkloadDesc
