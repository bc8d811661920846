"""How long a list of many runs takes: by the store, REST, `gyre ls` and the page, against reading every journal.

    python bench/runs.py [--jobs 1000] [--steps 300] [--repeat 5] [--json [FILE]]

The store has so many jobs that have ended, on SQLite: each with a journal of a step's event each, five evaluations, the
snapshot of it, and the metrics of its steps. All of them are listed. Rows:
    journals    the same lines without summaries: read each job's snapshot and the metrics of some forty of its steps,
                as a summary does; what a store of before this takes once, at its first list
    before      what a list was before there were summaries: phase, step and version alone, from each job's snapshot
    store       `JobReader.jobs`, by the summaries
    filter      the same, filtered, sorted and grouped
    rest        `GET /jobs` by HTTP, until the last byte is there; and with a filter and an order
    ls          the process `gyre ls --all`, its table and its JSON, less that of the interpreter's start
    imports     what of that is the import of what any verb imports that opens a store, likewise
    page        a real Chromium without a cache, by its own clock
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import delete

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from journal import fold_spec

from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer
from gyre.api.rest.app import create_store_app
from gyre.api.runs import grouped, select_runs
from gyre.api.stored_jobs import StoredJobs
from gyre.failover import FailoverCoordinator, JobState, state_from
from gyre.failover.events import (
    Evaluated,
    Event,
    JobSubmitted,
    MasterStarted,
    StepCompleted,
    TrainerFinished,
    VertexStarted,
    VertexStopped,
)
from gyre.graph import compile_job
from gyre.master.job_context import entry_of
from gyre.observe.run_summary import POINTS, keep_summary, summed_up
from gyre.store import Entry, StepRow, Store, open_store, tables

GYRE = [sys.executable, "-m", "gyre.api"]
WANTED_MS = 300.0
EVERY = "reward>0.3, model~qwen, tag!=broken"


@dataclass(frozen=True)
class Row:
    what: str
    runs: int
    best_ms: float
    p50_ms: float
    worst_ms: float
    wanted_ms: float | None = None
    note: str = ""


def row(what: str, took_ms: list[float], wanted_ms: float | None = None, note: str = "") -> Row:
    return Row(
        what,
        len(took_ms),
        round(min(took_ms), 1),
        round(statistics.median(took_ms), 1),
        round(max(took_ms), 1),
        wanted_ms,
        note,
    )


def timed(repeat: int, call: Callable[[], Any]) -> list[float]:
    took = []
    for _ in range(repeat):
        begun = time.perf_counter()
        call()
        took.append((time.perf_counter() - begun) * 1e3)
    return took


# -- what is listed -----------------------------------------------------------------------------------


def metrics_of(step: int, draw: random.Random) -> dict[str, float]:
    reward = 0.1 + 0.6 * step / (step + 60)
    names = ("loss", "kl", "entropy", "grad_norm", "lr", "staleness_mean", "cut_off_ratio", "clipped")
    return {
        "reward_mean": reward + draw.gauss(0, 0.03),
        "tokens_per_s": 4000 + draw.gauss(0, 200),
        "completion_tokens_mean": 410 + draw.gauss(0, 20),
        **{name: draw.random() for name in names},
    }


def history(steps: int, draw: random.Random) -> tuple[list[Entry], JobState, list[StepRow]]:
    """The journal of a job that made so many steps and ended, folded, and the steps of its ledger."""
    compiled = compile_job(fold_spec())
    coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region)
    roles = {role: each.total for role, each in compiled.spec.roles.items()}
    events: list[Event] = [JobSubmitted("run", "run", roles), MasterStarted(1, 1, "here")]
    events += [
        VertexStarted(f"{role}-{rank}", 1, 100, "here") for role in roles for rank in range(roles[role])
    ]
    rows = []
    for step in range(1, steps + 1):
        metrics = metrics_of(step, draw)
        events.append(StepCompleted(1, step, step, metrics, report=step))
        rows.append(StepRow(step, step, None, [], metrics, step * 10.0))
        if step % max(steps // 5, 1) == 0:
            events.append(
                Evaluated(
                    incarnation=1,
                    version=step,
                    set="math500",
                    prompts=512,
                    count=512,
                    reward_mean=0.5,
                    accuracy=step / (steps + 100),
                )
            )
    events.append(TrainerFinished(1, {"steps": steps}, report=steps + 1))
    events += [VertexStopped(f"{role}-{rank}", 1) for role in roles for rank in range(roles[role])]
    state, entries = JobState(), []
    for seq, event in enumerate(events, start=1):
        decision = coordinator.decide(state, event, seq * 10.0)
        state = decision.state
        entries.append(entry_of(decision, event, seq=seq, event_id=f"e{seq}", at=seq * 10.0, actor="master"))
    return entries, state, rows


def fill(store: Store, jobs: int, steps: int) -> None:
    """So many jobs of four histories, with seeds, models and tags of their own. No summaries yet."""
    draw = random.Random(1)
    spec = compile_job(fold_spec()).spec.model_dump(mode="json")
    histories = [history(steps, draw) for _ in range(4)]
    for number in range(jobs):
        entries, _, rows = histories[number % len(histories)]
        model = ("Qwen2.5-0.5B-Instruct", "Llama-3.2-1B", "gemma-3-1b-it")[number % 3]
        config = {"seed": number % 5, "model_path": f"/models/{model}"}
        job_id = f"run-{number:05d}"
        store.create_job(
            job_id=job_id, name=job_id, spec={**spec, "name": job_id, "config": config}, now=float(number)
        )
        journal = store.journal(job_id)
        epoch = journal.take_over(now=1.0, pid=os.getpid())
        journal.append(epoch, entries)
        ledger = store.ledger(job_id)
        ledger.take_over(term=1)
        ledger.write(1, steps=rows)
        store.listing.label(job_id, add=[("ablation", "baseline", "lr sweep")[number % 3]], notes="as before")
        store.update_job(job_id, phase="succeeded", ended_at=number + 3000.0)


def by_journals(store: Store, *, forget: bool) -> int:
    """Every job's line from its journal and ledger; with `forget` without the summaries that are kept."""
    if forget:
        with store._database.write() as connection:
            connection.execute(delete(tables.job_summaries))
    rows = store.jobs(limit=1_000_000)
    for one in rows:
        summed_up(store, one.job_id, one.spec, state_from(store.journal(one.job_id).snapshot()))
    return len(rows)


