"""Chat templates: the Jinja text that comes with a model's tokenizer, rendered in a sandbox.

What a template gives here is what Hugging Face's `apply_chat_template` gives, to the character: the same settings of
Jinja, and the same names. Those are `messages`, `add_generation_prompt`, `tools` and `documents` (None), the special
tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` block.

Invariants:
- *text only*: a template is data from outside; it cannot reach Python's attributes, files or modules;
- *no silent option*: an option that the template does not read is refused.

This module must not know of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from gyre.errors import ConfigError, nearest
from gyre.extras import needed

_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names for an assistant's reasoning, of which a template reads one."""


class ChatTemplate:
    """A chat template. `special` has the texts of the special tokens: `bos_token`, `eos_token`, …"""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **options: Any) -> str:
        """The conversation as one text; with `generate`, up to where the assistant's turn begins. `options` are the
        template's own, such as `enable_thinking`. Raises ConfigError where the template refuses."""
        given = {
            "messages": [_with_reasoning(message) for message in messages],
            "add_generation_prompt": generate,
            "tools": None,
            "documents": None,
        }
        compiled = self._compiled
        try:
            text: str = compiled.render(**{**self.special, **options, **given})
        except Exception as error:  # a template is a program from outside, and fails as it likes
            raise ConfigError(f"the chat template refuses this conversation: {error}.") from error
        return text

    def check_options(self, names: Sequence[str]) -> None:
        """Raises ConfigError for the first name that the template does not read, or that Gyre sets itself."""
        meta = needed("jinja2.meta", "a chat template")
        _ = self._compiled  # is it Jinja at all?
        read = meta.find_undeclared_variables(self._environment.parse(self.source)) - set(_GIVEN)
        for name in names:
            if name in _GIVEN:
                raise ConfigError(f"--template {name}: Gyre sets it, and an option cannot.")
            if name not in read:
                options = sorted(read - self.special.keys())
                known = nearest(name, options) or "It has no options."
                raise ConfigError(f"--template {name}: the chat template does not read it; {known}")

    @cached_property
    def _compiled(self) -> Any:
        exceptions = needed("jinja2.exceptions", "a chat template")
        try:
            return self._environment.from_string(self.source)
        except exceptions.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}.") from error

    @cached_property
    def _environment(self) -> Any:
        return _environment()


def _environment() -> Any:
    """Jinja as `apply_chat_template` sets it up."""
    jinja = needed("jinja2", "a chat template")
    sandbox = needed("jinja2.sandbox", "a chat template")
    extensions = needed("jinja2.ext", "a chat template")

    class GenerationTag(extensions.Extension):  # type: ignore[name-defined,misc]
        """The block around the assistant's text; its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja.nodes.Scope(body, lineno=line)

    class Dict:
        """`dict` without the attributes of the class."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def refuse(message: str) -> None:
        raise jinja.exceptions.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, extensions.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _namespace_of(jinja),
        "dict": Dict(),
    }
    return environment


def _namespace_of(jinja: Any) -> type:
    class Namespace(jinja.utils.Namespace):  # type: ignore[misc]
        """A namespace whose attributes are the template's own: none that begins with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the template's names
            for name in dict(*args[1:], **kwargs):
                _refuse_private(name)
            jinja.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja.exceptions.SecurityError(f"a namespace takes no name like {name!r}")

    return Namespace


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}
