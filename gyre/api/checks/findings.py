"""What the checks say of a job that may run all the same.

A *warning* is of something that the user most likely wants otherwise; `gyre plan --strict` refuses the job for it. A
*note* is information: where a vertex will stand, which file the other machines must have. Both are texts, so that a
handle keeps them and a driver prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Note(str):
    """Information: there is nothing to mend."""

    __slots__ = ()


class JobWarning(str):
    """Most likely a mistake, though the job can run."""

    __slots__ = ()


class WeightsDrawn(JobWarning):
    """The model's folder has no weights: no mistake in a job that begins with other weights, or goes on."""

    __slots__ = ()


ELSEWHERE = "The machines that run the job must have it."
"""How a note ends of what is wrong on this machine alone, for a job that runs on others."""


def as_findings(found: Iterable[str]) -> Iterator[str]:
    """What a subject's check yields: a plain text is a note if it ends with `ELSEWHERE`, else a warning."""
    for each in found:
        if isinstance(each, Note | JobWarning):
            yield each
        else:
            yield Note(each) if each.endswith(ELSEWHERE) else JobWarning(each)


def elsewhere(problem: str) -> Note:
    """A note of what is wrong on this machine alone, for a job that runs on others."""
    return Note(f"{problem} {ELSEWHERE}")


def line_of(finding: str) -> str:
    """As it is printed: `warning: …` or `note: …`."""
    return f"{'warning' if isinstance(finding, JobWarning) else 'note'}: {finding}"
