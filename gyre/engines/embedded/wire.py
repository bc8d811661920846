"""SGLang's JSON: bodies to requests, progress to replies. No I/O.

Invariants:
- *refused, not ignored*: a sampling parameter that would change what is drawn and is not served here is refused;
  unknown fields beside `sampling_params` are ignored, as SGLang does;
- *incremental*: a stream's chunks hold disjoint `output_ids` and `output_token_logprobs`, while `completion_tokens` and
  `output_token_logprobs_length` count from the start: SGLang's `--incremental-streaming-output`.

This module must not know about the core's thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.engines.dialect import EngineLoad
from gyre.engines.embedded.core import Limits
from gyre.engines.embedded.engine_requests import Ending, RequestUpdate
from gyre.engines.embedded.errors import BadRequest
from gyre.engines.embedded.token_sampling import Sampling

_SERVED = (
    "max_new_tokens",
    "min_new_tokens",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "sampling_seed",
    "stream_interval",
)
_WITHOUT_EFFECT = {
    # What SGLang's other parameters must be, for they are not served here; None is always accepted.
    "stop": [],
    "stop_regex": [],
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "choice": None,
    "logit_bias": {},
    "custom_params": None,
    "beam_width": None,
    "watermark": None,
}
_FOR_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_KNOWN = (*_SERVED, *_WITHOUT_EFFECT, *_FOR_TEXT)
_SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class AskedSample:
    """One sample that a `/generate` body asks for. `stream_interval` None is the server's own; `adapter` is the name of
    the one that it is generated with, "" for the model alone."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool
    stream_interval: int | None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A `/generate` body. `batched`: it asked with lists, and is answered with a list."""

    prompts: list[AskedSample]
    batched: bool
    stream: bool


class UnknownField(BadRequest):
    """SGLang words this one like its struct decoder, and as a plain string."""


def read_generate(body: Any, *, vocab: int, limits: Limits) -> GenerateBody:
    """Raises BadRequest with a sentence for whatever cannot be served."""
    if not isinstance(body, dict):
        raise BadRequest("The body of /generate must be a JSON object.")
    ids = body.get("input_ids")
    if not isinstance(ids, list):
        raise BadRequest(
            "input_ids is missing: this engine has no tokenizer and takes token ids only.",
            hint="Send input_ids, a list of integers or a list of such lists.",
        )
    batched = bool(ids) and isinstance(ids[0], list)
    rows: list[Any] = ids if batched else [ids]
    count = len(rows)
    rids = _spread(body.get("rid"), count, "rid")
    params = _spread(body.get("sampling_params"), count, "sampling_params")
    wants_logprob = _spread(body.get("return_logprob", False), count, "return_logprob")
    adapters = _spread(body.get("lora_path"), count, "lora_path")
    prompts = []
    for row, rid, given, wanted, adapter in zip(rows, rids, params, wants_logprob, adapters, strict=True):
        if adapter is not None and not isinstance(adapter, str):
            raise BadRequest(f"lora_path must be the name of an adapter, not {adapter!r}.")
        if rid is not None and not isinstance(rid, str):
            raise BadRequest(f"rid must be a string, not {rid!r}.")
        sampling, interval = read_sampling(given, vocab=vocab)
        _check_tokens(row, vocab, sampling, limits)
        prompts.append(
            AskedSample(rid or uuid.uuid4().hex, row, sampling, bool(wanted), interval, adapter or "")
        )
    if len({prompt.rid for prompt in prompts}) < count:
        raise BadRequest("Duplicate request ID detected in one body: each prompt needs a rid of its own.")
    return GenerateBody(prompts, batched, body.get("stream", False) is True)


def read_sampling(params: Any, *, vocab: int) -> tuple[Sampling, int | None]:
    """The parameters, and `stream_interval`. Raises BadRequest."""
    given = _served(params)

    def number(key: str, default: float, says: str, fits: Callable[[float], bool]) -> float:
        value = given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise BadRequest(f"{key} must be {says}, got {value!r}.")
        return value

    def whole(key: str, default: int, says: str, fits: Callable[[float], bool]) -> int:
        return int(number(key, default, says, lambda value: isinstance(value, int) and fits(value)))

    stops = given.get("stop_token_ids", [])
    if not isinstance(stops, list) or not all(_is_token(token, vocab) for token in stops):
        raise BadRequest(f"stop_token_ids must be a list of token ids below {vocab}, got {stops!r}.")
    ignore_eos = given.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise BadRequest(f"ignore_eos must be true or false, got {ignore_eos!r}.")
    max_new = whole("max_new_tokens", 128, "an integer of at least 1", lambda v: v >= 1)
    top_k = whole("top_k", -1, "-1 (off) or an integer of at least 1", lambda v: v == -1 or v >= 1)
    sampling = Sampling(
        max_new_tokens=max_new,
        min_new_tokens=whole(
            "min_new_tokens",
            0,
            f"an integer from 0 to max_new_tokens ({max_new})",
            lambda v: 0 <= v <= max_new,
        ),
        temperature=_greedy_at_zero(
            number("temperature", 1.0, "a number from 0 to 1e6", lambda v: 0 <= v <= 1e6)
        ),
        top_p=number("top_p", 1.0, "above 0 and at most 1", lambda v: 0 < v <= 1),
        top_k=0 if top_k < 0 or top_k >= vocab else top_k,
        min_p=number("min_p", 0.0, "from 0 to 1", lambda v: 0 <= v <= 1),
        stop_token_ids=frozenset(stops),
        ignore_eos=ignore_eos,
        seed=whole("sampling_seed", 0, "an integer from 0 to 2**63 - 1", lambda v: 0 <= v < _SEED_LIMIT)
        if "sampling_seed" in given
        else None,
    )
    interval = whole("stream_interval", 1, "an integer of at least 1", lambda v: v >= 1)
    return sampling, interval if "stream_interval" in given else None


def _served(params: Any) -> dict[str, Any]:
    """Of the parameters those that the engine serves. Raises BadRequest, and UnknownField for one that nobody knows."""
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise BadRequest(f"sampling_params must be an object, not {params!r}.")
    for key, value in params.items():
        if key not in _KNOWN:
            expected = ", ".join(f"`{name}`" for name in _KNOWN)
            raise UnknownField(f"unknown field `{key}`, expected one of {expected}")
        if key in _WITHOUT_EFFECT and value is not None and value != _WITHOUT_EFFECT[key]:
            raise BadRequest(
                f"sampling_params.{key} is not served by the embedded engine.",
                hint="Leave it out, or run SGLang.",
            )
    return {key: params[key] for key in _SERVED if params.get(key) is not None}


def _greedy_at_zero(temperature: float) -> float:
    """SGLang's limit, below which it divides by nothing and takes the likeliest token."""
    return 0.0 if temperature < 1e-6 else float(temperature)


