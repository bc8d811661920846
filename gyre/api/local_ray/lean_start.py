"""Starting Ray with what a job needs of it: no dashboard, no monitors, in a session of its own, and workers by way of
the fork server.

A signal to the command's whole process group, as `timeout` and Slurm send it, must not end the cluster under the job,
which then could not end in order. A command that is killed takes its cluster along all the same: the kernel ends Ray's
processes with the one that started them.

Ray's `init` waits for the dashboard, though it is asked for none, and starts an autoscaler's monitor and a log monitor
that nobody listens to: a second or two of a core each, while a job's own processes want to start.

`tests/api/test_ray_session.py` holds the private names of Ray that are used here to the pinned version. A Ray of
another version starts as it does by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gyre
from gyre.api.local_ray import sweeper, worker_starter
from gyre.process_identity import ProcessIdentity

LIGHT_MODULES = (
    "gyre.workloads.vertex.host",
    "gyre.master.master_actor",
    "gyre.workloads.runtime",
    "gyre.workloads.rollout_vertices",
    "gyre.api.rest.surface",
)
"""What the processes of every job import, none of it heavy: master, host, manager, agents."""

RAY_MODULES = ("ray._private.workers.default_worker", "gyre.master.ray_cluster")
"""The same of Ray, which reads its settings when it is imported."""


KNOWN_RAY = "2.60."
"""How the versions of Ray begin whose start this module changes."""


def knows_ray() -> bool:
    """Whether the Ray that is installed is one whose private names are known here."""
    return version("ray").startswith(KNOWN_RAY)


class ForkServer:
    """The fork server that this process started."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        """Start it, with `modules` to load beside those of every job. Returns at once."""
        self._folder = Path(tempfile.mkdtemp(prefix="gyre-fork-"))  # of this user alone
        path = str(self._folder / "socket")
        reading, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path.insert(0, {str(Path(gyre.__file__).parents[1])!r}); "
                    "from gyre.api.local_ray.fork_server import main; main()",
                    str(listener.fileno()),
                    str(reading),
                    ray_worker(),
                    ",".join(LIGHT_MODULES),
                    ",".join(modules),
                    ",".join(RAY_MODULES),
                ],
                pass_fds=(listener.fileno(), reading),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a library's remarks on its import are nobody's data
                stderr=subprocess.DEVNULL,
                env={**os.environ, sweeper.MARK: str(ProcessIdentity.own())},
                start_new_session=True,  # a signal to the command's group is the command's alone
            )
        os.close(reading)
        os.environ[worker_starter.SERVER] = path
        os.environ[worker_starter.WORKER] = ray_worker()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it. Workers live on."""
        os.close(self._alive)
        self._process.kill()  # it may be in the middle of an import, and has nothing to put in order
        self._process.wait()
        for name in (worker_starter.SERVER, worker_starter.WORKER):
            os.environ.pop(name, None)
        shutil.rmtree(self._folder, ignore_errors=True)


class Sweeper:
    """The process that removes what this one leaves in `folder`, Ray's, when it is killed."""

    def __init__(self, folder: Path, pids: Sequence[int] = ()) -> None:
        """Start it. `pids`: of processes that each lead a session of the cluster's."""
        self._folder = str(folder)
        self._driver = ProcessIdentity.own()
        self.note(*pids)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", sweeper.__file__, self._folder, str(self._driver)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # it keeps no folder of the user's busy
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def note(self, *pids: int) -> None:
        """More processes that each lead a session of the cluster's, all started by this process."""
        found = [ProcessIdentity.of(pid) for pid in pids]
        sweeper.note(self._folder, self._driver, [process for process in found if process is not None])

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """A block whose child processes are the cluster's."""
        os.environ[sweeper.MARK] = str(self._driver)
        try:
            yield
        finally:
            os.environ.pop(sweeper.MARK, None)

    def close(self) -> None:
        """The cluster has ended in order."""
        if ProcessIdentity.own() != self._driver:  # a fork of the driver has nothing to end
            return
        sweeper.forget(self._folder, self._driver)
        self._process.kill()
        self._process.wait()


def ray_worker() -> str:
    """Path of Ray's worker program, found without importing Ray."""
    import importlib.util

    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent / "_private" / "workers" / "default_worker.py")


@contextlib.contextmanager
def lean(begun: Callable[[int], None]) -> Iterator[None]:
    """A block in which `ray.init` starts a cluster without what no job needs, and with our workers; with a Ray that is
    not known, as ever. Each server leads a session of its own, and its pid goes to `begun` before the server can start
    processes of its own: their titles may overwrite the mark in their environments."""
    if not knows_ray():
        yield
        return
    import ray._private.parameter
    import ray._private.services
    from ray._private.node import Node

    services: Any = ray._private.services
    parameter: Any = ray._private.parameter
    whole: Any = parameter.RayParams

    class LeanParams(whole):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.no_monitor = True
            self.include_log_monitor = False
            self.worker_path = worker_starter.__file__

    # Else Ray starts workers before there is a job, which no fork can be: what is imported is of one job.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    node: Any = Node
    dashboard = node.start_api_server
    popen = services.ConsolePopen

    class LeadingPopen(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, start_new_session=True)
            begun(self.pid)

    parameter.RayParams = LeanParams
    services.ConsolePopen = LeadingPopen
    node.start_api_server = lambda self, **_: None
    try:
        yield
    finally:
        parameter.RayParams = whole
        services.ConsolePopen = popen
        node.start_api_server = dashboard
