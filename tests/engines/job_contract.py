"""A whole GRPO job on real engines of others: it trains, and whatever of its rollout plane is killed, it loses nothing.

The tests of an engine derive from `JobContract`, beside a fixture `job` of its module, from `job_on`.

One Ray cluster, one job, two engines: an engine takes half a minute of a core to start. The job goes through the kills
one after another, and trains the steps that a test allows: its reward holds it in between.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.api import RLJobBuilder
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.api.ray_session import connect, disconnect
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.engines.job_workloads import PROMPTS

MARKS = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(900)]

STEPS, SAMPLES, TOKENS = 24, 4, 160
BACK_S = 400.0
"""For an engine to be started anew on a machine that is busy with others."""

KILLS = 3
"""How often a fault is tried again that came just after the last sample under way had ended: what is seen of a job is a
report old."""

ROLLOUT_KL = 1e-7
"""Per token, between what the engine said of a token and what the trainer says with the weights of that version: both
compute in float32, and differ by some 1e-5. Weights that are one step old differ by a thousand times more."""


@dataclass(frozen=True)
class JobsEngine:
    """`python` makes the job's `engine_python` in a folder. `worker` is in the command line of the process that
    computes, in small letters; the engine's name is in those of all."""

    name: str
    python: Callable[[Path], Path]
    arguments: Sequence[str]
    worker: str


@contextmanager
def job_on(engine: JobsEngine) -> Iterator[Job]:
    """A job, in a short folder for Ray's sockets, with a Ray cluster that ends with it."""
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder:
        connect(None, start_local=True, place=home(folder))
        job = Job(Path(folder), engine)
        try:
            yield job
        finally:
            if not job.handle.status()["job"]["ended_at"]:
                job.handle.stop("a test failed")
                job.handle.wait(60.0)
            job.handle.close()
            disconnect()


