"""The agent with a live manager, over a fake engine that says it is one (`engines/plane_engine.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from gyre.engines.dialect import StreamChunk
from gyre.engines.errors import EngineNotStarted
from gyre.engines.process import EngineCommand
from gyre.engines.weight_loading import NO_LOADER
from gyre.errors import Unauthorized, Unreachable
from gyre.rollouts.agent.agent import Agent, JobWishes
from gyre.rollouts.agent.held_samples import HeldSample
from gyre.rollouts.agent.join import EngineCommands, NotTaken, run_agent
from gyre.rollouts.plane import leaving, updates
from gyre.rollouts.protocol.connection import Refused
from gyre.rollouts.protocol.frames import Publish
from gyre.rollouts.samples import Group, VersionRun
from gyre.workloads.gang.weight_source import WeightSource
from tests.rollouts.agent.crew import Crew
from tests.rollouts.owners import Commands
from tests.rollouts.plane import SOON_S, TOKEN, Plane, ScriptedTrainer, live_plane, until, within


async def all_groups(trainer: ScriptedTrainer, count: int, purpose: str = "train") -> dict[int, Group]:
    async with asyncio.timeout(SOON_S):
        got: dict[int, Group] = {}
        while len(got) < count:
            with contextlib.suppress(TimeoutError):
                got |= await trainer.groups(1, purpose)
        return got


def all_longer_than(plane: Plane, length: int, *, count: int) -> bool:
    lengths = [state.length for state in plane.manager.groups.samples()]
    return len(lengths) == count and min(lengths) > length


def bits(groups: dict[int, Group]) -> dict[int, list[tuple[bytes, bytes, Any, str]]]:
    return {
        index: [
            (s.token_ids.tobytes(), s.logprobs.tobytes(), s.versions, s.finish_reason) for s in group.samples
        ]
        for index, group in groups.items()
    }


async def undisturbed(
    crew: Crew, trainer: ScriptedTrainer, limit: int, own: Mapping[int, int] = MappingProxyType({})
) -> dict[int, Any]:
    await trainer.ask([0, 1, 2], n=2, limit=limit, own=own, purpose="calm")
    groups = await all_groups(trainer, 3, "calm")
    for index, group in groups.items():
        assert {len(sample.token_ids) for sample in group.samples} == {own.get(index, limit)}
    return bits(groups)


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    "hurt",
    [
        *("engine dies", "cut", "manager dies", "manager and engine die"),
        pytest.param("requests fail", marks=pytest.mark.slow),
    ],
)
async def test_whatever_dies_the_samples_are_those_of_an_undisturbed_run(crew: Crew, hurt: str) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = crew.start("a")
    await crew.serving("a")
    calm = await undisturbed(crew, trainer, 100, own={1: 90})
    incarnation = agent.incarnation
    crew.hold("a", 2 + 80)
    await trainer.ask([0, 1, 2], n=2, limit=100, own={1: 90})
    await crew.generated(6 * 100 - 20 + 60)
    match hurt:
        case "engine dies":
            crew.tell("a", "die")
            await until(lambda: plane.told("EngineDied"))
            told = plane.told("EngineDied")[0]
            assert "SIGKILL" in told["error"]
            assert "last words" in told["tail"]
        case "cut":
            crew.cut("a")
            await until(lambda: len(plane.told("InstanceJoined")) == 2)
        case "requests fail":
            crew.tell("a", "fail")
            crew.tell("a", "die")
            # By itself, and because it was sick.
            await until(lambda: len(plane.told("EngineDied")) >= 2, 60.0)
            crew.take_back("a", "fail")
            assert "in a row failed" in plane.told("EngineDied")[1]["error"]
        case "manager dies" | "manager and engine die":
            await plane.kill()
            if "engine" in hurt:
                crew.tell("a", "die")
                await until(lambda: agent._host.engine is None)
            await asyncio.sleep(0.2)
            await plane.start()
            trainer = await plane.trainer(term=2)
            await trainer.ask([0, 1, 2], n=2, limit=100, own={1: 90})
            await until(lambda: len(plane.told("InstanceJoined")) == 2)
            plane.end_restart_grace()
    crew.go_on("a")
    groups = await all_groups(trainer, 3)
    assert bits(groups) == calm
    assert agent.incarnation == incarnation
    assert plane.manager.groups.account.discarded == {}
    if hurt in ("cut", "manager dies"):
        joined = plane.told("InstanceJoined")[-1]
        assert joined["kept"] == joined["held"] > 0


async def test_nothing_that_was_generated_is_generated_again_when_an_engine_dies_while_the_manager_is_away(
    crew: Crew,
) -> None:
    """Tokens that nobody heard of yet outlive the engine, for the agent has them."""
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = crew.start("a")
    await crew.serving("a")
    crew.hold("a", 2 + 30)
    await trainer.ask([0], limit=100)
    await crew.generated(10)
    crew.away = True
    await plane.kill()
    crew.hold("a", 2 + 60)
    await until(lambda: agent.tokens == 60)
    crew.tell("a", "die")
    await until(lambda: agent._host.engine is None)
    made = agent.tokens
    await plane.start()
    crew.away = False
    await until(lambda: plane.manager.groups.account.generated >= made)
    assert next(state.length for state in plane.manager.groups.samples()) >= made
    await until(lambda: plane.told("EngineDied"))
    await crew.serving("a")
    plane.end_restart_grace()
    crew.go_on("a")
    trainer = await plane.trainer(term=2)
    await trainer.ask([0], limit=100)
    (group,) = (await all_groups(trainer, 1)).values()
    assert len(group.samples[0].token_ids) == 100
    assert plane.manager.groups.account.generated == 100


async def test_a_drain_hands_over_within_a_second_also_when_the_engine_hangs(crew: Crew) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = crew.start("a")
    await crew.serving("a")
    calm = await undisturbed(crew, trainer, 60)
    crew.hold("a", 2 + 40)
    await trainer.ask([0, 1, 2], n=2, limit=60)
    await crew.generated(6 * 60 + 60)
    crew.start("b", 0.002)
    await crew.serving("b")
    crew.tell("a", "hang")
    assert plane.manager.groups.instances["a"].held
    with within(1.0):
        agent.drain("a notice", 5.0)
        agent.drain("and again", 5.0)
        await until(lambda: "a" not in plane.manager.links or not plane.manager.groups.instances["a"].held)
    assert bits(await all_groups(trainer, 3)) == calm
    crew.take_back("a", "hang")
    await asyncio.wait_for(crew.tasks["a"], SOON_S)
    assert [told["reason"] for told in plane.told("InstanceLeft")] == ["drained"]
    assert plane.manager.groups.account.discarded == {}


async def test_a_drained_agent_waits_for_the_manager_before_it_forgets(crew: Crew) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = crew.start("a")
    await crew.serving("a")
    await trainer.ask([0], limit=500)
    await crew.generated(10)
    await plane.kill()
    await asyncio.sleep(0.2)
    agent.drain("SIGTERM", 60.0)
    await until(lambda: all(held.end for held in agent._generation.samples.values()))
    made = agent.tokens
    assert not crew.tasks["a"].done()
    await plane.start()
    await asyncio.wait_for(crew.tasks["a"], SOON_S)
    assert [state.length for state in plane.manager.groups.samples()] == [made]


@pytest.mark.parametrize("mode", ["in_place", "retract", "handover"])
async def test_new_weights_come_under_running_samples(tmp_path: Path, mode: str) -> None:
    async with live_plane(tmp_path, update_mode=mode) as plane:
        crew = Crew(plane, tmp_path)
        trainer = await plane.trainer()
        await trainer.publish(0)
        crew.start("a")
        await crew.serving("a")
        crew.hold("a", 2 + 40)
        await trainer.ask([0, 1], n=2, limit=80)
        await until(lambda: all_longer_than(plane, 39, count=4))
        await trainer.publish(1)
        await crew.serving("a", version=1)
        crew.go_on("a")
        groups = await all_groups(trainer, 2)
        for group in groups.values():
            for sample in group.samples:
                # Without a handover the first chunk after the change is called the older version's.
                changed = sample.versions[0].end
                assert changed == 40 if mode == "handover" else changed > 40
                assert sample.versions == (VersionRun(0, 0, changed), VersionRun(1, changed, 80))
        modes = (tmp_path / "a" / "modes").read_text().split()
        assert modes == (["in_place"] if mode == "in_place" else ["retract", "flush"])
        await crew.stop()
        plane.exact()


async def test_where_no_cache_is_dropped_while_requests_wait_they_are_handed_over_first(
    tmp_path: Path,
) -> None:
    """SGLang 0.5.17: what is put back would find prefixes that older weights computed."""
    async with live_plane(tmp_path, update_mode="retract") as plane:
        crew = Crew(plane, tmp_path)
        trainer = await plane.trainer()
        await trainer.publish(0)
        crew.start("a")
        await crew.serving("a")
        crew.tell("a", "no_flush")
        crew.hold("a", 2 + 40)
        await trainer.ask([0, 1], n=2, limit=80)
        await until(lambda: all_longer_than(plane, 1, count=4))
        await trainer.publish(1)
        await crew.serving("a", version=1)
        crew.go_on("a")
        groups = await all_groups(trainer, 2)
        runs = [[run.version for run in sample.versions] for g in groups.values() for sample in g.samples]
        assert runs == [[0, 1]] * 4
        # Handed over, and tried again: more than once where requests take their time to end.
        *paused, last = (tmp_path / "a" / "modes").read_text().split()
        assert (set(paused), last) == ({"retract"}, "flush")
        assert len(paused) >= 2
        await crew.stop()
        plane.exact()


async def test_an_update_that_fails_ends_the_engine_and_not_the_samples(crew: Crew) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    crew.start("a")
    await crew.serving("a")
    await trainer.ask([0], limit=400)
    await crew.generated(10)
    crew.tell("a", "no_update")
    await trainer.publish(1)
    await until(lambda: plane.told("EngineDied"))
    assert "did not load version 1" in plane.told("EngineDied")[0]["error"]
    crew.take_back("a", "no_update")
    (group,) = (await all_groups(trainer, 1)).values()
    assert [run.version for run in group.samples[0].versions] == [0, 1]


async def test_an_engine_that_did_not_start_is_told_with_its_last_words_and_forgotten(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "START_FIRST_S", 0.01)
    trainer = await crew.plane.trainer()
    broken = [EngineCommand((sys.executable, "-c", "import no_such_engine"))]
    works = crew.commands("a", 0.01)

    def command(folder: Path, version: str) -> EngineCommand:
        return broken.pop() if broken else works.command(folder, version)

    agent = Agent(crew.settings("a"), crew, Commands(command))
    crew.tasks["a"] = asyncio.create_task(agent.run())
    await trainer.publish(0)
    await crew.serving("a")
    assert not broken
    assert [engine.death for engine in agent._host.engines] == [None], "the one that runs, and no other"
    (told,) = crew.plane.told("EngineStartFailed")
    assert (told["instance"], told["version"], told["others"]) == ("a", 0, [])
    assert told["said"] == "ModuleNotFoundError: No module named 'no_such_engine'"
    assert told["words"].startswith("Traceback (most recent call last):")
    assert "exit status 1" in told["error"]
    (told,) = crew.plane.told("EngineStarted")
    assert told["instance"] == "a"
    assert crew.plane.manager.links["a"].failed_starts == 0


async def test_engines_are_started_as_the_job_wishes_whoever_started_the_agent(crew: Crew) -> None:
    crew.plane.change(deterministic=True)
    trainer = await crew.plane.trainer()
    wishes, made = JobWishes(), []
    commands = EngineCommands("sglang", max_running=None, kv_tokens=None, wishes=wishes)
    works = crew.commands("a", 0.01)

    def command(folder: Path, version: str) -> EngineCommand:
        made.append(commands.command(folder, version).argv)
        return works.command(folder, version)

    agent = Agent(crew.settings("a"), crew, Commands(command), wishes=wishes)
    crew.tasks["a"] = asyncio.create_task(agent.run())
    await trainer.publish(0)
    await crew.serving("a")
    assert "--enable-deterministic-inference" in made[0]
    (status,) = crew.plane.manager.status()["instances"]
    assert (status["loads"], status["loads_why"]) == ("start", NO_LOADER)
    assert not crew.plane.told("LoaderFallback"), "this engine has none to use"


@pytest.mark.parametrize("starts", [2, None])
async def test_an_agent_that_is_nobodys_vertex_gives_up_with_the_last_words(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, starts: int | None
) -> None:
    monkeypatch.setattr(updates, "START_FIRST_S", 0.01)
    monkeypatch.setattr(updates, "RELOAD_FIRST_S", 0.01)
    trainer = await crew.plane.trainer()

    def command(folder: Path, version: str) -> EngineCommand:
        raise LookupError("no engine today")

    settings = replace(crew.settings("a"), starts=starts)
    crew.tasks["a"] = asyncio.create_task(Agent(settings, crew, Commands(command)).run())
    await trainer.publish(0)
    await until(
        lambda: len(crew.plane.told("EngineStartFailed")) == 4 if starts is None else crew.tasks["a"].done()
    )
    if starts is None:
        assert not crew.tasks["a"].done()
    else:
        with pytest.raises(EngineNotStarted, match="LookupError: no engine today") as caught:
            crew.tasks["a"].result()
        assert caught.value.details["said"] == "LookupError: no engine today"


@pytest.fixture
def publisher(crew: Crew) -> Iterator[WeightSource]:
    """Serves chunks, as a trainer on another machine does: nobody is told of its folder."""
    source = WeightSource(crew.tmp_path, crew.weights_endpoint, root=crew.tmp_path / "published")
    yield source
    source.close()


async def published_far_away(trainer: ScriptedTrainer, publisher: WeightSource, version: int) -> None:
    told = publisher.publish({"x": torch.full((999,), float(version))}, {}, version=version, step=version)
    await trainer.wire.send(
        Publish(version=version, checksum=told["checksum"], path="", sources=[publisher.address])
    )


async def test_weights_from_another_machine_are_fetched_and_a_flipped_bit_is_never_loaded(
    crew: Crew, publisher: WeightSource
) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await published_far_away(trainer, publisher, 0)
    slot = publisher.arena.versions[0]
    good = (slot.path / "model.safetensors").read_bytes()
    slot.view_of(0)[500] ^= 1
    agent = crew.start("a")
    await until(lambda: plane.told("FetchFault"))
    assert plane.told("FetchFault")[0]["what"] == "chunk_damaged"
    assert agent.version == -1
    slot.view_of(0)[500] ^= 1
    await trainer.ask([0], limit=5)
    assert len((await all_groups(trainer, 1))[0].samples[0].token_ids) == 5
    (folder,) = (crew.tmp_path / "cache").glob("gyre-weights-*/v00000000")
    assert (folder / "model.safetensors").read_bytes() == good
    await crew.stop()
    assert not list((crew.tmp_path / "cache").iterdir())


async def test_trouble_names_the_version_that_has_it(crew: Crew, publisher: WeightSource) -> None:
    """And not the first one that the agent fetched."""
    trainer = await crew.plane.trainer()
    await published_far_away(trainer, publisher, 0)
    agent = crew.start("a")
    await until(lambda: agent.version == 0)
    told = publisher.publish({"x": torch.full((999,), 1.0)}, {}, version=1, step=1)
    publisher.arena.versions[1].view_of(0)[500] ^= 1
    await trainer.wire.send(
        Publish(version=1, checksum=told["checksum"], path="", sources=[publisher.address])
    )
    await until(lambda: crew.plane.told("FetchFault"))
    assert {one["version"] for one in crew.plane.told("FetchFault")} == {1}


async def test_an_agent_has_the_weights_from_another_agent_when_the_publisher_is_gone(
    crew: Crew, publisher: WeightSource
) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await published_far_away(trainer, publisher, 0)
    crew.start("a")
    await crew.serving("a")
    publisher.close()
    crew.start("b")
    await crew.serving("b")
    assert plane.told("WeightsLoaded")[-1]["fetched"].startswith("tcp")


async def test_what_is_fetched_ahead_is_served_when_it_is_told_to_be_and_not_fetched_again(
    crew: Crew, publisher: WeightSource
) -> None:
    """As a local instance gets it between two windows."""
    plane = crew.plane
    trainer = await plane.trainer()
    await published_far_away(trainer, publisher, 0)
    agent = crew.start("a")
    await crew.serving("a")
    plane.manager.plane.windows.may_load = lambda session: False  # type: ignore[method-assign]
    await published_far_away(trainer, publisher, 1)
    await until(lambda: agent._weights._ahead is not None)
    assert agent.version == 0
    publisher.close()  # there is nobody to fetch it from any more
    del plane.manager.plane.windows.may_load  # type: ignore[method-assign]
    leaving.refresh(plane.manager.plane, plane.manager.links["a"])
    await crew.serving("a", version=1)
    loaded = plane.told("WeightsLoaded")[-1]
    assert loaded["version"] == 1
    assert loaded["fetched"].startswith("tcp")  # how it came is told all the same


async def test_what_could_not_be_fetched_ahead_is_fetched_when_it_is_to_be_loaded(
    crew: Crew, publisher: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await published_far_away(trainer, publisher, 0)
    agent = crew.start("a")
    await crew.serving("a")
    fetch, refused = agent._weights._fetch, []

    def broken(*asked: Any) -> Any:
        refused.append(asked)
        raise OSError("no space left on device")

    monkeypatch.setattr(agent._weights, "_fetch", broken)
    plane.manager.plane.windows.may_load = lambda session: False  # type: ignore[method-assign]
    await published_far_away(trainer, publisher, 1)
    await until(lambda: refused)
    assert agent.version == 0
    monkeypatch.setattr(agent._weights, "_fetch", fetch)
    del plane.manager.plane.windows.may_load  # type: ignore[method-assign]
    leaving.refresh(plane.manager.plane, plane.manager.links["a"])
    await crew.serving("a", version=1)
    assert not plane.told("WeightsRefused")


async def test_a_version_that_is_overtaken_while_it_is_fetched_is_never_served(
    crew: Crew, publisher: WeightSource
) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await published_far_away(trainer, publisher, 0)
    publisher.arena.versions[0].have.clear()  # it is there, and nobody gets any chunk of it
    agent = crew.start("a")
    await until(lambda: agent._weights.source)
    await published_far_away(trainer, publisher, 1)
    await crew.serving("a", version=1)
    assert [told["version"] for told in plane.told("WeightsLoaded")] == [1]


async def test_a_request_that_no_engine_takes_is_told_and_harms_no_other(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that makes the agent's own code fail is a failed sample, and not a hanging one."""
    monkeypatch.setattr("gyre.rollouts.plane.requests.check_sampling", lambda sampling: None)
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    crew.start("a")
    await crew.serving("a")
    await trainer.ask([0], limit=5)
    from gyre.rollouts.protocol.frames import Failed, Request
    from gyre.rollouts.samples import pack_groups

    await trainer.wire.send(
        Request(
            purpose="bad",
            groups=pack_groups([Group(7, np.array([1], np.int32))]),
            n=2,  # which are asked for together
            sampling={"max_new_tokens": 5, "sampling_seed": 3},  # which each sample has of its own
            seed=1,
            min_version=0,
        )
    )
    failed = await trainer.wire.expect(Failed, 10.0)
    assert failed.ids == [7]
    assert plane.manager.groups.account.samples_quarantined >= 4
    assert not plane.told("EngineDied")
    assert not crew.tasks["a"].done()


