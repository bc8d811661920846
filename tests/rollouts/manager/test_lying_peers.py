"""Instances that joined and say what is not so: they are cut or suspended, and the honest ones finish every sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gyre.rollouts.manager import rollout_manager
from gyre.rollouts.plane import peer_events, placement
from gyre.rollouts.plane.events import DispatchDue
from gyre.rollouts.plane.instances import LONGEST_DRAIN_S
from gyre.rollouts.plane.peer_limits import RateLimit
from gyre.rollouts.protocol.frames import (
    Assign,
    Cancel,
    Draining,
    FetchFault,
    Frame,
    Loaded,
    Reject,
    Weights,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from tests.rollouts.plane import JOIN_TOKEN, Plane, ScriptedAgent, live_plane, until


async def joined(plane: Plane, name: str, **hello: Any) -> ScriptedAgent:
    agent = await plane.agent(name, token=JOIN_TOKEN, **hello)
    await agent.load()
    return agent


def end_of(row: int, lease: int, runs: tuple[tuple[int, int], ...]) -> GenerationProgress:
    columns = [np.empty(0, dtype) for dtype in ("u4", "u8", "u4", "u4", "i4", "i4", "f4")]
    return GenerationProgress(99, *columns, [End(row, lease, "stop", "", runs)])


# -- versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["tokens", "tokens with others", "runs"])
async def test_tokens_of_a_version_that_it_never_loaded_are_refused(plane: Plane, how: str) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    liar = await joined(plane, "liar")
    await trainer.ask([0])
    (sample,) = await liar.work(1)
    row = sample.work.row
    await liar.acknowledged(await liar.report({row: 2}))
    await trainer.publish(1)
    await liar.wire.expect(Weights)  # told to load it, and says nothing of it
    match how:
        case "tokens":
            await liar.report({row: 3}, version=1)
        case "tokens with others":
            good = await joined(plane, "good")
            await trainer.ask([1])
            (theirs,) = await good.work(1)
            await good.report({theirs.work.row: 3})
            await liar.report({row: 3}, version=1)
        case _:
            await liar.wire.send(end_of(row, sample.work.lease, ((1, 2),)))
    assert (await liar.wire.expect(Reject)).code == "not_loaded"
    await until(lambda: "liar" not in plane.manager.links)
    (held,) = [one for one in plane.manager.groups.samples() if one.key == sample.work.key]
    assert held.runs == [[0, 0, 2]]


async def test_a_sample_has_no_older_version_after_a_newer_one(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    liar = await joined(plane, "liar")
    await trainer.ask([0])
    (sample,) = await liar.work(1)
    await trainer.publish(1)
    await liar.loaded(await liar.wire.expect(Weights))
    await liar.report({sample.work.row: 2}, version=1)
    await liar.report({sample.work.row: 2}, version=0)
    assert (await liar.wire.expect(Reject)).code == "older_version"


async def test_who_is_back_may_report_what_it_generated_before(plane: Plane) -> None:
    """Its word that it loaded a version was lost with the connection; and a new manager has not heard it at all."""
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await trainer.ask([0])
    await agent.work(1)
    await trainer.publish(1)
    agent.weights = await agent.wire.expect(Weights)
    await agent.wire.socket.close()
    await agent.back()
    (row,) = agent.samples
    await agent.acknowledged(await agent.report({row: 2}, version=0))
    await plane.kill()
    await plane.start()
    await agent.back()
    (row,) = agent.samples
    seq = await agent.report({row: 1}, version=0)
    seq = await agent.report({row: 2}, {row: "stop"}, version=1)
    await agent.acknowledged(seq)
    assert not plane.told("PeerRefused")


# -- silence ----------------------------------------------------------------------------------------


async def test_who_has_samples_and_sends_no_token_is_suspended_and_they_go_on(tmp_path: Path) -> None:
    async with live_plane(tmp_path, stall_timeout_s=0.3) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        liar = await joined(plane, "liar")
        await trainer.ask([0])
        (sample,) = await liar.work(1)
        await liar.acknowledged(await liar.report({sample.work.row: 4}))
        good = await joined(plane, "good")
        with_load = GenerationProgress(7, *[np.empty(0, t) for t in "IQIIiif"], rate_tokens_s=1e6, running=1)
        while not plane.told("InstanceSuspended"):  # it is alive, busy and fast, as it says
            await liar.wire.send(with_load)
            await plane.settled()
        (again,) = await good.work(1)
        assert again.tokens == [1, 2, 3, 4]
        (told,) = plane.told("InstanceSuspended")
        assert (told["instance"], told["samples"], told["running"]) == ("liar", 1, 1)
        assert told["still_s"] >= 0.3
        assert [one["reason"] for one in plane.told("InstanceLeft")] == ["stalled"]
        await liar.wire.closed()
        # Not before its time is over, and no token of what it had.
        wire = await plane.dial(token=JOIN_TOKEN)
        await wire.send(liar.hello(incarnation="2"))
        assert (await wire.expect(Reject)).code == "later"
        await good.report({again.work.row: 1}, {again.work.row: "stop"})
        assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == [1, 2, 3, 4, 5]


async def test_a_rate_that_no_tokens_prove_is_not_believed(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    liar, good = await joined(plane, "liar", max_running=512), await joined(plane, "good", max_running=512)
    for agent in (liar, good):
        rate = 1e11 if agent is liar else 10.0
        await agent.wire.send(
            GenerationProgress(7, *[np.empty(0, t) for t in "IQIIiif"], rate_tokens_s=rate, running=1)
        )
    await plane.settled()
    await trainer.ask(range(100))
    assert len(await good.work(40)) >= 40
    assert plane.manager.links["liar"].rate_tokens_s == 0.0


async def test_an_idle_instance_is_never_suspended(tmp_path: Path) -> None:
    async with live_plane(tmp_path, stall_timeout_s=0.05) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        await joined(plane, "idle")
        for _ in range(5):
            await plane.settled()
        assert not plane.told("InstanceSuspended")


async def test_a_recalled_sample_is_taken_back_from_who_keeps_it(tmp_path: Path) -> None:
    async with live_plane(tmp_path, recall_timeout_s=0.1) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        liar = await joined(plane, "liar")
        await trainer.ask([0])
        (sample,) = await liar.work(1)
        await liar.acknowledged(await liar.report({sample.work.row: 4}))
        good = await joined(plane, "good")
        plane.manager.links["liar"].draining = True  # so that it does not come back here
        placement.recall(plane.manager.plane, plane.manager.groups.held_by("liar"))
        plane.manager.shell.handle(DispatchDue())  # which sends what is to be sent
        await liar.wire.expect(Cancel)
        (again,) = await good.work(1)
        assert again.tokens == [1, 2, 3, 4]
        assert plane.told("RecallIgnored") == [{"instance": "liar", "count": 1}]
        await liar.report({sample.work.row: 3}, {sample.work.row: "stop"})  # too late: of no lease
        await until(lambda: plane.manager.groups.account.discarded["superseded"] == 3)
        await good.report({again.work.row: 1}, {again.work.row: "stop"})
        assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == [1, 2, 3, 4, 5]


# -- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hello", "loaded"])
@pytest.mark.parametrize(
    ("source", "believed"), [("127.0.0.1:7001", True), ("169.254.169.254:80", False), ("10.0.0.1:22", False)]
)
async def test_others_are_sent_to_no_host_that_an_instance_does_not_dial_from(
    plane: Plane, how: str, source: str, believed: bool
) -> None:
    trainer = await plane.trainer()
    made = await trainer.publish(0)
    await until(lambda: plane.manager.groups.newest_version == 0)
    liar = await plane.agent("liar", token=JOIN_TOKEN, **({"source": source} if how == "hello" else {}))
    if how == "loaded":
        await liar.wire.send(
            Loaded(version=0, checksum=made.checksum, fetch_s=0.0, load_s=0.0, source=source)
        )
    else:
        await liar.back(version=0, checksum=made.checksum, source=source)
    await plane.settled()
    other = await plane.agent("other")
    told = other.weights or await other.wire.expect(Weights)
    assert (source in told.sources) is believed
    ignored = {one["address"] for one in plane.told("AddressIgnored")}
    assert ignored == (set() if believed else {source})


async def test_an_address_in_the_jobs_networks_is_believed(tmp_path: Path) -> None:
    async with live_plane(tmp_path) as plane:
        plane.change(weights=plane.settings.weights.model_copy(update={"sender_networks": ["10.0.0.0/24"]}))
        trainer = await plane.trainer()
        made = await trainer.publish(0)
        await until(lambda: plane.manager.groups.newest_version == 0)
        await plane.agent("a", token=JOIN_TOKEN, version=0, checksum=made.checksum, source="10.0.0.5:7000")
        assert plane.manager.links["a"].source == "10.0.0.5:7000"


# -- floods -----------------------------------------------------------------------------------------


async def test_two_thousand_reports_of_trouble_are_a_few_events_with_a_count(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_events, "WINDOW_S", 0.5)
    liar = await plane.agent("liar", token=JOIN_TOKEN)
    for number in range(2000):
        await liar.wire.send(FetchFault(version=0, what="source_lost", evidence=f'{{"n": {number}}}'))
    await until(lambda: sum(one.get("count", 1) for one in plane.told("FetchFault")) == 2000)
    assert len(plane.told("FetchFault")) <= 6 * (peer_events.EACH + 1)  # windows of a slow machine
    assert plane.told("FetchFault")[-1]["evidence"] == '{"n": 1999}'


async def test_who_dials_without_end_is_put_off_and_fills_no_journal(plane: Plane) -> None:
    codes = set()
    for number in range(60):
        wire = await plane.dial(token=JOIN_TOKEN)
        agent = ScriptedAgent(plane, f"liar-{number % 2}", str(number))
        await wire.send(agent.hello())
        answer = await wire.expect(Frame)
        codes.add(answer.code if isinstance(answer, Reject) else "")
        await wire.socket.close()
    assert codes == {"", "later"}
    for kind in ("InstanceJoined", "InstanceLeft", "PeerRefused"):
        assert len(plane.told(kind)) <= 2 * (peer_events.EACH + 1)
    await plane.agent("good", token=JOIN_TOKEN)


async def test_a_host_that_dials_too_often_is_refused_before_it_says_anything(
    plane: Plane,
) -> None:
    plane.manager._dials = RateLimit(3, 0.001)
    for _ in range(3):
        await plane.dial(token=JOIN_TOKEN)
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await plane.dial(token=JOIN_TOKEN)
    assert caught.value.status == 429
    assert int((caught.value.headers or {})["Retry-After"]) > 0
    await plane.agent("ours")  # with the job's own secret


async def test_a_flood_of_frames_ends_its_connection(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_manager, "FRAMES_AT_ONCE", 100)
    monkeypatch.setattr(rollout_manager, "FRAMES_S", 1)
    good = await plane.agent("good", token=JOIN_TOKEN)
    liar = await plane.agent("liar", token=JOIN_TOKEN)
    nothing = GenerationProgress(7, *[np.empty(0, t) for t in "IQIIiif"])
    for _ in range(200):
        if liar.wire.socket.closed:
            break
        await liar.wire.send(nothing)
    assert (await liar.wire.expect(Reject)).code == "flood"
    assert not good.wire.socket.closed


# -- what else a frame says -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hello", "loaded"])
async def test_another_checksum_is_no_version(plane: Plane, how: str) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    await until(lambda: plane.manager.groups.newest_version == 0)
    said = {"version": 0, "checksum": "another"} if how == "hello" else {}
    liar = await plane.agent("liar", token=JOIN_TOKEN, **said)
    await trainer.ask([0])
    if how == "loaded":
        await liar.wire.send(Loaded(version=0, checksum="another", fetch_s=0.0, load_s=0.0))
        assert (await liar.wire.expect(Reject)).code == "checksum"
    else:
        await liar.wire.nothing(Assign)


async def test_a_drain_without_end_has_one(plane: Plane) -> None:
    liar = await plane.agent("liar", token=JOIN_TOKEN)
    await liar.wire.send(Draining(reason="soon", deadline_s=1e308))
    await until(lambda: plane.told("InstanceDraining"))
    assert plane.told("InstanceDraining")[0]["deadline_s"] == LONGEST_DRAIN_S
