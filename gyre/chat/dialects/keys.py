"""Which keys the bodies of conversations may have, and what becomes of each. One table for each body, as
`gyre.request_body` has them; docs/chat-dialects.md is made of them.

This module must not know what a taken key means, or of sockets.
"""

from __future__ import annotations

from functools import partial

from gyre import request_body
from gyre.request_body import ANYTHING, Keys, passes, table, takes

PAGE = "docs/chat-dialects.md"
"""Where the forms of bodies stand."""

invalid = partial(request_body.invalid, page=PAGE)
decoded = partial(request_body.decoded, page=PAGE)
token_ids = partial(request_body.token_ids, page=PAGE)

_keys = partial(table, server="a session", page=PAGE)

_STOP_TEXTS = "texts that end the answer, of which it has what stands before the first one: one, or a list"
_NO_GRAMMAR = "The engines have no grammars; leave it out."
_NO_BIAS = "The engines draw by temperature, top_p, top_k and min_p alone; leave it out."
_NO_SEED = "The manager gives each turn its seed, so that it goes on the same elsewhere; leave it out."
_NO_LENGTH = "An answer ends by its end tokens, or at its largest length; leave it out."
_NO_OTHERS = "Engines tell the drawn tokens and their log-probs alone; leave it out."
_NO_MEDIA = "Conversations are text; leave it out."
_NO_FRAME = (
    "The job's config.chat says how a conversation is written, so that a path stays one; leave it out."
)
_NO_STORE = "Nothing outlives its session; send the messages, or previous_response_id."
_NO_HOSTED = "Tools are run by the agent; leave it out."
_ONE = "A turn is one answer; send a request for each."
_CLIENTS = "about the client"
_CUT = "A conversation is taken whole, or refused; cut it yourself."

_DRAWING = takes(
    ("temperature", "0 for the likeliest token"),
    ("top_p", "above 0"),
    ("top_k", "-1 or 0 for off"),
    ("min_p", "0 for off"),
    ("stop_token_ids", "tokens that end the answer, besides the model's"),
    ("ignore_eos", "no token ends the answer"),
)
_ABOUT_CLIENTS = passes(ANYTHING, says=_CLIENTS)(
    *("metadata", "store", "service_tier", "user", "safety_identifier", "cache_salt", "session_id"),
    *(
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "priority",
        "custom_labels",
        "request_id",
    ),
)
_ALL_BUT_ANTHROPIC = [
    *passes(0, says=_NO_BIAS)("frequency_penalty", "presence_penalty"),
    *passes(1, says=_NO_BIAS)("repetition_penalty"),
    *passes({}, says=_NO_BIAS)("logit_bias"),
    *takes(("stop", _STOP_TEXTS)),
    *passes(0, says=_NO_LENGTH)("min_tokens"),
    *passes(says=_NO_SEED)("seed"),
    *passes(says=_NO_GRAMMAR)("structured_outputs", "guided_json", "guided_regex", "guided_grammar"),
]
_STREAM = takes(("stream", "true: the finished turn as events"))
_TOOLS = takes(
    (
        "tools",
        "functions that may be called; `strict` changes nothing, for nothing holds a model to a schema",
    ),
    ("tool_choice", "`auto`, or `none`: nothing in the answer is read as a call"),
)
_PARALLEL = takes(
    ("parallel_tool_calls", "false: an answer has one call at most, the first that the model wrote")
)

CHAT = _keys(
    "`/v1/chat/completions`",
    _DRAWING,
    _STREAM,
    _TOOLS,
    _PARALLEL,
    takes(
        ("messages", "the whole conversation; what ends it is not the assistant's"),
        ("model", "any name, which the answer has"),
        ("max_tokens", "most tokens of the answer"),
        ("max_completion_tokens", "another name of `max_tokens`"),
        ("logprobs", "true: the log-probs of the drawn tokens"),
        ("return_token_ids", "true: `prompt_token_ids` and `token_ids`"),
        ("stream_options", "`include_usage: true`: the stream's last event has `usage`"),
    ),
    _ABOUT_CLIENTS,
    _ALL_BUT_ANTHROPIC,
    passes(1, says=_ONE)("n"),
    passes(0, says=_NO_OTHERS)("top_logprobs"),
    passes({"type": "text"}, says=_NO_GRAMMAR)("response_format"),
    passes(["text"], says=_NO_MEDIA)("modalities"),
    passes(says=_NO_MEDIA)("audio"),
    passes({}, says=_NO_FRAME)("chat_template_kwargs"),
    passes(True, says=_NO_FRAME)("add_generation_prompt"),
    passes(False, says=_NO_FRAME)("continue_final_message", "add_special_tokens"),
    passes(says=_NO_FRAME)("chat_template", "reasoning_effort", "verbosity"),
    passes(says=_NO_BIAS)("prediction"),
    passes(says=_NO_HOSTED)("web_search_options", "moderation"),
    passes(says="Say tools and tool_choice.")("functions", "function_call"),
)

