"""Starts the trainer and keeps it told: who runs, whether to pause, when to stop."""

from __future__ import annotations

from collections.abc import Callable

from gyre.config import TRAINER
from gyre.failover.commands import (
    AnnounceRoster,
    Command,
    PauseTrainer,
    ResumeTrainer,
    StartTrainer,
    StopTrainer,
)
from gyre.master.cluster import Address, Cluster

CALL_TIMEOUT_S = 10.0


class Executor:
    """Its calls are idempotent: a roster carries its serial, a start its incarnation."""

    def __init__(self, cluster: Cluster, epoch: Callable[[], int]) -> None:
        self._cluster = cluster
        self._epoch = epoch
        self.told_serial = -1
        """The newest roster that the trainer has acknowledged."""

    async def run(self, command: Command) -> None:
        """Raises ProcessDied and NotAnswering: the trainer is being replaced, or the reconciliation tries again."""
        match command:
            case StartTrainer():
                await self._call(
                    command.incarnation,
                    "start_fit",
                    command.serial,
                    command.running,
                    command.roles,
                    command.paused,
                )
                self.told_serial = max(self.told_serial, command.serial)
            case AnnounceRoster():
                await self._call(
                    command.trainer_incarnation, "announce", command.serial, command.running, command.roles
                )
                self.told_serial = max(self.told_serial, command.serial)
            case PauseTrainer() | ResumeTrainer():
                await self._call(command.incarnation, "set_paused", isinstance(command, PauseTrainer))
            case StopTrainer():
                await self._call(command.incarnation, "stop_fit")
            case _:
                raise TypeError(f"{type(command).__name__} is not for the trainer")

    async def _call(self, incarnation: int, method: str, *args: object) -> None:
        await self._cluster.call(
            Address(f"{TRAINER}-0", incarnation), method, self._epoch(), *args, timeout_s=CALL_TIMEOUT_S
        )
