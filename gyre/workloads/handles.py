"""Role handles: how a trainer's `fit()` calls the vertices of a role.

    self.rollout.generate(5)                 every vertex, results in rank order
    self.rollout[1].generate(5)              one rank
    self.rollout.generate.scatter(items)     items dealt out over the ranks, results gathered in item order
    self.rollout.generate.submit(5)          a future: .result(timeout), or await it
    for index, out in self.rollout.generate.stream(items): …     each item to a free vertex, as they end

A vertex that dies in a call is replaced by the master, and the call is made again on the replacement: a
handle's calls run *at least once*. One that is scaled away in a call is left out of a call to all, and what it was to
do with its items is done by another. A call to all ranks of a gang is made again on all of them, and never on ranks
that are out of step (`gyre.workloads.gang.script`). An exception in the user's code is not repeated; it is raised
here as `UserCodeError`, with the traceback from the vertex. Every call has the job's `run.call_timeout_s` as deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from gyre.errors import (
    ConfigError,
    Fenced,
    GyreError,
    Unreachable,
    UserCodeError,
    VertexDied,
    is_configuration,
)
from gyre.workloads.gang.gang import GangLost
from gyre.workloads.gang.script import Arguments, ScriptGang
from gyre.workloads.owner import SeesScripts, SeesWaits
from gyre.workloads.vertex.membership import Member, Membership
from gyre.workloads.vertex.messages import Failure
from gyre.workloads.vertex.transport import VertexTransport

_POOL = ThreadPoolExecutor(max_workers=64, thread_name_prefix="gyre-call")
"""Threads in which submitted calls wait for replacements; the calls themselves run elsewhere."""


class ScaledAway(VertexDied):
    """The vertex that was called is not wanted any more: its role has fewer."""


class Call:
    """The future of a submitted call."""

    def __init__(self, future: Future[Any], owner: SeesWaits) -> None:
        self._future = future
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        """Blocks. Raises TimeoutError past `timeout` seconds, and what the call raised."""
        with self._owner.waiting():
            return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    @property
    def future(self) -> Future[Any]:
        """What is behind it, for who wants to be called back. Whoever waits for it is not seen to wait."""
        return self._future

    def __await__(self) -> Generator[Any, None, Any]:
        with self._owner.waiting():
            return (yield from asyncio.wrap_future(self._future).__await__())


class RoleHandle:
    """All vertices of a role, or one `rank` of it."""

    def __init__(
        self,
        role: str,
        membership: Membership,
        transport: VertexTransport,
        *,
        timeout_s: float,
        owner: SeesScripts,
        rank: int | None = None,
        on_control: bool = False,
        gang: ScriptGang | None = None,
    ) -> None:
        """`gang` where the role's vertices are peers of a collective."""
        self._role = role
        self._membership = membership
        self._transport = transport
        self._timeout_s = timeout_s
        self._owner = owner
        self._rank = rank
        self._on_control = on_control
        self._gang = gang

    @property
    def control(self) -> RoleHandle:
        """The same vertices; calls of operators marked `@operator(control=True)` run beside their other work."""
        return self._like(self._rank, on_control=True)

    @property
    def world_size(self) -> int:
        return self._membership.wanted(self._role)

    def __getitem__(self, rank: int) -> RoleHandle:
        if not 0 <= rank < max(1, self.world_size):
            raise IndexError(f"role {self._role!r} has ranks 0 to {self.world_size - 1}; asked for {rank}")
        return self._like(rank, on_control=self._on_control)

    def _like(self, rank: int | None, *, on_control: bool) -> RoleHandle:
        return RoleHandle(
            self._role,
            self._membership,
            self._transport,
            timeout_s=self._timeout_s,
            owner=self._owner,
            rank=rank,
            on_control=on_control,
            gang=self._gang,
        )

    rank = __getitem__

    def __getattr__(self, method: str) -> RoleMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return RoleMethod(self, method)

    def __repr__(self) -> str:
        which = f"rank {self._rank}" if self._rank is not None else f"{self.world_size} vertices"
        return f"<role {self._role}: {which}>"

    # -- used by RoleMethod -------------------------------------------------------------------------

    def _call_gang(
        self, gang: ScriptGang, method: str, parts: Arguments | None, args: Any, kwargs: Any, deadline: float
    ) -> list[Any]:
        """Every rank, each with its part or all with the same arguments."""
        try:
            return gang.call(method, lambda size: parts or [args] * size, kwargs, deadline)
        except GangLost as lost:
            if lost.blamed is None:
                raise  # never: a call that a death ended is made again
            member, _, failure = lost.blamed
            raise error_of(failure, member[0], method) from None

    @property
    def _all_ranks(self) -> ScriptGang | None:
        """The gang, where a call goes to all of its ranks; None for control calls and calls to one rank."""
        return self._gang if self._rank is None and not self._on_control else None

    def _members(self, deadline: float) -> list[Member]:
        found = self._membership.wait_for(self._role, self._rank, deadline)
        if found is None:
            raise Unreachable(
                f"role {self._role!r} did not become whole within {self._timeout_s:g} s.",
                hint="See `gyre events` for what keeps it from running.",
            )
        return found

    def _submit(
        self, member: Member, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[tuple[str, Any]]:
        return self._transport.submit(*member, method, args, kwargs, control=self._on_control)

    def _call_one(
        self, member: Member, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float
    ) -> Any:
        """One vertex's result, over as many of its incarnations as it takes. Raises ScaledAway."""
        while True:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                outcome = self._submit(member, method, args, kwargs).result(left_s)
                return _value(outcome, member[0], method)
            except VertexDied:
                member = self._replacement(member, method, deadline)
            except TimeoutError:
                raise Unreachable(
                    f"{member[0]}.{method} did not return within {self._timeout_s:g} s.",
                    hint="Raise run.call_timeout_s if such calls are meant to take longer.",
                ) from None

    def _call_any(
        self, member: Member, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float
    ) -> Any:
        """One vertex's result: this member's, or another one's where its place is given up meanwhile."""
        while True:
            try:
                return self._call_one(member, method, args, kwargs, deadline)
            except ScaledAway:
                if self._rank is not None:
                    raise
                member = self._members(deadline)[0]

    def _replacement(self, member: Member, method: str, deadline: float) -> Member:
        """The next incarnation of a member that died in a call. Raises ScaledAway."""
        self._membership.doubt(*member)
        role, _, rank = member[0].rpartition("-")
        found = self._membership.wait_for(role, int(rank), deadline, beyond=member[1])
        if found is None:
            raise Unreachable(
                f"{member[0]} was lost during {method} and was not replaced within {self._timeout_s:g} s.",
                hint="See `gyre events` for what keeps it from running.",
            )
        if not found:
            raise ScaledAway(
                f"{member[0]} was scaled away during {method}.",
                hint="Call the role as a whole, or `stream`: others then do what it was doing.",
            )
        return found[0]


class RoleMethod:
    """A method of a role, called in one of several ways."""

    def __init__(self, handle: RoleHandle, method: str) -> None:
        self._handle = handle
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Every vertex; a list in rank order. On a handle of one rank: that rank's result itself."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Call:
        """As `__call__`, without waiting."""
        return Call(_POOL.submit(self._run, args, kwargs), self._handle._owner)

    def scatter(self, items: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Deal `items` out over the ranks in equal runs; each vertex gets its list as first argument and
        returns a list of the same length. The results come back in the order of the items."""
        with self._handle._owner.waiting():
            deadline = self._deadline()
            members = self._handle._members(deadline)
        bounds = [len(items) * at // len(members) for at in range(len(members) + 1)]
        parts = [list(items[low:high]) for low, high in itertools.pairwise(bounds)]
        if (gang := self._handle._all_ranks) is not None and all(parts):
            given = [(part, *args) for part in parts]
            of_ranks = self._handle._call_gang(gang, self._method, given, args, kwargs, deadline)
            return [item for part in of_ranks for item in part]
        futures = [
            _POOL.submit(self._handle._call_any, member, self._method, (part, *args), kwargs, deadline)
            for member, part in zip(members, parts, strict=True)
            if part
        ]
        with self._handle._owner.waiting():
            gathered = [future.result() for future in futures]
        return [item for part in gathered for item in part]

    def stream(self, items: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[tuple[int, Any]]:
        """Each item to a vertex that is free; yields `(index of the item, result)` as they end."""
        pending = list(enumerate(items))[::-1]
        busy: dict[Future[Any], tuple[int, str]] = {}
        while pending or busy:
            occupied = {vertex for _, vertex in busy.values()}
            for member in self._present(at_least_one=not busy):
                if pending and member[0] not in occupied:
                    index, item = pending.pop()
                    future = _POOL.submit(self._run_one, member, (item, *args), kwargs)
                    busy[future] = (index, member[0])
            with self._handle._owner.waiting():
                done, _ = wait(busy, return_when=FIRST_COMPLETED)
            for future in done:
                index, _ = busy.pop(future)
                yield index, future.result()

    def _present(self, *, at_least_one: bool) -> list[Member]:
        """The vertices that run now; a role that is not whole is waited for where there are none."""
        handle = self._handle
        found = [
            member
            for member in handle._membership.members(handle._role)
            if handle._rank is None or member[0] == f"{handle._role}-{handle._rank}"
        ]
        if found or not at_least_one:
            return found
        with handle._owner.waiting():
            return handle._members(self._deadline())

    def _run_one(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deadline = self._deadline()
        return self._handle._call_any(member, self._method, args, kwargs, deadline)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deadline = self._deadline()
        if (gang := self._handle._all_ranks) is not None:
            return self._handle._call_gang(gang, self._method, None, args, kwargs, deadline)
        members = self._handle._members(deadline)
        if self._handle._rank is not None:
            return self._handle._call_one(members[0], self._method, args, kwargs, deadline)
        submitted = [self._handle._submit(member, self._method, args, kwargs) for member in members]
        results = []
        for member, future in zip(members, submitted, strict=True):
            try:
                left_s = max(0.0, deadline - time.monotonic())
                results.append(_value(future.result(left_s), member[0], self._method))
            except VertexDied:
                with contextlib.suppress(ScaledAway):  # then it is none of the role's any more
                    member = self._handle._replacement(member, self._method, deadline)
                    results.append(self._handle._call_one(member, self._method, args, kwargs, deadline))
            except TimeoutError:
                raise Unreachable(
                    f"{member[0]}.{self._method} did not return within {self._handle._timeout_s:g} s.",
                    hint="Raise run.call_timeout_s if such calls are meant to take longer.",
                ) from None
        return results

    def _deadline(self) -> float:
        """Of a call that begins now, or once the job is no longer paused: a pause is no delay of the call's."""
        self._handle._owner.wait_while_paused()
        return time.monotonic() + self._handle._timeout_s


def _value(outcome: tuple[str, Any], vertex: str, method: str) -> Any:
    status, value = outcome
    if status == "ok":
        return value
    raise error_of(value, vertex, method)


def error_of(failure: Failure, vertex: str, method: str) -> GyreError:
    """The exception for a failure that a vertex reported."""
    details = {
        "vertex": vertex,
        "operator": method,
        "traceback": failure.traceback,
        "place": failure.place,
        "method": failure.method,
    }
    if failure.fenced:
        return Fenced(failure.error, details=details)
    if is_configuration(failure.code):
        return ConfigError(failure.error, details=details)
    text = f"{vertex}.{method} raised {failure.error}"
    if failure.user_code:
        return UserCodeError(text, hint="This is the job's own code, not Gyre's.", details=details)
    return GyreError(text, details=details)
