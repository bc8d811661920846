"""How an engine of a bench is started: SGLang on a GPU, or the embedded engine on CPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpu_plane.follow import Row

SGLANG_EXTRA = (
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
)


API_KEY = "bench"
"""Of every engine here, so that a bench can ask those that its agents have started."""


def engine_command(options: Row, folder: Path | str, version: str, *, deterministic: bool = False) -> Any:
    from gyre.engines.process import EngineCommand
    from gyre.engines.sglang import STREAM_INTERVAL, sglang_command

    if options["engine"] == "sglang":
        extra = [
            *SGLANG_EXTRA,
            *("--cuda-graph-max-bs", str(options["running"])),
            *("--max-running-requests", str(options["running"])),
            *("--max-total-tokens", str(options["kv_tokens"])),
            *("--mem-fraction-static", str(options["memory"])),
            *(["--enable-memory-saver"] if options.get("local") and options.get("saver", True) else []),
        ]
        env = {"CUDA_VISIBLE_DEVICES": str(options["gpu"]), "HF_HUB_OFFLINE": "1"}
        return sglang_command(
            folder, weight_version=version, deterministic=deterministic, api_key=API_KEY, extra=extra, env=env
        )
    argv = [
        *(sys.executable, "-m", "gyre.engines.embedded"),
        *("--model-path", str(folder), "--host", "{host}", "--port", "{port}"),
        *("--stream-interval", str(STREAM_INTERVAL), "--weight-version", version),
        *("--max-running-requests", str(options["running"]), "--max-total-tokens", str(options["kv_tokens"])),
    ]
    return EngineCommand(tuple(argv), {"OMP_NUM_THREADS": "1"})
