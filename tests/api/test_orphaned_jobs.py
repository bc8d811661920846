"""Jobs whose cluster is gone: what ends them, as what, and that history and snapshot stay equal."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.home import Home
from gyre.api.job_replay import replay_job
from gyre.api.orphaned_jobs import end_lost_job, is_lost
from gyre.api.reader import JobReader
from gyre.config import Entrypoint
from gyre.errors import StoreLost
from gyre.failover import VertexPhase, state_from
from gyre.failover.events import Event, JobSubmitted, MasterStarted, StopRequested, VertexStarted
from gyre.graph import compile_job
from gyre.master.job_context import entry_of
from gyre.observe.series import Recorder
from gyre.store import Store, open_store
from tests.doubles.standing_job import small_spec
from tests.ports import nobody_listens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path / 'g.db'}") as opened:
        yield opened


@pytest.fixture
def nowhere() -> Iterator[str]:
    with nobody_listens() as address:
        yield address


def written(store: Store, *events: Event, address: str | None = None, node: str = "") -> None:
    """A live job `j-1` with this history."""
    from gyre.api.job_replay import coordinator_of
    from gyre.failover import JobState

    spec = small_spec()
    store.create_job(
        job_id="j-1", name="small", spec=spec.model_dump(mode="json"), now=1.0, ray_address=address
    )
    journal, coordinator, state = store.journal("j-1"), coordinator_of(spec), JobState()
    epoch = journal.take_over(now=1.0, pid=1)
    roles = {name: role.total for name, role in compile_job(spec).spec.roles.items()}
    first: list[Event] = [JobSubmitted("j-1", "small", roles), MasterStarted(1, 1, node)] if node else []
    for seq, event in enumerate([*first, *events], start=1):
        decision = coordinator.decide(state, event, float(seq))
        state = decision.state
        entry = entry_of(decision, event, seq=seq, event_id=f"e{seq}", at=float(seq), actor="test")
        journal.append(epoch, [entry])


@pytest.mark.parametrize(
    ("events", "phase", "reason"),
    [
        ((), "failed", "cluster_lost"),
        ((VertexStarted("rollout-0", 1, pid=11, node="n"),), "failed", "cluster_lost"),
        ((StopRequested("enough"),), "stopped", "stop_requested"),
    ],
)
def test_a_lost_job_ends_as_it_would_have(
    store: Store, nowhere: str, events: tuple[Event, ...], phase: str, reason: str
) -> None:
    written(store, *events, address=nowhere, node=socket.gethostname())
    row = store.job("j-1")
    assert is_lost(store, row)
    end_lost_job(store, row)
    end_lost_job(store, store.job("j-1"))  # once is enough
    row = store.job("j-1")
    assert (row.live, row.phase, row.reason, row.epoch) == (False, phase, reason, 2)
    state = state_from(store.journal("j-1").snapshot())
    assert {vertex.phase for vertex in state.vertices.values()} == {VertexPhase.STOPPED}
    assert replay_job(store, "j-1").differences == []


def test_a_lost_job_ended_when_it_gave_its_last_sign_whenever_somebody_looks(
    home: Home, nowhere: str
) -> None:
    started = VertexStarted("rollout-0", 1, pid=11, node="n")
    with open_store(home.database_url()) as store:
        written(store, started, address=nowhere, node=socket.gethostname())
        store.update_job("j-1", phase="running")
        with JobReader(home.database_url(), at=home) as reader:
            assert [reader.view("j-1")["job"]["ended_at"] for _ in range(2)] == [3.0, 3.0], "its newest event"
            assert reader.jobs()[0]["ended_at"] == 3.0
        Recorder(store.series("j-1")).record({"trainer": {"step": 1.0}}, at=50.0)
        with JobReader(home.database_url(), at=home) as reader:
            assert reader.view("j-1")["job"]["ended_at"] == 50.0
        end_lost_job(store, store.job("j-1"))
        assert store.job("j-1").ended_at == 50.0
        assert replay_job(store, "j-1").differences == []


def test_resume_ends_a_lost_job_first_and_asks_no_master(
    home: Home, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes no further here, for nothing listens where it is to go on."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # an earlier test may have left a cluster
    with open_store(home.database_url()) as store:
        started = VertexStarted("rollout-0", 1, pid=11, node="n")
        written(store, started, address=nowhere, node=socket.gethostname())
        spec = small_spec()
        spec.roles["trainer"].entrypoint = Entrypoint.parse("tests.e2e.workloads:Endless")
        store.update_job("j-1", spec=spec.model_dump(mode="json"), url=f"http://{nowhere}", phase="running")
        result = CliRunner().invoke(main, ["resume", "small", "--ray-address", nowhere])
        assert result.exit_code == 3, result.output
        assert "Ray cluster" in result.stderr
        row = store.job("j-1")
        assert (row.live, row.reason) == (False, "cluster_lost")
        assert replay_job(store, "j-1").differences == []


def test_a_job_whose_master_never_wrote_anything_reads_as_the_directory_says(
    home: Home, nowhere: str
) -> None:
    """Its journal holds nothing that a cluster could have lost."""
    with open_store(home.database_url()) as store:
        written(store, address=nowhere)
        store.update_job("j-1", url="http://127.0.0.1:9", phase="running")
    with JobReader(home.database_url(), at=home) as reader:
        (job,) = reader.jobs()
        assert (job["phase"], job["job_id"]) == ("running", "j-1")
        assert reader.master_state(job) == "away"


def test_a_job_whose_master_never_wrote_anything_ends_too(store: Store, nowhere: str) -> None:
    written(store, address=nowhere)
    end_lost_job(store, store.job("j-1"))
    assert not store.job("j-1").live
    assert replay_job(store, "j-1").differences == []


def test_what_may_live_elsewhere_is_not_taken_for_lost(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        written(
            store, address=f"127.0.0.1:{server.getsockname()[1]}", node=socket.gethostname()
        )  # its cluster answers
        assert not is_lost(store, store.job("j-1"))
    assert is_lost(store, store.job("j-1"))
    store.update_job("j-1", ray_address="203.0.113.7:6379")  # not an address of this machine
    assert not is_lost(store, store.job("j-1"))


def test_a_job_of_another_machine_is_not_taken_for_lost(store: Store, nowhere: str) -> None:
    written(store, address=nowhere, node="another-machine")
    assert not is_lost(store, store.job("j-1"))


def test_a_reader_tells_a_lost_job_as_it_is_and_writes_nothing(store: Store, nowhere: str) -> None:
    written(
        store, VertexStarted("rollout-0", 1, pid=11, node="n"), address=nowhere, node=socket.gethostname()
    )
    before = store.journal("j-1").last_seq()
    with JobReader(store.url) as reader:
        (item,) = reader.jobs()
        view = reader.view("j-1")
    assert (item["phase"], item["reason"]) == ("failed", "cluster_lost")
    assert (view["job"]["phase"], view["master"]["answering"]) == ("failed", False)
    assert "is gone" in view["job"]["message"]
    assert store.journal("j-1").last_seq() == before
    assert store.job("j-1").live


def test_what_was_last_known_is_told_where_the_store_is_gone(store: Store, tmp_path: Path) -> None:
    written(store, node="elsewhere")
    with JobReader(store.url) as reader:
        reader.view("j-1")
        for file in tmp_path.glob("g.db*"):
            file.unlink()
        with pytest.raises(
            StoreLost, match=r"Last known of small: \w+, step 0, \d+ s ago \(since .* UTC\).*deleted or moved"
        ):
            reader.view("j-1")
