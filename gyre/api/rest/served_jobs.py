"""Which jobs an app serves: the one of its master, or all of a store."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from gyre.errors import NotFound, StoreError, nearest
from gyre.master.master_api import MasterApi


class ServedJobs(Protocol):
    """Every method may be called from any thread."""

    def items(self) -> list[dict[str, Any]]:
        """The jobs for a list, the newest first, as `JobReader.jobs` gives them."""
        ...

    def count(self) -> int:
        """How many jobs there are, of which a list has the newest."""
        ...

    def port(self, job: str) -> MasterApi:
        """The job of this name or id. Raises NotFound."""
        ...


_OF_ONE_JOB = "result"
"""What the user's own `fit()` returned: of any size, with numbers that JSON may not have, and no list shows it."""


class OneJob:
    """The job of a master."""

    def __init__(self, port: MasterApi) -> None:
        self._port = port
        self._names: tuple[str, ...] = ()

    def items(self) -> list[dict[str, Any]]:
        listed: dict[str, Any] = {}
        with contextlib.suppress(StoreError):  # its record is known without the store
            listed = self._port.listed()
        record = self._port.view()["job"]
        return [{key: value for key, value in record.items() if key != _OF_ONE_JOB} | listed]

    def count(self) -> int:
        return 1

    def port(self, job: str) -> MasterApi:
        if job not in self._names:  # a job keeps its name and id; a view of all of it is not needed twice
            record = self._port.view()["job"]
            self._names = (record["name"], record["job_id"])
        if job not in self._names:
            raise NotFound(f"There is no job {job!r} here.", hint=nearest(job, self._names))
        return self._port
