"""The trainer of a plane without a model: it asks for groups, and checks and counts what comes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.scale import Ask, Scale, workload


class Trainer:
    """Asks for groups and checks what comes: every sample whole, each of its tokens of a known version.
    A group may come again after a cut; it is counted once."""

    def __init__(self, endpoint: Callable[[], tuple[str, str] | None]) -> None:
        from gyre.rollouts.trainer.plane_client import RolloutClient

        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, int]] = {}
        self._next = 0
        self.taking = True
        self.came: dict[int, tuple[float, int]] = {}
        self.versions: Counter[int] = Counter()
        self.mixed = 0
        self.twice: list[int] = []
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self._feeding: threading.Event | None = None
        self._feeder: threading.Thread | None = None
        self.client = RolloutClient(
            endpoint, term=1, on_groups=self._groups, on_error=lambda error: self.errors.append(str(error))
        )

    def _groups(self, purpose: str, groups: list[Any]) -> None:
        at = now()
        with self._lock:
            for group in groups:
                length, n = self._asked[group.id]
                if group.id in self.came:
                    self.twice.append(group.id)
                    continue
                self.came[group.id] = (at, group.token_count)
                if len(group.samples) != n:
                    self.wrong.append(f"group {group.id} has {len(group.samples)} samples")
                for sample in group.samples:
                    if len(sample.token_ids) != length or sample.finish_reason != "length":
                        self.wrong.append(
                            f"a sample of group {group.id}: {len(sample.token_ids)} of {length} tokens"
                        )
                    self.mixed += len(sample.versions) > 1
                    for run in sample.versions:
                        self.versions[run.version] += run.end - run.start
        if self.taking:
            self.client.taken(purpose, [group.id for group in groups])

    def take(self, ids: Sequence[int]) -> None:
        self.client.taken("train", list(ids))

    def publish(self, version: int, folder: Path) -> float:
        from gyre.weights.version.model_folder import ModelFolder

        found = ModelFolder.read(folder)
        at = now()
        self.client.publish(version, found.checksum, folder)
        return at

    def ask(self, asks: Sequence[Ask], n: int) -> list[int]:
        from gyre.rollouts.samples import Group

        ids = []
        for one in asks:
            with self._lock:
                number, self._next = self._next, self._next + 1
                self._asked[number] = (one.length, n)
            sampling = {"max_new_tokens": one.length, "temperature": 1.0, "ignore_eos": True}
            self.client.request(
                "train", [Group(number, one.prompt)], n=n, sampling=sampling, seed=number, min_version=0
            )
            ids.append(number)
        return ids

    @property
    def outstanding(self) -> int:
        with self._lock:
            return len(self._asked) - len(self.came)

    def wait(self, ids: Sequence[int], until: float) -> tuple[float, int]:
        """When the last came, and how many tokens. Raises PartFailed."""
        while True:
            with self._lock:
                left = [number for number in ids if number not in self.came]
                if not left:
                    return max(self.came[i][0] for i in ids), sum(self.came[i][1] for i in ids)
            if now() > until:
                raise PartFailed(f"{len(left)} of {len(ids)} groups did not come in time; {self.errors[-1:]}")
            time.sleep(0.005)

    def wait_all(self, until: float) -> None:
        with self._lock:
            ids = list(self._asked)
        if ids:
            self.wait(ids, until)

    def feed(self, scale: Scale, groups: int) -> None:
        """Keep so many groups asked for, until `no_more`."""
        stop = self._feeding = threading.Event()

        def work() -> None:
            seed = 10_000
            while not stop.wait(0.02):
                if (missing := groups - self.outstanding) > 0:
                    self.ask(workload(scale, seed, missing), scale.n)
                    seed += 1

        self._feeder = threading.Thread(target=work, daemon=True)
        self._feeder.start()

    def no_more(self) -> None:
        if self._feeding is not None and self._feeder is not None:
            self._feeding.set()
            self._feeder.join(5.0)

    def checked(self) -> Row:
        with self._lock:
            return {
                "groups": len(self.came),
                "delivered_again": len(self.twice),
                "wrong": self.wrong[:10],
                "samples_of_two_versions": self.mixed,
                "tokens_by_version": {str(key): value for key, value in sorted(self.versions.items())},
                "errors": self.errors[-5:],
            }

    def close(self) -> None:
        self.no_more()
        self.client.close()
