"""Responses, Anthropic's messages, and the routes of token ids: each is read, answered, streamed, refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from gyre import request_body
from gyre.chat.dialects import COUNT_TOKENS, DIALECTS, Dialect
from gyre.chat.dialects.anthropic_messages import AnthropicMessages
from gyre.chat.dialects.keys import CHAT, TABLES
from gyre.chat.dialects.keys import RESPONSES as RESPONSES_TABLE
from gyre.chat.dialects.openai_responses import OpenaiResponses
from gyre.chat.dialects.token_ids import Completions, TokenIds
from gyre.chat.history import is_same
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.requests import ChatRefused, ChatRequest
from tests.chat.replies import ANSWERS, CALLS, events_of, reply

RESPONSES, MESSAGES, TOKENS, COMPLETIONS = OpenaiResponses(), AnthropicMessages(), TokenIds(), Completions()
FEWEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    RESPONSES.path: {"input": "a"},
    MESSAGES.path: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8},
    COUNT_TOKENS.path: {"messages": [{"role": "user", "content": "a"}]},
    TOKENS.path: {"token_ids": [1, 2]},
    COMPLETIONS.path: {"prompt": [1, 2]},
}
ALL = (*DIALECTS, COUNT_TOKENS)
EACH = pytest.mark.parametrize("dialect", ALL, ids=lambda one: one.path)


def read(dialect: Dialect, **keys: Any) -> ChatRequest:
    return dialect.read(json.dumps(FEWEST[dialect.path] | keys).encode())


def refusal(dialect: Dialect, **keys: Any) -> ChatRefused:
    with pytest.raises(ChatRefused) as caught:
        read(dialect, **keys)
    assert caught.value.status == 422
    return caught.value


# -- every dialect ----------------------------------------------------------------------------------


@EACH
def test_what_is_not_given_is_left_to_the_job(dialect: Dialect) -> None:
    told = read(dialect)
    assert set(told.sampling) <= {"max_new_tokens"}
    assert (told.prompt_ids is None) if told.messages else (told.prompt_ids.tolist() == [1, 2])
    assert told.messages in ((Message("user", "a"),), ())


@EACH
def test_a_mistyped_key_is_named_with_the_right_one(dialect: Dialect) -> None:
    error = refusal(dialect, strem=True)
    assert "did you mean 'stream'" in str(error)
    body = dialect.refusal(error.status, error.reason, str(error), error.param)["error"]
    assert body["message"] == str(error)
    assert body["code"] == "unsupported"
    assert body["param"] == "strem"
    assert body["type"] == "invalid_request_error"


@EACH
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model": "\xff"}', b'"a"', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(ChatRefused) as caught:
        dialect.read(body)
    assert caught.value.reason == "invalid"


@EACH
@pytest.mark.parametrize("value", [True, 5, -1, 0.5, "text", [], ["a"], [[]], {}, {"type": "x"}])
def test_whatever_a_key_has_the_request_is_read_or_refused(dialect: Dialect, value: Any) -> None:
    """Also keys of the other dialects, and keys of keys."""
    names = {name for table in TABLES for name in table.rows}
    for name in sorted(names):
        for whole in (
            {name: value},
            {"messages": [{"role": "user", name: value}]},
            {"input": [{name: value}]},
        ):
            refused: list[ChatRefused] = []
            try:
                read(dialect, **whole)
            except ChatRefused as error:
                refused.append(error)
            assert all(one.status == 422 and one.message and one.reason for one in refused)


def test_dialects_read_the_keys_that_are_taken_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, str]] = set()
    plain_any, plain_has = request_body.Body.any, request_body.Body.has

    def any_of(body: request_body.Body, key: str) -> Any:
        asked.add((body._keys.of, key))
        return plain_any(body, key)

    def has(body: request_body.Body, key: str) -> bool:
        asked.add((body._keys.of, key))
        return plain_has(body, key)

    monkeypatch.setattr(request_body.Body, "any", any_of)
    monkeypatch.setattr(request_body.Body, "has", has)
    function = {"name": "f", "parameters": {}}
    options = {"stream_options": {"include_usage": True}}
    for dialect, more in (
        (DIALECTS[0], {"tools": [{"type": "function", "function": function}], **options}),
        (RESPONSES, {"tools": [{"type": "function", **function}]}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}}),
        (TOKENS, {}),
        (COMPLETIONS, options),
    ):
        read(dialect, **more)
    for table in TABLES:
        taken = {name for name, row in table.rows.items() if row.is_taken}
        assert taken == {key for of, key in asked if of == table.of}


def test_every_key_of_openais_client_has_its_row() -> None:
    chats = {*chat_params.CompletionCreateParamsBase.__annotations__}
    chats |= {*chat_params.CompletionCreateParamsStreaming.__annotations__}
    responses = {*response_params.ResponseCreateParamsBase.__annotations__}
    responses |= {*response_params.ResponseCreateParamsStreaming.__annotations__}
    assert chats <= {*CHAT.rows}
    assert responses <= {*RESPONSES_TABLE.rows}


@EACH
def test_the_same_turn_is_the_same_bytes(dialect: Dialect) -> None:
    request = read(dialect)
    assert dialect.answer(request, reply(CALLS)) == dialect.answer(request, reply(CALLS))
    assert list(dialect.events(request, reply(CALLS))) == list(dialect.events(request, reply(CALLS)))


# -- Anthropic --------------------------------------------------------------------------------------

THEIR_CALL = {"type": "tool_use", "id": "call_1", "name": "calculator", "input": {"expression": "37*58"}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def test_a_users_message_is_results_and_words() -> None:
    told = read(
        MESSAGES,
        system=[{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "37*58?"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "h", "signature": ""}, THEIR_CALL],
            },
            {
                "role": "user",
                "content": [
                    result("call_1", [{"type": "text", "text": "21"}, {"type": "text", "text": "46"}]),
                    result("call_2", None),
                    {"type": "text", "text": "go "},
                    {"type": "text", "text": "on", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    )
    assert told.messages == (
        Message("system", "be short"),
        Message("user", "37*58?"),
        Message("assistant", "", "h", (ToolCall("call_1", "calculator", '{"expression":"37*58"}'),)),
        Message("tool", "2146", tool_call_id="call_1"),
        Message("tool", "", tool_call_id="call_2"),
        Message("user", "go on"),
    )


def test_tools_and_choices_of_anthropics_form() -> None:
    told = read(
        MESSAGES,
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
        tool_choice={"type": "none", "disable_parallel_tool_use": True},
    )
    assert told.tools == (Tool("f", "d", {"type": "object"}),)
    assert not told.calls_are_read
    assert not told.parallel_tool_calls


@pytest.mark.parametrize("message", [ANSWERS, CALLS, Message("assistant")])
def test_anthropics_stream_says_what_the_answer_says(message: Message) -> None:
    request = read(MESSAGES, stream=True)
    whole = MESSAGES.answer(request, reply(message))
    told = events_of(b"".join(MESSAGES.events(request, reply(message))))
    assert [name for name, _ in told] == [one["type"] for _, one in told]
    blocks: list[dict[str, Any]] = []
    for _, one in told:
        if one["type"] == "content_block_start":
            blocks.append(dict(one["content_block"]))
        elif one["type"] == "content_block_delta":
            delta = dict(one["delta"])
            kind = delta.pop("type")
            if kind == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                (key,) = delta
                blocks[-1][key] += delta[key]
    assert blocks == whole["content"]
    assert told[-2][1]["delta"]["stop_reason"] == whole["stop_reason"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', "", "{", "[1]", '"a"', "nul"])
def test_what_was_told_comes_back_as_the_same(arguments: str) -> None:
    """Also arguments that are no object, which Anthropic's form has no place for."""
    message = Message("assistant", "words", "thoughts", (ToolCall("call_1", "f", arguments),))
    content = MESSAGES.answer(read(MESSAGES), reply(message))["content"]
    asked, came = {"role": "user", "content": "a"}, {"role": "user", "content": [result("call_1", "4")]}
    back = read(MESSAGES, messages=[asked, {"role": "assistant", "content": content}, came]).messages[1]
    assert is_same(message, back)


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        (ANSWERS, "stop", "end_turn"),
        (ANSWERS, "length", "max_tokens"),
        (CALLS, "stop", "tool_use"),
        (CALLS, "length", "max_tokens"),
    ],
)
def test_anthropics_reasons(message: Message, finish: str, reason: str) -> None:
    assert MESSAGES.answer(read(MESSAGES), reply(message, finish))["stop_reason"] == reason


