"""The chat format of a job's model: what puts messages into its tokens.

This module must not know who speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.chat.packaged import PackagedRenderer
from gyre.chat.plain import PlainRenderer
from gyre.chat.renderer import Renderer
from gyre.config.sections import ChatSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.workloads.tasks.task import task_of


def renderer_of(config: Mapping[str, Any]) -> Renderer | None:
    """That of `config.chat`, or of the job's task; None where its tokens have no place for a conversation, so that
    agents ask with token ids. Raises ConfigError."""
    settings = WorkloadSettings.read(config)
    if settings.chat is not None:
        return _of_model(settings.chat, settings.model_path)
    tokenizer = task_of(config).tokenizer
    if not hasattr(tokenizer, "alphabet"):
        return None
    try:
        return PlainRenderer(tokenizer)  # type: ignore[arg-type]  # it has an alphabet
    except ConfigError:
        return None  # the alphabet has no characters for a frame: the task is one of single answers


def _of_model(chat: ChatSettings, folder: str) -> Renderer:
    if not folder:
        raise ConfigError(
            "config.chat: is given, but there is no model's folder whose tokenizer it could be.",
            hint="Give config.model_path, or leave config.chat out.",
        )
    return PackagedRenderer(Path(folder), {**chat.settings, "name": chat.renderer})
