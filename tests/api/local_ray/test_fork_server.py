"""Workers from the fork server: as if they had been started, with what was loaded; and without it, still started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gyre.api.local_ray import lean_start, worker_starter
from gyre.api.local_ray.lean_start import ForkServer

WORKER = """
import json, os, resource, signal, sys
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "argv": sys.argv[1:], "cwd": os.getcwd(),
    "mine": os.environ.get("MINE"), "early": "colorsys" in sys.modules, "name": __name__,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "read": sys.stdin.read(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    monkeypatch.setattr(lean_start, "LIGHT_MODULES", ("colorsys", "no_such_module"))
    monkeypatch.setattr(lean_start, "RAY_MODULES", ("chunk",))
    monkeypatch.setattr(lean_start, "ray_worker", lambda: str(program))
    running = ForkServer()
    try:
        yield running
    finally:
        running.close()


def start(tmp_path: Path, *argv: str, **env: str) -> dict[str, Any]:
    """Start a worker as Ray does, in a process group of its own, and return what it says of itself."""
    done = subprocess.run(
        [sys.executable, worker_starter.__file__, *argv],
        env={**os.environ, **env},
        cwd=tmp_path,
        input="given",
        capture_output=True,
        text=True,
        timeout=60,
        process_group=0,
        preexec_fn=lambda: __import__("resource").setrlimit(7, (777, 777)),
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_forked_worker_is_as_one_that_was_started(server: ForkServer, tmp_path: Path) -> None:
    said = start(tmp_path, "--worker-id=1", "a b", MINE="x=y")
    assert said["parent"] == server.pid
    assert said["early"]
    assert said["argv"] == ["--worker-id=1", "a b"]
    assert (said["cwd"], said["mine"], said["read"]) == (str(tmp_path), "x=y", "given")
    assert said["name"] == "__main__"
    assert said["files"] == 777
    assert said["interrupt"]
    assert said["group"] == said["pid"], "Ray ends a worker's whole process group: nobody else is in it"
    assert start(tmp_path)["pid"] != said["pid"]


def test_a_worker_of_another_cluster_starts_by_itself(server: ForkServer, tmp_path: Path) -> None:
    assert start(tmp_path, RAY_RAYLET_PID="7")["early"]
    assert not start(tmp_path, RAY_RAYLET_PID="8")["early"]
    assert start(tmp_path, RAY_RAYLET_PID="7")["early"]


def test_after_a_worker_that_broke_down_the_next_starts_by_itself(server: ForkServer, tmp_path: Path) -> None:
    assert start(tmp_path, STATUS="3")["early"]
    server._process.wait(60)
    assert not start(tmp_path)["early"]


def test_without_the_server_a_worker_starts_by_itself(server: ForkServer, tmp_path: Path) -> None:
    environment = dict(os.environ)
    server._process.kill()
    server._process.wait()
    said = start(tmp_path, "--worker-id=1", **environment)
    assert not said["early"]
    assert said["argv"] == ["--worker-id=1"]


def test_a_server_that_is_killed_with_a_request_unanswered_leaves_the_worker_to_itself(
    server: ForkServer, tmp_path: Path
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(start, tmp_path, "--worker-id=1")
        deadline = time.monotonic() + 60.0
        while not is_asked() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        server._process.wait()
        assert not said.result(60)["early"]


def is_asked() -> bool:
    """Whether a starter has connected to the server's socket."""
    path = os.environ[worker_starter.SERVER]
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(path) for line in lines) > 1


def test_the_server_ends_with_the_process_that_started_it(server: ForkServer) -> None:
    folder = Path(os.environ[worker_starter.SERVER]).parent
    os.close(server._alive)
    server._alive = os.open(os.devnull, os.O_RDONLY)  # for its `close`
    server._process.wait(60)
    assert not folder.exists()


def test_what_is_loaded_for_every_job_starts_no_thread_and_touches_no_device() -> None:
    """A process with threads cannot be forked safely; and torch would cost those a second who do not use it."""
    code = (
        "import importlib, os, sys, numpy\nthreads = lambda: len(os.listdir('/proc/self/task'))\nbefore = threads()\n"
        f"[importlib.import_module(name) for name in {lean_start.LIGHT_MODULES!r}]\n"
        "assert threads() == before, threads()\n"
        "assert not {'ray', 'torch', 'transformers', 'megatron'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_starter_imports_nothing_beyond_what_python_has_built_in() -> None:
    code = (
        "import sys; before = set(sys.modules); import runpy; known = set(sys.modules)\n"
        f"import importlib.util as u; s = u.spec_from_file_location('starter', {worker_starter.__file__!r})\n"
        "m = u.module_from_spec(s); known |= set(sys.modules); s.loader.exec_module(m)\n"
        "new = set(sys.modules) - known; assert new <= {'_socket'}, new\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