STREAM_OPTIONS = _keys(
    "`/v1/chat/completions` and `/v1/completions`, in `stream_options`",
    takes(("include_usage", "true: the stream's last event has `usage`")),
    passes(False, says="Leave it out; the last event has the usage of the whole.")("continuous_usage_stats"),
    passes(True, False, says="events are not padded")("include_obfuscation"),
)

TOOL = _keys(
    "`/v1/chat/completions`, in each of `tools`",
    takes(("type", "`function`"), ("function", "name, description and parameters")),
)

FUNCTION = _keys(
    "`/v1/chat/completions`, in a tool's `function`",
    takes(
        ("name", "of the tool"), ("description", "for the model"), ("parameters", "a JSON schema: an object")
    ),
    passes(True, False, says="nothing holds a model to a schema")("strict"),
)

RESPONSES = _keys(
    "`/v1/responses`",
    _DRAWING,
    _STREAM,
    _TOOLS,
    _PARALLEL,
    takes(
        (
            "input",
            "the whole conversation, or what comes after an earlier answer: text, or items; what ends it is not the "
            "assistant's",
        ),
        ("instructions", "a system message before the conversation, of this request alone"),
        (
            "previous_response_id",
            "an answer of this session that it goes on from; another one is 400 `previous_response_not_found`",
        ),
        ("model", "any name, which the answer has"),
        ("max_output_tokens", "most tokens of the answer"),
        (
            "include",
            "`message.output_text.logprobs`: the log-probs of the drawn tokens; other words change nothing",
        ),
    ),
    _ABOUT_CLIENTS,
    _ALL_BUT_ANTHROPIC,
    passes(ANYTHING, says="events are not padded")("stream_options"),
    passes(0, says=_NO_OTHERS)("top_logprobs"),
    passes({}, {"format": {"type": "text"}}, says=_NO_GRAMMAR)("text"),
    passes({}, says=_NO_FRAME)("reasoning"),
    passes("disabled", says=_CUT)("truncation"),
    passes(False, says="The answer comes when it is there; leave it out.")("background"),
    takes(
        ("store", "false: nothing goes on from the answer by its id; the session has its tokens all the same")
    ),
    passes(says=_NO_STORE)("conversation", "prompt"),
    passes(says=_NO_HOSTED)("max_tool_calls", "moderation", "access_programs"),
    passes(says="The answer comes when it is there; leave it out.")("background_options"),
    passes(says=_NO_MEDIA)("image"),
    passes(says=_CUT)("context_management"),
)

RESPONSES_TOOL = _keys(
    "`/v1/responses`, in each of `tools`",
    takes(
        ("type", "`function`"),
        ("name", "of the tool"),
        ("description", "for the model"),
        ("parameters", "a JSON schema: an object"),
    ),
    passes(True, False, says="nothing holds a model to a schema")("strict"),
    passes(False, says="A conversation has all its tools; leave it out.")("defer_loading"),
)

MESSAGES = _keys(
    "`/v1/messages`",
    _DRAWING,
    _STREAM,
    takes(
        ("messages", "the whole conversation; what ends it is the user's"),
        ("system", "a system message before it: text, or parts"),
        ("model", "any name, which the answer has"),
        ("max_tokens", "most tokens of the answer; Anthropic's form requires it"),
        ("tools", "functions that may be called"),
        ("tool_choice", "`auto`, or `none`: nothing in the answer is read as a call"),
    ),
    _ABOUT_CLIENTS,
    passes(ANYTHING, says=_CLIENTS)(
        "cache_control", "inference_geo", "betas", "workspace_id", "user_profile_id", "diagnostics", "speed"
    ),
    takes(("stop_sequences", _STOP_TEXTS)),
    passes(says=_NO_FRAME)("thinking", "output_config"),
    passes(says=_NO_GRAMMAR)("output_format"),
    passes([], says=_NO_HOSTED)("mcp_servers"),
    passes(says=_NO_HOSTED)("container"),
    passes(says=_CUT)("context_management"),
)

