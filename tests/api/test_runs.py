"""The table of runs: the grammar of its filters, its order, its groups, and CSV."""

from __future__ import annotations

import csv
import io
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.api.runs import (
    cost_words,
    csv_of_curves,
    csv_of_runs,
    grouped,
    named,
    parse_filter,
    select_runs,
    shared_names,
)
from gyre.api.runs.naming import beginning_of, settings_of
from gyre.errors import ConfigError
from tests.examples import examples

DAY_S = 86400.0
BEGIN = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))
NOW = BEGIN + DAY_S


def run(name: str, **more: Any) -> dict[str, Any]:
    return {
        "job_id": f"{name}-1",
        "name": name,
        "phase": "succeeded",
        "submitted_at": BEGIN,
        "ended_at": BEGIN + 600,
        "version": 4,
        "tags": [],
        "notes": "",
        **more,
    }


def best(value: float, unit: str = "accuracy", name: str = "math") -> list[dict[str, Any]]:
    """The set's name is also the number that the reward function returned beside the reward."""
    said = {f"reward.{name}": 1 - value}
    return [
        {"set": name, "unit": unit, "value": value, "version": 7, "right_by": "", "components": said}
        | {"last": value - 0.1, "last_version": 9}
    ]


RUNS = [
    run(
        "a",
        reward=0.6,
        seed=1,
        model="Qwen2.5-0.5B",
        tags=["ablation", "lr sweep"],
        held_out=best(0.5),
        config="x",
    ),
    run("b", reward=0.2, seed=2, model="gemma", tags=["ablation"], held_out=best(0.7), config="x", step=10),
    run(
        "c",
        reward=None,
        seed=11,
        phase="failed",
        notes="it diverged",
        held_out=best(0.9, "reward", "f"),
        config="y",
    ),
    run("d", phase="running", ended_at=None, submitted_at=NOW - 30, tokens_per_s=12_000.0, config="z"),
]


def names(text: str, sort: str = "") -> str:
    return "".join(one["name"] for one in select_runs(RUNS, filter=text, sort=sort, now=NOW))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "abcd"),
        (" , ", "abcd"),
        ("reward>0.5", "a"),
        ("reward>=20%", "ab"),
        ("reward<=0.2", "b"),
        ("reward!=0.6", "bcd"),
        ("reward=0.60001", "a"),
        ("seed=1", "a"),
        ("seed>1 and seed<11", "b"),
        ('reward=""', "cd"),
        ('reward!="", seed<9', "ab"),
        ("model~QWEN", "a"),
        ("model!~qwen", "bcd"),
        ("model=gemma", "b"),
        ("tag=ablation", "ab"),
        ('tag="LR sweep"', "a"),
        ("tags!=ablation", "cd"),
        ('tag=""', "cd"),
        ("tag~sweep reward>0.1", "a"),
        ("diverged", "c"),
        ('"it diverged"', "c"),
        ("phase=running", "d"),
        ("tokens_per_s>11k", "d"),
        ("tokens_per_s<1M", "d"),
        ("took<1m", "d"),
        ("took>=10m", "abc"),
        ("started=2026-11-27", "abc"),
        ("started>2026-11-27", "d"),
        ("started>=2026-11-27T11:30", "abcd"),
        ("started<2026-11-27T11:30", ""),
        ('ended=""', "d"),
        ("held_out>0.6", "bc"),
        ("held_out.math>0.6", "b"),
        ("held_out_last>0.65", "c"),
        ("held_out.f>0.6", "c"),
        ("held_out.none>0", ""),
        ("held_out.math.reward.math>0.4", "a"),
        ("held_out.math.reward.f<1", ""),
        ("held_out_unit=accuracy", "ab"),
        ("version=4", "abcd"),
        ("id=a-1", "a"),
    ],
)
def test_a_filter_lets_through(text: str, found: str) -> None:
    assert names(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rewrd>1", "did you mean 'reward'"),
        ("reward>", "has no value"),
        ("reward>abc", "'abc' is none"),
        ("name>3", "is text"),
        ("started>yesterday", "no date"),
        ("started>9999-12-31", "no clock shows"),
        ("took>5%", "'5%' is none"),
        ("=5", "no filter"),
        ("a (b) > <", "no filter"),
        ("x" * 1001, "may have 1,000"),
    ],
)
def test_what_is_no_filter_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_filter(text)
    assert said in f"{caught.value.message} {caught.value.hint}"


