"""Runs parts of the tests: `python -m tests.suite PART… [-- WHAT PYTEST TAKES]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.skips import is_allowed
from tests.suite.parts import LONG, PARTS, Bundle, Part
from tests.suite.recorder import RECORD
from tests.suite.verdict import Result, Seen, Verdict, judge, worth_another_run

ROOT = Path(__file__).parents[2]

LOOK_S = 0.2
BEYOND_LIMIT_S = 60.0
"""For a test to be ended by its own limit. Code that never gives the interpreter back is ended by this one."""
AGAIN_S = 600.0
"""For all tests that are run once more, together."""
MOST_DEATHS = 3
"""Of one bundle's processes; each takes the test that ran along."""
SLOWEST = 20
LAST_WORDS = 40
"""Lines of a log, where a process tells nothing else."""
GONE_S = 60.0
"""For a bundle that was told to end: more than `tests.suite.reaper` takes."""
MOST_TEXT = 6000
"""Characters of a failure's end; all of it is in the bundle's log."""


@dataclass
class Running:
    """A bundle's process, and what is known of its tests."""

    part: Part
    bundle: Bundle
    folder: Path
    root: Path
    extra: tuple[str, ...] = ()
    seen: Seen = field(default_factory=Seen)
    deaths: int = 0
    begun: float = field(default_factory=time.monotonic)
    test_begun: float = 0.0
    overdue: bool = False
    read: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def record(self) -> Path:
        return self.folder / "record.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> None:
        environment = {**os.environ, **self.part.environment, RECORD: str(self.record)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process rewrites every assertion anew
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.suite.reaper", *self.part.command(self.bundle, self.extra)],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(GONE_S)

    def look(self) -> list[Result]:
        """The tests that ended since the last look. Ends a process whose test is long beyond its limit."""
        ended = []
        for event in self._news():
            if event["kind"] == "begun":
                self.test_begun = time.monotonic()
            if (test := self.seen.take(event)) is not None:
                ended.append(test)
        limit = self.seen.limit_s + BEYOND_LIMIT_S
        if self.seen.running and self.seen.limit_s and time.monotonic() > self.test_begun + limit:
            self.overdue = True
            self.end()
        return ended

    def _news(self) -> Iterator[dict[str, object]]:
        if not self.record.exists():
            return
        with self.record.open("rb") as record:
            record.seek(self.read)
            for line in record:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                yield json.loads(line)

    def goes_on(self) -> tuple[bool, list[Result]]:
        """After the process has ended: whether another one runs the rest, and the tests that failed by its end."""
        status, tests = self.process.returncode, self.look()
        if self.bundle.words:
            outcome = "passed" if status == 0 else "failed"
            self.seen.tests[self.bundle.name] = test = Result(
                self.bundle.name, outcome, self._last_words(), self.ran_s
            )
            return False, [*tests, test]
        if self.seen.running:
            died = self.seen.running
            why = "it went on beyond its limit" if self.overdue else f"its process ended with {status}"
            self._write(
                kind="ended", test=died, outcome="failed", seconds=0.0, text=f"{why}:\n{self._last_words()}"
            )
            tests += self.look()
            self.overdue = False
        elif not self.seen.waiting:
            return False, tests
        self.deaths += 1
        if not self.seen.waiting or self.deaths == MOST_DEATHS:
            return False, tests
        self.start()
        return True, tests

    def problems(self, *, may_be_empty: bool) -> list[str]:
        """What is wrong with the bundle once it has ended, beyond its tests."""
        if self.seen.waiting:
            return [
                f"{self.name}: {len(self.seen.waiting)} tests were not run; {self.log} ends:\n{self._last_words()}"
            ]
        if not self.seen.tests and not may_be_empty:
            return [f"{self.name}: no test was run; {self.log} ends:\n{self._last_words()}"]
        return []

    @property
    def name(self) -> str:
        return f"{self.part.name}/{self.bundle.name}"

    @property
    def ran_s(self) -> float:
        return time.monotonic() - self.begun

    def _write(self, **event: object) -> None:
        with self.record.open("a") as record:
            record.write(json.dumps(event) + "\n")

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_WORDS:])


