"""A process that has imported what workers need, and is forked for each of them.

A Ray worker that starts by itself spends half a second of a core on importing Ray, and a vertex as much again on Gyre
and twice that on torch. A fork has them at once, shares their memory, and a vertex that is replaced is back so much
sooner.

Invariants:
- *as if begun*: a forked worker has the arguments, environment, folder, open files, limits, process group and signal
  mask of the starter that Ray ran, and random numbers of its own;
- *no thread of its own*: a process that runs others is not forked; the server that finds some ends, and workers start
  by themselves;
- *no second try*: when a worker breaks down as it begins, the server ends, and the next one starts by itself;
- *its owner's*: it serves processes of its own user, and ends with the process that started it.

Only Gyre's own modules are loaded beforehand, and none that starts a thread or touches a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gyre.api.local_ray.worker_starter import FORKED

REQUEST_S = 5.0
"""Deadline of a starter's request, which it sends at once: one that hangs may not keep the others waiting."""

_NO_JOB = "ffffffff"
"""The job of workers that Ray starts before it has one: they start by themselves."""

EARLY_S = 5.0
"""A worker that fails within this time fails as it begins: it connects to its cluster in a tenth of a second."""

_RAY_SETTINGS = ("RAY_RAYLET_PID", "RAY_JOB_ID", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""What Ray's C++ library reads from the environment once, and what differs between clusters."""

_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the starter was started with. `starter`: its process id."""

    starter: int
    folder: str
    arguments: list[str]
    variables: dict[str, str]


def serve(
    listener: socket.socket,
    owner: int,
    worker: str,
    path: list[str],
    *,
    light: Sequence[str],
    heavy: Sequence[str] = (),
    late: Sequence[str] = (),
) -> None:
    """Import the modules `light`, then fork `worker`, a program's path, for each request, and import those of `heavy`
    in between: a worker that needs none of them does not wait for them. Those of `late` are imported at the first
    request, in its environment: Ray reads its settings when it is imported, and never again.

    `owner`: a pipe that ends when the process that wanted the server ends. `path`: a worker's `sys.path` without its
    first entry.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command; it stops the cluster in order
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake `select`
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    began: dict[int, float] = {}
    _load("numpy")
    threads = (
        _threads()
    )  # those of numpy's linear algebra, which it ends before a fork and begins again when needed
    for module in light:
        _load(module)
    left = list(heavy)
    settings: dict[str, str] | None = None
    while True:
        watched = [listener.fileno(), owner, woken]
        readable, _, _ = select.select(watched, [], [], 0 if left else None)
        if woken in readable:
            os.read(woken, 4096)
        if owner in readable or _has_broken_down(began):
            return
        if listener.fileno() in readable:
            if _threads() > threads:
                return
            connection, _ = listener.accept()
            with connection:
                settings = _answer(
                    connection, (listener.fileno(), owner, woken, wake), worker, path, settings, late, began
                )
        elif left:
            _load(left.pop(0))


def _load(module: str) -> None:
    with contextlib.suppress(ImportError):  # an extra that is not installed: who needs it will say so
        importlib.import_module(module)
    gc.freeze()  # else each worker's first collection would copy every page


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_broken_down(began: dict[int, float]) -> bool:
    """Collect the workers that have ended; whether one did as it began, and not because it was told to."""
    broken = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return broken
        if pid == 0:
            return broken
        early = time.monotonic() - began.pop(pid, -math.inf) < EARLY_S
        told = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM)
        broken = broken or (early and status != 0 and not told)


def _answer(
    connection: socket.socket,
    own: Sequence[int],
    worker: str,
    path: list[str],
    settings: dict[str, str] | None,
    late: Sequence[str],
    began: dict[int, float],
) -> dict[str, str] | None:
    """Fork a worker, without the server's `own` descriptors, and note in `began` when. `settings` are those with which
    `late` was imported, None before; returns them."""
    try:
        connection.settimeout(REQUEST_S)
        descriptors, request = _request(connection)
    except (OSError, ValueError):  # the starter is gone, hangs, or is another user's: it helps itself
        return settings
    asked = {name: value for name, value in request.variables.items() if name in _RAY_SETTINGS}
    if settings is None and asked.get("RAY_JOB_ID") != _NO_JOB:
        settings = asked
        os.environ.update(asked)
        for module in late:
            _load(module)
    if settings == asked:  # another cluster's workers start by themselves
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for descriptor in own:
                os.close(descriptor)
            _become(connection, descriptors, request, worker, path)
        began[pid] = time.monotonic()
    for descriptor in descriptors:
        os.close(descriptor)
    return settings


def _request(connection: socket.socket) -> tuple[list[int], _Request]:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise ValueError("a process of another user")
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    fields = [os.fsdecode(field) for field in b"".join(parts).split(b"\0")]
    if len(descriptors) != 3 or len(fields) < 4:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("no request")
    end = 3 + int(fields[2])
    variables = dict(variable.split("=", 1) for variable in fields[end:] if "=" in variable)
    return descriptors, _Request(int(fields[0]), fields[1], fields[3:end], variables)


def _become(
    connection: socket.socket, descriptors: list[int], request: _Request, worker: str, path: list[str]
) -> NoReturn:
    """Be the worker that was asked for, until it ends."""
    status = 1
    try:
        os.setpgid(0, 0)  # Ray kills the process group of a worker that is gone
        for limit in _LIMITS:
            with contextlib.suppress(OSError, ValueError):  # a limit that may not be raised stays
                resource.setrlimit(limit, resource.prlimit(request.starter, limit))
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        connection.send(FORKED)  # raises where the starter has given up, and runs the worker itself
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.variables)
        sys.argv = [worker, *request.arguments[1:]]
        sys.path[:] = [os.path.dirname(worker), *path]
        _own_random_numbers()
        runpy.run_path(worker, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # its output may be closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _own_random_numbers() -> None:
    """The standard library sees to its own after a fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def main() -> None:
    """`-c "...main()" LISTENER OWNER WORKER LIGHT HEAVY LATE`: descriptors, and modules with commas between."""
    listener, owner, worker, *modules = sys.argv[1:]
    light, heavy, late = ([name for name in names.split(",") if name] for names in modules)
    path = sys.path[2:]  # without this checkout, which the command has put first, and the folder it ran in
    with socket.socket(fileno=int(listener)) as listening:
        try:
            serve(
                listening,
                int(owner),
                worker,
                path,
                light=light,
                heavy=heavy,
                late=late,
            )
        finally:
            place = Path(listening.getsockname())
            with contextlib.suppress(OSError):  # who started it may have removed them
                place.unlink()
                place.parent.rmdir()
