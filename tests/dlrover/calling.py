"""Entrypoints that call each other while calls wait, raise, and their callers are replaced."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

from gyre_dlrover.api.runtime import (
    DataQueue,
    RoleGroup,
    create_rpc_proxy,
    current_worker,
    export_rpc_instance,
    rpc,
)
from tests.dlrover.failing import folder, tried

WAITING = 8
"""More than a vertex has threads for calls."""


class Odd(Exception):
    """An exception of the user's, with an `__init__` of its own."""

    def __init__(self, number: int, *, why: str) -> None:
        super().__init__(number, why)
        self.number, self.why = number, why

    def __reduce__(self) -> tuple[Any, ...]:
        return _odd, (self.number, self.why)


def _odd(number: int, why: str) -> Odd:
    return Odd(number, why=why)


class Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("not to be sent")
        self.lock = threading.Lock()


class Office:
    """A role whose methods wait for each other."""

    def __init__(self) -> None:
        self.letters: asyncio.Queue[str] = asyncio.Queue()
        self.opened = threading.Event()

    @rpc()
    async def letter(self) -> str:
        return await self.letters.get()

    @rpc()
    async def post(self, letter: str) -> None:
        await self.letters.put(letter)

    @rpc()
    def wait_until_open(self) -> str:
        self.opened.wait()
        return current_worker().actor_info.name

    @rpc()
    def open(self) -> None:
        self.opened.set()

    @rpc()
    def ask_back(self, depth: int) -> int:
        """Each asks the other, who asks this one again."""
        if depth == 0:
            return 0
        other = "BRANCH" if current_worker().actor_info.role == "OFFICE" else "OFFICE"
        return 1 + RoleGroup(other).call_rank0("ask_back", depth - 1).result()

    @rpc()
    def serve_desk(self) -> None:
        export_rpc_instance("desk", Desk())

    @rpc()
    def fail(self, how: str) -> Any:
        if how == "key":
            raise KeyError("none of these")
        if how == "odd":
            raise Odd(7, why="it is")
        if how == "unsendable":
            raise Unsendable
        if how == "os":
            return open("/nowhere/to/be/found")
        return threading.Lock()

    @rpc()
    async def fail_later(self) -> None:
        await asyncio.sleep(0.01)
        raise Odd(8, why="later")

    @rpc()
    def ask_for_failure(self) -> str:
        try:
            RoleGroup("BRANCH")[0].call("fail", "odd").result()
        except Odd as error:
            return f"{error.why} {error.number}"
        return "nothing was raised"


class Rank(Office):
    """The same as ranks of a gang."""


def wait_for_each_other() -> dict[str, Any]:
    office = RoleGroup("OFFICE")
    waiting = [office[0].call("letter") for _ in range(WAITING)]
    opening: list[Future[Any]] = [office[0].call("wait_until_open") for _ in range(WAITING)]
    for number in range(WAITING):
        office[0].call("post", f"letter {number}").result()
    office[0].call("open").result()
    return {
        "letters": sorted(one.result() for one in waiting),
        "opened": {one.result() for one in opening} == {office[0].name},
        "asked": office[0].call("ask_back", 4).result(),
        "own": RoleGroup("TRAINER").call("double", 4).result(),
        "batch": RoleGroup("TRAINER").call_batch("double", 3, [1, 2, 3]).wait(),
        "scattered": RoleGroup("TRAINER").call("double", [5], _scatter=True).result(),
    }


@rpc()
def double(x: Any) -> Any:
    return 2 * x if isinstance(x, int) else [2 * one for one in x]


def catch() -> dict[str, Any]:
    """What a caller sees of each exception, by role and way."""
    seen: dict[str, Any] = {}
    for role in ("BRANCH", "RANKS"):
        for how in ("key", "odd", "os", "unsendable", "result"):
            try:
                RoleGroup(role).call("fail", how).result()
            except KeyError as error:
                seen[f"{role} {how}"] = f"KeyError {error.args[0]}"
            except Odd as error:
                seen[f"{role} {how}"] = f"Odd {error.number} {error.why}"
            except OSError as error:
                seen[f"{role} {how}"] = f"OSError {error.errno}"
            except Exception as error:
                seen[f"{role} {how}"] = f"{type(error).__name__} {error}"
        try:
            RoleGroup(role)[0].call("fail_later").result()
        except Odd as error:
            seen[f"{role} later"] = error.why
    try:
        RoleGroup("OFFICE")[0].call("nobody").result()
    except ValueError as error:
        seen["missing"] = str(error)
    try:
        RoleGroup("NOBODY")
    except ValueError as error:
        seen["no role"] = str(error)
    seen["between workers"] = RoleGroup("OFFICE")[0].call("ask_for_failure").result()
    return seen


