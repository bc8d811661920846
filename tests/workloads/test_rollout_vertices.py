"""The vertex of the rollout manager: the secrets that it makes, and keeps over restarts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gyre.config import RoleSpec, RolloutsSpec, WeightsSpec
from gyre.store import open_store
from gyre.workloads.rollout_vertices import RolloutManagerVertex


def started(directory: Path, incarnation: int) -> RolloutManagerVertex:
    vertex = RolloutManagerVertex.__new__(RolloutManagerVertex)
    context: Any = SimpleNamespace(
        directory=directory,
        config={},
        store_url=f"sqlite:///{directory}/gyre.db",
        store_hold_s=3.0,
        job_id="job",
        address="",
        incarnation=incarnation,
        rollouts=RolloutsSpec().model_dump(),
        weights=WeightsSpec().model_dump(),
        pools={
            "rollout": {
                "count": 1,
                "elastic": None,
                "price_per_hour": 0.0,
                "engine": "embedded",
                "stall_timeout_s": RoleSpec.model_fields["stall_timeout_s"].default,
            }
        },
        report=lambda kind, fields: None,
    )
    vertex.context = context
    vertex.setup()
    return vertex


def told(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "rollouts.json").read_text())
    return found


def status_of(where: dict[str, Any], token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{where['url']}/v1/status", headers=headers, trust_env=False).status_code


@pytest.mark.parametrize("before", [{}, {"url": "http://127.0.0.1:0", "token": "of an earlier Gyre"}])
def test_the_token_that_people_copy_is_not_the_trainers_and_both_stay(
    tmp_path: Path, before: dict[str, str]
) -> None:
    with open_store(f"sqlite:///{tmp_path}/gyre.db"):
        if before:
            (tmp_path / "rollouts.json").write_text(json.dumps(before))
        found: list[dict[str, Any]] = []
        for incarnation in (1, 2):
            vertex = started(tmp_path, incarnation)
            try:
                assert vertex.manager.shell.store._database._hold_s == 3.0, "as long as the context says"
                found.append(told(tmp_path))
                assert status_of(found[-1], found[-1]["secret"]) == 200
                assert status_of(found[-1], found[-1]["token"]) == 401
            finally:
                vertex.teardown()
    first, second = found
    assert (first["token"], first["secret"]) == (second["token"], second["secret"])
    assert first["token"] != first["secret"]
