"""The handle: waiting over a master's death, failing with the user's traceback, and its asynchronous twin."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import pytest

from gyre.api.handle import JobHandle
from gyre.api.rest import RestServer, create_app
from gyre.errors import JobFailed, Unreachable
from gyre.store import open_store
from tests.doubles.standing_job import StandingJob
from tests.waits import GENEROUS_S

Seed = Callable[..., str]

DEAD = "http://127.0.0.1:9"


def test_wait_returns_the_view_of_a_job_that_ended_well(seed: Seed) -> None:
    handle = JobHandle("golden-1", seed("undisturbed"))
    assert handle.wait()["job"]["phase"] == "succeeded"
    assert handle.status()["job"]["step"] == 3


def test_wait_returns_when_the_job_was_stopped(seed: Seed) -> None:
    assert JobHandle("golden-1", seed("commanded")).wait()["job"]["phase"] == "stopped"


def test_wait_raises_with_the_users_traceback(seed: Seed) -> None:
    with pytest.raises(JobFailed, match="ValueError: no") as caught:
        JobHandle("golden-1", seed("user_code")).wait()
    assert 'File "mine.py", line 7' in caught.value.details["traceback"]
    assert caught.value.exit_code == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.details == caught.value.details


def test_wait_gives_up_at_its_timeout(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token=None))
    handle = JobHandle("golden-1", seed("undisturbed", live=True, url=server.start()))
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        handle.wait(0.2, poll_s=0.05)
    handle.close()
    server.stop()


def test_wait_goes_on_over_the_masters_death(seed: Seed, golden: StandingJob) -> None:
    """The master goes away while its job runs; another one comes back elsewhere, and the job ends."""
    first = RestServer(create_app(golden.master, token=None))
    url = seed("undisturbed", live=True, url=first.start())
    second = RestServer(create_app(golden.master, token=None))

    def fail_over() -> None:
        time.sleep(0.2)
        first.stop()
        with open_store(url) as store:
            store.update_job("golden-1", url=second.start())
        time.sleep(0.3)
        golden.command("stop", reason="done")
        golden.run_until(lambda view: view["job"]["phase"] == "stopped")

    _rewrite_phase(url, "running")
    thread = threading.Thread(target=fail_over)
    thread.start()
    handle = JobHandle("golden-1", url)
    assert handle.wait(GENEROUS_S, poll_s=0.05)["job"]["phase"] == "stopped"
    thread.join()
    handle.close()
    second.stop()


def test_a_job_whose_master_never_comes_back_is_unreachable(seed: Seed) -> None:
    url = seed("undisturbed", live=True, url=DEAD)
    _rewrite_phase(url, "running")
    with pytest.raises(Unreachable, match=r"has not answered for 0\.3 s"):
        JobHandle("golden-1", url).wait(poll_s=0.05, lost_after_s=0.3)
    with pytest.raises(Unreachable):
        JobHandle("golden-1", url).stop("x", deadline_s=0.3)


def _rewrite_phase(url: str, phase: str) -> None:
    """Lets the stored job look as if it were still in `phase`."""
    from gyre.store import Entry

    with open_store(url) as store:
        journal = store.journal("golden-1")
        job = journal.snapshot()["job", "job"]
        entry = Entry(
            seq=journal.last_seq() + 1,
            event_id="rewritten",
            cause=None,
            kind="PauseRequested",
            at=1.0,
            actor="test",
            body={},
            upserts={("job", "job"): {**job, "phase": phase}},
        )
        journal.append(journal.epoch(), [entry])


def test_commands_and_events_reach_the_master(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token="t"), token="t")
    handle = JobHandle("golden-1", seed("undisturbed", live=True, url=server.start()), token="t")
    assert handle.scale("rollout", 3) == 9
    assert handle.pause() == 10
    assert handle.resume() == 11
    assert handle.drain("rollout-1", "it is slow") == 12
    assert handle.undrain("rollout-1") == 13
    assert handle.stop("enough") == 14
    assert next(handle.events(after=6))["seq"] == 7
    handle.close()
    server.stop()


async def test_the_asynchronous_twin_does_the_same(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token=None))
    (golden.logs / "rollout-0.1.log").write_text("hello\n")
    handle = JobHandle("golden-1", seed("undisturbed", live=True, url=server.start()))
    twin = handle.aio
    assert (await twin.status())["job"]["phase"] == "running"
    assert await twin.pause() == 9
    assert await twin.resume() == 10
    assert await twin.scale("rollout", 3) == 11
    assert [line["text"] async for line in twin.logs("rollout", 0, level="I")] == ["hello"]
    assert [event async for event in twin.events(after=10)] == list(handle.events(after=10))
    with pytest.raises(TimeoutError):
        await twin.wait(0.1, poll_s=0.05)
    assert await twin.stop("enough") == 12
    handle.close()
    server.stop()


def test_a_handle_pickles(seed: Seed) -> None:
    handle = JobHandle("golden-1", seed("undisturbed"), token="t")
    handle.status()
    assert pickle.loads(pickle.dumps(handle)).wait()["job"]["phase"] == "succeeded"


def test_every_method_has_a_twin() -> None:
    from gyre.api.handle import AsyncJobHandle

    public = {name for name in vars(JobHandle) if not name.startswith("_")} - {"aio", "close"}
    assert public == {name for name in vars(AsyncJobHandle) if not name.startswith("_")}
