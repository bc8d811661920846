"""A spare over real sockets: it has the newest weights and gets nothing, until another one is gone."""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.config import SPARE_ROLLOUT
from gyre.rollouts.plane.autoscaler import Fleet
from gyre.rollouts.protocol.frames import Assign, EngineDied, Loaded, TrainerStatus, Weights
from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.scheduling.pools import Pool
from tests.rollouts.plane import Plane, ScriptedAgent, ScriptedTrainer, live_plane, until, within

SPARE = f"{SPARE_ROLLOUT}-0"
SERVES_WITHIN_S = 3.0


def cut(agent: ScriptedAgent) -> None:
    """As SIGKILL does: the kernel ends the connection."""
    agent.wire.socket._response.connection.transport.abort()  # type: ignore[union-attr]


def state_of(plane: Plane, name: str) -> tuple[str, str]:
    (found,) = [one for one in plane.manager.status()["instances"] if one["instance"] == name]
    return found["state"], found["not_admitted"]


async def finish_all(agent: ScriptedAgent) -> None:
    while True:
        for sample in await agent.work(1):
            await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})


async def with_a_spare(plane: Plane, **wanted: int) -> tuple[ScriptedTrainer, ScriptedAgent, ScriptedAgent]:
    """A trainer, `rollout-0`, and a spare, each with version 0."""
    plane.manager.looked_at({"rollout": 1, **wanted})
    trainer = await plane.trainer()
    await trainer.publish(0)
    instance, spare = await plane.working("rollout-0"), await plane.working(SPARE)
    await plane.settled()
    return trainer, instance, spare


async def test_a_spare_serves_when_an_instance_is_gone_and_waits_again_when_it_is_back(plane: Plane) -> None:
    trainer, instance, spare = await with_a_spare(plane)
    await trainer.ask(range(4))
    held = await instance.work(4)
    await trainer.ask(range(4, 40))  # more than the instance has slots for
    await spare.wire.nothing(Assign)
    assert state_of(plane, SPARE) == ("idle", "spare")
    for sample in held:
        await instance.report({sample.work.row: 5})
    await until(lambda: plane.manager.groups.account.generated == 20)
    with within(SERVES_WITHIN_S):
        cut(instance)
        await spare.work(1)
    assert state_of(plane, SPARE) == ("working", "")
    (told,) = plane.told("SparePromoted")
    assert told == {"instance": SPARE, "missing": ["rollout-0"], "version": 0}
    await until(lambda: plane.told("InstanceLeft"))
    back = ScriptedAgent(plane, "rollout-0", incarnation="2")
    await back.dial()
    await back.load()
    await until(lambda: plane.told("SpareRelieved"))
    await plane.settled()
    its_own = len(plane.manager.groups.instances[SPARE].held)
    given = [asyncio.create_task(finish_all(one)) for one in (back, spare)]
    for sample in list(spare.samples.values()):
        await spare.report({sample.work.row: 1}, {sample.work.row: "stop"})
    assert set(await trainer.groups(40)) == set(range(40)), "not one is lost"
    for task in given:
        task.cancel()
    assert plane.manager.groups.instances[SPARE].generated_tokens == its_own, (
        "it got more when it was relieved"
    )
    assert state_of(plane, SPARE) == ("idle", "spare")


async def test_a_spare_has_each_version_and_serves_the_newest_at_once(plane: Plane) -> None:
    trainer, instance, spare = await with_a_spare(plane)
    await trainer.publish(1)
    newer = await spare.wire.expect(Weights)
    assert newer.version == 1
    await trainer.ask([0], min_version=1)
    await instance.wire.expect(Weights)
    cut(instance)
    await spare.wire.nothing(Assign)  # it has the older version: that is not served as the newer one
    await spare.loaded(newer)
    await spare.work(1)
    assert plane.told("SparePromoted")[-1]["version"] == 1 or state_of(plane, SPARE) == ("working", "")


async def test_an_engine_s_death_is_enough(plane: Plane) -> None:
    trainer, instance, spare = await with_a_spare(plane)
    await trainer.ask([0])
    (sample,) = await instance.work(1)
    with within(SERVES_WITHIN_S):
        await instance.report({sample.work.row: 4}, {sample.work.row: "died"})
        await instance.wire.send(EngineDied(message="killed by SIGKILL", tail=""))
        (back,) = await instance.work(1)  # it came between the two, and nobody else was there
        await instance.report({}, {back.work.row: "released"})
        (again,) = await spare.work(1)
    assert again.tokens == [1, 2, 3, 4], "from its last token"
    assert instance.weights is not None
    loaded = Loaded(version=0, checksum=instance.weights.checksum, fetch_s=0.0, load_s=0.0, how="start")
    await instance.wire.send(loaded)
    await until(lambda: plane.told("SpareRelieved"))


