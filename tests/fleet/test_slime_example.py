"""What the example for slime says to a door. slime's own modules are met by small ones: what of them it takes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from gyre.rollouts.protocol.frames import Weights
from tests.fleet.fleet_plane import PROMPT, FleetPlane, finish
from tests.rollouts.plane import small_folder, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "slime" / "gyre_fleet.py"


class Sample:
    """As far as the example knows slime's."""

    Status = SimpleNamespace(TRUNCATED="truncated", PENDING="pending")

    def __init__(self) -> None:
        self.prompt = "hi"
        self.tokens: list[int] = []
        self.response_length = 0
        self.session_id: str | None = None
        self.status = self.Status.PENDING
        self.appended: list[dict[str, Any]] = []

    def append_response_tokens(self, args: Any, *, tokens: list[int], **told: Any) -> None:
        self.tokens = self.tokens + tokens
        self.response_length += len(tokens)
        self.appended.append(told)


class HttpUtils(ModuleType):
    """slime's client: it asks again, whatever went wrong."""

    _http_client: httpx.AsyncClient

    async def post(self, url: str, payload: Any, headers: Any = None) -> Any:
        while True:
            try:
                reply = await self._http_client.post(url, json=payload, headers=headers)
                return reply.raise_for_status().json()
            except httpx.HTTPError:
                await asyncio.sleep(0.05)

    async def get(self, url: str) -> Any:
        return (await self._http_client.get(url)).raise_for_status().json()


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(PROMPT)


@pytest.fixture
async def example(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    http_utils = HttpUtils("slime.utils.http_utils")
    state = SimpleNamespace(tokenizer=Tokenizer())
    own = {
        "slime": {},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": lambda args: state},
        "slime.utils": {"http_utils": http_utils},
        "slime.utils.types": {"Sample": Sample},
        "torch": {},
        "torch.distributed": {"is_initialized": lambda: True, "get_rank": lambda: loaded.rank},
    }
    for name, values in own.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
    monkeypatch.setitem(sys.modules, http_utils.__name__, http_utils)
    monkeypatch.setenv("GYRE_FLEET_KEY", "lab-key")
    spec = importlib.util.spec_from_file_location("gyre_fleet", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.rank = 0  # type: ignore[attr-defined]
    async with httpx.AsyncClient(timeout=None) as http_utils._http_client:
        yield loaded


def args_of(plane: FleetPlane, **more: Any) -> SimpleNamespace:
    host, port = plane.url.removeprefix("http://").split(":")
    return SimpleNamespace(sglang_router_ip=host, sglang_router_port=int(port), **more)


def params_of(new: int) -> dict[str, Any]:
    """As slime makes them."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": new,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def test_a_sample_is_drawn_and_drawn_on(plane: FleetPlane, example: Any) -> None:
    (agent,) = await plane.serving("a", version=2)
    sample, params = Sample(), params_of(100)
    for tokens in (3, 5):
        asking = asyncio.create_task(example.generate(args_of(plane), sample, params))
        await finish(agent, tokens)
        assert await asking is sample
    assert sample.tokens[:5] == [*PROMPT, 1, 2, 3]
    assert sample.response_length == 8
    assert [len(told["log_probs"]) for told in sample.appended] == [3, 5]
    assert sample.appended[0]["meta_info"]["weight_version"] == "2"
    assert params == params_of(100)
    door = plane.door
    assert not door.ledger.requests()
    assert (await example.generate(args_of(plane), sample, params_of(8))).status == "truncated"


async def test_nothing_is_generated_twice_when_the_manager_dies(plane: FleetPlane, example: Any) -> None:
    (agent,) = await plane.serving("a")
    sample = Sample()
    asking = asyncio.create_task(example.generate(args_of(plane), sample, params_of(100)))
    (work,) = await agent.work(1)
    await agent.report({work.work.row: 4})
    await plane.told_tokens(f"{sample.session_id}-{len(PROMPT)}", 4)
    await plane.kill()
    await plane.start()
    await agent.back()
    (row,) = agent.samples
    await agent.report({row: 2}, {row: "stop"})
    await asking
    assert sample.tokens == [*PROMPT, 1, 2, 3, 4, 5, 6]
    assert not agent.samples


async def test_a_sample_waits_for_the_newest_version_or_for_one_that_is_new_enough(
    plane: FleetPlane, example: Any
) -> None:
    (agent,) = await plane.serving("a")
    assert (await plane.publish(1))[0] == 200
    late = asyncio.create_task(example.generate(args_of(plane, gyre_fleet_lag=1), Sample(), params_of(100)))
    await finish(agent, 1)
    assert (await late).appended[0]["meta_info"]["policy_versions"] == [[0, 0, 1]]
    newest = asyncio.create_task(example.generate(args_of(plane), Sample(), params_of(100)))
    await plane.open(1)
    *_, weights = await agent.wire.passed(Weights)
    await agent.loaded(weights)
    await finish(agent, 1)
    assert (await newest).appended[0]["meta_info"]["policy_versions"] == [[1, 0, 1]]


async def test_versions_are_published_in_order_and_the_newest_folders_stay(
    plane: FleetPlane, example: Any
) -> None:
    folders = [
        small_folder(plane.tmp_path / "run" / f"weight_v{step:06d}", step).path for step in range(1, 5)
    ]
    for at, folder in enumerate(folders):
        os.utime(folder, (at, at))
    example.rank = 1
    example.publish(args_of(plane), str(folders[0]), [])
    assert plane.manager.versions.newest == -1
    example.rank = 0
    for newest, folder in enumerate(folders):
        await asyncio.to_thread(example.publish, args_of(plane), str(folder), [])
        assert plane.manager.versions.durable == newest
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    await plane.kill()
    publishing = asyncio.create_task(asyncio.to_thread(example.publish, args_of(plane), str(folders[-1]), []))
    await plane.start()
    await publishing
    await until(lambda: plane.manager.versions.durable == 4)
    with pytest.raises(RuntimeError, match="no_policy"):
        await asyncio.to_thread(example.publish, args_of(plane), str(plane.tmp_path / "nothing"), [])