class Run:
    def __init__(
        self, parts: list[Part], out: Path, extra: tuple[str, ...] = (), *, root: Path = ROOT
    ) -> None:
        self._out = out
        self._root = root
        self._extra = extra
        self._queue = [(part, bundle) for part in parts for bundle in _longest_first(part)]
        self._running: list[Running] = []
        self._deadlines: dict[str, float] = {}
        self.ended: list[Running] = []
        self.problems: list[str] = []

    def go(self) -> None:
        try:
            while self._queue or self._running:
                self._fill()
                time.sleep(LOOK_S)
                for one in list(self._running):
                    self._look_at(one)
        finally:
            for one in self._running:
                one.process.terminate()
            for one in self._running:
                one.end()

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._queue[0][0].at_once:
            part, bundle = self._queue.pop(0)
            self._deadlines.setdefault(part.name, time.monotonic() + part.limit_s)
            self._running.append(
                Running(part, bundle, self._out / part.name / bundle.name, self._root, self._extra)
            )

    def _look_at(self, one: Running) -> None:
        _print_failed(one.look())
        if one.process.poll() is None:
            if time.monotonic() > self._deadlines[one.part.name]:
                self._end_part(one.part)
            return
        goes_on, tests = one.goes_on()
        _print_failed(tests)
        if not goes_on:
            self._running.remove(one)
            self._close(one)

    def _end_part(self, part: Part) -> None:
        self._queue = [(other, bundle) for other, bundle in self._queue if other is not part]
        self.problems.append(f"the part `{part.name}` did not end within {part.limit_s:.0f} s")
        for one in [one for one in self._running if one.part is part]:
            one.end()
            one.look()
            self._running.remove(one)
            self._close(one)

    def _close(self, one: Running) -> None:
        self.ended.append(one)
        self.problems += one.problems(may_be_empty=bool(self._extra))
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for test in one.seen.tests.values():
            counts[test.outcome] += 1
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        print(f"{one.name:32} {one.ran_s:6.0f} s   {said or 'nothing'}", flush=True)

    def tests(self) -> list[Result]:
        return [test for one in self.ended for test in one.seen.tests.values()]

    def again(self, names: list[str]) -> dict[str, Result]:
        """Each of the tests run once more, alone on the machine."""
        seconds: dict[str, Result] = {}
        owner = {name: one for one in self.ended for name in one.seen.tests}
        deadline = time.monotonic() + AGAIN_S
        for at, name in enumerate(names):
            if owner[name].bundle.words or "::" not in name:
                continue  # a command, or a module that cannot be imported: another try would be the same
            bundle = replace(owner[name].bundle, name=f"again-{at}", paths=(name,), select="", keyword="")
            one = Running(owner[name].part, bundle, self._out / bundle.name, self._root)
            while one.process.poll() is None and time.monotonic() < deadline:
                one.look()
                time.sleep(LOOK_S)
            one.end()
            one.look()
            seconds[name] = one.seen.tests.get(
                name, Result(name, "failed", "it did not end when it was run again")
            )
            print(f"once more, by itself: {name}: {seconds[name].outcome}", flush=True)
        return seconds


def _longest_first(part: Part) -> list[Bundle]:
    return sorted(part.bundles, key=lambda bundle: -bundle.usual_s)


def _print_failed(tests: list[Result]) -> None:
    for test in tests:
        if test.outcome == "failed":
            print(f"FAILED {test.id}", flush=True)


def _report(verdict: Verdict, run: Run, left_out: list[str], begun: float) -> None:
    for test in verdict.of("failed"):
        print(f"\n=== FAILED {test.id}\n{test.text[-MOST_TEXT:]}")
    for problem in verdict.problems:
        print(f"\n=== {problem}")
    slowest = sorted(verdict.tests, key=lambda test: -test.seconds)[:SLOWEST]
    print(f"\nThe slowest of {sum(test.seconds for test in verdict.tests):.0f} s of tests:")
    for test in slowest:
        print(f"  {test.seconds:6.1f} s  {test.id}")
    for count, reason in verdict.skips():
        print(f"skipped {count}: {reason}")
    for test in verdict.of("flaky"):
        print(f"FLAKE, failed once and passed by itself: {test.id}")
    for words in left_out:
        print(f"NOT RUN: {words}")
    print(f"\n{time.monotonic() - begun:.0f} s")
    print(verdict.closing_line(), flush=True)


def _count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def _write_flakes(path: Path, verdict: Verdict) -> None:
    with path.open("a") as flakes:
        for test in verdict.of("flaky"):
            flakes.write(json.dumps({"test": test.id, "text": test.text}) + "\n")


def _narrowed(part: Part, extra: list[str]) -> tuple[Part, tuple[str, ...]]:
    """Where pytest's arguments name places, they take the place of the part's own, in one bundle."""
    places = tuple(one for one in extra if (ROOT / one.partition("::")[0]).exists())
    if not places:
        return part, tuple(extra)
    bundle = replace(part.bundles[0], name="asked-for", paths=places, words=(), keyword="")
    return replace(part, bundles=(bundle,)), tuple(one for one in extra if one not in places)


def main(given: list[str]) -> int:
    own, extra = given, []
    if "--" in given:
        own, extra = given[: given.index("--")], given[given.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument(
        "part", nargs="+", choices=["long", *sorted(PARTS)], help="`long`: all parts of the long suite"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/tests", help="records, logs and flakes")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a test that is skipped for want of what can be installed has failed",
    )
    asked = parser.parse_args(own)
    names = [
        name for one in asked.part for name in ([part.name for part in LONG] if one == "long" else [one])
    ]
    parts, left_out = [], []
    for name in names:
        part = PARTS[name]
        if part.is_there(ROOT):
            parts.append(part)
        elif part.may_be_left_out:
            left_out.append(
                f"{name}: {part.needs} is not there (`make {part.needs.removeprefix('.venv-')}` makes it)"
            )
        else:
            parser.error(f"{name} needs {part.needs}: `make {part.needs.removeprefix('.venv-')}` makes it")
    narrowed = [_narrowed(part, extra) for part in parts]
    extra_left = narrowed[0][1] if narrowed else ()
    out = asked.out.absolute()
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)
    for folder in out.glob("again-*"):
        shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run([part for part, _ in narrowed], out, extra_left)
    with contextlib.suppress(KeyboardInterrupt):
        run.go()
        flakes = out / "flakes.jsonl"
        flakes.unlink(missing_ok=True)
        may_skip = is_allowed if asked.strict else lambda _reason: True
        failed = [test for test in run.tests() if test.outcome == "failed"]
        again = run.again(worth_another_run(failed))
        verdict = judge(run.tests(), again, run.problems, may_skip=may_skip)
        _write_flakes(flakes, verdict)
        _report(verdict, run, left_out, begun)
        return 0 if verdict.green else 1
    print("interrupted", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
