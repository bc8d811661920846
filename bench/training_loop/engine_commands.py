"""Other ways to start the engine of a bench: SGLang on CPUs, and SGLang without Gyre's weight loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_plane.follow import Row


def sglang_on_cpu_of(python: str) -> Callable[..., Any]:
    """The real SGLang of that environment, without its kernels."""
    from gyre.testing.sglang_cpu import sglang_on_cpu

    def command(options: Row, folder: Path | str, version: str, *, deterministic: bool = False) -> Any:
        return sglang_on_cpu(
            folder,
            python=python,
            weight_version=version,
            deterministic=deterministic,
            stream_interval=8,
            max_tokens=options["kv_tokens"],
            max_running=options["running"],
        )

    return command


def without_loader(with_it: Callable[..., Any]) -> Callable[..., Any]:
    """`with_it`, without Gyre's weight loader: versions come from the disk."""

    def without(options: Row, folder: Path | str, version: str, *, deterministic: bool = False) -> Any:
        command = with_it(options, folder, version, deterministic=deterministic)
        argv = list(command.argv)
        if "--custom-weight-loader" in argv:
            at = argv.index("--custom-weight-loader")
            del argv[at : at + 2]
        return replace(command, argv=tuple(argv), loader_key="")

    return without
