"""Calls between the workers of a job: `@rpc` exports a method, `RoleGroup` and proxies call it.

A call is carried by the job's trainer, through Gyre's role handles, and so is made *at least once*: where a worker dies
in it, it is made again on the worker that takes its place. To a whole elastic role it reaches every rank, in one order.

This module must not import Ray or torch.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, overload

from gyre.errors import nearest
from gyre_dlrover.description import RoleDescription
from gyre_dlrover.raised import Mistake
from gyre_dlrover.station import ActorInfo, Invocation, actor_info, export, here

P = ParamSpec("P")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

_ALONE = (str, bytes, bytearray)
"""Sequences that are one argument to `call_batch`, not a batch of them."""


@dataclass
class UserRpcMethodMeta:
    """What `@rpc` records of a method."""

    name: str
    is_async: bool

    ATTR_KEY: ClassVar[str] = "_rpc_meta_"


def rpc(name: str | Callable[..., Any] | None = None, export: bool = False) -> Callable[[F], F]:
    """Mark a method as one that other workers may call, by its own name, by `name`, or by that of a stub. With `export`
    a function is exported at once; one at the top of the entrypoint's module is anyway."""
    given = name.__name__ if callable(name) else name

    def mark(function: F) -> F:
        meta = UserRpcMethodMeta(given or function.__name__, asyncio.iscoroutinefunction(function))
        setattr(function, UserRpcMethodMeta.ATTR_KEY, meta)
        if export:
            export_rpc_method(meta.name, function)
        return function

    return mark


def export_rpc_method(name: str, func: Callable[..., Any]) -> None:
    """Let other workers call a function by this name. Raises Mistake where the name is another's."""
    export(name, func)


def export_rpc_instance(ns: str | None, instance: Any) -> None:
    """Export what is marked with `@rpc` of an object or a module, below the name `ns` if there is one."""
    for meta, function in _marked(instance):
        export_rpc_method(f"{ns}.{meta.name}" if ns else meta.name, function)


def _marked(instance: Any) -> list[tuple[UserRpcMethodMeta, Callable[..., Any]]]:
    """Looked up without running the user's properties."""
    found = []
    for attribute in dir(instance):
        static = inspect.getattr_static(instance, attribute, None)
        function = getattr(static, "__func__", static)
        meta = getattr(function, UserRpcMethodMeta.ATTR_KEY, None) if callable(function) else None
        if isinstance(meta, UserRpcMethodMeta):
            found.append((meta, getattr(instance, attribute)))
    return found


class UserRpcProxy:
    """Has the methods of `cls` that are marked with `@rpc`, and calls those of the object that a worker has exported as
    `name`. A coroutine's comes as an awaitable."""

    def __init__(self, owner: str, name: str, cls: type) -> None:
        self.owner, self.name, self.cls = owner, name, cls
        _known_worker(owner)
        for attribute in dir(cls):
            meta = getattr(getattr(cls, attribute), UserRpcMethodMeta.ATTR_KEY, None)
            if isinstance(meta, UserRpcMethodMeta):
                setattr(self, attribute, partial(self._rpc_call, meta))

    def _rpc_call(self, meta: UserRpcMethodMeta, *args: Any, **kwargs: Any) -> Any:
        future = call_worker(self.owner, f"{self.name}.{meta.name}", args, kwargs)
        return _awaited(future) if meta.is_async else future.result()


async def _awaited(future: Future[Any]) -> Any:
    """A coroutine, for who has no loop yet: `asyncio.run(proxy.method())`."""
    return await asyncio.wrap_future(future)


def create_rpc_proxy(owner: str, name: str, cls: type[R]) -> R:
    """A proxy of what the worker `owner` exported as `name`. Raises Mistake for a worker that is none."""
    return UserRpcProxy(owner, name, cls)  # type: ignore[return-value]


