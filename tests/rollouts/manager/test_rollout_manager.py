"""The manager, over real sockets and a real database, against peers that do what they like."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from gyre.errors import Fenced
from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.manager import policy_push, policy_versions
from gyre.rollouts.manager import rollout_manager as manager_module
from gyre.rollouts.manager import sessions as sessions_module
from gyre.rollouts.manager.policy_versions import CHECKSUMS_KEPT
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.protocol.codec import encode
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Asleep,
    Assign,
    Attach,
    Cancel,
    DevicesReturned,
    Done,
    Draining,
    EngineDied,
    Failed,
    Hello,
    LendDevices,
    Loaded,
    LoadFailed,
    Publish,
    ReclaimDevices,
    Reject,
    Sleep,
    Taken,
    Weights,
    WeightsTrouble,
)
from gyre.weights.version.model_folder import ModelFolder
from tests.rollouts.frames import empty_progress
from tests.rollouts.plane import (
    QUICK,
    SOON_S,
    TOKEN,
    Plane,
    ScriptedAgent,
    live_plane,
    small_folder,
    until,
    within,
)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "TICK_S", 0.02)


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with live_plane(tmp_path) as plane:
        yield plane
        plane.exact()


# -- who is let in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong", "secret2", "sécret"])
async def test_without_the_token_nothing_is_open(plane: Plane, token: str) -> None:
    for route in ("agent", "trainer"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await plane.dial(route, token)
        assert caught.value.status == 401
    assert (await plane.get("/v1/status", token))[0] == 401
    status, body = await plane.post("/v1/drain", {"instance": "a"}, token)
    assert (status, body["code"]) == (401, "unauthorised")
    assert not plane.manager.sessions


def hello(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "instance": "bad",
        "incarnation": "1",
        "model": "unset",
        "engine": "scripted",
        "max_running": 8,
        "kv_tokens": 1024,
    }
    return encode(Hello(**(fields | changed)))


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\xff\xff", "malformed"),
        (hello()[:-4], "malformed"),
        (encode(Attach(protocol=PROTOCOL, term=1)), "no_hello"),
        (hello(protocol=0), "protocol"),
        (hello(protocol=1), "protocol"),
        (hello(protocol=PROTOCOL + 1), "protocol"),
        (hello(model="qwen3-00"), "model"),
        (hello(version=9), "unknown_version"),
        (hello(source="whoever has it"), "invalid"),
        (hello(source="10.0.0.5:70000"), "invalid"),
    ],
)
async def test_who_is_not_one_of_ours_is_told_why_and_harms_nobody(
    plane: Plane, first: bytes, code: str
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    good = await plane.working("good")
    await trainer.ask([0])
    (sample,) = await good.work(1)
    bad = await plane.dial()
    await bad.send(first)
    assert (await bad.expect(Reject)).code == code
    await bad.closed()
    assert [told["reason"] for told in plane.told("PeerRefused")] == [code]
    await good.report({sample.work.row: 3}, {sample.work.row: "stop"})
    assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "what", ["garbage", "text", "a trainer's frame", "a gap", "another's row", "a newer policy"]
)
async def test_a_joined_peer_that_breaks_the_protocol_is_cut_and_its_samples_go_on(
    plane: Plane, what: str
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    bad = await plane.working("bad")
    await trainer.ask([0], n=2)
    samples = await bad.work(2)
    row = samples[0].work.row
    seq = await bad.report({row: 4})
    await bad.acknowledged(seq)
    code, other = "malformed", None
    match what:
        case "garbage":
            await bad.wire.send(b"\x92\xa8progress\x90")
        case "text":
            await bad.wire.socket.send_str("hello")
        case "a trainer's frame":
            await bad.wire.send(Taken(purpose="train", ids=[0]))
            code = "unexpected"
        case "a gap":
            bad.samples[row].tokens += [0, 0]
            await bad.report({row: 1})
            code = "gap"
        case "another's row":
            other = await plane.working("other")
            await trainer.ask(range(1, 10))
            (theirs, *_) = await other.work(1)
            bad.samples[theirs.work.row] = theirs
            await bad.report({theirs.work.row: 3})  # its lease, from another instance: discarded, no more
            await until(lambda: plane.manager.groups.account.discarded["superseded"] == 3)
            await bad.wire.send(b"")
        case _:
            await bad.report({row: 1}, version=3)
            code = "unknown_version"
    assert (await bad.wire.expect(Reject)).code == code
    await until(lambda: "bad" not in plane.manager.sessions)
    good = other or await plane.working("good")
    again = await good.work(1)
    while not any(sample.work.key == samples[0].work.key for sample in again):
        again += await good.work(1)
    (first,) = [sample for sample in again if sample.work.key == samples[0].work.key]
    assert first.tokens == [1, 2, 3, 4]
    assert len(plane.told("PeerRefused")) == 1


async def test_who_says_nothing_is_let_go(tmp_path: Path) -> None:
    async with live_plane(tmp_path, hello_timeout_s=0.1) as plane:
        wire = await plane.dial()
        assert (await wire.expect(Reject)).code == "no_hello"
        await wire.closed()


@pytest.mark.filterwarnings("ignore")
async def test_events_that_cannot_be_told_end_nothing(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    class Deaf(list[Any]):
        def append(self, told: Any) -> None:
            raise ValueError("Out of range float values are not JSON compliant")

    plane.events = Deaf()
    plane.change(reconnect_grace_s=0.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await agent.wire.socket.close()
    await until(lambda: "a" not in plane.manager.sessions)  # the tick saw it, and had something to tell
    other = await plane.working("b")
    await trainer.ask([0])
    await other.work(1)
    assert "InstanceLeft could not be told" in capsys.readouterr().err


async def test_an_oversized_message_ends_its_connection_alone(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await plane.agent("good")
    monkeypatch.setattr(manager_module, "MAX_FRAME_BYTES", 1000)
    bad = await plane.dial()
    await bad.send(b"\0" * 2000)
    await bad.closed()
    assert not good.wire.socket.closed
    assert list(plane.manager.sessions) == ["good"]


# -- versions ---------------------------------------------------------------------------------------


async def test_no_work_before_the_right_weights_are_loaded(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.ask([0])
    agent = await plane.agent("a")
    await agent.wire.nothing(Assign)
    await trainer.publish(0)
    weights = await agent.wire.expect(Weights)
    await agent.wire.nothing(Assign)
    await agent.loaded(msgspec.structs.replace(weights, checksum="wrong"))
    assert (await agent.wire.expect(Reject)).code == "checksum"
    agent = await plane.working("a")
    await agent.work(1)


async def test_a_local_instance_fetches_between_windows_and_loads_and_works_within_one(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a", local=True)
    ahead = await agent.wire.expect(Weights)
    assert ahead.ahead
    assert plane.manager.sessions["a"].loading is None  # it may take as long as the trainer trains
    await trainer.ask([0])
    await agent.wire.send(
        EngineDied(message="it died", tail="")
    )  # which makes the manager look at what it lacks
    await agent.wire.nothing(Weights)  # once
    lend = LendDevices(window=1, begun=False, arrived_tokens=0, train_s_per_token=0.0, last_share=1.0)
    await trainer.wire.send(lend)
    weights = await agent.wire.expect(Weights)
    assert not weights.ahead
    await agent.loaded(weights)
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 100}, {sample.work.row: "length"})
    await agent.wire.expect(Sleep)
    await trainer.groups(1)
    await trainer.publish(1)
    assert (await agent.wire.expect(Weights)).ahead
    await agent.wire.send(Asleep(seconds=0.0))
    assert (await trainer.wire.expect(DevicesReturned)).window == 1
    await trainer.publish(2)
    assert (await agent.wire.expect(Weights)).version == 2
    back = await agent.back(local=True, asleep=True)  # over a new connection it is told again
    assert back.weights is None
    assert (await agent.wire.expect(Weights)).ahead
    plane.exact()


async def test_what_a_local_instance_loads_when_its_window_ends_is_not_overtaken(plane: Plane) -> None:
    """It would never say that it is loaded, and the trainer would wait for it."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a", local=True)
    await agent.wire.expect(Weights)
    await trainer.ask([0])
    lend = LendDevices(window=1, begun=False, arrived_tokens=0, train_s_per_token=0.0, last_share=1.0)
    await trainer.wire.send(lend)
    weights = await agent.wire.expect(Weights)
    await trainer.wire.send(ReclaimDevices(window=1))
    await trainer.publish(1)
    await agent.wire.nothing(Weights)
    await agent.loaded(weights)
    assert (await agent.wire.expect(Weights)).ahead
    await agent.wire.expect(Sleep)
    await agent.wire.send(Asleep(seconds=0.0))
    assert (await trainer.wire.expect(DevicesReturned)).window == 1


