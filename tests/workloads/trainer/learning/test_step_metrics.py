"""A step's numbers, its line, and its place in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.learner.cards import peak_flops
from gyre.workloads.trainer.learning.metric_names import METRICS
from gyre.workloads.trainer.learning.step_line import longest_wait, short, step_line, thousands
from gyre.workloads.trainer.learning.step_log import NAME, MetricsFile
from gyre.workloads.trainer.learning.step_metrics import (
    MOST_COMPONENTS,
    Reserved,
    components,
    is_flat,
    step_metrics,
)
from tests.rollout_rows import sessions

ROOT = Path(__file__).parents[4]


def group(
    number: int, rewards: list[float], lengths: list[int], *, version: int = 0, limit: int = 9
) -> Group:
    samples = [
        Sample(
            np.zeros(length, np.int32),
            np.zeros(length, np.float32),
            (VersionRun(version, 0, length),),
            "length" if length == limit else "stop",
            reward,
        )
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return Group(number, np.zeros(4 + number, np.int32), samples=samples)


GROUPS = [group(0, [1.0, 0.0], [3, 9], version=2), group(1, [0.5, 0.5], [4, 4], version=1)]


def test_what_the_samples_say() -> None:
    found = step_metrics({"loss": 0.25, "note": "text", "kl": math.nan}, GROUPS, 4, at=5.0, seconds=2.0)
    assert found == {
        "step": 4,
        "version": 4,
        "at": 5.0,
        "loss": 0.25,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(math.sqrt(0.125)),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "groups": 2,
        "samples": 4,
        "tokens": 20,
        "prompt_tokens_mean": 4.5,
        "completion_tokens_mean": 5.0,
        "completion_tokens_max": 9,
        "cut_off_ratio": 0.25,
        "flat_groups": 1,
        "flat_groups_ratio": 0.5,
        "seconds": 2.0,
        "tokens_per_s": 10.0,
        "staleness_max": 2,
        "staleness_mean": (1 * 12 + 2 * 8) / 20,
    }
    assert set(found) <= set(METRICS)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.3, 0.1 + 0.2], True),
        ([float(np.float32(0.95)), 0.95], True),
        ([0.0, 0.0], True),
        ([1.0], True),
        ([0.0, 1e-9], False),
        ([1.0, 1.001], False),
        ([-1.0, 1.0], False),
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_the_same(rewards: list[float], flat: bool) -> None:
    assert is_flat(group(0, rewards, [1] * len(rewards))) is flat


def test_a_reward_without_an_end_is_no_number() -> None:
    found = step_metrics({}, [group(0, [math.inf, 0.0], [1, 1])], 1, at=0.0, seconds=0.0)
    assert "reward_mean" not in found
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_table_of_metrics_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "training.md").read_text().split("## What a step measures")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert [(name, unit.strip(), source, meaning) for name, unit, source, meaning in rows] == [
        (name, one.unit, one.source, one.meaning) for name, one in METRICS.items()
    ]


# -- the line ---------------------------------------------------------------------------------------


def test_a_step_on_a_line() -> None:
    metrics = {
        "step": 12,
        "reward_mean": 0.41,
        "reward_std": 0.49,
        "loss": 0.0021,
        "old_kl": 0.0003,
        "entropy": 1.84,
        "grad_norm": 0.31,
        "prompt_tokens_mean": 5.0,
        "completion_tokens_mean": 3.9,
        "cut_off_ratio": 0.12,
        "flat_groups": 3,
        "groups": 16,
        "staleness_max": 1,
        "tokens_per_s": 5200.0,
    }
    waits = {"actor waits for rollout (generating)": 0.3, "actor waits for rollout (delivering)": 0.08}
    assert step_line(metrics, steps=80, waits=waits, skipped=3) == (
        "step 12/80  reward 0.41 ±0.49  loss 0.0021  old_kl 0.0003  entropy 1.84  grad 0.31  prompt 5 tok  "
        "answer 3.9 tok (cut 12 %)  flat 3/16  stale 1  5.2k tok/s  actor waits 38 % for rollout  "
        "(3 steps before it not shown)"
    )
    assert step_line({**metrics, "kl": 0.5}).count("kl") == 1, "the reference's, where there is one"
    assert step_line({"step": 1}) == "step 1"
    assert step_line({"step": 1, "skipped": 1}) == "step 1  skipped: its gradient was not finite"


def test_the_first_role_is_who_waits() -> None:
    assert longest_wait({"actor waits for rollout (x)": 0.1, "rollout waits for actor (y)": 0.9}) == (
        "actor waits 10 % for rollout"
    )
    assert longest_wait({}) == longest_wait({"mine": 0.5}) == longest_wait({"a waits for b": 0.01}) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0, "0"), (1.0, "1"), (-0.5, "-0.5"), (12.34, "12"), (1e-7, "1e-07"), (123456.0, "123456")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_thousands() -> None:
    assert [thousands(value) for value in (7.0, 820.0, 999.9, 5200, 1.4e6)] == [
        "7",
        "820",
        "1.0k",
        "5.2k",
        "1.4M",
    ]


# -- the file ---------------------------------------------------------------------------------------


def lines_of(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


STEPS = {step: {"step": step, "loss": step / 10} for step in (1, 2, 3)}
WHOLE = [(step, step / 10) for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "left",
    [
        "",
        '{"step":1,"loss":0.1}\n{"step":2,"lo',
        '{"step":1,"loss":0.1}\n{"step":2,"loss":0.2}\n{"step":3,"loss":0.3}',
        '{"step":1,"loss":0.1}\n{"step":2,"loss":0.2}\n{"step":2,"loss":0.2}\n{"step":3,"loss":0.3}\n',
        "no json\n",
        "[]\n",
        '{"step":1,"loss":0.1}\n{"step":2,"loss":0.2}\n{"step":3,"loss":0.3}\n{"step":4,"loss":0.4}\n',
    ],
)
def test_whatever_a_kill_left_it_has_each_step_of_the_ledger_once(tmp_path: Path, left: str) -> None:
    (tmp_path / NAME).write_text(left)
    file = MetricsFile(tmp_path, STEPS)
    assert lines_of(tmp_path) == WHOLE
    file.add(4, {"loss": 0.4})
    assert lines_of(tmp_path) == [*WHOLE, (4, 0.4)]


def test_a_file_that_is_whole_is_left_alone(tmp_path: Path) -> None:
    MetricsFile(tmp_path, STEPS)
    before = (tmp_path / NAME).stat().st_ino
    MetricsFile(tmp_path, STEPS).add(4, {"loss": 0.4})
    assert (tmp_path / NAME).stat().st_ino == before


def test_a_line_that_could_not_be_written_comes_with_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    file = MetricsFile(folder, STEPS)  # no such folder: as if there were no room
    file.add(4, {"loss": 0.4})
    folder.mkdir()
    (folder / NAME).write_text('{"step":1')
    file.add(5, {"loss": 0.5})
    assert lines_of(folder) == [*WHOLE, (4, 0.4), (5, 0.5)]


# -- what reward functions return beside their scores -------------------------------------------------


def said(number: int, *of_samples: dict[str, object]) -> Group:
    one = group(number, [0.5] * len(of_samples), [2] * len(of_samples))
    for sample, extras in zip(one.samples, of_samples, strict=True):
        sample.extras = dict(extras)
    return one


def test_each_number_beside_the_reward_is_a_mean_over_the_samples_that_have_it() -> None:
    trained = [
        said(0, {"reward.acc": 1.0, "reward.words": 7.0}, {"reward.acc": 0.0}),
        said(
            1, {"reward.acc": 1.0, "ref_logprobs": np.zeros(2, np.float32), "other": 3.0}, {"reward.acc": 1.0}
        ),
    ]
    found = step_metrics({}, trained, 1, at=0.0, seconds=1.0)
    assert {name: value for name, value in found.items() if name.startswith("reward.")} == {
        "reward.acc": 0.75,
        "reward.words": 7.0,
        "reward.words.count": 1,
    }
    assert found["reward_mean"] == 0.5  # a component of that name would have been another metric


@pytest.mark.parametrize(
    ("extras", "kept"),
    [
        ({"reward.a": math.nan}, {}),
        ({"reward.a": math.inf}, {}),
        ({"reward.a": "text"}, {}),
        ({"reward.a": None}, {}),
        ({"reward.Länge in %": 2.0}, {"reward.L_nge_in__": 2.0}),
        ({"reward.a b": 1.0, "reward.a_b": 2.0}, {"reward.a_b": 1.0}),
        ({"reward.part/acc-1.x": 1.0}, {"reward.part/acc-1.x": 1.0}),
        ({"reward.a": 1e308}, {"reward.a": 1e308}),
    ],
)
def test_a_number_that_is_none_is_no_metric_and_a_name_is_one_that_sinks_take(
    extras: dict[str, object], kept: dict[str, float]
) -> None:
    assert components([said(0, extras)]) == kept


def test_of_too_many_names_those_stay_that_most_samples_have() -> None:
    rare = [{f"reward.of_{at}": 1.0, "reward.all": 1.0} for at in range(MOST_COMPONENTS + 5)]
    found = components([said(0, *rare)])
    names = [name for name in found if not name.endswith(".count")]
    assert len(names) == MOST_COMPONENTS
    assert "reward.all" in names
    assert len(found) == 2 * MOST_COMPONENTS - 1  # `all` is of every sample, and has no count


def test_what_a_step_was_worth() -> None:
    learner = {"model_flops": 3e15, "peak_flops": 2e15}
    reserved = Reserved(gpus=4, price_per_hour=36.0)
    found = step_metrics(learner, GROUPS, 4, at=5.0, seconds=10.0, reserved=reserved)
    assert found["mfu"] == pytest.approx(0.15)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(20 / 10 / 4)
    assert found["cost"] == pytest.approx(0.1)
    assert found["cost_per_million_tokens"] == pytest.approx(0.1 / 20 * 1e6)


@pytest.mark.parametrize("learner", [{"model_flops": 3e15}, {"peak_flops": 2e15}, {}])
def test_an_unknown_card_or_model_has_no_mfu_and_a_job_without_prices_no_cost(
    learner: dict[str, float],
) -> None:
    found = step_metrics(learner, GROUPS, 4, at=5.0, seconds=10.0)
    assert not {"mfu", "cost", "cost_per_million_tokens", "tokens_per_s_per_gpu"} & found.keys()


@pytest.mark.parametrize(
    ("card", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 311.8),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GB10", None),
        ("AMD Instinct MI300X", None),
        ("NVIDIA A10G", None),
    ],
)
def test_the_peak_is_of_cards_that_are_known(card: str, tera: float | None) -> None:
    assert peak_flops(card, "bfloat16") == (None if tera is None else pytest.approx(tera * 1e12))
    assert peak_flops(card, "float32") is None


def test_a_rollout_is_one_sample_of_what_was_drawn_for_it_however_many_rows_it_has() -> None:
    groups = sessions(0, 3)
    for one in groups:
        for sample in one.samples:
            sample.extras["reward.acc"] = sample.reward
            sample.versions = (VersionRun(1, 0, 1), VersionRun(3, 1, len(sample.token_ids)))
    found = step_metrics({}, groups, 4, at=5.0, seconds=2.0)
    drawn = [sum(int(one.samples[at].mask.sum()) for at in rows) for one in groups for rows in one.rollouts]
    assert sum(len(one.samples) for one in groups) > 9
    assert (found["samples"], found["tokens"]) == (9, sum(drawn))
    assert (found["reward_mean"], found["reward.acc"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert found["completion_tokens_mean"] == pytest.approx(sum(drawn) / 9)
    assert found["completion_tokens_max"] == max(drawn)
    assert found["tokens_per_s"] == sum(drawn) / 2
    old = sum(int(row.mask[0]) for one in groups for row in one.samples)
    assert found["staleness_mean"] == pytest.approx(2 * old / sum(drawn))
    assert found["staleness_max"] == 2
    for row in (row for one in groups for row in one.samples):
        row.mask[0] = False  # nothing that was drawn is of the old version now
    assert step_metrics({}, groups, 4, at=5.0, seconds=2.0)["staleness_max"] == 0
    assert {one.versions for one in groups} == {(3, 3)}