def await_proxies() -> dict[str, Any]:
    """A proxy's coroutines, by who has no loop and by who has one."""
    RoleGroup("OFFICE")[0].call("serve_desk").result()
    desk = create_rpc_proxy(RoleGroup("OFFICE")[0].name, "desk", Desk)

    async def both() -> list[str]:
        return await asyncio.gather(desk.stamp("one"), desk.stamp("two"))

    return {
        "alone": asyncio.run(desk.stamp("form")),
        "together": asyncio.run(both()),
        "at once": desk.sign("x"),
    }


class Desk:
    @rpc()
    async def stamp(self, paper: str) -> str:
        await asyncio.sleep(0.01)
        return f"stamped {paper}"

    @rpc()
    def sign(self, paper: str) -> str:
        return f"signed {paper}"


def fill_queues() -> dict[str, Any]:
    """More puts wait for room in one queue than a pool would have threads; one into another waits for none of them."""
    full: DataQueue[int] = DataQueue("full", is_master=True, size=1)
    free: DataQueue[int] = DataQueue("free", is_master=True)
    waiting = [full.put_async(number) for number in range(20)]
    free.put_async(1).result()
    got: list[int] = []
    while len(got) < 20:
        got += full.get(4)
    for one in waiting:
        one.result()
    return {"got": sorted(got)}


def calls_until_told() -> dict[str, Any]:
    """One call after another, and how many were made."""
    made = 0
    while not (folder() / "enough").exists():
        RoleGroup("OFFICE")[0].call("post", "x").result()
        made += 1
        (folder() / "made").write_text(str(made))
    return {"made": made}


def names_a_role_that_is_none() -> None:
    tried()
    RoleGroup("OFICE")


def asks_slowly() -> None:
    """A driver that asks another worker, whose answer takes until a file is there."""
    tried()
    answer = RoleGroup("SLOW")[0].call("answer").result()
    (folder() / "answered").write_text(answer)


def ends_at_once() -> None:
    (folder() / "ended").write_text("x")
    tried()


class Slow:
    @rpc()
    def answer(self) -> str:
        (folder() / "asked").write_text("x")
        while not (folder() / "may-answer").exists():
            time.sleep(0.01)
        return "slowly"


class Belt:
    """Owns a queue, which it makes in its main."""

    def run(self) -> None:
        self.queue: DataQueue[int] = DataQueue("belt", is_master=True, size=2)
        tried()
        while not (folder() / "over").exists():
            time.sleep(0.01)


def puts() -> None:
    """A producer that dies once in the middle: a new one puts everything again."""
    queue: DataQueue[int] = DataQueue("belt")
    tried()
    for number in range(6):
        queue.put(number)
    (folder() / "put").write_text("x")


def gets() -> dict[str, Any]:
    queue: DataQueue[int] = DataQueue("belt")
    got: list[int] = []
    while not (folder() / "put").exists() or queue.qsize():
        got += queue.get(2)
        if len(got) >= 2:  # by ones or by twos
            (folder() / "got two").touch()
        time.sleep(0.01)
    (folder() / "over").write_text("x")
    return {"got": got}


class Ledger:
    @rpc()
    def enter(self, entry: str) -> str:
        return entry


@rpc()
async def later(text: str) -> str:
    await asyncio.sleep(0.01)
    return f"later {text}"


def returns_early() -> None:
    appears("asked")
    (folder() / "returned").write_text("x")


def asks_before_and_after() -> None:
    """Calls a coroutine of the trainer's, while the trainer's main runs and when it has returned."""
    first = RoleGroup("TRAINER").call("later", "before").result()
    (folder() / "asked").write_text("x")
    appears("returned")
    time.sleep(0.3)  # until the return is through; where it is not, the test shows less
    second = RoleGroup("TRAINER").call("later", "after").result()
    (folder() / "heard").write_text(" ".join([*first, *second]))


def appears(name: str) -> None:
    while not (folder() / name).exists():
        time.sleep(0.01)


class Twice:
    """Exports a name twice."""

    def run(self) -> None:
        tried()
        export_rpc_instance("ledger", Ledger())
        export_rpc_instance("ledger", Ledger())
