"""Rewards that need no model: exact match, mathematical equality, and any Python function of texts.

Exports are resolved on first use, so that a pool's worker process imports little at its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

__all__ = [
    "ExactMatchReward",
    "PythonGroupReward",
    "PythonReward",
    "RewardFunction",
    "RewardPool",
    "exact_match",
    "load_function",
    "math_verify",
    "unreadable_gold",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
