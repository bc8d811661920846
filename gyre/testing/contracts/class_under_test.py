"""A class as a vertex has it: made without arguments, bound, set up, and called by name with pickled arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre.testing.contracts.broken import broken
from gyre.testing.in_process.transport import pack, unpack
from gyre.workloads.addresses import free_port
from gyre.workloads.base import BaseWorkload, WorkloadContext
from gyre.workloads.protocols import methods_of
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.host import offer_context


class VertexUnderTest:
    """One incarnation of a rank that is alone in its role. `close` ends it in order."""

    def __init__(
        self, cls: type, role: str, *, config: Mapping[str, Any], directory: Path, incarnation: int = 1
    ) -> None:
        self.name = cls.__name__
        self.incarnation = incarnation
        self.workload = cls()
        context = WorkloadContext(
            job="contract",
            job_id="contract-1",
            role=role,
            rank=0,
            world_size=1,
            incarnation=incarnation,
            config=dict(config),
            directory=directory,
            master_addr="127.0.0.1",
            master_port=free_port("127.0.0.1"),
        )
        if isinstance(self.workload, BaseWorkload):
            self.workload.context = context
        else:
            offer_context(self.workload, context)
        if callable(getattr(self.workload, "setup", None)):
            self.workload.setup()

    def has(self, method: str) -> bool:
        return callable(getattr(self.workload, method, None))

    def require(self, protocol: type) -> None:
        """Raises ContractBroken where a method is missing."""
        missing = [name for name in methods_of(protocol) if not self.has(name)]
        if missing:
            raise broken(
                self.name, f"have the methods of {protocol.__name__}", f"it lacks {', '.join(missing)}"
            )

    def call(self, method: str, *args: Any, info: CallInfo = NOTHING_OFFERED, **kwargs: Any) -> Any:
        """As a trainer's call arrives: arrays are read-only. Raises what the method raises, and ContractBroken where
        its result cannot be sent."""
        function = getattr(self.workload, method)
        given, named, about = unpack(pack((args, kwargs, info)))
        value = function(*given, **named, **about.wanted_by(function))
        try:
            return unpack(pack(value))
        except Exception as error:  # whatever an object's own pickling raises
            raise broken(
                f"{method}()", "return what can be pickled", f"{type(error).__name__}: {error}"
            ) from error

    def close(self, *, job_ends: bool = False) -> None:
        if isinstance(self.workload, BaseWorkload):
            self.workload.context.job_ends = job_ends
        if callable(getattr(self.workload, "teardown", None)):
            self.workload.teardown()


@contextlib.contextmanager
def vertex_of(
    cls: type, role: str, *, config: Mapping[str, Any] | None, directory: Path, incarnation: int = 1
) -> Iterator[VertexUnderTest]:
    vertex = VertexUnderTest(cls, role, config=config or {}, directory=directory, incarnation=incarnation)
    try:
        yield vertex
    finally:
        vertex.close(job_ends=True)
