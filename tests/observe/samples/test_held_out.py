"""What versions answered to held-out prompts: which of it is kept, and two versions side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.config import SamplesSpec
from gyre.errors import NotFound
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import HELD_OUT_FOLDER
from gyre.observe.samples.query import SampleFilter
from gyre.observe.samples.writer import WAITING_SETS, SampleWriter
from gyre.rollouts.samples import Group
from gyre.rollouts.session_extras import ASKED
from tests.observe.samples.some_groups import group, kept, sample, wait_until_idle, written


def prompts(*rewards: float, n: int = 1) -> list[Group]:
    """A set of prompts, of which each sample earned this."""
    return [
        group(place, *[sample(reward=reward) for _ in range(n)], answer=str(place))
        for place, reward in enumerate(rewards)
    ]


def evaluated(folder: Path, versions: dict[int, list[Group]], **knobs: Any) -> SampleFiles:
    right_from, right_by = knobs.pop("right_from", 1.0), knobs.pop("right_by", "")

    def write(writer: SampleWriter) -> None:
        for version, groups in versions.items():
            writer.evaluated(version, "aime", groups, right_from=right_from, right_by=right_by)
            wait_until_idle(writer)

    assert written(folder, write, **knobs) == []
    return SampleFiles(folder)


def places(page: dict[str, Any]) -> list[int]:
    return [one["prompt_number"] for one in page["prompts"]]


# -- what is kept -------------------------------------------------------------------------------------


def test_the_first_prompts_of_each_version_are_kept_and_no_step_is_more(tmp_path: Path) -> None:
    files = evaluated(
        tmp_path / "samples", {0: prompts(0, 0, 1), 10: prompts(1, 0, 1)}, settings=SamplesSpec(held_out=2)
    )
    assert files.held_out_sets() == {"sets": [{"set": "aime", "versions": [0, 10]}]}
    page = files.held_out("aime")
    assert (page["version"], page["against"], page["total"], page["changed"]) == (10, None, 2, 0)
    assert places(page) == [0, 1]
    first = page["prompts"][0]
    assert (first["right_answer"], first["before"]) == ("0", None)
    assert (first["now"]["right"], first["now"]["count"], first["now"]["reward"]) == (1, 1, 1.0)
    assert first["now"]["samples"][0]["outcome"] == "evaluated"
    assert files.steps() == {"steps": [], "quarantined": 0}


def test_versions_thin_out_and_the_first_and_the_newest_stay(tmp_path: Path) -> None:
    settings = SamplesSpec(held_out_versions=6)
    evaluated(tmp_path / "samples", {version: prompts(1) for version in range(0, 100, 10)}, settings=settings)
    files = evaluated(tmp_path / "samples", {100: prompts(1)}, settings=settings)  # by a later trainer
    (found,) = files.held_out_sets()["sets"]
    assert len(found["versions"]) == 6
    assert found["versions"][0] == 0
    assert found["versions"][-3:] == [80, 90, 100]


@pytest.mark.parametrize("settings", [SamplesSpec(held_out=0), SamplesSpec(every=0)])
def test_who_wants_none_has_none(tmp_path: Path, settings: SamplesSpec) -> None:
    files = evaluated(tmp_path / "samples", {0: prompts(1)}, settings=settings)
    assert files.held_out_sets() == {"sets": []}
    assert not (tmp_path / "samples").exists()


def test_what_a_kill_left_half_written_goes_and_the_step_s_files_are_counted_beside(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    evaluated(folder, {0: prompts(1)})
    torn = folder / HELD_OUT_FOLDER / ".aime@00000010.parquet.77.partial"
    torn.write_bytes(b"half")
    assert not any(one["versions"] != [0] for one in SampleFiles(folder).held_out_sets()["sets"])
    files = kept(
        folder, {step: [group(step)] for step in range(1, 70)}, settings=SamplesSpec(at_most_bytes=1)
    )
    assert not torn.exists()
    assert len(files.steps()["steps"]) == 51  # what is never given up
    assert files.held_out("aime")["total"] == 1


def test_all_sets_of_a_version_may_wait_and_more_are_left_out_and_told(tmp_path: Path) -> None:
    said: list[str] = []
    writer = SampleWriter(tmp_path / "samples", SamplesSpec(), say=said.append, spare_bytes=0)
    for number in range(WAITING_SETS + 1):
        writer.evaluated(5, f"set-{number}", prompts(1))
    assert writer.left_out == 1
    assert said[0].startswith(f"the samples of version 5 of the held-out set set-{WAITING_SETS} are not kept")
    writer.step_recorded(6, [group(1)])  # steps have room of their own
    assert writer.left_out == 1
    writer.begin()
    assert writer.end(within_s=60.0)
    assert writer.written == WAITING_SETS + 1


# -- two versions side by side ------------------------------------------------------------------------


def test_changed_verdicts_come_first_and_those_that_changed_most_before_others(tmp_path: Path) -> None:
    old = prompts(0, 0, 1, 1, n=2)
    new = prompts(0, 1, 1, 0, n=2)
    old[1].samples[0].reward = 1.0  # half of it was right
    files = evaluated(tmp_path / "samples", {0: old, 10: new})
    page = files.held_out("aime", version=10, against=0)
    assert places(page) == [3, 1, 0, 2]
    assert [one["difference"] for one in page["prompts"]] == [-1.0, 0.5, 0.0, 0.0]
    assert (page["changed"], page["better"], page["unmatched"]) == (2, 1, 0)
    assert (page["prompts"][1]["before"]["right"], page["prompts"][1]["now"]["right"]) == (1, 2)
    assert places(files.held_out("aime", against=0, limit=2, offset=1)) == [1, 0]


def test_where_nothing_is_right_or_wrong_rewards_are_compared(tmp_path: Path) -> None:
    files = evaluated(tmp_path / "samples", {0: prompts(0.3, 0.5), 1: prompts(0.3, 0.4)}, right_from=None)
    page = files.held_out("aime", against=0)
    assert [one["now"]["right"] for one in page["prompts"]] == [None, None]
    assert places(page) == [1, 0]
    assert page["prompts"][0]["difference"] == pytest.approx(-0.1)


def test_a_threshold_counts_and_rounding_does_not(tmp_path: Path) -> None:
    files = evaluated(
        tmp_path / "samples", {0: prompts(0.5 - 1e-9, 0.4), 1: prompts(0.9, 0.1)}, right_from=0.5
    )
    page = files.held_out("aime", against=0)
    assert [one["now"]["right"] for one in page["prompts"]] == [1, 0]
    assert page["changed"] == 0


def test_what_the_reward_function_calls_right_is_right_whatever_it_earned(tmp_path: Path) -> None:
    def said(*verdicts: float) -> list[Group]:
        found = prompts(*[-verdict for verdict in verdicts])
        for one, verdict in zip(found, verdicts, strict=True):
            one.samples[0].extras["reward.acc"] = verdict
        return found

    files = evaluated(
        tmp_path / "samples", {0: said(0.0, 1.0), 1: said(1.0, 1.0)}, right_from=None, right_by="reward.acc"
    )
    page = files.held_out("aime", against=0)
    assert [one["now"]["right"] for one in page["prompts"]] == [1, 1]
    assert (places(page), page["changed"], page["better"]) == ([0, 1], 1, 1)


def test_a_prompt_that_another_one_replaced_is_no_pair(tmp_path: Path) -> None:
    other = prompts(0, 0)
    other[1].prompt_ids = other[1].prompt_ids + 1
    files = evaluated(tmp_path / "samples", {0: other, 1: prompts(1, 1, 1)})
    page = files.held_out("aime", against=0)
    assert (page["changed"], page["unmatched"]) == (1, 2)
    assert [one["before"] is None for one in page["prompts"]] == [False, True, True]


def test_prompts_of_sessions_are_paired_by_what_was_asked(tmp_path: Path) -> None:
    """What the rows have in common may end earlier where one of them begins with other messages."""
    earlier, later = prompts(0, 0), prompts(1, 1)
    for place, (one, other) in enumerate(zip(earlier, later, strict=True)):
        one.meta[ASKED], other.meta[ASKED] = one.prompt_ids, one.prompt_ids + place
        other.prompt_ids = other.prompt_ids[:1]
    page = evaluated(tmp_path / "samples", {0: earlier, 1: later}).held_out("aime", against=0)
    assert [one["before"] is None for one in page["prompts"]] == [False, True]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"name": "math"}, "No answers to the held-out set math are kept"),
        ({"name": "aime", "version": 7}, "of version 7 to the held-out set aime are not kept"),
        ({"name": "aime", "against": 7}, "of version 7"),
        ({"name": "aime", "version": 10}, "cannot be read"),
    ],
)
def test_what_is_not_there_or_torn_is_a_sentence(
    tmp_path: Path, asked: dict[str, Any], sentence: str
) -> None:
    files = evaluated(tmp_path / "samples", {0: prompts(1), 10: prompts(1)})
    path = tmp_path / "samples" / HELD_OUT_FOLDER / "aime@00000010.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NotFound, match=sentence):
        files.held_out(**{"version": 0, **asked})


# -- the right answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "shown"),
    [
        ({"answer": "72"}, "72"),
        ({"answer": 72}, "72"),
        ({"answer": ["72", "73"]}, '["72", "73"]'),
        ({"answer": "", "level": 3}, ""),
        ({"answer": "a", "ground_truth": "b"}, "b"),
        ({"answer": "a", "reward_model": {"ground_truth": {"target": ["ü"]}}}, '{"target": ["ü"]}'),
        ({"reward_model": {"style": "rule"}}, None),
        ({"answer": None}, None),
        ({}, None),
    ],
)
def test_the_right_answer_is_what_the_data_has(
    tmp_path: Path, meta: dict[str, Any], shown: str | None
) -> None:
    files = kept(tmp_path / "samples", {1: [group(1, sample(), **meta)]})
    (found,) = files.find(SampleFilter())["samples"]
    assert found["right_answer"] == shown
    assert files.sample(1, 1, 0)["right_answer"] == shown
