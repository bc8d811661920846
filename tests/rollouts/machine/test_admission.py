"""Admission: each reason for it, and that no order of connections, redials and late ends leaves it wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gyre.rollouts.plane.admission import DeviceUse, NotAdmitted, PolicyBounds, why_not_admitted
from gyre.rollouts.plane.links import AgentLink, AgentLinks
from tests.examples import examples
from tests.rollouts.machine.fleet import EVERYTHING, NAMES, SEEN, Fleet, went_through
from tests.rollouts.machine.simulated_agents import SimAgent


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"version": 0}, None),  # which samples it gets is those samples' wish
        ({"loading": True}, None),  # it goes on with what it has
        ({"devices": DeviceUse.LENT}, None),
        ({"is_current": False}, NotAdmitted.SUPERSEDED),
        ({"connected": False}, NotAdmitted.DISCONNECTED),
        ({"draining": True}, NotAdmitted.DRAINING),
        ({"loading": True, "handover": True}, NotAdmitted.HANDOVER),
        ({"version": -1}, NotAdmitted.NO_POLICY),
        ({"version": 6}, NotAdmitted.POLICY_TOO_NEW),
        ({"version": -1, "refused": {5}}, NotAdmitted.POLICY_REFUSED),
        ({"version": 4, "refused": {5}}, None),  # what it has will do
        ({"devices": DeviceUse.NO_WINDOW}, NotAdmitted.NO_WINDOW),
        ({"devices": DeviceUse.ASLEEP}, NotAdmitted.ASLEEP),
        ({"devices": DeviceUse.GATHERING}, NotAdmitted.GATHERING),
        ({"connected": False, "draining": True}, NotAdmitted.DISCONNECTED),
    ],
)
def test_each_reason(changed: dict[str, Any], reason: NotAdmitted | None) -> None:
    able: dict[str, Any] = {
        "is_current": True,
        "connected": True,
        "draining": False,
        "version": 5,
        "bounds": PolicyBounds(served=5),
    }
    assert why_not_admitted(**(able | changed)) is reason


def test_nobody_without_a_policy_is_admitted_even_where_no_request_asks_for_one() -> None:
    assert not PolicyBounds(served=-1).admit(-1)


class FleetOfLinks(Fleet):
    """The fleet over links as the manager has them: an instance dials again while its old connection stands, and
    the handler of the old one ends late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = AgentLinks(self.open_groups)
        self.late: list[AgentLink] = []

    def dial(self, agent: SimAgent) -> None:
        hello = agent.hello()
        super().dial(agent)
        before = self.registry.get(agent.name)
        if before is not None:
            if before.connection is not None:
                before.connection.closing = True
            self.late.append(before)
        connection: Any = SimpleNamespace(closing=False)
        number = self.open_groups.instances[agent.name].number
        link = AgentLink(hello, connection, number, 0.0, 0.0)
        link.draining = agent.draining
        self.registry[agent.name] = link

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def an_old_handler_ends(self, data: st.DataObject) -> None:
        late = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        assert not self.registry.disconnected(late, 1.0)

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        agent, link = self.agents.get(name), self.registry.get(name)
        if agent is not None and agent.connected and link is not None:
            assert self.registry.disconnected(link, 1.0)
        super().cut(name)

    @rule(name=NAMES, died=st.sampled_from(["", "connection_lost"]))
    def lose(self, name: str, died: str) -> None:
        super().lose(name, died)
        if name not in self.open_groups.instances and (link := self.registry.pop(name, None)) is not None:
            self.late.append(link)

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        super().drain(name)
        if (link := self.registry.get(name)) is not None:
            link.draining = self.agents[name].draining

    @rule()
    def restart(self) -> None:
        super().restart()
        self.registry = AgentLinks(self.open_groups)
        self.late = []

    @rule(limit=st.none() | st.integers(1, 3))
    def assign(self, limit: int | None) -> None:
        self.registry.admit(lambda link: DeviceUse.OWN, handover=False)
        for name, instance in self.open_groups.instances.items():
            able = self.can(name) and self.open_groups.bounds.admit(instance.version)
            assert instance.admitted == able, (name, self.registry[name].not_admitted)
        super().assign(limit)


class TestFleetOfLinks(FleetOfLinks.TestCase):
    settings = settings(
        max_examples=examples(50),
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )

    @classmethod
    def setUpClass(cls) -> None:
        SEEN.clear()

    @classmethod
    def tearDownClass(cls) -> None:
        went_through(SEEN, EVERYTHING)