def call_worker(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    """Call an exported method of a worker, by the worker's name. Raises Mistake for one that is none."""
    role, rank = _known_worker(name)
    return _call(role.name, rank, method, [(args, kwargs)])


def _known_worker(name: str) -> tuple[RoleDescription, int]:
    found = here().description.worker(name)
    if found is None:
        raise Mistake(f"There is no worker {name!r} in this job.", hint="RoleGroup lists those of a role.")
    return found


def _call(role: str, rank: int | None, method: str, arguments: list[Any]) -> Future[Any]:
    return here().caller.call(Invocation(role, rank, method, arguments))


class RoleActor:
    """One worker of a role."""

    def __init__(self, info: ActorInfo) -> None:
        self.name, self.rank, self.info = info.name, info.rank, info

    @overload
    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]: ...
    def call(self, method: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call an exported method, by its name or by a function of that name."""
        return _call(self.info.role, self.rank, _name_of(method), [(args, kwargs)])


class RoleGroup(Sequence[RoleActor]):
    """The workers of a role, in rank order."""

    def __init__(self, role: str, optional: bool = False) -> None:
        """Raises Mistake for a role that the job does not have, unless it is `optional`: then it is empty."""
        description = here().description
        found = description.role(role)
        if found is None and not optional:
            raise Mistake(
                f"No actors found for role {role!r}; {nearest(role, [one.name for one in description.roles])}",
                hint="Say optional=True for a role that a job may lack.",
            )
        self._role = found
        self.actors = [] if found is None else [RoleActor(one) for one in _workers(found)]

    @overload
    def __getitem__(self, index: int) -> RoleActor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RoleActor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.actors[index]

    def __len__(self) -> int:
        return len(self.actors)

    def call(self, method: Any, *args: Any, _scatter: bool = False, **kwargs: Any) -> Future[list[Any]]:
        """Call an exported method of every worker; the results are in rank order. With `_scatter` each argument is a
        list with one value for each rank. Raises Mistake for lists of another length."""
        if self._role is None:
            return _done([])
        if not _scatter:
            return _call(self._role.name, None, _name_of(method), [(args, kwargs)])
        given = [*args, *kwargs.values()]
        if not given or not all(isinstance(one, list) and len(one) == len(self) for one in given):
            raise Mistake(
                f"_scatter: expected lists of {len(self)} values, one for each of {self._role.name}."
            )
        each = [
            (tuple(arg[rank] for arg in args), {key: value[rank] for key, value in kwargs.items()})
            for rank in range(len(self))
        ]
        return _call(self._role.name, None, _name_of(method), each)

    def call_rank0(self, method: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call an exported method of rank 0 alone. Raises Mistake where the group is empty."""
        self._check_not_empty()
        return self.actors[0].call(method, *args, **kwargs)

    def call_batch(self, method: Any, size: int, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Deal a batch out over the workers, in runs of equal length but for the last ones. Sequences are dealt out,
        and must have the length `size`; texts, and everything else, go to every worker as they are. Raises Mistake
        where the group is empty, and for a batch of another length."""
        role = self._check_not_empty()
        for one in (*args, *kwargs.values()):
            if _is_batch(one) and len(one) != size:
                raise Mistake(f"call_batch: an argument has {len(one)} values, expected {size}.")
        run = -(-size // len(self))
        bounds = [(min(rank * run, size), min((rank + 1) * run, size)) for rank in range(len(self))]
        each = [
            (
                tuple(one[low:high] if _is_batch(one) else one for one in args),
                {key: one[low:high] if _is_batch(one) else one for key, one in kwargs.items()},
            )
            for low, high in bounds
        ]
        name = _name_of(method)
        if role.gang:  # a collective may be inside, so all ranks are called as one
            whole = _call(role.name, None, name, each)
            futures = [_part_of(whole, rank) for rank in range(len(self))]
        else:
            futures = [_call(role.name, rank, name, [given]) for rank, given in enumerate(each)]
        return FutureSequence(futures, [high - low for low, high in bounds])

    def _check_not_empty(self) -> RoleDescription:
        if self._role is None:
            raise Mistake("No actors in the role group.", hint="The job has no such role.")
        return self._role


class FutureSequence(Sequence[T_co], Generic[T_co]):
    """The results of a batch, in the order of its items. Reading one waits for the worker that it is of."""

    def __init__(self, futures: list[Future[Any]], lens: list[int]) -> None:
        self._futures, self._lens = futures, lens

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        for future, length in zip(self._futures, self._lens, strict=True):
            if 0 <= at < length:
                return future.result()[at]
            at -= length
        raise IndexError(f"item {index} of {len(self)}")

    def __len__(self) -> int:
        return sum(self._lens)

    def __repr__(self) -> str:
        return f"FutureSequence(lens={self._lens})"

    def wait(self) -> list[T_co]:
        """All results."""
        return [item for future in self._futures for item in future.result()]


def _workers(role: RoleDescription) -> list[ActorInfo]:
    return [actor_info(role, rank) for rank in range(role.workload.total)]


def _name_of(method: Any) -> str:
    return method if isinstance(method, str) else str(method.__name__)


def _is_batch(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, _ALONE)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _part_of(whole: Future[list[Any]], rank: int) -> Future[Any]:
    part: Future[Any] = Future()

    def pass_on(done: Future[list[Any]]) -> None:
        error = done.exception()
        if error is not None:
            part.set_exception(error)
        else:
            part.set_result(done.result()[rank])

    whole.add_done_callback(pass_on)
    return part
