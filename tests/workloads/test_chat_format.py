"""The chat format of a job: its model's, its task's, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.chat.messages import Message
from gyre.chat.packaged import PackagedRenderer
from gyre.errors import ConfigError
from gyre.workloads.chat_format import renderer_of
from tests.chat.tokenizers import small

TASK = {"task": {"name": "arithmetic"}}


def test_the_models_frame_is_what_config_chat_names(tmp_path: Path) -> None:
    chat = {"renderer": "qwen3", "settings": {"enable_thinking": False}}
    found = renderer_of({"model_path": str(small("qwen3", tmp_path)), "chat": chat})
    assert isinstance(found, PackagedRenderer)
    prompt = found.render((Message("user", "a"),), ())
    assert "".join(found.written(prompt)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ({"renderer": "qwen3"}, "no model's folder"),
        ({}, "renderer"),
        ({"renderer": "qwen3", "enable_thinking": False}, "enable_thinking"),
    ],
)
def test_a_section_that_names_no_frame_is_refused(chat: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        renderer_of({**TASK, "chat": chat})


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ({"renderer": "qwen9"}, r"^config\.chat\.renderer: 'qwen9' is none .* did you mean 'qwen3'\?$"),
        ({"renderer": "auto"}, r"'auto' writes no turn behind another"),
        (
            {"renderer": "qwen3", "settings": {"enable_thinkin": True}},
            r"^config\.chat\.settings\.enable_thinkin: True given: Extra inputs .* 'qwen3'\.$",
        ),
    ],
)
def test_what_the_package_has_not_is_told_by_its_key(
    chat: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        renderer_of({"model_path": str(small("qwen3", tmp_path)), "chat": chat})
    assert "tagged-union" not in str(raised.value)


def test_a_task_of_single_answers_has_none() -> None:
    assert renderer_of(TASK) is None
