"""What an engine's replies say: the JSON of SGLang's dialect, read into the dialect's types. No I/O.

Invariants:
- *disjoint chunks*: `StreamReader` gives each token once, whether the server sends each time all tokens so far
  (SGLang's default) or only new ones (`--incremental-streaming-output`). `completion_tokens` counts all tokens of the
  request in both; what it says beyond the tokens already given is new, and how many ids came along tells which of
  the two the server does;
- *a token has its log-prob*: ids and log-probs come in pairs, of the same token, and every log-prob is a finite
  number; anything else is EngineProtocolError, and no token of that chunk is given;
- *spans cover*: `spans` is empty or covers all tokens of the request so far without gap;
- *no more than asked for*: no token beyond `max_new_tokens`, none that the model does not have, and no event larger
  than so many tokens need.

An engine runs other people's code, and may send anything: whatever it is, it is read or raises an EngineError.

This module must not know about sockets or deadlines.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np
import orjson

from gyre.engines.dialect import (
    EngineInfo,
    EngineLoad,
    Finish,
    FinishKind,
    GenerateRequest,
    StreamChunk,
    VersionSpan,
)
from gyre.engines.errors import EngineError, EngineFailed, EngineProtocolError, EngineRefused

_QUOTED = 300
"""How many characters of an engine's reply an error quotes."""

_DEEPEST_WORDS = 8
"""How deep in an error reply its words are looked for."""

_EVENT_BYTES, _EVENT_BYTES_PER_TOKEN = 1 << 20, 256
"""Largest event of a stream: what SGLang says about a request, and for each token its id, its log-prob and its text."""

_LONGEST_NAME = 4096
"""Most characters of a path, a version or another name."""

_MOST_RUNNING = 1 << 20
_MOST_TOKENS = (1 << 40) - 1
"""Most of what an engine may say it has: as many as the rollout protocol can tell the manager."""

_MOST_RANKS = 1 << 8
"""Most ranks along one axis. The agent makes a list as long as all of them."""

LOGPROB_SLACK = 1e-2
"""How far above 0 a log-prob may be: float32's and bfloat16's rounding, which differs from engine to engine."""
_LOWEST_LOGPROB = float(np.finfo(np.float32).min)

_UNREADABLE = (LookupError, TypeError, ValueError, OverflowError, AttributeError)
"""What reading a reply raises if the reply has another shape."""


def generate_body(request: GenerateRequest) -> bytes:
    """The JSON that asks for `request` as a stream with log-probs."""
    ids = np.ascontiguousarray(request.input_ids)
    return _body(request.rid, ids, _params(request), request.cache_key, request.adapter)


def generate_many_body(requests: Sequence[GenerateRequest]) -> bytes:
    """The same for several at once, whose chunks come in one stream, each with the `index` of its request."""
    return _body(
        [request.rid for request in requests],
        [np.ascontiguousarray(request.input_ids) for request in requests],
        [_params(request) for request in requests],
        [request.cache_key for request in requests],
        [request.adapter for request in requests],
    )


