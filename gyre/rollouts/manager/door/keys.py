"""Which keys a request at the door may have, and what becomes of each. One table for each body, as
`gyre.request_body` has them; docs/fleet-keys.md is made of them.

This module must not know what a taken key means, or of sockets.
"""

from __future__ import annotations

from functools import partial

from gyre import request_body
from gyre.request_body import ANYTHING, Key, Keys, passes, table, takes

PAGE = "docs/fleet.md"
"""Where the forms of bodies stand."""

invalid = partial(request_body.invalid, page=PAGE)
decoded = partial(request_body.decoded, page=PAGE)
token_ids = partial(request_body.token_ids, page=PAGE)

_keys = partial(table, server="the door", page=PAGE)

_DRAWING = takes(
    ("n", "samples of the prompt"),
    ("temperature", "0 for the likeliest token"),
    ("top_p", "above 0"),
    ("top_k", "-1 or 0 for off"),
    ("min_p", "0 for off"),
    ("stop_token_ids", "tokens that end a sample, besides the model's"),
    ("ignore_eos", "no token ends a sample"),
    ("skip_special_tokens", "true: texts are without them"),
    ("no_stop_trim", "true: texts have the token that ended the sample"),
)
_POLICY = takes(("policy", "which versions may answer: `at_least` or `exact`"), ("rid", "the request's id"))

_NO_STOP = "The engines know token ids alone: give stop_token_ids, or cut the text yourself."
_NO_GRAMMAR = "The engines have no grammars; leave it out."
_NO_BIAS = "The engines draw by temperature, top_p, top_k and min_p alone; leave it out."
_NO_SEED = "The manager gives each sample its seed, so that it goes on the same elsewhere; leave it out."
_NO_LENGTH = "A sample ends by its end tokens, or at its largest length; leave it out."
_NO_OTHERS = "Engines tell the drawn tokens and their log-probs alone; leave it out."
_NO_PROMPT = "Nothing is told of the prompt's tokens; leave it out."
_NO_MEDIA = "Prompts are text or token ids; leave it out."
_NO_ADAPTER = "A fleet serves the version that was published, for everybody; leave it out."
_NO_ROUTING = "The manager places samples; leave it out."
_CLIENTS = "about the client"

_ENGINES_LACK: list[Key] = [
    *passes(0, says=_NO_BIAS)("frequency_penalty", "presence_penalty"),
    *passes(1, says=_NO_BIAS)("repetition_penalty"),
    *passes({}, says=_NO_BIAS)("logit_bias"),
    *passes([], says=_NO_STOP)("stop"),
    *passes(True, False, says="changes nothing with tokenizers of tokenizer.json")(
        "spaces_between_special_tokens"
    ),
    *passes(says="Events come as tokens come into the ledger (rollouts.report_interval_s); leave it out.")(
        "stream_interval"
    ),
]
_OF_EITHER = [
    *passes(ANYTHING, says=_CLIENTS)("session_id", "custom_labels"),
    *passes(says=_NO_ADAPTER)("lora_path"),
    *passes(says="Prefixes of all keys share a cache; leave it out.")("cache_salt", "extra_key"),
    *passes({}, says="A request is one prompt with its tokens; leave it out.")("session_params"),
    *passes(False, says=_NO_OTHERS)("return_hidden_states", "return_routed_experts"),
]

SAMPLING = _keys(
    "`/generate`, in `sampling_params`",
    _DRAWING,
    [
        Key(
            "max_new_tokens",
            is_taken=True,
            says="most tokens of a sample; null, which is as many as the model takes to SGLang, is refused",
            is_null_silent=False,
        )
    ],
    _ENGINES_LACK,
    passes(0, says=_NO_LENGTH)("min_new_tokens"),
    passes([], says=_NO_STOP)("stop_regex"),
    passes(says=_NO_GRAMMAR)("json_schema", "regex", "ebnf", "structural_tag"),
    passes(says=_NO_SEED)("sampling_seed"),
    passes({}, says=_NO_BIAS)("custom_params"),
)

