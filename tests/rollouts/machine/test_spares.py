"""Spares: who serves for whom, by example and over fleets that do anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre.config import SPARE_ROLLOUT
from gyre.rollouts.plane.admission import DeviceUse, NotAdmitted
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.links import AgentLink, AgentLinks
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.spares import PlacedInstance, substitute
from tests.examples import examples
from tests.rollouts.machine.simulated_agents import SimAgent
from tests.rollouts.machine.small_groups import asked

SPARES = tuple(f"{SPARE_ROLLOUT}-{rank}" for rank in range(2))
INSTANCES = ("rollout-0", "rollout-1", "rollout_spot-0")


def here(*names: str, **not_admitted: NotAdmitted) -> list[PlacedInstance]:
    """Instances by name; one with a `*` has samples. `rollout_1=REASON` is one that is not admitted."""
    found = []
    for name in [*names, *(key[::-1].replace("_", "-", 1)[::-1] for key in not_admitted)]:
        role, _, rank = name.rstrip("*").rpartition("-")
        why = not_admitted.get(f"{role}_{rank}")
        found.append(PlacedInstance(role, int(rank), why, name.endswith("*")))
    return found


@pytest.mark.parametrize(
    ("instances", "serving", "missing"),
    [
        (here("rollout-0", "rollout-1", *SPARES), (), ()),
        (here("rollout-0", *SPARES), SPARES[:1], ("rollout-1",)),
        (here(*SPARES), SPARES, ("rollout-0", "rollout-1")),
        (here(SPARES[0]), SPARES[:1], ("rollout-0", "rollout-1")),
        (here("rollout-0"), (), ("rollout-1",)),
        (here("rollout-0", SPARES[0], f"{SPARES[1]}*"), SPARES[1:], ("rollout-1",)),  # whoever has begun
        (here("rollout-0", "rollout-7", *SPARES), (), ()),  # one that is about to leave, and another to come
        (here("rollout-0", *SPARES, rollout_1=NotAdmitted.DISCONNECTED), SPARES[:1], ("rollout-1",)),
        (here("rollout-0", *SPARES, rollout_1=NotAdmitted.DRAINING), SPARES[:1], ("rollout-1",)),
        (here("rollout-0", *SPARES, rollout_1=NotAdmitted.NO_POLICY), SPARES[:1], ("rollout-1",)),
        (here("rollout-0", *SPARES, rollout_1=NotAdmitted.POLICY_REFUSED), SPARES[:1], ("rollout-1",)),
        (here("rollout-0", *SPARES, rollout_1=NotAdmitted.HANDOVER), (), ()),
        (here("rollout-0", SPARES[1], spare_rollout_0=NotAdmitted.NO_POLICY), SPARES[1:], ("rollout-1",)),
    ],
)
def test_who_serves_for_whom(
    instances: list[PlacedInstance], serving: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    found = substitute(instances, {"rollout": 2, SPARE_ROLLOUT: 2}, SPARE_ROLLOUT)
    assert (found.serving, found.missing) == (frozenset(serving), missing)


def test_a_spare_serves_for_an_instance_of_any_pool() -> None:
    found = substitute(here("rollout-0", *SPARES), {"rollout_spot": 1, "rollout": 1}, SPARE_ROLLOUT)
    assert (found.serving, found.missing) == (frozenset(SPARES[:1]), ("rollout_spot-0",))


class FleetWithSpares(RuleBasedStateMachine):
    """Instances, spares and a machine that dialled in, which come, load, die, are cut, drain and are replaced, while
    policies are published, the wanted numbers change, and managers start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = OpenGroups(epoch=1)
        self.wanted = {"rollout": 2, "rollout_spot": 1, SPARE_ROLLOUT: 2}
        self.registry = AgentLinks(self.groups, self.wanted)
        self.incarnations = 0

    @initialize()
    def begin(self) -> None:
        self.publish()
        for name in (*INSTANCES, *SPARES):
            self.join(name)
            self.load(name)
        self.groups.open(asked(4, n=2))

    NAMES = st.sampled_from([*INSTANCES, *SPARES, "rollout-5", f"{SPARE_ROLLOUT}-9", "mine"])

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        """A new process of this name. That of the spare of rank 9 has dialled in with a token, as has `mine`."""
        self.incarnations += 1
        hello = msgspec.structs.replace(
            SimAgent(name, 0, self.incarnations).hello(), max_running=2, kv_tokens=1 << 20, version=-1
        )
        if name in self.registry:
            self.lose(name)
        self.groups.join(hello)
        connection: Any = SimpleNamespace(closing=False)
        link = AgentLink(hello, connection, self.groups.instances[name].number, 0.0)
        link.caller = Caller("theirs") if name in ("mine", f"{SPARE_ROLLOUT}-9") else Caller()
        self.registry[name] = link

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        if name in self.registry and self.registry[name].connection is not None:
            self.groups.serve(name, self.groups.served_version)
            self.registry[name].refused.clear()

    @rule(name=NAMES)
    def engine_dies(self, name: str) -> None:
        if name in self.registry:
            self.groups.engine_died(name)

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        if name in self.registry:
            self.registry.disconnected(self.registry[name], 0.0)

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        if name in self.registry:
            self.registry[name].draining = True

    @rule(name=NAMES)
    def lose(self, name: str) -> None:
        if name in self.registry:
            del self.registry[name]
            self.groups.leave(name, died="killed")

    @rule()
    def publish(self) -> None:
        if self.groups.newest_version < 4:
            self.groups.newest_version += 1
            self.groups.promote(self.groups.newest_version)

    @rule(role=st.sampled_from(["rollout", "rollout_spot"]), count=st.integers(0, 3))
    def want(self, role: str, count: int) -> None:
        self.wanted[role] = count
        self.registry.wanted.update(self.wanted)

    @rule()
    def another_manager(self) -> None:
        """All that it knows is who dialled it, and what the master says."""
        links, self.registry = self.registry, AgentLinks(self.groups, self.wanted)
        self.registry.update(links)

    @rule()
    def assign(self) -> None:
        self.admit()
        before = {name: set(one.held) for name, one in self.groups.instances.items()}
        given = self.groups.assign()
        for name in given:
            link = self.registry[name]
            assert link.not_admitted is None, f"{name} got samples, and is {link.not_admitted}"
            assert self.groups.bounds.admit(self.groups.instances[name].version), "old weights served as new"
            assert before[name] != set(self.groups.instances[name].held)

    def admit(self) -> None:
        self.registry.admit(lambda link: DeviceUse.OWN, handover=False)

    def serving(self) -> tuple[list[AgentLink], list[AgentLink]]:
        """The instances that Gyre placed and that can serve: those that are no spares, and spares."""
        able = [
            one
            for name, one in self.registry.items()
            if one.connection is not None
            and not one.draining
            and self.groups.instances[name].version >= 0
            and one.caller.is_ours
            and one.name != "mine"
        ]
        return [one for one in able if not one.is_spare], [one for one in able if one.is_spare]

    @invariant()
    def as_many_serve_as_are_wanted(self) -> None:
        self.admit()
        own, spares = self.serving()
        serving = [one for one in spares if one.name in self.registry.substitution.serving]
        lack = 0
        for role in ("rollout", "rollout_spot"):
            lack += max(0, self.wanted[role] - sum(one.role == role for one in own))
        assert len(serving) == min(lack, len(spares)), (self.wanted, lack, [one.name for one in spares])

    @invariant()
    def a_spare_waits(self) -> None:
        self.admit()
        for name, one in self.registry.items():
            if one.is_spare and one.not_admitted is None:
                assert name in self.registry.substitution.serving
                assert self.registry.substitution.missing, f"{name} serves for nobody"
            assert one.is_spare or one.not_admitted is not NotAdmitted.SPARE, name

    @invariant()
    def whoever_dialled_in_is_help(self) -> None:
        """It is never held back, and nobody serves in its place."""
        for name in ("mine", f"{SPARE_ROLLOUT}-9"):
            assert name not in self.registry or not self.registry[name].is_spare
            assert name not in self.registry.substitution.missing


class TestFleetWithSpares(FleetWithSpares.TestCase):
    settings = settings(
        max_examples=examples(150),
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
