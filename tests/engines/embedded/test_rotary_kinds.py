"""Rotary positions that Gyre's own decoder does not know, and those that it does, served as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gyre.engines.embedded.decoder_model import DecoderModel
from gyre.engines.embedded.model_choice import served_model
from gyre.engines.embedded.transformers_model import TransformersModel
from tests.engines.embedded.test_transformers_model import drawn, is_as_whole
from tests.engines.embedded.tiny import Model as OwnModel
from tests.engines.embedded.tiny import ask, run
from tests.engines.embedded.tiny_transformers import Model, whole_logprobs, write_folder


def turned(folder: Path, **rope: Any) -> Path:
    return write_folder(folder, "qwen3", rope_parameters={"rope_theta": 10000.0, **rope})


def test_yarn_is_served_by_transformers(tmp_path: Path) -> None:
    folder = turned(tmp_path / "yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
    assert isinstance(served_model(folder), TransformersModel)
    model, asked = Model(folder), [ask(drawn(n, n), 12, seed=n, rid=f"r{n}") for n in (3, 40)]
    run(model.core(), *asked)
    plain = Model(write_folder(tmp_path / "plain", "qwen3"))
    for each in asked:
        is_as_whole(model.weights, each)
    moved = whole_logprobs(model.weights, asked[1].request.tokens)
    assert not torch.allclose(moved, whole_logprobs(plain.weights, asked[1].request.tokens), atol=1e-3)


def test_linear_is_served_by_the_own_decoder(tmp_path: Path) -> None:
    folder = turned(tmp_path / "linear", rope_type="linear", factor=2.0)
    assert isinstance(served_model(folder), DecoderModel)
    asked = ask(drawn(1, 40), 12, seed=1)
    run(OwnModel(folder).core(), asked)
    is_as_whole(Model(folder).weights, asked)