class Job:
    """The job, and what is seen of it from outside."""

    def __init__(self, place: Path, engine: JobsEngine) -> None:
        self._engine = engine
        builder = (
            RLJobBuilder()
            .node_num(1)
            .device_per_node(8)
            .device_type("CPU")
            .recipe("grpo")
            .python_path(Path(__file__).parents[2])
            .config(
                {
                    "seed": 7,
                    "task": {"digits": 1},
                    "model": {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "mlp": 128}
                    | {"max_positions": 256},
                    "sampling": {"n": SAMPLES, "max_new_tokens": TOKENS},
                    "optim": {"lr": 5e-3},
                    "loss": {"tis_imp_ratio_cap": 2.0},  # compares the engine's log-probs with the trainer's
                    "warm_start": {"max_steps": 0, "batch": 256, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
                }
            )
            .run(
                steps=STEPS,
                prompts_per_step=PROMPTS,
                groups_per_firing=2,
                groups_per_micro_batch=4,
                checkpoint_every=4,
                evaluate_every=0,
            )
            .failover(silence_timeout_s=30.0)  # an engine that starts takes the machine from all others
            .rollouts(
                engine=engine.name,
                engine_python=str(engine.python(place)),
                engine_args=list(engine.arguments),
                max_running=32,
                kv_tokens=16_384,
                report_interval_s=0.1,
                ready_timeout_s=BACK_S,
            )
        )
        builder = builder.actor().total(1).stall_timeout(BACK_S)
        builder = builder.rollout().total(2).stall_timeout(BACK_S)
        builder = builder.reward("tests.engines.job_workloads", "LengthReward").total(1).stall_timeout(BACK_S)
        self.handle: JobHandle = builder.end().build().submit(engine.name, home_path=place)
        self.faults = ProcessFaults(self.handle)
        self.directory = home(place).job_directory(self.handle.job_id)
        self.seen: dict[int, psutil.Process] = {}
        """Every process that any rollout vertex ever had."""
        self.folders: set[str] = set()
        self.allowed = 0

    def rollouts(self, path: str = "/v1/status", body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The rollout manager's answer."""
        told = json.loads((self.directory / "rollouts.json").read_text())
        request = urllib.request.Request(
            told["url"] + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {told['secret']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5.0) as response:
            return dict(json.loads(response.read()))

    def until(self, look: Callable[[], Any], what: str, within_s: float = BACK_S) -> Any:
        """What `look` finds, as soon as it finds something. Who does not answer yet has found nothing."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                found = look()
                if found:
                    return found
            except (OSError, LookupError, ValueError, psutil.Error, StopIteration):
                pass
            view = self.handle.status()
            assert not view["job"]["ended_at"], view["job"]
            assert time.monotonic() < deadline, f"no {what} within {within_s:g} s: {self.told()[-6:]}"
            time.sleep(0.02)

    def told(self, what: str = "") -> list[dict[str, Any]]:
        """What the rollout manager told the journal."""
        bodies = [e["body"] for e in self.handle.events() if e["kind"] == "RolloutsChanged"]
        return [body["details"] | {"what": body["what"]} for body in bodies if what in ("", body["what"])]

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["instance"]: one for one in self.rollouts()["instances"]}

    def serving(self, *names: str) -> None:
        """They serve a version; and all their processes are remembered."""
        self.until(lambda: all(self.instances()[n]["version"] >= 0 for n in names), f"{names} serving")
        for name in names:
            agent = psutil.Process(self.faults.find(name).pid)
            for process in (agent, *agent.children(recursive=True)):
                self.seen[process.pid] = process
            links = (f"/proc/{agent.pid}/fd/{number}" for number in os.listdir(f"/proc/{agent.pid}/fd"))
            self.folders |= {t for t in (_target(link) for link in links) if "/gyre-weights-" in t}

    def in_mid_generation(self, name: str) -> None:
        """Samples are under way on `name`, of a step that may not be trained yet."""

        def look() -> bool:
            if self.instances()[name]["running"] > 2 and self.rollouts()["account"]["in_flight"] > 60:
                return True
            if self._all_generated():  # and nobody saw it: the samples of the step after it come next
                self.allow(self.allowed + 1)
            return False

        self.until(look, f"samples under way on {name}")

    def _all_generated(self) -> bool:
        """Whether the step that waits has all its samples: it may be allowed, and the samples of the next one come."""
        with open_store(self.handle.store_url) as store:
            drawn = account_of(store.ledger(self.handle.job_id)).drawn
        rollouts = self.rollouts()
        under_way = rollouts["queued"] + sum(one["samples"] for one in rollouts["instances"])
        # What is generated stays open until it is scored, so that without an open group requests are on their way.
        return drawn >= (self.allowed + 1) * PROMPTS and rollouts["open_groups"] > 0 and not under_way

    def engine(self, name: str) -> list[psutil.Process]:
        agent = psutil.Process(self.faults.find(name).pid)
        return [p for p in agent.children(recursive=True) if self._engine.name in _command_line(p)]

    def worker(self, name: str) -> psutil.Process:
        return next(p for p in self.engine(name) if self._engine.worker in _command_line(p))

    def allow(self, steps: int) -> None:
        """That many steps in all. There must be some left for the faults to come."""
        assert self.allowed <= steps <= STEPS
        new = self.directory / "steps.new"
        new.write_text(str(steps))
        new.replace(self.directory / "steps")
        self.allowed = steps

    def train(self, more: int) -> None:
        self.allow(self.allowed + more)
        self.faults.reach_step(self.allowed, timeout_s=BACK_S)


def _command_line(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).lower()


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def gone(processes: list[psutil.Process], within_s: float = 30.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive


class JobContract:
    def test_it_trains_on_what_the_engine_generates(self, job: Job) -> None:
        job.serving("rollout-0", "rollout-1")
        job.train(2)

    def test_an_engine_is_killed_in_mid_generation(self, job: Job) -> None:
        """The process that computes alone: the rest of the engine ends, and its agent starts another."""
        job.in_mid_generation("rollout-0")
        engine, died = job.engine("rollout-0"), len(job.told("EngineDied"))
        job.worker("rollout-0").kill()
        job.until(lambda: len(job.told("EngineDied")) > died, "EngineDied")
        assert job.told("EngineDied")[-1]["instance"] == "rollout-0"
        gone(engine)
        job.serving("rollout-0")
        job.train(2)

    def test_an_agent_is_killed_in_mid_generation_and_takes_its_engine_along(self, job: Job) -> None:
        job.in_mid_generation("rollout-1")
        engine = job.engine("rollout-1")
        (victim,) = job.faults.kill("rollout-1")
        gone(engine)
        job.faults.replaced(victim)
        job.serving("rollout-1")
        job.train(2)

    def test_the_manager_is_killed_in_mid_generation_and_the_engines_go_on(self, job: Job) -> None:
        engines = [job.worker("rollout-0"), job.worker("rollout-1")]
        kept = 0
        for _ in range(KILLS):
            job.in_mid_generation("rollout-0")
            joined = len(job.told("InstanceJoined"))
            (victim,) = job.faults.kill("rollout_manager-0")
            job.faults.replaced(victim)
            job.until(
                lambda joined=joined: len(job.told("InstanceJoined")) >= joined + 2, "both instances back"
            )
            back = job.told("InstanceJoined")[joined:]
            assert all(one["kept"] == one["held"] for one in back)
            assert all(engine.is_running() for engine in engines)
            kept = sum(one["kept"] for one in back)
            if kept:
                break
        assert kept > 0
        job.train(2)

    def test_a_drained_instance_hands_over(self, job: Job) -> None:
        job.in_mid_generation("rollout-1")
        job.rollouts("/v1/drain", {"instance": "rollout-1", "deadline_s": 30.0, "reason": "a test"})
        left = job.until(
            lambda: [one for one in job.told("InstanceLeft") if one["reason"] == "drained"],
            "a drained instance",
        )
        assert left[-1]["instance"] == "rollout-1"
        assert left[-1]["moved"] == 0, "all were handed over before it left"

    def test_it_ends_with_nothing_lost_and_nothing_left(self, job: Job) -> None:
        job.serving("rollout-0")
        job.allow(STEPS)
        view = job.handle.wait(BACK_S)
        result = view["job"]["result"]
        assert view["job"]["phase"] == "succeeded", view["job"]
        assert (result["steps"], result["prompts_lost"], result["trained_twice"]) == (STEPS, 0, 0)
        with open_store(job.handle.store_url) as store:
            account = account_of(store.ledger(job.handle.job_id))
            counters = store.rollouts(job.handle.job_id).load().counters
        assert (account.lost, account.trained_twice) == ((), ())
        assert account.trained == account.drawn == STEPS * PROMPTS
        assert not job.told("SampleQuarantined")
        assert not job.told("WeightsRefused")
        assert set(counters["discarded"]) <= {"superseded"}, counters

        events = list(job.handle.events())
        steps = [event["body"] for event in events if event["kind"] == "StepCompleted"]
        assert [(step["step"], step["version"]) for step in steps] == [(n, n) for n in range(1, STEPS + 1)]
        published = [event["body"] for event in events if event["kind"] == "WeightsPublished"]
        assert [one["version"] for one in published] == list(range(STEPS + 1))
        assert len({one["checksum"] for one in published}) == STEPS + 1, "each step made other weights"
        for step in steps:
            assert step["metrics"]["staleness_max"] == 0
            measured = step["metrics"]
            if measured["flat_groups"] < measured["groups"]:  # else no token went through the model
                assert 0 <= measured["rollout_kl"] < ROLLOUT_KL, step
        assert any("rollout_kl" in step["metrics"] for step in steps)
        first, last = steps[0]["metrics"], steps[-1]["metrics"]
        assert last["reward_mean"] > first["reward_mean"] + 0.1, "it did not learn what was rewarded"

        gone(list(job.seen.values()))
        assert job.folders
        assert not [folder for folder in job.folders if Path(folder).exists()]
