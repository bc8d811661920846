"""Whatever a reward function does to its process, it ends with it, and no sample gets another one's reward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gyre.config.sections import RewardSettings
from gyre.errors import UserCodeError
from gyre.workloads.rewards import RewardPool
from gyre.workloads.rewards import pool as pool_module
from tests.waits import GENEROUS_S

pytestmark = pytest.mark.landing

HERE = "tests.workloads.unruly_rewards"


@pytest.fixture
def pool_of(monkeypatch, tmp_path):
    """A pool whose processes have this test's own mark in their environment."""
    monkeypatch.setenv("GYRE_TEST_REWARDS", str(tmp_path))
    made = []

    def make(function, **settings):
        settings = {"timeout_s": GENEROUS_S, "processes": 1, **settings}
        made.append(RewardPool(RewardSettings(function=f"{HERE}:{function}", **settings)))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    assert not marked(tmp_path)


def marked(mark) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if f"GYRE_TEST_REWARDS={mark}\0".encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def until(holds):
    late = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < late
        time.sleep(0.02)


def says(*words, **meta):
    return [("prompt", word, {"answer": "x", **meta}) for word in words]


@pytest.mark.parametrize("function", ["starts_and_waits", "forks_and_joins"])
def test_what_a_sample_started_ends_with_its_time(pool_of, tmp_path, function):
    pool = pool_of(function, timeout_s=0.4, attempts=1, stuck_score=0.0)
    pool.begin()
    assert pool.score(says("a")) == [0.0]
    assert not marked(tmp_path)


@pytest.mark.parametrize("function", ["in_the_background", "detached"])
def test_what_a_sample_left_ends_with_the_pool(pool_of, tmp_path, function):
    pool = pool_of(function)
    assert pool.score(says("a", "b")) == [1.0, 1.0]
    until(lambda: len(marked(tmp_path)) == 4)  # the guard, the process, and what two samples left
    pool.close()
    assert not marked(tmp_path)


def test_what_a_sample_detached_ends_with_its_process(pool_of, tmp_path):
    with pytest.raises(UserCodeError, match="ended with status 5"):
        pool_of("detached", attempts=1).score(says("die"))
    assert not marked(tmp_path)


def test_a_process_that_samples_leave_ever_more_under_is_replaced(pool_of, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(pool_module, "MOST_LEFT", 2)
    assert pool_of("in_the_background").score(says(*"abcd")) == [1.0] * 4
    assert len(marked(tmp_path)) <= 4
    assert "left 3 processes running" in capfd.readouterr().err


def test_everything_ends_with_the_process_that_has_the_pool(tmp_path):
    owner = (
        "import time; from gyre.config.sections import RewardSettings; from gyre.workloads.rewards import RewardPool;"
        f"pool = RewardPool(RewardSettings(function='{HERE}:detached', processes=1));"
        "pool.score([('p', 'c', {})]); print('scored', flush=True); time.sleep(600)"
    )
    environment = {
        **os.environ,
        "GYRE_TEST_REWARDS": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen([sys.executable, "-c", owner], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"scored\n"
        until(lambda: len(marked(tmp_path)) >= 4)
        process.kill()
    until(lambda: not marked(tmp_path))


def test_a_child_that_comes_back_shifts_no_answer(pool_of):
    words = [str(n) for n in range(6)]
    assert pool_of("forks_and_returns").score(says(*words)) == [float(word) for word in words]


def test_a_child_that_comes_back_in_its_parent_s_stead_answers_for_nobody(pool_of):
    assert pool_of("parent_leaves", stuck_score=-1.0).score(says("a", "fork", "b")) == [1.0, -1.0, 1.0]


def test_bytes_of_somebody_else_are_no_answer(pool_of):
    with pytest.raises(UserCodeError, match="another process answered in its stead, 2 times in a row"):
        pool_of("writes_for_another").score(says("a"))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("exit", r"it raised SystemExit: 3 \(.*unruly_rewards\.py, line \d+\)"),
        ("interrupt", r"it raised KeyboardInterrupt"),
        ("hard", r"its process ended with status 3, 1 times"),
        ("signal", r"its process was ended by SIGSEGV"),
        ("group", r"its process was ended by SIGKILL"),
        ("recursion", r"it raised RecursionError"),
    ],
)
def test_how_a_function_left_is_told(pool_of, word, told):
    pool = pool_of("leaves", attempts=1)
    with pytest.raises(UserCodeError, match=told):
        pool.score(says(word))
    assert pool.score(says("fine")) == [1.0]


def test_what_a_sample_breaks_the_next_one_does_not_see(pool_of):
    folder = os.getcwd()
    long = "c" * 3_000_000  # more than a pipe holds
    assert pool_of("breaks_things").score(says("a", long, "abc", folder=folder)) == [1.0, 3_000_000.0, 3.0]


def test_a_process_that_takes_no_request_does_not_hold_the_pool(pool_of):
    pool = pool_of("leaves", attempts=1, timeout_s=0.5)
    pool.begin()
    (process,) = pool._processes
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(UserCodeError, match=r"longer than 0\.5 s"):
        pool.score(says("c" * 3_000_000))


# -- batches -----------------------------------------------------------------------------------------


def test_a_batch_is_one_call_in_one_process(pool_of):
    scored = pool_of("batch", processes=2).scored(says(*"abc"))
    assert [reward for reward, _ in scored] == [3.0] * 3
    assert len({more["pid"] for _, more in scored}) == 1


def test_of_a_batch_that_hangs_the_guilty_sample_is_found(pool_of):
    pool = pool_of("batch", timeout_s=0.3, attempts=1, stuck_score=-1.0)
    pool.begin()
    assert pool.score(says("a", "hang", "b")) == [1.0, -1.0, 1.0]
    assert pool.stuck == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("short", "b"),
            r"failed on a batch of 2 samples: it returned 1 rewards for 2 samples \(.*unruly_rewards\.py:\d+\)",
        ),
        (("a", "none"), r"failed on a sample: it returned None .*unruly_rewards\.py:\d+"),
    ],
)
def test_what_a_batch_returned_is_told_with_its_sample(pool_of, words, told):
    with pytest.raises(UserCodeError, match=told) as caught:
        pool_of("batch").score(says(*words))
    assert f"→ '{words[0] if words[0] == 'short' else 'none'}'" in caught.value.details["traceback"]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises_half_a_character", r"raised ValueError: \\ud800 in it"),
        ("raises_lines", "raised ValueError: first and second"),
        ("raises_a_book", "raised ValueError: z{900,1000}… "),
    ],
)
def test_whatever_an_exception_says_comes_through_once(pool_of, function, sentence):
    with pytest.raises(UserCodeError, match=sentence) as raised:
        pool_of(function).score(says("a"))
    assert len(str(raised.value)) < 2000
    assert len(raised.value.details["traceback"]) < 30_000


def test_a_number_may_have_any_name(pool_of):
    assert pool_of("names_half_a_character").scored(says("a")) == [(0.5, {"\\ud800": 1.0})]
