"""2,500 half-open callers before the master's port, in a process that has descriptors for a few dozen."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.waits import GENEROUS_S

CROWD = 2500
DESCRIPTORS = 64
"""That the child may open beside those it has when its port is open."""

RESERVE = 24


def serve(reserve: int) -> None:
    """The child: a standing job's REST port, where nobody is crowded out before the descriptors are spent. It opens a
    file now and then, as a database or a log would, until its input ends, and then says how often that failed."""
    from gyre.api.rest import RestServer, create_app
    from gyre.ports.bounds import PortBounds
    from tests.doubles.standing_job import StandingJob

    bounds = PortBounds(unproven=10**6, unproven_per_address=10**6, head_s=600.0, reserve_descriptors=reserve)
    tried = failed = 0
    with StandingJob() as job:
        server = RestServer(create_app(job.master, token=None), bounds=bounds)
        port = server.start().rpartition(":")[2]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + DESCRIPTORS, hard)
        )
        print(port, flush=True)
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            tried += 1
            with contextlib.ExitStack() as opened:
                try:
                    for _ in range(RESERVE // 2):
                        opened.enter_context(open("/dev/null"))
                except OSError:
                    failed += 1
        print(tried, failed, flush=True)
        server.stop()


@contextlib.contextmanager
def served(reserve: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    code = f"from tests.api.test_spent_descriptors import serve; serve({reserve})"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            yield int(child.stdout.readline()), child
        finally:
            child.kill()


@contextlib.contextmanager
def crowd_at(port: int) -> Iterator[None]:
    """Callers that begin a request, in a process of their own limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CROWD + 500:
        pytest.skip(f"this machine permits {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CROWD + 500), hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(CROWD):
            link = opened.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(("127.0.0.1", port))
        yield


def ask(port: int) -> bool:
    """Whether an honest caller is answered, at one try."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=GENEROUS_S) as link:
            link.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return link.recv(1 << 12).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def asked(port: int) -> None:
    until = time.monotonic() + GENEROUS_S
    while not ask(port):
        assert time.monotonic() < until, "no honest caller was answered"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [RESERVE, 0], ids=["with a reserve", "without"])
def test_an_honest_caller_is_answered_with_descriptors_spent(reserve: int) -> None:
    with served(reserve) as (port, child):
        with crowd_at(port):
            asked(port)
        asked(port)  # and after it
        said, errors = child.communicate("\n", timeout=GENEROUS_S)
    tried, failed = map(int, said.split())
    assert tried > 10
    if reserve:
        assert failed == 0, "the process kept what it needs for itself"
    assert "No descriptor is left for a caller" in errors
    assert "Traceback" not in errors
    assert errors.count("\n") < 200, "one line a second for one cause"
