"""What the parts of an agent ask of the agent that owns them, and what it hands to them.

This module must not know the agent, nor its parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from gyre.engines.process import EngineCommand
from gyre.engines.weight_loading import LoadReport
from gyre.rollouts.protocol.frames import Frame, Weights

Check = Callable[[], Awaitable[None]]
"""Verifies a folder. Raises WeightMismatch."""


class Commands(Protocol):
    def command(self, folder: Path, version: str) -> EngineCommand:
        """Of an engine over a model folder. The job's own may raise anything."""


class HearsProgress(Protocol):
    def tick(self, **fields: Any) -> None:
        """After each report: `version`, `tokens` generated in all, and `samples` that it holds."""


class EngineSamples(Protocol):
    """The samples that an engine generates."""

    async def recall_all(self) -> None:
        """Take all of them back, with the tokens that they have."""

    def adapters_in_use(self) -> Collection[str]:
        """The adapters with which samples were asked that have not ended."""

    async def recall_adapter(self, name: str) -> None:
        """Take those back that were asked with this adapter."""

    def weights_changed(self, version: int, made: Mapping[str, int] | None) -> None:
        """In the pause of an update. `made`: see `EngineLoader.load`."""


class RunsWork(Protocol):
    def spawn(self, work: Awaitable[Any]) -> None:
        """Run it in the background. What it raises ends the agent."""


class HasEngine(RunsWork, Protocol):
    @property
    def samples(self) -> EngineSamples: ...

    def engine_lost(self) -> None:
        """There is no engine any more."""

    def engine_died(self, reason: str, tail: str) -> None:
        """Nothing of it is left. `tail` is what it said last."""


class HasSamples(RunsWork, Protocol):
    @property
    def version(self) -> int:
        """The policy version that the engine serves; -1 without."""

    def report_soon(self) -> None:
        """A sample has ended."""


class HasWeights(Protocol):
    @property
    def is_serving(self) -> bool:
        """Whether there is an engine."""

    @property
    def why_disk(self) -> str:
        """Why it has no weight loader; "" where it has one."""

    async def serve(self, folder: Path, weights: Weights, check: Check) -> LoadReport | None:
        """Bring the engine to serve a folder, and return how, None if it was started. Unless the engine's loader
        verifies all bytes, `check` is awaited first. Raises what that does, and EngineError."""

    def tell(self, frame: Frame) -> None:
        """Send it to the manager, if it is there."""
