"""This process's connection to a Ray cluster that it found, or that it started and ends.

Invariants:
- *whole or not at all*: Ctrl-C and SIGTERM during Ray's start are held back until it has started and can be ended; what
  a killed process leaves is removed by its sweeper (`gyre.api.local_ray.sweeper`), or by the next start;
- *told soon*: an address where nobody listens is Unreachable within seconds; Ray itself would try for minutes.

`tests/api/test_ray_session.py` holds the private names of Ray that are used here to the pinned version.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gyre.api.home import Home
from gyre.api.local_ray import sweeper
from gyre.api.local_ray.lean_start import ForkServer, Sweeper, knows_ray, lean
from gyre.api.local_ray.printing_workers import printing_workers
from gyre.api.terminal.signals import signals_held, signals_ignored
from gyre.errors import ConfigError, Unauthorized, Unreachable
from gyre.process_identity import ProcessIdentity

NAMESPACE = "gyre"

PROBE_S = 5.0
"""How long a cluster's address may refuse connections: a head takes a few seconds to start."""

SERVERS_END_S = 10.0
"""How long killed servers of our own cluster may take to be gone: a raylet unmaps its object store."""

CLOCK_SLACK_S = 60.0
"""A process that is by so much younger than a session cannot have made it, also where the clock was set meanwhile."""
HEADLESS_SHUTDOWN_S = 5.0
"""How long Ray may take to leave a cluster whose head has ended."""

_AUTH_MODE = "RAY_AUTH_MODE"
_started_here = threading.Event()
"""Set if this process started the Ray cluster that it uses, and so ends it."""

_fork_servers: list[ForkServer] = []
"""That of the cluster which this process started, or is about to."""

_sweepers: list[Sweeper] = []
"""That of the cluster which this process started."""


def connect(ray_address: str | None, *, start_local: bool, place: Home) -> str:
    """Connect this process to a Ray cluster, unless it is connected, and return the cluster's address.

    `auto` is the cluster that runs on this machine; `local`, or no address with `start_local`, starts one here. Raises
    Unreachable, Unauthorized, and ConfigError for an invalid address, or for another than this process is connected to.
    """
    # A worker's default niceness of 15 starves it beside any other load.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():
        here = str(ray.get_runtime_context().gcs_address)
        _refuse_another(ray_address, here)
        return here
    address = ray_address or os.environ.get("RAY_ADDRESS") or ""
    if address and address != "local":
        _join(address)
    elif start_local:
        _start_local(place)
    else:
        raise Unreachable(
            "no Ray cluster to submit to: RAY_ADDRESS is not set.",
            hint="Start one with `ray start --head`, or use `gyre run`, which starts its own.",
        )
    _keep_off_stdout()
    return str(ray.get_runtime_context().gcs_address)


def prepare_local(ray_address: str | None, modules: Sequence[str] = ()) -> None:
    """Begin what `connect` will want if it starts a cluster: the process that workers are forked from, with `modules`
    loaded beside those of every job. Returns at once; does nothing where there is a cluster. `disconnect` ends it."""
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    here = (ray_address or os.environ.get("RAY_ADDRESS") or "local") == "local"
    if here and not connected and not _fork_servers and knows_ray():
        _fork_servers.append(ForkServer(modules))
        atexit.register(_end_fork_server)


def _end_fork_server() -> None:
    while _fork_servers:
        _fork_servers.pop().close()


def disconnect(session: str = "") -> None:
    """Leave the cluster. A cluster that this process started ends with all its processes, and its files are removed."""
    import ray

    with signals_held():
        if not session and _started_here.is_set() and ray.is_initialized():
            session = _session_of(ray)
        servers = _own_servers()
        if ray.is_initialized():
            if cluster_is_gone():
                _end_headless(ray)
            else:
                ray.shutdown()
        _await_end(servers)
        _end_fork_server()
        if _started_here.is_set():
            _started_here.clear()
            folder = Path(session)
            if folder.name.startswith("session_"):
                shutil.rmtree(folder, ignore_errors=True)
                _forget_latest(folder.parent)
        while _sweepers:
            _sweepers.pop().close()


def _end_headless(ray: Any) -> None:
    """End what is left of our own cluster whose head has ended. Ray's shutdown asks the head, and waits for it; so it
    is given little time, and what it would ask for is done: no server is left, workers end with their raylet."""
    node = ray._private.worker._global_node
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(HEADLESS_SHUTDOWN_S)


def _own_servers() -> list[subprocess.Popen[bytes]]:
    """The servers of the cluster that this process started."""
    from ray._private import worker

    node = worker._global_node
    if node is None or not _started_here.is_set():
        return []
    return [info.process for infos in node.all_processes.values() for info in infos]


