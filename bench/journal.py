"""How fast the journal is: events per second and commit latency, beside the bare driver, in one run.

    python bench/journal.py [--folder DIR] [--postgres URL] [--scale 1.0] [--json]

Rows of one table were measured one after another on the same disk:
    floor     the bare driver (sqlite3, psycopg) inserting ready-made rows into a table of the same columns
              and indexes, one durable transaction a batch: no fence, no JSON, no snapshot, no outbox.
    append    `Journal.append`: the same events from dicts, fenced and numbered.
    append+   the same, each event with one snapshot row and one command, and finishing the previous one.
    writer    `GroupCommitWriter` with 200 concurrent asyncio submitters, each awaiting its own commit;
              its latency is that of one submit until durable.
    read      the time to read the whole history back.
    fold      the time to decide a whole history again (`gyre replay`), and beside it to load the same state
              from its snapshot rows (a master's start).
Durable means synchronous=FULL on SQLite and synchronous_commit=on on PostgreSQL; a disk's (or a virtual
disk's) cache may answer faster than a platter would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gyre.config import JobSpec, parse_job
from gyre.failover import FailoverCoordinator, fold, rows_of, state_from
from gyre.failover.events import (
    Event,
    JobSubmitted,
    MasterStarted,
    StepCompleted,
    VertexLost,
    VertexStarted,
    body_of,
    kind_of,
)
from gyre.graph import compile_job
from gyre.store import Entry, EventRow, GroupCommitWriter, Journal, Store, StoredCommand, open_store

BATCHES = {1: 2_000, 100: 20_000, 1000: 50_000}
"""Events per commit, and how many events are written so."""

SUBMITTERS = 200
HISTORY_EVENTS = 100_000
COLUMNS = "job_id, seq, event_id, cause, kind, at, actor, epoch, body"


@dataclass(frozen=True)
class Row:
    database: str
    what: str
    batch: int
    events: int
    events_per_s: float
    p50_ms: float
    p99_ms: float


def entry(seq: int, *, whole: bool = False) -> Entry:
    """An event of some 270 bytes as a row; `whole` adds the snapshot row and the commands."""
    vertex = f"rollout-{seq % 64}"
    return Entry(
        seq=seq,
        event_id=f"ev-{seq:012d}",
        cause=f"ev-{max(0, seq - 1):012d}",
        kind="InstanceReported",
        at=1.7e9 + seq,
        actor="master",
        body={
            "vertex": vertex,
            "tokens": seq * 17,
            "queue": [seq % 7, seq % 11],
            "state": "running",
            "note": "x" * 80,
        },
        upserts={("vertex", vertex): {"state": "running", "tokens": seq * 17}} if whole else {},
        commands=[StoredCommand(f"cmd-{seq}", "DrainInstance", {"vertex": vertex})] if whole else (),
        done=[f"cmd-{seq - 1}"] if whole else (),
    )


def raw_row(seq: int) -> tuple[Any, ...]:
    made = entry(seq)
    body = json.dumps(made.body, sort_keys=True, separators=(",", ":"))
    return ("bench", seq, made.event_id, made.cause, made.kind, made.at, made.actor, 1, body)


def timed(commit: Callable[[int], None], commits: int) -> list[float]:
    taken = []
    for number in range(commits):
        begun = time.perf_counter()
        commit(number)
        taken.append(time.perf_counter() - begun)
    return taken


def row(database: str, what: str, batch: int, latencies: list[float], events: int, total_s: float) -> Row:
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [latencies[0]] * 99
    return Row(database, what, batch, events, events / total_s, cuts[49] * 1e3, cuts[98] * 1e3)


# -- the measured ------------------------------------------------------------------------------------------


def floor_sqlite(folder: str, batch: int, events: int) -> Row:
    path = os.path.join(folder, f"floor-{batch}.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(
            "CREATE TABLE ev (job_id TEXT, seq INTEGER, event_id TEXT, cause TEXT, kind TEXT, at REAL, actor TEXT,"
            " epoch INTEGER, body TEXT, PRIMARY KEY (job_id, seq), UNIQUE (job_id, event_id)) WITHOUT ROWID"
        )
        rows = [raw_row(seq) for seq in range(1, events + 1)]

        def commit(number: int) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                f"INSERT INTO ev ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",
                rows[number * batch : (number + 1) * batch],
            )
            connection.execute("COMMIT")

        taken = timed(commit, events // batch)
    return row("sqlite", "floor: sqlite3 executemany", batch, taken, events, sum(taken))


def floor_postgres(store: Store, batch: int, events: int) -> Row:
    rows = [raw_row(seq) for seq in range(1, events + 1)]
    with contextlib.closing(store._database._engine.raw_connection()) as connection:
        cursor = connection.cursor()
        cursor.execute(
            "CREATE TEMPORARY TABLE warm (x int)"  # opens the transaction and the session's caches
        )
        cursor.execute("DROP TABLE IF EXISTS gyre_bench_floor")
        cursor.execute("CREATE TABLE gyre_bench_floor (LIKE gyre_events INCLUDING ALL)")
        connection.commit()

        def commit(number: int) -> None:
            cursor.executemany(
                f"INSERT INTO gyre_bench_floor ({COLUMNS}) VALUES (%s,%s,%s,%s,%s,%s,%s,%s,%s)",
                rows[number * batch : (number + 1) * batch],
            )
            connection.commit()

        taken = timed(commit, events // batch)
        cursor.execute("DROP TABLE gyre_bench_floor")
        cursor.execute("DROP TABLE warm")
        connection.commit()
    return row("postgres", "floor: psycopg executemany", batch, taken, events, sum(taken))


def append(database: str, journal: Journal, epoch: int, batch: int, events: int, *, whole: bool) -> Row:
    first = journal.last_seq() + 1
    entries = [entry(seq, whole=whole) for seq in range(first, first + events)]
    taken = timed(
        lambda number: journal.append(epoch, entries[number * batch : (number + 1) * batch]), events // batch
    )
    what = "append+ (snapshot, commands)" if whole else "append"
    return row(database, what, batch, taken, events, sum(taken))


def writer(database: str, journal: Journal, epoch: int, events: int) -> Row:
    latencies: list[float] = []
    last = journal.last_seq()

    async def submitter(group: GroupCommitWriter, count: int) -> None:
        nonlocal last
        for _ in range(count):
            last += 1
            begun = time.perf_counter()
            await asyncio.wrap_future(group.submit(entry(last)))
            latencies.append(time.perf_counter() - begun)

    async def all_of_them() -> None:
        with GroupCommitWriter(journal, epoch) as group:
            await asyncio.gather(*[submitter(group, events // SUBMITTERS) for _ in range(SUBMITTERS)])

    begun = time.perf_counter()
    asyncio.run(all_of_them())
    return row(
        database, f"writer, {SUBMITTERS} submitters", 0, latencies, events, time.perf_counter() - begun
    )


def read(database: str, journal: Journal, events: int) -> Row:
    """Read the newest `events` events as rows."""
    last = journal.last_seq()
    begun = time.perf_counter()
    history = journal.events(after=max(0, last - events))
    taken = time.perf_counter() - begun
    return row(database, "read", 0, [taken], len(history), taken)


def real_history(events: int) -> list[EventRow]:
    """A job of 64 rollout vertices, 4 rewards and a gang of 8: mostly steps, a death every 50 events."""
    spec = compile_job(fold_spec()).spec
    roles = {role: each.total for role, each in spec.roles.items()}
    vertices = [f"{role}-{rank}" for role, total in roles.items() for rank in range(total)]
    made: list[Event] = [JobSubmitted("fold", "fold", roles), MasterStarted(1, 1, "here")]
    made += [VertexStarted(vertex, 1, 100, "here") for vertex in vertices]
    incarnations = dict.fromkeys(vertices, 1)
    step = 0
    while len(made) < events:
        if len(made) % 50 == 0:
            vertex = f"rollout-{step % 64}"
            number = incarnations[vertex]
            made.append(VertexLost(vertex, number, "process_died", {"error": "killed " * 20}))
            made.append(VertexStarted(vertex, number + 1, 101, "here"))
            incarnations[vertex] += 1
        step += 1
        made.append(StepCompleted(1, step, step, {"loss": 0.1, "reward_mean": 0.5}, report=step))
    return [
        EventRow(seq, f"e{seq}", None, kind_of(event), seq * 30.0, "master", 1, body_of(event))
        for seq, event in enumerate(made[:events], start=1)
    ]


def fold_spec() -> JobSpec:
    role = {"resources": {"accelerator": 0}}
    return parse_job(
        {
            "recipe": "grpo",
            "node_num": 16,
            "roles": {
                "actor": {"total": 8, **role},
                "rollout": {"total": 64, **role},
                "reward": {"total": 4, **role},
            },
        }
    )


def fold_row(events: int) -> Row:
    """Decide a whole history again, as `gyre replay` does; a master's start loads the snapshot instead."""
    history = real_history(events)
    compiled = compile_job(fold_spec())
    coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region)
    begun = time.perf_counter()
    fold(coordinator, history)
    taken = time.perf_counter() - begun
    return row("(memory)", "fold", 0, [taken], len(history), taken)


