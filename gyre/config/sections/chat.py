"""The section `config.chat`: how conversations are written in the model's tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gyre.config.sections.section import Section


class ChatSettings(Section):
    """The frame of the model in `config.model_path`, by the package `renderers`."""

    renderer: Annotated[str, Field(min_length=1)]
    """A renderer of the package: `qwen3`, `qwen3.5`, `llama-3`, `glm-4.5`, …"""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of its template, as `enable_thinking: false`. What a model thought stays in the conversation unless
    `thinking_retention` says otherwise."""
