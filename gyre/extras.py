"""Packages that only a part of Gyre needs, imported on first use, and the extra of `gyre-rl` that brings each.

`pip install gyre-rl` alone plans, submits and watches jobs. What trains and generates is in extras.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gyre.errors import ConfigError

EXTRA_OF = {
    "torch": "torch",
    "megatron": "megatron",
    "transformers": "fsdp",
    "sglang": "sglang",
    "jinja2": "data",
    "tokenizers": "data",
    "renderers": "agents",
    "math_verify": "math",
    "psycopg": "postgres",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "opentelemetry": "otel",
}
"""By the name that is imported, the extra."""


def installed(module: str) -> bool:
    """Whether it can be imported, as far as can be seen without importing it: torch takes seconds."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package above it is missing, or is half imported
        return sys.modules.get(module.partition(".")[0]) is not None


def how_to_install(module: str | None) -> str:
    """The command that installs a package of an extra; "" for any other package."""
    extra = EXTRA_OF.get((module or "").partition(".")[0])
    return f"pip install 'gyre-rl[{extra}]'" if extra else ""


def needed(module: str, why: str) -> Any:
    """The module. Raises ConfigError if its package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(module, why) from error


def missing(module: str, why: str) -> ConfigError:
    """The error for a package that is not installed: what needs it, and how to install it."""
    package = module.partition(".")[0]
    return ConfigError(
        f"{why} needs the package {package}, which is not installed.", hint=f"{how_to_install(module)}."
    )
