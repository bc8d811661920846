"""What `submit` takes besides the job: DLRover's JobConfig, field by field, and what each is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gyre.errors import ConfigError, nearest
from gyre_dlrover.notes import has_no_meaning

ENVIRONMENT = "DLROVER_UNIFIED_"
"""Prefix of the variables that give options."""

NO_FAILOVER, WHOLE_JOB, ONE_ROLE = 0, 1, 2
"""The values of `failover_exec_strategy`."""

ALIASES = {"master_memory": "master_mem", "timeout": "master_create_timeout"}

_WITHOUT_MEANING = {
    "master_cpu": "the master reserves no core",
    "master_mem": "the master reserves no memory",
    "master_create_timeout": "a master that does not answer within a minute ends the submission",
    "master_state_backend_type": "the job's state is in its journal, in SQLite or PostgreSQL",
    "master_state_backend_config": "the journal's database is given by `gyre`'s own `store`",
    "node_max_restart": "a machine is left alone for longer each time that it fails",
    "master_max_restart": "the master is restarted as often as it dies, and the job goes on meanwhile",
    "master_isolation_schedule_resource": "the master stands beside its journal, on the machine that submits",
}


class JobConfig(BaseModel):
    """The options of one submission. What has no meaning here is read, so that it can be told."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    job_name: str
    job_max_restart: int = Field(default=10, ge=0)
    """Restarts of the whole job."""
    failover_trigger_strategy: int = Field(default=2, ge=0, le=2)
    """0 for none, as `failover_exec_strategy` 0; anything else is at once."""
    failover_exec_strategy: int = Field(default=WHOLE_JOB, ge=0, le=2)
    """What a failure restarts: 0 nothing, 1 the whole job, 2 the worker, or the gang that it is in."""
    worker_isolation_schedule_resource: str = ""
    """A resource of Ray's that every worker takes one of, so that it stands where there is some."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> dict[str, str]:
        """The options that the environment gives, by name."""
        return {
            key.removeprefix(ENVIRONMENT).lower(): value
            for key, value in environment.items()
            if key.startswith(ENVIRONMENT)
        }

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> JobConfig:
        """Warns of what has no meaning. Raises ConfigError for an unknown option, which DLRover ignores."""
        fields: dict[str, Any] = {}
        for key, value in given.items():
            name = ALIASES.get(key, key)
            if name in _WITHOUT_MEANING:
                has_no_meaning(f"submit({key}=…)", _WITHOUT_MEANING[name])
            elif name not in cls.model_fields:
                known = [*cls.model_fields, *_WITHOUT_MEANING, *ALIASES, "gyre"]
                raise ConfigError(f"submit: {key}: unknown option; {nearest(key, known)}")
            else:
                fields[name] = value
        try:
            made = cls(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"submit: {first['loc'][0]}: {first['input']!r} given: {first['msg']}."
            ) from None
        if made.failover_trigger_strategy == 1:
            has_no_meaning("failover_trigger_strategy=1", "a failure is repaired at once")
        return made

    @property
    def strategy(self) -> int:
        """`failover_exec_strategy`, or none where nothing is to trigger it."""
        return NO_FAILOVER if self.failover_trigger_strategy == 0 else self.failover_exec_strategy
