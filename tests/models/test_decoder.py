"""The forward that is trained, of every family, beside one that is written down without any of its code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gyre.models.architecture import read_architecture
from gyre.models.modules import Decoder, ValueModel
from gyre.models.tensor_names import expected_shapes, from_names, parameter_parts, to_names
from tests.engines.embedded.tiny import CONFIGS, plain_logits, write_checkpoint

TOKENS = [5, 17, 3, 88, 41, 2, 60]


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(read_architecture(folder))
    state = from_names(load_file(folder / "model.safetensors"), decoder.architecture)
    assert decoder.load_state_dict(state).missing_keys == []
    return decoder


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_a_plain_forward_whatever_else_is_in_the_batch(
    tmp_path: Path, family: str
) -> None:
    folder = write_checkpoint(tmp_path, family)
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([TOKENS, TOKENS[::-1]]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], plain_logits(folder, TOKENS), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], plain_logits(folder, TOKENS[::-1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_parameter_has_a_gradient_and_goes_by_name_there_and_back(tmp_path: Path, family: str) -> None:
    decoder = loaded(write_checkpoint(tmp_path, family))
    parameters = dict(decoder.named_parameters())
    assert parameters.keys() == parameter_parts(decoder.architecture).keys()
    gradients = torch.autograd.grad(decoder(torch.tensor([TOKENS])).square().sum(), list(parameters.values()))
    assert all(gradient.any() for gradient in gradients)
    named = to_names(parameters, decoder.architecture)
    shapes = expected_shapes(decoder.architecture)
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == shapes
    back = from_names(named, decoder.architecture)
    assert all(torch.equal(back[name], tensor) for name, tensor in parameters.items())


def test_a_token_sees_those_before_it_alone(tmp_path: Path) -> None:
    decoder = loaded(write_checkpoint(tmp_path, "qwen3"))
    with torch.no_grad():
        whole = decoder(torch.tensor([TOKENS]))
        cut = decoder(torch.tensor([[*TOKENS[:4], 9, 9, 9]]))
    torch.testing.assert_close(whole[:, :4], cut[:, :4], atol=1e-6, rtol=0)
    assert not torch.allclose(whole[:, 4:], cut[:, 4:])


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    decoder = loaded(write_checkpoint(tmp_path, {**CONFIGS["qwen3"], "max_position_embeddings": 6}))
    with pytest.raises(IndexError, match="max_positions=6"):
        decoder(torch.tensor([TOKENS]))


def test_a_value_model_begins_at_zero_and_has_no_output_layer(tmp_path: Path) -> None:
    architecture = read_architecture(write_checkpoint(tmp_path, "qwen3"))
    model = ValueModel(architecture, seed=3)
    assert "decoder.head.weight" not in dict(model.named_parameters())
    assert not model(torch.tensor([TOKENS])).any()
