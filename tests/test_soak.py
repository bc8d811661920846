"""The soak's own parts: it harms nobody, also when it is killed, and it tells growth from noise."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.soak.account import JUDGED_FROM_S, Account
from tests.soak.faults import WATCHED, Known, Tally, processes_of
from tests.soak.flatness import Life, Look, growth_between_lives, growth_of
from tests.soak.isolation import PAST_DEADLINE
from tests.waits import GENEROUS_S

HOUR_S = 3600.0

OUTSIDE = """
import sys
from pathlib import Path
from tests.soak.isolation import run_inside
sys.exit(run_inside(sys.argv[3:], Path(sys.argv[2]), within_s=float(sys.argv[1])))
"""


def start_inside(place: Path, within_s: float, script: str) -> subprocess.Popen[bytes]:
    """`script` is of a shell; it has `place` as `$GYRE_SOAK_FOLDER`."""
    words = [sys.executable, "-c", OUTSIDE, str(within_s), str(place), "sh", "-c", script]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def isolated(tmp_path: Path) -> Iterator[None]:
    """Skips the test where there is no right to it. What a failed test leaves inside is killed."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=GENEROUS_S)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("name spaces cannot be made here")
    yield
    for process in inside(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.usefixtures("isolated")
def test_what_is_inside_is_not_seen_outside_and_none_outside_can_be_signalled(tmp_path: Path) -> None:
    script = f"""
        set -e
        mkdir $GYRE_SOAK_FOLDER/disk
        mount -t tmpfs -o size=64k gyre-test $GYRE_SOAK_FOLDER/disk
        ip link add gyresoak type bridge
        ip netns add gyresoak11
        touch /dev/shm/gyre-soak-test
        ! kill -0 {os.getpid()} 2>/dev/null
        exit 7
    """
    with start_inside(tmp_path, GENEROUS_S, script) as run:
        told = run.communicate(timeout=2 * GENEROUS_S)[0].decode()
    assert (run.returncode, told) == (7, "")
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert not Path("/sys/class/net/gyresoak").exists()
    assert not Path("/run/netns/gyresoak11").exists()
    assert not Path("/dev/shm/gyre-soak-test").exists()


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_that_is_inside_ends_with_whoever_started_it(tmp_path: Path, number: signal.Signals) -> None:
    with start_inside(tmp_path, GENEROUS_S, run_for_ever(tmp_path)) as run:
        until((tmp_path / "ready").exists)
        assert len(inside(tmp_path)) >= 2
        run.send_signal(number)
    until(lambda: not inside(tmp_path))


@pytest.mark.usefixtures("isolated")
def test_a_soak_that_does_not_end_is_killed_at_its_deadline(tmp_path: Path) -> None:
    with start_inside(tmp_path, 1.0, run_for_ever(tmp_path)) as run:
        told = run.communicate(timeout=GENEROUS_S)[0].decode()
    assert run.returncode == PAST_DEADLINE
    assert "did not end in 1 s" in told
    until(lambda: not inside(tmp_path))


def run_for_ever(place: Path) -> str:
    """One process in the foreground, and one that has left for a session of its own and heeds no signal."""
    return (
        f"setsid sh -c 'trap \"\" TERM INT HUP; while :; do sleep 1; done' {place} & "
        f"touch {place}/ready; while :; do sleep 1; done"
    )


def inside(place: Path) -> list[psutil.Process]:
    """They have the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GYRE_SOAK_FOLDER") == str(place):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- whom it strikes ------------------------------------------------------------------------------------


def test_a_pid_that_is_not_the_jobs_is_not_struck() -> None:
    """The view names this very process as a vertex, and as the master."""
    view = {
        "vertices": [{"id": "actor-0", "incarnation": 1, "pid": os.getpid(), "phase": "running"}],
        "master": {"answering": True, "epoch": 1, "pid": os.getpid()},
    }
    assert processes_of(view) == []


def test_a_pid_that_was_given_to_another_is_not_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            process = psutil.Process(sleeper.pid)
            known = Known("actor-0", 1, process)
            monkeypatch.setattr(process, "_ident", (sleeper.pid, process.create_time() - 60.0))
            assert not known.signal(signal.SIGKILL)
            assert sleeper.poll() is None
        finally:
            sleeper.kill()


# -- what grows -----------------------------------------------------------------------------------------


def a_life(
    *,
    born_s: float = 0.0,
    lasts_s: float = HOUR_S,
    mib_per_hour: float = 0.0,
    base: float = 100.0,
    seed: int = 0,
) -> Life:
    """A look every five seconds, with noise, and an outlier now and then."""
    chance = random.Random(seed)
    looks = []
    for number in range(int(lasts_s / 5)):
        at_s = born_s + 5.0 * number
        outlier = 30.0 if chance.random() < 0.03 else 0.0
        noise = chance.gauss(0.0, 0.5) + outlier
        memory = base + mib_per_hour * (at_s - born_s) / HOUR_S + noise + min((at_s - born_s) / 4.0, 20.0)
        looks.append(Look(at_s, memory, 50, 20, 10))
    return Life("master", seed, looks)


@pytest.mark.parametrize("mib_per_hour", [0.0, 1.0, 3.0, 10.0, 100.0])
def test_growth_is_told_from_noise_outliers_and_a_start(mib_per_hour: float) -> None:
    found = growth_of([a_life(mib_per_hour=mib_per_hour)], "memory_mib", after_s=HOUR_S / 4)
    assert found is not None
    assert found.per_hour == pytest.approx(mib_per_hour, abs=0.5)


def test_growth_within_lives_is_seen_though_each_begins_anew() -> None:
    lives = [
        a_life(
            born_s=600.0 * number, lasts_s=600.0, mib_per_hour=30.0, base=100.0 - 5.0 * number, seed=number
        )
        for number in range(6)
    ]
    found = growth_of(lives, "memory_mib", after_s=0.0)
    assert found is not None
    assert found.per_hour == pytest.approx(30.0, abs=3.0)


def test_growth_from_life_to_life_is_seen_though_none_grows() -> None:
    lives = [
        a_life(born_s=600.0 * number, lasts_s=600.0, base=100.0 + 2.0 * number, seed=number)
        for number in range(6)
    ]
    within, between = growth_of(lives, "memory_mib", after_s=0.0), growth_between_lives(lives)
    assert within is not None
    assert between is not None
    assert within.per_hour == pytest.approx(0.0, abs=3.0)
    assert between == pytest.approx(12.0, abs=3.0)


def test_short_lives_say_nothing() -> None:
    assert growth_of([a_life(lasts_s=200.0)], "memory_mib", after_s=0.0) is None
    assert growth_between_lives([a_life()]) is None


def test_descriptors_that_leak_are_seen() -> None:
    life = Life("trainer", 1, [Look(5.0 * n, 100.0, 50 + n // 40, 20, 10) for n in range(720)])
    found = growth_of([life], "descriptors", after_s=0.0)
    assert found is not None
    assert found.per_hour == pytest.approx(18.0, abs=1.0)


# -- what is no proof -----------------------------------------------------------------------------------


def an_account(**changed: Any) -> Account:
    """Of a soak that came out well."""
    tokens = {"generated": 10, "delivered": 6, "in_flight": 3, "discarded": 1}
    well: dict[str, Any] = {
        "phase": "stopped",
        "calm": 1.0,
        "faulty_s": HOUR_S,
        "faulty_steps": 3000,
        "tallies": {"kill_a_process": Tally(5, 5), "swallow": Tally(3, 0)},
        "trained": 24_000,
        "lost": 0,
        "twice": 0,
        "tokens": tokens,
        "replay_differences": 0,
        "lives": {role: Life(role, 1, a_life().looks) for role in WATCHED},
    }
    return Account(**well | changed)


def test_a_soak_that_came_out_well_holds() -> None:
    assert an_account().holds
    short = an_account(faulty_s=JUDGED_FROM_S - 1, lives={})
    assert short.holds, "no life of a short soak says anything"


@pytest.mark.parametrize(
    "changed",
    [
        {"trained": 0},
        {"faulty_steps": 0},
        {"tallies": {}},
        {"tallies": {"swallow": Tally(3, 0)}},
        {"tokens": {}},
        {"tokens": {"generated": 0, "delivered": 0, "in_flight": 0, "discarded": 0}},
        {"replay_differences": -1},
        {"lives": {}},
        {"lives": {"master": Life("master", 1, a_life().looks)}},
    ],
    ids=str,
)
def test_a_soak_in_which_there_was_nothing_to_lose_or_to_look_at_proves_nothing(
    changed: dict[str, Any],
) -> None:
    assert not an_account(**changed).holds


@pytest.mark.parametrize("changed", [{"lost": 1}, {"twice": 1}, {"left": {"a file"}}, {"phase": "failed"}])
def test_a_soak_that_lost_something_does_not_hold(changed: dict[str, Any]) -> None:
    assert not an_account(**changed).holds
