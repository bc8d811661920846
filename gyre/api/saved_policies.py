"""Checkpoints of actors, whatever back end wrote them: the policy in one as a model's folder.

This module must not know of jobs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError
from gyre.extras import how_to_install
from gyre.graph.backends import Backend


def export_saved(
    folder: Path,
    out: Path,
    back_end: Backend,
    *,
    dtype: str = "",
    trust: bool = False,
    adapter: bool = False,
) -> dict[str, Any]:
    """Write `out`, a folder in Hugging Face's layout, from the checkpoint that the back end wrote, or with `adapter`
    its adapter alone: what its own export says of it. Raises ConfigError where what it needs is not installed, or there
    is no adapter."""
    refuse_missing(folder, back_end)
    if adapter and not back_end.trains_adapters:
        raise ConfigError(
            f"{folder} is of a whole model, and has no adapter.", hint="Export without --adapter."
        )
    written: dict[str, Any] = called(back_end.export)(folder, out, dtype=dtype, trust=trust, adapter=adapter)
    return written


def called(path: str) -> Any:
    """The function at `module:function`, which a back end's record names: its module brings torch."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def refuse_missing(folder: Path, back_end: Backend) -> None:
    """Raises ConfigError where reading the back end's checkpoint needs a package that is not installed."""
    from gyre.api.cli.packages import installed

    for module, distribution in back_end.needs.items():
        if installed(distribution) is None:
            raise ConfigError(
                f"{folder} is a checkpoint of {back_end.writer}, and {distribution} is not installed.",
                hint=how_to_install(module) or f"pip install {distribution}",
            )
