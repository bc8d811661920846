"""How vLLM is started as an engine: Gyre's server around its engine, by vLLM's own Python.

`gyre/engines/path/gyre_vllm_server.py` serves the dialect over `AsyncLLM`, vLLM's engine as a library, and none of
vLLM's own routes, which would let every user of the machine load weights. `gyre/engines/path/gyre_vllm_worker.py` is in
its workers: it loads Gyre's versions, and draws by seed and position.

This module must not import vLLM: it runs in a process, and an environment, of its own.
"""

from __future__ import annotations

import os
import secrets

from gyre.engines.compile_caches import cache_variables
from gyre.engines.dialect import ADAPTERS_AT_ONCE
from gyre.engines.kind import EngineStart
from gyre.engines.limits import RequestLimits
from gyre.engines.process import EngineCommand
from gyre.engines.sglang.command import LAUNCHER_KEY, STREAM_INTERVAL
from gyre.engines.weight_loading import LOADER_KEY, LOADER_PATH
from gyre.errors import ConfigError
from gyre.models.architecture import vocabulary_of

SERVER = "gyre_vllm_server"
"""The module that vLLM's Python runs, in the folder `LOADER_PATH`."""

_OURS = (
    *("--host", "--port", "--model", "--weight-version", "--by-seed", "--chunk-tokens", "--stream-interval"),
    *("--skip-tokenizer-init", "--worker-extension-cls", "--logprobs-mode", "--generation-config"),
)

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks of adapters that vLLM can be started for; another is rounded up."""


def vllm_command(start: EngineStart) -> EngineCommand:
    """vLLM 0.32 over the model in `start.folder`, with keys that each start makes anew. Raises ConfigError for an
    argument in `extra` that is Gyre's to give.

    Where seeds count (`--by-seed`; they are ignored otherwise), each row of a batch is drawn by itself, and GPUs
    compute what does not depend on the batch (`VLLM_BATCH_INVARIANT`): both cost throughput.
    """
    for argument in start.extra:
        if (name := argument.partition("=")[0]) in _OURS:
            raise ConfigError(
                f"{name} is set by Gyre and cannot be among the engine's extra arguments.",
                hint="Leave it out.",
            )
    argv = [
        *(start.python, "-m", SERVER),
        *("--model", str(start.folder), "--host", "{host}", "--port", "{port}"),
        *("--weight-version", start.version, "--chunk-tokens", str(STREAM_INTERVAL)),
    ]
    if start.max_running is not None:
        argv += ["--max-num-seqs", str(start.max_running)]
    if start.context_length is not None:
        argv += ["--max-model-len", str(start.context_length)]
    if start.deterministic:
        argv.append("--by-seed")
    if start.adapters is not None:
        rank = next((rank for rank in _RANKS if rank >= start.adapters.max_rank), start.adapters.max_rank)
        argv += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(ADAPTERS_AT_ONCE)]
    api_key, loader_key = secrets.token_hex(16), "" if start.adapters is not None else secrets.token_hex(16)
    path = os.environ.get("PYTHONPATH", "")
    env = {
        **cache_variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(LOADER_PATH), path))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # as SGLang's: each of its processes imports thousands of modules
        "VLLM_NO_USAGE_STATS": "1",  # it would report to vLLM's makers
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the worker's part is written to the first one's sampler
        LAUNCHER_KEY: api_key,
        LOADER_KEY: loader_key,
    }
    limits = RequestLimits(vocabulary_of(start.folder))
    return EngineCommand((*argv, *start.extra), env, api_key, limits, loader_key)
