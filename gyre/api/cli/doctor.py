"""`doctor`: checks of this machine, and of a cluster's, with what to do about each that fails.

What is called ok was tried: packages are imported. A check changes nothing: it makes no database and starts no cluster.
A check that itself breaks is a failed check, not a broken doctor.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import click

from gyre.api.cli import packages
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json, write_table
from gyre.api.cluster_checks import Check, check_machines
from gyre.api.terminal.text_tables import Column
from gyre.errors import GyreError

GIB = 2**30
LOW_DISK_BYTES = 5 * GIB
LEAST_DISK_BYTES = GIB // 2
LOW_SHM_BYTES = GIB
LOW_MEMORY_BYTES = 3 * GIB
BUSY_LOAD_PER_CORE = 1.0
"""Processes that run or wait for a core, per usable core."""
RAY_PORT = 6379

CHECK_COLUMNS = (
    Column("CHECK"),
    Column(""),
    Column("FOUND", least=16, wraps=True),
    Column("WHAT TO DO", least=16, wraps=True),
)


@verb()
@click.option("--cluster", is_flag=True, help="Also run the checks on each machine of the Ray cluster.")
@click.option(
    "--ray-address",
    envvar="RAY_ADDRESS",
    metavar="ADDRESS",
    help="Ray cluster to check, as HOST:PORT or auto [RAY_ADDRESS].",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of checks.")
def doctor(session: CliContext, cluster: bool, ray_address: str | None, as_json: bool) -> int:
    """Check this machine and say what to fix. The exit code is 2 if something must be fixed."""
    remark("Importing what is installed; this takes some seconds.")
    checks = list(examine(session))
    if cluster:
        checks += check_machines(session.home, ray_address)
    if as_json:
        write_json([asdict(check) for check in checks])
    else:
        write_table(
            CHECK_COLUMNS,
            [(check.name, check.status, check.found, check.advice) for check in checks],
        )
    return 2 if any(check.status == "fail" for check in checks) else 0


def examine(session: CliContext) -> Iterator[Check]:
    """Every check, one after the other."""
    checks: list[tuple[str, Callable[[], Check | Iterable[Check]]]] = [
        ("python", _python),
        ("home", lambda: _home(session)),
        ("database", lambda: _database(session)),
        ("postgresql driver", lambda: _postgres_driver(session)),
        ("ray", lambda: packages.package("ray")),
        ("torch", packages.torch),
        ("gpu build of torch", packages.gpu_build),
        ("engines", packages.engines),
        ("extras", packages.extras),
        ("cluster", _cluster),
        ("disk", lambda: _disk(session)),
        ("shared memory", _shared_memory),
        ("cores", _cores),
        ("load", _load),
        ("memory", _memory),
        ("ports", _ports),
    ]
    for name, check in checks:
        try:
            found = check()
            yield from (found,) if isinstance(found, Check) else found
        except GyreError as error:
            yield Check(name, "fail", error.message, error.hint)
        except Exception as error:
            yield Check(name, "fail", f"{type(error).__name__}: {error}", "This check itself is broken.")


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "Use Python 3.11, 3.12 or 3.13.")


def _home(session: CliContext) -> Check:
    path = session.home.path
    if path.exists():
        session.home.check_writable()
        return Check("home", "ok", str(path))
    above = next(folder for folder in path.parents if folder.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return Check("home", "ok", f"{path}, made on first use")
    return Check(
        "home",
        "fail",
        f"{path} cannot be made: {above} is not writable",
        "Set GYRE_HOME to a folder of yours.",
    )


def _database(session: CliContext) -> Check:
    from gyre.store import open_store

    if not session.has_store():
        return Check("database", "ok", "none yet, made on first use")
    with open_store(session.store_url, create=False, read_only=True) as store:
        jobs = store.jobs(limit=1000)
        found = f"{_shown(session.store_url)}: {len(jobs)} jobs, {sum(job.live for job in jobs)} live"
    return Check("database", "ok", found)


def _shown(url: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


def _postgres_driver(session: CliContext) -> Check:
    name = "postgresql driver"
    if (found := packages.installed("psycopg")) is not None:
        return packages.imported(Check(name, "ok", f"psycopg {found}"), "psycopg", status="fail")
    if session.store_url.startswith("postgres"):
        return Check(name, "fail", "psycopg is not installed", "pip install 'gyre-rl[postgres]'")
    return Check(name, "ok", "not installed, and not needed for SQLite")


def _cluster() -> Check:
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address in ("auto", "local"):
        return Check("cluster", "ok", "RAY_ADDRESS not set: a Ray of this machine is used")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return Check("cluster", "ok", f"{address} answers")
    except (OSError, ValueError) as error:
        return Check(
            "cluster",
            "fail",
            f"{address}: {error}",
            "Start Ray there (ray start --head), or unset RAY_ADDRESS.",
        )


def _disk(session: CliContext) -> Check:
    path = session.home.path
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(above).free
    found = f"{free / GIB:.1f} GiB free at {above}"
    if free < LEAST_DISK_BYTES:
        return Check("disk", "fail", found, "Free some space: the journal stops where there is none.")
    if free < LOW_DISK_BYTES:
        return Check("disk", "warn", found, "Checkpoints and Ray's spilling may need more.")
    return Check("disk", "ok", found)


def _shared_memory() -> Check:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check(
            "shared memory", "warn", "no /dev/shm", "Ray uses the disk instead, which is much slower."
        )
    size = shutil.disk_usage(shm)
    found = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free"
    if size.free < LOW_SHM_BYTES:
        return Check("shared memory", "warn", found, "In a container: give it --shm-size=2g or more.")
    return Check("shared memory", "ok", found)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> Check:
    cores = _usable_cores()
    try:
        load, *_ = os.getloadavg()
    except OSError:
        return Check("load", "ok", "this system does not say")
    found = f"{load:.1f} over the last minute, on {cores} core{'' if cores == 1 else 's'}"
    if load <= BUSY_LOAD_PER_CORE * cores:
        return Check("load", "ok", found)
    return Check(
        "load",
        "warn",
        found,
        "Other processes want more cores than there are, so that jobs and starts take longer: see `top`.",
    )


def _cores() -> Check:
    usable = _usable_cores()
    found = f"{usable} usable of {os.cpu_count()}"
    return Check("cores", "ok" if usable >= 2 else "warn", found, "" if usable >= 2 else "The demo needs 2.")


def _memory() -> Check:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return Check("memory", "ok", "this system does not say")
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    low = available < LOW_MEMORY_BYTES
    return Check("memory", "warn" if low else "ok", found, "The demo needs 3 GiB." if low else "")


def _ports() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return Check("ports", "fail", f"cannot listen on 127.0.0.1: {error}", "Loopback must be usable.")
    with socket.socket() as probe:
        probe.settimeout(0.2)
        taken = probe.connect_ex(("127.0.0.1", RAY_PORT)) == 0
    if taken and not os.environ.get("RAY_ADDRESS"):
        return Check(
            "ports",
            "warn",
            f"something listens on {RAY_PORT}",
            "If it is a Ray cluster to be used, set RAY_ADDRESS=auto.",
        )
    return Check("ports", "ok", "loopback can be listened on")