@settings(max_examples=examples(300), deadline=None)
@given(
    st.text(alphabet=st.sampled_from('reward>=<!~",. tag0123456789%k-:"and\\\n'), max_size=40)
    | st.text(max_size=40)
)
def test_whatever_is_typed_is_a_filter_or_a_sentence(text: str) -> None:
    try:
        holds = parse_filter(text)
    except ConfigError:
        return
    assert all(isinstance(holds(one, NOW), bool) for one in RUNS)


def test_the_order_is_by_any_column_and_what_has_no_value_is_last() -> None:
    assert names("", "reward") == "bacd"
    assert names("", "-reward") == "abcd"
    assert names("", "-took,name") == "abcd"
    assert names("", "phase,-seed") == "cdba"
    assert names("", "-tags") == "abcd"
    with pytest.raises(ConfigError, match="no column 'rewards'"):
        names("", "-rewards")


def test_a_group_has_mean_and_spread_of_its_members() -> None:
    over_seeds = grouped(RUNS, "experiment", now=NOW)
    assert [(one.key, one.names) for one in over_seeds] == [("x", ("a", "b")), ("y", ("c",)), ("z", ("d",))]
    reward = over_seeds[0].values["reward"]
    assert (reward.count, reward.mean) == (2, pytest.approx(0.4))
    assert reward.std == pytest.approx(0.2 * 2**0.5)
    assert over_seeds[1].values["took"].std is None, "one alone has no spread"
    assert "reward" not in over_seeds[1].values
    tags = grouped(RUNS, "tag", now=NOW)
    assert [(one.key, one.names) for one in tags] == [
        ("ablation", ("a", "b")),
        ("lr sweep", ("a",)),
        ("", ("c", "d")),
    ]
    with pytest.raises(ConfigError, match="not grouped by 'sed'"):
        grouped(RUNS, "sed", now=NOW)


def test_evaluations_of_another_set_or_unit_are_not_in_the_mean() -> None:
    (group,) = grouped(RUNS[:3], "recipe", now=NOW)
    assert group.held_out == ("math", "accuracy")
    assert (group.values["held_out"].count, group.values["held_out"].mean) == (2, pytest.approx(0.6))


def test_csv_is_read_as_it_was_written() -> None:
    items = [
        run('x"y', notes="=1+1", tags=["a", "b c"], reward=0.25),
        run("z", notes="two\nlines, and a comma"),
    ]
    rows = list(csv.DictReader(io.StringIO(csv_of_runs(items, now=NOW))))
    assert (rows[0]["name"], rows[0]["tags"], rows[0]["reward"]) == ('x"y', "a; b c", "0.25")
    assert rows[0]["notes"] == "'=1+1", "no spreadsheet computes it"
    assert (rows[1]["notes"], rows[1]["reward"]) == ("two\nlines, and a comma", "")
    assert csv_of_runs(items, ["name", "seed"], now=NOW).splitlines()[0] == "name,seed"


def test_curves_have_a_line_for_each_step_of_each_job() -> None:
    curves = {
        "a": [{"step": 1, "loss": 0.5, "skipped": True}, {"step": 2, "kl": 0.1}],
        "b": [{"step": 1, "loss": 1}],
    }
    assert csv_of_curves(curves).splitlines() == ["job,step,loss,kl", "a,1,0.5,", "a,2,,0.1", "b,1,1,"]
    assert csv_of_curves(curves, ["kl"]).splitlines() == ["job,step,kl", "a,1,", "a,2,0.1", "b,1,"]


