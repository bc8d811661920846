"""Engines by name: Gyre's own, and a user's.

This module must not import an engine, or what starts one, before it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gyre.config.plugins import ENGINE
from gyre.engines.kind import EngineKind, EngineStart
from gyre.errors import ConfigError

if TYPE_CHECKING:
    from gyre.engines.process import EngineCommand


def engine_named(name: str, python_path: Iterable[str] = ()) -> EngineKind:
    """The record that `rollouts.engine` names. A user's function that makes commands is one that says nothing else of
    itself. Raises ConfigError if it cannot be loaded."""
    found = ENGINE.load(name, python_path)
    return found if isinstance(found, EngineKind) else EngineKind(name, name, _by(name, found))


def engines() -> list[EngineKind]:
    """Gyre's own."""
    return [engine_named(name) for name in ENGINE.built_in]


def known_engine(name: str) -> EngineKind | None:
    """The record of one of Gyre's own; None of a user's, of which nothing is imported."""
    return engine_named(name) if name in ENGINE.built_in else None


def _by(name: str, function: Any) -> Callable[[EngineStart], EngineCommand]:
    """The command that the user's own function makes of a start."""

    def command(start: EngineStart) -> EngineCommand:
        from gyre.engines.process import EngineCommand  # heavy, and needed only where an engine is started

        context = [] if start.context_length is None else ["--context-length", str(start.context_length)]
        found = function(
            start.folder,
            version=start.version,
            max_running=start.max_running,
            kv_tokens=start.kv_tokens,
            python=start.python,
            extra=[*context, *start.extra],
        )
        if not isinstance(found, EngineCommand):
            raise ConfigError(
                f"rollouts.engine: {name} returned a {type(found).__name__}, expected an EngineCommand."
            )
        return found

    return command
