"""How the embedded engine is started. This module must not import torch."""

from __future__ import annotations

import secrets

from gyre.engines.embedded import KEY_VARIABLE
from gyre.engines.kind import EngineStart
from gyre.engines.limits import UNKNOWN_KV_TOKENS, UNKNOWN_RUNNING
from gyre.engines.process import EngineCommand
from gyre.engines.sglang.command import STREAM_INTERVAL


def command(start: EngineStart) -> EngineCommand:
    """The embedded engine, with a key that each start makes anew."""
    argv = [
        *(start.python, "-m", "gyre.engines.embedded"),
        *("--model-path", str(start.folder), "--host", "{host}", "--port", "{port}"),
        *(
            "--weight-version",
            start.version,
            "--max-running-requests",
            str(start.max_running or UNKNOWN_RUNNING),
        ),
        *("--max-total-tokens", str(start.kv_tokens or UNKNOWN_KV_TOKENS)),
        *("--stream-interval", str(STREAM_INTERVAL)),
        *(start.adapters.flags if start.adapters is not None else ()),
    ]
    if start.context_length is not None:
        argv += ["--context-length", str(start.context_length)]
    key = secrets.token_hex(16)
    return EngineCommand((*argv, *start.extra), {KEY_VARIABLE: key}, key)
