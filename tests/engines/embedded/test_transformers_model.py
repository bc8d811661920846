"""Models that transformers computes: their log-probs in any crowd, under new weights, and continued are those of a
forward over the whole sequence without a cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from gyre.engines.dialect import PauseMode, VersionSpan
from gyre.engines.embedded.core import Swap
from gyre.engines.embedded.decoder_model import DecoderModel
from gyre.engines.embedded.model_choice import served_model
from gyre.engines.embedded.transformers_model import TransformersModel
from gyre.engines.embedded.transformers_steps import (
    _CHECKED,
    _SINGLY,
    RowRunner,
    SlotRunner,
    _Check,
    fitting_runner,
)
from gyre.models import transformers_models
from gyre.models.errors import ModelFolderError
from gyre.testing.contracts.engine import CLAUSES, EngineUnderTest, check_clause
from tests.engines.embedded.test_conformance import serving
from tests.engines.embedded.tiny import Asked, ask, go_on, run
from tests.engines.embedded.tiny_transformers import CONFIGS, Model, whole_logprobs, write_folder

pytestmark = pytest.mark.landing

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = Model(write_folder(tmp_path_factory.mktemp(name), name))
        return made[name]

    return model


def drawn(seed, length):
    draw = random.Random(seed)
    return [draw.randrange(3, 96) for _ in range(length)]


def is_as_whole(weights, asked: Asked, start: int = 0, end: int | None = None) -> None:
    """The log-probs of the tokens from `start` to `end` are those of a whole forward; greedy ones are its likeliest."""
    request = asked.request
    expected = whole_logprobs(weights, request.tokens)[request.prompt_length - 1 :][start:end]
    tokens = torch.tensor(asked.tokens[start:end])
    mine = torch.tensor(asked.logprobs[start:end])
    torch.testing.assert_close(mine, expected[torch.arange(len(tokens)), tokens], atol=TOLERANCE, rtol=0)
    if request.sampling.temperature == 0:
        assert tokens.tolist() == expected.argmax(dim=-1).tolist()


# Log-probs


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_of_a_forward_without_a_cache(models, name):
    """In a crowd that others join and leave, with prompts in parts and slots that are used again."""
    model = models(name)
    core = model.core(max_running=3)
    first = [
        ask(drawn(length, length), new, seed=length, rid=f"r{length}", temperature=length % 2)
        for length, new in ((1, 12), (24, 3), (41, 9))
    ]
    later = [
        ask(drawn(length, length), new, seed=length, rid=f"r{length}", temperature=length % 2)
        for length, new in ((2, 9), (33, 12), (18, 2), (70, 6))
    ]
    run(core, *first, steps=2)
    run(core, *later)
    for each in (*first, *later):
        is_as_whole(model.weights, each)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "bloom"])
def test_a_sample_that_goes_on_elsewhere_has_the_same_log_probs(models, name):
    model = models(name)
    whole = ask(drawn(1, 20), 12, temperature=0.0)
    run(model.core(), whole, *(ask(drawn(i, 9 * i), 20, seed=i, rid=f"o{i}") for i in range(1, 4)))
    rest = ask(whole.request.tokens[:25], 7, temperature=0.0)
    run(model.core(), ask(drawn(7, 5), 9, rid="other"), rest)
    assert rest.tokens == whole.tokens[5:]
    assert rest.logprobs == pytest.approx(whole.logprobs[5:], abs=TOLERANCE)


def test_the_cache_grows_while_samples_run(models):
    for name in ("gemma3_text", "qwen3_next"):
        model = models(name)
        short, long = ask(drawn(1, 10), 270, rid="short"), ask(drawn(2, 300), 5, rid="long")
        core = model.core()
        run(core, short, steps=8)
        run(core, long)
        assert core.runner.capacity > 256
        is_as_whole(model.weights, short)
        is_as_whole(model.weights, long)


def test_a_group_prefills_its_prompt_once_where_keys_can_be_shared(models):
    prompt = drawn(3, 40)
    for name, cached in (("gemma3_text", 39), ("qwen3_next", 0), ("bloom", 0)):
        group = [ask(prompt, 5, seed=i, rid=f"r{i}") for i in range(3)]
        run(models(name).core(prefill_tokens=64), *group)
        assert [each.request.cached for each in group] == [0, cached, cached]
        for each in group:
            is_as_whole(models(name).weights, each)


# New weights


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "qwen3_next", "bloom"])
def test_tokens_after_a_swap_are_of_the_new_weights_alone(models, name, tmp_path):
    """Where caches are computed again (`retract`)."""
    model = models(name)
    other = model.load(write_folder(tmp_path, name, seed=1))
    core = model.core()
    asked = [ask(drawn(length, length), 10, seed=length, rid=f"r{length}") for length in (4, 30)]
    run(core, *asked, steps=5)
    told = [len(each.tokens) for each in asked]
    assert all(told)
    core.pause(PauseMode.RETRACT)
    core.swap(Swap(other, "2", True, lambda paused: None))
    core.resume()
    go_on(core)
    for each, count in zip(asked, told, strict=True):
        assert each.request.spans() == [VersionSpan("1", 0, count), VersionSpan("2", count, 10)]
        is_as_whole(model.weights, each, 0, count)
        is_as_whole(other, each, count)


def test_weights_that_change_in_place_compute_from_the_next_step_on(models, tmp_path):
    """Over the keys that the older weights left: as transformers computes it with a cache of the older ones."""
    model = models("gemma3_text")
    other = model.load(write_folder(tmp_path, "gemma3_text", seed=1))
    core = model.core()
    asked = ask(drawn(5, 12), 8, temperature=0.0)
    run(core, asked, steps=4)
    core.pause(PauseMode.IN_PLACE)
    core.swap(Swap(other, "2", False, lambda paused: None))
    core.resume()
    go_on(core)
    (_, start, _), (version, at, _) = ((s.version, s.start, s.end) for s in asked.request.spans())
    assert (start, version, at) == (0, "2", 4)
    tokens, held = asked.request.tokens, 12 + at - 1
    cache = DynamicCache(config=model.weights.config)
    with torch.no_grad():
        model.weights(input_ids=torch.tensor([tokens[:held]]), past_key_values=cache, use_cache=True)
        logits = other(
            input_ids=torch.tensor([tokens[held:-1]]), past_key_values=cache, use_cache=True
        ).logits[0]
    expected = torch.log_softmax(logits.float(), dim=-1)[
        torch.arange(8 - at), torch.tensor(tokens[held + 1 :])
    ]
    torch.testing.assert_close(torch.tensor(asked.logprobs[at:]), expected, atol=TOLERANCE, rtol=0)


def test_what_was_loaded_does_not_change_with_its_files(models, tmp_path):
    model = models("gemma3_text")
    folder = write_folder(tmp_path, "gemma3_text", seed=1)
    other = model.load(folder)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    file = folder / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff" * (file.stat().st_size // 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_versions_in_bfloat16_are_alike(tmp_path):
    """Also their buffers, which transformers computes in the precision that it builds a model in; and that precision is
    nobody else's while a later version is loaded."""
    folder = write_folder(tmp_path, "gemma3_text", dtype=torch.bfloat16)
    model = TransformersModel(folder)
    first, again = (model.load(folder, torch.bfloat16) for _ in range(2))
    assert next(first.parameters()).dtype is torch.bfloat16
    tokens = torch.tensor([drawn(1, 20)])
    with torch.no_grad():
        assert torch.equal(*(each(input_ids=tokens, use_cache=False).logits for each in (first, again)))
    seen = []
    torch_set = torch.set_default_dtype
    try:
        torch.set_default_dtype = lambda dtype: (seen.append(dtype), torch_set(dtype))[1]  # type: ignore[assignment]
        model.load(folder, torch.bfloat16)
    finally:
        torch.set_default_dtype = torch_set  # type: ignore[assignment]
    assert set(seen) <= {torch.float32}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 tensors, model.norm.weight among them"),
        (
            lambda tensors: tensors.update({"model.more": torch.ones(2)}),
            "holds 1 unknown tensors, model.more",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}), "1 tensors of another shape"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_folder_of_another_model_is_refused(models, tmp_path, change, said):
    folder = write_folder(tmp_path, "gemma3_text")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=said):
        models("gemma3_text").load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="holds no safetensors"):
        models("gemma3_text").load(folder)


