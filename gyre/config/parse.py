"""From what the user wrote to a `JobSpec`, with every mistake as one sentence.

The sentence names the path, what was given, what was expected, and the nearest known key. Sources are
mappings, OmegaConf objects, YAML files, and `a.b=c` overrides from the command line.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gyre.config.spec import JobSpec
from gyre.errors import ConfigError, nearest


def parse_job(data: Mapping[str, Any]) -> JobSpec:
    """Validate plain data as a job. Raises ConfigError that lists every mistake, the first one first."""
    try:
        return JobSpec.model_validate(dict(data))
    except ValidationError as error:
        raise config_error(error, JobSpec) from None


def config_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """The mistakes as sentences; `prefix` (`roles.actor`) is where the model stands in the job."""
    sentences = [_sentence(item, model, prefix) for item in error.errors(include_url=False)]
    text = "; ".join(sentences)
    return ConfigError(text if text.endswith("?") else f"{text}.", details={"mistakes": sentences})


MOST_VALUES = 1_000_000
"""Of one YAML file. A few lines of aliases of aliases would otherwise be more than any memory holds."""

_BEGUN = -1


class _Loader(yaml.SafeLoader):
    """YAML as 1.2 reads numbers: `1e-6` is a number, which YAML 1.1 takes for text because it has no point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str) -> Any:
    """YAML as plain data. Raises yaml.YAMLError."""
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader: it constructs plain data alone
        if _size(data, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"with its aliases written out it has more than {MOST_VALUES} values")
        return data
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A value that its tag or its form promises and that is none: the 45th of May, say.
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values there are with every alias written out. Raises ValueError for one that is inside itself."""
    if not isinstance(value, dict | list):
        return 1
    found = known.get(id(value))
    if found == _BEGUN:
        raise ValueError("an alias stands inside what it names")
    if found is None:
        known[id(value)] = _BEGUN
        inner = value.values() if isinstance(value, dict) else value
        found = known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    return found


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping. Raises ConfigError where it is missing, unreadable or not a mapping."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}).", hint="Give a path to a YAML file."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text.", hint="Give a path to a YAML file.") from None
    try:
        data = read_yaml(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}: is not YAML{line}: {problem}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}, expected a mapping of keys to values.")
    return data


def plain_config(value: Any) -> dict[str, Any]:
    """A dict, an OmegaConf object, an object with attributes, or a path to YAML, as plain data."""
    if isinstance(value, str | Path):
        return load_yaml(Path(value))
    if type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)
    elif isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        value = vars(value)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"config: {value!r} ({type(value).__name__}) given, "
            "expected a mapping, an OmegaConf object or a path to YAML."
        )
    return {str(key): item for key, item in value.items()}


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`a.b=c` laid over nested mappings; the value is read as YAML. Raises ConfigError without an `=`."""
    result: dict[str, Any] = _copy(data)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            raise ConfigError(f"--set {override}: expected KEY=VALUE with dots between nested keys.")
        at = result
        for depth, key in enumerate(keys[:-1]):
            inner = at.get(key)
            if inner is None:  # absent, or an optional part that was left out
                inner = at[key] = {}
            if not isinstance(inner, dict):
                here = ".".join(keys[: depth + 1])
                raise ConfigError(f"--set {override}: {here} holds {inner!r}, which has no keys below it.")
            at = inner
        try:
            at[keys[-1]] = read_yaml(text)
        except yaml.YAMLError:
            at[keys[-1]] = text  # not YAML, so it is meant as plain text
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _sentence(item: Any, model: type[BaseModel], prefix: str) -> str:
    location = [part for part in item["loc"] if part != "[key]"]
    path = ".".join(filter(None, (prefix.rstrip("."), *map(str, location)))) or "the job"
    given = item.get("input")
    if item["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        return f"{path}: unknown key; {nearest(str(location[-1]), known)}".rstrip(".")
    if item["type"] == "missing":
        return f"{path}: is missing"
    if item["type"] == "model_type":
        return f"{path}: {_shown(given)} given, expected a mapping of keys to values"
    message = item["msg"]
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    message = message[0].lower() + message[1:]
    if item["type"] == "literal_error":
        near = nearest(str(given), re.findall(r"'([^']*)'", item["ctx"]["expected"]))
        message += f"; {near}" if near.startswith("did") else ""
    if item["type"] == "value_error" and isinstance(given, Mapping):
        return f"{path}: {message}"  # settings that do not go together: the message names them
    return f"{path}: {_shown(given)} {message}"


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_at(model: Any, location: list[Any]) -> list[str]:
    named = False  # the part is a name the user chose, or an index
    for part in location:
        fields = getattr(model, "model_fields", None)
        if not named and fields is not None and part in fields:
            annotation = fields[part].annotation
            model = _inner(annotation)
            named = typing.get_origin(annotation) in (dict, list)
        else:
            named = False
    fields = getattr(model, "model_fields", None)
    return list(fields) if fields else []


def _inner(annotation: Any) -> Any:
    """The model inside `X | None`, `dict[str, X]`, `list[X]` or `Annotated[X, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in reversed(typing.get_args(annotation)):
        found = _inner(argument)
        if found is not None:
            return found
    return None
