"""What clients of the door say, and what they get: SGLang's `/generate` and OpenAI's `/v1/completions`.

A key that changes what is drawn, and that Gyre's engines do not have, is refused by its name unless it has the value
that changes nothing: an answer is what was asked for, or none.

Invariant *the same bytes again*: an answer is a function of what the ledger has of its request.

This module must not know about sockets, or when an answer is there.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gyre.rollouts.core.door_ledger import Asked, DoorRefused, DoorRequest, SampleView, Wish, refused
from gyre.rollouts.manager.door.words import ModelWords, whole_text

MOST_SAMPLES = 128
"""Of one request."""
MOST_NEW_TOKENS = 1 << 20
MOST_STOPS = 256
VERSION_LIMIT = 2**31 - 1

_ID = re.compile(r"[\x21-\x7e]{1,200}")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, 1.0),
    "min_new_tokens": (0,),
    "logprob_start_len": (-1,),
    "spaces_between_special_tokens": (True,),
    "best_of": (1,),
    "return_text_in_logprobs": (True,),
    "return_token_ids": (True,),
}
"""Values of keys without a meaning here that change nothing, beside those that say nothing: null, false, zero, empty.
Answers always have their token ids."""

_TELLS_NOTHING = frozenset({"user", "custom_labels", "session_id"})
"""Keys that are about the client."""


class Writing(NamedTuple):
    """How tokens become text: whether special tokens are in it, and the token that ended the sample."""

    special: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A client's request: what it asks for, and how it wants to hear of it."""

    asked: Asked
    writing: Writing
    stream: bool = False
    logprobs: bool = False
    model: str = ""


