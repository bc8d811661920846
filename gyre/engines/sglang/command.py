"""How SGLang is started as an engine: its arguments and environment, and why each is there.

This module must not import SGLang: it runs in a process, and often an environment, of its own.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre.engines.compile_caches import cache_variables
from gyre.engines.dialect import ADAPTERS_AT_ONCE
from gyre.engines.kind import EngineStart
from gyre.engines.limits import RequestLimits
from gyre.engines.process import EngineCommand
from gyre.engines.sglang.kind import SGLANG
from gyre.engines.weight_loading import LOADER, LOADER_KEY, LOADER_PATH, LOADER_TURNS
from gyre.errors import ConfigError
from gyre.models.adapters import AdapterLimits
from gyre.models.architecture import read_config, vocabulary_of
from gyre.models.errors import ModelFolderError

STREAM_INTERVAL = 8
"""Tokens a chunk: 8 costs an eighth of the messages of 1, and is a fifth of a second of a busy engine's work."""

LOST_WORDS = (
    "Triggering SIGQUIT for cleanup",
    "SIGQUIT received.",
    "Received sigquit from a child process",
)
"""Said when a scheduler has died: SGLang then sleeps 5 s "before crash diagnostics", and its streams are silent."""

_OTHER_LOADERS = ("--custom-weight-loader", "--quantization", "--torchao-config", "--weight-cache-mode")

_OURS = (
    *("--host", "--port", "--model-path", "--api-key", "--admin-api-key"),
    *("--skip-tokenizer-init", "--incremental-streaming-output"),
)

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a dense decoder. SGLang's word for all layers means embedding and output layer too."""

LAUNCHER = "gyre_launch_server"
"""The module that Python runs, in the folder `LOADER_PATH`: SGLang, with the key that `LAUNCHER_KEY` holds."""

LAUNCHER_KEY = "GYRE_ENGINE_API_KEY"


def sglang_command(
    model_path: Path | str,
    *,
    python: str = sys.executable,
    weight_version: str | None = None,
    deterministic: bool = False,
    stream_interval: int = STREAM_INTERVAL,
    api_key: str = "",
    adapters: AdapterLimits | None = None,
    turns: bool = False,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> EngineCommand:
    """SGLang 0.5.17 or newer over the model in `model_path`, by the `python` that it is installed in.

    `deterministic` makes a sample's tokens depend on its seed and the weights alone, and not on what runs beside it
    (`--enable-deterministic-inference`: without it SGLang ignores seeds, with it a request without one gets seed 42).
    It costs throughput. With `turns` Gyre's loader lets it keep what finished requests drew. With `adapters` it takes
    adapters of that size beside its model, which stays as it is. `extra` are the user's own arguments, last, so that
    they win. Raises ConfigError for an argument in `extra` that is Gyre's to give.

    It answers only requests with `api_key`, "" for a random one: some of its endpoints unpickle what they are sent, and
    every user of the machine can reach its port. The key is in its environment, not on its command line.

    Gyre's weight loader goes with it, but where the weights are quantised in the engine (a copy of what was published
    is not what it holds), the user has a loader of his own, or only adapters are loaded.
    """
    _refuse_ours(extra)
    argv = _launch(python, model_path, stream_interval)
    if deterministic:
        argv.append("--enable-deterministic-inference")
    if weight_version is not None:
        argv += ["--weight-version", weight_version]
    api_key = api_key or secrets.token_hex(16)
    if adapters is not None:
        argv += AdapterLimits(adapters.max_rank, adapters.layers or _LINEAR).flags
        argv += ["--max-loras-per-batch", str(ADAPTERS_AT_ONCE)]
    has_no_loader = adapters is not None or _loads_otherwise(model_path, extra)
    loader_key = "" if has_no_loader else secrets.token_hex(16)
    if loader_key:
        argv += ["--custom-weight-loader", LOADER]
    argv += extra
    own = _environment(api_key, loader_key, env or {}, turns=turns)
    limits = RequestLimits(vocabulary_of(model_path), takes_min_p=SGLANG.min_p_by_seed or not deterministic)
    return EngineCommand(tuple(argv), own, api_key, limits, loader_key, LOST_WORDS, reads_apart=True)


def _launch(python: str, model_path: Path | str, stream_interval: int) -> list[str]:
    return [
        *(python, "-m", LAUNCHER),
        *("--model-path", str(model_path)),
        *("--host", "{host}", "--port", "{port}"),
        "--skip-tokenizer-init",  # token ids in and out: the engine never sees text
        "--incremental-streaming-output",  # else every chunk repeats all tokens so far: quadratic
        *("--stream-interval", str(stream_interval)),
        "--skip-server-warmup",  # readiness is asked by /ready; the first request warms it up as well
        "--sleep-on-idle",  # else an idle engine takes a core
    ]


def _refuse_ours(extra: Sequence[str]) -> None:
    for argument in extra:
        name = argument.partition("=")[0]
        if name in _OURS:
            raise ConfigError(
                f"{name} is set by Gyre and cannot be among the engine's extra arguments.",
                hint="Leave it out.",
            )


def _environment(api_key: str, loader_key: str, env: Mapping[str, str], *, turns: bool) -> dict[str, str]:
    own = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health answers at once, for whoever asks it
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_KEY: api_key,
        # Images often tell Python to keep no bytecode. Each of an engine's processes imports some 6,000 modules, which
        # takes 7 s of a core, and 25 s where it compiles them first: at every start, and so at every restart.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    own |= env
    path = own.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(LOADER_PATH), path)))
    if loader_key:
        own[LOADER_KEY] = loader_key
    if turns:
        own[LOADER_TURNS] = "1"
    return own


def command(start: EngineStart) -> EngineCommand:
    """SGLang as a job's instances start it."""
    most = [] if start.max_running is None else ["--max-running-requests", str(start.max_running)]
    context = [] if start.context_length is None else ["--context-length", str(start.context_length)]
    saver = ["--enable-memory-saver"] if start.local else []
    return sglang_command(
        start.folder,
        python=start.python,
        weight_version=start.version,
        deterministic=start.deterministic,
        adapters=start.adapters,
        turns=start.turns,
        extra=[*most, *context, *saver, *start.extra],
        env=cache_variables(),
    )


def _loads_otherwise(model_path: Path | str, extra: Sequence[str]) -> bool:
    if any(argument.partition("=")[0] in _OTHER_LOADERS for argument in extra):
        return True
    try:
        return "quantization_config" in read_config(Path(model_path))
    except ModelFolderError:
        return False  # the engine will say what is wrong with the folder
