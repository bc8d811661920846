"""The verdict on a job's curves is the one that a person gives who looks at them: a table of curves, most of them
recorded, and the words.

`recorded_curves.json` has jobs of docs/tutorial.md (`sound`; `short`: 25 of its steps; `still`: learning rate 1e-9;
`fallen`: 0.05; `wild`: 0.3) and the job of the page's tests (`demo`), as their ledgers and journals had them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.api.trend import inflation, mann_kendall, share_trend
from gyre.api.verdict import IN_A_LOOK, LOOKS, WORDS, judged_steps, learns, looks, sentence_of

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((Path(__file__).parent / "recorded_curves.json").read_text())
LEARNING = {
    (one["case"], one["seed"]): one
    for one in json.loads((ROOT / "bench" / "results" / "learning.json").read_text())["rows"]
}


def view(evaluations: Any = None, warnings: Any = (), ended: bool = False) -> dict[str, Any]:
    return {
        "job": {"ended_at": 1.0 if ended else None},
        "evaluations": evaluations or {},
        "warnings": list(warnings),
    }


def steps(rewards: list[float], low: float | None = 0.0, high: float | None = 1.0) -> list[dict[str, Any]]:
    ends = {} if low is None else {"reward_min": low, "reward_max": high}
    return [{"step": number, "reward_mean": reward, **ends} for number, reward in enumerate(rewards, 1)]


def noisy(shape: Callable[[int], float], count: int, noise: float, seed: int = 7) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return steps([min(1.0, max(0.0, shape(at) + rng.gauss(0, noise))) for at in range(count)])


def benched(case: str, seed: int, count: int) -> list[dict[str, Any]]:
    return steps([row[1] for row in LEARNING[case, seed]["by_step"][:count]])


def recorded(name: str, count: int = 1000) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    one = RECORDED[name]
    return one["steps"][:count], one["evaluations"]


def held(*shares: float, prompts: int = 512, every: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "version": at * every,
            "accuracy": share,
            "reward_mean": share,
            "count": prompts,
            "prompts": prompts,
            "threshold": 1.0,
        }
        for at, share in enumerate(shares)
    ]


def earned(*means: float, std: float = 0.4, prompts: int = 512) -> list[dict[str, Any]]:
    rows = held(*means, prompts=prompts)
    return [row | {"accuracy": None, "threshold": None, "reward_std": std} for row in rows]


def flat_from(first: int, rewards: list[float]) -> list[dict[str, Any]]:
    """All groups without a gradient from step `first` on."""
    return [row | {"flat_groups_ratio": float(row["step"] >= first)} for row in steps(rewards)]


FLAT = noisy(lambda at: 0.4, 100, 0.03)
RISES = noisy(lambda at: 0.1 + 0.008 * at, 80, 0.05)
FALLS = noisy(lambda at: 0.2 + 0.6 * min(at / 40, 1) if at < 70 else 0.05, 100, 0.03)

CURVES: dict[str, tuple[Any, Any, str, str]] = {
    # recorded: rewards alone
    "synchronous, 120 steps": (benched("synchronous", 0, 120), None, "yes", "in steps 103 to 120"),
    "synchronous, its first 25": (
        benched("synchronous", 1, 25),
        None,
        "yes",
        "mean reward 0.38 in steps 1 to 3",
    ),
    "four steps stale, its first 8": (
        benched("four steps stale", 1, 8),
        None,
        "unknown",
        "no more than chance",
    ),
    "four steps stale, its first 40": (benched("four steps stale", 1, 40), None, "yes", ""),
    "streamed, its first 60": (benched("streamed", 2, 60), None, "yes", ""),
    "killed eight times": (benched("killed", 1, 120), None, "yes", ""),
    "its second half: at its maximum": (
        benched("synchronous", 2, 120)[60:],
        None,
        "saturated",
        "no answer earned more than 1",
    ),
    "five steps": (benched("synchronous", 0, 5), None, "too early", "5 steps with a reward, 8 are needed"),
    # all prompts answered alike, and no gradient any more
    "one label for all, while the rewards rise": (
        RISES,
        {
            "held_out": [
                row | {"distinct": n} for row, n in zip(held(0.0, 0.48, prompts=23), (20, 1), strict=True)
            ]
        },
        "partly",
        "48 % at version 20, where all 23 answers are the same",
    ),
    "one label for all, and all are right": (
        RISES,
        {"held_out": [row | {"distinct": 1} for row in held(0.0, 1.0, prompts=23)]},
        "yes",
        "100 % at version 20",
    ),
    "no group has a gradient since step 6": (
        flat_from(6, [0.06, 0.2, 0.3, 0.35, 0.33, *[0.34] * 15]),
        {"held_out": held(0.0, 0.52, prompts=23)},
        "stuck",
        "no group has had a gradient since step 6, at a mean reward of 0.34; held-out accuracy 0 %",
    ),
    "no gradient in the last look, nor at the end of the one before": (
        [row for row in flat_from(30, [0.3] * 429) if row["step"] <= 40 or row["step"] > 389],
        None,
        "stuck",
        "no group has had a gradient since step 390",
    ),
    "no gradient, for all is solved": (
        flat_from(60, [min(0.1 + 0.02 * at, 1.0) for at in range(80)]),
        {"held_out": held(0.0, 1.0)},
        "yes",
        "",
    ),
    # recorded: with their evaluations
    "the demo": (*recorded("demo"), "yes", "held-out accuracy 34 % at version 0, 88 % at version 20"),
    "the tutorial": (*recorded("sound"), "yes", "held-out accuracy 0 % at version 0"),
    "the tutorial, 25 steps": (*recorded("short"), "yes", "held-out accuracy 0 % at version 0"),
    "the tutorial's rewards alone": (recorded("short")[0], None, "yes", "mean reward"),
    "a learning rate of 1e-9": (*recorded("still"), "no", ""),
    "a learning rate of 0.3: one answer to everything": (
        *recorded("wild"),
        "partly",
        "accuracy 0 % at version 0, 0 % at",
    ),
    "a learning rate of 0.05: rose, fell, and rose to half": (
        *recorded("fallen"),
        "partly",
        "held-out accuracy 0 % at version 0, 0 % at version 60: no more than chance",
    ),
    # made: rewards alone
    "no step": ([], None, "too early", "0 steps"),
    "one step": (steps([0.5]), None, "too early", "1 step with"),
    "flat and quiet": (FLAT, None, "no", "mean reward 0.4 in steps 1 to 30"),
    "noise": (noisy(lambda at: 0.5, 20, 0.2), None, "unknown", "no more than chance"),
    "noise that goes up and down": (steps([0.5 + 0.1 * (-1) ** at for at in range(30)]), None, "unknown", ""),
    "rises slowly": (noisy(lambda at: 0.3 + 0.0015 * at, 100, 0.05), None, "yes", ""),
    "rose at once and stays": (noisy(lambda at: 0.1 if at < 4 else 0.7, 100, 0.05), None, "yes", ""),
    "rises late": (noisy(lambda at: 0.1 + max(0.0, 0.02 * (at - 45)), 60, 0.03), None, "yes", ""),
    "collapsed": (FALLS, None, "worse", "0.8 in steps"),
    "falls slowly": (noisy(lambda at: 0.8 - 0.004 * at, 100, 0.05), None, "worse", "it fell"),
    "a dip that is less than half of the gain": (
        noisy(lambda at: 0.2 + 0.6 * min(at / 40, 1) - (0.1 if at > 80 else 0), 100, 0.03),
        None,
        "yes",
        "",
    ),
    "nobody earns anything": (steps([0.0] * 20, 0.0, 0.0), None, "no", "no answer is better than another"),
    "everybody earns all": (steps([1.0] * 20, 1.0, 1.0), None, "saturated", "earned 1"),
    "nearly all earn all": (noisy(lambda at: 0.985, 40, 0.01), None, "saturated", ""),
    "rewards without bounds": (steps([3.0 * at for at in range(20)], None, None), None, "yes", ""),
    "not every step has a number": (
        [*steps([float("nan")] * 9), *steps([0.5] * 3)],
        None,
        "too early",
        "3 steps",
    ),
    # made: evaluations
    "held-out rose, rewards flat": (FLAT, {"held_out": held(0.34, 0.99)}, "yes", "99 % at version 20"),
    "held-out within chance, rewards flat": (
        FLAT,
        {"held_out": held(0.34, 0.36)},
        "no",
        "36 % at version 20: no more",
    ),
    "held-out fell while rewards rise": (RISES, {"held_out": held(0.9, 0.3)}, "worse", "it fell"),
    "held-out did not follow rewards": (
        RISES,
        {"held_out": held(0.4, 0.41)},
        "partly",
        "no more than chance",
    ),
    "too few prompts to say": (RISES, {"held_out": held(0.3, 0.6, prompts=4)}, "yes", "mean reward"),
    "too few prompts, rewards flat": (FLAT, {"held_out": held(0.3, 0.6, prompts=4)}, "no", ""),
    "none of 16 is right, twice, while the rewards rise": (
        RISES,
        {"held_out": held(0.0, 0.0, prompts=16)},
        "yes",
        "held-out accuracy 0 % at version 0, 0 % at version 20",
    ),
    "none of 16 is right, five times": (
        RISES,
        {"held_out": held(0.0, 0.0, 0.0, 0.0, 0.0, prompts=16)},
        "partly",
        "",
    ),
    "the tutorial, its first 14 steps": (
        recorded("sound", 14)[0],
        {"held_out": recorded("sound")[1]["held_out"][:2]},
        "yes",
        "mean reward 0.07 in steps 1 to 3",
    ),
    "many small rises are one": (
        FLAT,
        {"held_out": held(0.3, 0.33, 0.36, 0.39, 0.42, 0.45, prompts=100)},
        "yes",
        "",
    ),
    "held-out collapsed": (
        FLAT,
        {"held_out": held(0.1, 0.6, 0.8, 0.12)},
        "worse",
        "80 % at version 40, 12 % at version 60",
    ),
    "mean rewards": (FLAT, {"held_out": earned(0.1, 0.9)}, "yes", "held-out reward 0.1 at version 0"),
    "mean rewards within their spread": (FLAT, {"held_out": earned(0.1, 0.12)}, "no", "no more than chance"),
    "only one of two rose": (
        RISES,
        {"aime": held(0.1, 0.11), "math": held(0.3, 0.6)},
        "partly",
        "held-out math accuracy 30 % at version 0, 60 % at version 20; held-out aime accuracy 10 %",
    ),
    "one rose and one fell": (
        RISES,
        {"code": held(0.5, 0.3), "math": held(0.3, 0.6)},
        "partly",
        "code accuracy 50 % at version 0, 30 % at version 20: it fell",
    ),
    "one rose and one was solved before": (
        RISES,
        {"easy": held(0.99, 0.99), "math": held(0.3, 0.6)},
        "yes",
        "math",
    ),
    "all rose": (RISES, {"code": held(0.2, 0.5), "math": held(0.3, 0.6)}, "yes", "code"),
    "solved from version 0": (FLAT, {"held_out": held(0.99, 0.99)}, "saturated", ""),
    "collapsed after its last evaluation": (
        FALLS,
        {"held_out": held(0.2, 0.8, every=50)},
        "worse",
        "0.8 in steps",
    ),
    "fell before its last evaluation, which rose": (FALLS, {"held_out": held(0.2, 0.8, every=99)}, "yes", ""),
    "one evaluation says nothing": (FLAT, {"held_out": held(0.3)}, "no", "mean reward"),
    "another threshold is another question": (
        FLAT,
        {"held_out": [held(0.3)[0], held(0.3, 0.9)[1] | {"threshold": 0.5}]},
        "no",
        "mean reward",
    ),
    "so is what the reward function calls right": (
        FLAT,
        {"held_out": [held(0.3)[0], held(0.3, 0.9)[1] | {"threshold": None, "right_by": "reward.acc"}]},
        "no",
        "mean reward",
    ),
    "accuracy is told with whose it is": (
        FLAT,
        {"held_out": [one | {"threshold": None, "right_by": "reward.acc"} for one in held(0.3, 0.9)]},
        "yes",
        "held-out accuracy (reward.acc) 30 % at version 0, 90 % at version 20",
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_has_the_verdict_that_a_person_gives(name: str) -> None:
    curve, evaluations, verdict, words = CURVES[name]
    found = learns(view(evaluations), curve)
    assert (found["verdict"], words in found["because"]) == (verdict, True), found


def test_without_its_steps_a_job_is_judged_by_its_evaluations() -> None:
    """The store is out of reach."""
    assert learns(view(), None)["verdict"] == "unknown"
    assert "cannot be read now" in learns(view(), None)["because"]
    assert learns(view({"held_out": held(0.3, 0.9)}), None)["verdict"] == "yes"


def test_a_warning_stands_beside_the_verdict_and_never_changes_it() -> None:
    warnings = [
        {"code": "cut_off", "step": 3, "message": "95 % were\ncut off"},
        {"code": "not_evaluated", "step": 0, "message": "nothing is evaluated"},
    ]
    for curve, evaluations, verdict, _ in CURVES.values():
        found = learns(view(evaluations, warnings), curve)
        assert found["verdict"] == verdict
        assert found["beside"] == ["since step 3: 95 % were cut off", "nothing is evaluated"]


def test_an_ended_job_has_its_verdict_in_the_past() -> None:
    running, ended = (learns(view(ended=over), RISES) for over in (False, True))
    assert sentence_of(running).startswith("It learns: mean reward")
    assert sentence_of(ended).startswith("It learnt: mean reward")
    assert all(now != over for now, over, _ in WORDS.values())


def test_noise_is_hardly_ever_called_learning() -> None:
    rng = random.Random(1)
    called = sum(
        learns(view(), steps([rng.gauss(0.5, 0.1) for _ in range((12, 25, 60)[run % 3])]))["verdict"]
        in ("yes", "worse")
        for run in range(300)
    )
    assert called <= 15, "one curve in 20"


def test_noise_that_goes_on_widens_what_is_asked_of_a_trend() -> None:
    rng = random.Random(2)
    drifting, value = [], 0.0
    for _ in range(100):
        value = 0.6 * value + rng.gauss(0, 1)
        drifting.append(value)
    own = [rng.gauss(0, 1) for _ in range(100)]
    assert inflation(drifting) > 1.5 > inflation(own)
    rising = [0.01 * at + one for at, one in enumerate(own)]
    assert mann_kendall(rising) == -mann_kendall([-one for one in rising])


def test_two_evaluations_are_the_test_of_two_proportions() -> None:
    pooled = (0.2 * 100 + 0.4 * 50) / 150
    error = (pooled * (1 - pooled) * (1 / 100 + 1 / 50)) ** 0.5
    assert share_trend([0.2, 0.4], [100, 50]) == pytest.approx((0.2 - 0.5 * (1 / 100 + 1 / 50)) / error)


def test_a_long_job_is_judged_by_parts_that_reach_from_its_first_to_its_last_step() -> None:
    asked: list[tuple[int, int]] = []

    def read(after: int, limit: int) -> list[dict[str, Any]]:
        asked.append((after, limit))
        return [{"step": step} for step in range(after + 1, min(after + limit, 10_000) + 1)]

    found = [row["step"] for row in judged_steps(read, 10_000)]
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, 10_000)
    assert len(found) == LOOKS * IN_A_LOOK == sum(limit for _, limit in asked)
    assert list(looks(7)) == [(0, LOOKS * IN_A_LOOK)]
