"""Log files by offset: a follower misses nothing, reads nothing twice, and sees whole lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.master.logs import read_logs

MANY = 1 << 20


def write(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def test_all_files_in_order_with_offsets(tmp_path: Path) -> None:
    write(tmp_path, "rollout-1.2.log", "two\n")
    write(tmp_path, "actor-0.1.log", "one\n")
    write(tmp_path, "notes.txt", "not a log\n")
    found = read_logs(tmp_path, role=None, rank=None, after={}, limit_bytes=MANY)
    assert found["chunks"] == [
        {"vertex": "actor-0", "incarnation": 1, "file": "actor-0.1.log", "offset": 0, "text": "one\n"},
        {"vertex": "rollout-1", "incarnation": 2, "file": "rollout-1.2.log", "offset": 0, "text": "two\n"},
    ]
    assert found["next"] == {"actor-0.1.log": 4, "rollout-1.2.log": 4}


@pytest.mark.parametrize(
    ("role", "rank", "vertices"),
    [
        (None, None, {"actor-0", "rollout-0", "rollout-1"}),
        ("rollout", None, {"rollout-0", "rollout-1"}),
        ("rollout", 1, {"rollout-1"}),
        (None, 0, {"actor-0", "rollout-0"}),
        ("critic", None, set()),
    ],
)
def test_by_role_and_rank(tmp_path: Path, role: str | None, rank: int | None, vertices: set[str]) -> None:
    for vertex in ("actor-0", "rollout-0", "rollout-1"):
        write(tmp_path, f"{vertex}.1.log", "x\n")
    found = read_logs(tmp_path, role=role, rank=rank, after={}, limit_bytes=MANY)
    assert {chunk["vertex"] for chunk in found["chunks"]} == vertices


def test_a_follower_goes_on_where_it_was(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(100))
    write(tmp_path, "actor-0.1.log", text[:333])
    seen, after = "", {"actor-0.1.log": 0}
    for _ in range(60):
        found = read_logs(tmp_path, role=None, rank=None, after=after, limit_bytes=50)
        after = found["next"]
        for chunk in found["chunks"]:
            seen += chunk["text"]
        if len(seen) > 300 and (tmp_path / "actor-0.1.log").stat().st_size == 333:
            write(tmp_path, "actor-0.1.log", text[333:])
    assert seen == text


def test_lines_are_whole_unless_one_is_longer_than_the_limit(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "short\n" + "x" * 100)
    after = {"actor-0.1.log": 0}
    first = read_logs(tmp_path, role=None, rank=None, after=after, limit_bytes=20)
    assert first["chunks"][0]["text"] == "short\n"
    second = read_logs(tmp_path, role=None, rank=None, after=first["next"], limit_bytes=20)
    assert second["chunks"][0]["text"] == "x" * 20


def test_a_first_look_at_a_long_file_is_at_its_end(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "old\n" * 1000 + "new\n")
    found = read_logs(tmp_path, role=None, rank=None, after={}, limit_bytes=8)
    assert found["chunks"][0]["text"] == "old\nnew\n"


def test_nothing_new_is_no_chunk_and_keeps_the_offset(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "x\n")
    found = read_logs(tmp_path, role=None, rank=None, after={"actor-0.1.log": 2}, limit_bytes=MANY)
    assert found == {"chunks": [], "next": {"actor-0.1.log": 2}}
    assert read_logs(tmp_path / "none", role=None, rank=None, after={}, limit_bytes=MANY)["chunks"] == []


def test_what_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "a" * 9 + "\n")
    write(tmp_path, "rollout-0.1.log", "b" * 9 + "\n")
    first = read_logs(tmp_path, role=None, rank=None, after={}, limit_bytes=10)
    second = read_logs(tmp_path, role=None, rank=None, after=first["next"], limit_bytes=10)
    assert [chunk["vertex"] for chunk in first["chunks"] + second["chunks"]] == ["actor-0", "rollout-0"]


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "actor-0.1.log").write_bytes(b"\xff\xfe\n")
    [chunk] = read_logs(tmp_path, role=None, rank=None, after={}, limit_bytes=MANY)["chunks"]
    assert chunk["text"] == "��\n"