def _body(rid: Any, input_ids: Any, params: Any, cache_key: Any, adapter: Any) -> bytes:
    body = {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": params,
        "stream": True,
        "return_logprob": True,
    }
    if any(cache_key):  # of a list: if any of them has one
        body["extra_key"] = cache_key
    if any(adapter):
        body["lora_path"] = adapter
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _params(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.sampling_seed is not None:
        params["sampling_seed"] = sampling.sampling_seed
    if request.chunk_tokens:
        params["stream_interval"] = request.chunk_tokens
    return params


class EventLines:
    """Splits the bytes of a server-sent stream into its events, in time linear in the bytes.

    `done` after the closing `[DONE]`. Blank lines and comments (which keep a proxy awake) are no events.
    """

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: length of the longest line."""
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._most_bytes = most_bytes
        self.done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete, each without its `data:`. Raises EngineProtocolError for a line that is
        too long."""
        lines = data.split(b"\n")
        self._partial_bytes += len(lines[0])
        if max(self._partial_bytes, len(lines[-1])) > self._most_bytes:
            raise EngineProtocolError(
                f"The engine's stream holds an event of more than {self._most_bytes} bytes.",
                hint="No chunk of tokens needs as many. What came before stands; let another engine go on from there.",
            )
        if len(lines) == 1:
            self._partial.append(data)
            return []
        lines[0] = b"".join([*self._partial, lines[0]])
        self._partial = [lines.pop()]
        self._partial_bytes = len(self._partial[0])
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if events and events[-1] == b"[DONE]":
            self.done = True
            events.pop()
        return events


def most_event_bytes(requests: Sequence[GenerateRequest]) -> int:
    """Length of the longest event that a stream of these requests may hold."""
    return _EVENT_BYTES + _EVENT_BYTES_PER_TOKEN * max(
        request.sampling.max_new_tokens for request in requests
    )


class StreamReader:
    """Reads the events of one `/generate` stream in order. `finished` after the chunk with the finish.

    A sample whose last token is one of `stops` has stopped. SGLang 0.5.17 calls its end `length` where that token is
    also the last that the request allows; 0.5.23 calls it `stop`.
    """

    def __init__(self, request: GenerateRequest, vocabulary: int | None = None) -> None:
        """Token ids are below `vocabulary`; None where it is not known."""
        self._rid = request.rid
        self._stops: Collection[int] = request.sampling.stops
        self._most_tokens = request.sampling.max_new_tokens
        self._vocabulary = 1 << 31 if vocabulary is None else vocabulary
        self._last: int | None = None
        """The last token."""
        self.seen = 0
        """Tokens that came so far."""
        self.finished = False

    def read(self, event: bytes) -> StreamChunk:
        """The chunk that this event (the JSON after `data:`) holds.

        Raises EngineProtocolError for what makes no sense, EngineRefused and EngineFailed for what the engine says of
        itself that it did not do.
        """
        try:
            body = orjson.loads(event)
        except orjson.JSONDecodeError as error:
            self._nonsense(f"no JSON ({error})", event)
        return self.read_body(body, event)

    def read_body(self, body: Any, event: bytes) -> StreamChunk:
        """The same, of an event that was parsed already."""
        try:
            return self._chunk(body)
        except _UNREADABLE as error:
            self._nonsense(f"not a chunk ({type(error).__name__}: {error})", event)

    def _chunk(self, body: dict[str, Any]) -> StreamChunk:
        if "error" in body:
            raise said_no(_status_of(body["error"]), words_of(body), f"request {self._rid}")
        meta = body["meta_info"]
        finish = self._finish(meta["finish_reason"])
        total = meta["completion_tokens"]
        if type(total) is not int or total > self._most_tokens:
            raise ValueError(
                f"{repr(total)[:20]} completion_tokens, where {self._most_tokens} were asked for"
            )
        ids, logprobs = self._new_tokens(body["output_ids"], meta, total, finish)
        if len(ids):
            self._last = int(ids[-1])
        if finish is not None and finish.kind is FinishKind.LENGTH and self._last in self._stops:
            finish = Finish(FinishKind.STOP, matched=self._last)
        spans = _spans(meta.get("weight_versions") or (), total, is_last=finish is not None)
        version = meta.get("weight_version")
        chunk = StreamChunk(ids, logprobs, None if version is None else _name(version), finish, spans)
        self.seen = total
        self.finished = finish is not None
        return chunk

    def _new_tokens(
        self, ids: list[int], meta: dict[str, Any], total: int, finish: Finish | None
    ) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.float32]]]:
        new = total - self.seen
        if new <= 0:
            if new < 0:
                raise ValueError(f"completion_tokens fell from {self.seen} to {total}")
            # SGLang repeats the last token when it aborts a request that waits: it is not a new one.
            return np.empty(0, np.int32), np.empty(0, np.float32)
        pairs: list[Sequence[Any]] = meta["output_token_logprobs"]
        came = len(ids)
        if came == total == len(pairs):  # cumulative, or the first chunk of either kind
            ids = ids[self.seen :]
            pairs = pairs[self.seen :]
        elif finish is not None and finish.kind is FinishKind.ABORT and came == new + 1:
            # The repeated token, behind new ones that the server sends in the same chunk.
            ids, pairs = ids[:new], pairs[:new]
        if len(ids) != new:
            raise ValueError(f"{came} output_ids, where {new} of {total} tokens are new")
        if len(pairs) != new or (meta.get("output_token_logprobs_length") or total) != total:
            raise ValueError(f"{len(pairs)} output_token_logprobs for {new} new tokens of {total}")
        values = [pair[0] for pair in pairs]
        if [pair[1] for pair in pairs] != ids:
            raise ValueError("the log-probs are those of other tokens than output_ids")
        if None in values:  # SGLang writes NaN as null
            raise ValueError("log-prob None")
        if max(values) > LOGPROB_SLACK or min(values) < _LOWEST_LOGPROB:
            raise ValueError(f"log-prob {max(values, key=abs)}")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"a token that the model does not have: it has 0 to {self._vocabulary - 1}")
        # `array` refuses what is no number, where numpy would cast it.
        return (
            np.frombuffer(array("i", ids), dtype=np.int32),
            np.frombuffer(array("f", values), dtype=np.float32),
        )

    def _finish(self, reason: dict[str, Any] | None) -> Finish | None:
        if reason is None:
            return None
        kind = FinishKind(_name(reason["type"]))
        message = words_of(reason.get("message") or "")
        status = reason.get("status_code")
        if kind is FinishKind.ABORT and isinstance(status, int) and status >= 400:
            raise said_no(status, message, f"request {self._rid}")
        matched = reason.get("matched")
        return Finish(kind, message, matched if isinstance(matched, int) else None)

    def _nonsense(self, what: str, event: bytes) -> NoReturn:
        raise EngineProtocolError(
            f"The engine's stream for request {self._rid} holds {what[:_QUOTED]}.",
            hint="What came before stands; let another engine go on from there.",
            details={"event": event[:_QUOTED].decode(errors="replace"), "tokens_before": self.seen},
        )


