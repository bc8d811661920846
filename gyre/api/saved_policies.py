"""Checkpoints of actors, whatever back end wrote them: which one it was, and the policy in it as a model's folder.

This module must not know of jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from gyre.errors import ConfigError
from gyre.extras import how_to_install

BackEnd = Literal["torch", "megatron", "fsdp"]

_NEEDS: dict[BackEnd, tuple[str, str, str]] = {
    "megatron": ("Megatron's ranks", "megatron-core", "megatron"),
    "fsdp": ("FSDP2's ranks", "transformers", "transformers"),
}
"""Whose checkpoint it is, the distribution that reading it needs, and the module that names its extra."""


def written_by(folder: Path) -> BackEnd | None:
    """The back end that wrote the checkpoint; None where it is none."""
    from gyre.workloads.fsdp.formats import FORMAT, METADATA
    from gyre.workloads.torch.saved_policy import checkpoint_file

    if (folder / METADATA).is_file():
        return "fsdp" if _format_in(folder / METADATA) == FORMAT else "megatron"
    return "torch" if checkpoint_file(folder, 0).is_file() else None


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
    whose, distribution, module = _NEEDS[back_end]
    if installed(distribution) is None:
        raise ConfigError(
            f"{folder} is a checkpoint of {whose}, and {distribution} is not installed.",
            hint=how_to_install(module) or f"pip install {distribution}",
        )


def _format_in(file: Path) -> Any:
    """The format that `actor.json` names; None where it cannot be read, which its back end's own reader explains."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None
