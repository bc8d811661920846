"""How the web page holds up at its largest: 1,000,000 events, 1,000,000 samples, 10,000 vertices, 20 viewers.

    python bench/ui.py [--events 1000000] [--samples 1000000] [--vertices 10000] [--viewers 20] [--json [FILE]]

A real Chromium looks at the real server over a store that is filled here; the samples are those of the recorded job of
the page's tests, over and over. Rows:
    paint       until the browser shows something of the page, on a fresh start of the browser's page
    now         until the sentence of the job is there, its view fetched and drawn
    samples     until the list of all samples is there; the second time by a reader that has seen the files
    slider      from a move of the replay slider to the drawn moment, at random events
    vertices    until the fleet and the graph of a job of so many vertices are there, and until the first paint of each
    frames      the time between frames while the list of so many vertices scrolls
    timeline    until the time line of all events is there, and the time between frames while it is zoomed and panned
    command     how long a command takes to be in the journal of a running master, with nobody and with so many viewers,
                each with an open stream, who fetch the job's view after each event: what viewers cost the control loop.
                The viewers are a process of their own
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from replay import JOB, filled

from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer
from gyre.api.rest.app import create_app, create_store_app
from gyre.api.stored_jobs import StoredJobs
from gyre.observe.history import JobHistory
from gyre.observe.samples.names import step_file
from gyre.observe.samples.writer import write_table
from gyre.store import Store, open_store
from tests.doubles import standing_job
from tests.doubles.standing_job import StandingJob
from tests.ui.conftest import BROWSERS, FLAGS

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests/ui/recorded.tar.gz"
WIDE = "wide"
COMMANDS = 60
PATIENCE_MS = 120_000
START_S = 120.0
FRAMES = 120
SETTLE_MS = 500
SMOOTH_MS = 34.0
"""Thirty frames a second."""

TURN_WHEEL = """const box = element.getBoundingClientRect();
element.dispatchEvent(new WheelEvent('wheel', {bubbles: true, cancelable: true, deltaY: number % 40 < 20 ? -60 : 60,
  clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));"""


@dataclass(frozen=True)
class Row:
    what: str
    runs: int
    p50_ms: float
    worst_ms: float
    wanted_ms: float | None = None
    note: str = ""


def row(what: str, took_ms: list[float], wanted_ms: float | None = None, note: str = "") -> Row:
    return Row(
        what, len(took_ms), round(statistics.median(took_ms), 1), round(max(took_ms), 1), wanted_ms, note
    )


# -- what is looked at --------------------------------------------------------------------------------


def fill_samples(home: Home, samples: int) -> int:
    """Write a file of samples for each of so many steps that there are `samples`. Returns how many there are."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = home.samples(JOB)
    home.job_directory(JOB)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(RECORDED) as archive:
        member = next(one for one in archive if one.name.endswith(step_file(1)))
        archive.extract(member, scratch, filter="data")
        path = Path(scratch) / member.name
        table = parquet.read_table(path)
    at = table.schema.get_field_index("step")
    steps = max(samples // table.num_rows, 1)
    for step in range(1, steps + 1):
        numbers = pa.array([step] * table.num_rows, type=table.schema.field("step").type)
        write_table(table.set_column(at, table.schema.field("step"), numbers), folder / step_file(step))
    return steps * table.num_rows


def fill_vertices(store: Store, vertices: int) -> None:
    """A job of so many vertices, all of them running."""
    from gyre.config import JobSpec
    from gyre.store import Entry

    standing_job.THREAD_PATIENCE_S = 900.0  # a test's job has a few vertices
    workload = {"module": "gyre.workloads", "name": "BaseWorkload"}
    spec = JobSpec.model_validate(
        {
            "name": WIDE,
            "roles": {
                "trainer": {"entrypoint": {"module": "gyre.workloads", "name": "BaseTrainer"}},
                "rollout": {"entrypoint": workload, "total": vertices - 1},
            },
        }
    )
    store.create_job(job_id=WIDE, name=WIDE, spec=spec.model_dump(mode="json"), now=1.0)
    with StandingJob(spec, job_id=WIDE) as job:
        events = job.master.events(limit=100_000)
        rows = dict(job.master._context.journal.snapshot())
    journal = store.journal(WIDE)
    epoch = journal.take_over(now=1.0, pid=os.getpid())
    entries = [
        Entry(one["seq"], one["id"], one["cause"], one["kind"], one["at"], one["actor"], one["body"])
        for one in events
    ]
    entries[-1] = Entry(
        **{
            name: getattr(entries[-1], name)
            for name in ("seq", "event_id", "cause", "kind", "at", "actor", "body")
        },
        upserts=rows,
    )
    journal.append(epoch, entries)


# -- the browser --------------------------------------------------------------------------------------


class Browser:
    """A Chromium that times what it shows. Every look has a page of its own, without a cache."""

    def __init__(self, url: str) -> None:
        import shutil

        from playwright.sync_api import sync_playwright

        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            raise SystemExit("There is no Chromium on this machine.")
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        self._url = url

    def close(self) -> None:
        self._browser.close()
        self._playwright.stop()

    def page(self) -> Any:
        page = self._browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(PATIENCE_MS)
        return page

    def look(self, where: str, until: str) -> tuple[float, float]:
        """Milliseconds until the first paint, and until `until` is there."""
        page = self.page()
        begun = time.perf_counter()
        page.goto(f"{self._url}#/{where}", wait_until="commit")
        page.locator(until).first.wait_for(state="attached")
        took = (time.perf_counter() - begun) * 1e3
        paint = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()"
        )
        page.context.close()
        return float(paint), took

    def frames(self, where: str, until: str, move: str) -> list[float]:
        """Milliseconds between frames while `move` is done before each: JavaScript of `element`, the first that is
        `until`, and `number`, which counts the frames."""
        page = self.page()
        page.goto(f"{self._url}#/{where}")
        page.locator(until).first.wait_for()
        page.wait_for_timeout(SETTLE_MS)
        took: list[float] = page.evaluate(
            f"""async ([until, frames]) => {{
              const element = document.querySelector(until);
              const move = (number) => {{ {move} }};
              const times = [await new Promise(requestAnimationFrame)];
              for (let number = 0; number < frames; number++) {{
                move(number);
                times.push(await new Promise(requestAnimationFrame));
              }}
              return times.slice(1).map((time, at) => time - times[at]);
            }}""",
            [until, FRAMES],
        )
        page.context.close()
        return took

    def slide(self, where: str, moments: list[int]) -> list[float]:
        """Milliseconds from a move of the slider to each event, to the moment as it is drawn."""
        page = self.page()
        page.goto(f"{self._url}#/{where}")
        page.locator("main .react-flow__node").first.wait_for()
        took = []
        for seq in moments:
            took.append(
                float(
                    page.evaluate(
                        """async (seq) => {
                          const slider = document.querySelector('main input[type=range]');
                          const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set;
                          const begun = performance.now();
                          set.call(slider, String(seq));
                          slider.dispatchEvent(new Event('input', {bubbles: true}));
                          // Fetched, and drawn: what is drawn before is the moment before.
                          performance.clearResourceTimings();
                          const came = () => performance.getEntriesByType('resource')
                            .some(one => one.name.endsWith(`seq=${seq}`) && one.responseEnd);
                          const loads = () => document.querySelector('main').innerText.includes(' …');
                          const shown = () => came() && !loads();
                          while (!shown() && performance.now() - begun < 30000)
                            await new Promise(requestAnimationFrame);
                          await new Promise(requestAnimationFrame);
                          return performance.now() - begun;
                        }""",
                        seq,
                    )
                )
            )
            page.wait_for_timeout(50)
        page.context.close()
        return took


# -- viewers of a master ------------------------------------------------------------------------------


def commands(job: StandingJob, count: int) -> list[float]:
    """Milliseconds that each of so many commands takes to be in the journal."""
    took = []
    for number in range(count):
        begun = time.perf_counter()
        job.master.command("pause" if number % 2 == 0 else "resume", {}, by="bench")
        took.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.02)
    return took


