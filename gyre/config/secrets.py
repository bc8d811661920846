"""What of a job's configuration may be secret, and what is shown instead.

Whoever may look at a job need not be its owner, so the values of environment variables are not told, nor are addresses
of webhooks, for who has one may write there. A value that is taken from the environment (`$NAME`) is no secret itself.

Pure: plain data in, plain data out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from gyre.errors import ConfigError
from gyre.redaction import HIDDEN, is_secret_name, values_in, values_of_environment

_REFERENCE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def is_reference(value: str) -> bool:
    """Whether the value is `$NAME`, which stands for an environment variable."""
    return _REFERENCE.fullmatch(value) is not None


def referenced(values: Iterable[str]) -> list[str]:
    """The names of the environment variables that these values stand for, in order."""
    return [found[1] for value in values if (found := _REFERENCE.fullmatch(value))]


def resolved(value: str, environment: Mapping[str, str]) -> str:
    """The value itself, or what the environment has for `$NAME`. Raises ConfigError where it is not set."""
    found = _REFERENCE.fullmatch(value)
    if found is None:
        return value
    if not environment.get(found[1]):
        raise ConfigError(
            f"{value} is not set where the job's master runs.",
            hint=f"Set {found[1]} before the cluster starts, or give it in the job's `env`.",
        )
    return environment[found[1]]


def is_address(value: str) -> bool:
    """Whether a webhook can be at this address."""
    if any(character.isspace() or not character.isprintable() for character in value):
        return False
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets of IPv6 that are not closed
        return False


def is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable()


def shown_notify(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`observe.notify` as others may see it: of an address its host, of a command its program, of headers the names."""
    return [
        {
            **entry,
            "webhook": _shown_address(entry.get("webhook", "")),
            "command": [part if not at else HIDDEN for at, part in enumerate(entry.get("command", ()))],
            "headers": {
                name: value if is_reference(value) else HIDDEN
                for name, value in entry.get("headers", {}).items()
            },
        }
        for entry in entries
    ]


def secrets_of_notify(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """The values that `shown_notify` hides."""
    found: set[str] = set()
    for entry in entries:
        webhook = entry.get("webhook", "")
        given = [webhook, *entry.get("command", ())[1:], *entry.get("headers", {}).values()]
        if webhook and not is_reference(webhook):
            given.append(webhook.partition("://")[2].partition("/")[2])  # a log may have the path alone
        found |= {str(value) for value in given if value and not is_reference(value)}
    return found


def secret_values(spec: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The values that must not leave, as `gyre.redaction.Secrets` learns them: of the job's configuration, those of its
    environment variables, whom it notifies and what is secret by name or shape; and of this process's environment, with
    the variables that the configuration takes."""
    for part in (spec, *(spec.get("roles") or {}).values()):
        for name, value in ((part or {}).get("env") or {}).items():
            yield str(value), is_secret_name(str(name))
    notify = (spec.get("observe") or {}).get("notify") or ()
    yield from ((value, True) for value in secrets_of_notify(notify))
    yield from values_in(spec)
    yield from values_of_environment(environment, _references(spec))


def _references(data: Any) -> Iterator[str]:
    """The variables that stand as `$NAME` in plain data."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _references(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _references(value)
    elif isinstance(data, str):
        yield from referenced([data])


def _shown_address(webhook: str) -> str:
    if not webhook or is_reference(webhook):
        return webhook
    parts = urlsplit(webhook)
    return f"{parts.scheme}://{parts.hostname or ''}/{HIDDEN}"
