"""What the contract test binds in real processes."""

from __future__ import annotations

import time

from gyre.workloads import BaseWorkload, operator

BLOCKS_S = 20.0


class Blocking(BaseWorkload):
    @operator(control=True)
    def look(self) -> None:
        time.sleep(BLOCKS_S)


class Quiet(BaseWorkload):
    pass


class Raising(BaseWorkload):
    def setup(self) -> None:
        raise ValueError("by plan")
