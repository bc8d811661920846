"""A gang over two machines meets at the ranks' own addresses, whatever the machines' names stand for."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machines.network import Machine, can_make_machines, machines, sweep
from tests.machines.rank import FOREVER, Orders
from tests.ports import free_port
from tests.waits import GENEROUS_S

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {
    "loopback": "127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost {name}\n",
    "nothing": "127.0.0.1 localhost\n",
}
"""By what a machine's name stands for: Debian's hosts file, and one without the name."""

BACKENDS: dict[str, dict[str, Any]] = {"torch": {}, "megatron": {"tensor_parallel": 2}}
TIMEOUT_S = 30.0
SHORT_S = 6.0

SLACK_S = 30.0
"""What a busy machine adds. The libraries' own time-outs are ten times as long."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kill,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root, and `ip`"),
]


@pytest.fixture(scope="module", params=HOSTS)
def two(request: pytest.FixtureRequest) -> Iterator[list[Machine]]:
    with machines(2, hosts=HOSTS[request.param]) as made:
        yield made


class Gang:
    """A rank on each of the machines `present`, of as many as there are machines."""

    def __init__(self, two: list[Machine], backend: str, family: str, folder: Path, **orders: Any) -> None:
        port, present = free_port(), orders.pop("present", [0, 1])
        own = [getattr(machine, family) for machine in two]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.pop(name, None)
        known = orders.pop("known", True)
        self.ranks = {
            rank: two[rank].popen(
                *Orders(
                    backend=backend,
                    rank=rank,
                    ranks=len(two),
                    master_addr=own[0],
                    master_port=port,
                    address=own[rank] if known else "",
                    folder=str(folder),
                    megatron=BACKENDS[backend],
                    **{"timeout_s": TIMEOUT_S, **orders},
                ).words(),
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in present
        }

    def next(self, rank: int) -> dict[str, Any]:
        line = self.ranks[rank].stdout.readline()  # type: ignore[union-attr]
        assert line, self.ranks[rank].stderr.read()[-3000:]  # type: ignore[union-attr]
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        for process in self.ranks.values():
            process.kill()
            with contextlib.suppress(ValueError):  # read to its end before
                process.communicate()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def end(self) -> list[dict[str, Any]]:
        """What each said last."""
        out = [process.communicate(timeout=2 * GENEROUS_S) for process in self.ranks.values()]
        assert all(text for text, _ in out), [errors[-2000:] for _, errors in out]
        return [json.loads(text.splitlines()[-1]) for text, _ in out]


@pytest.fixture
def gang(two: list[Machine]) -> Iterator[Callable[..., Gang]]:
    """Starts gangs on the machines."""
    started: list[Gang] = []

    def start(*words: Any, **orders: Any) -> Gang:
        started.append(Gang(two, *words, **orders))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize(("backend", "family"), [("torch", "ipv4"), ("megatron", "ipv6")])
def test_a_gang_over_two_machines_trains_is_killed_and_comes_back(
    two: list[Machine], gang: Callable[..., Gang], tmp_path: Path, backend: str, family: str
) -> None:
    first = gang(backend, family, tmp_path, steps=FOREVER)
    for rank, machine in enumerate(two):
        met = first.next(rank)
        assert met.get("met"), met
        assert met["at"] == [getattr(machine, family)], (
            "what a rank says goes by the address that it was given"
        )
    while first.next(0).get("step", 0) < 2:
        pass
    first.ranks[1].kill()
    killed_at = time.monotonic()
    left = first.ranks[0].communicate(timeout=2 * GENEROUS_S)[0].splitlines()[-1]
    assert "failed" in json.loads(left), left
    assert time.monotonic() - killed_at < TIMEOUT_S + SLACK_S
    saved = max(int(path.name[5:]) for path in tmp_path.glob("step-*"))

    ends = gang(backend, family, tmp_path, steps=saved + 2).end()
    assert [end.get("ended") for end in ends] == [saved + 2] * 2, ends
    assert len({end["digest"] for end in ends}) == 1


def test_ranks_that_know_no_address_of_their_own_take_the_way_to_rank_0(
    two: list[Machine], gang: Callable[..., Gang], tmp_path: Path
) -> None:
    for family in ("ipv4", "ipv6"):
        one = gang("torch", family, tmp_path / family, known=False)
        met = [one.next(rank) for rank in range(2)]
        assert [said.get("at") for said in met] == [[getattr(machine, family)] for machine in two], met
        assert [end.get("ended") for end in one.end()] == [2, 2]


@pytest.mark.parametrize(
    ("backend", "present"), [("torch", [0]), ("megatron", [1])], ids=["rank 1", "rank 0"]
)
def test_who_waits_for_a_rank_that_never_comes_ends_when_the_settings_say(
    gang: Callable[..., Gang], tmp_path: Path, backend: str, present: list[int]
) -> None:
    (end,) = gang(backend, "ipv4", tmp_path, present=present, timeout_s=SHORT_S).end()
    assert end["failed"] == "RanksMissing", end
    assert "rank 1" in end["error"] if present == [0] else "rank 0" in end["error"]
    assert SHORT_S - 1.0 <= end["waited_s"] < SHORT_S + SLACK_S, end


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from tests.machines.network import machines\n"
        "with machines(1, hosts='') as made:\n"
        "    print(made[0].name, flush=True)\n"
        "    time.sleep(60)\n"
    )
    words = {
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
    }
    killed = subprocess.Popen([sys.executable, "-c", program], **words)  # type: ignore[call-overload]
    name = killed.stdout.readline().strip()
    killed.kill()
    killed.communicate()
    assert name

    def left() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    assert name in left()
    sweep()
    assert name not in left()
    assert not Path("/etc/netns", name).exists()