def with_viewers(viewers: int, count: int) -> list[float]:
    with StandingJob() as job:
        server = RestServer(create_app(job.master, token=None))
        url = server.start()
        context = multiprocessing.get_context("spawn")
        ready, stop = context.Event(), context.Event()
        people = context.Process(target=_view_all, args=(url, viewers, ready, stop), daemon=True)
        people.start()
        if not ready.wait(START_S):
            raise SystemExit(f"{viewers} viewers did not begin to look within {START_S:g} s.")
        took = commands(job, count)
        stop.set()
        server.stop()
        people.join(START_S)
        return took


def _view_all(url: str, viewers: int, ready: Any, stop: Any) -> None:
    """So many viewers, in a process of their own: in the master's they would cost it more than their questions do."""
    looking = threading.Barrier(viewers + 1)
    threads = [threading.Thread(target=_view, args=(url, stop, looking), daemon=True) for _ in range(viewers)]
    for thread in threads:
        thread.start()
    looking.wait(START_S)
    ready.set()
    for thread in threads:
        thread.join()


def _view(url: str, stop: Any, ready: threading.Barrier) -> None:
    """One viewer: a stream of events, and the job's view after each, at most one a second, as the page does."""
    with httpx.Client(base_url=f"{url}/api/v1/jobs/small", timeout=30) as http:
        try:
            with http.stream("GET", "/events/stream") as stream:
                ready.wait(START_S)
                looked = 0.0
                for line in stream.iter_lines():
                    if stop.is_set():
                        return
                    if line.startswith("data:") and time.monotonic() - looked > 1.0:
                        looked = time.monotonic()
                        for path in ("", "/now", "/incidents"):
                            http.get(path)
        except httpx.HTTPError:
            return  # the server has stopped