def _await_end(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for servers that Ray has killed. Ray gives each a second, which a busy machine exceeds; one that is stuck in
    the kernel is left to it."""
    deadline = time.monotonic() + SERVERS_END_S
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(max(0.0, deadline - time.monotonic()))


def _disconnect_at_exit(session: str) -> None:
    with signals_ignored():
        disconnect(session)


def cluster_is_gone() -> str:
    """The address of the cluster that this process started, if its head (the GCS) has ended; else "". Ray itself
    notices after a minute, and then ends this process."""
    if not _started_here.is_set():
        return ""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return ""
    servers = node.all_processes.get("gcs_server", [])
    return str(node.gcs_address) if servers and servers[0].process.poll() is not None else ""


def owns_cluster() -> bool:
    """Whether the cluster ends with this process."""
    return _started_here.is_set()


def answers(address: str, *, timeout_s: float = 2.0) -> bool:
    """Whether anything listens at a cluster's `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _refuse_another(ray_address: str | None, here: str) -> None:
    """Raises ConfigError if the job is for another cluster than `here`. Ports tell clusters apart, for a machine has
    many names."""
    if ray_address in (None, "", "auto", "local"):
        return
    if ray_address.rpartition(":")[2] != here.rpartition(":")[2]:
        raise ConfigError(
            f"ray address {ray_address!r}: this process is connected to the Ray cluster at {here}.",
            hint="A process is in one cluster at a time: call ray.shutdown() first, or leave the address out.",
        )


def _join(address: str) -> None:
    """Connect to a cluster that is there already."""
    import ray

    _check_address(address)
    own = _use_token_of_this_machine(address)
    try:
        with _handlers_kept(), _quiet():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, AssertionError) as error:
        if own:
            del os.environ[_AUTH_MODE]
        cause = error.__cause__ or error
        if isinstance(cause, ray.exceptions.AuthenticationError):
            raise Unauthorized(
                f"the Ray cluster at {address} wants a token, and refused this process's.",
                hint=f"Set {_AUTH_MODE}=token, and RAY_AUTH_TOKEN to the cluster's token "
                "(or have it in ~/.ray/auth_token).",
            ) from None
        raise Unreachable(
            f"no Ray cluster answers at {address}: {_first_line(error)}".rstrip(".") + ".",
            hint="Start one with `ray start --head`, or correct RAY_ADDRESS.",
        ) from None


def _check_address(address: str) -> None:
    """Raises ConfigError or Unreachable if no cluster can be there. Ray would try for more than a minute."""
    if address == "auto":
        return
    if "://" in address:
        raise ConfigError(
            f"ray address {address!r}: Ray Client addresses are not supported.",
            hint="On a machine of the cluster use its host:port (6379 by default), or auto.",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"ray address {address!r}: expected host:port, auto or local.")
    deadline = time.monotonic() + PROBE_S
    while not answers(address):
        if time.monotonic() > deadline:
            raise Unreachable(
                f"no Ray cluster answers at {address}: nothing listens there.",
                hint="Start one with `ray start --head`, or correct RAY_ADDRESS.",
            )
        time.sleep(0.25)


def _use_token_of_this_machine(address: str) -> bool:
    """Set Ray's token if the address is this machine's; returns whether it was set. A cluster on this machine wants the
    token that Ray keeps in the user's home. Ray sends it for `auto` but not for an address, which may be a
    stranger's."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    if (
        _AUTH_MODE in os.environ
        or address == "auto"
        or not is_own_host(address.rpartition(":")[0].strip("[]"))
    ):
        return False
    level = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))
    finally:
        logging.getLogger("ray").setLevel(level)


def is_own_host(host: str) -> bool:
    """Whether an address is this machine's: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind((found[0][4][0], 0))
    except OSError:
        return False
    return True


def _start_local(place: Home) -> None:
    import ray

    folder = place.ray_temp_dir()
    sweeper.sweep_left(str(folder))
    _sweep(folder)
    prepare_local("local")
    with signals_held():
        swept = Sweeper(folder, [server.pid for server in _fork_servers])
        try:
            with _quiet(), lean(swept.note), printing_workers(), swept.marked():
                context: Any = ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(folder),
                )
        except BaseException:
            swept.close()  # Ray has ended what it began
            raise
        _sweepers.append(swept)
        _started_here.set()
        atexit.register(_disconnect_at_exit, context.address_info.get("session_dir", ""))


def _session_of(ray: Any) -> str:
    node = ray._private.worker._global_node
    return str(node.get_session_dir_path()) if node is not None else ""


def _sweep(folder: Path) -> None:
    """Remove the files of sessions that nobody has a record of, whose processes are gone and on whose sockets nobody
    answers. A process of the same pid that is younger than the session is another."""
    for session in folder.glob("session_*_*"):
        pid = session.name.rpartition("_")[2]
        if session.is_symlink() or not pid.isdecimal() or session.lstat().st_uid != os.getuid():
            continue
        if not _may_be_of(int(pid), session) and not _listens(session / "sockets" / "raylet"):
            shutil.rmtree(session, ignore_errors=True)
    _forget_latest(folder)


def _may_be_of(pid: int, session: Path) -> bool:
    """Whether the process that has the pid now was there when the session was made."""
    found = ProcessIdentity.of(pid)
    if found is None or not found.is_alive():
        return Path("/proc", str(pid)).exists() and found is None
    age_s = time.time() - session.lstat().st_mtime
    lived_s = time.clock_gettime(time.CLOCK_BOOTTIME) - found.started / os.sysconf("SC_CLK_TCK")
    return lived_s + CLOCK_SLACK_S > age_s


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _forget_latest(folder: Path) -> None:
    """Remove Ray's link to the newest session if that session is gone."""
    link = folder / "session_latest"
    if link.is_symlink() and not link.exists():
        link.unlink(missing_ok=True)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the SIGTERM handler that Ray's start replaces, because it may stop the job first. If there was none,
    Ray's own, which exits in order, stays."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        ours = before is not signal.SIG_DFL and before is not None
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _keep_off_stdout() -> None:
    """Keep Ray's notices of dead workers off stdout, which is for this command's data. The journal has each of those
    deaths, with the repair."""
    import ray._private.worker as worker

    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    logging.getLogger("ray").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the notices that Ray's start prints to stderr. Errors are exceptions."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
