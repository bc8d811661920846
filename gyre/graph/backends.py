"""Trainer back ends: which classes train, refer and criticise where a job names none for these roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gyre.config import Entrypoint
from gyre.config.plugins import BACKEND
from gyre.errors import GraphError


@dataclass(frozen=True, slots=True)
class Backend:
    """`classes` are those of the roles that it fills, as `module:Class`; what they must do: docs/bring-your-own.md.

    A role in `reads_model` reads the model of `config.megatron.model_path` by itself; the others of its roles that need
    the policy that training begins with are given it by the actor.
    """

    classes: Mapping[str, str]
    reads_model: frozenset[str] = frozenset()

    def class_of(self, role: str) -> Entrypoint | None:
        """None where it does not fill the role. Raises GraphError for what names no class."""
        if role not in self.classes:
            return None
        try:
            return Entrypoint.parse(self.classes[role])
        except ValueError as error:
            raise GraphError(f"backend: its class for {role} is {self.classes[role]!r}, {error}.") from None


def backend_named(name: str, python_path: Iterable[str] = ()) -> Backend:
    """The back end that an import path or an entry point names. Raises ConfigError where it cannot be loaded."""
    found = BACKEND.load(name, python_path)
    if not isinstance(found, Backend):
        raise GraphError(
            f"backend: {name} is of type {type(found).__name__}, expected a Backend.",
            hint="Make one with gyre.graph.Backend.",
        )
    return found
