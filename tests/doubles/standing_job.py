"""A job under the real master, over a fake cluster, that stands still until a test lets time pass.

    with StandingJob() as job:                        # every vertex runs, and no step has ended
        app = create_app(job.master, token=None)
        job.do(job.world.kill, "rollout-0")
        job.run_until(lambda view: view["incidents"])

The master is `JobMaster`, with its loop and its journal; only the cluster and the clock are fakes. Its loop runs in a
thread of its own, so its `MasterApi` answers any thread while time stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import tempfile
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from gyre.config import TRAINER, JobSpec
from gyre.master.master import JobMaster
from gyre.master.master_api import View
from gyre.store import open_store
from gyre.testing.clock import EPOCH_START, THREAD_PATIENCE_S, VirtualClock, VirtualTimeLoop
from tests.doubles.fake_cluster import FakeCluster

T = TypeVar("T")

TICK_S = 0.25
"""Virtual seconds between two looks at whether what `run_until` waits for has come."""

FOREVER_S = math.inf


def small_spec(name: str = "small") -> JobSpec:
    """A trainer, a gang of two actors, two elastic rollouts and a reward: the smallest job with every case."""
    workload = {"module": "gyre.workloads", "name": "BaseWorkload"}
    return JobSpec.model_validate(
        {
            "name": name,
            "roles": {
                TRAINER: {
                    "entrypoint": {"module": "gyre.workloads", "name": "BaseTrainer"},
                    "resources": {"accelerator": 0},
                },
                "actor": {"entrypoint": workload, "total": 2, "gang": True},
                "rollout": {"entrypoint": workload, "total": 2, "elastic": {"min": 1, "max": 4}},
                "reward": {"entrypoint": workload},
            },
        }
    )


class MasterDied(BaseException):
    """Raised where a master's process ends, so that nothing after it runs."""


class MasterLife:
    """One process of the real master: a loop of its own, so that its death takes everything with it at once."""

    def __init__(self, world: FakeCluster, *, job_id: str, store_url: str, directory: Path) -> None:
        self.connection = world.connect()
        self.exit_code: int | None = None
        self.died = False
        self._buried = False
        self.loop = VirtualTimeLoop(world.clock)
        self.loop.set_exception_handler(_ignore_death)
        self.loop.outside(self._is_writing)
        self.main: asyncio.Task[None] | None = None
        self.master = JobMaster(
            job_id=job_id,
            store_url=store_url,
            directory=directory,
            cluster=self.connection,
            clock=world.clock,
            exit_process=self._exit,
        )

    def start(self) -> asyncio.Task[None]:
        """The master's run, which goes on while the loop does."""
        self.main = self.loop.create_task(self.master.run())
        return self.main

    def die(self) -> None:
        """SIGKILL: nothing of this master runs any more."""
        self.died = True
        self.connection.cut()
        self.stop_loop()

    def stop_loop(self, _: object = None) -> None:
        if not self._buried:
            self.loop.stop()

    def bury(self) -> None:
        """Close what the dead process has left open, as the operating system does. The loop must have stopped."""
        if self.main is not None and self.main.done() and not self.main.cancelled():
            self.main.exception()
        self.died = self._buried = True
        self.connection.cut()
        # More than once: in Python 3.11 `wait_for` forgets a cancellation that comes together with its result.
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=0))
        self.master.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        with contextlib.suppress(RuntimeError):
            self.loop.close()

    def _is_writing(self) -> bool:
        if self._buried:
            return True  # for the dead no time passes
        context = getattr(self.master, "_context", None)
        return context is not None and bool(context._queued) and not context._retrying

    def _exit(self, code: int) -> None:
        self.exit_code = code
        self.die()
        raise MasterDied(f"exit {code}")


class StandingJob:
    """A job whose vertices all run, under the real master. Closed by `close` or by leaving `with`."""

    def __init__(self, spec: JobSpec | None = None, *, job_id: str = "standing-1", **knobs: Any) -> None:
        """`knobs` are `FakeCluster`'s. Unless `step_s` says otherwise, no optimizer step ends."""
        spec = spec or small_spec()
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-standing-", ignore_cleanup_errors=True)
        self.directory = Path(self._folder.name)
        """The job's directory: its logs are in `logs`."""
        self.logs = self.directory / "logs"
        self.logs.mkdir()
        self.clock = VirtualClock()
        self.world = FakeCluster(self.clock, **{"step_s": FOREVER_S, **knobs})
        url = store_with_job(self.directory, job_id, spec)
        self._life = MasterLife(self.world, job_id=job_id, store_url=url, directory=self.directory)
        self._life.loop.stands_at = 0.0
        self.master = self._life.master
        """The job's MasterApi."""
        self._main = self._life.start()
        self._thread = threading.Thread(target=self._live, name=f"master-{job_id}", daemon=True)
        self._thread.start()
        try:
            self.run_until(lambda view: view["job"]["phase"] == "running")
        except BaseException:
            self.close()
            raise

    def view(self) -> View:
        return self.master.view()

    def do(self, action: Callable[..., object], *args: Any) -> None:
        """Call one of the world's knobs, in the loop's thread."""

        async def act() -> None:
            action(*args)

        self._in_loop(act())

    def command(self, verb: str, **body: Any) -> int:
        return self.master.command(verb, body, by="tester")

    def run_until(self, holds: Callable[[View], object], *, limit_s: float = 600.0) -> View:
        """Let virtual time pass until this holds of the job's view, which is returned. Raises AssertionError past
        the limit, and what the master has died of."""
        return self._in_loop(self._run_until(holds, limit_s))

    def close(self) -> None:
        """End the master and remove its files."""
        if self._thread.is_alive():  # else the master has ended by itself
            self._life.loop.call_soon_threadsafe(self._life.die)
        self._thread.join(THREAD_PATIENCE_S)
        self._folder.cleanup()

    def __enter__(self) -> StandingJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._life.loop.run_forever()
        finally:
            self._life.bury()

    def _in_loop(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._life.loop).result(THREAD_PATIENCE_S)

    async def _run_until(self, holds: Callable[[View], object], limit_s: float) -> View:
        deadline = self.clock.monotonic() + limit_s
        while True:
            if self._main.done():
                self._main.result()
            if self.master.ready.is_set() and holds(view := self.master.view()):
                return view
            assert self.clock.monotonic() < deadline, f"it did not come within {limit_s:g} virtual s"
            self._life.loop.stands_at = self.clock.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)


def store_with_job(folder: Path, job_id: str, spec: JobSpec) -> str:
    """Put a store into the folder that holds this job and no event of it, and return its URL."""
    (folder / "gyre.db").write_bytes(_file_with_job(job_id, spec.model_dump_json()))
    return f"sqlite:///{folder / 'gyre.db'}"


@cache
def _file_with_job(job_id: str, spec: str) -> bytes:
    """An SQLite file, made once in a process for each job: the migrations alone take a tenth of a second."""
    body = json.loads(spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gyre.db"
        with open_store(f"sqlite:///{path}") as store:  # the last to close it folds the log into the file
            store.create_job(job_id=job_id, name=body["name"], spec=body, now=EPOCH_START)
        return path.read_bytes()


def _ignore_death(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), MasterDied):
        loop.default_exception_handler(context)