def test_counting_needs_no_length_and_draws_nothing() -> None:
    assert COUNT_TOKENS.answer(read(COUNT_TOKENS), reply()) == {"input_tokens": 3}
    error = refusal(MESSAGES, max_tokens=None)
    assert error.param == "max_tokens"


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "assistant", "content": "prefilled"}]}, "messages"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"system": 5}, "system"),
    ],
)
def test_anthropics_mistakes_are_named(keys: dict[str, Any], param: str) -> None:
    assert refusal(MESSAGES, **keys).param == param


@pytest.mark.parametrize(
    ("status", "kind"), [(404, "not_found_error"), (503, "overloaded_error"), (500, "api_error")]
)
def test_anthropics_errors_have_its_kinds(status: int, kind: str) -> None:
    told = MESSAGES.refusal(status, "unknown", "There is no session x.")
    assert told["type"] == "error"
    assert told["error"]["type"] == kind


# -- Responses --------------------------------------------------------------------------------------


def test_items_become_messages() -> None:
    told = read(
        RESPONSES,
        instructions="be short",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "37*58?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "h"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "let me"}],
                "id": "m",
            },
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "4"},
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "5"}],
            },
        ],
    )
    calls = (ToolCall("call_1", "f", "{}"), ToolCall("call_2", "g", "{}"))
    assert told.messages == (
        Message("system", "be short"),
        Message("user", "37*58?"),
        Message("assistant", "let me", "h", calls),
        Message("tool", "4", tool_call_id="call_1"),
        Message("tool", "5", tool_call_id="call_2"),
    )


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("message", [ANSWERS, CALLS, Message("assistant")])
def test_responses_stream_ends_with_the_answer(message: Message, finish: str) -> None:
    request = read(RESPONSES, stream=True, include=["message.output_text.logprobs"])
    whole = RESPONSES.answer(request, reply(message, finish))
    told = events_of(b"".join(RESPONSES.events(request, reply(message, finish))))
    assert [one["sequence_number"] for _, one in told] == list(range(len(told)))
    assert [name for name, _ in told] == [one["type"] for _, one in told]
    assert told[-1][1]["response"] == whole
    assert told[-1][0] == ("response.incomplete" if finish == "length" else "response.completed")
    done = [one["item"] for name, one in told if name == "response.output_item.done"]
    assert done == whole["output"]


