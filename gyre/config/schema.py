"""The JSON schema of a job file, for editors: every key with its type, its default and a description.

It is made of the models that read a job, `JobSpec` and the sections of `config`, so that it cannot differ from them.
What depends on several keys (a model or a folder, two settings that exclude each other) is not in it: `gyre plan`
checks that.
"""

from __future__ import annotations

import re
from typing import Any

from gyre.config.sections import WorkloadSettings
from gyre.config.spec import JobSpec

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The one that every editor knows."""

_REFS = "#/definitions/{model}"


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file in YAML or JSON, as plain data."""
    schema = JobSpec.model_json_schema(ref_template=_REFS)
    config = WorkloadSettings.model_json_schema(ref_template=_REFS)
    definitions = schema.pop("$defs") | config.pop("$defs")
    properties = schema["properties"]
    properties["config"] = {
        "description": f"{properties['config']['description']} Or the path of another YAML file that holds it.",
        "anyOf": [_open(config), {"type": "string"}],
    }
    properties["python_path"] = _or(properties["python_path"], {"type": "string"})
    roles = properties["roles"]
    # `actor:` with nothing below it is the role with every default.
    roles["additionalProperties"] = {"anyOf": [{"$ref": "#/definitions/RoleSpec"}, {"type": "null"}]}
    (roles["propertyNames"],) = ({"pattern": pattern} for pattern in roles.pop("patternProperties"))
    job: dict[str, Any] = {
        "$schema": DIALECT,
        "title": "A Gyre job",
        **{key: value for key, value in schema.items() if key != "title"},
        "definitions": definitions,
    }
    tidied: dict[str, Any] = _tidied(job)
    return tidied


def _open(section: dict[str, Any]) -> dict[str, Any]:
    """The section with keys of the user's own workloads besides."""
    return {**section, "additionalProperties": True}


def _or(schema: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that also takes something else."""
    said: dict[str, Any] = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return {**said, "anyOf": [schema, other]}


def _tidied(value: Any) -> Any:
    """Without generated titles, which editors show before the descriptions; descriptions on one line, with YAML's name
    for Python's None."""
    if isinstance(value, list):
        return [_tidied(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if key == "title" and isinstance(item, str) and item != "A Gyre job":
            continue
        if key == "description" and isinstance(item, str):
            item = re.sub(r"\bNone\b", "null", " ".join(item.split()))
        found[key] = _tidied(item)
    if "$ref" in found and len(found) > 1:  # the dialect takes no description beside it
        found["allOf"] = [{"$ref": found.pop("$ref")}]
    return found