GENERATE = _keys(
    "`/generate`",
    _POLICY,
    takes(
        ("text", "the prompt as text"),
        ("input_ids", "the prompt as token ids"),
        ("sampling_params", "how tokens are drawn: an object"),
        ("stream", "true: events with all tokens so far"),
        ("return_logprob", "true: `output_token_logprobs`"),
        ("return_text_in_logprobs", "true: with the text of each token"),
    ),
    _OF_EITHER,
    passes(-1, says=_NO_PROMPT)("logprob_start_len"),
    passes(0, says=_NO_OTHERS)("top_logprobs_num"),
    passes([], says=_NO_OTHERS)("token_ids_logprob"),
    passes(False, says=_NO_OTHERS)(
        *("return_sampling_mask", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
        *("return_entropy",),
    ),
    passes([], says=_NO_MEDIA)("image_data", "video_data", "audio_data", "modalities"),
    passes(says=_NO_MEDIA)(
        *("input_embeds", "positional_embed_overrides", "mm_hashes", "mm_content_hashes", "video_config"),
        *("images_config", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
        *("video_max_dynamic_patch", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls"),
        *("multi_item_delimiter_indices",),
    ),
    passes(False, says=_NO_MEDIA)("use_audio_in_video", "return_bytes"),
    passes(False, says=_NO_PROMPT)("return_prompt_token_ids"),
    passes(False, says=_NO_OTHERS)("return_indexer_topk"),
    passes(0, says=_NO_OTHERS)("routed_experts_start_len"),
    passes(says=_NO_ADAPTER)("lora_id"),
    passes(says=_NO_BIAS)("custom_logit_processor", "max_thinking_tokens"),
    passes(False, says=_NO_BIAS)("require_reasoning"),
    passes(False, says="The answer comes when it is there, or as a stream; leave it out.")("background"),
    passes(says=_NO_ROUTING)(
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_router_hint", "priority"),
        *("http_worker_ipc", "received_time", "external_trace_header"),
    ),
    passes(ANYTHING, says=_CLIENTS)("conversation_id", "routing_key"),
    passes(True, says="What is asked is counted; leave it out.")("log_metrics"),
    passes(False, says="What is asked is in the ledger; leave it out.")("no_logs"),
)

COMPLETIONS = _keys(
    "`/v1/completions`",
    _POLICY,
    _DRAWING,
    takes(
        ("model", "the fleet's name"),
        ("prompt", "one prompt: text or token ids"),
        (
            "add_special_tokens",
            "false: a text without the tokens that the tokenizer adds, such as its begin token",
        ),
        ("max_tokens", "most tokens of a sample"),
        ("logprobs", "0 or 1: log-probs of the drawn tokens"),
        ("stream", "true: events with the new tokens"),
        ("stream_options", "`include_usage: true`: the stream's last event has `usage`"),
    ),
    _ENGINES_LACK,
    _OF_EITHER,
    passes(ANYTHING, says=_CLIENTS)("user"),
    passes(False, says=_NO_PROMPT)("echo"),
    passes(1, says="Ask for n, and choose yourself.")("best_of"),
    passes("", says="Answers go on from the prompt; leave it out.")("suffix"),
    passes(says=_NO_SEED)("seed", "watermarking"),
    passes(False, says=_NO_BIAS)("use_beam_search"),
    passes(1, says=_NO_BIAS)("length_penalty"),
    passes(False, says=_NO_STOP)("include_stop_str_in_output"),
    passes(0, says=_NO_LENGTH)("min_tokens"),
    passes([], says=_NO_BIAS)("bad_words"),
    passes(says=_NO_BIAS)("allowed_token_ids", "thinking_token_budget", "vllm_xargs", "repetition_detection"),
    passes(says="A prompt is taken whole, or refused; cut it yourself.")(
        "truncate_prompt_tokens", "truncation_side"
    ),
    passes(says=_NO_PROMPT)("prompt_logprobs"),
    passes(says=_NO_OTHERS)("logprob_token_ids"),
    passes(says=_NO_MEDIA)("prompt_embeds"),
    passes({"type": "text"}, says=_NO_GRAMMAR)("response_format"),
    passes(says=_NO_GRAMMAR)("structured_outputs", "json_schema", "regex", "ebnf"),
    passes(0, says=_NO_ROUTING)("priority"),
    passes(says=_NO_ROUTING)("kv_transfer_params", "ec_transfer_params"),
    passes(says="Say rid.")("request_id"),
    passes(False, says="Leave it out; token ids are in every answer.")("return_tokens_as_token_ids"),
    passes(True, False, says="token ids are in every answer")("return_token_ids"),
    passes(False, says=_NO_PROMPT)("return_token_offsets"),
    passes(0, says=_NO_OTHERS)("routed_experts_prompt_start"),
)

STREAM_OPTIONS = _keys(
    "`/v1/completions`, in `stream_options`",
    takes(("include_usage", "true: the stream's last event has `usage`")),
    passes(False, says="Leave it out; the last event has the usage of the whole.")("continuous_usage_stats"),
    passes(False, says="Leave it out; events are not padded.")("include_obfuscation"),
)

POLICY = _keys(
    "`policy`",
    takes(("at_least", "none older"), ("exact", "no other")),
)

ABORT = _keys(
    "`/abort_request`",
    takes(("rid", "one request"), ("abort_all", "true: all of the key")),
)

TABLES: tuple[Keys, ...] = (GENERATE, SAMPLING, COMPLETIONS, STREAM_OPTIONS, POLICY, ABORT)
