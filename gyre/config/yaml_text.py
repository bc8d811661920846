"""YAML as users write it: plain data, and the line of each key, so that a mistake can say where it stands.

Invariants:
- *plain data alone*: no tag constructs anything else, and a text of a few lines is no more than `MOST_VALUES` values;
- *a key stands once*: the same key twice in one mapping is refused with both lines, for YAML would take the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gyre.errors import ConfigError

MOST_VALUES = 1_000_000
"""Of one YAML file. A few lines of aliases of aliases would otherwise be more than any memory holds."""

_BEGUN = -1
_MERGE = "tag:yaml.org,2002:merge"
_BOOL, _TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """YAML as 1.2 reads numbers: `1e-6` is a number, which YAML 1.1 takes for text because it has no point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class KeyTwice(yaml.YAMLError):
    """A mapping has a key twice, in the lines `first` and `second`."""

    def __init__(self, key: str, first: int, second: int) -> None:
        super().__init__(f"the key {key!r} stands in line {first} and again in line {second}")
        self.key, self.first, self.second = key, first, second


@dataclass(frozen=True, slots=True)
class YamlText:
    """A text that was read: its data, and the nodes that know their lines."""

    data: Any
    root: yaml.Node | None

    def line_of(self, path: Sequence[str]) -> tuple[int, int]:
        """How many parts of the path are in the text, and the line of the last one that is; (0, 0) for none."""
        node, found = self.root, (0, 0)
        for depth, part in enumerate(path, start=1):
            if isinstance(node, yaml.MappingNode):
                pair = next((pair for pair in node.value if pair[0].value == part), None)
                if pair is None:
                    break
                key, node = pair
                found = depth, key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
                node = node.value[int(part)]
                found = depth, node.start_mark.line + 1
            else:
                break
        return found


def read_yaml_text(text: str) -> YamlText:
    """YAML as plain data, with its lines. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return YamlText(None, None)
        _check_keys(root)
        data = loader.construct_document(root)  # a SafeLoader: it constructs plain data alone
        if _size(data, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"with its aliases written out it has more than {MOST_VALUES} values")
        return YamlText(data, root)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A value that its tag or its form promises and that is none: the 45th of May, say.
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    finally:
        loader.dispose()


def read_yaml(text: str) -> Any:
    """YAML as plain data. Raises yaml.YAMLError."""
    return read_yaml_text(text).data


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping. Raises ConfigError where it is missing, unreadable or not a mapping."""
    data: dict[str, Any] = load_yaml_text(path).data
    return data


def load_yaml_text(path: Path, shown: str | Path = "") -> YamlText:
    """A YAML file, whose data is a mapping; `shown` is what errors call it. Raises ConfigError where it is missing,
    unreadable or not a mapping."""
    shown = shown or path
    try:
        text = path.read_text()
    except OSError as error:
        looked = "" if path.is_absolute() else f", looked up in {Path.cwd()}"
        raise ConfigError(
            f"{shown}: cannot be read ({error.strerror}{looked}).", hint="Give a path to a YAML file."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: is not text.", hint="Give a path to a YAML file.") from None
    try:
        read = read_yaml_text(text)
    except KeyTwice as error:
        raise ConfigError(
            f"{shown}, line {error.second}: the key {error.key!r} stands in line {error.first} already.",
            hint="Keep one of them.",
        ) from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{shown}{line}: is not YAML: {problem}.") from None
    if read.data is None:
        return YamlText({}, None)
    if not isinstance(read.data, dict):
        raise ConfigError(
            f"{shown}, line 1: holds a {type(read.data).__name__}, expected a mapping of keys to values."
        )
    return read


def _check_keys(root: yaml.Node) -> None:
    """Raises KeyTwice for the first mapping that has a key twice. What is merged in (`<<`) may be given again. The keys
    `on`, `off`, `yes` and `no` are made text, as YAML 1.2 has it: YAML 1.1 takes them for true and false."""
    seen, left = {id(root)}, [root]
    while left:
        node = left.pop()
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                inner += [key, value]
                if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                    continue
                if key.tag == _BOOL and key.style is None and key.value.lower() not in ("true", "false"):
                    key.tag = _TEXT
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise KeyTwice(key.value, lines[name], line)
                lines[name] = line
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        for each in inner:
            if id(each) not in seen:
                seen.add(id(each))
                left.append(each)


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
