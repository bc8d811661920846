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
import sys
import sysconfig
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from gyre.api.definition.signatures import check_call, check_made_without_arguments, check_method
from gyre.config import (
    AGENT_ROLE,
    LOCAL_ROLLOUT,
    ROLLOUT_MANAGER,
    SPARE_ROLLOUT,
    TRAINER,
    Entrypoint,
    JobSpec,
)
from gyre.config.plugins import on_path
from gyre.errors import ConfigError, nearest
from gyre.extras import how_to_install
from gyre.graph.compile import compile_job
from gyre.graph.elements import Dcg, Dispatch
from gyre.users_code import said_where
from gyre.workloads.protocols import REQUIRED, PublishesModel, methods_of

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
    """Import the class of every role and see that it has what its role calls, with signatures that can be called so.
    Returns the classes by role.

    Without `own`, Gyre's are left out (`is_own`): our tests hold them to their protocols, and importing them takes
    longer than all the rest. Raises ConfigError that names the role, the module and the original error.
    """
    compiled = compile_job(spec)
    classes = {}
    for role, found in compiled.spec.roles.items():
        assert found.entrypoint is not None
        if not own and is_own(role, found.entrypoint):
            continue
        key = f"roles.{role}.entrypoint"
        classes[role] = load_class(found.entrypoint, compiled.spec.python_path, path=key)
        check_made_without_arguments(key, classes[role])
    built_in = TRAINER not in classes or _is_built_in(classes[TRAINER])
    for role, methods in _called(compiled.dcg, built_in=built_in).items():
        if role not in classes:
            continue
        key, cls = f"roles.{role}.entrypoint", classes[role]
        missing = [name for name in methods if not _defines(cls, name)]
        if missing:
            shown = " and ".join(f"{name}()" for name in missing)
            why = f"recipe {spec.recipe!r} calls" if spec.recipe and missing != ["fit"] else "its role needs"
            raise ConfigError(
                f"{key}: {compiled.spec.roles[role].entrypoint} has no {shown}, which {why}.",
                hint=f"Define {'them' if len(missing) > 1 else 'it'} in {cls.__name__}"
                + (
                    f"; see {REQUIRED[role].__name__} in gyre.workloads.protocols."
                    if role in REQUIRED
                    else "."
                ),
                details={"missing": missing},
            )
        if role == TRAINER:
            check_call(key, cls.fit, f"{cls.__name__}.fit", ("self",))  # type: ignore[attr-defined]
        elif built_in and compiled.dcg.recipe is not None and role in REQUIRED:
            for name in methods:
                protocol = PublishesModel if name == "publish_model" else REQUIRED[role]
                check_method(key, cls, protocol, name)
    return classes


_PACKAGES = {
    TRAINER: ("gyre.workloads.trainer.loop:GraphTrainer",),
    ROLLOUT_MANAGER: ("gyre.workloads.rollout_vertices:RolloutManagerVertex",),
    AGENT_ROLE: ("gyre.agents.vertex:AgentWorker",),
    "actor": (
        "gyre.workloads.torch.actor:TorchActor",
        "gyre.workloads.megatron.actor:MegatronActor",
        "gyre.workloads.fsdp.actor:FsdpActor",
    ),
    "critic": (
        "gyre.workloads.torch.critic:TorchCritic",
        "gyre.workloads.megatron.critic:MegatronCritic",
        "gyre.workloads.fsdp.critic:FsdpCritic",
    ),
    "rollout": (
        "gyre.workloads.rollout_vertices:RolloutInstance",
        "gyre.workloads.torch.rollout:TorchRollout",
    ),
    "reference": (
        "gyre.workloads.torch.reference:TorchReference",
        "gyre.workloads.megatron.reference:MegatronReference",
        "gyre.workloads.fsdp.reference:FsdpReference",
    ),
    "reward": (
        "gyre.agents.reward:SessionReward",
        "gyre.workloads.rewards.workloads:ExactMatchReward",
        "gyre.workloads.rewards.workloads:PythonReward",
        "gyre.workloads.torch.reward_model:TorchRewardModel",
        "gyre.workloads.megatron.reward_model:MegatronRewardModel",
        "gyre.workloads.fsdp.reward_model:FsdpRewardModel",
    ),
}
"""By role, Gyre's classes that fill it, where they are defined. The package above exports them too."""


