"""The page's types of what REST answers, from the interface's OpenAPI: `python -m tools.rest_types` writes them.

An answer has every key that is listed, and may have more. A body that is sent needs those without a default.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, cast

from gyre.api.rest.app import create_app
from gyre.api.rest.schemas import Problem
from gyre.master.master_api import MasterApi

FILE = Path(__file__).parents[1] / "ui" / "src" / "rest.ts"

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


def written() -> str:
    """The file's content."""
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
    FILE.write_text(written())
