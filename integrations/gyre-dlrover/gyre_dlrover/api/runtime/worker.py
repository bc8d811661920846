"""Who a worker is."""

from __future__ import annotations

from typing import Any, Protocol

from gyre_dlrover.station import ActorInfo, JobInfo, here

__all__ = ["ActorInfo", "JobInfo", "Worker", "current_worker"]


class Worker(Protocol):
    """What `current_worker` returns."""

    @property
    def job_info(self) -> JobInfo: ...

    @property
    def actor_info(self) -> ActorInfo: ...

    def report_progress(self, **fields: Any) -> None: ...


def current_worker() -> Worker:
    """The worker that the calling code runs in. Raises GyreError outside of a job's workers."""
    return here()
