"""What clients of the door say, and what they get: SGLang's `/generate` and OpenAI's `/v1/completions`.

What becomes of a key stands in the tables of `gyre.rollouts.manager.door.keys`: an answer is what was asked for, or
none.

Invariants:
- *the same bytes again*: an answer is a function of what the ledger has of its request;
- *what was said stays*: a stream's texts, joined, are the whole answer's.

This module must not know about sockets, or when an answer is there.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gyre.request_body import MOST_NEW_TOKENS, Body, RequestRefused, drawing, refused, shown
from gyre.rollouts.manager.door.keys import (
    ABORT,
    COMPLETIONS,
    GENERATE,
    POLICY,
    SAMPLING,
    STREAM_OPTIONS,
    decoded,
    invalid,
    token_ids,
)
from gyre.rollouts.manager.door.words import ModelWords
from gyre.rollouts.plane.door_ledger import Asked, DoorRequest, SampleView, Wish

MOST_SAMPLES = 128
"""Of one request."""
VERSION_LIMIT = 2**31 - 1

_ID = re.compile(r"[\x21-\x7e]{1,200}")


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
    token_texts: bool = False
    """With `logprobs`, the text of each token: SGLang's clients ask for it, OpenAI's get it."""
    usage: bool = False
    """In a stream: its last event has the usage."""


def aborted_id(body: bytes) -> str | None:
    """Which request SGLang's `/abort_request` ends; None for all of the key. Raises RequestRefused."""
    told = Body(ABORT, decoded(body))
    request_id, is_all = told.text("rid"), told.flag("abort_all")
    told.end()
    if is_all == bool(request_id):
        raise invalid("Expected one of rid and abort_all.")
    return request_id or None


def _wish(value: Any) -> Wish:
    if value is None:
        return Wish()
    body = Body(POLICY, value, "policy")
    exact, least = body.any("exact"), body.any("at_least")
    body.end()
    if (exact is None) == (least is None):
        raise invalid("policy: expected one of exact and at_least.")
    key, version = ("exact", exact) if exact is not None else ("at_least", least)
    if type(version) is not int or not 0 <= version <= VERSION_LIMIT:
        raise invalid(f"policy.{key}: {shown(version)} given, expected a version.")
    return Wish(version, key == "exact")


def _request_id(told: str | None, header: str | None) -> str:
    """The id in the body, in the header, or a new one."""
    if told is not None and header is not None and told != header:
        raise invalid("rid: the body has another id than the header X-Request-Id.")
    found = told if told is not None else header
    if found is None:
        return uuid.uuid4().hex
    if not _ID.fullmatch(found):
        raise invalid(f"rid: {shown(found)} given, expected 1 to 200 printable characters without blanks.")
    return found


def _asked(
    request_id: str, prompt: Sequence[int], n: int, sampling: dict[str, Any], wish: Wish, words: ModelWords
) -> Asked:
    if not prompt:
        raise invalid("The prompt is empty.")
    return Asked(request_id, np.array(prompt, np.int32), n, sampling, wish, words.stops)


def _sampling(body: Body, max_new_tokens: int) -> dict[str, Any]:
    """The keys that both dialects call alike."""
    return {"max_new_tokens": max_new_tokens, **_SAMPLING, **drawing(body)}


_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "stop_token_ids": [],
    "ignore_eos": False,
}
"""How tokens are drawn where a request does not say: by the model's probabilities."""


def _writing(body: Body) -> Writing:
    return Writing(not body.flag("skip_special_tokens", True), body.flag("no_stop_trim"))


def _encoded(text: str, words: ModelWords, *, special: bool = True) -> list[int]:
    if words.tokenizer is None:
        raise _no_tokenizer("The prompt is text")
    return words.tokenizer.encode([text], special=special)[0]


def _no_tokenizer(why: str) -> RequestRefused:
    return refused(
        422,
        "no_tokenizer",
        f"{why}, and this fleet has no tokenizer.",
        "Use token ids, or let config.model_path of the fleet name a folder with tokenizer.json.",
    )


def _one_prompt(value: Any, key: str) -> Any:
    """The prompt: a list of one is that one. Raises RequestRefused for several."""
    if not isinstance(value, list) or not any(isinstance(one, list | str) for one in value):
        return value
    if len(value) == 1 and key == "prompt":  # to SGLang's clients a list of one is answered by a list
        return value[0]
    raise refused(
        422,
        "unsupported",
        f"{key}: a list of {len(value)} prompts given; a request is one prompt, with an id of its own.",
        "Send a request for each, all at once: they are generated together.",
        param=key,
    )


