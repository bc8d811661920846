"""The host of a vertex: bound once, fenced, one call at a time, told in full, and gone when nobody asks for it."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from gyre.errors import Fenced
from gyre.process_identity import ProcessIdentity
from gyre.rollouts.weight_dirs import of_publisher
from gyre.testing.clock import VirtualClock
from gyre.weights.owned_dirs import OwnedDir
from gyre.workloads import addresses
from gyre.workloads.vertex import host as host_module
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.host import ORPHANED, VertexHost
from gyre.workloads.vertex.master_watchdog import MasterProcesses, MasterWatchdog
from tests.waits import GENEROUS_S
from tests.workloads.plain_workloads import HERE, Echo, binding, script


@pytest.fixture
def host():
    made = VertexHost("echo-0", 1, 5)
    assert made.bind(5, binding())[0] == "ok"
    yield made
    made._workload.gate.set()


def in_thread(function, *args):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    return thread, found


# -- binding ----------------------------------------------------------------------------------------


def test_a_vertex_is_bound_once_however_often_it_is_told(host):
    first = host._workload
    assert host.hello(5)["bound"]
    status, told = host.bind(5, binding())
    assert (status, set(told)) == ("ok", {"pid"})
    assert host._workload is first
    assert first.setups == 1


def test_a_bound_workload_knows_its_place(host):
    context = host._workload.context
    assert (context.job, context.role, context.rank, context.world_size) == ("job", "echo", 0, 3)
    assert (context.local_rank, context.incarnation, context.config) == (1, 1, {"key": 7})


def test_a_bound_workload_knows_how_the_job_wants_rollouts_and_weights_and_who_is_beside_it():
    made = VertexHost("echo-0", 1, 5)
    made.bind(5, binding(rollouts={"local": 2}, weights={"codec": "delta"}, neighbours=[{"role": "critic"}]))
    context = made._workload.context
    assert (context.rollouts, context.weights) == ({"local": 2}, {"codec": "delta"})
    assert context.neighbours == [{"role": "critic"}]


def test_a_vertex_that_is_not_set_up_says_so():
    status, failure = VertexHost("echo-0", 1, 5).call(1, "who")
    assert (status, failure.error, failure.user_code) == ("error", "echo-0 is not set up yet", False)


def test_a_setup_that_raises_is_told_and_may_be_repeated():
    made = VertexHost("echo-0", 1, 5)
    status, failure = made.bind(5, binding("Broken"))
    assert (status, failure.error, failure.user_code) == ("error", "OSError: no such model", True)
    assert 'raise OSError("no such model")' in failure.traceback
    assert "host.py" not in failure.traceback
    assert not made.hello(5)["bound"]
    assert made.bind(5, binding("Echo"))[0] == "ok"


@pytest.mark.parametrize(
    ("changes", "error", "theirs"),
    [
        ({"name": "Nowhere"}, "AttributeError", True),
        ({"name": "NOT_A_CLASS"}, "TypeError", True),
        ({"name": "Mine", "module": "no_such_module_of_the_user"}, "ModuleNotFoundError", True),
        ({"name": "Nothing", "module": "gyre.workloads.rewards"}, "AttributeError", False),
    ],
)
def test_a_class_that_cannot_be_loaded_is_the_fault_of_whose_it_is(changes, error, theirs):
    status, failure = VertexHost("echo-0", 1, 5).bind(5, binding(**changes))
    assert status == "error"
    assert failure.error.startswith(error)
    assert failure.user_code is theirs


def test_a_typo_in_the_users_file_is_the_users(tmp_path):
    path = script(tmp_path)
    path.write_text("def broken(:\n")
    made = binding("Mine", module="__main__", file=str(path))
    status, failure = VertexHost("echo-0", 1, 5).bind(5, made)
    assert (status, failure.user_code) == ("error", True)
    assert "SyntaxError" in failure.traceback
    assert "my_script.py" in failure.traceback


def test_a_class_may_come_from_a_file_and_inherit_nothing(tmp_path):
    made = VertexHost("mine-0", 1, 5)
    path = script(tmp_path)
    assert made.bind(5, binding("Mine", module="__main__", file=str(path), vertex="mine-0"))[0] == "ok"
    assert made.call(1, "who") == ("ok", ("mine", 7))


def test_a_plain_class_is_offered_its_place_and_keeps_names_of_its_own():
    made = VertexHost("plain-2", 1, 5)
    assert made.bind(5, binding("Plain", vertex="plain-2"))[0] == "ok"
    assert made.call(1, "fit") == ("ok", {"answer": 7, "rank": 2, "role": "plain"})
    assert made.call(1, "place") == ("ok", (1, "mine"))


def test_a_nested_class_is_found_by_its_dotted_name():
    made = VertexHost("echo-0", 1, 5)
    assert made.bind(5, binding("Outer.Inner", module=__name__))[0] == "ok"
    assert made.call(1, "who") == ("ok", "inner")


class Outer:
    class Inner:
        def who(self):
            return "inner"


# -- fences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "control",
    [
        lambda host, epoch: host.hello(epoch),
        lambda host, epoch: host.address(epoch),
        lambda host, epoch: host.watch(epoch, 0, 0.0),
        lambda host, epoch: host.stacks(epoch),
        lambda host, epoch: host.bind(epoch, binding()),
        lambda host, epoch: host.shutdown(epoch, 0.1),
        lambda host, epoch: host.announce(epoch, 1, {}, {}),
    ],
    ids=["hello", "address", "watch", "stacks", "bind", "shutdown", "announce"],
)
def test_a_control_call_of_an_older_epoch_is_refused(host, control):
    control(host, 6)
    control(host, 6)
    with pytest.raises(Fenced, match="obeys epoch 6; a call came with epoch 5"):
        control(host, 5)


def test_a_data_call_of_an_older_term_is_refused_and_not_run(host):
    assert host.call(2, "add", NOTHING_OFFERED, 1) == ("ok", 1)
    for refused in (
        host.call(1, "add", NOTHING_OFFERED, 1),
        host.control_call(1, "beside"),
        host.call_with_weights(1, ({"version": 1}, b""), "add", NOTHING_OFFERED, 1),
    ):
        status, failure = refused
        assert (status, failure.fenced, failure.user_code) == ("error", True, False)
        assert "works for term 2" in failure.error
    assert host._workload.calls == 1
    assert host.call(2, "add", NOTHING_OFFERED, 1) == ("ok", 1)


def test_a_call_that_waited_while_a_newer_term_came_is_refused(host):
    holding, _ = in_thread(host.call, 1, "hold")
    assert host._workload.entered.wait(GENEROUS_S)
    waiting, outcome = in_thread(host.call, 1, "add", NOTHING_OFFERED, 1)
    deadline = time.monotonic() + GENEROUS_S
    while host.control_call(2, "beside")[0] != "ok":
        assert time.monotonic() < deadline
    host._workload.gate.set()
    holding.join(GENEROUS_S)
    waiting.join(GENEROUS_S)
    assert outcome[0][1].fenced
    assert host._workload.calls == 0


# -- calls ------------------------------------------------------------------------------------------


def test_calls_run_one_at_a_time(host):
    threads = [in_thread(host.call, 1, "hold")[0] for _ in range(4)]
    assert host._workload.entered.wait(GENEROUS_S)
    host._workload.gate.set()
    for thread in threads:
        thread.join(GENEROUS_S)
    assert host._workload.most == 1


def test_a_control_operator_runs_beside_a_call_and_takes_what_is_offered(host):
    thread, _ = in_thread(host.call, 1, "hold")
    assert host._workload.entered.wait(GENEROUS_S)
    assert host.control_call(1, "beside", CallInfo(step=4, index=1)) == ("ok", ("beside", 4))
    assert host.hello(5)["bound"]
    assert "hold" in host.stacks(5)
    assert host.watch(5, 0, 0.0).busy == "hold"
    host._workload.gate.set()
    thread.join(GENEROUS_S)


def test_what_is_not_marked_control_waits_its_turn_on_that_way_too(host):
    assert host.control_call(1, "add", NOTHING_OFFERED, 1, two=2) == ("ok", 3)


def test_offered_arguments_reach_only_those_that_name_them(host):
    assert host.call(1, "offered", CallInfo(step=9, index=2), 5) == ("ok", (5, 9))
    assert host.call(1, "add", CallInfo(step=9), 1, two=2) == ("ok", 3)


def test_weights_are_loaded_before_the_call_that_needs_them(host):
    assert host.call_with_weights(1, ({"version": 8}, b""), "served") == ("ok", 8)
    status, failure = host.call_with_weights(1, ({"version": 9}, b"damaged"), "served")
    assert (status, failure.error) == ("error", "ValueError: damaged")
    assert host.call(1, "served") == ("ok", 8)


# -- failures ---------------------------------------------------------------------------------------


def test_the_users_exception_is_told_with_the_users_lines(host):
    _, failure = host.call(1, "fail", NOTHING_OFFERED, "bad luck")
    assert failure.error == "ValueError: bad luck"
    assert failure.user_code
    assert not failure.collective
    assert "raise ValueError(text)" in failure.traceback
    assert "host.py" not in failure.traceback


def test_leaving_the_process_is_an_exception_like_any_other(host):
    _, failure = host.call(1, "leave", NOTHING_OFFERED, 3)
    assert failure.error == "SystemExit: 3"
    assert failure.user_code
    assert host.call(1, "add", NOTHING_OFFERED, 1) == ("ok", 1)


def test_a_library_that_raises_in_the_users_class_is_the_users_matter(host):
    _, failure = host.call(1, "parse", NOTHING_OFFERED, "{")
    assert failure.user_code
    assert "json" in failure.traceback


def test_a_method_that_does_not_exist_is_told(host):
    _, failure = host.call(1, "nothing")
    assert "AttributeError" in failure.error
    assert failure.user_code


def test_the_users_function_in_a_class_of_gyres_is_the_users():
    made = VertexHost("reward-0", 1, 5)
    config = {"task": {}, "reward": {"function": f"{HERE}:long_reward"}}
    bound = made.bind(5, binding("PythonReward", module="gyre.workloads.rewards", config=config))
    assert bound[0] == "ok"
    from gyre.workloads.tasks.arithmetic import ArithmeticTask
    from tests.workloads.toy_policy import Sample, VersionRun, np

    group = ArithmeticTask({}).prompt(0)
    group.samples = [Sample(np.array([3], np.int32), np.zeros(1, np.float32), (VersionRun(0, 0, 1),))]
    _, failure = made.call(1, "score", NOTHING_OFFERED, [group])
    assert failure.user_code
    assert "long_reward" in failure.error
    assert "ZeroDivisionError: no tokens" in failure.traceback


def test_a_mistake_in_the_configuration_is_told_as_one_wherever_it_shows():
    made = VertexHost("reward-0", 1, 5)
    config = {"task": {}, "reward": {"function": "no.such:function"}}
    status, failure = made.bind(5, binding("PythonReward", module="gyre.workloads.rewards", config=config))
    assert (status, failure.user_code, failure.code) == ("error", False, "config")
    assert failure.error.startswith("config.reward.function")


def test_a_library_that_raises_in_a_class_of_gyres_is_not_the_users():
    made = VertexHost("reward-0", 1, 5)
    bound = binding("ExactMatchReward", module="gyre.workloads.rewards", config={"task": {}})
    assert made.bind(5, bound)[0] == "ok"
    _, failure = made.call(1, "score", NOTHING_OFFERED, None)
    assert (failure.error, failure.user_code) == ("TypeError: 'NoneType' object is not iterable", False)


@pytest.mark.parametrize(
    ("text", "symptom"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]", True),
        ("NCCL error: remote process exited", True),
        ("Connection reset by peer", True),
        ("CUDA out of memory", False),
    ],
)
def test_a_collective_that_breaks_off_is_a_symptom(host, text, symptom):
    assert host.call(1, "no_peer", NOTHING_OFFERED, text)[1].collective is symptom


def test_a_value_error_that_speaks_of_gloo_is_no_symptom(host):
    assert not host.call(1, "fail", NOTHING_OFFERED, "gloo is not a backend")[1].collective


# -- watching ---------------------------------------------------------------------------------------


def test_what_is_reported_stays_until_it_is_acknowledged(host):
    host.report("StepCompleted", {"step": 1})
    host.report("StepCompleted", {"step": 2})
    first = host.watch(5, 0, 0.0)
    assert [(number, body["step"]) for number, _, body in first.outbox] == [(1, 1), (2, 2)]
    assert host.watch(5, 0, 0.0).outbox == first.outbox
    assert [number for number, _, _ in host.watch(5, 1, 0.0).outbox] == [2]
    assert host.watch(5, 2, 0.0).outbox == []
    host.report("StepCompleted", {"step": 3})
    assert [number for number, _, _ in host.watch(5, 2, 0.0).outbox] == [3]


def test_a_pending_watch_returns_as_soon_as_there_is_something_to_tell(host):
    thread, found = in_thread(host.watch, 5, 0, 10 * GENEROUS_S)
    host.report("StepCompleted", {"step": 1})
    thread.join(GENEROUS_S)
    assert [kind for _, kind, _ in found[0].outbox] == ["StepCompleted"]


def test_a_watch_with_nothing_to_tell_returns_at_its_deadline(host):
    report = host.watch(5, 0, 0.01)
    assert report.outbox == []
    assert report.version == 3
    assert report.busy == ""


def test_progress_shows_in_the_next_watch():
    clock = VirtualClock()
    made = VertexHost("echo-0", 1, 5, clock=clock)
    made.bind(5, binding())
    before = made.watch(5, 0, 0.0)
    clock.advance(7)
    assert made.watch(5, 0, 0.0).still_s == 7
    made.call(1, "double", NOTHING_OFFERED, [1])
    after = made.watch(5, 0, 0.0)
    assert after.ticks > before.ticks
    assert after.still_s == 0


def test_too_many_reports_for_nobody_are_an_error_not_a_leak(host, monkeypatch):
    monkeypatch.setattr(host_module, "OUTBOX_LIMIT", 2)
    host.report("StepCompleted", {})
    host.report("StepCompleted", {})
    with pytest.raises(RuntimeError, match="away too long"):
        host.report("StepCompleted", {})


def test_what_is_not_json_becomes_plain_data_in_the_vertex():
    made = VertexHost("odd-0", 1, 5)
    assert made.bind(5, binding("Odd", vertex="odd-0"))[0] == "ok"
    assert made.call(1, "work") == ("ok", None)
    made.watch(5, 0, 0.0)
    report = made.watch(5, 0, 0.0)
    assert report.fields["loss"] == 0.5
    assert report.fields["gradient"] == [1.0, "inf"]
    assert report.fields["health"]["loss"] == "nan"
    assert report.outbox == [(1, "Mine", {"reward": 0.25, "best": ["nan"]})]
    assert (report.version, type(report.version)) == (7, int)
    json.dumps([report.fields, report.outbox], allow_nan=False)


def test_a_version_that_raises_is_none_and_the_watch_goes_on():
    made = VertexHost("odd-0", 1, 5)
    made.bind(5, binding("Odd", vertex="odd-0"))
    made.call(1, "forget")
    assert made.watch(5, 0, 0.0).version is None


def test_the_text_of_an_exception_is_bounded_and_any_client_can_take_it():
    made = VertexHost("odd-0", 1, 5)
    made.bind(5, binding("Odd", vertex="odd-0"))
    failure = made.call(1, "shout")[1]
    assert failure.error.startswith("ValueError: \\udc80xxx")
    assert len(failure.error) + len(failure.traceback) <= 2 * 2**16


def test_a_host_keeps_its_rendezvous(host):
    host_name, port = host.address(5)
    assert host.address(5) == (host_name, port)
    assert port in addresses.RENDEZVOUS_PORTS, "an outgoing connection may be given it before it is used"


def test_a_rendezvous_avoids_ports_in_use_and_takes_any_where_all_its_own_are(monkeypatch):
    address = VertexHost("echo-0", 1, 5).address(5)[
        0
    ]  # this machine's, where another test of the process has a Ray
    with socket.socket() as taken:
        taken.bind((address, 0))
        monkeypatch.setattr(addresses, "RENDEZVOUS_PORTS", [taken.getsockname()[1]] * 64)
        port = VertexHost("echo-0", 1, 5).address(5)[1]
        assert 0 < port != taken.getsockname()[1]


# -- ends -------------------------------------------------------------------------------------------


def test_shutdown_lets_the_call_in_flight_end_and_survives_a_teardown_that_raises(capsys):
    made = VertexHost("echo-0", 1, 5)
    made.bind(5, binding("Untidy"))
    made.shutdown(5, 1.0)
    assert "cannot be closed" in capsys.readouterr().err


class Masters(MasterProcesses):
    """One is alive whatever is done, and does what this machine's process of its number does."""

    def __init__(self):
        self.killed = []

    def is_alive(self, master):
        return True

    def end(self, master):
        self.killed.append(master.pid)


