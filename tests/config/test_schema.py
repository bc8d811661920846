"""The JSON schema of a job file: it takes what Gyre takes, and describes every key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from gyre.config import parse_job
from gyre.config.schema import job_schema
from gyre.config.yaml_text import read_yaml
from gyre.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCHEMA = job_schema()
JOBS = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("gyre/api/templates/*.yaml")])


def mistakes(job: Any) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(job)]


def described(schema: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every key with its description."""
    if isinstance(schema, list):
        for item in schema:
            yield from described(item, path)
    elif isinstance(schema, dict):
        for name, one in schema.get("properties", {}).items():
            named = SCHEMA["definitions"].get(one.get("$ref", "").rpartition("/")[2], {})
            yield f"{path}.{name}", str(one.get("description") or named.get("description", ""))
        for key, item in schema.items():
            for name, one in item.items() if key in ("properties", "definitions") else [("", item)]:
                yield from described(one, f"{path}.{name}" if name else path)


def test_the_schema_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)


def test_every_key_has_a_description_on_one_line() -> None:
    found = dict(described(SCHEMA))
    assert len(found) > 200
    assert {path for path, text in found.items() if not text or "\n" in text} == set()
    assert {path for path, text in found.items() if "None" in text} == set()  # YAML has null


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_the_jobs_that_gyre_ships_are_valid(file: Path) -> None:
    assert mistakes(read_yaml(file.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "config: other.yaml",
        "python_path: src",
        "device_type: gpu",
        "roles: {actor: }",
        "roles: {actor: {entrypoint: 'a.py:B', resources: {memory_bytes: 8GiB}}}",
        "roles: {actor: {entrypoint: {module: a, name: B}}}",
        "weights: {transports: tcp, chunk_bytes: 16MiB, ports: 7100}",
        "weights: {transports: [shm, tcp], ports: 7100-7131}",
        "config: {data: {path: d, held_out: {aime: a}}, my_own: {anything: [1]}}",
        "config: {model: , task: {}}",
        "staleness: {policy: wait}",
    ],
)
def test_what_a_job_file_may_hold_besides_the_models_own_types_is_valid(text: str) -> None:
    assert mistakes(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "run: {stepz: 1}",
        "run: {steps: 0}",
        "steps: 3",
        "name: a b",
        "device_type: TPU",
        "roles: {Actor: {}}",
        "roles: {actor: {totl: 2}}",
        "config: {optim: {lrr: 1}}",
        "config: {model: {layers: 1}}",
        "weights: {transports: [udp]}",
    ],
)
def test_what_gyre_refuses_the_schema_refuses(text: str) -> None:
    job = yaml.safe_load(text)
    assert mistakes(job)
    if "config" not in job:  # its sections are read when the job is compiled
        with pytest.raises(ConfigError):
            parse_job(job)
