"""The kernel's count of processes that it killed for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.workloads.vertex.memory_kills import MemoryKills, kills_in, own_memory_kills


def test_this_machine_counts() -> None:
    own = own_memory_kills()
    assert own is not None
    assert kills_in(own.counter) == own.kills >= 0


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("nr_free_pages 5\noom_kill 3\noom_killer_x 9\n", 3),
        ("low 0\noom 7\noom_kill 2\noom_group_kill 1\n", 2),
        ("oom_kill_disable 1\nunder_oom 0\noom_kill 4\n", 4),
        ("nr_free_pages 5\n", None),
        ("oom_kill many\n", None),
        ("", None),
    ],
)
def test_it_is_one_line_of_many(tmp_path: Path, text: str, kills: int | None) -> None:
    (tmp_path / "counter").write_text(text)
    assert kills_in(str(tmp_path / "counter")) == kills


@pytest.mark.parametrize(
    ("own", "counter"),
    [
        pytest.param("0::/pod/one\n", "pod/one/memory.events", id="version 2"),
        pytest.param("0::/\n", "memory.events", id="a container's own root"),
        pytest.param("4:memory:/pod/one\n0::/\n", "memory/pod/one/memory.oom_control", id="version 1"),
        pytest.param("4:cpu,memory:/of/the/host\n", "memory/memory.oom_control", id="a path of the host's"),
    ],
)
def test_it_is_that_of_the_processs_own_group(tmp_path: Path, own: str, counter: str) -> None:
    (tmp_path / "self").write_text(own)
    file = tmp_path / "groups" / counter
    file.parent.mkdir(parents=True)
    file.write_text("oom_kill 5\n")
    assert own_memory_kills(tmp_path / "self", tmp_path / "groups") == MemoryKills(str(file), 5)


@pytest.mark.parametrize("own", ["", "0::/nowhere\n", "not a group", "4:memory:/../../../etc\n"])
def test_without_a_group_it_is_the_whole_machines(tmp_path: Path, own: str) -> None:
    (tmp_path / "self").write_text(own)
    kills = own_memory_kills(tmp_path / "self", tmp_path / "groups")
    assert kills is not None
    assert kills.counter == "/proc/vmstat"


def test_a_kernel_that_does_not_count_is_no_error(tmp_path: Path) -> None:
    assert kills_in(str(tmp_path / "nothing")) is None