def test_a_vertex_that_was_told_to_end_does_not_judge_its_master(capsys):
    """Nobody watches a vertex that ends. Its guard ended the master for that, where the end took its time."""
    clock, masters = VirtualClock(), Masters()
    made = VertexHost("echo-0", 1, 5, clock=clock)
    made.bind(5, binding("Untidy"))
    made._guard = MasterWatchdog(4.0, masters)
    made.watch(5, 0, 0.0, ProcessIdentity(41, 7, "here"))
    made.shutdown(5, 0.0)
    clock.advance(100.0)
    made._look_for_master(120.0)
    assert masters.killed == []


@pytest.mark.parametrize("stood_still", [True, False])
def test_a_vertex_that_stood_still_does_not_hold_it_against_its_master(stood_still):
    """It heard nobody, for it was stopped; the master's calls wait for it."""
    clock, masters, gone = VirtualClock(), Masters(), []
    made = VertexHost("echo-0", 1, 5, clock=clock, exit_process=gone.append)
    made.bind(5, binding())
    made._guard = MasterWatchdog(4.0, masters)
    made.watch(5, 0, 0.0, ProcessIdentity(41, 7, "here"))
    clock.advance(200.0)
    made._forgive(199.0 if stood_still else 0.5)
    made._look_for_master(250.0)
    assert masters.killed == [] if stood_still else masters.killed == [41]
    clock.advance(100.0)
    made._look_for_master(250.0)
    assert (masters.killed, gone) == (([41], []) if stood_still else ([41], [ORPHANED]))


