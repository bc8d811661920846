"""What a job asks of its engines, and what they can by their records.

A user's own engine says nothing of itself here, and is believed.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph.integrations import reads_sections
from gyre.graph.rollout_roles import is_instance, local_roles, rollouts_of
from gyre.rollouts.engines import known_engine

_CALLED_OFF = "handover"
"""The `rollouts.update_mode` whose samples are called off before the engine pauses, in place then."""


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields nothing; raises ConfigError, one sentence, for the first thing that an engine cannot."""
    settings = WorkloadSettings.read(spec.config) if reads_sections(spec) else None
    local = local_roles(spec)
    for role in spec.roles:
        own = rollouts_of(spec, role)
        kind = known_engine(own.engine)
        if kind is None or not is_instance(spec, role):
            continue
        for key, problem in kind.refusals(
            deterministic=own.deterministic,
            pause="in_place" if own.update_mode == _CALLED_OFF else own.update_mode,
            adapters=settings is not None and settings.lora is not None,
            local=role in local and spec.device_type == "GPU",
        ):
            raise ConfigError(
                f"{key}: {problem}.",
                hint=f"Leave it out, or give {role} another engine: docs/rollouts.md has what each can.",
            )
    yield from ()  # a check of its kind yields what it notes, and this one notes nothing
