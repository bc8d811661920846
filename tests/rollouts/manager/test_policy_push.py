"""Policy versions on their way to instances: who is told of which, from where, and what waits for them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gyre.rollouts.manager import trainer_front
from gyre.rollouts.plane import updates
from gyre.rollouts.plane.state import Plane as PlaneState
from gyre.rollouts.plane.versions import CHECKSUMS_KEPT, PolicyVersions
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import (
    Asleep,
    Assign,
    DevicesReturned,
    Done,
    EngineDied,
    Failed,
    FetchFault,
    GroupsStored,
    LendDevices,
    Loaded,
    LoadFailed,
    Publish,
    ReclaimDevices,
    Reject,
    Sleep,
    Weights,
)
from gyre.weights.version.model_folder import ModelFolder
from tests.rollouts.plane import SOON_S, Plane, live_plane, small_folder, until


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
    assert plane.manager.links["a"].loading is None  # it may take as long as the trainer trains
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
        plane.manager.versions.add(
            msgspec.structs.replace(first, version=version, checksum=f"{version:032x}")
        )
    await agent.loaded(first, how="start")
    await agent.wire.nothing(Reject)
    assert [told["instance"] for told in plane.told("EngineStarted")] == ["a"]
    await trainer.publish(newest + 1)
    weights = await agent.wire.expect(Weights)
    while weights.version <= newest:
        weights = await agent.wire.expect(Weights)
    await agent.loaded(weights)
    await trainer.ask([0])
    await agent.work(1)


async def test_a_policy_is_in_the_ledger_before_anybody_hears_of_it(plane: Plane) -> None:
    write = plane.manager.shell.store.write

    def slow(*args: Any, **named: Any) -> None:
        time.sleep(0.1)
        write(*args, **named)

    plane.manager.shell.store.write = slow  # type: ignore[method-assign]
    agent = await plane.agent("a")
    trainer = await plane.trainer()
    folder = await trainer.publish(0)
    weights = await agent.wire.expect(Weights)
    assert weights.checksum == folder.checksum
    assert [known["version"] for known in plane.store.load().counters["weights"]] == [0]


def test_no_version_is_served_before_its_commit_whenever_somebody_looks() -> None:
    """Not only a commit makes the manager look for a version to serve: so do groups that the trainer has taken."""
    versions = PolicyVersions()
    for version in (0, 1):
        versions.publish(Publish(version=version, checksum=f"c{version}", path="", sources=["h:1"]), "model")
        assert versions.promote(None) is None
        counters = versions.take_counters()
        assert versions.promote(None) is None, "taken is not written"
        assert versions.committed(counters)
        served = versions.promote(None)
        assert served is not None
        assert served.version == version
        assert versions.promote(None) is None


def test_one_number_is_one_policy() -> None:
    versions = PolicyVersions()
    first = Publish(version=3, checksum="one", path="", sources=["h:1"])
    assert versions.publish(first, "model")
    assert not versions.publish(first, "model"), "the same bytes again"
    with pytest.raises(FrameError, match="version 3 was published with checksum one, now other"):
        versions.publish(msgspec.structs.replace(first, checksum="other"), "model")
    assert versions.is_known(3, "one")
    assert not versions.is_known(3, "other")


async def test_a_manifest_that_takes_long_to_read_holds_up_nobody(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, on = ModelFolder.read, threading.Event()

    def slow(path: Path) -> ModelFolder:
        assert on.wait(SOON_S), "the loop did nothing meanwhile"
        return read(path)

    trainer = await plane.trainer()
    folder = small_folder(plane.tmp_path / "v0", 0)
    monkeypatch.setattr(trainer_front, "ModelFolder", SimpleNamespace(read=slow))
    await trainer.wire.send(Publish(version=0, checksum=folder.checksum, path=str(folder.path)))
    agent = await plane.agent("a")
    assert (await plane.get("/v1/status"))[0] == 200
    on.set()
    assert (await agent.wire.expect(Weights)).version == 0


async def test_who_has_a_version_is_looked_up_once_for_all(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    with_sources = updates.with_sources

    def looks(plane: PlaneState, weights: Weights) -> Weights:
        looked.append(1)
        return with_sources(plane, weights)

    monkeypatch.setattr(updates, "with_sources", looks)
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
        lambda: plane.manager.versions.served is not None and plane.manager.versions.served.version == 1
    )
    await trainer.publish(0)  # said again after a reconnect: nothing happens
    await trainer.publish(1)
    (folder.path / "model.safetensors").write_bytes(b"other")
    from gyre.weights.version.model_folder import list_model_folder

    list_model_folder(folder.path, version=1)
    await trainer.publish(1)
    assert (await trainer.wire.expect(Reject)).code == "checksum"
    assert plane.manager.versions.served is not None
    assert plane.manager.versions.served.checksum == folder.checksum


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
    await until(lambda: plane.manager.versions.served is not None)
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
    assert plane.manager.versions.published is not None
    assert plane.manager.versions.published.version == 1
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
        lambda: plane.manager.versions.served is not None and plane.manager.versions.served.version == 1
    )
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    failed = await trainer.wire.expect(Failed)
    assert (failed.purpose, failed.ids) == ("eval", [0])


async def test_a_failed_load_is_told_and_given_again_after_a_while(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "RELOAD_FIRST_S", 3600.0)
    monkeypatch.setattr(updates, "RELOAD_MAX_S", 3600.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    await until(lambda: plane.manager.versions.served is not None)
    await agent.wire.send(LoadFailed(version=0, error="a byte was flipped"))
    await until(lambda: plane.told("WeightsRefused"))
    assert plane.told("WeightsRefused")[0]["error"] == "a byte was flipped"
    await trainer.ask([0])
    await until(lambda: plane.manager.groups.queued == 1)
    await until(lambda: plane.manager.status()["instances"][0]["not_admitted"] == "policy_refused")
    assert (await agent.back(version=-1, checksum="")).weights is None  # not by a redial either
    await until(lambda: plane.manager.status()["instances"][0]["not_admitted"] == "policy_refused")
    assert len(plane.told("WeightsRefused")) == 1
    plane.manager.links["a"].refused[0].retry_at = 0.0  # the while is over
    await agent.loaded(await agent.wire.expect(Weights))
    await agent.work(1)


async def test_no_version_is_given_to_whose_engine_does_not_start_before_a_while(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "START_FIRST_S", 3600.0)
    monkeypatch.setattr(updates, "START_MAX_S", 3600.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    works = await plane.working("b")
    agent = await plane.agent("a")
    if agent.weights is None:
        await agent.wire.expect(Weights)
    await agent.wire.send(
        LoadFailed(version=0, error="exit status 1.", starting=True, said="x", words="y\nx")
    )
    await until(lambda: plane.told("EngineStartFailed"))
    assert plane.told("EngineStartFailed")[0]["others"] == ["b"]
    assert not plane.told("WeightsRefused")
    await trainer.publish(1)
    assert (await works.wire.expect(Weights)).version == 1
    assert (await agent.back(version=-1, checksum="")).weights is None  # not by a redial either
    await agent.wire.nothing(Weights)
    plane.manager.links["a"].start_at = 0.0  # the while is over
    plane.manager.links["a"].refused[0].retry_at = 0.0
    assert (await agent.wire.expect(Weights)).version == 1


async def test_a_newer_version_is_given_at_once_to_who_could_not_load_the_last(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.agent("a")
    await until(lambda: plane.manager.versions.served is not None)
    await agent.wire.send(LoadFailed(version=0, error="a byte was flipped"))
    await until(lambda: plane.told("WeightsRefused"))
    plane.manager.links["a"].refused[0].retry_at = float("inf")
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
        trainer, agent, sample = await plane.one_sample()
        await trainer.publish(1)
        weights = await agent.wire.expect(Weights)
        await agent.report({sample.work.row: 2}, {sample.work.row: "released"})
        await agent.wire.nothing(Assign)
        await agent.loaded(weights)
        (again,) = await agent.work(1)
        assert again.tokens == [1, 2]
        plane.exact()


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
    assert plane.manager.versions.model == "qwen3-1234"
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
    await until(lambda: plane.manager.versions.served is not None)
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    await publish(1, 1000)
    await publish(1, 2000)  # the publisher was replaced; version 0 is what instances are to have
    await until(lambda: plane.manager.versions.published.sources == ["10.0.0.5:2000"])
    first = await plane.agent("a")
    assert first.weights is not None
    assert (first.weights.version, first.weights.sources) == (0, ["10.0.0.5:2000"])
    await publish(0, 1000)  # what a client says again to a manager that it has dialled anew: oldest first
    await publish(1, 2000)
    await publish(2, 3000)  # and one that was replaced between two versions
    await until(lambda: plane.manager.versions.newest == 2)
    second = await plane.agent("b")
    assert second.weights is not None
    assert (second.weights.version, second.weights.sources) == (0, ["10.0.0.5:3000"])
    await publish(2, 4000, "other-bytes")
    assert (await trainer.wire.expect(Reject)).code == "checksum"
    assert plane.manager.versions.published.sources == ["10.0.0.5:3000"]


async def test_a_pinned_request_for_a_version_that_nobody_has_any_more_fails(plane: Plane) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    await until(lambda: plane.manager.versions.served is not None)
    await trainer.ask([0], purpose="eval", pinned=True, min_version=0)
    holder = await plane.working("a")
    await trainer.publish(1)
    await until(lambda: plane.manager.versions.durable == 1)
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
    await trainer.wire.send(GroupsStored(purpose="eval", ids=[0]))
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
    plane.manager.links["a"].refused[0].retry_at = float("inf")
    await trainer.wire.send(msgspec.structs.replace(first, sources=["10.0.0.5:2000"]))
    assert (await agent.wire.expect(Weights)).sources == ["10.0.0.5:2000"]


async def test_what_went_wrong_with_weights_is_told(plane: Plane) -> None:
    agent = await plane.agent("a")
    await agent.wire.send(FetchFault(version=3, what="chunk_damaged", evidence='{"chunk": 4}'))
    await until(lambda: plane.told("FetchFault"))
    assert plane.told("FetchFault")[0]["what"] == "chunk_damaged"