MESSAGES_TOOL = _keys(
    "`/v1/messages`, in each of `tools`",
    takes(
        ("name", "of the tool"),
        ("description", "for the model"),
        ("input_schema", "a JSON schema: an object"),
    ),
    passes("custom", says=_NO_HOSTED)("type"),
    passes(ANYTHING, says=_CLIENTS)("cache_control", "eager_input_streaming"),
    passes(True, False, says="nothing holds a model to a schema")("strict"),
    passes(False, says="A conversation has all its tools; leave it out.")("defer_loading"),
    passes([], says="Say it in the description.")("input_examples"),
)

TOOL_CHOICE = _keys(
    "`/v1/messages`, in `tool_choice`",
    takes(
        ("type", "`auto`, or `none`"),
        ("disable_parallel_tool_use", "true: an answer has one call at most, the first that the model wrote"),
    ),
)

_TOKEN_SAMPLING = takes(
    ("logprobs", "0 or 1: the log-probs of the drawn tokens, which the answer has anyhow"),
    ("max_tokens", "most tokens of the answer"),
)

TOKENS = _keys(
    "`/inference/v1/generate`",
    takes(
        ("token_ids", "the whole prompt"),
        ("sampling_params", "how tokens are drawn: an object"),
        ("model", "any name, which the answer has"),
        ("stream", "true: one event with the whole answer"),
    ),
    _ABOUT_CLIENTS,
    passes(ANYTHING, says="token ids are in every answer")("return_token_ids"),
    passes({}, says=_NO_MEDIA)("features", "content_parts"),
    passes(says=_NO_OTHERS)("kv_transfer_params"),
    passes(ANYTHING, says=_CLIENTS)("stream_options"),
)

TOKENS_SAMPLING = _keys(
    "`/inference/v1/generate`, in `sampling_params`",
    _DRAWING,
    _TOKEN_SAMPLING,
    _ALL_BUT_ANTHROPIC,
    passes(1, says=_ONE)("n"),
    passes(ANYTHING, says="the answer is token ids")(
        "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "include_stop_str_in_output"
    ),
    passes(ANYTHING, says="no experts are told")("routed_experts_prompt_start"),
    passes(0, says=_NO_OTHERS)("prompt_logprobs"),
    passes([], says=_NO_BIAS)("bad_words"),
    passes(says=_NO_BIAS)("allowed_token_ids", "extra_args"),
    passes(0, 2, says="the answer comes at its end")("output_kind"),
    passes(False, says=_NO_OTHERS)("return_hidden_states", "return_routed_experts"),
)

COMPLETIONS = _keys(
    "`/v1/completions` of a session",
    _DRAWING,
    _STREAM,
    _TOKEN_SAMPLING,
    takes(
        ("prompt", "the whole prompt: a list of token ids"),
        ("model", "any name, which the answer has"),
        ("stream_options", "`include_usage: true`: the stream's last event has `usage`"),
    ),
    _ABOUT_CLIENTS,
    _ALL_BUT_ANTHROPIC,
    passes(1, says=_ONE)("n", "best_of"),
    passes(False, says="Nothing is told of the prompt's tokens; leave it out.")("echo"),
    passes("", says="Answers go on from the prompt; leave it out.")("suffix"),
    passes(True, False, says="token ids are in every answer")("return_token_ids", "add_special_tokens"),
    passes(True, False, says="texts have no special tokens, and token ids are in every answer")(
        "skip_special_tokens"
    ),
    passes({"type": "text"}, says=_NO_GRAMMAR)("response_format"),
)

TABLES: tuple[Keys, ...] = (
    *(CHAT, STREAM_OPTIONS, TOOL, FUNCTION),
    *(RESPONSES, RESPONSES_TOOL),
    *(MESSAGES, MESSAGES_TOOL, TOOL_CHOICE),
    *(TOKENS, TOKENS_SAMPLING, COMPLETIONS),
)