def before(store: Store) -> int:
    """As a list was made of a job's row and its state."""
    rows = store.jobs(limit=1_000_000)
    for one in rows:
        journal = store.journal(one.job_id)
        journal.last_seq()
        state_from(journal.snapshot())
    return len(rows)


def keep(store: Store) -> None:
    for one in store.jobs(limit=1_000_000):
        journal = store.journal(one.job_id)
        state = state_from(journal.snapshot())
        keep_summary(store, one.job_id, one.spec, state, seq=journal.last_seq())


# -- who lists it -------------------------------------------------------------------------------------


def process(arguments: list[str], home: Home) -> Callable[[], None]:
    environment = {**os.environ, "GYRE_HOME": str(home.path)}

    def call() -> None:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise SystemExit(done.stderr)

    return call


def of_processes(home: Home, repeat: int) -> list[Row]:
    def took(arguments: list[str]) -> tuple[list[float], float]:
        """Milliseconds by the clock, and of CPU on average."""
        before = os.times()
        clock = timed(repeat, process(arguments, home))
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return clock, used * 1e3 / repeat

    def less(arguments: list[str], what: str, wanted_ms: float | None, note: str) -> Row:
        clock, used = took(arguments)
        return row(
            what, [one - start for one in clock], wanted_ms, f"{note}; {used - start_used:.0f} ms of CPU"
        )

    clock, start_used = took([sys.executable, "-c", "pass"])
    start = statistics.median(clock)
    opening = "from gyre.api.reader import JobReader; import gyre.api.cli.runs, gyre.api.runs, click"
    ls = [*GYRE, "ls", "--all"]
    return [
        row(
            "start",
            clock,
            note=f"the interpreter alone, taken off the rows below; {start_used:.0f} ms of CPU",
        ),
        less([sys.executable, "-c", opening], "imports", None, "what opens any store"),
        less(ls, "ls", WANTED_MS, "the table"),
        less([*ls, "--json"], "ls", WANTED_MS, "JSON"),
        less([*ls, "--filter", EVERY, "--sort", "-reward"], "ls", WANTED_MS, "filtered and sorted"),
    ]


