"""What gyre-verl says to a door, which needs nothing of verl."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tests.fleet.fleet_plane import PROMPT, FleetPlane, finish

PACKAGE = str(Path(__file__).parents[2] / "integrations" / "gyre-verl")
sys.path.insert(0, PACKAGE)
try:
    from gyre_verl.door import Door, DoorError, request_id
    from gyre_verl.main import overrides_of
finally:
    sys.path.remove(PACKAGE)  # it would be the folder that other tests' classes are found in

GIVEN = ["fleet.url=http://m:7171", "fleet.key=k", "fleet.folder=/p", "actor_rollout_ref.model.path=/m"]


def body(rid: str, tokens: int = 100) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "return_logprob": True,
        "policy": {"at_least": 0},
    }


async def test_it_publishes_asks_and_forgets(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    door = Door(plane.url, "lab-key", patience_s=20.0)
    assert (await asyncio.to_thread(door.policies))["newest"] == 0
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(door.generate(session, body("one")))
        await finish(agent, 3)
        told = await asking
        assert told["output_ids"] == [1, 2, 3]
        assert told["meta_info"]["policy_versions"] == [[0, 0, 3]]
        with pytest.raises(DoorError, match="other_request"):
            await door.generate(session, body("one", tokens=7))
        await door.forget(session, "one")
        assert (await plane.get("/v1/requests/one", "lab-key"))[0] == 404
    with pytest.raises(DoorError, match="no_policy"):
        await asyncio.to_thread(door.publish, 1, {"path": str(plane.tmp_path / "nothing")})


async def test_a_door_that_is_away_is_asked_again_and_not_for_ever() -> None:
    async with aiohttp.ClientSession() as session:
        away = Door("http://127.0.0.1:9", "lab-key", patience_s=0.5)
        with pytest.raises(DoorError, match=r"within 0\.5 s"):
            await away.generate(session, body("two"))
    with pytest.raises(DoorError, match="away for"):
        await asyncio.to_thread(away.policies)


def test_an_id_is_of_a_trajectory_and_what_stands_before_the_turn() -> None:
    assert request_id("t", [1, 2]) == request_id("t", [1, 2])
    assert len({request_id("t", [1, 2]), request_id("t", [1, 2, 3]), request_id("u", [1, 2])}) == 3


def test_a_fleet_s_settings_become_verls_and_the_user_s_own_win() -> None:
    found = overrides_of([*GIVEN, "fleet.num_warmup_batches=2", "actor_rollout_ref.rollout.nnodes=3"])
    assert "trainer.v1.trainer_mode=gyre" in found
    assert "+trainer.v1.gyre.num_warmup_batches=2" in found
    assert not [one for one in found if one.startswith("gyre.")]
    nodes = [one for one in found if one.startswith("actor_rollout_ref.rollout.nnodes")]
    assert nodes[-1].endswith("=3")


def test_weights_are_published_as_the_engines_have_them() -> None:
    """And of an override that is given twice the last one wins, as with verl."""
    dtype = "actor_rollout_ref.rollout.dtype"
    found = overrides_of([*GIVEN, f"{dtype}=float16", f"{dtype}=float32"])
    assert "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gyre.dtype=float32" in found


def test_versions_on_the_plane_need_no_folder() -> None:
    given = [one for one in GIVEN if not one.startswith("fleet.folder")]
    found = overrides_of([*given, "fleet.weights=plane", "fleet.bind=10.0.0.0/8", "fleet.patience_s=60"])
    engine = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gyre."
    own = dict(one.removeprefix(engine).split("=") for one in found if one.startswith(engine))
    assert own == {
        "weights": "plane",
        "model_path": "/m",
        "dtype": "bfloat16",
        "bind": "10.0.0.0/8",
        "url": "http://m:7171",
        "key": "k",
        "patience_s": "60",
    }
    assert "+trainer.v1.gyre.patience_s=60" in found
    for more in (["fleet.weights=plane"], ["fleet.weights=disk"], ["fleet.ports=7100"]):
        with pytest.raises(SystemExit, match=more[0].partition("=")[0].replace("fleet.weights", "fleet")):
            overrides_of([*GIVEN, *more])


@pytest.mark.parametrize("missing", range(len(GIVEN)))
def test_what_is_missing_is_said_before_anything_starts(missing: int) -> None:
    given = [one for at, one in enumerate(GIVEN) if at != missing]
    with pytest.raises(SystemExit, match=GIVEN[missing].partition("=")[0]):
        overrides_of(given)


def test_a_configuration_without_a_door_is_refused() -> None:
    config = SimpleNamespace(trainer=SimpleNamespace(v1={"gyre": {"url": "http://m"}}))
    with pytest.raises(DoorError, match=r"trainer\.v1\.gyre"):
        Door.of(config)
