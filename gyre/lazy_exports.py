"""Exports that are imported when they are first used (PEP 562), so that naming a package imports nothing of weight.

__getattr__ = lazy(__name__, {"ChatTemplate": "templates", "JobHandle": "gyre.api.handle"})
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that exports these names: each from a module of the package's own, or from one
    whose name begins with `gyre.`. Raises AttributeError for any other name."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        whole = module if module.startswith("gyre.") else f"{package}.{module}"
        return getattr(importlib.import_module(whole), name)

    return find
