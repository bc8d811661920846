"""What the parts of a master tell the master that owns them.

This module must not know the master, nor its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gyre.master.job_context import Issued


class HearsFaults(Protocol):
    def fault(self, error: BaseException) -> None:
        """A part has a defect."""


class HearsTheEnd(HearsFaults, Protocol):
    def finish(self) -> None:
        """The job has ended."""


class HearsCommits(Protocol):
    def carry_out(self, issued: list[Issued]) -> None:
        """These commands are in the journal, and due."""

    def committed(self) -> None:
        """The journal has more than before."""

    def fenced(self, error: BaseException) -> None:
        """Another master has the job."""


class KnowsTheStore(Protocol):
    @property
    def store_is_lost(self) -> bool:
        """Whether the store cannot be reached now, or is another one."""


class HearsOfLoss(Protocol):
    async def give_up(self, why: str) -> None:
        """The store was away for too long."""