async def test_the_last_group_and_a_new_policy_wait_for_no_others(tmp_path: Path) -> None:
    """With nothing under way that could be written along; by intervals that would never end."""
    async with live_plane(tmp_path, urgent_commit_s=3600.0, commit_interval_s=3600.0) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a")
        await trainer.ask([0, 1])
        first, second = await agent.work(2)
        await agent.report({first.work.row: 100}, {first.work.row: "length"})
        await trainer.wire.nothing(Done)  # it may as well go with the other one's
        await agent.report({second.work.row: 100}, {second.work.row: "length"})
        assert len(await trainer.groups(2)) == 2
        await trainer.publish(1)
        assert (await agent.wire.expect(Weights)).version == 1


async def test_an_instance_whose_engine_starts_for_many_versions_works_when_it_has_a_newer_one(
    plane: Plane,
) -> None:
    """What it started with is forgotten by then; that is no lie."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    first = agent.weights or await agent.wire.expect(Weights)  # with its welcome, if it was durable by then
    newest = CHECKSUMS_KEPT + 1
    for version in range(1, newest + 1):
        plane.manager.weights.add(msgspec.structs.replace(first, version=version, checksum=f"{version:032x}"))
    await agent.loaded(first)
    await agent.wire.nothing(Reject)
    await trainer.publish(newest + 1)
    weights = await agent.wire.expect(Weights)
    while weights.version <= newest:
        weights = await agent.wire.expect(Weights)
    await agent.loaded(weights)
    await trainer.ask([0])
    await agent.work(1)


async def test_a_policy_is_in_the_ledger_before_anybody_hears_of_it(plane: Plane) -> None:
    write = plane.manager._store.write

    def slow(*args: Any, **named: Any) -> None:
        time.sleep(0.1)
        write(*args, **named)

    plane.manager._store.write = slow  # type: ignore[method-assign]
    agent = await plane.agent("a")
    trainer = await plane.trainer()
    folder = await trainer.publish(0)
    weights = await agent.wire.expect(Weights)
    assert weights.checksum == folder.checksum
    assert [known["version"] for known in plane.store.load().counters["weights"]] == [0]


async def test_a_manifest_that_takes_long_to_read_holds_up_nobody(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, on = ModelFolder.read, threading.Event()

    def slow(path: Path) -> ModelFolder:
        assert on.wait(SOON_S), "the loop did nothing meanwhile"
        return read(path)

    trainer = await plane.trainer()
    folder = small_folder(plane.tmp_path / "v0", 0)
    monkeypatch.setattr(policy_versions, "ModelFolder", SimpleNamespace(read=slow))
    await trainer.wire.send(Publish(version=0, checksum=folder.checksum, path=str(folder.path)))
    agent = await plane.agent("a")
    assert (await plane.get("/v1/status"))[0] == 200
    on.set()
    assert (await agent.wire.expect(Weights)).version == 0


async def test_who_has_a_version_is_looked_up_once_for_all(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    with_sources = plane.manager.policies.with_sources
    monkeypatch.setattr(
        plane.manager.policies, "with_sources", lambda weights: looked.append(1) or with_sources(weights)
    )
    agents = [await plane.agent(name) for name in ("a", "b", "c", "d")]
    trainer = await plane.trainer()
    await trainer.publish(0)
    for agent in agents:
        await agent.wire.expect(Weights)
    assert len(looked) == 1


async def test_a_version_that_was_published_stays_what_it_was(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    folder = await trainer.publish(1)
    await until(
        lambda: plane.manager.weights.served is not None and plane.manager.weights.served.version == 1
    )
    await trainer.publish(0)  # said again after a reconnect: nothing happens
    await trainer.publish(1)
    (folder.path / "model.safetensors").write_bytes(b"other")
    from gyre.weights.version.model_folder import list_model_folder

    list_model_folder(folder.path, version=1)
    await trainer.publish(1)
    assert (await trainer.wire.expect(Reject)).code == "checksum"
    assert plane.manager.weights.served is not None
    assert plane.manager.weights.served.checksum == folder.checksum


async def test_a_folder_that_is_none_is_refused(plane: Plane, tmp_path: Path) -> None:
    trainer = await plane.trainer()
    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "gyre.json").write_text("[]")
    await trainer.wire.send(Publish(version=0, checksum="a", path=str(tmp_path / "v0")))
    assert (await trainer.wire.expect(Reject)).code == "weights"


async def test_a_group_that_came_before_it_was_asked_for_comes_again(plane: Plane) -> None:
    """A trainer that starts anew asks for one firing after the other, and lays aside what it has not asked for yet."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0, 1])
    samples = await agent.work(2)
    await agent.report({s.work.row: 1 for s in samples}, dict.fromkeys(agent.samples, "stop"))
    await trainer.groups(2)
    successor = await plane.trainer(term=2)
    await successor.ask([0])
    assert (await successor.groups(2)).keys() == {0, 1}
    await successor.ask([1])
    assert (await successor.groups(1)).keys() == {1}