def test_what_responses_told_comes_back_as_the_same() -> None:
    output = RESPONSES.answer(read(RESPONSES), reply(CALLS))["output"]
    back = [{"role": "user", "content": "a"}, *output]
    back.append({"type": "function_call_output", "call_id": "call_1", "output": "2146"})
    assert read(RESPONSES, input=back).messages[1] == CALLS


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": "no"}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": ["message"]}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "input.0.call_id"),
        ({"input": [{"role": "assistant", "content": "prefilled"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content"),
    ],
)
def test_responses_mistakes_are_named(keys: dict[str, Any], param: str) -> None:
    assert refusal(RESPONSES, **keys).param == param


# -- token ids --------------------------------------------------------------------------------------

VERIFIERS = {
    "model": "policy",
    "token_ids": [1, 5, 6],
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 64,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 2,
    },
    "cache_salt": "a",
    "priority": 0,
}
"""As verifiers 0.4 with renderers 0.1.12 sends it, on a bridged turn."""


def test_what_verifiers_sends_is_taken() -> None:
    told = TOKENS.read(json.dumps(VERIFIERS).encode())
    assert told.prompt_ids.tolist() == [1, 5, 6]
    assert told.sampling == {"temperature": 1.0, "max_new_tokens": 64, "stop_token_ids": [2]}


def test_each_drawn_id_has_its_entry_in_order() -> None:
    told = json.loads(msgspec.json.encode(TOKENS.answer(read(TOKENS), reply(CALLS))))
    content = told["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["token_id:7", "token_id:8", "token_id:2"]
    assert [one["logprob"] for one in content] == [-0.5, -0.25, 0.0]
    assert content[0] == {"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["request_id"] == "turn-1"


@pytest.mark.parametrize(
    ("dialect", "keys", "param"),
    [
        (TOKENS, {"token_ids": []}, "token_ids"),
        (TOKENS, {"token_ids": ["a"]}, "token_ids"),
        (TOKENS, {"token_ids": [1.5]}, "token_ids"),
        (TOKENS, {"token_ids": [True]}, "token_ids"),
        (TOKENS, {"token_ids": [-1]}, "token_ids"),
        (TOKENS, {"token_ids": [2**31]}, "token_ids"),
        (TOKENS, {"token_ids": "1 2"}, "token_ids"),
        (TOKENS, {"sampling_params": 5}, "sampling_params"),
        (TOKENS, {"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        (TOKENS, {"sampling_params": {"n": 2}}, "sampling_params.n"),
        (TOKENS, {"sampling_params": {"stop": [1]}}, "sampling_params.stop"),
        (TOKENS, {"features": {"a": 1}}, "features"),
        (COMPLETIONS, {"prompt": "text"}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs": 2}, "logprobs"),
    ],
)
def test_mistakes_of_token_ids_are_named(dialect: Dialect, keys: dict[str, Any], param: str) -> None:
    assert refusal(dialect, **keys).param == param


def test_completions_tell_text_and_ids() -> None:
    request = read(COMPLETIONS, logprobs=1, stream=True, stream_options={"include_usage": True})
    told = COMPLETIONS.answer(request, reply())["choices"][0]
    assert told["text"] == "It is 2146."
    assert told["token_ids"] == [7, 8, 2]
    assert told["logprobs"]["token_logprobs"] == [-0.5, -0.25, 0.0]
    events = [one for _, one in events_of(b"".join(COMPLETIONS.events(request, reply())))]
    assert events[0]["choices"] == [told]
    assert events[1]["usage"]["total_tokens"] == 6
    assert events[2] == "[DONE]"
    assert read(COMPLETIONS).logprobs is False


def test_megabytes_of_a_tool_are_read() -> None:
    text = "x" * 4_000_000
    told = read(MESSAGES, messages=[{"role": "user", "content": [result("call_1", text)]}])
    assert told.messages[0].content == text
