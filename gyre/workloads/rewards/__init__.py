"""Rewards that need no model: exact match, mathematical equality, and any Python function of texts.

Exports are resolved on first use, so that a pool's worker process imports little at its start.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "ExactMatchReward": "workloads",
    "PythonGroupReward": "workloads",
    "PythonReward": "workloads",
    "RewardFunction": "functions",
    "RewardPool": "pool",
    "exact_match": "functions",
    "load_function": "functions",
    "math_verify": "functions",
    "unreadable_gold": "functions",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy(__name__, _EXPORTS)
