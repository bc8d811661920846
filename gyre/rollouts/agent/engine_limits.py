"""How much an engine is given at once, and why: what the user set, else what the engine says of itself.

- *samples at once*: as many as the engine allows, and no more than its largest CUDA graph holds. Beyond that each
  decode step is launched kernel by kernel, which takes a small model twice the time;
- *KV memory*: what the engine has found for it. The router's margin over it adapts while the engine runs
  (`gyre.rollouts.scheduling.load`);
- *tokens in a chunk of a sample's stream*: an engine's HTTP process works by the chunk, whatever is in it, and all
  samples that began together send theirs at the same decode step. SGLang 0.5.17 on an H200 with 512 running samples of
  a 0.6B model made 51,000 tokens a second in chunks of 8, with that process busy for 0.7 of the time, and 62,000 to
  67,000 in chunks of 32, with half. What is in an unfinished chunk is generated again if the engine is killed; so
  chunks are small where few run.

This module must not know how an engine is asked, or what becomes of the limits.
"""

from __future__ import annotations

from gyre.engines.dialect import EngineInfo, EngineLoad
from gyre.engines.limits import UNKNOWN_KV_TOKENS, UNKNOWN_RUNNING
from gyre.rollouts.protocol.frames import EngineLimits


def limits_unknown(max_running: int | None, kv_tokens: int | None, why: str) -> EngineLimits:
    """The limits of an engine that has not said any: the user's, else common ones."""
    return EngineLimits(
        max_running=max_running or UNKNOWN_RUNNING,
        kv_tokens=kv_tokens or UNKNOWN_KV_TOKENS,
        why=why,
    )


def limits_of(
    load: EngineLoad, info: EngineInfo, *, max_running: int | None, kv_tokens: int | None
) -> EngineLimits:
    """The limits of a running engine. `max_running` and `kv_tokens` are what the user set; None leaves them to it."""
    running, running_why = _running(load, info, max_running)
    if kv_tokens is not None:
        kv, kv_why = min(kv_tokens, load.max_tokens), "as rollouts.kv_tokens says"
        if kv < kv_tokens:
            kv_why = f"the engine has no more, rollouts.kv_tokens says {kv_tokens:,}"
    else:
        kv, kv_why = load.max_tokens, "all that the engine has"
    return EngineLimits(
        max_running=running,
        kv_tokens=kv,
        why=f"{running:,} samples at once: {running_why}; {kv:,} tokens of KV memory: {kv_why}",
    )


def _running(load: EngineLoad, info: EngineInfo, wanted: int | None) -> tuple[int, str]:
    allowed, graphs = load.max_running, info.graphs_up_to
    if wanted is not None:
        if wanted > allowed:
            return allowed, f"the engine allows no more, rollouts.max_running says {wanted:,}"
        return wanted, "as rollouts.max_running says"
    if graphs is not None and graphs * info.replicas < allowed:
        graphs *= info.replicas
        return graphs, f"its CUDA graphs hold no more, the engine allows {allowed:,}"
    return allowed, "the engine allows no more"


CHUNKS_A_STEP = 16
"""How many chunks a decode step may bring on average."""

LARGEST = 32
"""A third of a second at a hundred tokens a second: no sample is unheard for longer."""


def chunk_tokens(running: int) -> int:
    """Tokens in a chunk where so many samples run; 0 for the engine's own number, which suits up to 128."""
    wanted = running // CHUNKS_A_STEP
    return min(wanted, LARGEST) if wanted > 8 else 0
