"""Chat templates: the text that transformers gives, and options that have an effect."""

from __future__ import annotations

import json
import warnings

import pytest

from gyre.data.folder import PreparedFolder
from gyre.data.prepare import PromptRecipe, prepare
from gyre.data.templates import ChatTemplate
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from tests.data.small import TEMPLATE, write_lines, write_tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b>'é'</b>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Yes", "reasoning_content": "hm"},
        {"role": "user", "content": "?"},
    ],
]
ALL = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
IDIOMS = {
    "tools": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}" + ALL,
    "no tools": "{% if not tools is defined %}{% set tools = 1 %}{% endif %}{{ tools }}" + ALL,
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}|{{ mask_token }}|{{ image_token }}|{{ boi }}",
    "json": "{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}",
    "json, narrow": "{{ messages|tojson(separators=(',', ':')) }}{{ messages|tojson(true) }}",
    "namespace": "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "namespace of self": "{% set ns = namespace(self=1) %}{{ ns.self }}",
    "dict": "{{ dict(a=1)|tojson }}{{ dict.fromkeys(['a'])|tojson }}",
    "loops": "{% for m in messages[::-1] %}{% if m.role == 'system' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "white space": "  {% if true %}\n  x\n  {%- endif %}\n{% set y = 1 %}\n  y\n",
    "generation": "{% generation %}{% set z = 1 %}{{ messages[0].content }}{% endgeneration %}{{ z }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
    "absent keys": "{% for m in messages %}{{ m.name is defined }}{{ m.tool_calls is defined }}{% endfor %}",
    "macro": "{% macro f(x) %}{{ x }}!{% endmacro %}{{ f(messages[0].content) }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
    "by name": [{"name": "tool_use", "template": "X"}, {"name": "default", "template": ALL}],
}


def folder_of(path, template, special_map=None, **config):
    write_tokenizer(path)
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
        "sep_token": "<|endoftext|>",
        "image_token": "<|im_end|>",
        "chat_template": template,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    if special_map:
        (path / "special_tokens_map.json").write_text(json.dumps(special_map))
    return path


