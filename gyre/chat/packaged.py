"""Conversations in the frames of real models, by the package `renderers`: its renderer and its settings are the job's.

Each renderer bridges: what a turn adds is encoded behind what was drawn, which stays as it was drawn. What a model
thought stays in the path too (`thinking_retention: all`): by their templates some models drop it as soon as the user
speaks, and every such turn would begin a branch.

Invariants:
- *a bridge is a prefix's*: what the package returns begins with the path, bit for bit, or it is no bridge;
- *foreign text is text*: by `gyre.chat.frame_tokenizer`; a renderer that encodes by other means is refused at its
  start.

This module must not know which models there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from gyre.chat.frame_tokenizer import FrameTokenizer, texts_of
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.errors import ConfigError, nearest
from gyre.extras import needed
from gyre.request_body import refused

_HOSTILE = "a {0} b"
"""What a renderer is tried with: a literal of each token that ends an answer, in a text."""

_WRITTEN = ("ok", "unknown_tool")
"""Statuses of the package's calls that have a name and arguments: an agent answers that it knows no such tool."""


class PackagedRenderer:
    """Of a model's folder and the package's settings for it: `name` (`qwen3`, `llama-3`, …), and the fields of its
    template (`enable_thinking`, …). Raises ConfigError where the package is missing, the settings are none of its, or
    the folder's tokenizer has not the frame's tokens. From any thread: each call that writes has the renderer for
    itself."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        package = needed("renderers", "config.chat")
        self._tokenizer = FrameTokenizer(folder)
        self._lock = Lock()
        self._renderer = _renderer(package, self._tokenizer, settings)
        self._stops = tuple(int(one) for one in self._renderer.get_stop_token_ids())
        self._check()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """int `[p]`. Raises ChatRefused for messages that the model's template has no place for."""
        with self._lock:
            told, specs = self._broken(messages, tools)
            try:
                ids = self._renderer.render_ids(told, tools=specs, add_generation_prompt=True)
            except _UNRENDERABLE as error:
                raise _unrenderable(error) from error
        return [int(one) for one in ids]

    def bridge(
        self,
        prompt_ids: Sequence[int],
        drawn_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """int `[a]`. None also where the package would change the path: a stop within what was thought, say."""
        prompt, drawn = [int(one) for one in prompt_ids], [int(one) for one in drawn_ids]
        if not messages or any(one.role == "assistant" for one in messages):
            return None
        with self._lock:
            told, specs = self._broken(messages, tools)
            try:
                found = self._renderer.bridge_to_next_turn(prompt, drawn, told, tools=specs)
            except _UNRENDERABLE as error:
                raise _unrenderable(error) from error
        path = prompt + drawn
        if found is None or found.token_ids[: len(path)] != path:
            return None
        return [int(one) for one in found.token_ids[len(path) :]]

    def parse(self, prompt_ids: Sequence[int], drawn_ids: Sequence[int], tools: Sequence[Tool]) -> Message:
        """A call that cannot be read is content, as the model wrote it: nothing that was drawn vanishes."""
        prompt, drawn = [int(one) for one in prompt_ids], [int(one) for one in drawn_ids]
        with self._lock:
            specs = [_spec(one) for one in tools] or None
            found = self._renderer.parse_response(drawn, tools=specs, prompt_ids=prompt)
        calls, broken = [], []
        for one in found.tool_calls:
            if one.name and str(one.status) in _WRITTEN:
                calls.append(ToolCall("", one.name, _arguments(one)))
            else:
                broken.append(one.raw)
        content = "\n".join(text for text in (found.content, *broken) if text)
        return Message("assistant", content, found.reasoning_content or "", tuple(calls))

    def written(self, ids: Sequence[int]) -> list[str]:
        """Without the lock: tokens are read as they come, while long conversations are written."""
        return self._tokenizer.written([int(one) for one in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self._tokenizer.pieces([int(one) for one in ids])

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.text([int(one) for one in ids])

    def _broken(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools in the package's form, with no literal of a token in what they say."""
        told, specs = [_wire(one) for one in messages], [_spec(one) for one in tools]
        self._tokenizer.begin((*texts_of(told), *texts_of(specs)))
        return self._tokenizer.broken(told), self._tokenizer.broken(specs) or None

    def _check(self) -> None:
        """Raises ConfigError unless the renderer encodes by the tokenizer that it was given, and bridges."""
        literals = " ".join(self._tokenizer.decode([one]) for one in self._stops)
        hostile = _HOSTILE.format(literals)
        counts = []
        for text in ("a", hostile):
            asked = (Message("user", text),)
            prompt = self.render(asked, ())
            added = self.bridge(
                prompt, (), asked, ()
            )  # nothing drawn: where a prompt opens a thought, none may stop in it
            if added is None:
                raise ConfigError(
                    f"The renderer {self._renderer.config.name!r} writes no turn behind another.",
                    hint="Name a renderer of the model's family in config.chat.",
                )
            ids = [*prompt, *added]
            counts.append(sum(one in self._tokenizer.added_ids for one in ids))
            if text not in self._tokenizer.decode(ids):
                counts.append(-1)
        if len(set(counts)) > 1:
            raise ConfigError(
                f"The renderer {self._renderer.config.name!r} makes control tokens of what a client says.",
                hint="Name another renderer in config.chat.",
            )


_UNRENDERABLE = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError)
"""What the package raises for messages that a template has no place for: a system message in the middle, two calls
where one may be, a schema that is too deep."""


def _unrenderable(error: Exception) -> Exception:
    return refused(
        422,
        "not_renderable",
        f"The model's template has no place for these messages: {str(error)[:200] or type(error).__name__}.",
    )


def _renderer(package: Any, tokenizer: FrameTokenizer, settings: Mapping[str, Any]) -> Any:
    from pydantic import TypeAdapter, ValidationError

    known = _names(package)
    name = settings.get("name")
    if name in (None, "auto", "default"):
        raise ConfigError(
            f"config.chat: the renderer {name!r} writes no turn behind another.",
            hint=f"Name one of {', '.join(known)}.",
        )
    if name not in known:
        raise ConfigError(
            f"config.chat.renderer: {name!r} is none of the package renderers; {nearest(str(name), known)}"
        )
    try:
        config = TypeAdapter(package.RendererConfig).validate_python(
            {"thinking_retention": "all", **settings}
        )
        return package.create_renderer(tokenizer, config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"config.chat.settings.{first['loc'][-1]}: {first['input']!r:.40} given: {first['msg']}, by the renderer "
            f"{name!r}."
        ) from error
    except Exception as error:  # a renderer raises whatever its own packages do
        raise ConfigError(
            f"config.chat: no renderer {name!r} for {tokenizer.name_or_path}: {error!s:.300}.",
            hint=f"The package has {', '.join(known)}.",
        ) from error


def _names(package: Any) -> list[str]:
    package.base._populate_registry()
    return sorted(set(package.base.RENDERER_REGISTRY) - {"default"})


def _wire(message: Message) -> dict[str, Any]:
    """A message in the package's form."""
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {"name": one.name, "arguments": _mapping(one.arguments)},
            }
            for one in message.tool_calls
        ]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    return told


def _spec(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": dict(tool.parameters)}}


def _mapping(arguments: str) -> Any:
    """The arguments as templates want them, the text where they are no object."""
    try:
        told = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # what a model writes is often no JSON
        return arguments
    return told if isinstance(told, dict) else arguments


class _Written(msgspec.Struct):
    arguments: msgspec.Raw


def _arguments(call: Any) -> str:
    """As the model wrote them, where its form of a call is JSON; else the JSON of what was read."""
    try:
        return bytes(msgspec.json.decode(call.raw, type=_Written).arguments).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):  # it is of another form
        told = call.arguments
        return told if isinstance(told, str) else json.dumps({} if told is None else told, ensure_ascii=False)
