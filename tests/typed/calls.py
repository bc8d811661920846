"""mypy knows a misspelt method and a wrong argument of a call to ranks and to hosts: it checks this file with the
package, and nothing runs it.

Each ignored error must be one: `warn_unused_ignores` complains of one that is none.
"""

from __future__ import annotations

from pathlib import Path

from gyre.graph.elements import Operator
from gyre.master.cluster import Address, Cluster
from gyre.rollouts.samples import Group
from gyre.workloads.gang.learner_gang import ActorGang, LearnerGang
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import VertexReport
from gyre.workloads.vertex.returns import Expected


def to_ranks(actor: ActorGang, critic: LearnerGang, shares: list[list[Group]]) -> str:
    actor.acumulate(shares, step=1, index=0)  # type: ignore[attr-defined]
    actor.accumulate(shares, step="1", index=0)  # type: ignore[arg-type]
    actor.apply(step=1, indices=0)  # type: ignore[call-arg]
    critic.export_weights(version=1)  # type: ignore[attr-defined]
    critic.restore("folder")  # type: ignore[arg-type]
    critic.checkpoint(Path("folder"), background=True, wait=True)  # type: ignore[call-arg]
    return actor.restore_from_memory(newer_than=0, at_most=1).first(timeout_s=1.0)  # type: ignore[return-value]


def to_one_vertex(calls: VertexCalls, operator: Operator, expected: Expected) -> None:
    member = ("reward-0", 1)
    calls.fire(member, operator, [], step=1, index=0, expected=expected)
    calls.fire(member, "score", [], step=1, index=0, expected=expected)  # type: ignore[arg-type]
    calls.fire(member, operator, [], step=1, expected=expected)  # type: ignore[call-arg]


async def to_hosts(cluster: Cluster, at: Address) -> VertexReport:
    await cluster.call(at, 1.0, VertexHost.stack, 1)  # type: ignore[attr-defined]
    await cluster.call(at, 1.0, VertexHost.stacks)  # type: ignore[call-arg]
    await cluster.call(at, 1.0, VertexHost.set_paused, 1, "yes")  # type: ignore[arg-type]
    await cluster.call(at, 1.0, "stacks", 1)  # type: ignore[arg-type]
    await cluster.call(at, 1.0, VertexHost.stacks, 1)
    return await cluster.call(at, 1.0, VertexHost.watch, 1, 0, 0.5)
