"""Adapters beside one model: each request says what the trainer's model says with the adapter that it names, from its
first token to its last, whatever is loaded and dropped meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gyre.config.sections import LoraSettings
from gyre.engines.dialect import GenerateRequest, SamplingParams, VersionSpan
from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.errors import BadRequest
from gyre.engines.embedded.model_choice import served_model
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.models.adapters import AdapterLimits
from gyre.models.errors import ModelFolderError
from tests.engines.embedded.drawn_adapters import SETTINGS, adapted, write_adapter
from tests.engines.embedded.test_conformance import serving
from tests.engines.embedded.test_server import params, serve
from tests.engines.embedded.tiny import Asked, ask, run
from tests.engines.embedded.tiny_transformers import whole_logprobs, write_folder
from tests.waits import GENEROUS_S

PROMPT = [5, 9, 23, 41, 8, 77, 3, 12]
KINDS = ("qwen3", "gemma3_text", "qwen3_next", "bloom")
"""Slots in one forward, with windows, with states, and a forward for each slot."""
LORA = ("--enable-lora", "--max-lora-rank", "2")


class Versions:
    """One kind of model, its engine's model, and two adapters: the trainer's models, and their folders."""

    def __init__(self, root: Path, kind: str) -> None:
        self.base = write_folder(root / "base", kind)
        self.served = served_model(self.base, AdapterLimits(SETTINGS.rank))
        self.weights = self.served.load(self.base, torch.float32)
        made = {str(seed): adapted(self.base, seed) for seed in (1, 2)}
        self.trained = {"": self.weights} | {name: causal for name, (causal, _) in made.items()}
        self.named = {name: named for name, (_, named) in made.items()}
        self.folders = {
            name: write_adapter(root / f"v{name}", self.base, named) for name, named in self.named.items()
        }

    def core(self, max_running: int = 8) -> EngineCore:
        limits = Limits(max_running, 100_000, 512, 16)
        return EngineCore(self.served, self.weights, limits, weight_version="base")

    def load(self, name: str) -> Any:
        return self.served.load_adapter(self.folders[name], torch.float32)

    def is_as_trained(self, asked: Asked, name: str) -> None:
        expected = whole_logprobs(self.trained[name], asked.request.tokens)[asked.request.prompt_length - 1 :]
        found = torch.tensor(asked.logprobs)
        wanted = expected[torch.arange(len(asked.tokens)), torch.tensor(asked.tokens)]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        assert asked.tokens == expected.argmax(dim=-1).tolist()
        (ending,) = [update.ending for update in asked.updates if update.ending is not None]
        assert ending.message == ""


@pytest.fixture(scope="module")
def versions_of(tmp_path_factory):
    made: dict[str, Versions] = {}

    def versions(kind: str) -> Versions:
        if kind not in made:
            made[kind] = Versions(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return versions


def greedy(adapter: str, rid: str, new: int = 8, prompt: list[int] = PROMPT) -> Asked:
    asked = ask(prompt, new, rid=rid, temperature=0)
    asked.request.adapter_name = adapter
    return asked


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_of_a_batch_has_its_own_adapter(versions_of, kind: str) -> None:
    """Also where their prompts are equal, so that a cache of the wrong one would be there to take."""
    versions = versions_of(kind)
    core = versions.core(max_running=4)
    for name in ("1", "2"):
        core.add_adapter(name, versions.load(name))
    names = ["1", "", "2", "1", "2", "", "1"]
    asked = [
        greedy(name, f"r{at}", 5 + at % 3, PROMPT[: 6 + at % 3] + [at] * (at % 2))
        for at, name in enumerate(names)
    ]
    run(core, *asked)
    for name, one in zip(names, asked, strict=True):
        versions.is_as_trained(one, name)
    texts = {name: one.logprobs[0] for name, one in zip(names, asked, strict=True)}
    assert len(set(texts.values())) == 3, "the adapters say the same"


def test_a_request_ends_with_the_adapter_that_it_began_with(versions_of) -> None:
    """Beside one that is loaded under another name while it runs, and after its own is dropped, or replaced."""
    versions = versions_of("qwen3")
    core = versions.core()
    core.add_adapter("7", versions.load("1"))
    first = greedy("7", "first", 12)
    run(core, first, steps=4)
    core.add_adapter("8", versions.load("2"))
    second = greedy("8", "second", 12)
    run(core, second, steps=2)
    core.drop_adapter("7")
    with pytest.raises(BadRequest, match="no adapter '7'"):
        core.submit(greedy("7", "late").request)
    core.add_adapter("7", versions.load("2"))
    again = greedy("7", "again", 12)
    run(core, again)
    versions.is_as_trained(first, "1")
    versions.is_as_trained(second, "2")
    versions.is_as_trained(again, "2")
    assert first.request.spans() == [VersionSpan("7", 0, 12)]
    assert core.adapters == ["8", "7"]


def test_a_name_is_given_once_and_dropped_once(versions_of) -> None:
    versions = versions_of("qwen3")
    core = versions.core()
    core.add_adapter("7", versions.load("1"))
    with pytest.raises(BadRequest, match="already"):
        core.add_adapter("7", versions.load("2"))
    core.drop_adapter("7")
    with pytest.raises(BadRequest, match="no adapter '7'"):
        core.drop_adapter("7")


def test_it_is_continued_elsewhere_from_its_last_token(versions_of) -> None:
    versions = versions_of("gemma3_text")
    whole, first = (greedy("7", rid, 10) for rid in ("whole", "first"))
    for asked, steps in ((whole, 1000), (first, 4)):
        core = versions.core()
        core.add_adapter("7", versions.load("1"))
        run(core, asked, steps=steps)
    rest = greedy("7", "rest", 10 - len(first.tokens), PROMPT + first.tokens)
    core = versions.core()
    core.add_adapter("7", versions.load("1"))
    run(core, rest)
    assert 0 < len(first.tokens) < 10
    assert first.tokens + rest.tokens == whole.tokens


BAD = {
    "of a larger rank": ({"settings": LoraSettings(rank=3, alpha=6.0)}, {}, "rank is 3"),
    "of PEFT's DoRA": ({}, {"use_dora": True}, "use_dora is True"),
    "with a bias": ({}, {"bias": "all"}, "bias is 'all'"),
    "with ranks of their own": ({}, {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    "of no method that is known": ({}, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "without a rank": ({}, {"r": None}, "is no adapter's"),
    "of rank 0": ({}, {"r": 0}, "is no adapter's"),
    "of all layers, in PEFT's word": ({}, {"target_modules": "all-linear"}, "is no adapter's"),
    "of a layer that the model lacks": ({}, {"target_modules": ["q_prj"]}, "no linear layer 'q_prj'"),
    "with a bias of its own": ({}, {"lora_bias": True}, "lora_bias is True"),
    "of some layers": ({}, {"layers_to_transform": [0]}, "layers_to_transform"),
    "of all layers but some": ({}, {"exclude_modules": ["q_proj"]}, "exclude_modules"),
    "of layers that are there twice": ({}, {"layer_replication": [[0, 1]]}, "layer_replication"),
    "that begins by changing the model": ({}, {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "of a later PEFT": ({}, {"use_what_comes": False}, "nobody here knows what 'use_what_comes' does"),
    "with a number for a truth value": ({}, {"use_dora": 0}, "use_dora is 0"),
    "of an infinite scale": ({}, {"lora_alpha": float("inf")}, "is no adapter's"),
    "of a scale beyond float32": ({}, {"lora_alpha": 1e300}, "beyond any number of float32"),
    "of a scale that is a truth value": ({}, {"lora_alpha": True}, "is no adapter's"),
    "of a rank that is a truth value": ({}, {"r": True}, "is no adapter's"),
    "with parts that it does not name": (
        {},
        {"target_modules": ["q_proj"]},
        "are of no layer of the adapter",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_adapter_that_cannot_be_served_is_refused(versions_of, tmp_path: Path, what: str) -> None:
    drawn, changes, said = BAD[what]
    versions = versions_of("qwen3")
    settings = drawn.get("settings", SETTINGS)
    _, named = adapted(versions.base, 5, settings)
    folder = write_adapter(tmp_path / "bad", versions.base, named, settings, **changes)
    with pytest.raises(ModelFolderError, match=said):
        versions.served.load_adapter(folder, torch.float32)


def test_tensors_that_do_not_fit_are_refused(versions_of, tmp_path: Path) -> None:
    versions = versions_of("qwen3")
    named = dict(versions.named["1"])
    name = next(iter(named))
    for number, (changed, said) in enumerate(
        (
            ({key: value for key, value in named.items() if key != name}, "no tensor"),
            (named | {name: named[name][:, :-1].contiguous()}, "would be"),
            (named | {name: torch.full_like(named[name], torch.nan)}, "NaN or infinity is in"),
            (named | {name: torch.full_like(named[name], -torch.inf)}, "NaN or infinity is in"),
        )
    ):
        folder = write_adapter(tmp_path / str(number), versions.base, changed)
        with pytest.raises(ModelFolderError, match=said):
            versions.served.load_adapter(folder, torch.float32)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelFolderError):
        versions.served.load_adapter(folder, torch.float32)


def test_an_engine_that_was_started_for_other_layers_or_for_none_refuses(versions_of) -> None:
    versions = versions_of("qwen3")
    for limits, said in (
        (AdapterLimits(2, ("q_proj", "v_proj")), "--lora-target-modules"),
        (None, "--enable-lora"),
    ):
        served = served_model(versions.base, limits)
        served.load(versions.base, torch.float32)
        with pytest.raises(ModelFolderError, match=said):
            served.load_adapter(versions.folders["1"], torch.float32)


async def test_over_http_nothing_pauses_and_nothing_unknown_is_drawn_with(versions_of) -> None:
    """Requests run while adapters are loaded and dropped; one that names none that is there is refused alone."""
    versions = versions_of("qwen3")
    lora = {"enable_lora": True, "max_lora_rank": 2}
    async with serve(versions.base, max_running_requests=4, **lora) as served:
        body = {"input_ids": PROMPT, "sampling_params": params(8, temperature=0), "return_logprob": True}
        status, reply = await served.post("/generate", **body, lora_path="1")
        assert status == 400
        assert "no adapter '1'" in str(reply)
        status, reply = await served.post(
            "/load_lora_adapter", lora_name="1", lora_path=str(versions.folders["1"])
        )
        assert (status, reply["success"]) == (200, True)
        assert reply["loaded_adapters"] == {"1": str(versions.folders["1"])}
        long = asyncio.create_task(
            served.post("/generate", input_ids=PROMPT, sampling_params=params(400), lora_path="1")
        )
        await served.until_load(1, 0)
        for name, path in (("1", versions.folders["2"]), ("2", versions.base), ("", versions.folders["2"])):
            status, reply = await served.post("/load_lora_adapter", lora_name=name, lora_path=str(path))
            assert (status, reply["success"]) == (400, False), name
            assert reply["error_message"]
        status, _ = await served.post(
            "/load_lora_adapter", lora_name="2", lora_path=str(versions.folders["2"])
        )
        assert status == 200
        said = {}
        for name in (None, "1", "2"):
            _, reply = await served.post("/generate", **body, lora_path=name)
            said[name] = reply["output_ids"]
            expected = whole_logprobs(versions.trained[name or ""], PROMPT + said[name])[len(PROMPT) - 1 :]
            assert said[name] == expected.argmax(dim=-1).tolist()
        assert len({tuple(tokens) for tokens in said.values()}) == 3
        assert await served.load() == (1, 0), "the long one still runs"
        status, _ = await served.post("/unload_lora_adapter", lora_name="1")
        assert status == 200
        status, _ = await served.post("/unload_lora_adapter", lora_name="1")
        assert status == 400
        status, reply = await long
        assert status == 200
        assert reply["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 400}]


async def test_the_client_loads_names_and_unloads(versions_of) -> None:
    """Over a process of its own, by the same calls as SGLang's."""
    versions = versions_of("gemma3_text")
    async with serving(versions.base, *LORA) as url:
        client = EngineClient(url)
        try:
            async with asyncio.timeout(GENEROUS_S):
                with pytest.raises(EngineRefused, match="is no adapter's"):
                    await client.load_adapter("3", versions.base)
                await client.load_adapter("3", versions.folders["1"])
                sampling = SamplingParams(6, temperature=0.0, ignore_eos=True)
                request = GenerateRequest("one", torch.tensor(PROMPT).int().numpy(), sampling, adapter="3")
                tokens = [int(one) async for chunk in client.generate(request) for one in chunk.token_ids]
                expected = whole_logprobs(versions.trained["1"], PROMPT + tokens)[len(PROMPT) - 1 :]
                assert tokens == expected.argmax(dim=-1).tolist()
                await client.unload_adapter("3")
                with pytest.raises(EngineRefused, match="no adapter '3'"):
                    async for _ in client.generate(request):
                        pass
        finally:
            await client.close()
