"""The manager dies: what it acknowledged is there afterwards, and what it did not is handed over again."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from gyre.errors import Fenced
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.protocol.frames import Assign, Cancel, GroupsStored
from tests.rollouts.plane import QUICK, TOKEN, Plane, until


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
    plane.manager.shell.commits._write = lambda batch: time.sleep(0.05)
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
    assert plane.manager.versions.served is not None
    assert plane.manager.versions.served.checksum == folder.checksum
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
    await trainer.wire.send(GroupsStored(purpose="train", ids=[0, 1]))
    await until(lambda: not plane.store.load().groups)
    assert plane.store.load().deltas == []
    assert plane.manager.groups.account.delivered == 14
    assert plane.manager.groups.account.samples_delivered == 2


async def test_after_a_restart_nothing_is_given_out_before_its_holder_had_time_to_come(plane: Plane) -> None:
    _, agent, sample = await plane.one_sample()
    await agent.acknowledged(await agent.report({sample.work.row: 4}))
    await plane.kill()
    await plane.start(restart_grace_s=60.0)
    other = await plane.working("b")
    await other.wire.nothing(Assign)
    (keep,) = (await agent.back()).keep
    assert keep.known == 4
    plane.end_restart_grace()
    await until(lambda: not plane.manager.plane.placing.hold_until)
    await other.wire.nothing(Assign)


async def test_who_does_not_come_back_loses_its_samples(plane: Plane) -> None:
    _, agent, sample = await plane.one_sample()
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
    _, agent, sample = await plane.one_sample()
    other = await plane.working("b")
    await until(lambda: not plane.manager.groups.is_dirty)
    write = plane.manager.shell.store.write

    def slow(*args: Any, **named: Any) -> None:
        time.sleep(0.15)
        write(*args, **named)

    plane.manager.shell.store.write = slow  # type: ignore[method-assign]
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
    newer = RolloutManager(plane.store, term=7, token=TOKEN, settings=QUICK)
    await newer.start("127.0.0.1", 0)
    trainer = await plane.trainer()
    await trainer.ask([0])
    await until(lambda: plane.fatal)
    assert isinstance(plane.fatal[0], Fenced)
    with pytest.raises(Fenced):
        await RolloutManager(plane.store, term=6, token=TOKEN).start("127.0.0.1", 0)
    await newer.stop()
    plane.fatal.clear()
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
