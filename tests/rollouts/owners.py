"""Owners of parts that are tested alone, and what they hand over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gyre.engines.process import EngineCommand
from gyre.errors import GyreError
from gyre.rollouts.protocol.frames import Frame
from gyre.rollouts.samples import Group, Sample, SampleKey
from gyre.rollouts.trainer.plane_client import HearsOfRollouts


class NowhereKnown:
    """The endpoint of a manager that has not started."""

    def where(self) -> None:
        return None

    def trust(self) -> None:
        return None


class NoCommands:
    """Where no engine is to be started."""

    def command(self, folder: Path, version: str) -> EngineCommand:
        raise AssertionError("no policy was published")


class Commands:
    """Those that a function makes."""

    def __init__(self, made: Callable[[Path, str], EngineCommand]) -> None:
        self.command = made


class Heard(HearsOfRollouts):
    """Keeps what a client tells a trainer."""

    def __init__(self) -> None:
        self.came: dict[int, Group] = {}
        self.ahead: dict[tuple[str, SampleKey], Sample] = {}
        self.errors: list[GyreError] = []

    def groups_delivered(self, purpose: str, groups: list[Group]) -> None:
        self.came.update({group.id: group for group in groups})

    def samples_finished(self, purpose: str, samples: dict[SampleKey, Sample]) -> None:
        assert not self.ahead.keys() & {(purpose, key) for key in samples}, "each is announced once"
        self.ahead.update({(purpose, key): sample for key, sample in samples.items()})

    def failed(self, error: GyreError) -> None:
        self.errors.append(error)


class NoSamples:
    """Of an engine that generates nothing."""

    async def recall_all(self) -> None:
        pass

    def adapters_in_use(self) -> Collection[str]:
        return ()

    async def recall_adapter(self, name: str) -> None:
        pass

    def weights_changed(self, version: int, made: Mapping[str, int] | None) -> None:
        pass


class EngineOwner:
    """The owner of an engine that has no samples."""

    samples = NoSamples()

    def spawn(self, work: Awaitable[Any]) -> None:
        pass

    def engine_lost(self) -> None:
        pass

    def engine_died(self, reason: str, tail: str) -> None:
        pass


class WeightsOwner:
    """The owner of an agent's versions, without an engine. Keeps what the manager is told."""

    is_serving = False
    why_disk = ""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def serve(self, folder: Path, weights: Any, check: Callable[[], Awaitable[None]]) -> None:
        await check()

    def tell(self, frame: Frame) -> None:
        self.frames.append(frame)
