"""What the page takes from Gyre's code, which `python -m tools.rest_types` writes: the types of what REST answers, from
the interface's OpenAPI, into `ui/src/rest.ts`; the titles and units of numbers into `ui/src/facts.ts`.

An answer has every key that is listed, and may have more. A body that is sent needs those without a default.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any, cast

from gyre.api.rest.app import create_app
from gyre.api.rest.schemas import Problem
from gyre.api.runs import COLUMNS
from gyre.failover.evaluation import SHOWN
from gyre.master.master_api import MasterApi
from gyre.workloads.trainer.learning.metric_names import METRICS, Metric

SOURCES = Path(__file__).parents[1] / "ui" / "src"

_FACTS = """/**
 * What the page calls numbers. `python -m tools.rest_types` writes this file; its sources are METRICS in
 * gyre/workloads/trainer/learning/metric_names.py, Evaluation in gyre/failover/evaluation.py and COLUMNS in
 * gyre/api/runs/columns.py.
 */

/** `caption` is beside the title: the unit, or of what it is; a `share` is from 0 to 1, and written in percent. */
export interface Fact {
  readonly title: string;
  readonly caption: string;
  readonly share: boolean;
}

export interface RunFact {
  readonly title: string;
  readonly mean: boolean;
}
"""

_UNITS = {
    "nat": "nat per token",
    "token": "tokens",
    "token/s": "tokens/s",
    "version": "versions",
    "ratio": "",
}
"""How a unit reads beside a curve; the others as they are."""

_HEAD = """/**
 * The REST interface's requests and answers. `python -m tools.rest_types` writes this file; its source is
 * gyre/api/rest/schemas.py, and sample_schemas.py beside it.
 *
 * Times are seconds since 1970. An answer may have more keys than are listed here.
 */

export type Json = string | number | boolean | null | Json[] | { [key: string]: Json };
"""

_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}

_WIDTH = 120


def written() -> dict[Path, str]:
    """What each file is to hold."""
    return {SOURCES / "rest.ts": types(), SOURCES / "facts.ts": facts()}


def facts() -> str:
    steps = {name: _fact(one.title or name, _caption(one), one.unit) for name, one in METRICS.items()}
    steps = {name: fact for name, fact in steps.items() if fact != _fact(name, "", "")}
    evaluated = {name: _fact(one.title, "", one.unit, one.form) for name, one in SHOWN.items() if one.curve}
    runs = {one.name: {"title": one.title, "mean": one.mean is not None} for one in COLUMNS if one.title}
    return "\n".join(
        [
            _FACTS,
            _record(
                "METRICS", "The metrics of a step of which there is more to say than their names.", steps
            ),
            _record("EVALUATED", "The numbers of an evaluation that have a curve of their own.", evaluated),
            _record(
                "RUNS", "The columns of the table of runs; groups have the mean of some.", runs, "RunFact"
            ),
        ]
    )


def _caption(metric: Metric) -> str:
    """`share of answers`, as the meaning of a ratio begins, where none is given."""
    found = re.match(r"share of \w+", metric.meaning) if metric.unit == "ratio" else None
    return metric.caption or (found[0] if found else "")


def _fact(title: str, caption: str, unit: str, form: str = "") -> dict[str, Any]:
    caption = caption or _UNITS.get(unit, unit)
    return {"title": title, "caption": caption, "share": unit == "ratio" or form == "share"}


def _record(name: str, about: str, rows: dict[str, dict[str, Any]], kind: str = "Fact") -> str:
    lines = []
    for key, row in rows.items():
        fields = ", ".join(
            f"{field}: {json.dumps(value, ensure_ascii=False)}" for field, value in row.items()
        )
        lines.append(f"  {key}: {{ {fields} }},\n")
    return (
        f"/** {about} */\nexport const {name}: Readonly<Record<string, {kind}>> = {{\n{''.join(lines)}}};\n"
    )


def types() -> str:
    # No job is needed to say what the interface is.
    schemas = create_app(cast(MasterApi, None), token=None).openapi()["components"]["schemas"]
    schemas = schemas | {"Problem": Problem.model_json_schema()}
    return "\n".join([_HEAD, *(_declared(name, schema) for name, schema in sorted(schemas.items()))])


def _declared(name: str, schema: dict[str, Any]) -> str:
    said = _comment(schema.get("description", ""), "")
    if "properties" not in schema:
        return f"{said}export type {name} = {_type(schema)};\n"
    sent = schema.get("additionalProperties") is False
    lines = [f"{said}export interface {name} {{\n"]
    for key, one in schema["properties"].items():
        optional = "?" if sent and key not in schema.get("required", ()) else ""
        lines.append(f"{_comment(one.get('description', ''), '  ')}  {key}{optional}: {_type(one)};\n")
    return "".join([*lines, "}\n"])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_type(one) for one in schema['prefixItems'])}]"
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values if isinstance(values, dict) else {})}>"
    return _PLAIN.get(kind, "Json") if isinstance(kind, str) else "Json"


def _comment(text: str, indent: str) -> str:
    if not text:
        return ""
    told = " ".join(text.split())
    if len(indent) + len(told) + len("/**  */") <= _WIDTH:
        return f"{indent}/** {told} */\n"
    wrapped = textwrap.wrap(told, _WIDTH - len(indent) - len(" * "))
    return "".join([f"{indent}/**\n", *(f"{indent} * {line}\n" for line in wrapped), f"{indent} */\n"])


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
