"""Functions of the user's own with the options that the job gives them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from gyre.config.plugins import PluginKind
from gyre.errors import ConfigError, nearest


def with_options(
    kind: PluginKind, name: str, path: str, options: Mapping[str, Any], python_path: Iterable[str] = ()
) -> Any:
    """What `name` stands for, with these keyword arguments; `path` is where they stand in the job. Raises ConfigError
    where it cannot be loaded or called, or has no parameter of an option's name."""
    found = kind.load(name, python_path)
    if not callable(found):
        raise ConfigError(
            f"{kind.setting}: {name} is a {type(found).__name__}, expected a {kind.noun}: a callable."
        )
    known = inspect.signature(found).parameters
    for key in options:
        if key not in known:
            raise ConfigError(f"{path}.{key}: {name} takes no such option; {nearest(key, known)}")
    return partial(found, **options) if options else found
