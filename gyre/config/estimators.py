"""Gyre's own advantage estimators as records: what each asks of a job, read wherever somebody would compare its name.

How they are computed: `gyre.workloads.algorithms.advantages`. Of a user's own estimator nothing is known. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimator:
    """`compares`: a sample with the others of its group, so that equal samples have no advantage; `alone`: of a group
    of one it takes the reward as it is, where others have no advantage at all; `by_values`: beside a critic's
    values."""

    compares: bool = False
    alone: bool = False
    by_values: bool = False


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(compares=True),
    "dr_grpo": Estimator(compares=True),
    "rloo": Estimator(compares=True, alone=True),
    "gae": Estimator(by_values=True),
}
