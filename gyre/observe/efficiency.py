"""What a job's machines are worth: tokens a second, of all GPUs and of each; MFU; how busy and how full the GPUs are;
what it has cost. One pure function, whose numbers the page, the terminal, REST and Prometheus show.

Invariant *known or absent*: a number that is not known is not there. 0 means that it is 0.

This module must not know how the numbers are measured: the steps' are in
`gyre.workloads.trainer.learning.step_metrics`, the GPUs' in `gyre.gpus`, the cost in `gyre.failover.costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.failover.costs import cost_of, has_prices
from gyre.observe.series.numbers import is_number

EFFICIENCY = {
    "tokens_per_s": "Tokens trained on a second, smoothed",
    "tokens_per_s_per_gpu": "The same by GPU that the job has, in the last step",
    "mfu": "Model FLOPs utilisation of the learner's GPUs in the last step",
    "gpu_busy": "Share of time in which the job's GPUs computed, the mean over those that are told",
    "gpu_memory_used_bytes": "Memory in use on these GPUs",
    "gpu_memory_bytes": "Memory of these GPUs",
    "cost": "Price of the job so far",
    "cost_per_hour": "Price of an hour now",
    "cost_per_million_tokens": "Price of the job so far by million tokens trained on",
}
"""By name, what it is, in the order in which they are shown."""


STORE_LOST = "store_lost"
"""The reason of a job whose journal cannot be written: no reason of the journal's, which does not know it."""

SPEEDS = ("tokens_per_s", "step_s")
"""What a trainer's report says of its speed."""


def makes_steps(job: Mapping[str, Any]) -> bool:
    """Whether a job (the `job` of a view) may make steps, or has ended. One that is paused, or whose store is out of
    reach, makes none: what its trainer last said of its speed is so no longer, and is not told."""
    return job["reason"] != STORE_LOST and str(job["phase"]) != "paused"


def efficiency_of(view: Mapping[str, Any], now: float) -> dict[str, float]:
    """Of a job's view (`gyre.master.master_api`), by the names of `EFFICIENCY`; `now` in seconds since 1970."""
    found: dict[str, Any] = {"tokens_per_s": view["progress"].get("tokens_per_s")}
    training, job = view["training"], view["job"]
    for name in ("tokens_per_s_per_gpu", "mfu") if makes_steps(job) else ():
        found[name] = training["last"].get(name)
    found |= _gpus(view)
    if has_prices(job):
        cost, tokens = cost_of(job, now), training["tokens"]
        found["cost"] = cost
        found["cost_per_hour"] = job["price_per_hour"]
        if tokens:
            found["cost_per_million_tokens"] = cost / tokens * 1e6
    return {name: float(found[name]) for name in EFFICIENCY if is_number(found.get(name))}


def _gpus(view: Mapping[str, Any]) -> dict[str, float]:
    """Over the GPUs that the vertices have reported; one that several share counts once."""
    gpus: dict[str, Mapping[str, Any]] = {}
    for vertex in view["vertices"]:
        told = vertex["fields"].get("gpus") if isinstance(vertex.get("fields"), Mapping) else None
        for uuid, one in told.items() if isinstance(told, Mapping) else ():
            if isinstance(one, Mapping) and all(is_number(one.get(key)) for key in _TOLD):
                gpus[str(uuid)] = one
    if not gpus:
        return {}
    return {
        "gpu_busy": sum(one["busy"] for one in gpus.values()) / len(gpus),
        "gpu_memory_used_bytes": sum(one["memory_used_bytes"] for one in gpus.values()),
        "gpu_memory_bytes": sum(one["memory_bytes"] for one in gpus.values()),
    }


_TOLD = ("busy", "memory_used_bytes", "memory_bytes")