# What a folder says


def test_tokens_that_end_samples_are_those_of_both_files(tmp_path):
    folder = write_folder(tmp_path, "mistral")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = TransformersModel(folder)
    assert model.eos_token_ids == {2, 7, 9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 96}))
    with pytest.raises(ModelFolderError, match="96 is not in the vocabulary"):
        TransformersModel(folder)


def test_an_end_token_ends_a_sample(tmp_path):
    folder = write_folder(tmp_path, "mistral")
    free = ask(drawn(1, 5), 8)
    run(Model(folder).core(), free)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": free.tokens[3]}))
    ended = ask(drawn(1, 5), 8, ignore_eos=False)
    run(Model(folder).core(), ended)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]


def test_the_context_ends_where_frequencies_change(tmp_path):
    plain = TransformersModel(write_folder(tmp_path / "plain", "phi3"))
    assert (plain.vocab, plain.max_positions) == (96, 512)
    folder = write_folder(
        tmp_path / "long",
        "phi3",
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 128,
        },
    )
    assert TransformersModel(folder).max_positions == 128


# Who computes


def test_gyres_own_decoder_computes_what_it_knows(tmp_path):
    assert isinstance(served_model(write_folder(tmp_path / "own", "qwen3")), DecoderModel)
    found = served_model(write_folder(tmp_path / "other", "gemma3_text"))
    assert isinstance(found, TransformersModel)
    assert found.family == "gemma3_text"


