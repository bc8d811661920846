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

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SPECIAL = {
    "qwen3": _CHATML,
    "qwen3-vl": (*_CHATML, *_VISION),
    "qwen3.5": (*_CHATML, *_VISION),
    "qwen3.6": (*_CHATML, *_VISION),
    "qwen3.8": (*_CHATML, *_VISION),
    "nemotron-3.5": _CHATML,
    "glm-4.5": (
        *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gemma4": (
        *(
            "<bos>",
            "<eos>",
            "<|turn>",
            "<turn|>",
            "<|channel>",
            "<channel|>",
            "<|think|>",
            "<|tool>",
            "<tool|>",
        ),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
        *("<|image>", "<|image|>", "<image|>", "<|audio|>", "<|video|>"),
    ),
    "deepseek-v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "llama-3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>"),
    ),
}
_DEEPSEEK = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end")
_ADDED = {
    "glm-4.5": (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    "gemma4": (),
    "deepseek-v3": (
        *("<｜User｜>", "<｜Assistant｜>"),
        *(f"<｜tool▁{one}｜>" for one in (*_DEEPSEEK, "output▁begin", "output▁end")),
    ),
    "llama-3": (),
}
"""Tokens that are one id, and text all the same; Qwen's where none are named."""
_END = {
    "glm-4.5": "<|endoftext|>",
    "gemma4": "<eos>",
    "deepseek-v3": "<｜end▁of▁sentence｜>",
    "llama-3": "<|eot_id|>",
}


def small(name: str, folder: Path) -> Path:
    """A folder with a tokenizer of bytes that has the tokens of this renderer's models."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = Path(__file__).read_text()
    made.train_from_iterator([text, text], trainer)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in _SPECIAL[name]])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in _ADDED.get(name, _QWEN)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": _END.get(name, "<|im_end|>")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def real(name: str, folder: Path) -> Path:
    """The folder of the model's own tokenizer."""
    source = REAL / name
    if name != "llama-3":
        return source
    shutil.copytree(source, folder, dirs_exist_ok=True)
    told = json.loads((source / "tokenizer.json").read_text())
    for one in told["added_tokens"]:
        one["content"] = _RENAMED.get(one["id"], one["content"])
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder
