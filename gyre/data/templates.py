"""Chat templates: the Jinja text that comes with a model's tokenizer, rendered in a sandbox.

A template may use the names of Hugging Face's `apply_chat_template`: `messages`, `add_generation_prompt`, the special
tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` block.

Invariant *text only*: a template is data from outside; it cannot reach Python's attributes, files or modules.

This module must not know of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from gyre.data.extras import needed
from gyre.errors import ConfigError


class ChatTemplate:
    """A chat template. `special` has the texts of the special tokens: `bos_token`, `eos_token`, …"""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})

    def render(self, messages: Sequence[Mapping[str, str]], *, generate: bool = True, **options: Any) -> str:
        """The conversation as one text; with `generate`, up to where the assistant's turn begins. `options` are the
        template's own, such as `enable_thinking`. Raises ConfigError where the template refuses."""
        exceptions = needed("jinja2.exceptions", "a chat template")
        try:
            text: str = self._compiled.render(
                messages=list(messages), add_generation_prompt=generate, **{**self.special, **options}
            )
        except exceptions.TemplateError as error:
            raise ConfigError(f"the chat template refuses this conversation: {error}.") from error
        return text

    @cached_property
    def _compiled(self) -> Any:
        jinja = needed("jinja2", "a chat template")
        sandbox = needed("jinja2.sandbox", "a chat template")
        extensions = needed("jinja2.ext", "a chat template")

        class Generation(extensions.Extension):  # type: ignore[name-defined,misc]
            """The block around the assistant's text; its content is rendered as it is."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                return jinja.nodes.Scope(body, lineno=line)

        def refuse(message: str) -> None:
            raise jinja.exceptions.TemplateError(message)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja.exceptions.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}.") from error