def test_without_transformers_its_models_are_refused(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, "gemma3_text")
    monkeypatch.setattr(transformers_models, "causal_types", lambda: None)
    with pytest.raises(ModelFolderError, match="which is not installed") as caught:
        served_model(folder)
    assert "pip install" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "kind", "shares", "whole"),
    [
        ("gemma3_text", SlotRunner, True, False),
        ("gpt_oss", SlotRunner, True, False),
        ("qwen3_next", SlotRunner, False, False),
        ("bloom", RowRunner, False, True),
        ("gpt_neo", RowRunner, False, True),
        ("llama4_text", RowRunner, False, True),
    ],
)
def test_a_model_is_stepped_as_it_can_be(models, name, kind, shares, whole):
    runner = models(name).core().runner
    assert isinstance(runner, kind)
    assert (runner.shares_prefixes, runner.whole_prompts, runner.invariant) == (shares, whole, False)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mistral"])
def test_every_runner_gives_the_same(models, name):
    """Those too that are a model's second choice."""
    weights = models(name).weights
    check = _Check(weights, _CHECKED, singly=_SINGLY)
    assert check.problem_with(lambda model, count: SlotRunner(model, count, 512, whole_prompts=True)) == ""
    assert check.problem_with(RowRunner) == ""


def test_a_runner_that_computes_otherwise_is_not_taken(models, monkeypatch):
    weights = models("mistral").weights
    monkeypatch.setattr("gyre.engines.embedded.transformers_steps._ATTENDING", ())
    said = _Check(weights, _CHECKED, singly=_SINGLY).problem_with(
        lambda model, count: SlotRunner(model, count, 512, whole_prompts=False)
    )
    assert "full_attention" in said or "sliding_attention" in said
    monkeypatch.undo()
    monkeypatch.setattr(SlotRunner, "key_length", lambda self, longest: min(16, longest + 16))
    said = _Check(weights, _CHECKED, singly=_SINGLY).problem_with(
        lambda model, count: SlotRunner(model, count, 512, whole_prompts=False)
    )
    assert "log-probs differ" in said or "Error" in said


def test_what_begins_beyond_the_models_own_check_is_seen_in_its_small_copy():
    """A window of 4096 tokens, which no sequence of the check of the model itself reaches."""
    config = CONFIG_MAPPING["gpt_neo"](**CONFIGS["gpt_neo"] | {"window_size": 4096})
    causal = AutoModelForCausalLM.from_config(config).eval()
    slots = SlotRunner(causal, 2, 512, whole_prompts=False)
    assert _Check(causal, _CHECKED, singly=_SINGLY).problem_with(lambda *_: slots) == ""
    found, said = fitting_runner(causal, slots=2, context_length=512)
    assert isinstance(found, RowRunner), said


def test_a_model_that_cannot_be_tried_small_is_refused(models, monkeypatch):
    monkeypatch.setattr("gyre.models.small_model.small_configs", lambda told: iter(()))
    with pytest.raises(ModelFolderError, match="cannot be tried at a small size"):
        fitting_runner(models("mistral").weights, slots=2, context_length=512)


def test_weights_that_are_broken_are_refused_at_the_start(tmp_path):
    folder: Path = write_folder(tmp_path, "mistral")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match="not finite"):
        Model(folder).core()


# As a process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shape = {"vocab_size": 512, "max_position_embeddings": 4096, "eos_token_id": 511}
    first, second = (write_folder(folder / str(seed), "gemma3_text", seed=seed, **shape) for seed in (1, 2))
    async with serving(first) as url:
        yield EngineUnderTest(url, first, second)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("clause", CLAUSES)
async def test_an_engine_over_transformers_keeps(engine, clause):
    await check_clause(clause, engine)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_over_transformers_does_not_promise_bits(engine):
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/server_info") as response:
        assert (await response.json())["enable_deterministic_inference"] is False
