"""Instances come, are cut off, dial again, drain and leave, over real sockets and a real database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gyre.engines.weight_loading import NO_LOADER
from gyre.rollouts.protocol.frames import (
    Assign,
    Cancel,
    Draining,
    EngineLimits,
    Loaded,
    Publish,
    Reject,
    SampleCounts,
    TrainerStatus,
    Weights,
)
from tests.rollouts.frames import empty_progress
from tests.rollouts.plane import TOKEN, Plane, ScriptedAgent, live_plane, until, within


async def test_an_engine_that_says_it_can_do_more_gets_more(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a", max_running=2)
    await trainer.ask(range(8))
    await agent.work(3)  # two, and one so that no slot waits
    await agent.wire.nothing(Assign)
    await agent.wire.send(EngineLimits(max_running=5, kv_tokens=1 << 20, why="it says so"))
    await agent.work(3)
    await agent.wire.nothing(Assign)
    (told,) = plane.told("EngineLimited")
    assert (told["instance"], told["max_running"], told["why"]) == ("a", 5, "it says so")
    await agent.back(max_running=5)
    await agent.wire.send(EngineLimits(max_running=5, kv_tokens=1 << 20, why="it says so"))
    await agent.wire.echo()
    assert len(plane.told("EngineLimited")) == 1, "it only dialled again"
    (status,) = plane.manager.status()["instances"]
    assert (status["max_running"], status["kv_tokens"], status["limits_why"]) == (5, 1 << 20, "it says so")


async def test_a_faster_way_that_cannot_be_taken_is_told_once_with_its_reason(plane: Plane) -> None:
    plane.change(deterministic=True)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    assert (await agent.back()).deterministic, "it is told how engines are to be started"
    await agent.load()
    for note in (NO_LOADER, "Invalid argument", "Invalid argument"):
        assert agent.weights is not None
        await agent.wire.send(
            Loaded(
                version=0,
                checksum=agent.weights.checksum,
                fetch_s=0.0,
                load_s=0.1,
                how="disk",
                note=note,
                way="tcp",
                codec="delta",
                why="the link is slow",
            )
        )
    await agent.wire.echo()
    (told,) = plane.told("LoaderFallback")
    assert told == {"instance": "a", "what": "weights are loaded from the disk", "why": "Invalid argument"}
    (status,) = plane.manager.status()["instances"]
    assert (status["loads"], status["loads_why"]) == ("disk", "Invalid argument")
    ways = {"transport": "tcp", "codec": "delta", "transfer_why": "the link is slow"}
    assert status.items() >= ways.items()


async def test_the_trainer_hears_what_becomes_of_its_samples(plane: Plane) -> None:
    trainer = await plane.trainer()

    async def underway() -> dict[str, int]:
        await trainer.wire.send(TrainerStatus(at_s=0.0, waited_s=0.0, wanted={"rollout": 1}))
        told = msgspec.structs.asdict(await trainer.wire.expect(SampleCounts))
        return {what: count for what, count in told.items() if count}

    await trainer.ask(range(4))
    assert await underway() == {"for_weights": 4}  # none is published
    await trainer.publish(0)
    await until(lambda: plane.manager.groups.served_version == 0)
    assert await underway() == {"for_instance": 4}
    agent = await plane.agent("a", max_running=2)
    assert await underway() == {"for_engine": 4}
    await agent.load()
    await agent.work(3)  # two, and one so that no slot waits
    plane.manager.links["a"].running = 2  # as it reports every quarter of a second
    assert await underway() == {"generating": 2, "at_engine": 1, "for_place": 1}


async def test_pools_with_a_price_are_told_with_what_their_tokens_cost(plane: Plane) -> None:
    plane.change(prices={"rollout": 0.0, "rollout_spot": 3.6})
    for name in ("rollout-0", "rollout_spot-0", "rollout_spot-1", "mine"):
        await plane.agent(name)
    pools = plane.manager.status()["pools"]
    assert list(pools) == ["rollout_spot"], "others cost nothing that is known"
    assert pools["rollout_spot"] == {
        "instances": 2,
        "price_per_hour": 3.6,
        "rate_tokens_s": None,
        "price_per_million_tokens": None,
    }
    plane.manager.links["rollout_spot-1"].rate_tokens_s = 1000.0
    found = plane.manager.status()["pools"]["rollout_spot"]
    assert (found["rate_tokens_s"], found["price_per_million_tokens"]) == (1000.0, 1.0)


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
    await until(lambda: plane.manager.links["a"].connection is None)
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
    trainer, agent, sample = await plane.one_sample()
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
    assert list(plane.manager.links) == ["a"]
    assert not plane.told("InstanceLeft")
    third = ScriptedAgent(plane, "a", incarnation="2")
    await third.dial()
    assert (await second.wire.expect(Reject)).code == "superseded"
    assert plane.manager.links["a"].hello.incarnation == "2"
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
        _, first, sample = await plane.one_sample()
        await first.report({sample.work.row: 5})
        await until(lambda: plane.manager.groups.account.generated == 5)
        first.wire.socket._response.connection.transport.abort()  # type: ignore[union-attr]
        await until(lambda: plane.manager.links["a"].connection is None)
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
    _, agent, sample = await plane.one_sample()
    await agent.report({sample.work.row: 5})
    await until(lambda: plane.manager.groups.account.generated == 5)
    again = ScriptedAgent(plane, "a", incarnation="2")
    assert (await again.dial()).keep == []
    await again.load()
    (theirs,) = await again.work(1)
    assert theirs.tokens == [1, 2, 3, 4, 5]


async def test_a_silent_agent_is_left_and_may_come_back(tmp_path: Path) -> None:
    async with live_plane(tmp_path) as plane:
        _, agent, sample = await plane.one_sample()
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
            lambda: plane.told("WeightsLoaded") and not (manager.groups.is_dirty or manager.versions.changed)
        )
        await plane.settled()  # what was being written has been counted
        link = manager.links["a"]
        heard_at, commits = link.heard_at, manager.shell.commits.count
        for seq in range(1, 21):
            report = empty_progress(seq)
            report.running = seq
            await agent.wire.send(report)
        await until(lambda: link.running == 20)
        await plane.settled()
        assert link.heard_at > heard_at
        assert manager.shell.commits.count == commits
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
    await until(lambda: "a" not in plane.manager.links)
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
        (b'{"instance": "a", "reason": "\\ud800"}', 422),
        (b'{"instance":' * 5_000, 422),
        (b'{"instance":' * 20_000, 413),
        ({"instance": "nobody"}, 404),
    ],
)
async def test_a_drain_that_makes_no_sense_is_refused(plane: Plane, body: Any, status: int) -> None:
    agent = await plane.agent("a")
    assert (await plane.post("/v1/drain", body))[0] == status
    assert not plane.manager.links["a"].draining
    assert not agent.wire.socket.closed


@pytest.mark.parametrize("kind", ["text/plain; charset=none-such", "text/plain; charset=hex"])
async def test_a_drain_in_no_known_encoding_is_refused(plane: Plane, kind: str) -> None:
    agent = await plane.agent("a")
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
    url = f"{plane.url}/v1/drain"
    async with plane.session().post(url, data=b'{"instance": "a"}', headers=headers) as reply:
        assert reply.status == 422
    assert not agent.wire.socket.closed


async def test_a_version_in_a_folder_that_can_be_none_is_fetched(plane: Plane) -> None:
    trainer = await plane.trainer()
    agent = await plane.agent("a")
    await trainer.wire.send(Publish(version=0, checksum="c", path="x" * 5000, sources=["a:1"], model="tiny"))
    assert (await agent.wire.expect(Weights)).version == 0
