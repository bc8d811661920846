"""Defaults that refuse each other: every number of the schema is set alone, to small and large values."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from gyre.api.checks.settings import check_settings
from gyre.config import parse_job
from gyre.config.sections import WorkloadSettings
from gyre.config.spec import JobSpec, RunSpec
from gyre.errors import GyreError
from gyre.graph import compile_job

BASE: dict[str, Any] = {
    "recipe": "grpo",
    "roles": {"actor": {}, "rollout": {}, "reward": {}},
    "config": {
        "task": {"name": "arithmetic", "digits": 2},
        "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 2048},
        "optim": {"lr": 1e-3},
    },
}
VALUES = (1, 2, 7, 8, 64, 1000)

OTHERS = {
    "rollouts.context_length": "config.sampling.max_new_tokens",
    "config.model.max_positions": "config.sampling.max_new_tokens",
    "config.model.hidden": "config.model",
    "config.model.heads": "config.model",
    "config.model.kv_heads": "config.model",
    "config.task.digits": "run.held_out",
    "config.task.held_out_every": "run.held_out",
    "rollouts.local": "roles",
}
"""Numbers below which another one has no room, and the key that is named then: whichever is wrong is the user's to
say. All else that is refused is refused by its own name."""


def numbers(model: type[BaseModel], *path: str) -> Iterator[tuple[str, ...]]:
    """The keys of the model and of those below it that take a number."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        if int in kinds or float in kinds or "Ge(" in str(kinds) or "Gt(" in str(kinds):
            yield (*path, name)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, *path, name)


KEYS = [
    *(key for key in numbers(JobSpec) if key[:2] != ("rollouts", "door")),  # of fleets alone
    *(key for key in numbers(WorkloadSettings, "config") if key[1] not in ("data", "lora", "first_weights")),
]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("gyre.api.checks.machine.has_gpu", lambda: False)


def refusal(key: tuple[str, ...], value: int) -> str:
    job = copy.deepcopy(BASE)
    place = job
    for part in key[:-1]:
        place = place.setdefault(part, {})
    place[key[-1]] = value
    try:
        check_settings(compile_job(parse_job(job)).spec, here=True)
    except GyreError as error:
        return error.message
    return ""


def test_no_number_is_refused_by_the_default_of_another() -> None:
    assert len(KEYS) > 100
    refused = []
    for key in KEYS:
        name = ".".join(key)
        for value in VALUES:
            found = refusal(key, value)
            section = ".".join(key[:-1])
            if found.startswith((f"{name}:", OTHERS.get(name, name))) or ": is missing" in found:
                continue  # its own, a known one, or a section that wants another key beside it
            if found and not found.startswith(f"{section}: "):
                refused.append((name, value, found))
    assert refused == []


@pytest.mark.parametrize("prompts", [1, 2, 3, 5, 8, 12, 17, 31, 48, 64, 100, 127, 257, 1000, 4096])
def test_any_number_of_prompts_is_cut_without_another_word(prompts: int) -> None:
    run = RunSpec(prompts_per_step=prompts)
    assert prompts % run.groups_per_firing == 0
    assert run.groups_per_micro_batch == run.groups_per_firing
    assert refusal(("run", "prompts_per_step"), prompts) == ""
    assert parse_job({"run": run.model_dump()}).run == run


def test_the_usual_step_is_cut_as_ever_and_a_wrong_one_is_told_alone() -> None:
    assert RunSpec().groups_per_firing == RunSpec(prompts_per_step=256).groups_per_micro_batch == 16
    assert RunSpec(prompts_per_step=8, groups_per_firing=2).groups_per_micro_batch == 8
    assert refusal(("run", "prompts_per_step"), 0) == (
        "run.prompts_per_step: 0 should be greater than or equal to 1."
    )