def of_rest(url: str, repeat: int) -> list[Row]:
    with httpx.Client(base_url=url, timeout=60) as http:

        def ask(**query: str) -> int:
            answer = http.get("/api/v1/jobs", params=query)
            answer.raise_for_status()
            return len(answer.content)

        def asked(note: str, **query: str) -> Row:
            used = time.process_time()
            took = timed(repeat, lambda: ask(**query))
            used_ms = (time.process_time() - used) * 1e3 / repeat
            return row("rest", took, WANTED_MS, f"{note}; {used_ms:.0f} ms of CPU, the client's with it")

        size = ask()
        return [
            asked(f"{size / 1e6:.2f} MB"),
            asked("filtered, sorted, grouped", filter=EVERY, sort="-reward", group="experiment"),
        ]


SEEN = """new MutationObserver((_, observer) => {
  if (!document.querySelector('main tr.run')) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.seenAt = performance.now(); });
}).observe(document, {childList: true, subtree: true});"""
"""Notes when the first line of the table is drawn."""

ASKED = """performance.getEntriesByType('resource').find((one) => /api.v1.jobs/.test(one.name)).startTime"""


def of_page(url: str, repeat: int) -> list[Row]:
    from ui import Browser

    browser = Browser(f"{url}/")
    paints, whole, list_alone = [], [], []
    try:
        for look in range(repeat + 1):
            page = browser.page()
            page.add_init_script(SEEN)
            page.goto(f"{url}/#/jobs?all=1")
            page.wait_for_function("() => window.seenAt")
            seen, asked = page.evaluate("window.seenAt"), page.evaluate(ASKED)
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            page.context.close()
            if look:  # the first warms the server
                paints.append(paint)
                whole.append(seen)
                list_alone.append(seen - asked)
    finally:
        browser.close()
    return [
        row("page", paints, 400.0, "first paint"),
        row("page", list_alone, WANTED_MS, "from the page's question for the list to its table, drawn"),
        row("page", whole, note="from an empty browser: page, scripts and list"),
    ]


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    home, jobs, repeat = Home(folder), options.jobs, options.repeat
    with open_store(home.database_url()) as store:
        fill(store, jobs, options.steps)
        note = f"{jobs:,} jobs of {options.steps} steps"
        rows = [
            row(
                "journals",
                timed(2, lambda: by_journals(store, forget=True)),
                note=f"{note}, {POINTS} of each read",
            ),
            row("before", timed(2, lambda: before(store)), note=f"{note}; no curve, no evaluation, no model"),
        ]
        keep(store)
    with JobReader(home.database_url(), at=home) as reader:
        assert len(reader.jobs()) == jobs
        rows.append(row("store", timed(repeat, reader.jobs), WANTED_MS))

        def choose() -> None:
            chosen = select_runs(reader.jobs(), filter=EVERY, sort="-reward,name", now=time.time())
            grouped(chosen, "experiment", now=time.time())

        rows.append(row("filter", timed(repeat, choose), WANTED_MS, "filtered, sorted, grouped"))
        server = RestServer(create_store_app(StoredJobs(reader), token=None))
        url = server.start()
        try:
            rows += of_rest(url, repeat)
            rows += of_processes(home, repeat)
            if not options.no_page:
                rows += of_page(url, repeat)
        finally:
            server.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--no-page", action="store_true", help="Leave out the page, which wants a Chromium.")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    if options.json:
        found = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            "rows": [asdict(one) for one in rows],
        }
        text = json.dumps(found, indent=1)
        if options.json == "-":
            print(text)
            return
        Path(options.json).write_text(text + "\n")
    print(
        "| what | runs | best ms | p50 ms | worst ms | wanted | |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for one in rows:
        wanted = "" if one.wanted_ms is None else f"{one.wanted_ms:g}"
        print(
            f"| {one.what} | {one.runs} | {one.best_ms} | {one.p50_ms} | {one.worst_ms} | {wanted} | {one.note} |"
        )


if __name__ == "__main__":
    main()
