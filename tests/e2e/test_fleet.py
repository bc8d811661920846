"""A fleet without a trainer, run for real: its door is asked and published at while its processes are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import PROMPT, Fleet, fleet_on
from tests.engines.embedded.tiny import write_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


def body_of(request_id: str, new: int, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    return {"rid": request_id, "input_ids": PROMPT, "sampling_params": params, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("fleet")
    return [write_checkpoint(root / f"v{seed}", "qwen3", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def fleet(shared: Shared, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_on(shared, folders[0], "fleet", tmp_path_factory.mktemp("spec")) as fleet:
        yield fleet


@pytest.mark.kill
@pytest.mark.landing
async def test_whoever_is_killed_every_id_gets_its_tokens_and_gets_them_again(
    fleet: Fleet, folders: list[Path]
) -> None:
    """An instance, then the manager, while versions change under forty streams that a key has opened."""
    faults = ProcessFaults(fleet.handle)
    ids = [f"request-{number}" for number in range(40)]
    before = body_of("before", 12, return_logprob=True)
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
        version = fleet.version
        status, first = await fleet.ask("/generate", before)
        assert status == 200, first
        assert len(first["output_ids"]) == 12
        assert first["meta_info"]["policy_versions"] == [[version, 0, 12]]
        stranger = replace(fleet, key="gyre-nobody")
        assert (await stranger.ask("/generate", body_of("stranger", 12)))[0] == 401

        listening = [asyncio.create_task(fleet.listen(one, 300)) for one in ids]
        await fleet.heard(200)
        for name in ("rollout-0", "rollout_manager-0"):
            (victim,) = await asyncio.to_thread(faults.kill, name)
            await fleet.publish(folders)
            replaced = await asyncio.to_thread(faults.replaced, victim, timeout_s=ENDS_WITHIN_S)
            assert replaced.pid != victim.pid
        await asyncio.gather(*listening)
        bodies = {one: body_of(one, 300) for one in ids}
        whole = dict(
            zip(
                ids,
                await asyncio.gather(*(fleet.until_asked("/generate", bodies[one]) for one in ids)),
                strict=True,
            )
        )
        again = [await fleet.until_asked("/generate", bodies[one]) for one in ids]
        later = await fleet.until_asked("/generate", body_of("later", 12, policy={"at_least": version + 2}))
        assert await fleet.until_asked("/generate", before) == first
        await fleet.listen("listened", 12)
    for one, told in whole.items():
        assert len(told["output_ids"]) == 300
        assert told["output_ids"][: len(fleet.seen[one])] == fleet.seen[one], "told tokens were replaced"
    assert [told["output_ids"] for told in again] == [told["output_ids"] for told in whole.values()]
    assert later["meta_info"]["policy_versions"] == [[version + 2, 0, 12]]
    assert len(fleet.seen["listened"]) == 12


@pytest.mark.kill
async def test_labels_change_where_the_weights_did_though_the_manager_dies_after_a_publish(
    fleet: Fleet, folders: list[Path]
) -> None:
    """Transformers says of each token whether the old weights made it; nobody's label is asked for that. The manager
    that told the instances of the new version dies before it hears which token was the first of it."""
    faults = ProcessFaults(fleet.handle)
    new = 400
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as fleet.session:
        await fleet.healthy()
        await fleet.publish(folders)
        await fleet.until_asked("/generate", body_of("settled", 4, policy={"at_least": fleet.version}))
        old = fleet.version
        bodies = [body_of(f"labelled-{number}", new, return_logprob=True) for number in range(20)]
        asking = [asyncio.create_task(fleet.until_asked("/generate", body)) for body in bodies]
        listening = asyncio.create_task(fleet.listen("beside", new))
        await fleet.heard(20)
        await fleet.publish(folders)
        await asyncio.sleep(0.3)  # within a second of it: instances load it, and the manager hears of tokens
        (victim,) = await asyncio.to_thread(faults.kill, "rollout_manager-0")
        answers = await asyncio.gather(*asking)
        await asyncio.to_thread(faults.replaced, victim, timeout_s=ENDS_WITHIN_S)
        await listening
    causal = AutoModelForCausalLM.from_pretrained(folders[old % len(folders)], dtype=torch.float32).eval()
    late, changed = [], 0
    for told in answers:
        runs = told["meta_info"]["policy_versions"]
        if runs[0][0] != old:
            continue  # it waited until the new version was served
        labelled = runs[0][2]
        late.append(labelled - made_by(causal, told))
        changed += labelled < new
    assert late == [0] * len(late)
    assert changed, "no sample went on under the new version"


def made_by(causal: Any, told: dict[str, Any]) -> int:
    """How many of the first tokens have the log-probs that this model gives them."""
    tokens = told["output_ids"]
    with torch.no_grad():
        logits = causal(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    own = torch.log_softmax(logits.float(), -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    said = torch.tensor([pair[0] for pair in told["meta_info"]["output_token_logprobs"]])
    others = ((own - said).abs() > 1e-3).nonzero()
    return int(others[0]) if len(others) else len(tokens)


@pytest.mark.kill
async def test_a_thousand_open_requests_outlive_every_kill(fleet: Fleet, folders: list[Path]) -> None:
    """Two instances and the manager, while versions change. Each id gets its tokens once, and the same when it is asked
    again; nothing is generated twice."""
    faults = ProcessFaults(fleet.handle)
    bodies = {f"open-{number}": body_of(f"open-{number}", 24) for number in range(1000)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as fleet.session:
        await fleet.healthy()
        asking = [asyncio.create_task(fleet.until_asked("/generate", body)) for body in bodies.values()]
        streamed = list(bodies)[::100]
        listening = [asyncio.create_task(fleet.listen(one, 24)) for one in streamed]
        for number, name in enumerate(("rollout-0", "rollout_manager-0", "rollout-1"), start=1):
            await fleet.answered(asking, 150 * number)
            assert not all(task.done() for task in asking), "nothing was open"
            (victim,) = await asyncio.to_thread(faults.kill, name)
            if number < 3:
                await fleet.publish(folders)
            replaced = await asyncio.to_thread(faults.replaced, victim, timeout_s=ENDS_WITHIN_S)
            assert replaced.pid != victim.pid
        answers = await asyncio.gather(*asking)
        await asyncio.gather(*listening)
        again = await asyncio.gather(*(fleet.until_asked("/generate", body) for body in bodies.values()))
        status = await asyncio.to_thread(fleet.handle.status)
    assert [one["meta_info"]["id"] for one in answers] == list(bodies)
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in answers]
    told = {one["meta_info"]["id"]: one["output_ids"] for one in answers}
    assert {len(tokens) for tokens in told.values()} == {24}
    for one in streamed:
        seen = fleet.seen[one]
        assert told[one][: len(seen)] == seen, "told tokens were replaced"
    assert status["job"]["phase"] == "running"
