"""Entrypoints: from a class as the user gave it to its place, and from its place to the class.

Invariants:
- *nothing imported early*: naming a class by text imports nothing; `check_entrypoints` and `load_class` import;
- *found everywhere*: an `Entrypoint` together with the job's `python_path` is enough to import the class in any
  process of the cluster that sees the same files.

This module must not know how processes are started.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from gyre.config import TRAINER, Entrypoint, JobSpec
from gyre.config.plugins import on_path
from gyre.errors import ConfigError, nearest
from gyre.graph.compile import compile_job
from gyre.graph.elements import Dcg, Dispatch
from gyre.workloads.protocols import REQUIRED, PublishesModel, methods_of

_TORCH = "gyre.workloads.torch."

FILE_MODULE = "gyre_job_file_"
"""Prefix of the names of modules that were loaded from a file and not by name."""


# -- naming a class ---------------------------------------------------------------------------------


def entrypoint_of(path: str, module: Any, name: Any = None) -> Entrypoint:
    """An entrypoint from `(module, cls)`, one text, or a class. `path` is where it stands in the job.

    Raises ConfigError for a class that no other process could import.
    """
    if isinstance(module, Entrypoint) and name is None:
        return module
    if isinstance(module, type):
        if name is not None:
            raise ConfigError(f"{path}: a class and {name!r} given, expected the class alone.")
        return _of_class(path, module)
    if isinstance(module, ModuleType) and isinstance(name, str):
        module = module.__name__
    if not isinstance(module, str) or not (name is None or isinstance(name, str)):
        given = repr(module) if name is None else f"{module!r}, {name!r}"
        raise ConfigError(
            f'{path}: {given} given, expected a module and a class name, "package.module:Class", or a class.'
        )
    try:
        return Entrypoint.parse(module) if name is None else Entrypoint(module=module, name=name)
    except ValidationError:
        raise ConfigError(
            f"{path}: {module!r}, {name!r} given, expected the dotted name of a module and of a class in it."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {module!r} given, {error}.") from None


def _of_class(path: str, cls: type) -> Entrypoint:
    name, module = cls.__qualname__, cls.__module__
    if "<" in name:
        raise ConfigError(
            f"{path}: {name} is defined inside a function, where no other process can import it.",
            hint="Move the class to the module's top level.",
        )
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if module == "__main__":
        specification = getattr(loaded, "__spec__", None)
        if specification is not None and specification.name:
            return Entrypoint(module=specification.name.removesuffix(".__main__"), name=name)
        if file is None or not Path(file).is_file():
            raise ConfigError(
                f"{path}: {name} is defined in an interactive session, where no other process can import it.",
                hint="Move the class to the top level of a module in a file.",
            )
        return Entrypoint(module="__main__", name=name, file=str(Path(file).resolve()))
    if module.startswith(FILE_MODULE) and file is not None:
        return Entrypoint(module="__main__", name=name, file=str(Path(file).resolve()))
    return Entrypoint(module=module, name=name)


def import_roots(entrypoints: Iterable[Entrypoint]) -> list[str]:
    """Returns the folders that the user's modules are imported from, without those that every Python has.

    Finds the top-level package only, which runs none of its code. Modules that are not there yet are skipped.
    """
    roots: dict[str, None] = {}
    for entrypoint in entrypoints:
        root = (
            Path(entrypoint.file).resolve().parent
            if entrypoint.file is not None
            else _root_of(entrypoint.module.partition(".")[0])
        )
        if root is not None and not _is_installed(root):
            roots[str(root)] = None
    return list(roots)


def _root_of(package: str) -> Path | None:
    if package == "gyre":
        return None
    loaded = sys.modules.get(package)
    specification = getattr(loaded, "__spec__", None)
    if specification is None:
        try:
            specification = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
    if specification is None:
        return None
    places = specification.submodule_search_locations
    if places:
        return Path(next(iter(places))).resolve().parent
    origin = specification.origin
    return Path(origin).resolve().parent if origin and specification.has_location else None


def _is_installed(folder: Path) -> bool:
    if {"site-packages", "dist-packages"} & set(folder.parts):
        return True
    return folder in {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")}


# -- importing it -----------------------------------------------------------------------------------


def check_entrypoints(spec: JobSpec, *, own: bool = True) -> dict[str, type]:
    """Import the class of every role and see that it has what its role calls. Returns the classes by role.

    Without `own`, those of Gyre's that need torch are only seen to be there: our tests hold them to their protocols,
    and torch takes longer to import than all the rest. Raises ConfigError that names the role, the module and the
    original error.
    """
    compiled = compile_job(spec)
    classes = {}
    for role, found in compiled.spec.roles.items():
        assert found.entrypoint is not None
        if not own and _is_own(role, found.entrypoint):
            continue
        classes[role] = load_class(
            found.entrypoint, compiled.spec.python_path, path=f"roles.{role}.entrypoint"
        )
    for role, methods in _called(compiled.dcg, classes[TRAINER]).items():
        if role not in classes:
            continue
        missing = [name for name in methods if not _defines(classes[role], name)]
        if missing:
            shown = " and ".join(f"{name}()" for name in missing)
            why = f"recipe {spec.recipe!r} calls" if spec.recipe and missing != ["fit"] else "its role needs"
            raise ConfigError(
                f"roles.{role}.entrypoint: {compiled.spec.roles[role].entrypoint} has no {shown}, which {why}.",
                hint=f"Define {'them' if len(missing) > 1 else 'it'} in {classes[role].__name__}"
                + (
                    f"; see {REQUIRED[role].__name__} in gyre.workloads.protocols."
                    if role in REQUIRED
                    else "."
                ),
                details={"missing": missing},
            )
    return classes


def _is_own(role: str, entrypoint: Entrypoint) -> bool:
    """Whether it is Gyre's class of this role in plain torch, and both are installed. Imports neither."""
    named = entrypoint.name in (f"Torch{role.title()}", f"Torch{role.title()}Model")
    if not (named and entrypoint.module.startswith(_TORCH)) or importlib.util.find_spec("torch") is None:
        return False
    found = importlib.util.find_spec(entrypoint.module)
    if found is None or found.origin is None:
        return False
    return (
        re.search(rf"^class {re.escape(entrypoint.name)}\b", Path(found.origin).read_text(), re.M) is not None
    )


