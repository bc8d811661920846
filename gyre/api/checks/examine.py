"""Looking into the user's own code, in the process that imports it: see `code`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gyre.api.checks.code import TRYING
from gyre.api.definition.entrypoints import check_entrypoints, is_own, load_class
from gyre.api.definition.signatures import BROUGHT, CALLS_OF_A_CODEC, check_call
from gyre.config import TRAINER, Entrypoint, JobSpec
from gyre.config.job_plugins import plugins_of
from gyre.config.plugins import (
    ADVANTAGE,
    AGENT,
    BACKEND,
    CODEC,
    ENGINE,
    ENVIRONMENT,
    LOSS,
    RECIPE,
    SINK,
    TASK,
    PluginKind,
    on_path,
)
from gyre.config.sections import WorkloadSettings, read_section
from gyre.config.sections.workload import refuse_near_names
from gyre.errors import ConfigError, GyreError
from gyre.graph.integrations import reads_sections
from gyre.users_code import said_where
from gyre.workloads.algorithms.options import with_options

_SINK = ("step", "evaluation", "warning", "flush", "close")
_TASK = {"prompt": ("index",), "held_out": ("count",), "prompt_text": ("group",), "answer_of": ("sample",)}

_ENVIRONMENT = {"reset": ("task", "seed"), "step": ("message",)}

_METHODS: Mapping[PluginKind, Iterable[str]] = {
    TASK: _TASK,
    CODEC: CALLS_OF_A_CODEC,
    SINK: _SINK,
    ENVIRONMENT: _ENVIRONMENT,
}
"""What each must have."""


def examine(spec: JobSpec, doing: Callable[[str], None] = lambda text: None) -> list[str]:
    """Import what a compiled job names of the user's own, and see that it is what it is to be. `doing` hears what is
    looked into before it is. Returns warnings and notes; raises ConfigError."""
    check_plugins(spec, doing)
    for role, given in spec.roles.items():
        if given.entrypoint is not None and not is_own(role, given.entrypoint):
            doing(f"roles.{role}.entrypoint: module {given.entrypoint.file or given.entrypoint.module}")
            load_class(given.entrypoint, spec.python_path, path=f"roles.{role}.entrypoint")
    classes = check_entrypoints(spec, own=False)
    check_class_sections(spec, classes)
    if spec.staleness.function is not None:
        doing(f"staleness.policy: module {spec.staleness.function.module}")
        _check_staleness(spec, spec.staleness.function)
    return list(_check_prompts(spec, doing, brings_own=TRAINER in classes))


def import_graph(spec: JobSpec, doing: Callable[[str], None]) -> list[str]:
    """Import the job's own recipe and back end, which compiling it does. Raises ConfigError."""
    for kind, name in plugins_of(spec):
        if kind in (RECIPE, BACKEND):
            doing(f"{kind.setting}: module {name.partition(':')[0]}")
            _load(kind, name, spec)
    return []


def _load(kind: PluginKind, name: str, spec: JobSpec) -> Any:
    """What the name stands for. Raises ConfigError with file and line of the user's own code that failed."""
    try:
        return kind.load(name, spec.python_path)
    except ConfigError as error:
        cause = error.__cause__
        if cause is None:
            raise
        missing = {"import_of": cause.name or ""} if isinstance(cause, ModuleNotFoundError) else {}
        raise ConfigError(
            f"{kind.setting}: {name!r} cannot be loaded: its module does not import: {said_where(cause)}.",
            hint=error.hint,
            details=missing,
        ) from cause


def check_class_sections(spec: JobSpec, classes: Mapping[str, type]) -> None:
    """The sections of `config` that the roles' classes name as their own, in `BaseWorkload.SECTIONS`. Raises
    ConfigError."""
    own = {}
    for role, cls in classes.items():
        for name, model in getattr(cls, "SECTIONS", {}).items():
            if name in WorkloadSettings.model_fields:
                raise ConfigError(
                    f"roles.{role}.entrypoint: {cls.__qualname__}.SECTIONS names {name!r}, a section of Gyre's.",
                    hint="Give your section another name.",
                )
            own[name] = model
            read_section(model, spec.config, name)
    refuse_near_names(spec.config, {**WorkloadSettings.model_fields, **own} if reads_sections(spec) else own)


def check_plugins(spec: JobSpec, doing: Callable[[str], None] = lambda text: None) -> None:
    """Import what the job names of the user's own, and see that it is what it is to be. Raises ConfigError. Recipes and
    back ends were imported when the job was compiled."""
    settings = WorkloadSettings.read(spec.config) if reads_sections(spec) else WorkloadSettings()
    task = settings.task.options if settings.task is not None else {}
    agent = settings.agent.options if settings.agent is not None else {}
    options = {
        LOSS: ("config.loss.loss_options", settings.loss.loss_options),
        ADVANTAGE: ("config.loss.adv_options", settings.loss.adv_options),
        TASK: ("config.task.options", task),
        ENGINE: ("", {}),
    }
    for sink in spec.observe.sinks:
        if sink.kind not in SINK.built_in:
            found = _load(SINK, sink.kind, spec)
            check_call(
                SINK.setting, found, sink.kind, ("job",), [*sink.options], hint="See docs/bring-your-own.md."
            )
    for kind, name in plugins_of(spec):
        doing(f"{kind.setting}: module {name.partition(':')[0]}")
        found = _load(kind, name, spec)
        if kind is AGENT:
            check_call(kind.setting, found, name, ("session",), agent, hint="See docs/agents.md.")
        elif kind in options:
            with_options(kind, name, *options[kind], spec.python_path)
        if kind.group in BROUGHT:
            positional, keywords = BROUGHT[kind.group]
            more = options[kind][1] if kind in options else {}
            check_call(
                kind.setting, found, name, positional, [*keywords, *more], hint="See docs/bring-your-own.md."
            )
        remembers = settings.agent is not None and settings.agent.recovery == "snapshot"
        _check_shape(kind, name, found, agent if kind is ENVIRONMENT else task, remembers=remembers)


