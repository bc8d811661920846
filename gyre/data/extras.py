"""Packages that only data sets need, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gyre.errors import ConfigError


def needed(module: str, why: str) -> Any:
    """The module. Raises ConfigError if its package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{why} needs the package {module.partition('.')[0]}, which is not installed.",
            hint="Install gyre-rl[data].",
        ) from error
