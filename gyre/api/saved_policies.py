"""Checkpoints of actors, whatever back end wrote them: the policy in one as a model's folder.

This module must not know of jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gyre.errors import ConfigError
from gyre.extras import how_to_install
from gyre.workloads.learner.checkpoint_identity import WRITERS, BackEnd

_NEEDS: dict[BackEnd, tuple[str, str]] = {
    "megatron": ("megatron-core", "megatron"),
    "fsdp": ("transformers", "transformers"),
}
"""The distribution that reading its checkpoints needs, and the module that names its extra."""


def export_saved(
    folder: Path,
    out: Path,
    back_end: BackEnd,
    *,
    dtype: str = "",
    trust: bool = False,
    adapter: bool = False,
) -> dict[str, Any]:
    """Write `out`, a folder in Hugging Face's layout, from the checkpoint that the back end wrote, or with `adapter`
    its adapter alone: what its own export says of it. Raises ConfigError where what it needs is not installed, or there
    is no adapter."""
    refuse_missing(folder, back_end)
    if adapter and back_end != "fsdp":
        raise ConfigError(
            f"{folder} is of a whole model, and has no adapter.", hint="Export without --adapter."
        )
    if back_end == "torch":
        from gyre.workloads.torch.saved_policy import export_policy

        return export_policy(folder, out, dtype=dtype)
    if back_end == "fsdp":
        from gyre.workloads.fsdp.conversion import export_checkpoint as export_of_fsdp

        return export_of_fsdp(folder, out, dtype=dtype, adapter=adapter)
    from gyre.workloads.megatron.checkpoints.conversion import export_checkpoint

    return export_checkpoint(folder, out, dtype=dtype, trust=trust)


def refuse_missing(folder: Path, back_end: BackEnd) -> None:
    """Raises ConfigError where reading the back end's checkpoint needs a package that is not installed."""
    from gyre.api.cli.packages import installed

    if back_end not in _NEEDS:
        return
    distribution, module = _NEEDS[back_end]
    if installed(distribution) is None:
        raise ConfigError(
            f"{folder} is a checkpoint of {WRITERS[back_end]}, and {distribution} is not installed.",
            hint=how_to_install(module) or f"pip install {distribution}",
        )
