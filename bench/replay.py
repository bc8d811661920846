"""How fast any moment of a long journal is there, with keyframes and without, on SQLite.

    python bench/replay.py [--events 1000000] [--moments 100] [--plain 5] [--folder DIR] [--json]

The history is of a job of 76 vertices: mostly steps, a death every 50 events. Rows:
    make        fold the whole journal once and keep its keyframes, as the master does on the way
    moment      `JobHistory.at(seq)` of random events, each by a reader that remembers none: read the keyframe, check
                it, read and fold the events since
    again       the same moments by one `JobHistory`, as a slider asks: it remembers the last ones
    time        `at(time=…)`: first which event it was
    view        the moment as REST gives it, with its view
    decision    `decisions(around=seq)`, once the list has been read
    first look  `decisions` of a fresh `JobHistory`: reads the list
    timeline    the whole life of the job, and an hour of it
    plain       the same as `moment` without keyframes: read and fold from the first event
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre.failover import JobState
from gyre.graph import compile_job
from gyre.master.moment_view import moment_of
from gyre.observe.folding import Coordinators
from gyre.observe.history import JobHistory
from gyre.observe.keyframes import FORM
from gyre.observe.timeline import read_timeline
from gyre.store import Entry, Store, open_store

sys.path.insert(0, str(Path(__file__).parent))
from journal import fold_spec, real_history

JOB = "replayed"
BATCH = 5000


@dataclass(frozen=True)
class Row:
    what: str
    runs: int
    p50_ms: float
    p95_ms: float
    worst_ms: float
    note: str = ""


def filled(store: Store, events: int) -> None:
    spec = compile_job(fold_spec()).spec
    store.create_job(job_id=JOB, name=JOB, spec=spec.model_dump(mode="json"), now=0.0)
    journal = store.journal(JOB)
    epoch = journal.take_over(now=0.0, pid=os.getpid())
    history = real_history(events)
    for begin in range(0, events, BATCH):
        rows = history[begin : begin + BATCH]
        journal.append(
            epoch, [Entry(row.seq, row.event_id, None, row.kind, row.at, row.actor, row.body) for row in rows]
        )


def row(what: str, took: list[float], note: str = "") -> Row:
    took = sorted(took)
    return Row(
        what,
        len(took),
        round(statistics.median(took) * 1e3, 2),
        round(took[min(len(took) - 1, int(len(took) * 0.95))] * 1e3, 2),
        round(took[-1] * 1e3, 2),
        note,
    )


def timed(calls: list[Callable[[], Any]]) -> list[float]:
    took = []
    for call in calls:
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return took


def measure(store: Store, events: int, moments: int, plain: int) -> Iterator[Row]:
    draw = random.Random(1)
    seqs = [draw.randint(1, events) for _ in range(moments)]
    history = JobHistory(store, JOB)
    begun = time.perf_counter()
    history.follow()
    took = time.perf_counter() - begun
    marks = store.keyframes(JOB).marks(FORM)
    size = sum(
        len(store.keyframes(JOB).before(mark.seq, FORM).body) for mark in marks[:: max(1, len(marks) // 50)]
    )
    mean = size / len(marks[:: max(1, len(marks) // 50)])
    yield row(
        "make", [took], f"{len(marks)} keyframes, {mean / 1024:.1f} KiB each; {events / took:,.0f} events/s"
    )

    def fresh() -> JobHistory:
        one = JobHistory(store, JOB)
        one.coordinators()  # compiling the job is done once in a reader's life, and a row of its own below
        return one

    readers = [fresh() for _ in seqs]
    yield row("moment", timed([lambda r=r, s=s: r.at(s) for r, s in zip(readers, seqs, strict=True)]))
    yield row("again", timed([lambda s=s: history.at(s) for s in seqs]))
    times = [draw.uniform(0.0, events * 30.0) for _ in seqs]
    yield row("time", timed([lambda t=t: history.at(time=t) for t in times]))
    yield row("view", timed([lambda s=s: json.dumps(moment_of(history.at(s))) for s in seqs]))
    yield row("decision", timed([lambda s=s: history.decisions(s) for s in seqs]))
    reader = JobHistory(store, JOB)
    yield row("first look", timed([lambda: reader.decisions(events // 2)]), "with compiling the job")
    yield row("timeline", timed([lambda: read_timeline(store, history)]), "the whole life")
    hour = events * 15.0
    yield row(
        "timeline",
        timed([lambda: read_timeline(store, history, since=hour, until=hour + 3600.0)] * 5),
        "an hour",
    )

    def without(seq: int) -> None:
        spec = store.job(JOB).spec
        rows = store.journal(JOB).events(until=seq)
        Coordinators(spec, []).fold(rows, JobState())

    yield row("plain", timed([lambda s=s: without(s) for s in seqs[:plain]]), "without keyframes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--plain", type=int, default=5, help="how many of them without keyframes")
    parser.add_argument("--folder", help="where the SQLite file goes (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=options.folder) as folder:
        path = Path(folder) / "gyre.db"
        with open_store(f"sqlite:///{path}") as store:
            filled(store, options.events)
            plain_bytes = path.stat().st_size
            rows = list(measure(store, options.events, options.moments, options.plain))
        file_bytes = path.stat().st_size
    data = {
        "events": options.events,
        "journal_bytes": plain_bytes,
        "with_keyframes_bytes": file_bytes,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "load": [load_before, os.getloadavg()],
        "rows": [asdict(one) for one in rows],
    }
    if options.json:
        json.dump(data, sys.stdout, indent=1)
        print()
        return
    print(
        f"{options.events:,} events, {plain_bytes / 2**20:.0f} MiB; with keyframes {file_bytes / 2**20:.0f} MiB"
    )
    print(f"{'what':11} {'runs':>5} {'p50 ms':>10} {'p95 ms':>10} {'worst ms':>10}  note")
    for one in rows:
        print(
            f"{one.what:11} {one.runs:>5} {one.p50_ms:>10,.2f} {one.p95_ms:>10,.2f} {one.worst_ms:>10,.2f}  {one.note}"
        )


if __name__ == "__main__":
    main()
