"""Typed configuration: the job as data, and how what users write becomes it."""

from gyre.config.parse import apply_overrides, config_error, load_yaml, parse_job, plain_config
from gyre.config.spec import (
    BUILTIN_ROLES,
    TRAINER,
    Affinity,
    Budget,
    EdgeSpec,
    Elastic,
    Entrypoint,
    FailoverSpec,
    JobSpec,
    Resources,
    RoleSpec,
    RunSpec,
    StoreSpec,
    parse_size,
)

__all__ = [
    "BUILTIN_ROLES",
    "TRAINER",
    "Affinity",
    "Budget",
    "EdgeSpec",
    "Elastic",
    "Entrypoint",
    "FailoverSpec",
    "JobSpec",
    "Resources",
    "RoleSpec",
    "RunSpec",
    "StoreSpec",
    "apply_overrides",
    "config_error",
    "load_yaml",
    "parse_job",
    "parse_size",
    "plain_config",
]