def is_own(role: str, entrypoint: Entrypoint) -> bool:
    """Whether it is a class of Gyre's that fills this role. Imports nothing."""
    role = (
        "rollout"
        if role in (LOCAL_ROLLOUT, SPARE_ROLLOUT) or (role.startswith("rollout_") and role not in _PACKAGES)
        else role
    )
    for known in _PACKAGES.get(role, ()):
        module, _, name = known.partition(":")
        if entrypoint.name == name and entrypoint.module in (module, module.rpartition(".")[0]):
            return True
    return False


def _called(dcg: Dcg, *, built_in: bool) -> dict[str, list[str]]:
    """By role, the methods that are called: the graph's operators, and what the built-in trainer calls beside them."""
    called: dict[str, dict[str, None]] = {TRAINER: {"fit": None}}
    for operator in dcg.operators:
        if operator.dispatch not in (Dispatch.CONTROLLER, Dispatch.PLANE):
            called.setdefault(operator.role, {})[operator.method] = None
    if dcg.recipe is not None and built_in:
        for role in called.keys() & REQUIRED.keys():
            called[role] |= dict.fromkeys(methods_of(REQUIRED[role]))
        if any(operator.dispatch is Dispatch.PLANE for operator in dcg.operators):
            called["actor"] |= dict.fromkeys(methods_of(PublishesModel))
    return {role: list(methods) for role, methods in called.items()}


def _is_built_in(trainer: type) -> bool:
    """Whether the class is the built-in trainer or a subclass. A class of the user's that is one has imported it."""
    loop = sys.modules.get("gyre.workloads.trainer.loop")
    return loop is not None and issubclass(trainer, loop.GraphTrainer)


def load_class(entrypoint: Entrypoint, python_path: Iterable[str] = (), path: str = "entrypoint") -> type:
    """Import a class in this process. Raises ConfigError where it is not there or is no class."""
    with on_path(python_path):
        module = _load_module(entrypoint, path)
    found: Any = module
    at = entrypoint.file or entrypoint.module
    for part in entrypoint.name.split("."):
        if not hasattr(found, part):
            known = getattr(found, "__all__", None) or [
                key for key, value in vars(found).items() if isinstance(value, type)
            ]
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
    at = entrypoint.file or entrypoint.module
    if entrypoint.file is not None and not Path(entrypoint.file).is_file():
        raise ConfigError(f"{path}: {at}: no such file.")
    try:
        if entrypoint.file is not None:
            return load_file(Path(entrypoint.file))
        return importlib.import_module(entrypoint.module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}: module {at} does not import: {said_where(error)}.",
            hint=_import_hint(error, entrypoint),
            details={"import_of": getattr(error, "name", None) or ""}
            if isinstance(error, ModuleNotFoundError)
            else {},
        ) from error


def _import_hint(error: BaseException, entrypoint: Entrypoint) -> str:
    missing = getattr(error, "name", None)
    if isinstance(error, ModuleNotFoundError) and missing and entrypoint.module.startswith(missing):
        return "Check the name, or add the folder that holds it with python_path."
    return how_to_install(missing) if isinstance(error, ModuleNotFoundError) else ""


def _defines(cls: type, name: str) -> bool:
    """Whether a class has a method of its own, and not just a base's that does nothing or says it is missing."""
    from gyre.workloads.base import BaseTrainer, BaseWorkload

    found = getattr(cls, name, None)
    return callable(found) and found not in (vars(BaseTrainer).get(name), vars(BaseWorkload).get(name))