async def test_who_is_refused_stops(crew: Crew) -> None:
    crew.token = "wrong"
    crew.start("a")
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(crew.tasks["a"], SOON_S)
    assert caught.value.details["reason"] == "unauthorised"


async def test_an_older_process_of_the_same_name_stops(crew: Crew) -> None:
    crew.start("a")
    await until(lambda: "a" in crew.plane.manager.links)
    older = crew.tasks["a"]
    crew.start("a")
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(older, SOON_S)
    assert caught.value.details["reason"] == "superseded"


# -- run_agent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["signal", "file"])
async def test_a_notice_drains_and_ends_well(crew: Crew, how: str) -> None:
    plane = crew.plane
    trainer = await plane.trainer()
    await trainer.publish(0)
    notice = crew.tmp_path / "notice"
    work = asyncio.create_task(
        run_agent(crew.settings("a"), crew, crew.commands("a", 0.01), notice_file=notice)
    )
    await crew.serving("a")
    await trainer.ask([0], limit=1000)
    await crew.generated(10)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        notice.write_text("")
    await asyncio.wait_for(work, SOON_S)
    (told,) = plane.told("InstanceDraining")
    assert ("SIGTERM" if how == "signal" else "notice") in told["reason"]
    (state,) = plane.manager.groups.samples()
    assert state.length >= 10
    assert not list((crew.tmp_path / "cache").iterdir())


