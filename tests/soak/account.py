"""What came of the soak: what was lost, what was left behind, and what the faults cost."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.soak.faults import Tally

View = dict[str, Any]

LOOK_S = 5.0
GROWN_MIB_PER_HOUR = 100.0
"""A process whose memory grows by more is not flat. Less cannot be told from noise in minutes."""

LONG_ENOUGH_S = 240.0
"""Incarnations that lived shorter say nothing about growth."""

WANTED = 0.95
"""Of the pace without faults."""


@dataclass
class Account:
    calm: float = 0.0
    """Steps a second before the first fault."""
    faulty_s: float = 0.0
    faulty_steps: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    phase: str = ""
    message: str = ""
    incidents: dict[str, int] = field(default_factory=dict)
    """How many there were, by cause."""
    lost: int = -1
    twice: int = -1
    trained: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Generated, delivered, in flight and discarded, as the rollout manager counts them."""
    replay_differences: int = -1
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """MiB over seconds of each incarnation of master, manager and trainer."""
    left: set[str] = field(default_factory=set)
    """What is there when all should be gone."""

    @property
    def killed(self) -> int:
        return sum(tally.killed for tally in self.tallies.values())

    @property
    def effective(self) -> float:
        """The pace under faults by that without."""
        return self.faulty_steps / self.faulty_s / self.calm if self.faulty_s and self.calm else 0.0

    @property
    def tokens_add_up(self) -> bool:
        told = self.tokens
        return bool(told) and told["generated"] == told["delivered"] + told["in_flight"] + told["discarded"]

    @property
    def growth(self) -> dict[str, float]:
        """MiB an hour of the longest-lived incarnation of each, after its first minute."""
        found: dict[str, tuple[float, float]] = {}
        for name, series in self.memory.items():
            lived = series[-1][0] - series[0][0]
            late = [point for point in series if point[0] - series[0][0] > 60.0]
            role = name.partition("/")[0]
            if lived > LONG_ENOUGH_S and lived > found.get(role, (0.0, 0.0))[0]:
                found[role] = lived, _slope(late) * 3600.0
        return {role: round(slope, 1) for role, (_, slope) in found.items()}

    @property
    def holds(self) -> bool:
        return (
            self.phase == "stopped"
            and (self.lost, self.twice, self.replay_differences) == (0, 0, 0)
            and self.tokens_add_up
            and not self.left
            and all(slope < GROWN_MIB_PER_HOUR for slope in self.growth.values())
        )

    def end(self, handle: Any, view: View) -> None:
        """Take the sum of a job that has ended."""
        from ray.util.placement_group import placement_group_table

        from gyre.api.job_replay import replay_job
        from gyre.rollouts.trainer.sample_ledger import account_of
        from gyre.store import open_store

        self.phase, self.message = str(view["job"]["phase"]), str(view["job"]["message"])
        for event in handle.events():
            if event["kind"] in (
                "VertexLost",
                "OperatorFailed",
                "VertexStartFailed",
                "JobStalled",
                "MasterStarted",
            ):
                cause = str(event["body"].get("cause") or event["kind"])
                self.incidents[cause] = self.incidents.get(cause, 0) + 1
        with open_store(handle.store_url) as store:
            prompts = account_of(store.ledger(handle.job_id))
            self.lost, self.twice, self.trained = (
                len(prompts.lost),
                len(prompts.trained_twice),
                prompts.trained,
            )
            self.replay_differences = len(replay_job(store, handle.job_id).differences or ())
        for group in placement_group_table().values():
            if group["state"] != "REMOVED":
                self.left.add(f"placement group {group['name']} ({group['state']})")

    def plain(self) -> dict[str, Any]:
        body = dataclasses.asdict(self) | {
            "left": sorted(self.left),
            "killed": self.killed,
            "effective": round(self.effective, 4),
            "growth_mib_per_hour": self.growth,
            "holds": self.holds,
        }
        del body["memory"]
        return body


