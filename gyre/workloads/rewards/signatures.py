"""What a reward function's file says of it, read without running the file.

A function that is defined at the top of a file, or of a module that can be found on the import path, shows its
parameters. What a decorator, an assignment or a condition makes of a name shows only when the module runs: such a
function is `None` here, and a process of the pool says what it is (`RewardPool.begin`).

This module must not import the user's modules.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from gyre.errors import ConfigError
from gyre.workloads.rewards.forms import Parameter
from gyre.workloads.rewards.functions import file_of, no_such_function, split_path


@dataclass(frozen=True, slots=True)
class Seen:
    """A function's name, its parameters, and its file and line."""

    name: str
    parameters: tuple[Parameter, ...]
    where: str


class NoFile(ConfigError):
    """The function's file is not on this machine. It may be on others."""


def look_at(path: str, python_path: Iterable[str] = ()) -> Seen | None:
    """What is seen of the function at `path/to/file.py:function` or `package.module:function`; None where it only shows
    when the module runs. Raises NoFile, and ConfigError for a mistake in the path or the file."""
    module, name = split_path(path)
    if module.endswith(".py"):
        file: Path | None = file_of(module)
        assert file is not None
        if not file.is_file():
            others = (
                [f"{file.parent / one.name}" for one in file.parent.glob("*.py")]
                if file.parent.is_dir()
                else []
            )
            near = f" There is {', '.join(sorted(others)[:3])}." if others else ""
            raise NoFile(
                f"config.reward.function: there is no file {file}.", hint=f"Looked for {module!r}.{near}"
            )
    else:
        file = _file_of_module(module, [*python_path, *sys.path])
    return None if file is None else _read(file, path, name)


def lacks_an_import(path: str, python_path: Iterable[str] = ()) -> bool:
    """Whether the file at `path/to/file.py:function` imports at its top what cannot be found, as far as the first name
    of each import goes. A file that is named by its path is in no package, so that it has no `from . import`. The file
    may yet mend that when it runs."""
    module, _ = split_path(path)
    folders = [*python_path, *sys.path]
    file = file_of(module) if module.endswith(".py") else _file_of_module(module, folders)
    if file is None:
        return False
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (OSError, SyntaxError, ValueError):  # `look_at` says so
        return False
    relative = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    if relative and module.endswith(".py"):
        return True
    names = [one.name for node in body if isinstance(node, ast.Import) for one in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    tops = {name.partition(".")[0] for name in names} - sys.modules.keys()
    return any(PathFinder.find_spec(top, folders) is None and not _is_found(top) for top in tops)


def _is_found(top: str) -> bool:
    """By the whole import system, which also knows built-in modules and editable installs."""
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _read(file: Path, path: str, name: str) -> Seen | None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # a null byte, for one, is a ValueError
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"config.reward.function: {file}{line} is no Python: {why}.") from None
    except OSError as error:
        raise ConfigError(f"config.reward.function: {file} cannot be read: {error.strerror}.") from None
    binding = [(node, at_top) for node, at_top in _statements(tree.body) if name in _names(node)]
    if not binding:
        if _hides_names(tree):
            return None
        known = [
            one
            for node, _ in _statements(tree.body)
            for one in _names(node)
            if not isinstance(node, ast.Import)
        ]
        raise no_such_function(path, name, known)
    node, at_top = binding[-1]
    if isinstance(node, ast.ClassDef) and len(binding) == 1:
        raise ConfigError(
            f"config.reward.function: {file}:{node.lineno}: {name} is a class.",
            hint="Name a function, or an instance that can be called.",
        )
    plain = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and at_top and not node.decorator_list
    if not plain or any(not other_at_top for _, other_at_top in binding):
        return None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return Seen(name, tuple(_parameters(node.args)), f"{file}:{node.lineno}")


def _parameters(found: ast.arguments) -> Iterator[Parameter]:
    positional = [(one, "position") for one in found.posonlyargs] + [(one, "name") for one in found.args]
    first_default = len(positional) - len(found.defaults)
    for at, (one, kind) in enumerate(positional):
        yield Parameter(one.arg, kind, at < first_default)
    if found.vararg is not None:
        yield Parameter(found.vararg.arg, "rest", False)
    for one, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield Parameter(one.arg, "name", default is None)
    if found.kwarg is not None:
        yield Parameter(found.kwarg.arg, "named_rest", False)


def _statements(body: Iterable[ast.stmt], at_top: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements of a module, also those under its conditions and loops, and whether each stands at its top."""
    for node in body:
        yield node, at_top
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []), False)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, False)
        for case in getattr(node, "cases", []):
            yield from _statements(case.body, False)


def _names(node: ast.stmt) -> list[str]:
    """What a statement binds, as far as it concerns functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(one.asname or one.name).partition(".")[0] for one in node.names]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        targets = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        targets = [one.optional_vars for one in node.items if one.optional_vars is not None]
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _hides_names(tree: ast.Module) -> bool:
    """Whether names may come from elsewhere: `from x import *`, `__getattr__`, `globals()`, `exec`, a walrus."""
    hidden = {"globals", "exec", "setattr", "vars", "__dict__", "__getattr__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names):
            return True
        if isinstance(node, ast.NamedExpr | ast.Global):
            return True
        if isinstance(node, ast.Name) and node.id in hidden:
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
    return False


def _file_of_module(module: str, folders: list[str]) -> Path | None:
    """Its source file; None where the import system finds it otherwise, or not at all. No package is imported."""
    places = [Path(folder or ".") for folder in folders]
    *packages, last = module.split(".")
    for package in packages:
        inner = [place / package for place in places]
        whole = next((one for one in inner if (one / "__init__.py").is_file()), None)
        places = [whole] if whole is not None else [one for one in inner if one.is_dir()]
    for place in places:
        for file in (place / last / "__init__.py", place / f"{last}.py"):
            if file.is_file():
                return file.resolve()
    return None
