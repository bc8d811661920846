"""Windows in which the trainer's devices generate, decided in virtual time over the real book and router."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.plane import leaving, windows
from gyre.rollouts.plane.instructions import ReportEvent, Send
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.plane.trainer import TrainerRequester
from gyre.rollouts.plane.windows import CLOSE_WITHIN_S, TOGETHER_S, TRAINER_AWAY_S, Windows
from gyre.rollouts.protocol.frames import (
    Asleep,
    Awake,
    Cancel,
    DevicesReturned,
    Frame,
    Hello,
    LendDevices,
    ReclaimDevices,
    Request,
    Sleep,
    Wake,
    WindowStatus,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from gyre.workloads.trainer.device_lending import DeviceLending

TICK_S = 0.1
SLOTS = 8


class World:
    """Instances whose samples grow at a rate each; a trainer that lends."""

    def __init__(self) -> None:
        self.now = 100.0
        self.plane = Plane(ManagerSettings(), [TrainerRequester], epoch=1, now=self.now)
        self.book, self.links = self.plane.groups, self.plane.links
        self.book.newest_version = 0
        self.book.promote(0)
        self.rates: dict[str, float] = {}
        self.told: list[tuple[str, Frame]] = []
        self.answers: list[Frame] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stuck: set[str] = set()
        """Instances that do not do what they are told."""
        self.grown: dict[int, float] = {}
        self.seq = 0
        self.trainer: Any = SimpleNamespace(closing=False, name="the trainer")
        self.start_anew()

    # -- what the manager does ----------------------------------------------------------------------

    def start_anew(self, grace_s: float = 0.0) -> Windows:
        """As a manager that starts now."""
        self.plane.windows = fresh = Windows(self.now, grace_s=grace_s)
        fresh.lender = self.trainer
        return fresh

    def do(self, what: Callable[..., object], *given: Any, **named: Any) -> None:
        """What the machine does, and what comes of it at once."""
        self.plane.now = self.now
        what(self.plane, *given, **named)
        done, self.plane.instructions = self.plane.instructions, []
        self._refresh()
        for one in done:
            if isinstance(one, ReportEvent):
                self.events.append((one.kind, one.fields))
            elif isinstance(one, Send) and one.peer is self.trainer:
                self.answers.append(one.frame)
            elif isinstance(one, Send) and isinstance(one.frame, Cancel):
                self._give_back(one.peer.name, one.frame)
            elif isinstance(one, Send):
                self.told.append((one.peer.name, one.frame))

    def _refresh(self) -> None:
        self.links.admit(self.plane.windows.device_use, handover=False)

    def _give_back(self, name: str, frame: Cancel) -> None:
        if name not in self.stuck:
            ends = [End(row, lease, "released", "", ()) for row, lease in frame.rows]
            self.book.progress(name, self._frame({}, ends))

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(told["instance"], told["reason"]) for kind, told in self.events if kind == "InstanceLeft"]

    # -- peers --------------------------------------------------------------------------------------

    def join(self, name: str, *, local: bool = False, rate: float = 10.0, version: int = 0) -> AgentLink:
        hello = Hello(
            protocol=1,
            instance=name,
            incarnation="1",
            model="unset",
            engine="scripted",
            max_running=SLOTS,
            kv_tokens=1 << 16,
            local=local,
        )
        self.book.join(hello)
        number = self.book.instances[name].number
        peer: Any = SimpleNamespace(closing=False, name=name)
        link = AgentLink(hello, peer, number, heard_at=self.now)
        self.links[name] = link
        self.rates[name] = rate
        self.book.serve(name, version)
        self._refresh()
        return link

    def ask(self, samples: int, tokens: int, purpose: str = "train") -> None:
        groups = [Group(index, np.array([7], np.int32)) for index in range(samples)]
        self.book.open(
            Request(
                purpose=purpose,
                groups=pack_groups(groups),
                n=1,
                sampling={"max_new_tokens": tokens},
                seed=1,
                min_version=0,
            )
        )

    def lend(self, window: int = 1, *, train_s_per_token: float = 0.0, begun: bool = False) -> None:
        frame = LendDevices(
            window=window,
            begun=begun,
            arrived_tokens=0,
            train_s_per_token=train_s_per_token,
            last_share=0.25,
        )
        self.do(windows.lend, frame)

    # -- time ---------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.book.assign()
            for name in list(self.book.instances):
                self._generate(name)
            while self.told:
                self._obey(*self.told.pop(0))
            self.do(windows.look)

    def until_back(self, within_s: float = 300.0) -> DevicesReturned:
        end = self.now + within_s
        while self.now < end:
            self.run(TICK_S)
            for answer in self.answers:
                if isinstance(answer, DevicesReturned):
                    self.answers.clear()
                    return answer
        raise AssertionError(f"not within {within_s} s")

    def _obey(self, name: str, frame: Frame) -> None:
        link = self.links.get(name)
        if link is None or name in self.stuck:
            return
        if isinstance(frame, Sleep):
            assert not self.book.instances[name].held
            self.do(windows.asleep, link, Asleep(seconds=0.1))
        elif isinstance(frame, Wake):
            self.do(windows.awake, link, Awake(seconds=0.1))

    def _generate(self, name: str) -> None:
        running = self.book.held_by(name)[:SLOTS]
        if not running:
            return
        link = self.links[name]
        each = self.rates[name] * TICK_S / len(running)
        grow: dict[int, int] = {}
        ends = []
        for state in running:
            self.grown[state.key] = self.grown.get(state.key, 0.0) + each
            left = state.request.max_new_tokens - state.length
            whole = min(int(self.grown[state.key]), left)
            self.grown[state.key] -= whole
            if whole:
                grow[state.row] = whole
            if whole == left:
                ends.append(End(state.row, state.lease, "length", "", ()))
        measured = self.rates[name] * (1 + self.seq * 1e-12)  # no two come out alike
        frame = self._frame(grow, ends, rate=measured, running=len(running) - len(ends))
        link.rate_tokens_s = self.rates[name]
        self.book.progress(name, frame)

    def _frame(
        self, grow: dict[int, int], ends: list[End], rate: float = 0.0, running: int = 0
    ) -> GenerationProgress:
        self.seq += 1
        rows = sorted(grow)
        states = [self.book._store.rows.samples[row] for row in rows]
        counts = [grow[row] for row in rows]
        total = sum(counts)
        return GenerationProgress(
            self.seq,
            np.array(rows, np.uint32),
            np.array([state.lease for state in states if state], np.uint64),
            np.array([state.length for state in states if state], np.uint32),
            np.array(counts, np.uint32),
            np.zeros(len(rows), np.int32),
            np.zeros(total, np.int32),
            np.zeros(total, np.float32),
            ends,
            running=running,
            rate_tokens_s=rate,
        )

    def closed(self) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.events if kind == "WindowClosed"]

    @property
    def left(self) -> int:
        return sum(1 for _ in self.book.unfinished())


@pytest.fixture
def world() -> World:
    return World()


def test_without_a_remote_instance_the_trainer_generates_until_done(world: World) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.ask(16, 50)
    world.run(2.0)
    assert world.book.account.generated == 0  # nothing was lent
    world.lend()
    back = world.until_back()
    assert world.left == 0
    assert back.reason == "nothing is left to generate"
    assert world.links["local-0"].resting == "asleep"
    (closed,) = world.closed()
    assert closed["tokens"] == 16 * 50
    assert 19 < closed["open_s"] < 25  # 800 tokens at 40 a second


def test_the_window_ends_where_training_and_the_remote_instances_end_together(world: World) -> None:
    """Measured in the first step, used in the second: the remote ones go on while the trainer trains."""
    world.join("local-0", local=True, rate=40.0)
    world.join("remote-0", rate=40.0)
    for step in (1, 2, 3):
        world.ask(32, 50, purpose=f"train/{step}")
        world.lend(step, train_s_per_token=0.01)  # 16 s for all of it
        began = world.now
        back = world.until_back()
        assert "together" in back.reason or "longest" in back.reason
        opened_s = world.now - began
        while world.left:
            world.run(TICK_S)
        remote_s = world.now - began - opened_s
        world.book.close(f"train/{step}", range(32))
        # 1,600 tokens at 40 a second each; 12 of the 16 s of training can be done before the last sample is there.
        assert 12.0 < opened_s < 16.0
        assert 8.0 < remote_s < 15.0


def test_nothing_left_ends_a_window_early(world: World) -> None:
    world.join("local-0", local=True, rate=100.0)
    world.join("remote-0", rate=1.0)
    world.ask(8, 10)
    world.lend(train_s_per_token=0.0)
    back = world.until_back(60.0)
    assert back.reason == "nothing is left to generate" or world.left == 0


def test_a_window_ends_with_its_last_sample_and_not_with_the_next_plan(world: World) -> None:
    """The trainer has all that it waits for: each tenth of a second is one of every step."""
    world.join("local-0", local=True, rate=40.0)
    for first in range(3):
        world.ask(first + 1, 3 + 10 * first, purpose=f"step-{first}")  # they end anywhere between two plans
        world.lend(first + 1)
        while world.left:
            world.run(TICK_S)
        ended = world.now
        assert world.until_back(5.0).reason == "nothing is left to generate"
        assert world.now - ended <= 3 * TICK_S + 1e-9


def test_nothing_of_a_window_waits_for_the_next_look(world: World) -> None:
    """Who lends, ends a last sample, or gives the last one back is answered in the same moment."""
    link = world.join("local-0", local=True, rate=40.0)
    world.ask(1, 8)
    world.do(windows.look)
    world.told.clear()
    link.resting = "asleep"
    world.lend()
    assert [type(frame) for _, frame in world.told] == [Wake]
    world._obey(*world.told.pop())
    world.book.assign()
    (state,) = world.book.held_by("local-0")
    world.book.progress(
        "local-0", world._frame({state.row: 8}, [End(state.row, state.lease, "length", "", ())])
    )
    world.do(windows.ended, link)
    assert not world.plane.windows.is_open
    assert [type(frame) for _, frame in world.told] == [Sleep]
    world._obey(*world.told.pop())
    assert any(isinstance(answer, DevicesReturned) for answer in world.answers)


def test_a_sample_that_ended_while_others_run_does_not_end_the_window(world: World) -> None:
    link = world.join("local-0", local=True, rate=40.0)
    world.ask(2, 8)
    world.lend()
    world.run(TICK_S)
    world.book.assign()
    state = next(iter(world.book.held_by("local-0")))
    rest = 8 - state.length
    world.book.progress(
        "local-0", world._frame({state.row: rest}, [End(state.row, state.lease, "length", "", ())])
    )
    world.do(windows.ended, link)
    assert world.plane.windows.is_open


def two_that_wake(world: World) -> list[AgentLink]:
    links = [world.join(name, local=True) for name in ("local-0", "local-1")]
    for link in links:
        link.resting = "asleep"
        world.stuck.add(link.name)  # they do what they are told when the test says so
    world.ask(SLOTS + 2, 50)
    world.lend()
    return links


def held(world: World) -> list[int]:
    world.book.assign()
    return [len(world.book.instances[name].held) for name in ("local-0", "local-1")]


def test_local_instances_begin_together_and_share_the_work(world: World) -> None:
    """Else the first of them has more than its slots hold while the other one stands idle."""
    first, second = two_that_wake(world)
    world.do(windows.awake, first, Awake(seconds=0.1))
    assert held(world) == [0, 0]
    second.loading = 1
    world.do(windows.awake, second, Awake(seconds=0.1))
    assert held(world) == [0, 0]
    assert world.plane.windows.may_load(first)  # that waits for nobody
    second.loading = None
    world.do(windows.loaded, second)
    assert held(world) == [SLOTS // 2 + 1, SLOTS // 2 + 1]


def test_no_local_instance_waits_long_for_another(world: World) -> None:
    first, _ = two_that_wake(world)
    world.do(windows.awake, first, Awake(seconds=0.1))
    world.now += TOGETHER_S - 0.01
    world.do(windows.look)
    assert held(world) == [0, 0]
    world.now += 0.02
    world.do(windows.look)
    assert held(world)[0] >= SLOTS


def test_nobody_waits_for_a_local_instance_that_is_gone_or_has_no_engine(world: World) -> None:
    first, second = two_that_wake(world)
    world.do(windows.awake, first, Awake(seconds=0.1))
    world.book.engine_died(second.name)
    second.resting = ""
    world.do(windows.look)
    assert held(world)[0] >= SLOTS


def test_a_window_says_when_what_happened_in_it(world: World) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.run(2 * TICK_S)
    assert world.links["local-0"].resting == "asleep"
    world.ask(4, 20)
    world.lend()
    world.until_back()
    (closed,) = world.closed()
    assert 0.0 < closed["awake_s"] <= closed["working_s"] < closed["open_s"]
    assert any(kind == "DevicesFree" for kind, _ in world.events)


def test_what_runs_at_the_end_goes_on_elsewhere_from_its_last_token(world: World) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.ask(8, 1000)
    world.lend()
    world.run(5.0)
    world.join("remote-0", rate=1000.0)  # the plan changes: it does the rest sooner than training could begin
    world.links["remote-0"].rate_tokens_s = 1000.0
    generated = world.book.account.generated
    assert generated > 100
    world.do(windows.reclaim, 1)
    assert world.until_back(5.0).reason == "the trainer needs its devices"
    lengths = [state.length for state in world.book.unfinished()]
    assert sum(lengths) >= generated - 8  # nothing is thrown away
    assert all(state.instance != "local-0" for state in world.book.unfinished())
    while world.left:
        world.run(1.0)
    assert world.book.missing_tokens() == 0
    assert sum(world.book.account.discarded.values()) == 0


def test_an_instance_that_does_not_give_back_in_time_is_lost_and_the_trainer_has_its_devices(
    world: World,
) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.ask(4, 1000)
    world.lend()
    world.run(3.0)
    world.stuck.add("local-0")
    world.do(windows.reclaim, 1)
    began = world.now
    world.until_back(60.0)
    assert CLOSE_WITHIN_S <= world.now - began < CLOSE_WITHIN_S + 1.0
    assert world.lost == [("local-0", "window_not_closed")]
    assert world.left == 4


def test_an_instance_that_dies_in_its_window_is_missed_by_nobody(world: World) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.join("remote-0", rate=40.0)
    world.ask(32, 100)
    world.lend(train_s_per_token=0.001)
    world.run(3.0)
    world.do(leaving.lose, world.links["local-0"], "silent")
    world.until_back()
    while world.left:
        world.run(1.0)
    assert world.book.missing_tokens() == 0


def test_a_trainer_that_is_gone_gets_its_devices_back_before_it_is_there_again(world: World) -> None:
    world.join("local-0", local=True, rate=40.0)
    world.ask(4, 1000)
    world.lend()
    world.run(3.0)
    world.do(windows.trainer_left)
    world.run(TRAINER_AWAY_S / 2)
    assert world.plane.windows.is_open  # a short cut costs nothing
    world.do(windows.trainer_attached, world.trainer, other=False)
    world.run(TRAINER_AWAY_S)
    assert world.plane.windows.is_open
    world.do(windows.trainer_left)
    world.run(TRAINER_AWAY_S + 1.0)
    assert not world.plane.windows.is_open
    assert world.links["local-0"].resting == "asleep"
    assert not any(isinstance(answer, DevicesReturned) for answer in world.answers)
    world.do(windows.trainer_attached, world.trainer, other=True)
    world.do(windows.reclaim, 0)
    assert world.until_back(1.0).window == 0


def test_a_new_manager_goes_on_with_a_window_that_is_lent_again_and_ends_one_that_is_not(
    world: World,
) -> None:
    link = world.join("local-0", local=True, rate=40.0)
    world.ask(4, 1000)
    world.lend()
    world.run(2.0)
    held = len(world.book.instances["local-0"].held)
    assert held == 4
    fresh = world.start_anew(grace_s=5.0)
    world._refresh()  # it has dialled this one
    world.run(3.0)
    assert not link.resting  # what it has goes on: its trainer may be about to say so
    assert len(world.book.instances["local-0"].held) == held
    world.lend()
    world.run(5.0)
    assert fresh.is_open
    world.start_anew(grace_s=5.0)
    world._refresh()
    world.run(6.0)
    assert link.resting == "asleep"
    assert not world.book.instances["local-0"].held


def test_the_trainer_hears_often_how_its_window_stands(world: World) -> None:
    world.join("local-0", local=True, rate=1.0)
    world.ask(4, 1000)
    world.lend()
    world.run(10.0)
    news = [answer for answer in world.answers if isinstance(answer, WindowStatus)]
    assert len(news) >= 15
    assert news[-1].left_s is None  # until done
    assert "no remote instance" in news[-1].reason


def test_with_nobody_local_there_is_nothing_to_lend_to(world: World) -> None:
    world.join("remote-0")
    world.ask(4, 10)
    world.lend()
    assert world.until_back(1.0).reason == "there is no local instance"


def test_a_trainer_whose_instance_loads_for_a_minute_leaves_it_its_devices(world: World) -> None:
    """Both ends: who hears nothing for half a minute takes the devices back, and two would compute on one GPU."""
    world.join("remote")
    local = world.join("local", local=True, rate=100.0)
    world.run(1.0)
    world.answers.clear()

    class Connected:
        def lend(self, frame: LendDevices | ReclaimDevices) -> bool:
            if isinstance(frame, LendDevices):
                world.do(windows.lend, frame)
            else:
                world.do(windows.reclaim, frame.window)
            return True

    lending = DeviceLending(Connected(), last_share=0.25, now=world.now)
    lending.on_frame(DevicesReturned(window=0, reason=""))
    lending.observe(world.now, training=False, could_train=False, waits=True)
    world.ask(40, 400)
    follow(world, lending, 20.0)
    assert lending.is_lent
    assert world.plane.windows.window is not None
    local.loading = 1
    assert not lending.take_back(world.now)
    follow(world, lending, 60.0)
    assert lending.is_lent
    local.loading = None
    follow(world, lending, 1.0)
    assert lending.lent_s > 60.0, "they came back, and were lent again meanwhile"
    assert lending.closed_because == "the trainer needs its devices"


def follow(world: World, lending: DeviceLending, seconds: float) -> None:
    """Time passes at both ends."""
    for _ in range(round(seconds / TICK_S)):
        world.run(TICK_S)
        for answer in world.answers:
            assert isinstance(answer, DevicesReturned | WindowStatus)
            lending.on_frame(answer)
        world.answers.clear()
        lending.observe(world.now, training=False, could_train=False, waits=True)


def test_who_lends_again_where_no_local_instance_is_left_has_its_devices_back(world: World) -> None:
    """The window before is open still, and its last instance is gone: there is nothing to plan any more."""
    world.join("local-0", local=True, rate=40.0)
    world.ask(4, 1000)
    world.lend(1)
    world.run(1.0)
    assert world.plane.windows.is_open
    world.do(leaving.lose, world.links["local-0"], "silent")
    world.lend(2)
    assert world.until_back(1.0).window == 2
    assert not world.plane.windows.is_open
    world.run(1.0)
