"""Starts the trainer, and informs it of which vertices run, when to pause and when to stop."""

from __future__ import annotations

from typing import Concatenate

from gyre.config import TRAINER
from gyre.failover.commands import (
    Command,
    PauseTrainer,
    ResumeTrainer,
    StartTrainer,
    StopTrainer,
    UpdateMembership,
)
from gyre.master.cluster import Address, Cluster, HostMethod, P
from gyre.master.job_context import JobNow
from gyre.workloads.vertex.host import VertexHost

CALL_TIMEOUT_S = 10.0


class Executor:
    """Carries out the commands about the trainer. Its calls are idempotent: an announcement carries its serial, a start
    its incarnation."""

    def __init__(self, cluster: Cluster, job: JobNow) -> None:
        self._cluster = cluster
        self._job = job
        self.told_serial = -1
        """Serial of the newest announcement that the trainer has acknowledged."""

    async def run(self, command: Command) -> None:
        """Carry out one command. Raises ProcessDied if the trainer is gone, and will be replaced, and NotAnswering if
        it does not answer; the reconciliation then tries again."""
        match command:
            case StartTrainer():
                await self._call(
                    command.incarnation,
                    VertexHost.start_fit,
                    command.serial,
                    command.running,
                    command.roles,
                    command.paused,
                )
                self.told_serial = max(self.told_serial, command.serial)
            case UpdateMembership():
                await self._call(
                    command.trainer_incarnation,
                    VertexHost.announce,
                    command.serial,
                    command.running,
                    command.roles,
                )
                self.told_serial = max(self.told_serial, command.serial)
            case PauseTrainer() | ResumeTrainer():
                await self._call(
                    command.incarnation, VertexHost.set_paused, isinstance(command, PauseTrainer)
                )
            case StopTrainer():
                await self._call(command.incarnation, VertexHost.stop_fit)
            case _:
                raise TypeError(f"{type(command).__name__} is not a command for the trainer")

    async def _call(
        self,
        incarnation: int,
        method: HostMethod[Concatenate[int, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method of the trainer's host that takes the epoch first."""
        trainer = Address(f"{TRAINER}-0", incarnation)
        await self._cluster.call(trainer, CALL_TIMEOUT_S, method, self._job.epoch, *args, **kwargs)