# -- all of it ----------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    home = Home(folder)
    rows: list[Row] = []
    with open_store(home.database_url()) as store:
        filled(store, options.events)
        JobHistory(store, JOB).follow()  # a master keeps keyframes on the way
        fill_vertices(store, options.vertices)
        store.update_job(JOB, ended_at=2.0)
        store.update_job(WIDE, ended_at=2.0)
    kept = fill_samples(home, options.samples)
    with JobReader(home.database_url(), at=home) as reader:
        server = RestServer(create_store_app(StoredJobs(reader), token=None))
        browser = Browser(f"{server.start()}/")
        try:
            looks = [browser.look(f"jobs/{JOB}/now", "main .sentence") for _ in range(5)]
            rows.append(row("paint", [paint for paint, _ in looks], 1000.0, f"{options.events:,} events"))
            rows.append(row("now", [took for _, took in looks], note="the first one folds and fetches all"))
            at_first = browser.look(f"jobs/{JOB}/samples", "main .sample-list .line")[1]
            rows.append(row("samples", [at_first], note=f"{kept:,} samples, the first look"))
            again = [browser.look(f"jobs/{JOB}/samples", "main .sample-list .line")[1] for _ in range(3)]
            rows.append(row("samples", again, 1000.0, "again"))
            draw = random.Random(1)
            moments = [draw.randint(1, options.events) for _ in range(30)]
            rows.append(row("slider", browser.slide(f"jobs/{JOB}/replay", moments), 100.0, "random events"))
            for view, until in (("fleet", "main .vertex-line strong"), ("graph", "main .react-flow__node")):
                wide = [browser.look(f"jobs/{WIDE}/{view}", until) for _ in range(3)]
                note = f"{options.vertices:,} vertices, {view}"
                rows.append(row("vertices", [paint for paint, _ in wide], 1000.0, f"{note}, first paint"))
                rows.append(row("vertices", [took for _, took in wide], 1000.0, note))
            scrolled = browser.frames(f"jobs/{WIDE}/fleet", ".fleet-list", "element.scrollTop += 300;")
            rows.append(row("frames", scrolled, SMOOTH_MS, f"while {options.vertices:,} vertices scroll"))
            lanes = ".timeline-frame canvas"
            opened = [browser.look(f"jobs/{JOB}/timeline", lanes)[1] for _ in range(3)]
            rows.append(row("timeline", opened, note=f"{options.events:,} events"))
            turned = browser.frames(f"jobs/{JOB}/timeline", lanes, TURN_WHEEL)
            rows.append(row("frames", turned, SMOOTH_MS, "while the time line is zoomed in and out"))
        finally:
            browser.close()
            server.stop()
    for viewers in (0, options.viewers, 0, options.viewers):
        took = with_viewers(viewers, COMMANDS)
        rows.append(row("command", took, note=f"{viewers} viewers"))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'what':10} {'runs':>5} {'p50 ms':>10} {'worst ms':>10} {'wanted ms':>10}  note"]
    lines += [
        f"{one.what:10} {one.runs:>5} {one.p50_ms:>10,.1f} {one.worst_ms:>10,.1f} "
        f"{'' if one.wanted_ms is None else format(one.wanted_ms, ',.0f'):>10}  {one.note}"
        for one in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--vertices", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON instead of a table, printed or into a file"
    )
    options = parser.parse_args()
    load: Callable[[], Any] = os.getloadavg
    before = load()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        rows = measure(options, Path(folder))
    data = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "command": f"python bench/ui.py {' '.join(sys.argv[1:])}".rstrip(),
        "load": [before, load()],
        "rows": [asdict(one) for one in rows],
    }
    if options.json is None:
        print(table(rows))
    elif options.json == "-":
        print(json.dumps(data, indent=1))
    else:
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
