"""Break the product in one way after another, and say which tests notice.

    python -m tools.break_product                 all breaks, one after the other
    python -m tools.break_product --only NAME     one of them; again for more
    python -m tools.break_product --list          the breaks, without running anything

A test suite that cannot fail proves nothing. So each break of `tools.breaks` is put into a copy of the tree, the tests
where it should be noticed run there, and a break that no test notices is told. The exit status is 1 if there is one, or
one that has gone stale, and 2 if the unbroken copy does not pass the same tests, for then the result means nothing.

Invariants:
- *never the checkout*: only the copy is broken, and whatever runs in it imports the copy;
- *a test must fail*: a break that cannot be imported, a test that ends by its time limit, or one that cannot begin
  (an error of a fixture or of the collection) is no notice;
- *right before broken*: the same tests pass in the copy before the first break.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.breaks import BREAKS, Break, Stale, broken

ROOT = Path(__file__).parents[1]

FAST = "not slow and not postgres and not sglang and not vllm and not verl and not dlrover"
TEST_WITHIN_S = 60
RUN_WITHIN_S = 240.0
"""For the tests of a break. The unbroken copy has so long for each break whose tests it runs."""
MOST_FAILURES = 2
"""After so many a break is noticed well enough."""
TOLD = 2
"""Tests in a row of the table."""

BEGIN, END = "<!-- breaks: begin -->", "<!-- breaks: end -->"
"""What is between these lines of a file is the table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of tests ended. `failed` are the ids of those that ran and failed; `hung` ended by their time limit;
    `could_not` did not begin. `problem` says why there is no result; "" where there is one."""

    failed: tuple[str, ...] = ()
    hung: tuple[str, ...] = ()
    could_not: tuple[str, ...] = ()
    passed: int = 0
    problem: str = ""

    @property
    def are_right(self) -> bool:
        return bool(self.passed) and not (self.failed or self.hung or self.could_not or self.problem)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a break: the tests that noticed it, or why none could."""

    name: str
    promise: str
    noticed_by: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0

    @property
    def is_noticed(self) -> bool:
        return bool(self.noticed_by)


# -- what a run of tests says ----------------------------------------------------------------------


def read_report(text: str) -> Outcome:
    """The tests in a report of pytest's in JUnit's format."""
    failed, hung, could_not, passed = [], [], [], 0
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = _id_of(case.get("classname", ""), case.get("name", ""))
        failure = case.find("failure")
        if case.find("error") is not None:
            could_not.append(name)
        elif failure is not None:
            said = f"{failure.get('message', '')}{failure.text or ''}"
            (hung if "from pytest-timeout" in said else failed).append(name)
        elif case.find("skipped") is None:
            passed += 1
    return Outcome(tuple(failed), tuple(hung), tuple(could_not), passed)


def _id_of(place: str, name: str) -> str:
    """As pytest takes it: of `tests.a.test_b.TestC` and `test_d`, `tests/a/test_b.py::TestC::test_d`."""
    parts = place.split(".")
    module = [part for part in parts if not part[:1].isupper()]
    return "::".join(["/".join(module) + ".py", *parts[len(module) :], name])


def finding_of(one: Break, tests: Outcome, seconds: float) -> Finding:
    """A break is noticed by a test that failed, and by nothing else."""
    problem = tests.problem
    if not tests.failed and not problem:
        if tests.hung:
            problem = f"{tests.hung[0]} ended by its time limit"
        elif tests.could_not:
            problem = f"{tests.could_not[0]} could not begin"
        elif not tests.passed:
            problem = "no test ran"
    return Finding(one.name, one.promise, list(tests.failed), problem, round(seconds, 1))


# -- the copy --------------------------------------------------------------------------------------


