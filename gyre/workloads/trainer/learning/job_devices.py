"""What the job has reserved by now: instances come and go, the other roles are as they were submitted.

This module must not know what is done with it.
"""

from __future__ import annotations

from gyre.config import JobSpec
from gyre.graph import pools_of
from gyre.graph.devices import devices_of, rate_per_hour
from gyre.workloads.trainer.learning.step_metrics import Reserved
from gyre.workloads.vertex.membership import Membership


class JobDevices:
    def __init__(self, spec: JobSpec, membership: Membership) -> None:
        self._spec = spec
        self._membership = membership
        self.pools = tuple(pools_of(spec))
        """The roles of instances that stand on machines of their own."""

    def wanted(self) -> dict[str, int]:
        """How many vertices each role of instances should have."""
        return {role: self._membership.wanted(role) for role in self.pools}

    def reserved(self) -> Reserved:
        counts = self.wanted()
        on_gpus = self._spec.device_type == "GPU"
        return Reserved(
            gpus=devices_of(self._spec, counts) if on_gpus else 0.0,
            price_per_hour=rate_per_hour(self._spec, counts),
        )
