"""What the manager makes of its fleet, in virtual time: whole steps, nothing asked twice, and back to none."""

from __future__ import annotations

from dataclasses import replace

from gyre.rollouts.plane.autoscaler import (
    ASK_AGAIN_S,
    FIRST_STEPS_WITHIN_S,
    FOLLOW_S,
    Advice,
    Autoscaler,
    Fleet,
)
from gyre.rollouts.protocol.frames import TrainerStatus
from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.scheduling.pools import Pool

SETTINGS = ElasticSettings(min=0, max=8, up_cooldown_s=30.0, down_cooldown_s=60.0)
WORKING = Fleet(placed={"rollout": 2}, others=0, serving=2, busy=2, queued_tokens=1e5, rate_tokens_s=1000.0)
IDLE = replace(WORKING, busy=0, queued_tokens=0.0)
FOUR = replace(WORKING, placed={"rollout": 4}, serving=4, busy=4)
TICK_S = 0.5


class World:
    """Instances come as fast as they are asked for, unless `room` ends."""

    def __init__(self, settings: ElasticSettings = SETTINGS, *, wanted: int = 2, room: int = 99) -> None:
        self.watch = Autoscaler({"rollout": Pool(settings)})
        self.now = 1000.0
        self.trainer_s = 50.0
        self.waited_s = 0.0
        self.wanted = wanted
        self.room = room
        self.advices: list[Advice] = []

    def run(
        self,
        seconds: float,
        fleet: Fleet,
        *,
        waits: bool = False,
        attached: bool = True,
        window: bool = False,
    ) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if attached:
                self.trainer_s += TICK_S
                self.waited_s += TICK_S if waits else 0.0
                pulse = TrainerStatus(
                    at_s=self.trainer_s, waited_s=self.waited_s, wanted={"rollout": self.wanted}
                )
                self.watch.pulse(pulse, self.now)
            placed = min(fleet.placed["rollout"], self.wanted)
            there = replace(
                fleet,
                placed={"rollout": placed},
                serving=placed + fleet.others,
                busy=min(fleet.busy, placed + fleet.others),
            )
            for advice in self.watch.look(there, self.now, window_open=window):
                self.advices.append(advice)
                self.wanted = min(advice.count, self.room)

    def step(self, generate_s: float, train_s: float, fleet: Fleet = WORKING) -> None:
        """As a synchronous job has it: the one waits for the other."""
        self.run(generate_s, fleet, waits=True)
        self.run(train_s, replace(fleet, busy=0, queued_tokens=0.0))
        self.watch.step_done(self.now)


def test_a_trainer_that_waits_gets_more_and_the_advice_says_why() -> None:
    world = World()
    for _ in range(6):
        world.step(8.0, 8.0)
    assert [(advice.seen, advice.count) for advice in world.advices][:1] == [(2, 4)]
    first = world.advices[0]
    assert "waited" in first.reason
    assert 0.4 < first.observed.trainer_wait_share < 0.6


def test_the_trainer_s_turn_in_a_step_is_no_idleness_of_the_fleet() -> None:
    """A part of a step alone, in which instances stand still, would tell to give them back."""
    world = World()
    for _ in range(20):
        world.step(1.0, 40.0, replace(WORKING, queued_tokens=500.0))
    shares = {advice.observed.idle_share for advice in world.advices}
    assert all(0.8 < share < 1.0 for share in shares)
    assert [advice.count for advice in world.advices] == [1]  # of two, one in forty seconds busy


def test_instances_that_stand_idle_go_though_each_step_begins_with_a_long_queue() -> None:
    """The next step's samples are asked for as the last one ends, and take longer than a cool-down; the trainer has
    always enough."""
    world = World(replace(SETTINGS, min=1), wanted=4)
    for _ in range(10):
        world.run(10.0, FOUR)
        world.run(15.0, replace(FOUR, busy=0, queued_tokens=0.0))
        world.watch.step_done(world.now)
    assert [advice.count for advice in world.advices][:1] == [2]


def test_the_trainer_s_turn_in_the_first_step_is_none_either_however_long_it_takes() -> None:
    world = World()
    world.run(300.0, WORKING)
    world.run(900.0, IDLE)
    assert world.advices == []


def test_a_trainer_that_waits_in_the_first_step_gets_more_at_once() -> None:
    world = World()
    world.run(300.0, WORKING, waits=True)
    assert world.wanted > 2


def test_where_nothing_moves_a_minute_is_looked_at_and_idleness_drains_to_none() -> None:
    world = World()
    world.run(FIRST_STEPS_WITHIN_S, IDLE)
    assert world.wanted == 2, "its first step may just be long"
    world.run(600, IDLE)
    assert world.wanted == 0
    assert all("idle" in advice.reason for advice in world.advices)
    world.run(1.0, replace(IDLE, placed={"rollout": 0}, serving=0, queued_tokens=10.0))
    assert world.wanted == 1  # at once
    assert world.advices[-1].reason == "No instance is there, and samples wait."