async def test_of_two_that_die_at_once_one_spare_serves_for_one(plane: Plane) -> None:
    trainer, first, spare = await with_a_spare(plane, rollout=2)
    second = await plane.working("rollout-1")
    await until(lambda: state_of(plane, SPARE) == ("idle", "spare"))
    cut(first)
    cut(second)
    await trainer.ask([0])
    await spare.work(1)
    assert plane.told("SparePromoted")[-1]["missing"] == ["rollout-0", "rollout-1"]


async def test_the_death_of_a_spare_costs_nothing_and_its_successor_waits(plane: Plane) -> None:
    trainer, instance, spare = await with_a_spare(plane)
    cut(spare)
    await trainer.ask([0])
    (sample,) = await instance.work(1)
    await until(lambda: plane.told("InstanceLeft"))
    other = ScriptedAgent(plane, SPARE, incarnation="2")
    await other.dial()
    await other.load()
    await until(lambda: state_of(plane, SPARE) == ("idle", "spare"))
    await instance.report({sample.work.row: 1}, {sample.work.row: "stop"})
    assert set(await trainer.groups(1)) == {0}
    cut(instance)
    await trainer.ask([1])
    await other.work(1)


async def test_the_next_manager_finds_who_serves_by_who_dials_it(plane: Plane) -> None:
    """Killed between the death and the promotion: all that it needs is the number that the master gives it."""
    trainer, instance, spare = await with_a_spare(plane)
    await trainer.ask([0])
    (sample,) = await instance.work(1)
    seq = await instance.report({sample.work.row: 5})
    await instance.acknowledged(seq)
    cut(instance)
    await plane.kill()
    await plane.start(wanted={"rollout": 1, SPARE_ROLLOUT: 1})
    await spare.back()
    (again,) = await spare.work(1)
    assert again.tokens == [1, 2, 3, 4, 5]
    assert plane.told("SparePromoted")[-1]["missing"] == ["rollout-0"]


async def test_what_the_trainer_says_is_wanted_counts(plane: Plane) -> None:
    trainer, _, spare = await with_a_spare(plane)
    await trainer.wire.send(TrainerStatus(at_s=0.0, waited_s=0.0, wanted={"rollout": 2}))
    await until(
        lambda: state_of(plane, SPARE) == ("idle", "")
    )  # another one is to come: it serves until then
    await trainer.wire.send(TrainerStatus(at_s=1.0, waited_s=0.0, wanted={"rollout": 1}))
    await until(lambda: state_of(plane, SPARE) == ("idle", "spare"))
    await spare.wire.nothing(Assign)


async def test_a_machine_that_dialled_in_is_no_spare_whatever_its_name(tmp_path: Any) -> None:
    async with live_plane(tmp_path, wanted={"rollout": 1}) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        await plane.working("rollout-0", max_running=1)
        theirs = await plane.agent(SPARE, token="for those who join")
        await theirs.load()
        await trainer.ask(range(4))
        await theirs.work(1)


async def test_a_spare_is_no_capacity_until_it_serves(tmp_path: Any) -> None:
    """What the elasticity policy sees of it."""
    pools = {"rollout": Pool(ElasticSettings(min=0, max=2))}
    async with live_plane(tmp_path, pools=pools) as plane:
        seen: list[Fleet] = []
        plane.manager.plane.autoscaler.look = lambda fleet, now, **_: seen.append(fleet) or []  # type: ignore[method-assign]
        trainer, instance, _ = await with_a_spare(plane)
        await until(lambda: seen[-1].serving == 1)
        assert (seen[-1].placed["rollout"], seen[-1].others) == (1, 0)
        cut(instance)
        await until(lambda: plane.told("InstanceLeft"))
        await until(lambda: seen[-1].placed["rollout"] == 0)
        assert (seen[-1].serving, seen[-1].others) == (1, 0), "it does what the missing one would"
        await trainer.ask([0])
        await until(lambda: seen[-1].busy == 1)
