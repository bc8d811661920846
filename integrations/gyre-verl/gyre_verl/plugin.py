"""What verl loads in each of its processes (entry point `verl.plugins`): the names that its configuration may have.

It imports little: verl loads it while it is itself being imported. verl logs at DEBUG alone that a plug-in failed.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry


def _no_replica() -> Any:
    """The class for `rollout.name: gyre`. It is looked up, and never made: the fleet has the servers."""
    from verl.workers.rollout.replica import RolloutReplica

    return RolloutReplica


RolloutReplicaRegistry.register("gyre", _no_replica)