def of_transformers(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize(
    "special",
    [
        {},
        {"special_map": {"eos_token": "<|endoftext|>", "mask_token": {"content": "<|im_end|>"}}},
        {"extra_special_tokens": {"boi": "<|im_start|>"}},
        {
            "special_map": {"bos_token": "<|im_end|>"},
            "added_tokens_decoder": {"2": {"content": "<|im_end|>"}},
        },
    ],
    ids=["config", "map", "named", "map beside a decoder"],
)
def test_a_template_gives_what_transformers_gives(tmp_path, idiom, special):
    folder = folder_of(tmp_path / "model", IDIOMS[idiom], **special)
    theirs, ours = of_transformers(folder), TextTokenizer(folder)
    for conversation in CONVERSATIONS:
        messages = [{key: value for key, value in one.items() if value is not None} for one in conversation]
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        text = ours.template.render(messages)
        assert text == expected
        tokens = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert ours.encode([text], special=False) == [tokens]


@pytest.mark.parametrize(
    "kept",
    [
        {
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Left",
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        {"truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
    ],
)
def test_padding_and_truncation_of_the_last_user_are_ignored(tmp_path, kept):
    from tokenizers import Tokenizer

    model = write_tokenizer(tmp_path / "model")
    plain = TextTokenizer(model).encode(["a" * 40, "b"], special=True)
    file = model / "tokenizer.json"
    saved = json.loads(file.read_text())
    if "padding" in kept:
        kept["padding"]["pad_to_multiple_of"] = 8
    file.write_text(json.dumps(saved | kept))
    assert len(Tokenizer.from_file(str(file)).encode("aé" * 40).ids) % 4 == 0, "the file has it"
    assert TextTokenizer(model).encode(["a" * 40, "b"], special=True) == plain
    source = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a" * 40}, {"prompt": "b"}])
    prepare(source, tmp_path / "out", model, PromptRecipe(chat=False))
    folder = PreparedFolder(tmp_path / "out")
    assert [folder.prompt_ids(row).tolist() for row in range(2)] == plain
    copied = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    assert [one.ids for one in copied.encode_batch(["a" * 40, "b"])] == plain


@pytest.mark.parametrize(
    ("template", "names", "sentence"),
    [
        (TEMPLATE, ["enable_thinkin"], "--template enable_thinkin: .* did you mean 'enable_thinking'"),
        (ALL, ["enable_thinking"], "does not read it; It has no options"),
        (TEMPLATE, ["messages"], "--template messages: Gyre sets it"),
        (TEMPLATE, ["add_generation_prompt"], "Gyre sets it"),
        (ALL + "{{ tools }}", ["tools"], "Gyre sets it"),
        ("{% set x = 1 %}{{ x }}", ["x"], "does not read it"),
        ("{% if %}", ["x"], "not valid Jinja"),
    ],
)
def test_an_option_without_effect_is_refused(template, names, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ChatTemplate(template).check_options(names)


@pytest.mark.parametrize(
    "template",
    [
        "{% if date_string is not defined %}{% set date_string = 'x' %}{% endif %}{{ date_string }}",
        "{% macro f(a) %}{{ date_string }}{% endmacro %}{{ f(1) }}",
        "{{ namespace(a=date_string).a }}",
    ],
)
def test_an_option_that_is_read_is_taken(template):
    ChatTemplate(template).check_options(["date_string"])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ 1 + 'a' }}", "refuses this conversation: unsupported operand"),
        ("{{ 1 / 0 }}", "refuses this conversation: division by zero"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "refuses this conversation"),
        ("{{ namespace(__class__=1) }}", "refuses this conversation"),
        ("{% include 'x' %}", "refuses this conversation"),
    ],
)
def test_a_template_that_fails_is_one_sentence(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ChatTemplate(template).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"chat": False, "system": "s"}, "--system and --no-chat are both given"),
        ({"chat": False, "template": {"enable_thinking": False}}, "--template and --no-chat are both given"),
        ({"template": {"enable_thinkin": False}}, "did you mean 'enable_thinking'"),
        ({"suffix": "\udcff"}, "--suffix holds half a character"),
        ({"system": "\udcff"}, "--system holds half a character"),
        ({"keep_unanswered": True}, "--keep-unanswered: no column has answers"),
    ],
)
def test_options_of_prepare_that_would_do_nothing(tmp_path, how, sentence):
    source = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(ConfigError, match=sentence):
        prepare(source, tmp_path / "out", write_tokenizer(tmp_path / "model"), PromptRecipe(**how))


def test_a_system_message_that_the_template_does_not_write(tmp_path):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    source = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(ConfigError, match="does not write system messages"):
        prepare(source, tmp_path / "out", folder_of(tmp_path / "model", template), PromptRecipe(system="S"))


def test_the_system_message_of_the_recipe_is_the_only_one(tmp_path):
    model = write_tokenizer(tmp_path / "model")
    rows = [
        {"prompt": [{"role": "system", "content": "S1"}, {"role": "user", "content": "u"}]},
        {"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
    ]
    how = PromptRecipe(system="S2", suffix=" Think.")
    manifest = prepare(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", model, how)
    folder, tokenizer = PreparedFolder(tmp_path / "out"), TextTokenizer(model)
    expected = [{"role": "system", "content": "S2"}, {"role": "user", "content": "u Think."}]
    (tokens,) = tokenizer.encode([tokenizer.template.render(expected)], special=False)
    assert [folder.prompt_ids(row).tolist() for row in range(2)] == [tokens, tokens]
    assert manifest["system_replaced"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokenizer.json": "{"}, r"tokenizer\.json cannot be read"),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json holds a list"),
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja cannot be read"),
        ({"generation_config.json": '{"eos_token_id": 9999}'}, "the end token 9999 is not in the vocabulary"),
        ({"config.json": '{"eos_token_id": -1}'}, "the end token -1 is not in the vocabulary"),
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path, change, sentence):
    model = write_tokenizer(tmp_path / "model")
    for name, content in change.items():
        (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=sentence):
        TextTokenizer(model)


def test_templates_without_a_default_are_refused(tmp_path):
    folder = folder_of(
        tmp_path / "model", [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
    )
    with pytest.raises(ConfigError, match=r"has the chat templates rag, tool_use, .*chat_template\.jinja"):
        TextTokenizer(folder)


def test_a_model_s_name_on_the_hub_comes_with_its_command(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"):
        TextTokenizer(Path("Qwen/Qwen3-0.6B"))