class ManyReader:
    """Reads the events of one `/generate` stream of several requests. `finished` when each of them has its finish."""

    def __init__(self, requests: Sequence[GenerateRequest], vocabulary: int | None = None) -> None:
        self._readers = [StreamReader(request, vocabulary) for request in requests]
        self._left = len(requests)
        self.seen = 0
        """Tokens that came so far, of all requests."""

    @property
    def finished(self) -> bool:
        return not self._left

    def read(self, event: bytes) -> tuple[int, StreamChunk]:
        """The place of the request that the event is about, and its chunk. Raises as `StreamReader.read`."""
        try:
            body = orjson.loads(event)
        except orjson.JSONDecodeError as error:
            self._readers[0]._nonsense(f"no JSON ({error})", event)
        at = body.get("index") if isinstance(body, dict) else None
        if not isinstance(at, int) or not 0 <= at < len(self._readers):
            at = 0  # what is no chunk (an error of the whole, say) is read as the first's
        reader = self._readers[at]
        before = reader.finished
        chunk = reader.read_body(body, event)
        self.seen += len(chunk.token_ids)
        if reader.finished and not before:
            self._left -= 1
        return at, chunk


def _spans(rows: Sequence[dict[str, Any]], total: int, *, is_last: bool) -> tuple[VersionSpan, ...]:
    """The spans of `total` tokens. Those of a chunk that is not the last may be of fewer, and are none then. Raises
    ValueError."""
    if len(rows) == 1:  # nearly always: one version made all of a request
        (row,) = rows
        if type(row["start"]) is type(row["end"]) is int and row["start"] == 0 < row["end"] == total:
            return (VersionSpan(_name(row["version"]), 0, total),)
    spans = tuple(
        VersionSpan(_name(row["version"]), row["start"], row["end"])
        for row in rows
        if row["end"] > row["start"]
    )
    if not all(type(span.start) is type(span.end) is int for span in spans):
        raise ValueError("weight_versions that are no whole numbers of tokens")
    if spans:
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != total:
            if not is_last:
                return ()
            raise ValueError(f"weight_versions do not cover {total} tokens")
    return spans


def _name(value: Any) -> str:
    """Raises ValueError for what is no name, or too long for one."""
    text = value if isinstance(value, str) else str(value) if type(value) is int else None
    if text is None or len(text) > _LONGEST_NAME:
        raise ValueError(f"{_quoted(value)[:40]} is no name")
    return text


def _number(value: Any, least: int, most: int) -> int:
    """Raises what `_UNREADABLE` has for anything but a number within these bounds."""
    number = int(value)
    if not least <= number <= most:
        raise ValueError(f"{number} is not between {least} and {most}")
    return number


