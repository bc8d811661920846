"""What users touch: the builder, the job, its handle, the client, REST and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre.api.definition.builder import RLJobBuilder
    from gyre.api.definition.rl_job import RLJob

__all__ = ["RLJob", "RLJobBuilder"]

_HOMES = {"RLJob": "gyre.api.definition.rl_job", "RLJobBuilder": "gyre.api.definition.builder"}


def __getattr__(name: str) -> Any:
    """Exports are imported when they are first used (PEP 562), so that `import gyre.api` costs nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
