"""Weights come into the real vLLM by Gyre's loader, while it generates.

Tokens and log-probs are the judge: those after a load are those of the same weights computed from the prefix. vLLM's
own checksums are of packed weights, which are empty on a CPU.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from gyre.engines.dialect import FinishKind, GenerateRequest
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineProcess
from gyre.engines.weight_loading import EngineLoader, LoadReport
from gyre.testing.contracts.engine_calls import PAUSES, Heard
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.conformance import LONG, listen, listening, prompt, request
from tests.engines.tiny_model import write_tiny_model
from tests.vllm_cpu import vllm_on_cpu

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Bench:
    process: EngineProcess
    client: EngineClient
    loader: EngineLoader
    first: Path
    second: Path

    async def load_under(
        self, asked: Sequence[GenerateRequest], *, keep: bool = True
    ) -> tuple[list[Heard], dict[str, int], LoadReport]:
        """Load the second version over the first while these run. Returns what was heard of each, how many tokens of
        each the first version made, and what the loader says. Tried again where one had ended before the pause."""
        for _ in range(PAUSES):
            await self.loader.load("1", self.first)
            counts: list[Any] = []
            again = [replace(each, rid=uuid.uuid4().hex) for each in asked]
            async with listening(self.client, again) as running:
                report = await self.loader.load("2", self.second, keep=keep, changed=counts.append)
                heard = await running.end()
            if all({span.version for span in one.spans} == {"1", "2"} for one in heard):
                return heard, counts[0], report
        raise AssertionError(f"one had ended before the pause, {PAUSES} times")

    async def says(self, seed: int = 90) -> tuple[list[int], list[float]]:
        """What it says to a prompt whose prefix nobody has cached."""
        heard = await listen(
            self.client, replace(request(prompt(seed), 12, temperature=0.0), cache_key=uuid.uuid4().hex)
        )
        return heard.tokens, heard.logprobs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("loading")
    for name, seed in (("first", 1), ("second", 2)):
        # Tied: of an output layer that is in no checkpoint, a CPU has a packed copy.
        list_model_folder(write_tiny_model(folder / name, seed=seed, tied=True), version=seed)
    command = vllm_on_cpu(folder / "first", python=vllm_python)
    async with (
        EngineProcess(command, ready_within_s=280, stop_within_s=1) as process,
        process.client() as client,
    ):
        loader = EngineLoader(client, folder / "first", key=process.loader_key)
        assert await loader.arm(), loader.why_not
        yield Bench(process, client, loader, folder / "first", folder / "second")


def off(folder: Path, asked: Sequence[int], said: tuple[list[int], list[float]]) -> float:
    """The largest difference of these log-probs from those that transformers computes with the folder's weights."""
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = causal(input_ids=torch.tensor([[*asked, *said[0]]])).logits[0].log_softmax(-1)
    wanted = rows[len(asked) - 1 : -1].gather(1, torch.tensor(said[0])[:, None])[:, 0]
    return float((wanted - torch.tensor(said[1])).abs().max())


async def test_after_each_load_log_probs_are_those_of_its_weights(bench: Bench) -> None:
    for version, folder in (("2", bench.second), ("1", bench.first), ("2", bench.second)):
        await bench.loader.load(version, folder)
        assert off(folder, prompt(90), await bench.says()) < 1e-4
    other = bench.first
    assert off(other, prompt(90), await bench.says()) > 1e-2
    await bench.client.update_weights_from_disk(other, "disk", flush_cache=True)
    assert off(other, prompt(90), await bench.says()) < 1e-4


async def test_it_serves_what_it_reads_from_the_same_folder_and_goes_back(bench: Bench) -> None:
    began = await bench.says()
    report = await bench.loader.load("2", bench.second)
    assert (report.how, report.why_disk) == ("loader", "")
    assert (await bench.client.info()).weight_version == "2"
    loaded = await bench.says()
    await bench.client.update_weights_from_disk(bench.second, "disk", flush_cache=True)
    assert await bench.says() == loaded != began
    assert (await bench.loader.load("1", bench.first)).how == "loader"
    assert await bench.says() == began


async def test_it_counts_to_the_token_what_older_weights_made(bench: Bench) -> None:
    await bench.loader.load("1", bench.first)
    asked = [request(prompt(80 + number), LONG, temperature=0.0) for number in range(3)]
    before = [await listen(bench.client, each) for each in asked]
    heard, made, report = await bench.load_under(asked)
    assert report.how == "loader"
    for one, alone in zip(heard, before, strict=True):
        old, new = one.spans
        assert (old.version, new.version, new.end) == ("1", "2", LONG)
        count = made[one.rid]
        assert 0 < count == old.end == new.start < LONG
        assert one.tokens[:count] == alone.tokens[:count]
        assert one.logprobs[:count] == pytest.approx(alone.logprobs[:count], abs=1e-3)
        assert abs(one.logprobs[count] - alone.logprobs[count]) > 1e-2, "that one is of the new weights"


