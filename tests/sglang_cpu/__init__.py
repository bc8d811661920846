"""SGLang's own server on a CPU without its native kernels: for tests of what Gyre says to it, not for work.

SGLang's CPU engine wants a `sgl_kernel` that is built from source and on no package index. What Gyre tests of SGLang
(its HTTP dialect, scheduler, streaming, pauses, aborts and weight updates) needs none of those kernels. So this starts
the unmodified wheel with the folder `path/` on its PYTHONPATH, which

- gives it a `sgl_kernel` of which every name can be imported and none called, but for the hash behind the seeds, which
  is there in plain torch;
- defines two torchvision operators that torchvision's CUDA wheel cannot define beside a CPU build of torch;
- lets `--enable-deterministic-inference` (which SGLang refuses on a CPU) through for plain torch attention, without the
  Triton matrix kernels that go with it on a GPU.

What that does not show: anything of GPU kernels, CUDA graphs, tensor parallelism or speed. That a seed draws the same
tokens in a batch of another size is shown here for float32 on a CPU, by these means, and not for a GPU.

Versions: `constraints-sglang.txt`. `make test-long PART=sglang` installs them beside Gyre and runs `tests/sglang`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre.engines.process import EngineCommand
from gyre.engines.sglang.command import sglang_command
from gyre.models.adapters import AdapterLimits

SHIM = Path(__file__).with_name("path")

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # else it imports vLLM
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_HOST_IP": "127.0.0.1",  # else its processes meet on the machine's outer address
    "OMP_NUM_THREADS": "1",  # two threads on two busy cores are ten times slower than one
    "HF_HUB_OFFLINE": "1",
}


def sglang_on_cpu(
    model_path: Path | str,
    *,
    python: str,
    weight_version: str | None = None,
    deterministic: bool = True,
    stream_interval: int = 1,
    max_tokens: int = 65_536,
    max_running: int = 64,
    dtype: str = "float32",
    adapters: AdapterLimits | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> EngineCommand:
    """SGLang over the model in `model_path` on one CPU core, by the `python` of an environment that has SGLang.

    `max_tokens` is the size of its KV cache: without a bound it takes all memory.
    """
    return sglang_command(
        model_path,
        python=python,
        weight_version=weight_version,
        deterministic=deterministic,
        adapters=adapters,
        stream_interval=stream_interval,
        extra=(
            *cpu_arguments(max_tokens=max_tokens, dtype=dtype),
            *("--max-running-requests", str(max_running)),
            *extra,
        ),
        env={**_ENVIRONMENT, "PYTHONPATH": str(SHIM), **_without_compiler(deterministic), **(env or {})},
    )


def cpu_arguments(*, max_tokens: int = 65_536, dtype: str = "float32") -> list[str]:
    """What SGLang is told to run on a CPU: `rollouts.engine_args` of a job, beside `cpu_python`."""
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        "--disable-cuda-graph",
        *("--max-total-tokens", str(max_tokens)),
        *("--mem-fraction-static", "0.3"),
        *("--dtype", dtype),
    ]


def cpu_python(folder: Path, python: str) -> Path:
    """An executable in `folder` that is `python` with the environment that SGLang needs on a CPU: for a job's
    `rollouts.engine_python`."""
    variables = {**_ENVIRONMENT, **_without_compiler(True)}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines.append(f'export PYTHONPATH={shlex.quote(str(SHIM))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    script = folder / "sglang-cpu-python"
    script.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.quote(python)} "$@"', ""]))
    script.chmod(0o755)
    return script


def _without_compiler(deterministic: bool) -> dict[str, str]:
    return (
        {"TORCHDYNAMO_DISABLE": "1"} if deterministic else {}
    )  # else the first draw waits for a C++ compiler
