"""The reward pool: in order, in processes, and never a number for what went wrong."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gyre.config.sections import RewardSettings, read_section
from gyre.errors import ConfigError, UserCodeError
from gyre.testing.clock import VirtualClock
from gyre.workloads.rewards import RewardPool, load_function, math_verify
from tests.waits import GENEROUS_S

HERE = "tests.workloads.reward_functions"


@pytest.fixture
def pool_of():
    made = []

    def make(function="by_word", **settings):
        made.append(
            RewardPool(RewardSettings(function=f"{HERE}:{function}", **{"timeout_s": GENEROUS_S, **settings}))
        )
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def says(*words):
    return [("prompt", word, {"answer": "x"}) for word in words]


def test_rewards_come_in_order_whoever_computes_them(pool_of):
    pool, scored = pool_of("length", processes=3), []
    words = ["a" * n for n in (7, 3, 9, 1, 1, 0, 4)]
    assert pool.score(says(*words), on_scored=lambda: scored.append(1)) == [len(word) + 1.0 for word in words]
    assert len(scored) == 7
    assert pool.score([]) == []


def test_processes_are_others_and_are_kept(pool_of):
    pool = pool_of("who", processes=1)
    (first,), (second,) = pool.score(says("a")), pool.score(says("b"))
    assert first == second != os.getpid()


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("raise", "it raised"),
        ("nan", "nan"),
        ("die", "status 7, 2 times"),
        ("hang", "longer than 0.3 s, 2 times"),
    ],
)
def test_what_goes_wrong_is_the_user_s_error_and_the_pool_goes_on(pool_of, word, sentence):
    pool = pool_of(timeout_s=0.3 if word == "hang" else GENEROUS_S)
    with pytest.raises(UserCodeError, match=sentence) as caught:
        # A limit this short may be passed by anybody on a busy machine.
        pool.score(says(word) if word == "hang" else says("fine", word, "fine"))
    assert word in caught.value.details["traceback"]
    if word == "raise":
        assert "no such thing" in caught.value.details["traceback"]
        assert "reward_functions.py" in caught.value.details["traceback"]
    if word != "hang":
        assert pool.score(says("fine", "fine")) == [1.0, 1.0]


def test_a_process_that_is_at_nothing_is_not_late_and_may_die():
    clock = VirtualClock()
    pool = RewardPool(RewardSettings(function=f"{HERE}:by_word", processes=3), clock=clock)
    try:
        until = time.monotonic() + GENEROUS_S
        while len(pool._processes) < 3 or not all(one.ready for one in pool._processes):
            assert time.monotonic() < until, "three processes began"
            assert pool.score(says("fine", "fine", "fine")) == [1.0] * 3
        clock.advance(1000.0)
        assert pool.score(says("fine")) == [1.0]
        idle = pool._processes[1]
        os.kill(idle.pid, signal.SIGKILL)
        idle._process._guard.wait(GENEROUS_S)
        assert pool.score(says("fine")) == [1.0]
        assert pool.score(says("fine", "fine", "fine")) == [1.0] * 3
    finally:
        pool.close()


@pytest.mark.parametrize("word", ["die", "hang"])
def test_what_nobody_can_check_earns_what_the_job_says_and_is_told(pool_of, capfd, word):
    pool = pool_of(timeout_s=0.3 if word == "hang" else GENEROUS_S, stuck_score=-0.5, processes=1)
    scored = []
    found = pool.score(
        says(word) if word == "hang" else says("fine", word, "fine"), on_scored=lambda: scored.append(1)
    )
    assert found == ([-0.5] if word == "hang" else [1.0, -0.5, 1.0])
    assert (pool.stuck, len(scored)) == (1, len(found))
    told = capfd.readouterr().err
    assert "2 times in a row" in told
    assert "It earns -0.5" in told
    assert f"→ '{word}'" in told
    if word == "die":  # what the function itself gets wrong stays an error
        for wrong in ("raise", "nan"):
            with pytest.raises(UserCodeError):
                pool.score(says(wrong))


def test_a_crash_that_does_not_come_again_is_forgotten(pool_of, tmp_path):
    pool = pool_of()
    assert pool.score(says("fine", f"once {tmp_path / 'seen'}", "fine")) == [1.0, 1.0, 1.0]


def test_no_process_outlives_the_pool(pool_of):
    pool = pool_of("who", processes=2)
    found = {int(pid) for pid in pool.score(says(*"abcdef"))}
    pool.close()
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_function_of_a_file_is_found_by_its_path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def half(prompt, completion, meta):\n    return len(completion) / 2\n")
    pool = RewardPool(RewardSettings(function=f"{path}:half"))
    try:
        assert pool.score(says("four")) == [2.0]
    finally:
        pool.close()


def test_a_function_that_cannot_be_loaded_in_the_process_is_told():
    pool = RewardPool(RewardSettings(function="no_such_module_here:f"))
    try:
        with pytest.raises(ConfigError, match="'no_such_module_here:f' cannot be loaded"):
            pool.score(says("a"))
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("18", r"So she earns \boxed{18} dollars.", 1.0),
        ("1/2", r"<think>\boxed{9}</think> It is $\frac{1}{2}$.", 1.0),
        ("0.5", r"\boxed{\frac12}", 1.0),
        (r"\frac{3}{4}", r"\boxed{0.7}", 0.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        ("18", "I do not know.", 0.0),
        ("18", "", 0.0),
        ("1,000", r"\boxed{1000}", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(answer, said, reward):
    pytest.importorskip("math_verify")
    assert math_verify("", said, {"answer": answer}) == reward


@pytest.mark.parametrize(
    "wrong", [{"processes": 0}, {"attempts": 0}, {"timeout_s": 0.0}, {"stuck_score": float("nan")}]
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ConfigError, match=r"config\.reward"):
        read_section(RewardSettings, {"reward": wrong}, "reward")


def test_the_builtin_functions_have_names():
    assert load_function("math_verify") is math_verify


# -- several functions -------------------------------------------------------------------------------


@pytest.fixture
def pool_with():
    made = []

    def make(*functions, **settings):
        parts = [{"function": f"{HERE}:{name}", **more} for name, more in functions]
        section = {"functions": parts, "timeout_s": GENEROUS_S, **settings}
        made.append(RewardPool(read_section(RewardSettings, {"reward": section}, "reward")))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_the_reward_is_the_weighted_sum_and_each_score_is_kept(pool_with):
    pool = pool_with(
        ("length", {}), ("in_batches", {"weight": -0.5, "name": "batch"}), ("verl_score", {"weight": 2.0})
    )
    assert pool.scored(says("a", "bcd")) == [
        (
            2.0 - 0.5 * 10 + 2.0 * 0.25,
            {"length": 2.0, "batch": 10.0, "verl_score": 0.25, "verl_score.acc": 1.0},
        ),
        (
            4.0 - 0.5 * 11 + 2.0 * 0.25,
            {"length": 4.0, "batch": 11.0, "verl_score": 0.25, "verl_score.acc": 1.0},
        ),
    ]
    assert [form.name for form in pool.forms] == ["sample", "trl", "verl"]


def test_what_fails_of_several_is_named(pool_with):
    pool = pool_with(("length", {}), ("by_word", {}))
    with pytest.raises(
        UserCodeError, match=r"reward function 'tests\.workloads\.reward_functions:by_word' failed on a"
    ):
        pool.score(says("raise"))
    gone = pool_with(("length", {}), ("no_such_function", {}))
    with pytest.raises(ConfigError, match=r"^config\.reward\.functions\[1\]\.function: .*no_such_function"):
        gone.begin()
    lacking = pool_with(("in_batches", {}), ("verl_score", {}))
    with pytest.raises(
        ConfigError, match=r"^config\.reward\.functions\[1\]\.function: the data has no answer"
    ):
        lacking.score([("P", "C", {})])


def test_a_function_that_hangs_earns_its_stuck_score_and_the_others_their_own(pool_with):
    pool = pool_with(
        ("length", {}), ("by_word", {"weight": 10.0}), attempts=1, timeout_s=0.5, stuck_score=-1.0
    )
    (found,) = pool.scored(says("hang"))
    assert found == (5.0 - 10.0, {"length": 5.0, "by_word": -1.0})
    assert pool.stuck == 1


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"function": "exact_match", "functions": [{"function": "math_verify"}]}, "exclude each other"),
        (
            {"functions": [{"function": "exact_match"}, {"function": "a.py:exact_match"}]},
            "called 'exact_match'",
        ),
        ({"functions": [{"function": "exact_match"}], "signature": "verl"}, "signature of its own"),
        ({"functions": [{"function": "exact_match", "weight": float("nan")}]}, "weight"),
        ({"functions": [{"function": "exact_match", "name": "a.b"}]}, "name"),
        ({"functions": [{"function": f"a.py:f{at}"} for at in range(17)]}, "functions"),
    ],
)
def test_a_list_of_functions_that_makes_no_sense_is_refused(section, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_section(RewardSettings, {"reward": section}, "reward")