async def test_a_pinned_request_never_sees_a_newer_policy(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await until(lambda: plane.manager.weights.served is not None)
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    (sample,) = await agent.work(1)
    await trainer.publish(1)
    await trainer.ask([1], min_version=1)  # which must wait, and must not keep the pinned one from going on
    await agent.wire.nothing(Weights)
    agent.wire.seen.clear()
    # Nor does a manager that starts anew send it.
    await agent.acknowledged(await agent.report({sample.work.row: 2}))
    await plane.kill()
    await plane.start(restart_grace_s=60.0)
    welcome = await agent.back()
    plane.end_restart_grace()
    assert welcome.weights is None
    assert plane.manager.weights.published is not None
    assert plane.manager.weights.published.version == 1
    await agent.report({sample.work.row: 1}, {next(iter(agent.samples)): "stop"})
    weights = await agent.wire.expect(Weights)
    assert weights.version == 1
    await agent.loaded(weights)
    await agent.work(1)


async def test_a_pinned_request_that_comes_too_late_is_told_so(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    await trainer.publish(1)
    await until(
        lambda: plane.manager.weights.served is not None and plane.manager.weights.served.version == 1
    )
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    failed = await trainer.wire.expect(Failed)
    assert (failed.purpose, failed.ids) == ("eval", [0])


async def test_a_failed_load_is_told_and_given_again_after_a_while(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_push, "RELOAD_FIRST_S", 3600.0)
    monkeypatch.setattr(policy_push, "RELOAD_MAX_S", 3600.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    await until(lambda: plane.manager.weights.served is not None)
    await agent.wire.send(LoadFailed(version=0, error="a byte was flipped"))
    await until(lambda: plane.told("WeightsRefused"))
    assert plane.told("WeightsRefused")[0]["error"] == "a byte was flipped"
    await trainer.ask([0])
    await until(lambda: plane.manager.groups.queued == 1)
    await until(lambda: plane.manager.status()["instances"][0]["not_admitted"] == "policy_refused")
    assert (await agent.back(version=-1, checksum="")).weights is None  # not by a redial either
    await until(lambda: plane.manager.status()["instances"][0]["not_admitted"] == "policy_refused")
    assert len(plane.told("WeightsRefused")) == 1
    plane.manager.sessions["a"].refused[0].retry_at = 0.0  # the while is over
    await agent.loaded(await agent.wire.expect(Weights))
    await agent.work(1)


async def test_a_newer_version_is_given_at_once_to_who_could_not_load_the_last(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    await until(lambda: plane.manager.weights.served is not None)
    await agent.wire.send(LoadFailed(version=0, error="a byte was flipped"))
    await until(lambda: plane.told("WeightsRefused"))
    plane.manager.sessions["a"].refused[0].retry_at = float("inf")
    await trainer.publish(1)
    weights = await agent.wire.expect(Weights)
    while weights.version != 1:
        weights = await agent.wire.expect(Weights)


async def test_an_instance_that_does_not_load_in_time_is_let_go(tmp_path: Path) -> None:
    async with live_plane(tmp_path, load_timeout_s=0.1) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.agent("a")
        await agent.wire.closed()
        assert [told["reason"] for told in plane.told("InstanceLeft")] == ["weights_not_loaded"]


async def test_in_handover_mode_nothing_is_given_while_weights_are_loaded(tmp_path: Path) -> None:
    async with live_plane(tmp_path, update_mode="handover") as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a")
        await trainer.ask([0])
        (sample,) = await agent.work(1)
        await trainer.publish(1)
        weights = await agent.wire.expect(Weights)
        await agent.report({sample.work.row: 2}, {sample.work.row: "released"})
        await agent.wire.nothing(Assign)
        await agent.loaded(weights)
        (again,) = await agent.work(1)
        assert again.tokens == [1, 2]
        plane.exact()


# -- who comes and goes -----------------------------------------------------------------------------


async def test_a_short_cut_moves_nothing(plane: Plane) -> None:
    plane.change(reconnect_grace_s=60.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent, other = await plane.working("a"), None
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 5})
    await until(lambda: plane.manager.groups.account.generated == 5)
    agent.wire.socket._response.connection.transport.abort()  # type: ignore[union-attr]
    other = await plane.working("b")
    await until(lambda: plane.manager.sessions["a"].connection is None)
    sample.tokens += [6, 7]  # it went on meanwhile
    welcome = await agent.back()
    (keep,) = welcome.keep
    assert keep.known == 5
    sample.tokens = sample.tokens[:5]
    row = next(iter(agent.samples))
    await agent.report({row: 4}, {row: "stop"})
    assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == list(range(1, 10))
    await other.wire.nothing(Assign)
    assert not plane.told("InstanceLeft")


async def test_after_a_long_cut_the_sample_comes_back_to_who_has_more(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 5})
    await until(lambda: plane.manager.groups.account.generated == 5)
    agent.wire.socket._response.connection.transport.abort()  # type: ignore[union-attr]
    other = await plane.working("b")
    (theirs,) = await other.work(1)
    assert theirs.tokens == [1, 2, 3, 4, 5]
    await other.report({theirs.work.row: 2})
    await until(lambda: plane.manager.groups.account.generated == 7)
    sample.tokens += list(range(6, 21))
    (keep,) = (await agent.back()).keep
    assert keep.known == 7
    assert (await other.wire.expect(Cancel)).rows == [(theirs.work.row, theirs.work.lease)]
    # What the other made meanwhile is counted, and changes nothing.
    await other.report({theirs.work.row: 3}, {theirs.work.row: "released"})
    await until(lambda: plane.manager.groups.account.discarded["superseded"] == 3)
    agent.samples[keep.row].tokens = list(range(1, 8))
    await agent.report({keep.row: 3}, {keep.row: "stop"})
    assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == list(range(1, 11))


async def test_who_dials_twice_is_there_once(plane: Plane) -> None:
    first = await plane.agent("a")
    second = ScriptedAgent(plane, "a")
    await second.dial()
    await first.wire.closed()
    assert list(plane.manager.sessions) == ["a"]
    assert not plane.told("InstanceLeft")
    third = ScriptedAgent(plane, "a", incarnation="2")
    await third.dial()
    assert (await second.wire.expect(Reject)).code == "superseded"
    assert plane.manager.sessions["a"].hello.incarnation == "2"
    assert [told["reason"] for told in plane.told("InstanceLeft")] == ["superseded"]


async def test_an_agent_that_dials_again_while_its_old_connection_stands_gets_work(plane: Plane) -> None:
    """However late the old connection's handler ends, it concerns nobody any more."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    first = await plane.working("a")
    second = ScriptedAgent(plane, "a")
    second.weights = first.weights
    await second.back()
    await first.wire.closed()
    await first.wire.socket.close()
    await until(lambda: len(plane.manager._runner.server.connections) == 2)  # the old one's handler ends
    await plane.settled()
    await trainer.ask([0])
    (sample,) = await second.work(1)
    assert plane.manager.status()["instances"][0]["not_admitted"] == ""
    await second.report({sample.work.row: 3}, {sample.work.row: "stop"})
    assert set(await trainer.groups(1)) == {0}


async def test_who_replaces_a_lost_agent_before_it_is_missed_says_that_it_is_gone(tmp_path: Path) -> None:
    async with live_plane(tmp_path, reconnect_grace_s=60.0) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        first = await plane.working("a")
        await trainer.ask([0])
        (sample,) = await first.work(1)
        await first.report({sample.work.row: 5})
        await until(lambda: plane.manager.groups.account.generated == 5)
        first.wire.socket._response.connection.transport.abort()  # type: ignore[union-attr]
        await until(lambda: plane.manager.sessions["a"].connection is None)
        second = ScriptedAgent(plane, "a", incarnation="2")
        await second.dial()
        (left,) = plane.told("InstanceLeft")
        assert (left["instance"], left["reason"], left["moved"], left["tokens"]) == ("a", "replaced", 1, 5)
        (state,) = plane.manager.groups.samples()
        assert state.deaths == 1  # it may have been the sample that took the machine down
        await second.load()
        (again,) = await second.work(1)
        assert again.tokens == [1, 2, 3, 4, 5]
        plane.exact()


async def test_a_restarted_agent_of_the_same_name_gets_the_work_from_the_last_token(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 5})
    await until(lambda: plane.manager.groups.account.generated == 5)
    again = ScriptedAgent(plane, "a", incarnation="2")
    assert (await again.dial()).keep == []
    await again.load()
    (theirs,) = await again.work(1)
    assert theirs.tokens == [1, 2, 3, 4, 5]


async def test_a_silent_agent_is_left_and_may_come_back(tmp_path: Path) -> None:
    async with live_plane(tmp_path) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a")
        await trainer.ask([0])
        (sample,) = await agent.work(1)
        await agent.report({sample.work.row: 3})
        await until(lambda: plane.manager.groups.account.generated == 3)
        plane.change(silence_timeout_s=0.1)
        await agent.wire.closed()
        plane.change(silence_timeout_s=60.0)  # whoever comes now may take its time
        assert [told["reason"] for told in plane.told("InstanceLeft")] == ["silent"]
        other = await plane.working("b")
        (theirs,) = await other.work(1)
        assert theirs.tokens == [1, 2, 3]
        await other.report({theirs.work.row: 1}, {theirs.work.row: "stop"})
        await until(lambda: plane.manager.groups.account.generated == 4)
        sample.tokens += list(range(4, 9))
        assert (await agent.back()).keep == []  # it is finished: no token of it is made again
        assert plane.manager.groups.account.discarded["superseded"] == 5
        plane.exact()


async def test_reports_without_news_cost_no_commit_and_keep_an_instance_alive(tmp_path: Path) -> None:
    async with live_plane(tmp_path, silence_timeout_s=1e6) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a")
        manager = plane.manager
        await until(
            lambda: plane.told("WeightsLoaded") and not (manager.groups.is_dirty or manager.weights.changed)
        )
        await plane.settled()  # what was being written has been counted
        session = manager.sessions["a"]
        heard_at, commits = session.heard_at, manager._commits.count
        for seq in range(1, 21):
            report = empty_progress(seq)
            report.running = seq
            await agent.wire.send(report)
        await until(lambda: session.running == 20)
        await plane.settled()
        assert session.heard_at > heard_at
        assert manager._commits.count == commits
        # What an instance of nothing says of samples that it has not is refused all the same.
        wrong = empty_progress(21)
        wrong.tokens = np.zeros(1, np.int32)
        await agent.wire.send(wrong)
        assert (await agent.wire.expect(Reject)).code == "lengths"


async def test_no_instance_at_all_is_normal(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.ask([0, 1], n=2)
    await until(lambda: plane.manager.groups.queued == 4)
    status, _ = await plane.get("/v1/status")
    assert status == 200
    await trainer.publish(0)
    agent = await plane.working("late")
    samples = await agent.work(4)
    rows = [sample.work.row for sample in samples]
    await agent.report(dict.fromkeys(rows, 2), dict.fromkeys(rows, "stop"))
    assert set(await trainer.groups(2)) == {0, 1}


async def test_a_drain_hands_over_within_a_second(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0, 1])
    samples = await agent.work(2)
    rows = [sample.work.row for sample in samples]
    other = await plane.working("b")
    from gyre.rollouts.protocol.frames import Drain

    with within(1.0):
        status, body = await plane.post("/v1/drain", {"instance": "a", "deadline_s": 5, "reason": "spot"})
        assert (status, body) == (200, {"instance": "a", "draining": True})
        drain = await agent.wire.expect(Drain)
        assert (drain.deadline_s, drain.reason) == (5.0, "spot")
        await agent.wire.send(Draining(reason="spot", deadline_s=5.0))
        seq = await agent.report(dict.fromkeys(rows, 3), dict.fromkeys(rows, "released"))
        theirs = await other.work(2)
        assert [sample.tokens for sample in theirs] == [[1, 2, 3]] * 2
        await agent.acknowledged(seq)
    await agent.wire.socket.close()
    await until(lambda: "a" not in plane.manager.sessions)
    assert [told["reason"] for told in plane.told("InstanceLeft")] == ["drained"]
    assert len(plane.told("InstanceDraining")) == 1


async def test_who_does_not_drain_in_time_is_left(plane: Plane) -> None:
    agent = await plane.agent("a")
    await agent.wire.send(Draining(reason="SIGTERM", deadline_s=0.0))
    await agent.wire.closed()
    assert [told["reason"] for told in plane.told("InstanceLeft")] == ["drain_deadline"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"\xff", 422),
        ([], 422),
        ({}, 422),
        ({"instance": "a", "deadline_s": "soon"}, 422),
        ({"instance": "a", "deadline_s": -1}, 422),
        (b'{"instance": "a", "deadline_s": NaN}', 422),
        (b'{"instance": "a", "deadline_s": 1e999}', 422),
        ({"instance": "nobody"}, 404),
    ],
)
async def test_a_drain_that_makes_no_sense_is_refused(plane: Plane, body: Any, status: int) -> None:
    agent = await plane.agent("a")
    assert (await plane.post("/v1/drain", body))[0] == status
    assert not plane.manager.sessions["a"].draining
    assert not agent.wire.socket.closed


async def test_an_instance_is_told_who_else_has_the_version(plane: Plane) -> None:
    trainer = await plane.trainer()
    folder = await trainer.publish(0)
    first = await plane.agent("a")
    if first.weights is None:
        await first.wire.expect(Weights)
    await first.wire.send(
        Loaded(version=0, checksum=folder.checksum, fetch_s=0.0, load_s=0.0, source="10.0.0.7:4000")
    )
    await until(lambda: plane.told("WeightsLoaded"))
    second = await plane.agent("b")
    assert second.weights is not None
    assert second.weights.sources == ["10.0.0.7:4000"]


async def test_a_publisher_that_has_moved_is_told_to_those_who_fetch(plane: Plane) -> None:
    trainer = await plane.trainer()
    agent = await plane.agent("a")
    for port in (1000, 2000):
        frame = Publish(version=0, checksum="abc", path="", sources=[f"10.0.0.5:{port}"], model="qwen3-1234")
        await trainer.wire.send(frame)
        told = await agent.wire.expect(Weights)
        assert told.sources == [f"10.0.0.5:{port}"]
    assert plane.manager.weights.model == "qwen3-1234"
    assert not plane.told("PeerRefused")


async def test_a_dead_publisher_is_nobody_s_source_for_any_version(plane: Plane) -> None:
    trainer = await plane.trainer()

    async def publish(version: int, port: int, checksum: str = "") -> None:
        sources = [f"10.0.0.5:{port}"]
        frame = Publish(
            version=version, checksum=checksum or f"of-{version}", path="", sources=sources, model="qwen3-1"
        )
        await trainer.wire.send(frame)

    await publish(0, 1000)
    await until(lambda: plane.manager.weights.served is not None)
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    await publish(1, 1000)
    await publish(1, 2000)  # the publisher was replaced; version 0 is what instances are to have
    await until(lambda: plane.manager.weights.published.sources == ["10.0.0.5:2000"])
    first = await plane.agent("a")
    assert first.weights is not None
    assert (first.weights.version, first.weights.sources) == (0, ["10.0.0.5:2000"])
    await publish(0, 1000)  # what a client says again to a manager that it has dialled anew: oldest first
    await publish(1, 2000)
    await publish(2, 3000)  # and one that was replaced between two versions
    await until(lambda: plane.manager.weights.newest == 2)
    second = await plane.agent("b")
    assert second.weights is not None
    assert (second.weights.version, second.weights.sources) == (0, ["10.0.0.5:3000"])
    await publish(2, 4000, "other-bytes")
    assert (await trainer.wire.expect(Reject)).code == "checksum"
    assert plane.manager.weights.published.sources == ["10.0.0.5:3000"]


async def test_a_pinned_request_for_a_version_that_nobody_has_any_more_fails(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    await until(lambda: plane.manager.weights.served is not None)
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    holder = await plane.working("a")
    await trainer.publish(1)
    await until(lambda: plane.manager.weights.durable == 1)
    other = await plane.agent("b")
    await other.wire.send(LoadFailed(version=0, error="nobody has the manifest"))
    await until(lambda: len(plane.told("WeightsRefused")) == 1)
    await trainer.wire.nothing(Failed)  # the first one has it
    await holder.wire.socket.close()
    await until(lambda: "a" not in plane.manager.groups.instances)
    assert (await other.wire.expect(Weights)).version == 0  # told again after a while
    await other.wire.send(LoadFailed(version=0, error="nobody has the manifest"))
    failed = await trainer.wire.expect(Failed)
    assert (failed.purpose, failed.ids) == ("eval", [0])
    assert failed.message.endswith("nobody has the manifest")
    await trainer.wire.send(Taken(purpose="eval", ids=[0]))
    assert (await other.wire.expect(Weights)).version == 1


async def test_a_version_that_could_not_be_had_is_tried_at_once_when_its_publisher_has_moved(
    plane: Plane,
) -> None:
    trainer = await plane.trainer()
    agent = await plane.agent("a")
    first = Publish(version=0, checksum="abc", path="", sources=["10.0.0.5:1000"], model="qwen3-1234")
    await trainer.wire.send(first)
    await agent.wire.expect(Weights)
    await agent.wire.send(LoadFailed(version=0, error="nobody has it"))
    await until(lambda: plane.told("WeightsRefused"))
    plane.manager.sessions["a"].refused[0].retry_at = float("inf")
    await trainer.wire.send(msgspec.structs.replace(first, sources=["10.0.0.5:2000"]))
    assert (await agent.wire.expect(Weights)).sources == ["10.0.0.5:2000"]


async def test_what_went_wrong_with_weights_is_told(plane: Plane) -> None:
    agent = await plane.agent("a")
    await agent.wire.send(WeightsTrouble(version=3, what="chunk_damaged", evidence='{"chunk": 4}'))
    await until(lambda: plane.told("WeightsTrouble"))
    assert plane.told("WeightsTrouble")[0]["what"] == "chunk_damaged"


# -- failures ---------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_told_with_its_last_words_and_its_samples_go_on(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 4}, {sample.work.row: "died"}, message="out of memory")
    await agent.wire.send(EngineDied(message="killed by SIGKILL", tail="CUDA error"))
    weights = await agent.wire.expect(Weights)
    await trainer.ask([1])
    early = [one for frame in await agent.wire.passed(Assign) for one in frame.work]
    # Its own sample may have come back before the manager heard of the death; nothing is given to it after.
    assert {one.key for one in early} <= {sample.work.key}
    assert plane.manager.groups.queued == 2 - len(early)
    assert plane.told("EngineDied") == [{"instance": "a", "error": "killed by SIGKILL", "tail": "CUDA error"}]
    await agent.loaded(weights)
    given = early + [one.work for one in await agent.work(2 - len(early))]
    priors = {one.key: np.frombuffer(one.prior, "<i4").tolist() for one in given}
    assert len(priors) == 2
    assert priors[sample.work.key] == [1, 2, 3, 4]
    assert plane.manager.groups.account.discarded == {}


async def test_a_sample_that_fails_everywhere_is_quarantined_with_its_evidence_and_told_in_the_end(
    plane: Plane,
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agents = [await plane.working(name) for name in ("a", "b")]
    await trainer.ask([5])
    tries = 0
    seeds = set()

    async def fail(agent: ScriptedAgent) -> None:
        nonlocal tries
        while True:
            (sample,) = await agent.work(1)
            tries += 1
            seeds.add(sample.work.seed)
            await agent.report(
                {sample.work.row: 1}, {sample.work.row: "failed"}, message=f"{agent.name} said no"
            )

    failing = [asyncio.create_task(fail(agent)) for agent in agents]
    failed = await trainer.wire.expect(Failed)
    for task in failing:
        task.cancel()
    await asyncio.gather(*failing, return_exceptions=True)
    assert (failed.purpose, failed.ids) == ("train", [5])
    assert "a said no" in failed.message
    assert "b said no" in failed.message
    assert tries == 6
    assert len(seeds) == 4  # another one after each time
    aside = plane.told("SampleSetAside")
    assert len(aside) == 4
    assert aside[0]["prompt"] == [7, 8]
    assert plane.manager.groups.account.discarded == {"poison": 6}
    # And not delivered as if it were data; the trainer may give it up.
    await trainer.wire.nothing(Done)
    assert not any(isinstance(frame, Done) for frame in trainer.wire.seen)
    await trainer.wire.send(Taken(purpose="train", ids=[5]))
    await until(lambda: not plane.manager.groups.requests)


async def test_a_trainer_that_does_not_read_slows_nobody_and_is_cut(tmp_path: Path) -> None:
    async with live_plane(tmp_path, send_timeout_s=0.3) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a", max_running=512, kv_tokens=1 << 30)
        # The one that does not read: it asks, and then its receive buffer is full.
        raw = socket.create_connection(("127.0.0.1", plane.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await trainer.ask(range(64), limit=20_000)
        samples = await agent.work(64)
        key = "dGhlIHNhbXBsZSBub25jZQ=="
        raw.sendall(
            f"GET /v1/trainer HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Authorization: Bearer {TOKEN}\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        attach = encode(Attach(protocol=PROTOCOL, term=2))
        raw.sendall(bytes([0x82, 0x80 | len(attach), 0, 0, 0, 0]) + attach)
        await until(lambda: plane.manager.trainer.term == 2)
        slow = plane.manager.trainer.connection
        rows = [sample.work.row for sample in samples]
        for row in rows:
            await agent.report({row: 20_000}, {row: "length"})
        seq = agent.seq
        with within(2.0):
            await agent.acknowledged(seq)
        assert slow is not None
        await until(lambda: plane.manager.trainer.connection is not slow)
        raw.close()
        plane.change(send_timeout_s=60.0)
        # A trainer that reads gets all of it.
        good = await plane.trainer(term=3)
        await good.ask(range(64), limit=20_000)
        groups = await good.groups(64)
        assert sum(group.token_count for group in groups.values()) == 64 * 20_000
        plane.exact()


async def test_an_agent_that_does_not_read_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SEND_LIMIT_BYTES", 10_000)
    async with live_plane(tmp_path) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a", max_running=4096, kv_tokens=1 << 30)
        await trainer.ask(range(1000))
        await agent.wire.closed()
        await until(lambda: "a" not in plane.manager.sessions)
        plane.exact()


# -- the manager's own death ------------------------------------------------------------------------


async def test_acknowledged_means_durable_and_what_was_not_is_handed_over_again(plane: Plane) -> None:
    trainer = await plane.trainer()
    folder = await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0, 1])
    samples = await agent.work(2)
    one, two = (sample.work.row for sample in samples)
    await agent.acknowledged(await agent.report({one: 4, two: 2}))
    await until(lambda: not plane.manager.groups.is_dirty)
    kept = {sample.work.key: list(sample.tokens) for sample in samples}
    # These come in, and are gone with the manager before they are committed.
    plane.manager._write = lambda batch: time.sleep(0.05)  # type: ignore[method-assign]
    await agent.report({one: 3, two: 1})
    await until(lambda: plane.manager.groups.account.generated == 10)
    await plane.kill()
    with pytest.raises((aiohttp.ClientError, AssertionError)):
        await agent.back()
    await plane.start(restart_grace_s=60.0)
    welcome = await agent.back()
    assert {keep.key: keep.known for keep in welcome.keep} == {
        key: len(tokens) for key, tokens in kept.items()
    }
    assert welcome.weights is None  # it has what is served, which the new manager knows
    assert plane.manager.weights.served is not None
    assert plane.manager.weights.served.checksum == folder.checksum
    for row, sample in agent.samples.items():
        sample.tokens = sample.tokens[: len(kept[sample.work.key])]
        await agent.report({row: 3})
    ends = dict.fromkeys(agent.samples, "stop")
    seq = await agent.report(dict.fromkeys(ends, 1), ends)
    await agent.acknowledged(seq)
    trainer = await plane.trainer(term=2)
    await trainer.ask([0, 1])
    groups = await trainer.groups(2)
    assert {len(group.samples[0].token_ids) for group in groups.values()} == {8, 6}
    # Delivered until taken: a third manager delivers them again, and after that nobody.
    await plane.kill()
    await plane.start()
    trainer = await plane.trainer(term=3)
    await trainer.ask([0, 1])
    assert set(await trainer.groups(2)) == {0, 1}
    await trainer.wire.send(Taken(purpose="train", ids=[0, 1]))
    await until(lambda: not plane.store.load().groups)
    assert plane.store.load().deltas == []
    assert plane.manager.groups.account.delivered == 14
    assert plane.manager.groups.account.samples_delivered == 2


async def test_after_a_restart_nothing_is_given_out_before_its_holder_had_time_to_come(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.acknowledged(await agent.report({sample.work.row: 4}))
    await plane.kill()
    await plane.start(restart_grace_s=60.0)
    other = await plane.working("b")
    await other.wire.nothing(Assign)
    (keep,) = (await agent.back()).keep
    assert keep.known == 4
    plane.end_restart_grace()
    await until(lambda: not plane.manager.dispatch.hold_until)
    await other.wire.nothing(Assign)


async def test_who_does_not_come_back_loses_its_samples(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    await agent.acknowledged(await agent.report({sample.work.row: 4}))
    await plane.kill()
    await plane.start()
    other = await plane.working("b")
    (theirs,) = await other.work(1)
    assert theirs.tokens == [1, 2, 3, 4]


@pytest.mark.parametrize("reported", [0, 4])
async def test_who_comes_back_late_to_a_new_manager_keeps_what_it_generated_meanwhile(
    plane: Plane, reported: int
) -> None:
    """Its sample has gone elsewhere by then. The lease counts from its commit on, be there tokens or not."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    await trainer.ask([0])
    agent = await plane.agent("a")
    await plane.settled()  # nothing is left to be written
    await agent.load()
    (sample,) = await agent.work(1)
    if reported:
        await agent.acknowledged(await agent.report({sample.work.row: reported}))
    await until(lambda: plane.store.load().deltas)
    await plane.kill()
    await plane.start(restart_grace_s=60.0)
    await plane.settled()
    await agent.back()  # under a new lease
    await until(lambda: len(plane.store.load().deltas) == 2)
    await plane.kill()
    await plane.start(restart_grace_s=0.0)
    other = await plane.working("b")
    (theirs,) = await other.work(1)
    assert theirs.tokens == sample.tokens[:reported]
    sample.tokens = list(range(1, 91))
    (keep,) = (await agent.back()).keep
    assert keep.known == reported
    assert (await other.wire.expect(Cancel)).rows == [(theirs.work.row, theirs.work.lease)]
    sample.tokens = sample.tokens[:reported]  # what follows is to be reported
    await agent.report({keep.row: 90 - reported}, {keep.row: "stop"})
    trainer = await plane.trainer(term=2)
    await trainer.ask([0])
    (group,) = (await trainer.groups(1)).values()
    assert len(group.samples[0].token_ids) == 90
    assert plane.manager.groups.account.discarded == {}
    assert plane.manager.groups.account.generated == 90


async def test_a_sample_goes_on_elsewhere_after_its_tokens_are_committed(plane: Plane) -> None:
    """Else the death of the manager and of the first holder together would lose them."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    (sample,) = await agent.work(1)
    other = await plane.working("b")
    await until(lambda: not plane.manager.groups.is_dirty)
    write = plane.manager._store.write

    def slow(*args: Any, **named: Any) -> None:
        time.sleep(0.15)
        write(*args, **named)

    plane.manager._store.write = slow  # type: ignore[method-assign]
    await plane.post("/v1/drain", {"instance": "a"})
    await agent.report({sample.work.row: 4}, {sample.work.row: "released"})
    (theirs,) = await other.work(1)
    rows = plane.store.load()
    again = OpenGroups(epoch=99)
    again.newest_version = 0
    again.promote(0)
    again.restore(rows.counters, rows.groups, rows.deltas)
    assert theirs.tokens == [1, 2, 3, 4]
    assert [state.length for state in again.samples()] == [4]


async def test_a_newer_manager_fences_the_older_one(plane: Plane) -> None:
    fatal: list[BaseException] = []
    older = plane.manager
    older._on_fatal = fatal.append
    newer = RolloutManager(plane.store, term=7, token=TOKEN, settings=QUICK)
    await newer.start("127.0.0.1", 0)
    trainer = await plane.trainer()
    await trainer.ask([0])
    await until(lambda: fatal)
    assert isinstance(fatal[0], Fenced)
    with pytest.raises(Fenced):
        await RolloutManager(plane.store, term=6, token=TOKEN).start("127.0.0.1", 0)
    await newer.stop()
    plane.manager.groups.take_batch()


async def test_a_port_that_is_taken_may_be_tried_again_elsewhere(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0, 1], n=2)
    samples = await agent.work(4)
    await agent.acknowledged(await agent.report({samples[0].work.row: 4}))
    await plane.kill()
    taken = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(taken):
        manager = RolloutManager(plane.store, term=50, token=TOKEN, settings=replace(QUICK))
        with pytest.raises(OSError, match="in use"):
            await manager.start("127.0.0.1", taken.getsockname()[1])
        await manager.start("127.0.0.1", 0)
    assert [state.length for state in manager.groups.samples()] == [4, 0, 0, 0]
    assert manager.groups.missing_tokens() == 0
    assert manager.groups.queued == 4
    await manager.stop()
    plane.term = 50
    await plane.start()
