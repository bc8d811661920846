"""The table of runs: the grammar of its filters, its order, its groups, and CSV."""

from __future__ import annotations

import csv
import io
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.api.runs import csv_of_curves, csv_of_runs, grouped, parse_filter, select_runs
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
    return [{"set": name, "unit": unit, "value": value, "version": 7, "right_by": "", "components": said}]


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
