"""Signals reach the process that was meant, or nobody."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gyre
from gyre.process_identity import ProcessIdentity, session_members, signal_group

ALLOWED = {
    "process_identity.py": "it compares",
    "engines/process_guard.py": "itself, and its own child that it has not waited for",
    "engines/process.py": "asyncio signals its own child, unless it was waited for",
    "engines/guarded.py": "the group of its own child that it has not waited for, which keeps the number",
    "master/sink_processes.py": "Popen signals its own child, unless it was waited for",
    "testing/in_process/job.py": "doubles of vertices, which are no processes",
    "api/local_ray/lean_start.py": "Popen signals its own child, unless it was waited for",
}
"""Where a pid is signalled otherwise than through ProcessIdentity, and why it is the right one."""

NOT_PROCESSES = {"ray", "faults", "vertex", "job", "world", "self", "cluster", "vertices", "_cluster"}
"""Whose `kill` is no signal: Ray's, of actors, and that of the doubles."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def identity_of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = ProcessIdentity.of(process.pid)
    assert found is not None
    return found


def test_the_process_that_is_meant_is_signalled(child: subprocess.Popen[bytes]) -> None:
    meant = identity_of(child)
    assert meant.is_alive()
    assert meant.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not meant.is_alive(), "nobody has waited for it, and yet it has ended"
    child.wait()
    assert not meant.signal(signal.SIGKILL)


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another"}, {"boot": ""}])
def test_another_of_the_same_pid_is_not(child: subprocess.Popen[bytes], change: dict[str, object]) -> None:
    other = identity_of(child)._replace(**change)  # type: ignore[arg-type]
    assert not other.is_alive()
    assert not other.signal(signal.SIGKILL)
    signal_group(other, signal.SIGKILL)
    assert session_members(other) == []
    assert child.poll() is None


def test_a_group_is_signalled_after_its_leader_has_ended() -> None:
    code = (
        "import subprocess, sys; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        member = ProcessIdentity.of(int(leader.stdout.readline()))
        of_leader = identity_of(leader)
        leader.kill()
    assert member is not None
    assert session_members(of_leader) == [member]
    signal_group(of_leader, signal.SIGKILL)
    descriptor = os.pidfd_open(member.pid) if member.is_alive() else None
    if descriptor is not None:
        import select

        assert select.select([descriptor], [], [], 60.0)[0]
        os.close(descriptor)
    assert not member.is_alive()


def test_the_text_of_an_identity() -> None:
    own = ProcessIdentity.own()
    assert own.pid == os.getpid()
    assert ProcessIdentity.parse(f"{own}\n") == own


@pytest.mark.parametrize("text", ["", "12", "12-", "12-7-", "a-7-b", "-1-7-b", "12-x-b", "\u00b2-7-b"])
def test_what_is_no_identity(text: str) -> None:
    assert ProcessIdentity.parse(text) is None


def test_nobody_else_signals_a_pid() -> None:
    root = Path(gyre.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if _signals(node)]
        if lines:
            found[name] = lines
    assert set(found) == set(ALLOWED), found


def _signals(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    last = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    if node.func.attr in ("killpg", "terminate", "send_signal", "pidfd_send_signal"):
        return True
    return node.func.attr == "kill" and last not in NOT_PROCESSES