class Watch:
    """Looks at the job every few seconds: the tokens' account, and the memory of those who must not grow."""

    def __init__(self, status: Callable[[], View], account: Account) -> None:
        self._status = status
        self._account = account
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # whoever is asked may just have been killed
                view = self._status()
                self._measure(view, time.monotonic() - began)
                self._take_tokens(view)

    def _measure(self, view: View, now: float) -> None:
        watched = {
            f"{one['role']}/{one['incarnation']}": one["pid"]
            for one in view["vertices"]
            if one["role"] in ("trainer", "rollout_manager") and one["phase"] == "running"
        }
        watched[f"master/{view['master']['epoch']}"] = view["master"]["pid"]
        for name, pid in watched.items():
            with contextlib.suppress(psutil.Error):
                rss = psutil.Process(pid).memory_info().rss / 2**20
                self._account.memory.setdefault(name, []).append((round(now, 1), round(rss, 2)))

    def _take_tokens(self, view: View) -> None:
        for one in view["vertices"]:
            if one["role"] == "rollout_manager" and isinstance(health := one["fields"].get("health"), dict):
                told = health.get("account") or {}
                if isinstance(told.get("generated"), int):
                    discarded = told["discarded"]
                    lost = sum(discarded.values()) if isinstance(discarded, dict) else discarded
                    counted = {key: told[key] for key in ("generated", "delivered", "in_flight")}
                    self._account.tokens = {**counted, "discarded": lost}


def _slope(series: list[tuple[float, float]]) -> float:
    """The slope of the straight line through these points."""
    count = len(series)
    if count < 2:
        return 0.0
    mean_x = sum(x for x, _ in series) / count
    mean_y = sum(y for _, y in series) / count
    spread = sum((x - mean_x) ** 2 for x, _ in series)
    return sum((x - mean_x) * (y - mean_y) for x, y in series) / spread if spread else 0.0


def shared_memory() -> set[str]:
    """The names of what is in this machine's shared memory and that nobody holds: folders of weights are locked while
    their owners live."""
    found = set()
    for name in os.listdir("/dev/shm"):
        with contextlib.suppress(OSError):  # it is gone, or no folder
            descriptor = os.open(f"/dev/shm/{name}", os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(name)
            except BlockingIOError:
                pass  # another job's
            finally:
                os.close(descriptor)
    return found


def leftovers(folder: Path, before: set[str]) -> set[str]:
    """Processes that still use the folder, and shared memory that was not there before."""
    found = {f"/dev/shm/{name}" for name in shared_memory() - before}
    for process in psutil.process_iter(["pid", "cmdline", "open_files"]):
        if process.pid == os.getpid():
            continue
        files = [one.path for one in process.info["open_files"] or ()]
        if any(str(folder) in text for text in (*(process.info["cmdline"] or ()), *files)):
            found.add(f"process {process.pid}: {' '.join(process.info['cmdline'] or ())[:120]}")
    return found


def report(account: Account, *, command: str) -> str:
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    lines = [
        "# Soak",
        "",
        f"`{command}`, on {cores} ({platform.machine()}, Linux {platform.release()}); "
        f"{account.faulty_s:.0f} s under faults.",
        "",
        "| fault | times | processes killed |",
        "| --- | --- | --- |",
    ]
    for name, tally in sorted(account.tallies.items(), key=lambda item: -item[1].strikes):
        lines.append(f"| {name.replace('_', ' ')} | {tally.strikes} | {tally.killed or ''} |")
    strikes = sum(tally.strikes for tally in account.tallies.values())
    lines.append(f"| all | {strikes} | {account.killed} |")
    incidents = ", ".join(f"{cause} {count}" for cause, count in sorted(account.incidents.items()))
    faulty = account.faulty_steps / max(account.faulty_s, 1.0)
    rows = {
        "the job ended": f"{account.phase} {account.message}",
        "prompts trained": account.trained,
        "prompts lost, trained twice": f"{account.lost}, {account.twice}",
        "tokens generated = delivered + in flight + discarded": (
            f"{'yes' if account.tokens_add_up else 'no'}: {account.tokens}"
        ),
        "differences of the journal folded again": account.replay_differences,
        "incidents": incidents,
        "steps a second: calm, under faults": f"{account.calm:.2f}, {faulty:.2f}",
        "a fault every so many steps": f"{account.faulty_steps / max(strikes, 1):.1f}",
        f"effective training time (wanted {WANTED})": f"{account.effective:.2f}",
        "memory grew, MiB an hour": account.growth or "nobody lived long enough",
        "left behind": ", ".join(sorted(account.left)) or "nothing",
    }
    lines += ["", "| what came of it | |", "| --- | --- |"]
    lines += [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([*lines, ""])
