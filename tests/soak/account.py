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

from tests.soak.faults import WATCHED, Tally, View, processes_of
from tests.soak.flatness import (
    MIB_PER_HOUR,
    PER_HOUR,
    QUANTITIES,
    Growth,
    Life,
    Look,
    growth_between_lives,
    growth_of,
    look_at,
)

LOOK_S = 5.0

JUDGED_FROM_S = 1200.0
"""A soak of this length leaves each watched process alone for long enough to say whether it grows."""

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
    lives: dict[str, Life] = field(default_factory=dict)
    """Of master, manager and trainer, by role and incarnation."""
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

    def lives_of(self, role: str) -> list[Life]:
        return [life for life in self.lives.values() if life.role == role]

    def growth(self) -> dict[str, dict[str, Growth]]:
        """By role and quantity, after the first quarter of the soak, of those that lived long enough."""
        found: dict[str, dict[str, Growth]] = {}
        for role in WATCHED:
            for quantity in QUANTITIES:
                one = growth_of(self.lives_of(role), quantity, after_s=self.faulty_s / 4)
                if one is not None:
                    found.setdefault(role, {})[quantity] = one
        return found

    @property
    def is_flat(self) -> bool:
        """Where no life was long enough to say, nothing is held against a short soak."""
        growth = self.growth()
        if self.faulty_s >= JUDGED_FROM_S and growth.keys() != set(WATCHED):
            return False
        return all(
            one.per_hour < (MIB_PER_HOUR if quantity == "memory_mib" else PER_HOUR)
            for grown in growth.values()
            for quantity, one in grown.items()
        )

    @property
    def had_something_to_lose(self) -> bool:
        """Processes were killed, and prompts were trained and tokens generated meanwhile: else that nothing was lost
        says nothing."""
        return min(self.killed, self.faulty_steps, self.trained, self.tokens.get("generated", 0)) > 0

    @property
    def holds(self) -> bool:
        return (
            self.phase == "stopped"
            and self.had_something_to_lose
            and (self.lost, self.twice, self.replay_differences) == (0, 0, 0)
            and self.tokens_add_up
            and not self.left
            and self.is_flat
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
            differences = replay_job(store, handle.job_id).differences
            self.replay_differences = len(differences) if differences is not None else -1
        for group in placement_group_table().values():
            if group["state"] != "REMOVED":
                self.left.add(f"placement group {group['name']} ({group['state']})")

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(dataclasses.replace(self, lives={})) | {
            "left": sorted(self.left),
            "killed": self.killed,
            "effective": round(self.effective, 4),
            "growth": {
                role: {quantity: dataclasses.asdict(one) for quantity, one in grown.items()}
                for role, grown in self.growth().items()
            },
            "young_lives_mib_per_hour": {role: growth_between_lives(self.lives_of(role)) for role in WATCHED},
            "holds": self.holds,
            "lives": [self._life_in_minutes(life) for life in self.lives.values()],
        }

    def _life_in_minutes(self, life: Life) -> dict[str, Any]:
        """One look of each minute."""
        kept: dict[int, Look] = {int(one.at_s // 60): one for one in reversed(life.looks)}
        looks = [dataclasses.astuple(kept[minute]) for minute in sorted(kept)]
        return {"role": life.role, "incarnation": life.incarnation, "looks": looks}


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
        for one in processes_of(view):
            if one.is_watched:
                with contextlib.suppress(psutil.Error, OSError):  # it has just died
                    look = look_at(one.process, now)
                    key = f"{one.role}/{one.incarnation}/{one.process.create_time()}"
                    life = self._account.lives.setdefault(key, Life(one.role, one.incarnation))
                    life.looks.append(look)

    def _take_tokens(self, view: View) -> None:
        for one in view["vertices"]:
            if one["role"] == "rollout_manager" and isinstance(health := one["fields"].get("health"), dict):
                told = health.get("account") or {}
                if isinstance(told.get("generated"), int):
                    discarded = told["discarded"]
                    lost = sum(discarded.values()) if isinstance(discarded, dict) else discarded
                    counted = {key: told[key] for key in ("generated", "delivered", "in_flight")}
                    self._account.tokens = {**counted, "discarded": lost}


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
        "was there something to lose": "yes" if account.had_something_to_lose else "no",
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
        "left behind": ", ".join(sorted(account.left)) or "nothing",
    }
    lines += ["", "| what came of it | |", "| --- | --- |"]
    lines += [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join([*lines, *_flatness(account), ""])


def _flatness(account: Account) -> list[str]:
    growth = account.growth()
    lines = ["", "| process | lives | longest, s | what | at its start | at its end | grew an hour |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for role in WATCHED:
        lives = account.lives_of(role)
        for quantity in QUANTITIES:
            one = growth.get(role, {}).get(quantity)
            told = (
                f"{one.observed_s:.0f} | {quantity.replace('_mib', ', MiB')} | {one.first:g} | {one.last:g} | "
                f"{one.per_hour:+.2f}"
                if one
                else f"none long enough | {quantity.replace('_mib', ', MiB')} | | |"
            )
            lines.append(f"| {role.replace('_', ' ')} | {len(lives)} | {told} |")
        between = growth_between_lives(lives)
        told = f"{between:+.2f}" if between is not None else "too few"
        lines.append(
            f"| {role.replace('_', ' ')} | {len(lives)} | | memory of young lives, MiB | | | {told} |"
        )
    return lines
