"""Which keys a request at the door may have, and what becomes of each: it is taken, it is passed over at the values
that change nothing, or it is refused. One table for each body; docs/fleet-keys.md is made of them.

Invariants:
- *nothing else decides*: a dialect reads the keys that its table takes, and no others;
- *false is not silence*: a key that is not taken passes with its own neutral value and no other. Null is silence: the
  key is as if it were left out, unless its row says otherwise.

This module must not know what a taken key means, or of sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre.errors import nearest
from gyre.rollouts.plane.door_ledger import DoorRefused, refused


class _Anything:
    """A neutral value of keys that are about the client."""


ANYTHING = _Anything()


@dataclass(frozen=True, slots=True)
class Key:
    """`passes` are the values that change nothing. `says` is what a taken key asks for, why another one passes, or what
    to do in place of one that is refused."""

    name: str
    is_taken: bool = False
    passes: tuple[Any, ...] = ()
    says: str = ""
    is_null_silent: bool = True


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one body."""

    of: str
    rows: Mapping[str, Key]

    def check_left(self, name: str, value: Any, path: str) -> None:
        """A key that was not taken: raises DoorRefused unless it changes nothing."""
        row = self.rows.get(name)
        if value is None and (row is None or row.is_null_silent):
            return
        if row is None:
            near = nearest(name, [key.name for key in self.rows.values() if key.is_taken])
            raise refused(
                422,
                "unsupported",
                f"{path}: {shown(value)} given, which the door does not know; {near or _LEAVE}",
                param=path,
            )
        if not any(one is ANYTHING or _is_same(value, one) for one in row.passes):
            but = f" but {_listed(row.passes)}" if row.passes else ""
            raise refused(
                422,
                "unsupported",
                f"{path}: {shown(value)} given, and the door takes none{but}.",
                row.says or _LEAVE,
                param=path,
            )


_LEAVE = "Leave it out."


def shown(value: Any) -> str:
    return repr(value)[:60]