async def test_what_is_put_back_is_computed_anew_with_nothing_cached(bench: Bench) -> None:
    asked = replace(request(prompt(73, 200), LONG, temperature=0.0), cache_key=bench.loader.cache_key)
    [heard], _, report = await bench.load_under([asked], keep=False)
    assert report.how == "loader"
    old, new = heard.spans
    prefix = [*prompt(73, 200), *heard.tokens[: old.end]]
    fresh = await listen(bench.client, request(prefix, LONG - old.end, temperature=0.0))
    assert heard.tokens[new.start :] == fresh.tokens


async def test_a_load_that_is_rejected_leaves_the_version_of_before(bench: Bench, tmp_path: Path) -> None:
    await bench.loader.load("1", bench.first)
    held = await bench.says()
    broken = shutil.copytree(bench.second, tmp_path / "broken")
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[-1] ^= 4
    (broken / "model.safetensors").write_bytes(content)
    async with listening(bench.client, [request(prompt(74), LONG)]) as running:
        with pytest.raises(WeightMismatch, match="holds other bytes"):
            await bench.loader.load("3", broken)
        (heard,) = await running.end()
    assert heard.finish.kind is FinishKind.LENGTH
    assert {span.version for span in heard.spans} == {"1"}
    assert await bench.says() == held


async def test_a_folder_of_another_shape_is_refused_before_a_weight_changes(
    bench: Bench, tmp_path: Path
) -> None:
    """vLLM itself would empty the model's layers and end in the middle."""
    await bench.loader.load("1", bench.first)
    held = await bench.says()
    tensors = load_file(bench.second / "model.safetensors")
    for what, change in {
        "lacking": lambda: tensors.pop("model.norm.weight"),
        "narrow": lambda: tensors.update({"model.norm.weight": torch.ones(3)}),
    }.items():
        change()
        other = shutil.copytree(bench.second, tmp_path / what)
        save_file(tensors, other / "model.safetensors")
        with pytest.raises(EngineRefused, match="holds another model: 1 tensors differ"):
            await bench.client.update_weights_from_disk(other, "3", flush_cache=True)
        assert (await bench.client.info()).weight_version == "1"
        assert await bench.says() == held


async def test_a_load_that_breaks_in_the_engine_is_made_whole_from_disk(bench: Bench) -> None:
    ask = bench.loader._ask

    async def forgetful(what: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        answers = await ask(what, within_s)
        if what["op"] == "prepare":
            await ask({"op": "forget"}, 10.0)
        return answers

    bench.loader._ask = forgetful  # type: ignore[method-assign]
    report = await bench.loader.load("2", bench.second)
    bench.loader._ask = ask  # type: ignore[method-assign]
    assert (report.how, report.why_disk) == ("disk", "no version was prepared")
    assert (await bench.client.info()).weight_version == "2"
    loaded = await bench.says()
    await bench.loader.load("1", bench.first)
    await bench.loader.load("2", bench.second)
    assert await bench.says() == loaded


async def test_log_probs_are_of_the_whole_distribution_whatever_is_cut(bench: Bench) -> None:
    """As a trainer computes them: those of equal tokens are equal with top_p, top_k and min_p and without."""

    async def drawn(**cut: Any) -> dict[int, float]:
        asked = [request(prompt(5), 1, sampling_seed=seed, **cut) for seed in range(40)]
        heard = [await listen(bench.client, each) for each in asked]
        return {each.tokens[0]: each.logprobs[0] for each in heard}

    whole = await drawn()
    for cut in ({"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}):
        found = await drawn(**cut)
        both = found.keys() & whole.keys()
        assert both, cut
        assert len(found) < len(whole), f"{cut} cuts nothing"
        for token in both:
            assert found[token] == pytest.approx(whole[token], abs=1e-4), cut


async def test_a_prompt_that_is_read_in_parts_draws_by_its_seed_too(bench: Bench) -> None:
    """Longer than what one step reads; vLLM's own generators of a CPU end the engine there."""
    asked = request(prompt(6, 3000), 8, sampling_seed=7)
    whole = await listen(bench.client, asked)
    rest = await listen(bench.client, request([*prompt(6, 3000), *whole.tokens[:3]], 5, sampling_seed=7))
    assert rest.tokens == whole.tokens[3:]


async def test_an_engine_whose_worker_is_killed_ends_whole(bench: Bench) -> None:
    """Last: it ends the engine."""
    assert bench.process.pid is not None
    processes = psutil.Process(bench.process.pid).children(recursive=True)
    worker = max(processes, key=lambda process: process.memory_info().rss)
    worker.kill()
    death = await bench.process.died()
    assert death.returncode != 0
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