def _called(dcg: Dcg, trainer: type) -> dict[str, list[str]]:
    """By role, the methods that are called: the graph's operators, and what the built-in trainer calls beside them."""
    called: dict[str, dict[str, None]] = {TRAINER: {"fit": None}}
    for operator in dcg.operators:
        if operator.dispatch not in (Dispatch.CONTROLLER, Dispatch.PLANE):
            called.setdefault(operator.role, {})[operator.method] = None
    if dcg.recipe is not None and _is_built_in(trainer):
        for role in called.keys() & REQUIRED.keys():
            called[role] |= dict.fromkeys(methods_of(REQUIRED[role]))
        if any(operator.dispatch is Dispatch.PLANE for operator in dcg.operators):
            called["actor"] |= dict.fromkeys(methods_of(PublishesModel))
    return {role: list(methods) for role, methods in called.items()}


def _is_built_in(trainer: type) -> bool:
    """Whether the class is the built-in trainer or a subclass."""
    from gyre.workloads.trainer.loop import GraphTrainer

    return issubclass(trainer, GraphTrainer)


def load_class(entrypoint: Entrypoint, python_path: Iterable[str] = (), path: str = "entrypoint") -> type:
    """Import a class in this process. Raises ConfigError where it is not there or is no class."""
    with on_path(python_path):
        module = _load_module(entrypoint, path)
    found: Any = module
    at = entrypoint.file or entrypoint.module
    for part in entrypoint.name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if isinstance(value, type)]
            raise ConfigError(f"{path}: {at} has no {entrypoint.name!r}; {nearest(part, known)}".rstrip("; "))
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ConfigError(f"{path}: {entrypoint} is a {type(found).__name__}, expected a class.")
    return found


def load_file(file: Path) -> ModuleType:
    """Run a Python file as a module of its own name, once more at each call. Its errors pass through."""
    name = FILE_MODULE + blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()
    specification = importlib.util.spec_from_file_location(name, file.resolve())
    if specification is None or specification.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        specification.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


def _load_module(entrypoint: Entrypoint, path: str) -> ModuleType:
    if entrypoint.file is not None:
        main = sys.modules.get("__main__")
        main_file = getattr(main, "__file__", None)
        if main is not None and main_file and Path(main_file).resolve() == Path(entrypoint.file).resolve():
            return main
    try:
        if entrypoint.file is not None:
            return load_file(Path(entrypoint.file))
        return importlib.import_module(entrypoint.module)
    except (Exception, SystemExit) as error:
        at = entrypoint.file or entrypoint.module
        raise ConfigError(
            f"{path}: module {at} does not import: {type(error).__name__}: {error}.",
            hint=_import_hint(error, entrypoint),
            details={"traceback": traceback.format_exc()},
        ) from error


def _import_hint(error: BaseException, entrypoint: Entrypoint) -> str:
    missing = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and missing and entrypoint.module.startswith(missing):
        return "Check the name, or add the folder that holds it with python_path."
    return ""


def _defines(cls: type, name: str) -> bool:
    """Whether a class has a method of its own, and not just a base's that does nothing or says it is missing."""
    from gyre.workloads.base import BaseTrainer, BaseWorkload

    found = getattr(cls, name, None)
    return callable(found) and found not in (vars(BaseTrainer).get(name), vars(BaseWorkload).get(name))