@pytest.mark.parametrize("job_ends", [False, True])
def test_teardown_knows_whether_the_job_ends(job_ends, capsys):
    made = VertexHost("echo-0", 1, 5)
    made.bind(5, binding("Untidy"))
    made.shutdown(5, 1.0, job_ends)
    assert f"cannot be closed, job_ends={job_ends}" in capsys.readouterr().err


@pytest.mark.parametrize("job_ends", [False, True])
def test_weights_that_a_dead_vertex_left_on_this_machine_go_with_the_job(job_ends, tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.rollouts.weight_dirs.default_root", lambda: tmp_path / "shm")
    made = VertexHost("echo-0", 1, 5)
    made.bind(5, replace(binding("Untidy"), directory=str(tmp_path)))
    left = OwnedDir(tmp_path / "shm", of_publisher(tmp_path))
    left.close(keep=True)  # as its death would
    made.shutdown(5, 1.0, job_ends)
    assert left.path.exists() is not job_ends


def test_shutdown_waits_no_longer_than_its_grace(host):
    thread, _ = in_thread(host.call, 1, "hold")
    assert host._workload.entered.wait(GENEROUS_S)
    host.shutdown(5, 0.05)
    assert thread.is_alive(), "the call goes on until its gate is opened"
    host._workload.gate.set()
    thread.join(GENEROUS_S)


@pytest.mark.parametrize("job_ends", [False, True])
def test_who_is_stuck_when_the_job_ends_may_remove_what_would_outlive_it(host, job_ends, capsys):
    told = []

    def abandoned():
        told.append("removed")
        raise RuntimeError("nothing there")

    thread, _ = in_thread(host.call, 1, "hold")
    assert host._workload.entered.wait(GENEROUS_S)
    host._workload.abandoned = abandoned
    host.shutdown(5, 0.05, job_ends)
    host._workload.gate.set()
    thread.join(GENEROUS_S)
    host.shutdown(5, GENEROUS_S, job_ends)
    assert told == ["removed"] * job_ends, "and not of one that ended in order"
    assert ("abandoned raised" in capsys.readouterr().err) is job_ends


def orphan(clock, ended):
    return VertexHost("echo-0", 1, 5, clock=clock, exit_process=ended)


def test_a_vertex_whose_master_does_not_come_back_ends_itself(capsys):
    clock, status = VirtualClock(), []
    gone = threading.Event()
    made = orphan(clock, lambda code: (status.append(code), gone.set()))
    made.bind(5, binding(orphan_timeout_s=0.02))
    clock.advance(0.021)
    assert gone.wait(GENEROUS_S)
    assert status == [ORPHANED]


def test_a_call_that_runs_keeps_no_vertex_whose_master_is_gone(capsys):
    """Nobody would ever end a call that hangs, nor give its devices back."""
    clock, status = VirtualClock(), []
    made = orphan(clock, status.append)
    made.bind(5, binding())
    thread, _ = in_thread(made.call, 1, "hold")
    assert made._workload.entered.wait(GENEROUS_S)
    clock.advance(250.0)
    assert made._look_for_master(250.0)
    clock.advance(0.1)
    assert not made._look_for_master(250.0)
    assert status == [ORPHANED]
    made._workload.gate.set()
    thread.join(GENEROUS_S)


def test_a_vertex_that_hears_of_its_master_stays():
    clock, gone = VirtualClock(), threading.Event()
    made = orphan(clock, lambda code: gone.set())
    made.bind(5, binding(orphan_timeout_s=0.02))
    for _ in range(10):
        made.hello(5)
        clock.advance(0.019)
        assert not gone.wait(0.005)
        made.hello(5)
    clock.advance(1)
    assert gone.wait(GENEROUS_S)


def test_the_echo_is_what_the_tests_take_it_for():
    assert Echo.beside.__gyre_operator__.control