class _Body:
    """A mapping of a client's, whose keys are taken one by one; what is left has to say nothing."""

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, dict):
            raise _invalid(f"{path or 'the body'}: {_shown(values)} given, expected an object.")
        self._values = dict(values)
        self._path = path

    def at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def any(self, key: str) -> Any:
        return self._values.pop(key, None)

    def text(self, key: str) -> str | None:
        value = self.any(key)
        if value is not None and not isinstance(value, str):
            raise _invalid(f"{self.at(key)}: {_shown(value)} given, expected text.")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.any(key)
        if value is not None and not isinstance(value, bool):
            raise _invalid(f"{self.at(key)}: {_shown(value)} given, expected true or false.")
        return default if value is None else value

    def whole(self, key: str, default: int | None, least: int, most: int) -> int:
        value = self.any(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise _invalid(
                f"{self.at(key)}: {_shown(value)} given, expected a number from {least} to {most}."
            )
        return value

    def number(self, key: str, default: float, most: float, *, above: float | None = None) -> float:
        value = self.any(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 <= value <= most:  # neither is a NaN
            raise _invalid(f"{self.at(key)}: {_shown(value)} given, expected a number from 0 to {most:g}.")
        if above is not None and value <= above:
            raise _invalid(f"{self.at(key)}: {_shown(value)} given, expected more than {above:g}.")
        return float(value)

    def ids(self, key: str, most: int) -> list[int]:
        value = self.any(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise _invalid(
                f"{self.at(key)}: {_shown(value)} given, expected a list of at most {most} token ids."
            )
        return _token_ids(value, self.at(key))

    def end(self) -> None:
        """Raises DoorRefused for the first key that was not taken and says something."""
        for key, value in self._values.items():
            if key in _TELLS_NOTHING or not value or value in _NEUTRAL.get(key, ()):
                continue
            raise refused(
                422,
                "unsupported",
                f"{self.at(key)}: {_shown(value)} given, which the door does not know.",
                "Leave it out.",
            )


def _token_ids(value: list[Any], path: str) -> list[int]:
    for one in value:
        if type(one) is not int or not 0 <= one < 2**31:
            raise _invalid(f"{path}: {_shown(one)} is no token id.")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _invalid(message: str) -> DoorRefused:
    return refused(422, "invalid", message, "See docs/fleet.md.")


def decoded(body: bytes) -> Any:
    """The body's JSON. Raises DoorRefused."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(f"The body is no JSON: {str(error)[:200]}.") from None


def aborted_id(body: bytes) -> str | None:
    """Which request SGLang's `/abort_request` ends; None for all of the key. Raises DoorRefused."""
    told = _Body(decoded(body))
    request_id, is_all = told.text("rid"), told.flag("abort_all")
    told.end()
    if is_all == bool(request_id):
        raise _invalid("Expected one of rid and abort_all.")
    return request_id or None


def _wish(value: Any) -> Wish:
    if value is None:
        return Wish()
    body = _Body(value, "policy")
    exact, least = body.any("exact"), body.any("at_least")
    body.end()
    if (exact is None) == (least is None):
        raise _invalid("policy: expected one of exact and at_least.")
    key, version = ("exact", exact) if exact is not None else ("at_least", least)
    if type(version) is not int or not 0 <= version <= VERSION_LIMIT:
        raise _invalid(f"policy.{key}: {_shown(version)} given, expected a version.")
    return Wish(version, key == "exact")


def _request_id(told: str | None, header: str | None) -> str:
    """The id in the body, in the header, or a new one."""
    if told is not None and header is not None and told != header:
        raise _invalid("rid: the body has another id than the header X-Request-Id.")
    found = told if told is not None else header
    if found is None:
        return uuid.uuid4().hex
    if not _ID.fullmatch(found):
        raise _invalid(f"rid: {_shown(found)} given, expected 1 to 200 printable characters without blanks.")
    return found


def _asked(
    request_id: str, prompt: Sequence[int], n: int, sampling: dict[str, Any], wish: Wish, words: ModelWords
) -> Asked:
    if not prompt:
        raise _invalid("The prompt is empty.")
    return Asked(request_id, np.array(prompt, np.int32), n, sampling, wish, words.stops)


def _sampling(body: _Body, max_new_tokens: int) -> dict[str, Any]:
    """The keys that both dialects call alike. A top_k of -1 or 0 is off."""
    top_k = body.whole("top_k", -1, -1, 2**31 - 1)
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": body.number("temperature", 1.0, 1e4),
        "top_p": body.number("top_p", 1.0, 1.0, above=0.0),
        "top_k": top_k or -1,
        "min_p": body.number("min_p", 0.0, 1.0),
        "stop_token_ids": body.ids("stop_token_ids", MOST_STOPS),
        "ignore_eos": body.flag("ignore_eos"),
    }


def _writing(body: _Body) -> Writing:
    return Writing(not body.flag("skip_special_tokens", True), body.flag("no_stop_trim"))


def _encoded(text: str, words: ModelWords) -> list[int]:
    if words.tokenizer is None:
        raise refused(
            422,
            "no_tokenizer",
            "The prompt is text, and this fleet has no tokenizer.",
            "Send token ids, or let config.model_path of the fleet name a folder with tokenizer.json.",
        )
    return words.tokenizer.encode([text], special=True)[0]


def _text_of(view: SampleView, words: ModelWords, writing: Writing, *, whole: bool = False) -> str:
    """The text of a sample; "" without a tokenizer."""
    if words.tokenizer is None:
        return ""
    ids = view.token_ids.tolist()
    if view.finish == "stop" and not writing.stop:
        del ids[-1:]
    text = words.tokenizer.decode(ids, special=writing.special)
    return text if view.finish or not whole else whole_text(text)


def _versions(view: SampleView) -> list[list[int]]:
    return [[run.version, run.start, run.end] for run in view.versions]


def _logprobs(view: SampleView) -> list[float]:
    return [float(one) for one in view.logprobs]


class SglangDialect:
    """SGLang's `/generate`, for one prompt. A streamed answer has all tokens so far in each event."""

    path = "/generate"
    takes = "SGLang's /generate"

    @staticmethod
    def read(body: bytes, header: str | None, words: ModelWords, served: str) -> Told:
        """Raises DoorRefused."""
        told = _Body(decoded(body))
        request_id = _request_id(told.text("rid"), header)
        text, ids = told.text("text"), told.any("input_ids")
        params = _Body(told.any("sampling_params") or {}, "sampling_params")
        stream, logprobs, wish = told.flag("stream"), told.flag("return_logprob"), _wish(told.any("policy"))
        told.end()
        if (text is None) == (ids is None):
            raise _invalid("Expected one of text and input_ids.")
        if ids is not None and not isinstance(ids, list):
            raise _invalid(f"input_ids: {_shown(ids)} given, expected a list of token ids.")
        n = params.whole("n", 1, 1, MOST_SAMPLES)
        sampling = _sampling(params, params.whole("max_new_tokens", 128, 1, MOST_NEW_TOKENS))
        writing = _writing(params)
        params.end()
        prompt = _encoded(text, words) if text is not None else _token_ids(ids or [], "input_ids")
        return Told(_asked(request_id, prompt, n, sampling, wish, words), writing, stream, logprobs)

    @staticmethod
    def answer(known: DoorRequest, told: Told, words: ModelWords) -> Any:
        made = [_sglang(known, at, view, told, words) for at, view in enumerate(known.view())]
        return made if known.request.n > 1 else made[0]

    @staticmethod
    def events(
        known: DoorRequest, told: Told, words: ModelWords, sent: list[int], ended: list[bool]
    ) -> list[Any]:
        """The events for what is there beyond `sent` tokens of each sample, which are then those that were sent."""
        made = []
        for at, view in _grown(known, sent, ended):
            made.append(_sglang(known, at, view, told, words, whole=True))
        return made


def _grown(known: DoorRequest, sent: list[int], ended: list[bool]) -> list[tuple[int, SampleView]]:
    """The samples that have more tokens than were sent, or have ended since, by index."""
    found = []
    for at, view in enumerate(known.view()):
        if len(view.token_ids) > sent[at] or (view.finish and not ended[at]):
            sent[at], ended[at] = len(view.token_ids), bool(view.finish)
            found.append((at, view))
    return found


def _sglang(
    known: DoorRequest, at: int, view: SampleView, told: Told, words: ModelWords, *, whole: bool = False
) -> dict[str, Any]:
    ids = view.token_ids.tolist()
    finish: dict[str, Any] | None = None
    if view.finish == "stop":
        finish = {"type": "stop", "matched": ids[-1] if ids else None}
    elif view.finish == "abort":
        finish = {"type": "abort", "message": "The client ended it."}
    elif view.finish:
        finish = {"type": "length", "length": len(ids)}
    meta = {
        "id": known.id,
        "finish_reason": finish,
        "prompt_tokens": len(known.request.group.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "policy_versions": _versions(view),
    }
    if view.versions:  # clients take it for a number
        meta["weight_version"] = str(view.versions[-1].version)
    if told.logprobs:
        rows: list[list[Any]] = [[one, token, None] for one, token in zip(_logprobs(view), ids, strict=True)]
        meta["output_token_logprobs"] = rows
    made: dict[str, Any] = {
        "text": _text_of(view, words, told.writing, whole=whole),
        "output_ids": ids,
        "meta_info": meta,
    }
    if known.request.n > 1:
        made["index"] = at
    return made


class OpenaiDialect:
    """OpenAI's `/v1/completions`, for one prompt. A streamed answer has the new tokens in each event."""

    path = "/v1/completions"
    takes = "OpenAI's /v1/completions"

    @staticmethod
    def read(body: bytes, header: str | None, words: ModelWords, served: str) -> Told:
        """Raises DoorRefused."""
        told = _Body(decoded(body))
        request_id = _request_id(told.text("rid"), header)
        model = told.text("model") or served
        if model != served:
            raise refused(
                404, "model_not_found", f"There is no model {_shown(model)}; this fleet serves {served!r}."
            )
        prompt = told.any("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            (prompt,) = prompt
        if not isinstance(prompt, list | str):
            raise _invalid(f"prompt: {_shown(prompt)} given, expected text or a list of token ids.")
        stream, wish = told.flag("stream"), _wish(told.any("policy"))
        logprobs = told.any("logprobs")
        if logprobs not in (None, False, True, 0, 1):
            raise _invalid(
                f"logprobs: {_shown(logprobs)} given, expected 0 or 1: the drawn token alone has one."
            )
        options = told.any("stream_options")
        if options is not None and not isinstance(options, dict):
            raise _invalid(f"stream_options: {_shown(options)} given, expected an object.")
        n = told.whole("n", 1, 1, MOST_SAMPLES)
        sampling = _sampling(told, told.whole("max_tokens", 16, 1, MOST_NEW_TOKENS))
        writing = _writing(told)
        told.end()
        ids = _encoded(prompt, words) if isinstance(prompt, str) else _token_ids(prompt, "prompt")
        wants = logprobs is not None and logprobs is not False
        return Told(_asked(request_id, ids, n, sampling, wish, words), writing, stream, wants, served)

    @staticmethod
    def answer(known: DoorRequest, told: Told, words: ModelWords) -> Any:
        views = known.view()
        made = [_choice(at, view, told, words, 0, "") for at, view in enumerate(views)]
        prompt = len(known.request.group.prompt_ids)
        completion = sum(len(view.token_ids) for view in views)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {**_openai(known, told), "choices": made, "usage": usage}

    @staticmethod
    def events(
        known: DoorRequest, told: Told, words: ModelWords, sent: list[int], ended: list[bool]
    ) -> list[Any]:
        """The events for what is there beyond `sent` tokens of each sample, which are then those that were sent."""
        before = list(sent)
        made = []
        for at, view in _grown(known, sent, ended):
            said = ""
            if words.tokenizer is not None:
                ids = view.token_ids[: before[at]].tolist()
                said = whole_text(words.tokenizer.decode(ids, special=told.writing.special))
            made.append(
                {**_openai(known, told), "choices": [_choice(at, view, told, words, before[at], said)]}
            )
        return made


def _openai(known: DoorRequest, told: Told) -> dict[str, Any]:
    return {"id": known.id, "object": "text_completion", "created": int(known.at), "model": told.model}


def _choice(
    at: int, view: SampleView, told: Told, words: ModelWords, since: int, said: str
) -> dict[str, Any]:
    """What is new of a sample after `since` tokens, whose text is `said`. Its end tells the versions of all its tokens:
    an engine may know only then which it had at which."""
    text = _text_of(view, words, told.writing, whole=True)
    ids = view.token_ids[since:].tolist()
    logprobs = None
    if told.logprobs:
        logprobs = {"token_logprobs": _logprobs(view)[since:], "token_ids": ids}
    return {
        "index": at,
        "text": text[len(said) :],
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": view.finish or None,
        "policy_versions": [
            [version, start if view.finish else max(start, since), end]
            for version, start, end in _versions(view)
            if view.finish or end > since
        ],
    }


Dialect = type[SglangDialect] | type[OpenaiDialect]
DIALECTS: tuple[Dialect, ...] = (SglangDialect, OpenaiDialect)

Encode = Callable[[Any], bytes]
encode: Encode = msgspec.json.Encoder().encode
