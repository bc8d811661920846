"""Small jobs for the tests of the graph."""

from __future__ import annotations

from typing import Any

from gyre.config import JobSpec, parse_job


def role(total: int = 1, **keys: Any) -> dict[str, Any]:
    return {"entrypoint": "my.module:Worker", "total": total, **keys}


def script_job(roles: dict[str, dict[str, Any]], **keys: Any) -> JobSpec:
    """A job whose trainer's `fit()` is the flow."""
    return parse_job({"roles": {"trainer": role(), **roles}, **keys})


def grpo_job(roles: dict[str, dict[str, Any]] | None = None, **keys: Any) -> JobSpec:
    """The GRPO recipe with its default classes; `roles` go over one vertex of each."""
    merged = {"actor": {}, "rollout": {}, "reward": {}, **(roles or {})}
    return parse_job({"recipe": "grpo", "roles": merged, **keys})
