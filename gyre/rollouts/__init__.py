"""The rollout plane: prompts, groups and samples, and the ledger that accounts for every one of them.

Exports are resolved on first use: the names of engines (`gyre.rollouts.engines`) are asked where no sample is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups, unpack_groups

__all__ = ["Group", "Sample", "VersionRun", "pack_groups", "unpack_groups"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("gyre.rollouts.samples"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
