"""What Gyre asks of an engine and what an engine answers: SGLang's HTTP dialect, as types.

An engine is whatever serves this dialect: SGLang itself, or the embedded torch engine. `EngineClient` speaks it,
the embedded engine's server answers it, and one conformance suite tests whoever answers.

Invariants:
- *disjoint chunks*: however the server streams (cumulative or incremental), each `StreamChunk` holds only tokens that
  no earlier chunk of its request held, in order, each with its log-prob;
- *the seed belongs to the sample*: the random number that decides the token at absolute position `p` of prompt
  and output together depends on `(sampling_seed, p)` alone, so a sample that goes on elsewhere from its last
  token draws what it would have drawn.

This module must not know about HTTP, samples' owners or policy versions beyond their text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

ADAPTERS_AT_ONCE = 8
"""How many models one batch of an engine may have: adapters, and the model alone. SGLang keeps memory for each."""


class PauseMode(StrEnum):
    """What happens to running requests while an engine is paused.

    `abort` ends them, `retract` puts them back into the queue and recomputes their KV cache, `in_place` keeps the
    KV cache and simply stops stepping.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class FinishKind(StrEnum):
    """Why a request ended. `stop` and `length` end a sample; `abort` does not: it goes on elsewhere."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens are drawn. Names and meanings are SGLang's; `temperature` 0 is greedy, `top_k` -1 is off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """Below 2**31. None leaves the draw to the engine, and then no two runs need agree."""

    @property
    def stops(self) -> tuple[int, ...]:
        """The tokens of the request that end a sample."""
        return () if self.ignore_eos else self.stop_token_ids


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sample's next tokens. `rid` has the same length in all requests of a server: engines abort by prefix.

    `input_ids`: int32 `[p]`, the prompt and whatever was generated of the sample already. Requests of different
    `cache_key` share no cached prefix. `chunk_tokens`: how many new tokens a chunk has; 0 for the engine's own number.
    `adapter`: the name of the adapter that the tokens are drawn with; "" for the model alone. An engine that has none
    of this name refuses the request."""

    rid: str
    input_ids: NDArray[np.int32]
    sampling: SamplingParams
    cache_key: str = ""
    chunk_tokens: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """`message` says why for an abort; `matched` is the token that stopped a `stop`, where the engine tells it."""

    kind: FinishKind
    message: str = ""
    matched: int | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start..end` (end exclusive, counted from the request's first new token) came from `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New tokens of one request.

    `token_ids`: int32 `[t]`, `logprobs`: float32 `[t]`, t ≥ 0. `spans` covers all tokens of the request so far, and
    comes from engines that tell it with the last chunk, or with each; `weight_version` is what the engine served when
    it sent the chunk.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    weight_version: str | None = None
    finish: Finish | None = None
    spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full an engine is. Tokens are those in its KV cache; `max_running` and `max_tokens` are its limits."""

    running: int
    waiting: int
    used_tokens: int
    max_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Who an engine is: `model_path`, `weight_version`, and `context_length` (prompt and output together).

    `ranks` processes hold one copy of the model, on `nodes` machines; there are `replicas` of it. `drafts`: it has a
    second model that guesses tokens. `graphs_up_to` is the largest batch that a replica decodes by a CUDA graph; None
    where it has none, or does not say.
    """

    model_path: str
    weight_version: str
    context_length: int | None
    engine_version: str
    ranks: int = 1
    replicas: int = 1
    nodes: int = 1
    drafts: bool = False
    graphs_up_to: int | None = None
