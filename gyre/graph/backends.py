"""Trainer back ends as records: what each is and can, asked wherever somebody would compare its name.

Gyre's own stand in the package of each, in a module `kind` that imports no torch. This module must not know their
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.config import Entrypoint
from gyre.config.plugins import BACKEND
from gyre.errors import GraphError


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end. `classes` has the classes of its roles, as `module:Class`; docs/bring-your-own.md has their contract.

    A role in `reads_model` reads the model of `config.model_path` by itself; its other roles that need the
    initial policy get it from the actor. The further fields are what Gyre's own say of themselves; a `name` is theirs
    alone.
    """

    classes: Mapping[str, str]
    reads_model: frozenset[str] = frozenset()
    name: str = ""
    package: str = ""
    """The package of its classes, whatever module of it a job names them by."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """What its classes import, by the module's name the distribution's."""
    extra: tuple[str, str] = ("", "")
    """The extra of `gyre-rl` that brings it, and what for; "" for none of its own."""
    section: str = ""
    """The section of `config` that says how its ranks compute; "" for none."""
    shards: bool = False
    """Its ranks share a model, so that on a model's folder critic and reference are its own beside its actor."""
    trains_adapters: bool = False
    by_transformers: bool = False
    """transformers computes what Gyre's own decoder does not."""
    lacks: frozenset[str] = frozenset()
    """The rows of `gyre.models.support` whose models it does not train."""
    unfit: Callable[[Any], str] = lambda shape: ""
    """Why it does not train a model of this `Architecture`; "" where it does."""
    unfit_layout: Callable[[Any, Any], Iterator[str]] = lambda shape, settings: iter(())
    """How the layout of the ranks in the `WorkloadSettings` does not fit a model, each a sentence with the key."""
    copy_of: Callable[[Any], int] = lambda settings: 1
    """How many ranks hold one copy of the model."""
    writer: str = ""
    """Who wrote its checkpoints, for people."""
    checkpoints: tuple[str, str] = ("", "")
    """The file that each of its checkpoints has, and how the `format` in it begins; "" for that of nobody else."""
    memory: str = ""
    """The module that foretells its ranks' memory, with functions `ranks` and `host`; "" where it is not foretold."""
    export: str = ""
    """The function that writes a checkpoint's policy as a model's folder, as `module:function`: of the checkpoint, the
    folder to write, and by name `dtype`, `trust` and `adapter`."""
    model_in: str = ""
    """The function that returns what a checkpoint says of its model, as `module:function`: of the folder, and `trust`
    by name; "" where only the checkpoint's tensors say it."""

    def class_of(self, role: str) -> Entrypoint | None:
        """The class of a role; None if the back end has none for it. Raises GraphError if its text names no class."""
        if role not in self.classes:
            return None
        try:
            return Entrypoint.parse(self.classes[role])
        except ValueError as error:
            raise GraphError(f"backend: its class for {role} is {self.classes[role]!r}, {error}.") from None


def backend_named(name: str, python_path: Iterable[str] = ()) -> Backend:
    """One of Gyre's, or the back end that an import path or an entry point names. Raises ConfigError if it cannot be
    loaded."""
    found = BACKEND.load(name, python_path)
    if not isinstance(found, Backend):
        raise GraphError(
            f"backend: {name} is of type {type(found).__name__}, expected a Backend.",
            hint="Make one with gyre.graph.Backend.",
        )
    return found


def back_ends() -> list[Backend]:
    """Gyre's own."""
    return [backend_named(name) for name in BACKEND.built_in]


def back_end_of(module: str, among: Sequence[Backend] | None = None) -> Backend | None:
    """The one of Gyre's whose package has this module; None where none has."""
    return next((one for one in among or back_ends() if f"{module}.".startswith(f"{one.package}.")), None)
