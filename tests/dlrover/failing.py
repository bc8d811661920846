"""Entrypoints that fail, or meet each other by other ways than the trainer's calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gyre_dlrover.api.runtime import (
    DataQueue,
    PrimeMasterApi,
    RoleGroup,
    create_rpc_proxy,
    current_worker,
    export_rpc_instance,
    rpc,
)


def folder() -> Path:
    return Path(current_worker().job_info.user_config["folder"])


def tried() -> int:
    """How often the caller's role has been here, this time included."""
    path = folder() / f"tries-{current_worker().actor_info.name}"
    with path.open("a") as file:
        file.write("x")
    return len(path.read_text())


class Fails:
    """A driver that raises as often as the job's config says."""

    def run(self) -> str:
        if tried() <= current_worker().job_info.user_config["failures"]:
            raise ArithmeticError("two and two are five")
        return "made it"


class Refuses:
    """Cannot be made."""

    def __init__(self) -> None:
        tried()
        raise ArithmeticError("cannot be made")

    def run(self) -> None: ...


class NoMain:
    """A driver without a main."""


@rpc()
def greeting(name: str) -> str:
    return f"{current_worker().actor_info.name} greets {name}"


class Ledger:
    def __init__(self) -> None:
        self.entries: list[str] = []

    @rpc()
    def enter(self, entry: str) -> int:
        self.entries.append(entry)
        return len(self.entries)

    @rpc("all_of_them")
    async def entries_of(self, prefix: str) -> list[str]:
        return [entry for entry in self.entries if entry.startswith(prefix)]


class Bookkeeper:
    """Serves a ledger and owns a queue."""

    def __init__(self) -> None:
        export_rpc_instance("ledger", Ledger())
        self.queue: DataQueue[Any] = DataQueue("numbers", is_master=True, size=4)

    @rpc()
    def refuse(self, why: str) -> None:
        raise ValueError(why)


def count() -> None:
    """A producer beside the trainer: a driver of its own, which puts more than the queue holds."""
    queue: DataQueue[int] = DataQueue("numbers")
    rank = current_worker().actor_info.rank
    queue.put(*range(10 * rank, 10 * rank + 6))
    queue.put_async(10 * rank + 6).result()


def keep_books() -> dict[str, Any]:
    """The trainer: asks everybody in every way there is."""
    books = RoleGroup("BOOKS")
    proxy = create_rpc_proxy(books[0].name, "ledger", Ledger)
    counts = [proxy.enter(f"{letter} entry") for letter in "aab"]
    queue: DataQueue[int] = DataQueue("numbers")
    got: list[int] = []
    while len(got) < 14:
        got += queue.get(3)
    refused = books[0].call("refuse", "no ink").exception()
    missing = books[0].call("nobody").exception()
    return {
        "counts": counts,
        "found": books[0].call("ledger.all_of_them", "a").result(),
        "greetings": RoleGroup("BOOKS").call(greeting, "the trainer").result(),
        "got": sorted(got),
        "refused": f"{type(refused).__name__}: {refused}",
        "missing": f"{type(missing).__name__}: {missing}",
        "roles": {role: len(workers) for role, workers in PrimeMasterApi.get_all_roles().items()},
        "none": RoleGroup("NOBODY", optional=True).call("anything").result(),
        "scattered": RoleGroup("COUNTERS").call("add", [1, 2], y=[10, 20], _scatter=True).result(),
        "own": RoleGroup("TRAINER").call("double", 4).result(),
    }


@rpc()
def add(x: int, y: int) -> int:
    return x + y


@rpc()
def double(x: int) -> int:
    return 2 * x


def leaves() -> None:
    """A driver that kills itself once, as a machine's kernel would."""
    if tried() == 1:
        os.kill(os.getpid(), 9)
