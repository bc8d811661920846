"""Rows of sessions in the files of samples: their turns in order, and how the session went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from gyre.observe.samples.conversation import conversation_of, session_sentence
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import step_file
from gyre.observe.samples.table import Observed, table_of
from gyre.observe.samples.texts import Texts
from gyre.observe.samples.writer import write_table
from gyre.rollouts.samples import Group, InstanceRun, Sample, VersionRun
from gyre.rollouts.session_extras import ENGINE_S, OUTCOME, PATH, REASON, TOOL_S, TURNS


def row(path: Any, mask: list[bool], **extras: Any) -> Sample:
    return Sample(
        np.arange(len(mask), dtype=np.int32),
        np.zeros(len(mask), np.float32),
        (VersionRun(3, 0, 5), VersionRun(4, 5, len(mask))),
        reward=0.0,
        extras={PATH: path, OUTCOME: "truncated", REASON: "no turn is left", **extras},
        instances=(InstanceRun("rollout-0", 0, 2), InstanceRun("rollout-1", 4, len(mask))),
        mask=np.array(mask),
        rollout=1,
    )


FIRST = row(
    [[0, 0, 0, 2, None], [1, 2, 4, 6, 0.25]],
    [True, True, False, False, True, True],
    **{TURNS: 3, TOOL_S: 0.5, ENGINE_S: 1.5},
)
SECOND = row([[0, 0, 0, 2, None], [2, 2, 4, 6, None]], [False, False, False, False, True, True])


@pytest.fixture
def files(tmp_path: Path) -> SampleFiles:
    plain = Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(3, 0, 2),))
    odd = row("nonsense", [True] * 6, **{TURNS: "3"})
    group = Group(7, np.zeros(2, np.int32), samples=[FIRST, SECOND, plain, odd])
    table = table_of(4, [Observed(group)], Texts(), lambda groups: [None] * len(groups))
    write_table(table, tmp_path / step_file(4))
    return SampleFiles(tmp_path)


def test_a_row_is_told_as_its_conversation(files: SampleFiles) -> None:
    first, second = files.sample(4, 7, 0), files.sample(4, 7, 1)
    keys = ("turn", "drawn", "trained", "start", "end", "versions", "instances", "waited_s")
    assert [tuple(part[key] for key in keys) for part in first["conversation"]] == [
        (1, True, True, 0, 2, [3], ["rollout-0"], None),
        (2, False, False, 2, 4, [], [], 0.25),
        (2, True, True, 4, 6, [3, 4], ["rollout-1"], None),
    ]
    assert [(part["turn"], part["drawn"], part["trained"]) for part in second["conversation"]] == [
        (1, True, False),  # an earlier row of the rollout has it
        (3, False, False),
        (3, True, True),
    ]


def test_how_a_session_went_stands_with_its_rows(files: SampleFiles) -> None:
    page = files.find(_everything())["samples"]
    sentences = [one["session"] and one["session"]["sentence"] for one in page]
    assert sentences[:3] == [
        "A row of rollout 1 with 2 of its 3 turns; ended as truncated: no turn is left; 0.50 s between turns with its "
        "agent and tools, 1.50 s in turns",
        "A row of rollout 1 with 2 turns; ended as truncated: no turn is left",
        None,
    ]
    assert page[0]["session"]["turns"] == 3
    assert files.sample(4, 7, 2)["conversation"] == []


def test_a_sessions_end_is_filtered_by(files: SampleFiles) -> None:
    ends = [one["session"] and one["session"]["outcome"] for one in files.find(_everything())["samples"]]
    found = files.find(replace(_everything(), outcome="truncated"))["samples"]
    assert len(found) == ends.count("truncated") > 0
    assert {one["session"]["outcome"] for one in found} == {"truncated"}


def test_what_somebody_else_put_there_is_left_out(files: SampleFiles) -> None:
    odd = files.sample(4, 7, 3)
    assert odd["conversation"] == []
    assert (odd["session"]["turns"], odd["session"]["turns_here"]) == (None, 0)
    assert "session.path" not in odd["extras"]


def test_a_file_of_an_earlier_version_has_no_sessions(files: SampleFiles, tmp_path: Path) -> None:
    path = tmp_path / step_file(4)
    table = pq.read_table(path)
    new = ("turns", "session_outcome", "session_reason", "session_turns", "tool_s", "engine_s")
    pq.write_table(table.drop_columns(list(new)), path)
    again = SampleFiles(tmp_path)
    assert [one["session"] for one in again.find(_everything())["samples"]] == [None] * 4
    assert again.sample(4, 7, 0)["conversation"] == []


def _everything() -> Any:
    from gyre.observe.samples.query import SampleFilter

    return SampleFilter()


def test_nothing_of_a_row_without_columns() -> None:
    assert conversation_of({}) == []
    session = {
        "outcome": "scored",
        "reason": "",
        "turns": 1,
        "turns_here": 1,
        "tool_s": None,
        "engine_s": None,
    }
    assert session_sentence(None, session) == "A session with 1 turn; ended as scored"
