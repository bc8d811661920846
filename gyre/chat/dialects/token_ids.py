"""Requests whose prompt is token ids: vLLM's `/inference/v1/generate`, by which verifiers trains, and OpenAI's
`/v1/completions`. The client renders by itself.

This module must not know of other dialects, or of sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre.chat.dialects.dialect import event, includes_usage, longest, stopping, usage_of
from gyre.chat.dialects.keys import COMPLETIONS, TOKENS, TOKENS_SAMPLING, decoded
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.request_body import Body, drawing, error_body

MOST_PROMPT = 1 << 24
"""Token ids of one prompt: more than any model takes."""


class _Entry(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: None = None
    top_logprobs: tuple[()] = ()


class TokenIds:
    path = "/inference/v1/generate"

    def read(self, body: bytes) -> ChatRequest:
        told = Body(TOKENS, decoded(body))
        prompt = told.prompt("token_ids", MOST_PROMPT)
        given = told.any("sampling_params")
        params = Body(TOKENS_SAMPLING, {} if given is None else given, "sampling_params")
        sampling = _sampling(params)
        params.end()
        request = ChatRequest(
            sampling=sampling,
            stream=told.flag("stream"),
            model=told.text("model") or "",
            token_ids=True,
            prompt_ids=prompt,
        )
        told.end()
        return request

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        """Each drawn token has its entry, in order, by its id."""
        entries = [
            _Entry(f"token_id:{token}", logprob)
            for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": reply.token_ids,
            "logprobs": {"content": entries},
            "finish_reason": reply.finish,
            "policy_versions": [list(one) for one in reply.versions],
        }
        return {"request_id": reply.id, "choices": [choice], "usage": usage_of(reply)}

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        yield event(self.answer(request, reply))
        yield b"data: [DONE]\n\n"

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, code, message, param)


class Completions:
    path = "/v1/completions"

    def read(self, body: bytes) -> ChatRequest:
        told = Body(COMPLETIONS, decoded(body))
        prompt = told.prompt("prompt", MOST_PROMPT)
        wants = told.has("logprobs")
        request = ChatRequest(
            sampling=_sampling(told),
            stream=told.flag("stream"),
            model=told.text("model") or "",
            logprobs=wants,
            token_ids=True,
            usage=includes_usage(told.any("stream_options")),
            prompt_ids=prompt,
        )
        told.end()
        return request

    def answer(self, request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
        return {**_head(reply), "choices": [_choice(request, reply)], "usage": usage_of(reply)}

    def events(self, request: ChatRequest, reply: FinishedTurn) -> Iterator[bytes]:
        head = _head(reply) | ({"usage": None} if request.usage else {})
        yield event({**head, "choices": [_choice(request, reply)]})
        if request.usage:
            yield event({**head, "choices": [], "usage": usage_of(reply)})
        yield b"data: [DONE]\n\n"

    def refusal(self, status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
        return error_body(status, code, message, param)


def _sampling(told: Body) -> dict[str, Any]:
    told.whole("logprobs", 0, 0, 1)  # log-probs are of the drawn token alone
    return drawing(told) | stopping(told) | longest(told, "max_tokens")


def _head(reply: FinishedTurn) -> dict[str, Any]:
    return {"id": reply.id, "object": "text_completion", "created": reply.created, "model": reply.model}


def _choice(request: ChatRequest, reply: FinishedTurn) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        logprobs = {
            "tokens": list(reply.token_texts),
            "token_logprobs": [float(one) for one in reply.logprobs],
            "token_ids": list(reply.token_ids),
        }
    return {
        "index": 0,
        "text": reply.message.content,
        "token_ids": list(reply.token_ids),
        "logprobs": logprobs,
        "finish_reason": reply.finish,
        "policy_versions": [list(one) for one in reply.versions],
    }
