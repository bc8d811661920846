"""The connection to Ray: addresses that cannot be one, what is swept, signals held, and the private names in use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from gyre.api import ray_session
from gyre.api.home import home
from gyre.api.local_ray import lean_start, sweeper
from gyre.errors import ConfigError, Unreachable
from gyre.process_identity import ProcessIdentity


@pytest.mark.parametrize("address", ["somewhere", "host:", ":6379", "host:port", "host:0", "host:65536"])
def test_an_address_that_is_none_is_said_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port, auto or local"):
        ray_session._check_address(address)


def test_a_ray_client_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="Ray Client"):
        ray_session._check_address("ray://127.0.0.1:10001")


def test_an_address_where_nobody_listens_is_known_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "PROBE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_session._check_address(address)
    with pytest.raises(Unreachable, match="nothing listens there"):
        ray_session._check_address(address)


@pytest.mark.parametrize("given", [None, "auto", "local", "127.0.0.1:6379"])
def test_a_job_for_the_cluster_that_this_process_is_connected_to(given: str | None) -> None:
    ray_session._refuse_another(given, "10.0.0.5:6379")


def test_a_job_for_another_cluster_than_this_process_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="10.0.0.5:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    with pytest.raises(
        ConfigError, match=r"10\.0\.0\.7:6380'.*connected to the Ray cluster at 10\.0\.0\.5:6379"
    ):
        ray_session.connect("10.0.0.7:6380", start_local=True, place=home())


def test_which_addresses_are_this_machines() -> None:
    assert ray_session.is_own_host("127.0.0.1")
    assert ray_session.is_own_host("localhost")
    assert not ray_session.is_own_host("203.0.113.7")  # reserved for documents
    assert not ray_session.is_own_host("no-such-host.invalid")


def test_what_killed_sessions_left_is_swept_and_what_lives_is_kept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = tmp_path / f"session_2026-01-01_00-00-00_000000_{gone.pid}"
    mine = tmp_path / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    for session in (dead, mine):
        (session / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(dead)
    ray_session._sweep(tmp_path)
    assert not dead.exists()
    assert mine.exists()
    assert not (tmp_path / "session_latest").is_symlink()


def test_a_handler_for_sigterm_outlives_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: object) -> None: ...

    def rays(*_: object) -> None: ...

    first = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, mine)
        with ray_session._handlers_kept():
            signal.signal(signal.SIGTERM, rays)
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with ray_session._handlers_kept():
            signal.signal(signal.SIGTERM, rays)
        assert signal.getsignal(signal.SIGTERM) is rays
    finally:
        signal.signal(signal.SIGTERM, first)


def test_rays_private_names_are_there() -> None:
    """What `gyre.api.ray_session` uses beyond Ray's public surface."""
    code = """
import inspect, ray, ray._private.worker as worker
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available as enable)
assert "warn_if_disabled" in inspect.signature(enable).parameters
assert callable(worker.print_to_stdstream)
assert hasattr(worker, "_global_node")
from ray._private.node import Node
assert callable(Node.get_session_dir_path)
assert "self.all_processes" in inspect.getsource(Node.__init__)
assert issubclass(ray.exceptions.AuthenticationError, Exception)
assert "_temp_dir" in inspect.getsource(ray.init)
assert "ray._private.parameter.RayParams(" in inspect.getsource(ray.init)
from ray._private.parameter import RayParams
assert {"no_monitor", "include_log_monitor", "worker_path"} <= inspect.signature(RayParams).parameters.keys()
assert "self.start_api_server(" in inspect.getsource(Node.start_head_processes)
import ray._private.services as services
assert "process" in services.ProcessInfo._fields
assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)
from gyre.api.local_ray.lean_start import knows_ray, ray_worker
import pathlib
assert knows_ray()
assert pathlib.Path(ray_worker()).is_file()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_another_ray_starts_as_it_does_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray._private.parameter

    monkeypatch.setattr(lean_start, "version", lambda package: "2.61.0")
    monkeypatch.setattr(ray_session, "_fork_servers", [])
    ray_session.prepare_local("local")
    assert ray_session._fork_servers == []
    own = ray._private.parameter.RayParams
    with lean_start.lean(lambda pid: None):
        assert ray._private.parameter.RayParams is own


def test_a_server_is_in_the_sweepers_record_before_it_can_start_a_process(tmp_path: Path) -> None:
    import ray._private.services as services

    swept = lean_start.Sweeper(tmp_path)
    record = Path(sweeper.record_path(str(tmp_path), ProcessIdentity.own()))
    try:
        with lean_start.lean(swept.note):
            server = services.ConsolePopen(["sleep", "60"])
        try:
            assert record.read_text().split() == [str(ProcessIdentity.of(server.pid))]
            assert os.getsid(server.pid) == server.pid
        finally:
            server.kill()
            server.wait()
    finally:
        swept.close()
