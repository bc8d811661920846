"""This process's connection to Ray: found, or started here and ended with everything in it.

What it touches of Ray's private names is held by `tests/api/test_ray_session.py` to the pinned version.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

from gyre.api.home import Home
from gyre.errors import Unauthorized, Unreachable

NAMESPACE = "gyre"

_started_here = threading.Event()
"""This process started the Ray cluster that it uses, and ends it."""


def connect(ray_address: str | None, *, start_local: bool, place: Home) -> str:
    """Make sure that this process is connected to a Ray cluster, and return its address."""
    # A worker's default niceness of 15 starves it beside any other load.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    address = ray_address or os.environ.get("RAY_ADDRESS")
    if address:
        try:
            with _quiet():
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            if "auth" in str(error).lower() and "token" in str(error).lower():
                raise Unauthorized(f"Ray at {address} refused the token: {error}") from None
            raise Unreachable(
                f"no Ray cluster answers at {address}: {error}".rstrip(".") + ".",
                hint="Start one with `ray start --head`, or correct RAY_ADDRESS.",
            ) from None
        _keep_off_stdout()
        return str(ray.get_runtime_context().gcs_address)
    if not start_local:
        raise Unreachable(
            "no Ray cluster to submit to: RAY_ADDRESS is not set.",
            hint="Start one with `ray start --head`, or use `gyre run`, which starts its own.",
        )
    return _start_local(place)


def _start_local(place: Home) -> str:
    import ray

    folder = place.ray_temp_dir()
    with _quiet():
        context: Any = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    _keep_off_stdout()
    _started_here.set()
    session = context.address_info.get("session_dir", "")
    atexit.register(disconnect, session)
    return str(ray.get_runtime_context().gcs_address)


def disconnect(session: str = "") -> None:
    """Leave the cluster; one that this process started ends with all its processes, and its files go."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
    if _started_here.is_set():
        _started_here.clear()
        if session and os.path.basename(session).startswith("session_"):
            shutil.rmtree(session, ignore_errors=True)


def _keep_off_stdout() -> None:
    """Ray prints notices of dead workers to the driver's stdout, where this command's data goes; the journal
    has each of those deaths, with what was done about it."""
    import ray._private.worker as worker

    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    logging.getLogger("ray").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray's start prints notices to stderr that mean nothing to this command's user. Errors are exceptions."""
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
