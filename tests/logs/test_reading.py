"""Lines of many files, in the order of time: each once, in pages, by vertex, level, time and expression."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import ConfigError
from gyre.logs import reading
from gyre.logs.line_format import Stamps
from gyre.logs.log_file import LogFile, open_log
from gyre.logs.reading import LogQuery, last_lines, read_page

T0 = 1_790_000_000.0
LATER = time.time() + 3600
"""Beyond the time in which a line without an end may still get one."""


def line(at: float, text: str, level: str = "I") -> str:
    return f"{Stamps().of(T0 + at).decode()} {level} {text}\n"


def write(folder: Path, name: str, text: str, mtime: float | None = None) -> None:
    with (folder / name).open("a") as file:
        file.write(text)
    os.utime(folder / name, (mtime or T0 + 1000, mtime or T0 + 1000))


def page(folder: Path, **options: Any) -> dict[str, Any]:
    known = {"after", "tail", "limit_bytes"}
    query = LogQuery(**{key: value for key, value in options.items() if key not in known})
    return read_page(folder, query, now=LATER, **{key: options[key] for key in known & options.keys()})


def texts(found: dict[str, Any]) -> list[str]:
    return [one["text"] for one in found["lines"]]


def test_lines_of_all_files_come_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", line(1, "one") + line(4, "four", "W"))
    write(tmp_path, "rollout-1.2.log", line(2, "two") + "bare\n" + line(5, "five"))
    write(tmp_path, "notes.txt", "not a log\n")
    found = page(tmp_path)
    assert texts(found) == ["one", "two", "bare", "four", "five"]
    assert found["lines"][2] == {
        "at": T0 + 2,
        "level": "I",
        "vertex": "rollout-1",
        "incarnation": 2,
        "file": "rollout-1.2.log",
        "text": "bare",
    }
    assert texts(page(tmp_path, since=T0)) == texts(found)
    assert page(tmp_path, after=found["next"])["lines"] == []
    assert page(tmp_path / "none")["lines"] == []


@pytest.mark.parametrize(
    ("narrowed", "wanted"),
    [
        ({"role": "rollout"}, {"rollout-0", "rollout-1"}),
        ({"role": "rollout", "rank": 1}, {"rollout-1"}),
        ({"rank": 0}, {"actor-0", "rollout-0"}),
        ({"vertex": "actor-0"}, {"actor-0"}),
        ({"role": "critic"}, set()),
    ],
)
def test_by_vertex_role_and_rank(tmp_path: Path, narrowed: dict[str, Any], wanted: set[str]) -> None:
    for vertex in ("actor-0", "rollout-0", "rollout-1"):
        write(tmp_path, f"{vertex}.1.log", line(1, "x"))
    assert {one["vertex"] for one in page(tmp_path, **narrowed)["lines"]} == wanted


def test_by_level_time_and_expression(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "".join(line(at, f"n{at}", "DIWE"[at % 4]) for at in range(40)))
    write(tmp_path, "actor-0.1.log", "ERROR in C\n")
    for start in ({}, {"since": T0}):
        assert [one["level"] for one in page(tmp_path, level="E", **start)["lines"]] == ["E"] * 11
        assert texts(page(tmp_path, level="W", until=T0 + 7, **start)) == ["n2", "n3", "n6", "n7"]
        assert texts(page(tmp_path, grep="^n1$", **start)) == ["n1"]
        assert texts(page(tmp_path, grep="n(1|2)1", **start)) == ["n11", "n21"]
        assert page(tmp_path, grep="nothing", **start)["lines"] == []
    assert texts(page(tmp_path, since=T0 + 38)) == ["n38", "n39", "ERROR in C"]
    assert texts(page(tmp_path, since=T0 + 38, tail=1)) == ["ERROR in C"]


def test_the_last_lines_of_each_vertex(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", line(1, "one") + line(2, "two"))
    write(tmp_path, "actor-0.2.log", line(3, "three"))
    write(tmp_path, "actor-1.1.log", line(0, "other"))
    assert texts(page(tmp_path, tail=2)) == ["other", "two", "three"]
    assert texts(page(tmp_path, tail=1, grep="^t")) == ["three"]
    assert page(tmp_path, tail=0)["lines"] == []
    assert page(tmp_path, tail=0)["next"] == page(tmp_path)["next"]


def test_a_first_page_is_the_newest_and_says_that_there_is_more_before(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "".join(line(at, f"old {at}") for at in range(5000)), T0 + 5000)
    found = page(tmp_path, limit_bytes=20)
    assert texts(found) == ["old 4998", "old 4999"]
    assert found["searched_from"] == T0 + 4997
    assert page(tmp_path, limit_bytes=1 << 20)["searched_from"] is None


def test_what_has_no_time_has_that_of_the_line_before(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "before\n" + line(5, "timed") + "after\n" * 3)
    write(tmp_path, "old-0.1.log", "never\n", mtime=T0 + 7)
    for found in (page(tmp_path), page(tmp_path, since=1.0)):
        assert texts(found) == ["before", "timed", *["after"] * 3, "never"]
        assert [one["at"] for one in found["lines"]] == [T0 + 5] * 5 + [T0 + 7]
    middle = page(tmp_path, since=1.0, limit_bytes=1, vertex="actor-0")
    middle = page(tmp_path, after=middle["next"], limit_bytes=1, vertex="actor-0")
    middle = page(tmp_path, after=middle["next"], limit_bytes=1, vertex="actor-0")
    assert (texts(middle), middle["lines"][0]["at"], middle["more"]) == (["after"], T0 + 5, True)


def test_a_line_waits_for_its_end_for_a_moment(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", line(1, "whole") + "half", mtime=LATER - 0.5)
    found = page(tmp_path)
    assert texts(found) == ["whole"]
    assert texts(page(tmp_path, since=T0)) == ["whole"]
    os.utime(tmp_path / "actor-0.1.log", (LATER - 5, LATER - 5))
    assert texts(page(tmp_path)) == texts(page(tmp_path, since=T0)) == ["whole", "half"]
    assert texts(page(tmp_path, after=found["next"])) == ["half"]


def test_strange_bytes_and_lines_without_end_are_shown_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "actor-0.1.log").write_bytes(b"\xff\xfe\r\n" + b"x" * 600_000 + b"\nend\n")
    for options in ({}, {"since": 1.0}):
        found = texts(page(tmp_path, limit_bytes=1 << 22, **options))
        assert found[0] == "\ufffd\ufffd"
        assert "".join(found[1:-1]) == "x" * 600_000
        assert max(map(len, found)) <= 400_000
        assert found[-1] == "end"


def test_a_look_at_a_time_reads_little_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "actor-0.1.log", "".join(line(at, "x" * 200) for at in range(20_000)), mtime=T0 + 20_000)
    read = 0
    real = reading._read

    def counted(part: Any, start: int, most: int) -> bytes:
        nonlocal read
        data = real(part, start, most)
        read += len(data)
        return data

    monkeypatch.setattr(reading, "_read", counted)
    assert len(page(tmp_path, since=T0 + 19_990)["lines"]) == 10
    assert len(page(tmp_path, until=T0 + 5, since=T0)["lines"]) == 6
    assert read < 3_000_000
    assert len(page(tmp_path, tail=5)["lines"]) == 5


def test_an_expression_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grep: '\(' is no regular expression"):
        page(tmp_path, grep="(")
    with pytest.raises(ConfigError, match="longer than"):
        page(tmp_path, grep="x" * 2000)
    with pytest.raises(ConfigError, match="level"):
        page(tmp_path, level="X")


def test_an_expression_that_takes_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.logs.pattern.CPU_S", 1)
    monkeypatch.setattr("gyre.logs.pattern.WAIT_S", 5.0)
    write(tmp_path, "actor-0.1.log", line(1, "a" * 60 + "!"))
    with pytest.raises(ConfigError, match="takes more than 1 s"):
        page(tmp_path, grep="(a+)+$")


def test_the_last_words_of_a_process(tmp_path: Path) -> None:
    write(tmp_path, "actor-0.1.log", "".join(line(at, f"n{at}") for at in range(100)))
    write(tmp_path, "actor-0.2.log", line(200, "another"))
    assert last_lines(tmp_path, "actor-0", 1, lines=3, most_bytes=1000) == ["n97", "n98", "n99"]
    assert last_lines(tmp_path, "actor-0", 1, lines=3, most_bytes=8) == ["n98", "n99"]
    assert last_lines(tmp_path, "actor-0", 3, lines=3, most_bytes=8) == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_several_wrote_is_read_once_each_in_order_while_parts_begin(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two processes of their own and one that holds the descriptor of another, with parts of some lines; a reader goes
    on after every page, and is never more than the kept parts behind."""
    folder = tmp_path_factory.mktemp("logs")
    logs = {}
    for vertex in ("a-0", "b-0"):
        path = folder / f"{vertex}.1.log"
        logs[vertex] = LogFile(open_log(path), path, part_bytes=400)
    raw = os.open(folder / "a-0.1.log", os.O_WRONLY | os.O_APPEND)  # of a child: it never opens another
    wrote: dict[str, list[str]] = {"a-0": [], "b-0": [], "raw": []}
    seen: dict[str, list[str]] = {"a-0": [], "b-0": [], "raw": []}
    after: dict[str, int] | None = None
    at = T0
    for number in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["a-0", "b-0", "raw", "read", "look"]))
        at += data.draw(st.sampled_from([0.0, 0.001, 1.0]))
        text = f"{what} {number} {'x' * data.draw(st.integers(0, 90))}"
        if what == "raw":
            os.write(raw, f"{text}\n".encode())
            wrote["raw"].append(text)
        elif what in logs:
            logs[what].write(Stamps().of(at) + b" I " + text.encode() + b"\n")
            wrote[what].append(text)
        if what in ("read", "look") or number % 3 == 0:
            after = _read_on(folder, after, seen, data.draw(st.sampled_from([1, 300, 10_000])))
        if what == "look":
            for log in logs.values():
                log.look()
    _read_on(folder, after, seen, 10_000)
    for descriptor in (raw, *(log._descriptor for log in logs.values())):
        os.close(descriptor)
    assert seen == wrote


def _read_on(
    folder: Path, after: dict[str, int] | None, seen: dict[str, list[str]], limit_bytes: int
) -> dict[str, int]:
    more = True
    while more:
        found = read_page(
            folder, LogQuery(since=0.0), after=after or {"": 0}, limit_bytes=limit_bytes, now=LATER
        )
        after, more = found["next"], found["more"]
        for one in found["lines"]:
            seen[one["text"].partition(" ")[0]].append(one["text"])
    return after or {}
