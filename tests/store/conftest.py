"""A private PostgreSQL cluster, and a `store_url` fixture that runs every test on both databases.

The cluster is made by initdb in a temporary folder, owned by the unprivileged user `postgres` when we are
root (initdb refuses root), and listens on a free loopback port and on a socket in that folder. Every test
gets a schema of its own. It keeps fsync on: what is tested is what runs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.store import Store, open_store
from tests.machine import owned_folder
from tests.ports import free_port


def _postgres_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a running private server, without a database name."""
    binaries = _postgres_binaries()
    if binaries is None:
        pytest.skip(
            "NO POSTGRESQL ON THIS MACHINE: half of the store's tests did not run (apt install postgresql)"
        )
    user = None
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("postgres").pw_name
        except KeyError:
            pytest.skip("NO USER `postgres`: initdb refuses root, so half of the store's tests did not run")
    with owned_folder("pg") as folder:  # where it is swept, the server ends by itself within a minute
        if user is not None:
            shutil.chown(folder, user)
        yield from _serve(binaries, folder, user)


def _serve(binaries: Path, folder: Path, user: str | None) -> Iterator[str]:
    data, port = folder / "data", free_port()

    def run(*command: str) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True, timeout=60)

    run(
        str(binaries / "initdb"),
        "-D",
        str(data),
        "-U",
        "gyre",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-locale",
        "-N",
    )
    with (data / "postgresql.conf").open("a") as conf:
        conf.write(
            f"\nlisten_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{folder}'\n"
            "shared_buffers = 32MB\nmax_connections = 60\n"
        )
    run(str(binaries / "pg_ctl"), "-D", str(data), "-w", "-t", "30", "-l", str(folder / "log"), "start")
    try:
        yield f"postgresql+psycopg://gyre@127.0.0.1:{port}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty schema of this test (which costs a hundredth of what a database costs)."""
    import psycopg

    plain = postgres_server.replace("+psycopg", "") + "/postgres"
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    yield f"{postgres_server}/postgres?options=-csearch_path%3D{name}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that does not exist yet, on each database in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store' / 'gyre.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    with open_store(store_url) as opened:
        yield opened


@pytest.fixture
def make_job(store: Store) -> Callable[..., str]:
    def make(job_id: str = "j1", name: str = "grpo") -> str:
        store.create_job(job_id=job_id, name=name, spec={"roles": []}, now=1.0)
        return job_id

    return make
