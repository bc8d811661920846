"""The simulator: the same decisions under a virtual clock, with traces of faults."""

from gyre.sim.fault_trace import MASTER, Fault, FaultKind, random_faults, spot_trace
from gyre.sim.invariants import Witness, differing
from gyre.sim.simulate import Decided, Delivery, SimResult, Timings, simulate

__all__ = [
    "MASTER",
    "Decided",
    "Delivery",
    "Fault",
    "FaultKind",
    "SimResult",
    "Timings",
    "Witness",
    "differing",
    "random_faults",
    "simulate",
    "spot_trace",
]