async def test_who_reaches_nobody_says_so(crew: Crew) -> None:
    crew.away = True
    with pytest.raises(Unreachable):
        await run_agent(crew.settings("a"), crew, crew.commands("a", 0.01), reach_within_s=0.3)


async def test_who_has_the_wrong_token_or_name_says_so(crew: Crew) -> None:
    crew.token = "wrong"
    with pytest.raises(Unauthorized) as unauthorised:
        await run_agent(crew.settings("a"), crew, crew.commands("a", 0.01))
    assert unauthorised.value.exit_code == 3
    crew.token = TOKEN
    work = asyncio.create_task(run_agent(crew.settings("a"), crew, crew.commands("a", 0.01)))
    await until(lambda: "a" in crew.plane.manager.links)
    await crew.plane.agent("a")
    with pytest.raises(NotTaken) as refused:
        await asyncio.wait_for(work, SOON_S)
    assert refused.value.exit_code == 2


# -- which policy made a token ----------------------------------------------------------------------


def test_a_chunk_that_may_hold_tokens_of_two_policies_is_called_the_older() -> None:
    held = HeldSample(1, 0, 1, np.empty(0, np.int32), np.empty(0, np.int32), {}, 1, seen=3)
    for told, count in (("3", 2), ("5", 4), ("5", 1), (None, 2), ("default", 1)):
        held.take(StreamChunk(np.zeros(count, np.int32), np.zeros(count, np.float32), told), 5)
    assert held.runs == [[3, 6], [5, 4]]
    held.take(
        StreamChunk(np.zeros(1, np.int32), np.zeros(1, np.float32), None), -1
    )  # its engine died meanwhile
    assert held.runs == [[3, 6], [5, 5]]
