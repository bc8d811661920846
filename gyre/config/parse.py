"""From what the user wrote to a `JobSpec`, with every mistake as one sentence.

The sentence names the path, what was given, what was expected, and the nearest known key: one of the same mapping, or
where a key of that name stands in a job. Sources are mappings, OmegaConf objects, YAML files (`yaml_text`), and `a.b=c`
overrides from the command line.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gyre.config.spec import PATTERNS, JobSpec
from gyre.config.yaml_text import load_yaml, read_yaml
from gyre.errors import ConfigError, nearest

_ALIKE = 0.75
"""How similar two keys must be for one to be taken for a typo of the other (`difflib`'s ratio)."""

_OF_OTHERS = {
    "learning_rate": "config.optim.lr",
    "max_tokens": "config.sampling.max_new_tokens",
    "max_response_length": "config.sampling.max_new_tokens",
    "max_completion_length": "config.sampling.max_new_tokens",
    "num_generations": "config.sampling.n",
    "rollout_n": "config.sampling.n",
    "kl_coef": "config.loss.kl_loss_coef",
    "entropy_coef": "config.loss.entropy_coeff",
    "train_batch_size": "run.prompts_per_step",
    "total_training_steps": "run.steps",
    "max_steps": "run.steps",
    "save_freq": "run.checkpoint_every",
    "test_freq": "run.evaluate_every",
    "compute_score": "config.reward.function",
}
"""Keys of other trainers, and the ones that they stand for here."""

_MOST_PLACES = 3
"""Of one key, that a sentence lists."""


def parse_job(data: Mapping[str, Any]) -> JobSpec:
    """Validate plain data as a job. Raises ConfigError that lists every mistake, the first one first."""
    try:
        return JobSpec.model_validate(dict(data))
    except ValidationError as error:
        raise config_error(error, JobSpec) from None


def config_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """The mistakes as sentences; `prefix` (`roles.actor`) is where the model stands in the job. The details have them
    as `mistakes`, and as `keys` the parts of each one's key."""
    # A default that follows from a key that is wrong is no mistake of its own.
    items = [item for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"]
    items.sort(key=lambda item: item["type"] == "missing")  # a key that has another name is also missing
    sentences = [_sentence(item, model, prefix) for item in items]
    above = [part for part in prefix.split(".") if part]
    keys = [above + [str(part) for part in item["loc"] if part != "[key]"] for item in items]
    text = "; ".join(sentences)
    return ConfigError(
        text if text.endswith("?") else f"{text}.", details={"mistakes": sentences, "keys": keys}
    )


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


def with_home(value: Any) -> Any:
    """`value` with texts that begin with `~/`, in whatever depth, in the user's home."""
    if isinstance(value, dict):
        return {key: with_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


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
        joined = f"{path.rpartition('.')[0].rpartition('.')[2]}_{location[-1]}"
        if joined in _places():  # `model.path` for `model_path`
            return f"{path}: unknown key; did you mean {min(_places()[joined], key=len)!r}?"
        return f"{path}: unknown key; {_meant(str(location[-1]), _keys_at(model, location[:-1]))}".rstrip(".")
    if item["type"] == "missing":
        return f"{path}: is missing"
    if item["type"] in ("model_type", "dict_type"):
        shown = "nothing" if given is None else _shown(given)
        return f"{path}: {shown} given, expected a mapping of keys to values"
    if item["type"] == "invalid_key":
        return f"{path}: a key of type {type(location[-1]).__name__}, expected text"
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] in PATTERNS:
        expected, usable = PATTERNS[item["ctx"]["pattern"]]
        near = re.sub(usable, "-", str(given)).strip("-") if usable else ""
        return f"{path}: {_shown(given)} given, expected {expected}" + (
            f"; did you mean {near!r}?" if near and near != given else ""
        )
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
    text = "null" if given is None else repr(given)
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


@cache
def _places() -> dict[str, list[str]]:
    """Where each key of a job and of Gyre's own sections below `config` stands, by its last part."""
    from gyre.config.sections import WorkloadSettings  # it imports this module

    found: dict[str, list[str]] = {}

    def walk(kind: type[BaseModel], above: str) -> None:
        for key, field in kind.model_fields.items():
            found.setdefault(key, []).append(f"{above}{key}")
            inner = _inner(field.annotation)
            many = "<name>." if _is_mapping(field.annotation) else ""
            if inner is not None and above.count(".") < 3:
                walk(inner, f"{above}{key}.{many}")

    walk(JobSpec, "")
    walk(WorkloadSettings, "config.")
    return found


def _meant(key: str, known: list[str]) -> str:
    """What an unknown key may be meant for: one of the `known` that is much alike, or a key of that name, or nearly
    that name, that stands elsewhere in a job."""
    alike = difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
    if key in _OF_OTHERS and not alike:
        return f"did you mean {_OF_OTHERS[key]!r}?"
    name = key if key in _places() else next(iter(difflib.get_close_matches(key, _places(), 1, _ALIKE)), "")
    paths = _places().get(name, [])
    if (alike and name != key) or not 0 < len(paths) <= _MOST_PLACES:
        return nearest(key, known)
    return f"did you mean {' or '.join(map(repr, paths))}?"


def _is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (dict, list)


def _inner(annotation: Any) -> Any:
    """The model inside `X | None`, `dict[str, X]`, `list[X]` or `Annotated[X, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in reversed(typing.get_args(annotation)):
        found = _inner(argument)
        if found is not None:
            return found
    return None
