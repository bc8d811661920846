"""Defaults that refuse each other: every number of the schema is set alone, to small and large values."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from gyre.api.checks.amounts import amounts_of
from gyre.api.checks.settings import check_settings
from gyre.config import parse_job
from gyre.config.sections import WorkloadSettings
from gyre.config.spec import JobSpec, RunSpec
from gyre.errors import GyreError
from gyre.graph import compile_job
from gyre.workloads.tasks.arithmetic import ArithmeticTask

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
    "config.model.hidden": "config.model",
    "config.model.heads": "config.model",
    "config.model.kv_heads": "config.model",
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


@pytest.mark.parametrize(
    ("job", "longest"),
    [
        ({"model": {"max_positions": 16}}, 9),  # what prompts of 7 tokens leave
        ({"model": {"max_positions": 64}, "rollouts": {"context_length": 32}}, 25),
        ({"model": {"max_positions": 64}, "task": {"name": "rows", "file": "rows.jsonl"}}, 32),
        ({"model": {"max_positions": 4096}}, 1024),
        ({"model": {"max_positions": 16}, "sampling": {"max_new_tokens": 12}}, 12),
    ],
)
def test_answers_that_the_job_does_not_speak_of_fit_into_the_context(
    job: dict[str, Any], longest: int
) -> None:
    own = copy.deepcopy(BASE)
    for name, section in job.items():
        if name == "rollouts":
            own[name] = section
        elif name == "task":
            own["config"][name] = section
        else:
            own["config"][name] = own["config"].get(name, {}) | section
    spec = compile_job(parse_job(own)).spec
    assert WorkloadSettings.read(spec.config).sampling.max_new_tokens == longest
    assert compile_job(spec).spec == spec


def test_answers_and_held_out_prompts_that_the_user_wrote_are_refused_as_ever() -> None:
    job = copy.deepcopy(BASE)
    job["config"]["model"]["max_positions"] = 16
    job["config"]["sampling"] = {"max_new_tokens": 12}
    with pytest.raises(GyreError, match=r"^config\.sampling\.max_new_tokens: 12 given.*Give at most 9"):
        check_settings(compile_job(parse_job(job)).spec, here=True)
    small = copy.deepcopy(BASE)
    small["config"]["task"]["digits"] = 1
    check_settings(compile_job(parse_job(small)).spec, here=True)
    with pytest.raises(GyreError, match=r"^run\.held_out: 256 given, but config\.task holds out about"):
        check_settings(compile_job(parse_job(small | {"run": {"held_out": 256}})).spec, here=True)


def test_all_that_is_held_out_is_evaluated_where_the_job_says_no_number() -> None:
    few = ArithmeticTask({"task": {"digits": 1}})
    there = few.held_out_at_most(256)
    assert 1 < there < 256
    assert len(few.held_out(there)) == there
    with pytest.raises(GyreError, match="holds out about"):
        few.held_out(there + 1)
    assert ArithmeticTask({"task": {"digits": 2}}).held_out_at_most(256) == 256
    assert RunSpec().most_held_out == 256
    assert RunSpec(held_out=7).most_held_out == 7
    spec = compile_job(parse_job(BASE | {"config": BASE["config"] | {"task": {"digits": 1}}})).spec
    amounts = amounts_of(spec)
    assert amounts is not None
    assert amounts.evaluated == {"held_out": there}


def test_the_usual_step_is_cut_as_ever_and_a_wrong_one_is_told_alone() -> None:
    assert RunSpec().groups_per_firing == RunSpec(prompts_per_step=256).groups_per_micro_batch == 16
    assert RunSpec(prompts_per_step=8, groups_per_firing=2).groups_per_micro_batch == 8
    assert refusal(("run", "prompts_per_step"), 0) == (
        "run.prompts_per_step: 0 should be greater than or equal to 1."
    )