def _is_same(value: Any, neutral: Any) -> bool:
    """A truth value is no number, and 1.0 is 1."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    if isinstance(value, int | float) and isinstance(neutral, int | float):
        return value == neutral
    return type(value) is type(neutral) and bool(value == neutral)


def json_text(value: Any) -> str:
    """The neutral value as a client writes it."""
    if value is ANYTHING:
        return "any"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(json_text, values))


def _takes(*rows: tuple[str, str]) -> list[Key]:
    return [Key(name, is_taken=True, says=says) for name, says in rows]


def _passes(*values: Any, says: str = "") -> Any:
    def rows(*names: str) -> list[Key]:
        return [Key(name, passes=values, says=says) for name in names]

    return rows


def _keys(of: str, *groups: list[Key]) -> Keys:
    return Keys(of, {key.name: key for group in groups for key in group})


_DRAWING = _takes(
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
_POLICY = _takes(("policy", "which versions may answer: `at_least` or `exact`"), ("rid", "the request's id"))

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
    *_passes(0, says=_NO_BIAS)("frequency_penalty", "presence_penalty"),
    *_passes(1, says=_NO_BIAS)("repetition_penalty"),
    *_passes({}, says=_NO_BIAS)("logit_bias"),
    *_passes([], says=_NO_STOP)("stop"),
    *_passes(True, False, says="changes nothing with tokenizers of tokenizer.json")(
        "spaces_between_special_tokens"
    ),
    *_passes(says="Events come as tokens come into the ledger (rollouts.report_interval_s); leave it out.")(
        "stream_interval"
    ),
]
_OF_EITHER = [
    *_passes(ANYTHING, says=_CLIENTS)("session_id", "custom_labels"),
    *_passes(says=_NO_ADAPTER)("lora_path"),
    *_passes(says="Prefixes of all keys share a cache; leave it out.")("cache_salt", "extra_key"),
    *_passes({}, says="A request is one prompt with its tokens; leave it out.")("session_params"),
    *_passes(False, says=_NO_OTHERS)("return_hidden_states", "return_routed_experts"),
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
    _passes(0, says=_NO_LENGTH)("min_new_tokens"),
    _passes([], says=_NO_STOP)("stop_regex"),
    _passes(says=_NO_GRAMMAR)("json_schema", "regex", "ebnf", "structural_tag"),
    _passes(says=_NO_SEED)("sampling_seed"),
    _passes({}, says=_NO_BIAS)("custom_params"),
)

GENERATE = _keys(
    "`/generate`",
    _POLICY,
    _takes(
        ("text", "the prompt as text"),
        ("input_ids", "the prompt as token ids"),
        ("sampling_params", "how tokens are drawn: an object"),
        ("stream", "true: events with all tokens so far"),
        ("return_logprob", "true: `output_token_logprobs`"),
        ("return_text_in_logprobs", "true: with the text of each token"),
    ),
    _OF_EITHER,
    _passes(-1, says=_NO_PROMPT)("logprob_start_len"),
    _passes(0, says=_NO_OTHERS)("top_logprobs_num"),
    _passes([], says=_NO_OTHERS)("token_ids_logprob"),
    _passes(False, says=_NO_OTHERS)(
        *("return_sampling_mask", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"),
        *("return_entropy",),
    ),
    _passes([], says=_NO_MEDIA)("image_data", "video_data", "audio_data", "modalities"),
    _passes(says=_NO_MEDIA)(
        *("input_embeds", "positional_embed_overrides", "mm_hashes", "mm_content_hashes", "video_config"),
        *("images_config", "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
        *("video_max_dynamic_patch", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls"),
        *("multi_item_delimiter_indices",),
    ),
    _passes(False, says=_NO_MEDIA)("use_audio_in_video", "return_bytes"),
    _passes(False, says=_NO_PROMPT)("return_prompt_token_ids"),
    _passes(False, says=_NO_OTHERS)("return_indexer_topk"),
    _passes(0, says=_NO_OTHERS)("routed_experts_start_len"),
    _passes(says=_NO_ADAPTER)("lora_id"),
    _passes(says=_NO_BIAS)("custom_logit_processor", "max_thinking_tokens"),
    _passes(False, says=_NO_BIAS)("require_reasoning"),
    _passes(False, says="The answer comes when it is there, or as a stream; leave it out.")("background"),
    _passes(says=_NO_ROUTING)(
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_router_hint", "priority"),
        *("http_worker_ipc", "received_time", "external_trace_header"),
    ),
    _passes(ANYTHING, says=_CLIENTS)("conversation_id", "routing_key"),
    _passes(True, says="What is asked is counted; leave it out.")("log_metrics"),
    _passes(False, says="What is asked is in the ledger; leave it out.")("no_logs"),
)

COMPLETIONS = _keys(
    "`/v1/completions`",
    _POLICY,
    _DRAWING,
    _takes(
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
    _passes(ANYTHING, says=_CLIENTS)("user"),
    _passes(False, says=_NO_PROMPT)("echo"),
    _passes(1, says="Ask for n, and choose yourself.")("best_of"),
    _passes("", says="Answers go on from the prompt; leave it out.")("suffix"),
    _passes(says=_NO_SEED)("seed", "watermarking"),
    _passes(False, says=_NO_BIAS)("use_beam_search"),
    _passes(1, says=_NO_BIAS)("length_penalty"),
    _passes(False, says=_NO_STOP)("include_stop_str_in_output"),
    _passes(0, says=_NO_LENGTH)("min_tokens"),
    _passes([], says=_NO_BIAS)("bad_words"),
    _passes(says=_NO_BIAS)(
        "allowed_token_ids", "thinking_token_budget", "vllm_xargs", "repetition_detection"
    ),
    _passes(says="A prompt is taken whole, or refused; cut it yourself.")(
        "truncate_prompt_tokens", "truncation_side"
    ),
    _passes(says=_NO_PROMPT)("prompt_logprobs"),
    _passes(says=_NO_OTHERS)("logprob_token_ids"),
    _passes(says=_NO_MEDIA)("prompt_embeds"),
    _passes({"type": "text"}, says=_NO_GRAMMAR)("response_format"),
    _passes(says=_NO_GRAMMAR)("structured_outputs", "json_schema", "regex", "ebnf"),
    _passes(0, says=_NO_ROUTING)("priority"),
    _passes(says=_NO_ROUTING)("kv_transfer_params", "ec_transfer_params"),
    _passes(says="Say rid.")("request_id"),
    _passes(False, says="Leave it out; token ids are in every answer.")("return_tokens_as_token_ids"),
    _passes(True, False, says="token ids are in every answer")("return_token_ids"),
    _passes(False, says=_NO_PROMPT)("return_token_offsets"),
    _passes(0, says=_NO_OTHERS)("routed_experts_prompt_start"),
)

STREAM_OPTIONS = _keys(
    "`/v1/completions`, in `stream_options`",
    _takes(("include_usage", "true: the stream's last event has `usage`")),
    _passes(False, says="Leave it out; the last event has the usage of the whole.")("continuous_usage_stats"),
    _passes(False, says="Leave it out; events are not padded.")("include_obfuscation"),
)

POLICY = _keys(
    "`policy`",
    _takes(("at_least", "none older"), ("exact", "no other")),
)

ABORT = _keys(
    "`/abort_request`",
    _takes(("rid", "one request"), ("abort_all", "true: all of the key")),
)

TABLES: tuple[Keys, ...] = (GENERATE, SAMPLING, COMPLETIONS, STREAM_OPTIONS, POLICY, ABORT)


def invalid(message: str, param: str = "") -> DoorRefused:
    return refused(422, "invalid", message, "See docs/fleet.md.", param=param)
