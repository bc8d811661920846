"""The figures that README states of a machine with two cores, measured in one run on this code, each with its sentence.

    python bench/readme.py [--repeat 5] [--quick] [--write] [--json bench/results/readme.json]

It runs `gyre demo` (what it learns, and the memory that the machine has less meanwhile) and `bench/failover.py`
(recovery times, which docs/faults.md has too), one after the other. `--write` puts the figures into README.md and
docs/faults.md; `tests/test_bench.py` holds both to the file of results. `--quick` makes one short round, to see that
it runs: its figures are no result. Run it alone: other work makes every time longer.

What is not measured here: DLRover's times (`bench/dlrover.py`, which needs DLRover) and what was run on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MEASURED = RESULTS / "readme.json"
LOOK_EVERY_S = 0.2
"""Between two looks at the machine's memory: a process of the demo lives for seconds at least."""
FAILOVER_S, DEMO_S = 3600.0, 900.0
"""Deadlines of the two; a round of the first takes some four minutes, the second two."""
QUICK_CASE, QUICK_STEPS = "reward vertex", 2


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a document: `pattern` finds it in `file` as its only group, `form` writes it. `sentence` says what it
    is of."""

    name: str
    file: str
    pattern: str
    sentence: str
    form: str = "{:.2f}"


def _row(file: str, first: str, name: str, column: int, sentence: str) -> Figure:
    """The figure in the row that begins so, in a column counted from 0."""
    return Figure(name, file, rf"\| {first} \|(?:[^|\n]*\|){{{column - 1}}} ([\d.]+) s \|", sentence)


_FAULTS = (
    ("a rollout vertex", "rollout vertex"),
    ("a reward vertex", "reward vertex"),
    ("an actor rank", "actor rank (gang of 2)"),
    ("the trainer's controller", "trainer controller"),
    ("the master", "master"),
    ("a rollout vertex that is stopped", "rollout vertex, SIGSTOP"),
)
_README = (
    ("a rollout engine or its machine", "rollout vertex"),
    ("a reward process", "reward vertex"),
    ("a trainer rank", "actor rank (gang of 2)"),
    ("the trainer's controller", "trainer controller"),
    ("the master", "master"),
)
DEMO_CLAIM = "held-out\naccuracy rises from a third to over 80 %"
MEMORY_CLAIM, MOST_GIB = "The demo needs two CPU cores and 3 GiB of memory", 3.0
"""What README says of the demo in words."""
FIGURES: tuple[Figure, ...] = (
    *(
        _row("README.md", first, f"back/{what}", 2, f"{first} dies: back at work after")
        for first, what in _README
    ),
    *(
        _row("docs/faults.md", first, f"detected/{what}", 1, f"{first}: noticed after")
        for first, what in _FAULTS
    ),
    *(
        _row("docs/faults.md", first, f"back/{what}", 2, f"{first}: back at work after")
        for first, what in _FAULTS
    ),
    Figure("at", "README.md", r"on two CPU cores, measured on (\S+) at", "measured on", "{}"),
    Figure("commit", "README.md", r"measured on \S+ at `(\w+)`", "at commit", "{}"),
)  # fmt: skip


def recovery_figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Of what `bench/failover.py --json` wrote: seconds until the death is noticed, and until the job works again: its
    replacement runs, and a step has ended since. Medians."""
    figures = {}
    for row in found["raw"]:
        if row["detected_s"]:
            figures[f"detected/{row['what']}"] = statistics.median(row["detected_s"])
        back = [row[key] for key in ("running_s", "training_s") if row[key]]
        if back:
            figures[f"back/{row['what']}"] = max(statistics.median(each) for each in back)
    return figures


def measured() -> dict[str, Any]:
    """The results as they are kept, by figure."""
    kept = json.loads(MEASURED.read_text())
    return {**kept["figures"], "at": kept["at"], "commit": kept["commit"]}


def shown(figure: Figure, values: Mapping[str, Any]) -> str | None:
    """The figure as a document has it; None where it was not measured."""
    return figure.form.format(values[figure.name]) if figure.name in values else None


def stated(figure: Figure, text: str) -> str:
    """What the document says. Raises ValueError where its sentence is not there."""
    found = re.findall(figure.pattern, text)
    if len(found) != 1:
        raise ValueError(f"{figure.file} has {len(found)} places of {figure.name!r}")
    return str(found[0])


def write_into(file: Path, values: Mapping[str, Any]) -> None:
    """Put the figures of this file into it. Raises ValueError where a sentence is not there."""
    text = file.read_text()
    for figure in FIGURES:
        new = shown(figure, values)
        if ROOT / figure.file != file or new is None:
            continue
        stated(figure, text)
        match = re.search(figure.pattern, text)
        assert match is not None
        text = text[: match.start(1)] + new + text[match.end(1) :]
    file.write_text(text)


# -- measuring --------------------------------------------------------------------------------------


def measure_recovery(repeat: int, *, quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if quick else RESULTS
        command = [sys.executable, str(ROOT / "bench" / "failover.py"), "--repeat", str(repeat)]
        command += ["--json", str(kept / "failover.json"), "--markdown", str(kept / "failover.md")]
        command += ["--case", QUICK_CASE] if quick else []
        subprocess.run(command, check=True, timeout=FAILOVER_S, cwd=ROOT)
        return recovery_figures(json.loads((kept / "failover.json").read_text()))


def measure_demo(steps: int | None) -> dict[str, float]:
    """What the demo learns, and by how much the machine's free memory was smaller meanwhile at most."""
    before, least = _free_bytes(), [_free_bytes()]
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK_EVERY_S):
            least[0] = min(least[0], _free_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        command = [sys.executable, "-m", "gyre.api.cli", "demo", "--json"]
        command += ["--steps", str(steps)] if steps else []
        ended = subprocess.run(
            command, check=True, timeout=DEMO_S, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
    finally:
        done.set()
        watch.join()
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    return {
        "demo/memory_gib": (before - least[0]) / 2**30,
        "demo/accuracy_first": told["accuracy_first"],
        "demo/accuracy_last": told["accuracy_last"],
        "demo/wall_s": told["wall_s"],
    }


def _free_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None  # every Linux since 3.14
    return int(found[1]) * 1024


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10.0).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.quick and (options.write or options.json == MEASURED):
        parser.error("--quick measures nothing that a document may say")
    load = os.getloadavg()[0]
    figures = measure_demo(QUICK_STEPS if options.quick else None)
    figures |= measure_recovery(1 if options.quick else options.repeat, quick=options.quick)
    kept: dict[str, Any] = {
        "command": f"python bench/readme.py --repeat {options.repeat}",
        "at": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": load},
        "figures": {name: round(value, 4) for name, value in figures.items()},
    }
    values = {**figures, "at": kept["at"], "commit": kept["commit"]}
    for figure in FIGURES:
        new, old = shown(figure, values), stated(figure, (ROOT / figure.file).read_text())
        if new is not None:
            print(f"{figure.file}: {figure.sentence} {new}{'' if new == old else f', and it says {old}'}")
    first, last = figures["demo/accuracy_first"], figures["demo/accuracy_last"]
    print(f"README.md: the demo's held-out accuracy {first:.0%} -> {last:.0%}")
    print(f"README.md: the demo took {figures['demo/memory_gib']:.1f} GiB, and it says {MOST_GIB:.0f}")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if options.write:
        for file in sorted({figure.file for figure in FIGURES}):
            write_into(ROOT / file, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