def load_of(body: Any) -> EngineLoad:
    """`GET /v1/loads`, summed over data-parallel ranks. Raises EngineProtocolError."""
    try:
        ranks = body["loads"]
        return EngineLoad(
            running=_sum(ranks, "num_running_reqs", 0, _MOST_TOKENS),
            waiting=_sum(ranks, "num_waiting_reqs", 0, _MOST_TOKENS),
            used_tokens=_sum(ranks, "num_used_tokens", 0, _MOST_TOKENS),
            max_tokens=_sum(ranks, "max_total_num_tokens", 1, _MOST_TOKENS),
            max_running=_sum(ranks, "max_running_requests", 1, _MOST_RUNNING),
        )
    except _UNREADABLE as error:
        raise EngineProtocolError(
            f"The engine's load cannot be read ({type(error).__name__}: {str(error)[:_QUOTED]}).",
            hint="Is it SGLang 0.5.17 or newer?",
            details={"body": _quoted(body)},
        ) from error


def _sum(ranks: Any, name: str, least: int, most: int) -> int:
    return _number(sum(_number(rank[name], -most, most) for rank in ranks), least, most)


def info_of(model: Any, server: Any) -> EngineInfo:
    """`GET /model_info` and `GET /server_info` together. Raises EngineProtocolError.

    SGLang reports its context length only if one was set. Otherwise the longest prompt that it accepts is used
    instead, which is about six tokens shorter.
    """
    try:
        context = server.get("context_length") or server.get("max_req_input_len")
        return EngineInfo(
            model_path=_name(model["model_path"]),
            weight_version=_name(model["weight_version"]),
            context_length=None if context is None else _number(context, 1, _MOST_TOKENS),
            engine_version=_name(server["version"]),
            ranks=_ranks(server, "tp_size") * _ranks(server, "pp_size"),
            replicas=_ranks(server, "dp_size"),
            nodes=_ranks(server, "nnodes"),
            drafts=bool(server.get("speculative_algorithm")),
            graphs_up_to=_graphs_up_to(server),
        )
    except _UNREADABLE as error:
        raise EngineProtocolError(
            f"The engine does not say who it is ({type(error).__name__}: {str(error)[:_QUOTED]}).",
            hint="Is it SGLang 0.5.17 or newer?",
            details={"model_info": _quoted(model), "server_info": _quoted(server)},
        ) from error


def _ranks(server: Any, name: str) -> int:
    return _number(server.get(name) or 1, 1, _MOST_RANKS)


def _graphs_up_to(server: Any) -> int | None:
    """SGLang 0.5.17 tells the resolved configuration of its graphs, older ones an argument."""
    if server.get("disable_cuda_graph") or server.get("disable_decode_cuda_graph"):
        return None
    decode = (server.get("cuda_graph_config") or {}).get("decode") or {}
    if decode.get("backend") == "disabled":
        return None
    size = decode.get("max_bs") or server.get("cuda_graph_max_bs")
    return None if size is None else _number(size, 1, _MOST_RUNNING)


def said_no(status: int, words: str, what: str) -> EngineError:
    """The error for an engine that answered `what` with an HTTP status of 400 or more, and these words."""
    details = {"status": status}
    if status >= 500:
        return EngineFailed(
            f"The engine could not do it: {what}: {status} {words}",
            hint="Its own output says more; another engine may do it.",
            details=details,
        )
    hint = ""
    if status in (401, 403):
        hint = "Give the API key that the engine was started with."
    elif status == 404:
        hint = "This engine does not speak this part of the dialect: is it SGLang 0.5.17 or newer?"
    return EngineRefused(f"The engine refused {what}: {status} {words}", hint=hint, details=details)


def words_of(body: Any) -> str:
    """What an engine's error reply says, in whichever of its shapes."""
    for _ in range(_DEEPEST_WORDS):
        said = [
            body[key] for key in ("error", "message", "detail") if isinstance(body, dict) and body.get(key)
        ]
        if not said:
            break
        body = said[0]
    return body[:_QUOTED] if isinstance(body, str) else _quoted(body)


def _quoted(body: Any) -> str:
    """The beginning of what a reply held, for people."""
    try:
        return orjson.dumps(body, default=str).decode()[:_QUOTED]
    except TypeError:  # it is nested deeper than orjson writes, and than repr can
        return f"a {type(body).__name__} that cannot be shown"


def _status_of(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and code >= 400 else 500
