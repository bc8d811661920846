"""What the records of a run say: which tests passed, which failed twice, and whether that is green. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped", "flaky"]

MOST_FLAKES = 3
"""A run with more of them is red, whatever passes the second time."""


@dataclass(frozen=True)
class Result:
    id: str
    outcome: Outcome
    text: str = ""
    """Why it failed or was skipped; of a flake, why it failed at first."""
    seconds: float = 0.0


@dataclass
class Seen:
    """A bundle's record, folded as far as it goes."""

    tests: dict[str, Result] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    """Collected, and not ended."""
    running: str = ""
    limit_s: float = 0.0
    """Of the test that runs."""

    def take(self, event: Mapping[str, Any]) -> Result | None:
        """Fold the next event; the test that ended by it."""
        match event["kind"]:
            case "collected":
                self.waiting = set(event["tests"])
            case "begun":
                self.running, self.limit_s = event["test"], event["limit_s"]
            case "uncollected":
                return self._ended(Result(event["test"], "failed", event["text"]))
            case "ended":
                self.running = ""
                return self._ended(Result(event["test"], event["outcome"], event["text"], event["seconds"]))
        return None

    def _ended(self, test: Result) -> Result:
        self.waiting.discard(test.id)
        self.tests[test.id] = test
        return test


@dataclass(frozen=True)
class Verdict:
    tests: tuple[Result, ...]
    problems: tuple[str, ...]
    """What is wrong with the run itself: a part that did not end, a bundle without a test."""

    @property
    def green(self) -> bool:
        return not self.problems and not self.of("failed") and bool(self.of("passed", "flaky"))

    def of(self, *outcomes: Outcome) -> list[Result]:
        return [test for test in self.tests if test.outcome in outcomes]

    def closing_line(self) -> str:
        """`N passed, N failed, N skipped`: what readers of a log, and programs, look for at its end. A flake passed."""
        passed, failed = len(self.of("passed", "flaky")), len(self.of("failed")) + len(self.problems)
        return f"{passed} passed, {failed} failed, {len(self.of('skipped'))} skipped"

    def skips(self) -> list[tuple[int, str]]:
        """How many tests were skipped for a reason, by reason."""
        reasons = Counter(test.text.removeprefix("Skipped: ") for test in self.of("skipped"))
        return [(count, reason) for reason, count in reasons.most_common()]


def judge(
    first: Iterable[Result],
    again: Mapping[str, Result],
    problems: Iterable[str],
    *,
    may_skip: Callable[[str], bool],
) -> Verdict:
    """The verdict on a run whose failed tests ended as `again` says when each was run by itself; a test that is not
    in it was not run again. A test that is skipped for a reason that `may_skip` does not take has failed: nothing was proved."""
    tests, found = [], list(problems)
    for test in first:
        if test.outcome == "failed" and test.id in again:
            second = again[test.id]
            if second.outcome == "passed":
                tests.append(Result(test.id, "flaky", test.text, test.seconds))
            else:
                tests.append(Result(test.id, "failed", second.text or test.text, test.seconds))
        elif test.outcome == "skipped" and not may_skip(test.text):
            tests.append(Result(test.id, "failed", f"nothing was proved, for it was skipped: {test.text}"))
        else:
            tests.append(test)
    flakes = sum(test.outcome == "flaky" for test in tests)
    if flakes > MOST_FLAKES:
        found.append(f"{flakes} flakes, of which a run may have {MOST_FLAKES}")
    return Verdict(tuple(tests), tuple(found))


def worth_another_run(failed: Iterable[Result]) -> list[str]:
    """The tests that are run once more: none, if so many failed that the run is red however they end."""
    names = [test.id for test in failed]
    return names if len(names) <= MOST_FLAKES else []
