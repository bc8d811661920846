"""Run actions on a store in several processes at once, released together; a killed one is an outcome too.

One fresh interpreter imports the store, then forks a process per action (so that a race of many costs one
start of Python), holds them at a gate, lets them go at the same moment and collects what became of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """`result` of an action that returned, or the `error` code that it raised, or the `signal` it died of."""

    result: Any = None
    error: str | None = None
    message: str = ""
    signal: int | None = None


def in_processes(url: str, *actions: tuple[str, dict[str, Any]]) -> list[Outcome]:
    """The outcomes of `actions` (a function's name in this file, and its arguments), in their order."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.store.store_processes"],
        cwd=Path(__file__).parents[2],
        input=json.dumps({"url": url, "actions": actions}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(**outcome) for outcome in json.loads(done.stdout)]


def entries(first: int, count: int, **fields: Any) -> list[Any]:
    from gyre.store import Entry, StoredCommand

    return [
        Entry(
            seq=seq,
            event_id=f"e{seq}",
            cause=None,
            kind="Ticked",
            at=float(seq),
            actor="test",
            body={"seq": seq},
            upserts={("counter", "last"): {"seq": seq}, ("row", str(seq)): {}},
            deletes=[("row", str(seq - 1))],
            commands=[StoredCommand(id=f"c{seq}", kind="Tick", body={"seq": seq})],
            done=[f"c{seq - 1}"],
            **fields,
        )
        for seq in range(first, first + count)
    ]


# -- actions, each in a process of its own -----------------------------------------------------------------


def open_it(url: str) -> bool:
    from gyre.store import open_store

    with open_store(url) as store:
        return store.jobs() == []


def append_and_die(url: str, job_id: str, epoch: int, first: int, count: int, point: str) -> None:
    """`point` is one of `tests.store.fault_points`, or a table."""
    from gyre.store import open_store, tables
    from tests.store.fault_points import after_writing, at_points

    store = open_store(url)
    if hasattr(tables, point):
        after_writing(store, getattr(tables, point), _die)
    at_points(store, lambda name: _die() if name == point else None)
    store.journal(job_id).append(epoch, entries(first, count))


def take_over_and_append(url: str, job_id: str, first: int) -> int:
    """What two masters do that start at the same moment: take over, meet, then both write."""
    from gyre.store import open_store

    with open_store(url) as store:
        journal = store.journal(job_id)
        epoch = journal.take_over(now=1.0, pid=os.getpid())
        _second_gate()
        journal.append(epoch, entries(first, 1))
        return epoch


def create_named(url: str, job_id: str, name: str) -> str:
    from gyre.store import open_store

    with open_store(url) as store:
        _second_gate()
        store.create_job(job_id=job_id, name=name, spec={}, now=1.0)
        return job_id


def ledger_and_die(url: str, job_id: str, term: int, point: str) -> None:
    from gyre.store import CheckpointRow, GroupRow, open_store
    from tests.store.fault_points import at_points

    store = open_store(url)
    at_points(store, lambda name: _die() if name == point else None)
    groups = [GroupRow(number, "trained", step=1) for number in range(3)]
    store.ledger(job_id).write(term, groups=groups, checkpoint=CheckpointRow(1, "/c/1", 1.0), cursor=3)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- the forking parent ------------------------------------------------------------------------------------

_ready: int = -1
_gates: list[int] = []
"""What is read at the first gate and at the second. One pipe for both would let a process that is fast take the byte of
one that is still at the first."""


def _second_gate() -> None:
    """Say that we are here, and wait until all others are."""
    os.write(_ready, b"2")
    os.read(_gates[1], 1)


def _main() -> None:
    global _ready
    import gyre.store  # noqa: F401  (before the fork, so that it is paid for once)

    order = json.load(sys.stdin)
    ready_read, _ready = os.pipe()
    opens = []
    for _ in range(2):
        gate, opened_by = os.pipe()
        _gates.append(gate)
        opens.append(opened_by)
    children: list[tuple[int, int]] = []
    for name, arguments in order["actions"]:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready_read)
            for opened_by in opens:
                os.close(opened_by)
            _child(write_end, name, order["url"], arguments)
        os.close(write_end)
        children.append((pid, read_end))
    os.close(_ready)
    for opened_by in opens:  # the start, and the second gate of those actions that have one
        _await_all(ready_read, len(children))
        with contextlib.suppress(OSError):
            os.write(opened_by, b"g" * len(children))
    outcomes = []
    for pid, read_end in children:
        with os.fdopen(read_end) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        outcomes.append(json.loads(said) if said else {"signal": os.WTERMSIG(status)})
    json.dump(outcomes, sys.stdout)


def _await_all(ready_read: int, count: int) -> None:
    """Until each has written a byte, or nobody is left to write (the pipe's end)."""
    seen = 0
    while seen < count:
        said = os.read(ready_read, count - seen)
        if not said:
            return
        seen += len(said)


def _child(write_end: int, name: str, url: str, arguments: dict[str, Any]) -> None:
    from gyre.errors import GyreError

    os.write(_ready, b"1")
    os.read(_gates[0], 1)
    try:
        outcome: dict[str, Any] = {"result": globals()[name](url, **arguments)}
    except GyreError as error:
        outcome = {"error": error.code, "message": str(error)}
    except BaseException as error:
        outcome = {"error": "crash", "message": repr(error)}
    with os.fdopen(write_end, "w") as pipe:
        json.dump(outcome, pipe)
    os._exit(0)


if __name__ == "__main__":
    _main()
