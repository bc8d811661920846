"""The in-process job itself, and the real torch workloads in it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from gyre.errors import UserCodeError, VertexDied
from gyre.testing.in_process import InProcessHost, InProcessTransport, InProcessVertex, Killed
from gyre.workloads.torch.actor import TorchActor
from tests.workloads.conftest import digests_of
from tests.workloads.plain_workloads import Cluster
from tests.workloads.scripts import script_spec
from tests.workloads.toy_policy import toy_spec

pytestmark = pytest.mark.landing

DEADLINE_S = 60

TORCH = {
    "name": "torch",
    "recipe": "grpo",
    "roles": {"actor": {}, "rollout": {}, "reward": {}, "reference": {}},
    "config": {
        "seed": 3,
        "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32},
        "task": {"digits": 2},
        "sampling": {"n": 2, "max_new_tokens": 3},
        "optim": {"lr": 1e-3},
        "warm_start": {"max_steps": 2, "batch": 4, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
        "loss": {"kl_loss_coef": 0.01},
    },
    "run": {
        "steps": 4,
        "prompts_per_step": 4,
        "groups_per_firing": 2,
        "groups_per_micro_batch": 2,
        "checkpoint_every": 2,
        "evaluate_every": 2,
        "held_out": 4,
        "call_timeout_s": 30.0,
    },
}


@pytest.fixture
def cluster():
    made = Cluster(2)
    yield made
    made.close()


def test_the_torch_workloads_end_with_the_same_bits_whatever_died(make_job):
    with make_job(TORCH) as job:
        undisturbed = job.result(timeout_s=DEADLINE_S)
    digests = digests_of(job)
    assert undisturbed["tokens"] > 0

    job = make_job(TORCH)
    job.on("rollout.generate", 2, lambda: job.kill("rollout-0"), when="after")
    job.on("actor.apply", 2, lambda: job.kill("actor-0"), when="before")
    job.on("reward.score", 5, lambda: job.kill("reward-0", "reference-0"))
    job.on("actor.apply", 4, job.kill_trainer, when="after")
    job.on("actor.accumulate", 12, lambda: job.kill("actor-0", "trainer-0"), when="after")
    with job:
        assert job.result(timeout_s=DEADLINE_S)["digest"] == undisturbed["digest"]
    assert digests_of(job) == digests
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (16, (), ())
    assert job.vertex("actor-0").host.incarnation == 3


def test_importing_the_module_imports_neither_ray_nor_torch():
    code = "import sys, gyre.testing.in_process; assert not {'ray', 'torch'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- dead is dead -----------------------------------------------------------------------------------


def test_pending_and_later_calls_of_a_killed_vertex_are_lost(cluster):
    entered = threading.Event()
    cluster.moments.add("echo.hold", 1, entered.set, when="before", vertex=None)
    running = cluster.transport.submit("echo-0", 1, "hold")
    waiting = cluster.transport.submit("echo-0", 1, "who")
    assert entered.wait(DEADLINE_S)
    cluster.vertices["echo-0"].kill()
    later = cluster.transport.submit("echo-0", 1, "who")
    for future in (running, waiting, later):
        with pytest.raises(VertexDied, match=r"echo-0 \(incarnation 1\)"):
            future.result(DEADLINE_S)
    assert cluster.transport.submit("echo-1", 1, "who").result(DEADLINE_S) == ("ok", (1, 1))
    assert cluster.vertices["echo-0"].join(0.05) is False
    cluster.workload(0).gate.set()
    assert cluster.vertices["echo-0"].join(DEADLINE_S)


def test_a_call_to_an_incarnation_that_is_no_more_is_lost(cluster):
    cluster.start([0])
    with pytest.raises(VertexDied):
        cluster.transport.submit("echo-0", 1, "who").result(DEADLINE_S)
    with pytest.raises(VertexDied):
        cluster.transport.submit("echo-9", 1, "who").result(DEADLINE_S)


def test_code_that_runs_on_in_a_dead_vertex_ends_where_it_reports_progress():
    host = InProcessHost("echo-0", 1)
    vertex = InProcessVertex(host)
    reached = []

    def work():
        vertex.kill()
        reached.append("dead")
        host.progress.tick()
        reached.append("and going on")

    with pytest.raises(VertexDied):
        vertex.submit(work).result(DEADLINE_S)
    assert vertex.join(DEADLINE_S)
    assert reached == ["dead"]


class CrampedActor(TorchActor):
    """Has memory for passes of two samples."""

    def make_backend(self):
        backend = super().make_backend()
        forward = backend.model.forward

        def cramped(tokens, *rest, **named):
            if torch.is_grad_enabled() and len(tokens) > 2 and self.step == 1:
                raise torch.OutOfMemoryError(f"no memory for {len(tokens)} samples")
            return forward(tokens, *rest, **named)

        backend.model.forward = cramped
        return backend


def test_passes_of_plain_torch_that_do_not_fit_are_halved_and_learn_the_same(make_job):
    with make_job(TORCH) as job:
        whole = job.result(timeout_s=DEADLINE_S)
    cramped = {**TORCH, "roles": {**TORCH["roles"], "actor": {"entrypoint": f"{__name__}:CrampedActor"}}}
    with make_job({**cramped, "failover": {"retry": {"max": 0, "window_s": 60}}}) as job:
        ended = job.result(timeout_s=DEADLINE_S)
    assert [told.body["passes"] for told in job.reports_of("PassesHalved")] == [2]
    assert "no memory for 4 samples" in job.reports_of("PassesHalved")[0].body["error"]
    assert (ended["steps"], ended["tokens"]) == (whole["steps"], whole["tokens"])
    assert job.account().lost == job.account().trained_twice == ()


def test_a_hanging_vertex_answers_control_calls_and_goes_on_when_woken(cluster):
    cluster.vertices["echo-0"].hang()
    future = cluster.transport.submit("echo-0", 1, "who")
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert cluster.vertices["echo-0"].host.hello(1)["bound"]
    cluster.vertices["echo-0"].wake()
    assert future.result(DEADLINE_S) == ("ok", (0, 1))


def test_a_dead_caller_gets_no_more_answers(cluster):
    future = cluster.transport.submit("echo-0", 1, "hold")
    cluster.transport.close()
    assert isinstance(future.exception(DEADLINE_S), Killed)
    with pytest.raises(Killed):
        cluster.transport.submit("echo-0", 1, "who")
    cluster.workload(0).gate.set()


def test_callbacks_that_look_at_a_dead_callers_futures_do_no_harm():
    vertex = InProcessVertex(InProcessHost("echo-0", 1))
    transport = InProcessTransport(lambda *member: vertex, 1)
    vertex.hang()
    future = transport.submit("echo-0", 1, "who")
    future.add_done_callback(Future.result)
    transport.close()
    vertex.kill()


# -- nothing is shared ------------------------------------------------------------------------------


def test_arguments_and_results_are_copies_and_arrays_are_read_only(cluster):
    given = [np.zeros(3), np.ones(2)]
    status, found = cluster.transport.submit("echo-0", 1, "double", (given,)).result(DEADLINE_S)
    assert status == "ok"
    assert [array.tolist() for array in found] == [[0.0] * 3, [2.0] * 2]
    with pytest.raises(ValueError, match="read-only"):
        found[0][0] = 1
    assert given[1].tolist() == [1.0, 1.0]


def test_a_shared_value_is_packed_once_and_loaded_before_the_call(cluster):
    bundle = cluster.transport.share(({"version": 5}, b"weights"))
    for vertex in ("echo-0", "echo-1"):
        assert cluster.transport.submit(vertex, 1, "served", bundle=bundle).result(DEADLINE_S) == ("ok", 5)


def test_arguments_that_cannot_be_sent_are_the_callers_error(cluster):
    with pytest.raises(TypeError, match="pickle"):
        cluster.transport.submit("echo-0", 1, "who", (threading.Lock(),))


# -- moments ----------------------------------------------------------------------------------------


def test_a_moment_is_the_nth_call_of_a_role_or_of_one_vertex(cluster):
    log = []
    cluster.moments.add("echo.who", 3, lambda: log.append("third"), when="before", vertex=None)
    cluster.moments.add("echo.who", 2, lambda: log.append("second of 1"), when="after", vertex="echo-1")
    for _ in range(3):
        cluster.handle[0].who()
        log.append("-")
        cluster.handle[1].who()
    assert log == ["-", "third", "-", "second of 1", "-"]


def test_an_action_that_raises_fails_the_call(cluster):
    def refuse():
        raise ValueError("not now")

    cluster.moments.add("echo.who", 1, refuse, when="before", vertex="echo-0")
    with pytest.raises(UserCodeError, match="not now"):
        cluster.handle[0].who()
    assert cluster.handle[0].who() == (0, 1)


# -- the job ----------------------------------------------------------------------------------------


def test_a_setup_that_raises_is_raised_by_start(make_job):
    spec = toy_spec()
    spec["roles"]["reward"]["entrypoint"] = "tests.workloads.plain_workloads:Broken"
    with pytest.raises(UserCodeError, match=r"OSError: no such model \(reward-0: user code raised\)"):
        make_job(spec).start()


def test_a_job_that_does_not_end_says_what_its_threads_do(make_job):
    with make_job() as job:
        job.pause()
        with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s") as caught:
            job.result(timeout_s=0.05)
        assert "gyre-fit" in str(caught.value)
        with pytest.raises(TimeoutError, match="no TrainerFinished number 1"):
            job.wait_for_report("TrainerFinished", timeout_s=0.01)


def test_closing_leaves_no_thread_and_the_environment_as_it_was(make_job, tmp_path):
    before, path = dict(os.environ), list(sys.path)
    spec = script_spec(
        "Patient", env={"GYRE_TEST_ONLY": "1", "HOME": "/elsewhere"}, python_path=[str(tmp_path)]
    )
    threads = set(threading.enumerate())
    with make_job(spec) as job:
        assert os.environ["GYRE_TEST_ONLY"] == "1"
        assert str(tmp_path) in sys.path
        job.wait_for_report("StepCompleted", timeout_s=DEADLINE_S)
    assert dict(os.environ) == before
    assert sys.path == path
    left = {thread for thread in set(threading.enumerate()) - threads if "gyre-call" not in thread.name}
    for thread in left:
        thread.join(DEADLINE_S)
    assert not [thread for thread in left if thread.is_alive()]
    job.close()


def test_the_master_replaces_who_was_killed_where_there_is_room(make_job):
    with make_job() as job:
        assert job.running["actor-1"] == 1
        job.kill("rollout-0", no_room=True)
        job.kill("actor-0")
        assert "rollout-0" not in job.running
        job.make_room("rollout-0")
        job.result(timeout_s=DEADLINE_S)
        assert job.progress["step"] == 5
    started = [(event.body["vertex"], event.body["incarnation"]) for event in job.reports_of("VertexStarted")]
    assert {("actor-0", 2), ("actor-1", 2)} < set(started), "with one rank goes the gang"
    assert job.running == {}