def snapshot_row(events: int) -> Row:
    """The state of that history from its snapshot rows: what a master's start does."""
    compiled = compile_job(fold_spec())
    rows = rows_of(fold(FailoverCoordinator(compiled.spec, compiled.graph.region), real_history(events)))
    begun = time.perf_counter()
    state_from(rows)
    taken = time.perf_counter() - begun
    return row("(memory)", f"state from {len(rows)} rows", 0, [taken], len(rows), taken)


# -- the run -----------------------------------------------------------------------------------------------


def measure(database: str, store: Store, folder: str, scale: float) -> Iterator[Row]:
    job_id = f"bench-{time.time_ns()}"
    store.create_job(job_id=job_id, name=job_id, spec={}, now=time.time())
    journal = store.journal(job_id)
    epoch = journal.take_over(now=time.time(), pid=os.getpid())
    for batch, count in BATCHES.items():
        events = max(batch * 2, int(count * scale) // batch * batch)
        yield (
            floor_sqlite(folder, batch, events)
            if database == "sqlite"
            else floor_postgres(store, batch, events)
        )
        yield append(database, journal, epoch, batch, events, whole=False)
        yield append(database, journal, epoch, batch, events, whole=True)
    yield writer(database, journal, epoch, max(SUBMITTERS, int(40_000 * scale) // SUBMITTERS * SUBMITTERS))
    wanted = int(HISTORY_EVENTS * scale)
    while journal.last_seq() < wanted:
        append(database, journal, epoch, 1000, 1000, whole=False)
    yield read(database, journal, wanted)
    store.update_job(job_id, phase="stopped", ended_at=time.time())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="where the SQLite files go (default: a temporary folder)")
    parser.add_argument("--postgres", metavar="URL", help="measure this PostgreSQL as well")
    parser.add_argument("--scale", type=float, default=1.0, help="write this share of the events")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir=options.folder) as folder:
        with open_store(f"sqlite:///{folder}/gyre.db") as store:
            rows += measure("sqlite", store, folder, options.scale)
        if options.postgres:
            with open_store(options.postgres) as store:
                rows += measure("postgres", store, folder, options.scale)
    rows.append(fold_row(int(HISTORY_EVENTS * options.scale)))
    rows.append(snapshot_row(int(HISTORY_EVENTS * options.scale)))
    if options.json:
        json.dump([asdict(each) for each in rows], sys.stdout, indent=1)
        print()
        return
    print(
        f"{'database':9} {'what':30} {'batch':>7} {'events':>7} {'events/s':>10} {'p50 ms':>9} {'p99 ms':>9}"
    )
    for each in rows:
        print(
            f"{each.database:9} {each.what:30} {each.batch or 'auto':>7} {each.events:>7} "
            f"{each.events_per_s:>10,.0f} {each.p50_ms:>9.3f} {each.p99_ms:>9.3f}"
        )


if __name__ == "__main__":
    main()