class Copy:
    """A copy of a tree, in which a break can be made and the tests run."""

    def __init__(self, root: Path, source: Path) -> None:
        self._root = root
        for name in _files_of(source):
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target, follow_symlinks=False)

    def check(self, one: Break) -> None:
        """Raises Stale."""
        file = self._root / one.file
        if not file.is_file():
            raise Stale(f"{one.name}: there is no {one.file}.")
        broken(file.read_text(), one)

    @contextlib.contextmanager
    def with_break(self, one: Break) -> Iterator[None]:
        """Within the block the copy has the break. Raises Stale."""
        file = self._root / one.file
        right = file.read_text()
        self._write(file, broken(right, one))
        try:
            yield
        finally:
            self._write(file, right)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Bytecode is told from old by time and size, and a break may have neither another second nor another length.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)

    def problem_with_import(self, one: Break) -> str:
        """Why the broken module cannot be imported from the copy; "" where it can."""
        code = f"import importlib; print(importlib.import_module({one.module!r}).__file__)"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=self._root,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=TEST_WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            return f"{one.module} is not imported within {TEST_WITHIN_S} s"
        if done.returncode:
            return f"{one.module} cannot be imported: {(done.stderr.strip().splitlines() or [''])[-1]}"
        found = Path(done.stdout.strip().splitlines()[-1])
        if found.resolve() != (self._root / one.file).resolve():
            return f"{one.module} is imported from {found}, and not from the copy"
        return ""

    def run(self, paths: Iterable[str], *, marks: str, most_failures: int, within_s: float) -> Outcome:
        """Run the tests at these paths."""
        report = self._root / "break_product.xml"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(f"--maxfail={most_failures}", f"--timeout={TEST_WITHIN_S}", "-m", marks, *paths),
        ]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(within_s)
            except subprocess.TimeoutExpired:
                return Outcome(problem=f"the tests did not end within {within_s:g} s")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not report.is_file():
                output.seek(0)
                last = (output.read().strip().splitlines() or [""])[-1]
                return Outcome(problem=f"pytest ended with {code}: {last}")
        return read_report(report.read_text())

    def _environment(self) -> dict[str, str]:
        """Subprocesses of tests see the copy too, whatever the environment has installed."""
        return {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": ""}


def _files_of(source: Path) -> list[str]:
    """What git knows of the tree or would take up, as it stands there now; all of it where git knows nothing."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode or not names:
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    return [name for name in names if (source / name).is_file()]


class UnbrokenFails(Exception):
    """The copy without a break does not pass the tests; the text says which."""


def find(
    breaks: Sequence[Break], source: Path, *, marks: str = FAST, tests: Sequence[str] = ()
) -> Iterator[Finding]:
    """What comes of each break, run on a copy of `source`; with `tests` instead of their own. Raises UnbrokenFails."""
    with tempfile.TemporaryDirectory(prefix="gyre-breaks-") as folder:
        copy = Copy(Path(folder), source)
        current = []
        for one in breaks:
            try:
                copy.check(one)
                current.append(one)
            except Stale as stale:
                yield Finding(one.name, one.promise, problem=f"stale: {stale}")
        if not current:
            return
        paths = list(dict.fromkeys(tests or [path for one in current for path in one.tests]))
        right = copy.run(paths, marks=marks, most_failures=10, within_s=RUN_WITHIN_S * len(current))
        if not right.are_right:
            raise UnbrokenFails(
                right.problem or ", ".join((*right.failed, *right.hung, *right.could_not)) or "no test ran"
            )
        for one in current:
            began = time.monotonic()
            with copy.with_break(one):
                problem = copy.problem_with_import(one)
                result = (
                    Outcome(problem=problem)
                    if problem
                    else copy.run(
                        tests or one.tests, marks=marks, most_failures=MOST_FAILURES, within_s=RUN_WITHIN_S
                    )
                )
            yield finding_of(one, result, time.monotonic() - began)


# -- tables ----------------------------------------------------------------------------------------


def shown(finding: Finding) -> str:
    """A line for the terminal."""
    by = ", ".join(finding.noticed_by[:TOLD]) or f"NOBODY{f' ({finding.problem})' if finding.problem else ''}"
    return f"{finding.name:34} {finding.seconds:6.1f} s  {by}"


def row_of(finding: Finding) -> str:
    """A row of the table."""
    by = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in finding.noticed_by[:TOLD]) or "**nobody**"
    return f"| {finding.name} | {finding.promise} | {by.replace('|', chr(92) + '|')} |"


def with_table(text: str, findings: Sequence[Finding], order: Sequence[str], date: str) -> str:
    """The text with the findings in its table; rows of breaks that did not run stay, those of others go. Raises
    ValueError where the text has no place for a table."""
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there are no lines {BEGIN} and {END}")
    rows = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| ")}
    rows |= {finding.name: row_of(finding) for finding in findings}
    table = [
        f"Last run on {date}.",
        "",
        "| break | what it does | noticed by |",
        "| --- | --- | --- |",
        *(rows[name] for name in order if name in rows),
    ]
    return f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.break_product",
        description="Break the product in one way after another, and say which tests notice.",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this break; again for more")
    parser.add_argument("--list", action="store_true", help="print the breaks, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write it into the table of this file")
    parser.add_argument(
        "--tests", action="append", default=[], metavar="PATH", help="run these tests instead"
    )
    given = parser.parse_args(arguments)
    names = [one.name for one in BREAKS]
    for name in given.only or ():
        if name not in names:
            parser.error(f"there is no break {name!r}; --list prints them")
    breaks = [one for one in BREAKS if not given.only or one.name in given.only]
    if given.list:
        for one in breaks:
            print(f"{one.name:34} {one.promise}")
        return 0
    findings: list[Finding] = []
    print(f"{len(breaks)} breaks; first the unbroken tree", flush=True)
    try:
        for finding in find(breaks, ROOT, tests=given.tests):
            findings.append(finding)
            print(shown(finding), flush=True)
    except UnbrokenFails as error:
        print(f"The unbroken tree does not pass, so this says nothing: {error}", file=sys.stderr)
        return 2
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    if given.table is not None:
        text = given.table.read_text()
        given.table.write_text(with_table(text, findings, names, time.strftime("%Y-%m-%d")))
    unnoticed = [finding.name for finding in findings if not finding.is_noticed]
    print(f"{len(findings) - len(unnoticed)} of {len(findings)} breaks are noticed")
    if unnoticed:
        print(f"Nobody notices {', '.join(unnoticed)}: each of them wants a test.", file=sys.stderr)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # it takes the copy and the tests along
    sys.exit(main())
