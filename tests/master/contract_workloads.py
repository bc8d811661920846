"""What the contract test binds in real processes."""

from __future__ import annotations

from gyre.workloads import BaseWorkload


class Quiet(BaseWorkload):
    pass


class Raising(BaseWorkload):
    def setup(self) -> None:
        raise ValueError("by plan")