def test_a_change_that_does_not_come_about_is_asked_for_again_but_not_at_every_look() -> None:
    world = World(wanted=0, room=0)
    world.run(2.5 * ASK_AGAIN_S, replace(IDLE, placed={"rollout": 0}, serving=0, queued_tokens=10.0))
    assert [advice.count for advice in world.advices] == [1, 1, 1]


def test_without_a_trainer_nothing_is_learnt() -> None:
    world = World()
    world.run(5.0, IDLE)
    world.watch.detached()
    world.run(2000.0, IDLE, attached=False)
    assert world.advices == []


def test_what_the_trainer_s_own_devices_generate_is_not_waited_for() -> None:
    world = World()
    for _ in range(6):
        world.run(8.0, WORKING, waits=True, window=True)
        world.run(8.0, IDLE)
        world.watch.step_done(world.now)
    observed = world.advices[0].observed
    assert observed.trainer_wait_share == 0.0
    assert 0.4 < observed.local_share < 0.6


def test_machines_that_joined_by_themselves_are_counted_and_not_given_back() -> None:
    world = World(wanted=1)
    world.run(FIRST_STEPS_WITHIN_S, replace(WORKING, placed={"rollout": 1}))
    joined = replace(IDLE, placed={"rollout": 1}, others=3, serving=4, busy=3)
    world.run(1200, joined)
    assert world.wanted == 1  # one idle of four is what is permitted
    world.run(1200, replace(joined, busy=1))
    assert world.wanted == 0
    world.run(60, replace(joined, queued_tokens=10.0))
    assert world.wanted == 0  # the others do it


def test_steps_are_measured_and_cores_that_are_in_use_are_told_once() -> None:
    world = World()
    for _ in range(12):
        world.step(8.0, 8.0, replace(WORKING, cores_busy=1.0))
    assert [(advice.seen, advice.count) for advice in world.advices] == [(2, 2)]
    observed = world.advices[0].observed
    assert observed.step_s == 16.0
    assert observed.cores_busy is not None
    assert observed.cores_busy > 0.9


class Pools:
    """A trainer that waits all the time, and two pools; what is advised comes about as far as there is room."""

    def __init__(self, **room: int) -> None:
        bounds = ElasticSettings(min=0, max=4, up_cooldown_s=30.0, down_cooldown_s=60.0)
        pools = {"rollout": Pool(bounds, price=2.0), "rollout_spot": Pool(bounds, price=0.5)}
        self.watch = Autoscaler(pools)
        self.wanted = {"rollout": 2, "rollout_spot": 0}
        self.room = room
        self.now = 0.0
        self.advices: list[tuple[float, str, int, int]] = []

    def run(self, seconds: float, *, waits: bool) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            waited_s = self.now if waits else 0.0
            self.watch.pulse(TrainerStatus(at_s=self.now, waited_s=waited_s, wanted=self.wanted), self.now)
            total = sum(self.wanted.values())
            fleet = Fleet(
                placed=dict(self.wanted),
                others=0,
                serving=total,
                busy=total if waits else 0,
                queued_tokens=1e5 if waits else 0.0,
                rate_tokens_s=100.0 * total,
                rates=dict.fromkeys(self.wanted, 100.0),
            )
            for one in self.watch.look(fleet, self.now):
                self.advices.append((self.now, one.role, one.seen, one.count))
                self.wanted = {**self.wanted, one.role: min(one.count, self.room[one.role])}
            if round(self.now / TICK_S) % 8 == 0:
                self.watch.step_done(self.now)


def test_the_cheapest_pool_grows_and_the_dearest_shrinks() -> None:
    world = Pools(rollout=4, rollout_spot=4)
    world.run(60, waits=True)
    assert [advice[1:] for advice in world.advices[:1]] == [("rollout_spot", 0, 2)]
    world.run(600, waits=False)
    assert world.wanted == {"rollout": 0, "rollout_spot": 0}
    went = [role for _, role, seen, count in world.advices if count < seen]
    assert went[0] == "rollout"


def test_what_a_pool_has_no_room_for_another_is_asked_for_within_seconds() -> None:
    world = Pools(rollout=4, rollout_spot=0)
    world.run(60, waits=True)
    (at, *first), (then, *second) = world.advices[:2]
    assert first == ["rollout_spot", 0, 2]
    assert second == ["rollout", 2, 4]
    assert FOLLOW_S <= then - at <= FOLLOW_S + 2 * TICK_S
    assert world.wanted == {"rollout": 4, "rollout_spot": 0}


def test_a_pool_outside_its_bounds_is_brought_back_alone() -> None:
    world = Pools(rollout=4, rollout_spot=4)
    world.wanted = {"rollout": 6, "rollout_spot": 1}
    world.run(2, waits=True)
    assert [advice[1:] for advice in world.advices][:1] == [("rollout", 6, 4)]