def test_groups_are_ordered_by_their_means_and_those_without_are_last() -> None:
    def keys(sort: str) -> str:
        chosen = select_runs(RUNS, sort=sort, now=NOW)
        return "".join(one.key for one in grouped(chosen, "experiment", sort=sort, now=NOW))

    assert (keys("-held_out"), keys("held_out"), keys("-held_out_last")) == ("yxz", "xyz", "yxz")
    assert (keys("took"), keys("-phase")) == ("zxy", "xzy")


def test_a_group_says_in_words_what_it_came_to_and_how_many_failed() -> None:
    items = [
        run("a", config="x", cost=0.1, ended_at=BEGIN + 25.4, held_out=best(0.5), reward=0.4),
        run("b", config="x", cost=0.2, ended_at=BEGIN + 14.6, held_out=best(0.7), reward=0.1 + 0.3),
        run("c", config="x", phase="failed", ended_at=BEGIN + 20.0, reward=0.4 * (1 + 2**-52)),
    ]
    (group,) = grouped(items, "experiment", now=NOW)
    assert group.failed == 1
    assert group.words["took"] == "20 s ±5.4 s"
    assert group.words["cost"] == "0.15 ±0.071, 0.3 in all of 2"
    assert group.words["held_out"] == "60 % ±14 % of 2"
    assert group.words["held_out_last"] == "50 % ±14 % of 2"
    other = run("d", config="y", held_out=best(0.5, name="aime"))
    assert grouped([*items, other], "experiment", now=NOW)[0].words["held_out"] == "math 60 % ±14 % of 2"
    assert group.words["reward"] == "0.4 ±0", "what adding up leaves is no spread"
    assert cost_words(items) == "0.3 in all; 2 of 3 jobs have prices"
    assert cost_words(items[2:]) == ""


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["lr-2e-4-s2", "lr-2e-4-s1"], "lr-2e-4"),
        (["grpo_seed1", "grpo_seed2"], "grpo"),
        (["lr-10", "lr-15"], "lr"),
        (["base1", "base12"], "base"),
        (["losses-x", "losses-y"], "losses"),
        (["run-alpha", "run-apple"], "run"),
        (["alone"], "alone"),
        (["a1", "a2"], ""),
        (["one", "other"], ""),
    ],
)
def test_names_share_a_beginning(names: list[str], shared: str) -> None:
    assert beginning_of(names) == shared


def test_groups_are_called_by_their_names_or_by_the_settings_in_which_they_differ() -> None:
    usual = {"recipe": "grpo", "config": {"optim": {"lr": 4e-3}, "sampling": {"temperature": 1.0}, "seed": 1}}
    colder = {**usual, "config": {**usual["config"], "sampling": {"temperature": 0.6}, "seed": 2}}
    slower = {**usual, "config": {**usual["config"], "optim": {"lr": 2e-4}}}
    assert settings_of([usual, colder, slower, None]) == ["", "sampling.temperature 0.6", "optim.lr 2e-4", ""]
    items = [
        *(run(f"top-s{seed}", config="t") for seed in (1, 2)),
        *(run(f"run-{number}", config="xy"[number % 2]) for number in range(4)),
    ]
    groups = grouped(items, "experiment", now=NOW)
    specs = dict(zip(("top-s1-1", "run-0-1", "run-1-1"), (usual, slower, colder), strict=True))
    found = named(groups, specs)
    assert [one.title for one in found] == ["top", "optim.lr 2e-4", "sampling.temperature 0.6"]
    assert [one.key for one in found] == ["t", "x", "y"]


def test_names_of_several_jobs_are_told() -> None:
    assert shared_names([run("a"), run("b"), run("a")]) == ["a"]
