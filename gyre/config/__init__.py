"""Typed configuration: the job as data, and how what users write becomes it."""

from gyre.config.parse import apply_overrides, load_yaml, parse_job, plain_config
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
    "load_yaml",
    "parse_job",
    "plain_config",
]
