"""A job's spec with every default written out: for `gyre config show`, and where jobs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config import JobSpec, parse_job
from gyre.errors import ConfigError


def whole(spec: JobSpec) -> dict[str, Any]:
    """A compiled job's spec as the content of a job file, with the defaults of the sections of `config` too."""
    from gyre.config.sections import WorkloadSettings
    from gyre.graph.integrations import reads_sections

    data = spec.model_dump(mode="json")
    for name, role in spec.roles.items():
        data["roles"][name]["entrypoint"] = None if role.entrypoint is None else str(role.entrypoint)
    if reads_sections(spec):
        settings = WorkloadSettings.read(spec.config)
        sections = {key: part for key, part in settings.model_dump(mode="json").items() if part is not None}
        if settings.task is not None:
            sections["task"] = settings.task.own
        data["config"] = {**spec.config, **sections}
    return data


def whole_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a spec as a store has it. One that this version of Gyre would refuse stays as it is."""
    try:
        return whole(parse_job(dict(spec)))
    except ConfigError:
        return dict(spec)
