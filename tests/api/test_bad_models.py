"""Folders that no back end can train and no engine can serve: what `gyre plan` says of them, from their files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.api.checks import check_settings
from gyre.config import parse_job
from gyre.engines.embedded.model_choice import served_model
from gyre.graph import compile_job
from gyre.graph.backends import back_ends
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.support import describe
from gyre.rollouts.engines import engines
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint

EMBEDDING, HEAD, NORM, UP = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.1.mlp.up_proj.weight",
)
KNOWN, OTHER = "qwen3", "mistral"
"""A model that Gyre's own decoder computes, and one that transformers does."""
USERS = [*((KNOWN, back_end) for back_end in (one.name for one in back_ends())), (OTHER, "fsdp")]


def write_model(folder: Path, kind: str) -> Path:
    if kind == KNOWN:
        return write_checkpoint(folder)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    write_checkpoint(folder, {**CONFIGS["llama"], "rope_parameters": rope})
    config_keys(model_type="mistral", sliding_window=None)(folder)  # has Llama's tensors
    return folder


def config_keys(**changes: Any) -> Callable[[Path], object]:
    """Keys of `config.json` set, or with `...` removed."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return changed


def narrow(dtype: torch.dtype) -> Callable[[Path], object]:
    return tensors(lambda held: held.update({UP: held[UP].to(dtype)}))


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def content(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def cut(size: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return change


def index_of_a_missing_file(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (folder / "model.safetensors").rename(folder / first)
    where = dict.fromkeys(names, first) | {NORM: second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


YARNS = {"rope_type": "spiral", "factor": 2.0}
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model_type": (config_keys(model_type=...), "model_type must be a text, not None"),
    "a list for a model_type": (config_keys(model_type=["qwen3"]), "model_type must be a text, not "),
    "no JSON": (content("config.json", "{"), "is not JSON"),
    "JSON without an end": (content("config.json", "[" * 100_000), "is not JSON"),
    "no object": (content("config.json", "[]"), "must hold a JSON object"),
    "bytes that are no text": (content("config.json", b"\xff\xfe"), "is not JSON"),
    "a size that is a text": (config_keys(hidden_size="big"), "hidden_size must be a positive integer"),
    "a size of zero": (config_keys(num_attention_heads=0), "num_attention_heads must be a positive integer"),
    "a vocabulary of another size": (config_keys(vocab_size=100), rf"{EMBEDDING} is .*\(96, 32\), .*\(100, 32\)"),
    "a flag that is a text": (config_keys(tie_word_embeddings="false"), "must be true or false, not 'false'"),
    "a dtype that is none": (config_keys(dtype="float17"), "dtype is 'float17'"),
    "a dtype that is quantized": (config_keys(torch_dtype="float8_e4m3fn"), "torch_dtype is 'float8_e4m3fn'"),
    "an end outside of the vocabulary": (config_keys(eos_token_id=[0, 96]), "eos_token_id 96 is not in"),
    "an end below it": (config_keys(eos_token_id=-1), "eos_token_id -1 is not in"),
    "an end that is a text": (config_keys(eos_token_id="</s>"), "eos_token_id must be a token's number"),
    "an end of generation outside of it": (
        content("generation_config.json", '{"eos_token_id": 96000}'),
        "eos_token_id 96000 is not in the vocabulary",
    ),
    "rotary positions of no known kind": (config_keys(rope_parameters=YARNS), "rope type 'spiral' is n"),
    "the same by the older key": (
        config_keys(rope_parameters=..., rope_scaling={"type": "spiral", "factor": 2.0}),
        "rope type 'spiral' is n",
    ),
    "rotary positions that are a list": (config_keys(rope_parameters=[1]), "rope_parameters must be an object"),
    "quantized": (config_keys(quantization_config={"bits": 4}), "quantized weights are not supported"),
    "weights in fp8": (narrow(torch.float8_e4m3fn), r"up_proj\.weight is F8_E4M3 .*quantized weights"),
    "weights in int8": (narrow(torch.int8), r"up_proj\.weight is I8 .*quantized weights"),
    "fp8 with its scales": (
        both(narrow(torch.float8_e5m2), tensors(lambda held: held.update({f"{UP}_scale_inv": torch.ones(1)}))),
        r"up_proj\.weight is F8_E5M2 .*quantized weights",
    ),
    "a file that is cut off": (cut(-100), "cannot be read as safetensors.*Is it whole"),
    "a header that is cut off": (cut(50), "cannot be read as safetensors.*Is it whole"),
    "an empty file": (cut(0), "cannot be read as safetensors.*Is it whole"),
    "an index of a missing file": (index_of_a_missing_file, "lacks 1 of the 2 files"),
    "an index without an end": (content("model.safetensors.index.json", "[" * 100_000), "is not an index"),
    "untied, without a head": (
        both(config_keys(tie_word_embeddings=False), tensors(lambda held: held.pop(HEAD))),
        r"lacks .*lm_head\.weight",
    ),
    "tied, with another head": (config_keys(tie_word_embeddings=True), rf"{HEAD} is not {EMBEDDING}"),
    "tied, with a head of another shape": (
        both(
            config_keys(tie_word_embeddings=True), tensors(lambda held: held.update({HEAD: held[HEAD][:9].clone()}))
        ),
        rf"{HEAD} is not {EMBEDDING}",
    ),
    "an adapter": (content("adapter_config.json", "{}"), "holds an adapter"),
}  # fmt: skip
"""What is done to a whole folder, and what is then said of it."""


def planned(folder: Path, back_end: str) -> list[Any]:
    spec = parse_job(
        {
            "recipe": "grpo",
            "roles": {"actor": {"total": 2}, "rollout": {}, "reward": {}},
            "backend": back_end,
            "config": {"task": {}, "optim": {"lr": 1e-6}, "model_path": str(folder)},
        }
    )
    return list(check_settings(compile_job(spec).spec, here=True))


@pytest.mark.parametrize(("kind", "back_end"), USERS)
@pytest.mark.parametrize("harm", HARMS)
def test_plan_refuses_a_folder_in_a_sentence_with_a_hint(
    harm: str, kind: str, back_end: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", kind)
    planned(folder, back_end)
    change, sentence = HARMS[harm]
    change(folder)
    with pytest.raises(Exception, match=sentence) as caught:
        planned(folder, back_end)
    error: Any = caught.value
    assert error.code.startswith("config"), "a mistake of the job's, by its code"
    assert error.message.startswith("config.model_path: ")
    assert error.hint


def served(folder: Path) -> None:
    served_model(folder).load(folder, torch.float32)


@pytest.mark.parametrize("harm", HARMS)
def test_so_do_the_table_of_models_and_the_engine(harm: str, tmp_path: Path) -> None:
    change, sentence = HARMS[harm]
    for kind in (KNOWN, OTHER):
        folder = write_model(tmp_path / kind, kind)
        change(folder)
        try:
            said = describe(folder, back_ends(), engines()).refused["fsdp"]
        except ModelFolderError as error:
            said = str(error)
        assert said
    with pytest.raises(ModelFolderError, match=sentence) as caught:
        served(change_of(tmp_path / "served", change))
    assert caught.value.hint


def change_of(folder: Path, change: Callable[[Path], object]) -> Path:
    """A model of Gyre's own decoder, harmed."""
    write_model(folder, KNOWN)
    change(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_nobody_reads_quantized_weights_as_if_they_were_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", OTHER)
    narrow(dtype)(folder)
    with pytest.raises(ModelFolderError, match="quantized weights are not supported"):
        SafetensorsFolder(folder).tensors()


def test_what_is_no_weight_may_be_of_integers(tmp_path: Path) -> None:
    """A mask, as old folders have them; whether the model has it, transformers says."""
    folder = write_model(tmp_path / "m", OTHER)
    tensors(lambda held: held.update({"model.mask": torch.ones(2, 2, dtype=torch.uint8)}))(folder)
    planned(folder, "fsdp")


def test_a_tied_model_may_hold_its_head_once_more(tmp_path: Path) -> None:
    for kind in (KNOWN, OTHER):
        folder = write_model(tmp_path / kind, kind)
        config_keys(tie_word_embeddings=True)(folder)
        tensors(lambda held: held.update({HEAD: held[EMBEDDING].clone()}))(folder)
        planned(folder, "fsdp")


@pytest.mark.parametrize("changes", [{"eos_token_id": None}, {"eos_token_id": ...}, {"dtype": "bfloat16"}])
def test_what_a_folder_may_leave_out(changes: dict[str, Any], tmp_path: Path) -> None:
    """Requests say themselves which tokens end an answer: those of the tokenizer."""
    for kind, back_end in USERS:
        folder = write_model(tmp_path / kind / back_end, kind)
        config_keys(**changes)(folder)
        planned(folder, back_end)