def _text_of(view: SampleView, told: Told, words: ModelWords) -> str:
    """The text of a sample, while it goes on as much as stays whatever comes; "" without a tokenizer."""
    if words.tokenizer is None:
        return ""
    ids = view.token_ids.tolist()
    if (
        not told.writing.stop
        and ids
        and (view.finish == "stop" or (not view.finish and _may_end(ids[-1], told)))
    ):
        del ids[-1]
    write = words.tokenizer.decode if view.finish else words.tokenizer.settled
    return write(ids, special=told.writing.special)


def _may_end(token: int, told: Told) -> bool:
    """Whether the sample's end, which may come after its last token, leaves the token out of the text."""
    return token in (told.asked.drawing().get("stop_token_ids") or ())


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
        """Raises RequestRefused."""
        told = Body(GENERATE, decoded(body))
        request_id = _request_id(told.text("rid"), header)
        text, ids = _one_prompt(told.any("text"), "text"), _one_prompt(told.any("input_ids"), "input_ids")
        drawing = told.any("sampling_params")
        params = Body(SAMPLING, {} if drawing is None else drawing, "sampling_params")
        stream, wish = told.flag("stream"), _wish(told.any("policy"))
        logprobs, token_texts = told.flag("return_logprob"), told.flag("return_text_in_logprobs")
        told.end()
        if (text is None) == (ids is None):
            raise invalid("Expected one of text and input_ids.")
        if text is not None and not isinstance(text, str):
            raise invalid(f"text: {shown(text)} given, expected text.", "text")
        if ids is not None and not isinstance(ids, list):
            raise invalid(f"input_ids: {shown(ids)} given, expected a list of token ids.", "input_ids")
        if token_texts and words.tokenizer is None:
            raise _no_tokenizer("return_text_in_logprobs: true given")
        n = params.whole("n", 1, 1, MOST_SAMPLES)
        sampling = _sampling(params, params.whole("max_new_tokens", 128, 1, MOST_NEW_TOKENS))
        writing = _writing(params)
        params.end()
        prompt = _encoded(text, words) if text is not None else token_ids(ids or [], "input_ids")
        asked = _asked(request_id, prompt, n, sampling, wish, words)
        return Told(asked, writing, stream, logprobs, token_texts=token_texts)

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
            made.append(_sglang(known, at, view, told, words))
        return made


def _grown(known: DoorRequest, sent: list[int], ended: list[bool]) -> list[tuple[int, SampleView]]:
    """The samples that have more tokens than were sent, or have ended since, by index."""
    found = []
    for at, view in enumerate(known.view()):
        if len(view.token_ids) > sent[at] or (view.finish and not ended[at]):
            sent[at], ended[at] = len(view.token_ids), bool(view.finish)
            found.append((at, view))
    return found


def _sglang(known: DoorRequest, at: int, view: SampleView, told: Told, words: ModelWords) -> dict[str, Any]:
    ids = view.token_ids.tolist()
    finish: dict[str, Any] | None = None
    if view.finish == "stop":
        finish = {"type": "stop", "matched": ids[-1] if ids else None}
    elif view.finish == "abort":
        finish = {"type": "abort", "message": "The client ended it."}
    elif view.finish:
        finish = {"type": "length", "length": len(ids)}
    meta: dict[str, Any] = {
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
        texts = _texts_alone(ids, words) if told.token_texts else [None] * len(ids)
        rows = zip(_logprobs(view), ids, texts, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, text] for logprob, token, text in rows]
    made: dict[str, Any] = {
        "text": _text_of(view, told, words),
        "output_ids": ids,
        "meta_info": meta,
    }
    if known.request.n > 1:
        made["index"] = at
    return made


def _texts_alone(ids: list[int], words: ModelWords) -> list[str | None]:
    """Each token by itself, as SGLang writes it."""
    if words.tokenizer is None:  # the model that was there when the request came had one
        return [None] * len(ids)
    return [words.tokenizer.decode([one], special=True) for one in ids]


class OpenaiDialect:
    """OpenAI's `/v1/completions`, for one prompt. A streamed answer has the new tokens in each event."""

    path = "/v1/completions"
    takes = "OpenAI's /v1/completions"

    @staticmethod
    def read(body: bytes, header: str | None, words: ModelWords, served: str) -> Told:
        """Raises RequestRefused."""
        told = Body(COMPLETIONS, decoded(body))
        request_id = _request_id(told.text("rid"), header)
        model = told.text("model")
        if model is not None and model != served:
            raise refused(
                404,
                "model_not_found",
                f"There is no model {shown(model)}; this fleet serves {served!r}.",
                param="model",
            )
        prompt = _one_prompt(told.any("prompt"), "prompt")
        if not isinstance(prompt, list | str):
            raise invalid(f"prompt: {shown(prompt)} given, expected text or a list of token ids.", "prompt")
        stream, wish = told.flag("stream"), _wish(told.any("policy"))
        logprobs = told.any("logprobs")
        if logprobs is not None and (not isinstance(logprobs, int) or logprobs not in (0, 1)):
            raise told.wrong("logprobs", logprobs, "0 or 1: the drawn token alone has one")
        usage = _includes_usage(told.any("stream_options"), stream)
        n = told.whole("n", 1, 1, MOST_SAMPLES)
        sampling = _sampling(told, told.whole("max_tokens", 16, 1, MOST_NEW_TOKENS))
        writing = _writing(told)
        special = told.flag("add_special_tokens", True)
        told.end()
        if isinstance(prompt, str):
            ids = _encoded(prompt, words, special=special)
        else:
            ids = token_ids(prompt, "prompt")
        wants = logprobs is not None and logprobs is not False
        return Told(
            _asked(request_id, ids, n, sampling, wish, words), writing, stream, wants, served, usage=usage
        )

    @staticmethod
    def answer(known: DoorRequest, told: Told, words: ModelWords) -> Any:
        made = [_choice(at, view, told, words, 0, "") for at, view in enumerate(known.view())]
        return {**_openai(known, told), "choices": made, "usage": _usage(known)}

    @staticmethod
    def events(
        known: DoorRequest, told: Told, words: ModelWords, sent: list[int], ended: list[bool]
    ) -> list[Any]:
        """The events for what is there beyond `sent` tokens of each sample, which are then those that were sent."""
        before = list(sent)
        head = {**_openai(known, told), "usage": None} if told.usage else _openai(known, told)
        made: list[Any] = []
        for at, view in _grown(known, sent, ended):
            said = SampleView(view.token_ids[: before[at]], view.logprobs, view.versions, "")
            choice = _choice(at, view, told, words, before[at], _text_of(said, told, words))
            made.append({**head, "choices": [choice]})
        if told.usage and made and all(ended):
            made.append({**head, "choices": [], "usage": _usage(known)})
        return made


def _includes_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    told = Body(STREAM_OPTIONS, options, "stream_options")
    if not stream:
        raise invalid("stream_options: given, and the answer is no stream.", "stream_options")
    usage = told.flag("include_usage")
    told.end()
    return usage


def _openai(known: DoorRequest, told: Told) -> dict[str, Any]:
    return {"id": known.id, "object": "text_completion", "created": int(known.at), "model": told.model}


def _usage(known: DoorRequest) -> dict[str, int]:
    prompt, completion = len(known.request.group.prompt_ids), sum(len(one.token_ids) for one in known.view())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _choice(
    at: int, view: SampleView, told: Told, words: ModelWords, since: int, said: str
) -> dict[str, Any]:
    """What is new of a sample after `since` tokens, of whose text `said` was told. Its end tells the versions of all
    its tokens: an engine may know only then which it had at which."""
    return {
        "index": at,
        "text": _text_of(view, told, words)[len(said) :],
        "token_ids": view.token_ids[since:].tolist(),
        "logprobs": _openai_logprobs(view, told, words, since) if told.logprobs else None,
        "finish_reason": view.finish or None,
        "policy_versions": [
            [version, start if view.finish else max(start, since), end]
            for version, start, end in _versions(view)
            if view.finish or end > since
        ],
    }


def _openai_logprobs(view: SampleView, told: Told, words: ModelWords, since: int) -> dict[str, Any]:
    """Of the tokens after `since`. An engine tells the log-prob of the drawn token alone. `text_offset` is in the
    answer's text, without the prompt."""
    ids, logprobs = view.token_ids.tolist(), _logprobs(view)[since:]
    if words.tokenizer is None:
        texts, offsets = [f"token_id:{one}" for one in ids[since:]], [0] * len(ids)
    else:
        texts = words.tokenizer.written(ids[since:])
        offsets = words.tokenizer.offsets(ids, special=told.writing.special)
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [{text: one} for text, one in zip(texts, logprobs, strict=True)],
        "text_offset": offsets[since:],
        "token_ids": ids[since:],
    }


Dialect = type[SglangDialect] | type[OpenaiDialect]
DIALECTS: tuple[Dialect, ...] = (SglangDialect, OpenaiDialect)

Encode = Callable[[Any], bytes]
encode: Encode = msgspec.json.Encoder().encode
