"""What users test their own classes with: jobs in one process, the contracts of roles and engines, a virtual clock, and
faults in real processes. Exports are resolved on first use; none of it needs Ray. What only Gyre's own tests need is in
`tests/doubles`, and in no wheel."""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "ContractBroken": "contracts",
    "InProcessCollective": "in_process",
    "InProcessJob": "in_process",
    "InProcessTransport": "in_process",
    "ProcessFaults": "processes",
    "check_actor": "contracts",
    "check_critic": "contracts",
    "check_engine": "contracts",
    "check_reference": "contracts",
    "check_reward": "contracts",
    "check_rollout": "contracts",
    "collective_of": "in_process",
    "VirtualClock": "clock",
    "VirtualTimeLoop": "clock",
    "run_virtual": "clock",
}


__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _EXPORTS)