def _check_shape(
    kind: PluginKind, name: str, found: Any, given: Mapping[str, Any], *, remembers: bool
) -> None:
    """Raises ConfigError where a task, codec, sink or environment lacks a method that it must have, or has one that
    cannot be called as Gyre calls it. `given` are the job's options for a task or an environment, which is kept by
    snapshots if it `remembers`."""
    for method in _METHODS.get(kind, ()):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"{kind.setting}: {name} has no {method}(), which a {kind.noun} must have.")
    if kind is SINK and hasattr(found, "incident") != hasattr(found, "ended"):
        raise ConfigError(
            f"{kind.setting}: {name} has one of incident() and ended().",
            hint="A sink that is told of incidents is told of the job's end too: give it both.",
        )
    if kind is ENVIRONMENT:
        if hasattr(found, "snapshot") != hasattr(found, "restore"):
            raise ConfigError(
                f"{kind.setting}: {name} has one of snapshot() and restore(), and needs the other."
            )
        if remembers and not hasattr(found, "snapshot"):
            raise ConfigError(
                f"config.agent.recovery: 'snapshot' given, but {name} has no snapshot() and restore().",
                hint="Give it both, or take 'replayable' or 'restart'.",
            )
        check_call(kind.setting, found, name, (), given, hint="See docs/agents.md.")
        _check_methods(kind.setting, found, _ENVIRONMENT)
    if kind is TASK:
        check_call(kind.setting, found, name, ("config",), given, hint="See docs/bring-your-own.md.")
        _check_methods(kind.setting, found, _TASK)
    if kind is CODEC:
        for method, (positional, keywords) in CALLS_OF_A_CODEC.items():
            check_call(kind.setting, getattr(found, method), f"{name}.{method}", positional, keywords)


def _check_methods(key: str, cls: type, methods: Mapping[str, tuple[str, ...]]) -> None:
    for method, positional in methods.items():
        if inspect.isclass(cls):
            check_call(key, getattr(cls, method), f"{cls.__name__}.{method}", ("self", *positional))


def _check_staleness(spec: JobSpec, given: Entrypoint) -> None:
    import importlib

    with on_path(spec.python_path):
        try:
            found: Any = importlib.import_module(given.module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"staleness.policy: module {given.module} does not import: {said_where(error)}."
            ) from error
    for part in given.name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"staleness.policy: module {given.module} has no function {given.name!r}.")
    check_call("staleness.policy", found, given.name, ("ages",), hint="It gets Ages, and returns a Verdict.")


def _check_prompts(spec: JobSpec, doing: Callable[[str], None], *, brings_own: bool) -> Any:
    """The class of `run.data`, or a task of the user's own: its methods, its first prompt and a held-out one."""
    settings = WorkloadSettings.read(spec.config) if reads_sections(spec) else WorkloadSettings()
    if brings_own:
        return  # a trainer of the user's own may have its prompts from elsewhere
    options: Mapping[str, Any] = {}
    if spec.run.data is not None:
        key, name = "run.data", spec.run.data
        doing(f"{key}: module {name.partition(':')[0]}")
        cls = load_class(Entrypoint.parse(name), spec.python_path, path=key)
        for method in ("prompt", "held_out"):
            if not callable(getattr(cls, method, None)):
                raise ConfigError(
                    f"{key}: {name} has no {method}(), which the trainer calls.",
                    hint="It has prompt(index) and held_out(count); see docs/writing-workloads.md.",
                )
        check_call(key, cls, cls.__name__, ("config",), hint="It is constructed with the job's config.")
        _check_methods(key, cls, {method: _TASK[method] for method in ("prompt", "held_out")})
        if name.startswith("gyre."):
            return
    elif settings.task is not None and settings.task.name not in TASK.built_in and settings.data is None:
        key, name, options = "config.task.name", settings.task.name, settings.task.options
        cls = TASK.load(name, spec.python_path)
    else:
        return
    doing(f"{key}: {name} {TRYING}")
    with on_path(spec.python_path):
        made = _tried(key, name, "cannot be constructed", lambda: cls(spec.config, **options))
        first = _tried(key, name, "gives no prompt 0", lambda: made.prompt(0))
        for attribute in ("id", "prompt_ids"):
            if not hasattr(first, attribute):
                raise ConfigError(
                    f"{key}: {name}.prompt(0) gives a {type(first).__name__}, expected a Group.",
                    hint="Groups are gyre.rollouts.Group objects; see docs/writing-workloads.md.",
                )
        if spec.run.evaluate_every:
            held_out = _tried(key, name, "gives no held-out prompts", lambda: made.held_out(1))
            if not held_out:
                raise ConfigError(
                    f"run.evaluate_every: {spec.run.evaluate_every} given, but {name} holds no prompt out.",
                    hint="Give some in held_out(count), or set run.evaluate_every to 0.",
                )
    yield from ()


def _tried(key: str, name: str, problem: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except GyreError as error:
        raise ConfigError(f"{key}: {name} {problem}: {error.message}", hint=error.hint) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {name} {problem}: {said_where(error)}.") from error
