"""What differs between two specs of one job, and what a job that goes on may change.

A change is a dotted key with the value before and after, so that the journal tells it, and so that a history can be
folded again over the spec that was in force. Values of environment variables, and whom the job notifies, may be secret,
and are left out: no decision depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gyre.errors import ConfigError
from gyre.redaction import HIDDEN, is_secret_name

Changes = dict[str, list[Any]]
"""`{"run.steps": [100, 200]}`; None stands for a key that is not there."""

_MAY_CHANGE = re.compile(
    r"""run\.(steps|checkpoint_every|evaluate_every|lost_checkpoint|call_timeout_s)
    |roles\.\w+\.(total|per_node|resources|elastic|pool|env|setup_timeout_s|stall_timeout_s)(\..*)?
    |(failover|rollouts|weights|affinity|env|observe|config\.optim|config\.(megatron|fsdp)|config\.evaluation)(\..*)?
    |tags|notes|node_num|device_per_node|device_memory_gib|device_price_per_hour|device_type|python_path""",
    re.VERBOSE,
)
"""What says where and for how long the job runs. The rest says what it is: its prompts, its model, its losses."""

_SECRET = re.compile(r"(roles\.\w+\.)?env(\..*)?|observe\.notify(\..*)?")

_OF_THE_USERS = re.compile(r"config\.|roles\.\w+\.resources\.(custom|labels)\.")
"""Mappings whose keys are the user's: there a key may be absent. Elsewhere every key is there."""


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """The changes from one spec to another, both as `JobSpec.model_dump(mode="json")` gives them."""
    return {
        key: [HIDDEN, HIDDEN] if _is_secret(key) else [old, new]
        for key, old, new in _differing(before, after)
    }


def _is_secret(key: str) -> bool:
    return _SECRET.fullmatch(key) is not None or is_secret_name(key.rpartition(".")[2])


def check_changes(changes: Changes) -> None:
    """Raises ConfigError for the first change that a job that goes on cannot make."""
    for key, (old, new) in changes.items():
        if not _MAY_CHANGE.fullmatch(key):
            raise ConfigError(
                f"{key}: {_shown(old)} cannot become {_shown(new)} in a job that goes on.",
                hint="Begin a new job for it.",
            )


def undone(spec: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The spec as it was before these changes, but for what may be secret."""
    out = _copied(spec)
    for key, (old, _) in changes.items():
        if _SECRET.fullmatch(key) or old == HIDDEN:
            continue
        *path, last = key.split(".")
        place: dict[str, Any] = out
        for part in path:
            place = place[part]
        if old is None and _OF_THE_USERS.match(key):
            place.pop(last, None)
        else:
            place[last] = old
    return out


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differing(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def _copied(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(below) if isinstance(below, Mapping) else below for key, below in value.items()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
