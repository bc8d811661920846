"""Trainer back ends: the default classes of actor, reference and critic for a job that names none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gyre.config import Entrypoint
from gyre.config.plugins import BACKEND
from gyre.errors import GraphError


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end. `classes` has the classes of its roles, as `module:Class`; docs/bring-your-own.md has their contract.

    A role in `reads_model` reads the model of `config.model_path` by itself; its other roles that need the
    initial policy get it from the actor.
    """

    classes: Mapping[str, str]
    reads_model: frozenset[str] = frozenset()

    def class_of(self, role: str) -> Entrypoint | None:
        """The class of a role; None if the back end has none for it. Raises GraphError if its text names no class."""
        if role not in self.classes:
            return None
        try:
            return Entrypoint.parse(self.classes[role])
        except ValueError as error:
            raise GraphError(f"backend: its class for {role} is {self.classes[role]!r}, {error}.") from None


def backend_named(name: str, python_path: Iterable[str] = ()) -> Backend:
    """The back end that an import path or an entry point names. Raises ConfigError if it cannot be loaded."""
    found = BACKEND.load(name, python_path)
    if not isinstance(found, Backend):
        raise GraphError(
            f"backend: {name} is of type {type(found).__name__}, expected a Backend.",
            hint="Make one with gyre.graph.Backend.",
        )
    return found
