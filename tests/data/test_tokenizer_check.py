"""A tokenizer is what transformers makes of the whole folder, or is refused: real tokenizers, real transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gyre.data.tokenizer import TextTokenizer
from gyre.data.tokenizer_check import refuse_another_than_transformers
from gyre.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers', of its own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers saves a tokenizer of bytes, beside a model's config."""
    own = Tokenizer(
        models.BPE(
            vocab={letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>", bos_token="<|begin|>")
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 300}')
    return tmp_path


def check(folder: Path) -> None:
    refuse_another_than_transformers(folder, TextTokenizer(folder))


def change(folder: Path, **keys: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_what_transformers_saved_is_taken(folder: Path) -> None:
    check(folder)


def test_tokens_that_stand_in_another_file_alone_are_refused(folder: Path) -> None:
    """Without it `<think>` would be cut into seven tokens, and a model was trained with one."""
    change(folder, extra_special_tokens={"think_token": "<think>"})
    with pytest.raises(ConfigError, match="as transformers"):
        check(folder)


def test_code_that_a_folder_brings_is_refused(folder: Path) -> None:
    change(folder, auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    with pytest.raises(ConfigError, match="code of its own"):
        check(folder)


def test_where_transformers_makes_none_nobody_can_tell(folder: Path) -> None:
    change(folder, eos_token={"content": "<|end|>"})
    check(folder)
