"""A rollout manager and its trainer, as a bench sees them: what is asked of them, and what they have told."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from gpu_plane.children import Child
from gpu_plane.endpoint import TOKEN, endpoint_of
from gpu_plane.follow import Follow, Row, now
from gpu_plane.trainer import Trainer


class Plane:
    """A manager, its trainer, and where both keep what."""

    def __init__(self, place: Path, name: str) -> None:
        self.place = place / name
        self.place.mkdir()
        self.endpoint = self.place / "endpoint.json"
        self.database = self.place / "gyre.db"
        self.log = Follow(self.place / "manager.jsonl")
        self.manager: Child | None = None
        self.trainer: Trainer | None = None
        self.term = 0

    def start(self, until: float, **settings: Any) -> None:
        self.term += 1
        options = {
            "database": str(self.database),
            "endpoint": str(self.endpoint),
            "log": str(self.log.path),
            "term": self.term,
            "settings": settings,
        }
        self.manager = Child("manager", options, self.place / "manager.out")
        self.log.wait("Listening", until, term=self.term)
        if self.trainer is None:
            self.trainer = Trainer(endpoint_of(self.endpoint))

    def ask(self, path: str, body: Row | None = None) -> Row:
        url = json.loads(self.endpoint.read_text())["url"]
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            url + path,
            data,
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: Row = json.load(response)
        return answer

    def account(self, within_s: float = 5.0) -> Row:
        """When the manager has heard that everything was taken."""
        until = now() + within_s
        while (status := self.ask("/v1/status"))["open_groups"] and now() < until:
            time.sleep(0.05)
        return {
            **status["account"],
            "open_groups": status["open_groups"],
            "set_aside": status["samples_set_aside"],
        }

    def disk_bytes(self) -> int:
        """Of the ledger, with nothing left in its log."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=5.0)) as connection:
            connection.execute("pragma wal_checkpoint(truncate)")
        return sum(file.stat().st_size for file in self.place.glob("gyre.db*"))

    def rate(self, first: float, last: float, instance: str | None = None) -> float:
        """tokens/s that came in between two moments, of all or of one instance."""
        rows = [row for row in self.log.rows("state", first) if row["at"] <= last]
        if len(rows) < 2:
            return 0.0
        if instance is None:
            values = [row["generated"] for row in rows]
        else:
            values = [row["instances"].get(instance, [0])[0] for row in rows]
        return float((values[-1] - values[0]) / (rows[-1]["at"] - rows[0]["at"]))

    def stop(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        if self.manager is not None:
            self.manager.stop(10.0)


def samples_held(plane: Plane, name: str, at: float) -> int:
    """Samples that the instance had then."""
    rows = [row for row in plane.log.rows("state") if row["at"] <= at]
    return int(rows[-1]["instances"].get(name, [0, 0])[1]) if rows else 0


def samples_held_within(plane: Plane, name: str, first: float, last: float) -> Row:
    """How many samples it had: fewer than it can run is the manager's fault."""
    rows = [row for row in plane.log.rows("state", first) if row["at"] <= last]
    held = [row["instances"].get(name, [0, 0])[1] for row in rows]
    return {"mean": round(statistics.mean(held), 1), "least": min(held)} if held else {}