def _check_tokens(row: Any, vocab: int, sampling: Sampling, limits: Limits) -> None:
    if not isinstance(row, list) or not row:
        raise BadRequest("input_ids must hold at least one token for each prompt.")
    if not all(type(token) is int for token in row) or min(row) < 0 or max(row) >= vocab:
        wrong = next(token for token in row if not _is_token(token, vocab))
        raise BadRequest(
            f"input_ids holds {wrong!r}, which is no token id below the vocabulary size {vocab}."
        )
    needed = len(row) + sampling.max_new_tokens
    most, what = limits.context_length, "the model's context length"
    if limits.max_tokens < most:
        most, what = limits.max_tokens, "max_total_tokens"
    if needed > most:
        raise BadRequest(
            f"{len(row)} input tokens and max_new_tokens {sampling.max_new_tokens} are {needed} tokens, which "
            f"exceeds {what} of {most}.",
            hint="Ask for fewer new tokens.",
        )


def _is_token(token: Any, vocab: int) -> bool:
    return type(token) is int and 0 <= token < vocab


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a list holds them, anything else is for all."""
    if isinstance(value, list):
        if len(value) != count:
            raise BadRequest(f"{name} has {len(value)} entries for {count} prompts.")
        return value
    if name == "rid" and value is not None and count > 1:
        return [f"{value}_{index}" for index in range(count)]
    return [value] * count


def chunk_of(update: RequestUpdate, *, return_logprob: bool, index: int | None = None) -> dict[str, Any]:
    """A stream's chunk, or with everything in one update the reply to a request that is no stream."""
    request, ending = update.request, update.ending
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None if ending is None else finish_of(ending, update.total),
        "prompt_tokens": request.prompt_length,
        "weight_version": update.weight_version,
        "completion_tokens": update.total,
        "cached_tokens": request.cached,
        "num_retractions": request.retractions,
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(update.logprobs, update.tokens, strict=True)
        ]
        meta["output_token_logprobs_length"] = update.total
    meta["weight_versions"] = [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in request.spans(update.total)
    ]
    if ending is not None:
        meta["e2e_latency"] = time.monotonic() - request.created_s
    chunk: dict[str, Any] = {"output_ids": update.tokens, "meta_info": meta}
    if index is not None:
        chunk["index"] = index
    return chunk


def finish_of(ending: Ending, total: int) -> dict[str, Any]:
    if ending.kind == "stop":
        return {"type": "stop", "matched": ending.matched}
    if ending.kind == "length":
        return {"type": "length", "length": total}
    return {
        "type": "abort",
        "message": ending.message,
        "status_code": ending.status_code,
        "err_type": None if ending.status_code is None else "InternalServerError",
    }


def error_of(message: str, status: int) -> dict[str, Any]:
    """What SGLang sends for an error, in a reply or as a stream's chunk."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "code": status, "retryable": status >= 500}}


def loads_of(load: EngineLoad, *, tokens_per_s: float, engine_version: str) -> dict[str, Any]:
    return {
        "timestamp": time.time(),
        "version": engine_version,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": load.running,
                "num_waiting_reqs": load.waiting,
                "num_used_tokens": load.used_tokens,
                "token_usage": load.used_tokens / load.max_tokens,
                "gen_throughput": tokens_per_s,
                "max_total_num_tokens": load.max_tokens,
                "max_running_requests": load.max_running,
            }
        ],
    }
