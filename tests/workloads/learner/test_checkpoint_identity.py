"""Whose checkpoint a folder is: of which back end, and of which model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.graph.backends import Backend, back_ends
from gyre.models.architecture import architecture_of
from gyre.workloads.learner.checkpoint_identity import (
    another_config,
    config_in,
    refuse_another_model,
    refuse_another_writer,
    written_by,
)
from gyre.workloads.learner.errors import CheckpointMismatch
from tests.engines.embedded.tiny import CONFIGS
from tests.other_checkpoints import write_beginnings

CONFIG = CONFIGS["qwen3"]


@pytest.mark.parametrize("own", back_ends(), ids=lambda one: one.name)
def test_a_checkpoint_of_another_back_end_is_refused_with_the_way_to_its_weights(
    own: Backend, tmp_path: Path
) -> None:
    for name, folder in write_beginnings(tmp_path).items():
        writer = written_by(folder)
        assert writer is not None
        assert writer.name == name
        if writer == own:
            refuse_another_writer(folder, own)
            continue
        with pytest.raises(
            CheckpointMismatch, match=f"is one of {writer.writer}, not of {own.writer}"
        ) as found:
            refuse_another_writer(folder, own)
        assert f"--from {folder}" in found.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000])
def test_what_is_no_whole_checkpoint_is_left_to_the_back_ends_own_reader(
    content: bytes, tmp_path: Path
) -> None:
    assert written_by(tmp_path) is None
    (tmp_path / "actor.json").write_bytes(content)
    for own in back_ends():
        refuse_another_writer(tmp_path, own)
        refuse_another_writer(tmp_path / "never there", own)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, ""),
    "other context": ({"max_position_embeddings": 8192}, ""),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers is 1 instead of 2"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is true instead of false"),
    "other positions": ({"rope_theta": 5.0}, "rope_theta is 5.0 instead of"),
    "another family": ({"model_type": "llama"}, "model_type is llama instead of qwen3"),
    "of no family": ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
    "no number": ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(change: str, tmp_path: Path) -> None:
    changed, sentence = CHANGES[change]
    own, theirs = architecture_of(CONFIG, "config.json"), {**CONFIG, **changed}
    if not sentence:
        refuse_another_model(tmp_path, theirs, own)
        return
    with pytest.raises(CheckpointMismatch, match=sentence) as found:
        refuse_another_model(tmp_path, theirs, own)
    assert "config.model_path" in found.value.hint


def test_a_critics_checkpoint_says_of_no_model_and_is_judged_by_its_tensors(tmp_path: Path) -> None:
    for metadata in ({}, {"model": None}, {"model": []}, {"model": {"config": [1]}}):
        assert config_in(metadata) is None
    refuse_another_model(tmp_path, None, architecture_of(CONFIG, "config.json"))
    assert another_config(None, CONFIG) == ""


def test_models_that_transformers_computes_are_told_apart_by_their_kind() -> None:
    mistral = {**CONFIG, "model_type": "mistral"}
    assert another_config(mistral, mistral) == ""
    assert (
        another_config(mistral, {**mistral, "model_type": "olmo2"})
        == "model_type is mistral instead of olmo2"
    )
    assert another_config(CONFIG, {**CONFIG, "hidden_size": 64}).startswith("hidden_size is ")
    assert config_in({"model": {"config": mistral, "path": "m"}}) == mistral
