"""The trainer's side of windows: it never trains on devices that it lent, and waits for nobody for ever."""

from __future__ import annotations

from gyre.rollouts.protocol.frames import DevicesReturned, LendDevices, ReclaimDevices, WindowStatus
from gyre.workloads.trainer.device_lending import AGAIN_S, SILENT_S, DeviceLending


class World:
    def __init__(self) -> None:
        self.now = 50.0
        self.sent: list[LendDevices | ReclaimDevices] = []
        self.connected = True
        self.lending = DeviceLending(self, last_share=0.5, now=self.now)

    def lend(self, frame: LendDevices | ReclaimDevices) -> bool:
        if self.connected:
            self.sent.append(frame)
        return self.connected

    def look(self, after_s: float = 0.1, **changed: bool) -> None:
        self.now += after_s
        state = {"training": False, "could_train": False, "waits": True} | changed
        self.lending.observe(self.now, **state)

    def begun(self) -> World:
        """The trainer has asked for its devices, and has them."""
        assert not self.lending.take_back(self.now)
        self.lending.on_frame(DevicesReturned(window=0, reason=""))
        self.look(waits=False)
        assert self.lending.take_back(self.now)
        self.sent.clear()
        return self


def test_a_new_trainer_asks_first() -> None:
    world = World()
    assert world.lending.is_lent
    assert not world.lending.take_back(world.now)
    assert not world.lending.take_back(world.now)
    assert world.sent == [ReclaimDevices(window=0)]
    world.lending.on_frame(DevicesReturned(window=0, reason=""))
    world.look(could_train=True)
    assert world.lending.take_back(world.now)


def test_without_a_manager_it_goes_on_in_the_end() -> None:
    world = World()
    world.connected = False
    for _ in range(int(SILENT_S)):
        assert not world.lending.take_back(world.now)
        world.look(1.0, could_train=True)
    world.look(1.0, could_train=True)
    assert world.lending.take_back(world.now)
    assert world.sent == []


def test_devices_are_lent_while_samples_are_waited_for_and_nothing_can_be_trained() -> None:
    world = World().begun()
    world.look(waits=False)
    world.look(could_train=True)
    world.look(training=True)
    assert world.sent == []
    world.look()
    (lend,) = world.sent
    assert isinstance(lend, LendDevices)
    assert (lend.window, lend.begun) == (1, True)
    assert world.lending.is_lent
    world.look(could_train=True)  # the first group is there, and waits
    assert world.lending.is_lent
    world.lending.on_frame(DevicesReturned(window=1, reason="as planned"))
    world.look()
    assert not world.lending.is_lent
    assert world.lending.closed_because == "as planned"


def test_it_is_not_lent_again_at_once_unless_a_step_is_done() -> None:
    world = World().begun()
    world.look()
    world.lending.on_frame(DevicesReturned(window=1, reason="there is no local instance"))
    world.look()
    world.look(AGAIN_S / 2)
    assert len(world.sent) == 1
    world.look(AGAIN_S)
    assert len(world.sent) == 2
    world.lending.on_frame(DevicesReturned(window=2, reason="there is no local instance"))
    world.look()
    world.look(training=True)
    world.lending.step_done()
    world.look()
    assert [frame.window for frame in world.sent] == [1, 2, 3]
    last = world.sent[-1]
    assert isinstance(last, LendDevices)
    assert not last.begun


def test_what_training_takes_is_measured() -> None:
    world = World().begun()
    for _ in range(2):
        world.lending.delivered(1000)
        world.look(0.1, training=True)
        world.look(5.0, training=True)
        world.look(5.0, waits=False)
        world.lending.step_done()
    world.lending.delivered(70)
    world.look()
    lend = world.sent[-1]
    assert isinstance(lend, LendDevices)
    assert abs(lend.train_s_per_token - 0.01) < 1e-3
    assert lend.arrived_tokens == 70
    assert lend.last_share == 0.5


def test_a_manager_that_says_nothing_is_gone_and_one_that_speaks_is_not() -> None:
    world = World().begun()
    world.look()
    for _ in range(10):
        world.lending.on_frame(WindowStatus(window=1, left_s=None, reason="until done"))
        world.look(SILENT_S / 2)
        assert world.lending.is_lent
    world.look(SILENT_S + 1.0)
    assert not world.lending.is_lent
    assert "said nothing" in world.lending.closed_because
    assert world.sent[-1] == ReclaimDevices(window=1)


def test_news_of_another_window_is_no_news() -> None:
    world = World().begun()
    world.look()
    world.lending.on_frame(DevicesReturned(window=0, reason="late"))
    world.look()
    assert world.lending.is_lent


def test_a_trainer_that_needs_its_devices_asks_once() -> None:
    world = World().begun()
    world.look()
    world.connected = False
    assert not world.lending.take_back(world.now)
    world.connected = True
    assert not world.lending.take_back(world.now)
    assert not world.lending.take_back(world.now)
    assert world.sent[1:] == [ReclaimDevices(window=1)]
