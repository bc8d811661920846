"""Draw what `learning.py` found:

    python bench/learning_figure.py bench/results/learning.json bench/results/learning_gpu.json docs/learning.svg


Above, the share of held-out problems that are answered rightly, by step: the median of the seeds, and their spread.
Below, per token, how far the engine's log-probs are from the trainer's. Needs matplotlib: `pip install -e .[figures]`.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

COLOURS = {
    "synchronous": "#4c4c4c",
    "one step stale": "#0072b2",
    "four steps stale": "#d55e00",
    "streamed": "#009e73",
    "killed": "#cc79a7",
}
"""Of Okabe and Ito's palette, which colour-blind readers can tell apart."""

SMOOTH = 5
"""Steps that a point of the lower curves is the mean of."""


def by_case(rows: list[dict[str, Any]], on: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["on"] == on:
            found.setdefault(row["case"], []).append(row)
    return found


def spread(runs: list[list[tuple[float, float]]]) -> tuple[list[float], ...]:
    """For each x that all the runs have: it, the lowest, the median and the highest y."""
    tables = [dict(run) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    columns = [sorted(table[x] for table in tables) for x in shared]
    return (
        shared,
        [column[0] for column in columns],
        [statistics.median(column) for column in columns],
        [column[-1] for column in columns],
    )


def smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (points[at][0], sum(y for _, y in points[max(0, at - SMOOTH + 1) : at + 1]) / min(at + 1, SMOOTH))
        for at in range(len(points))
    ]


def main(sources: list[Path], target: Path) -> None:
    rows = [row for source in sources for row in json.loads(source.read_text())["rows"]]
    places = [on for on in ("cpu", "gpu") if any(row["on"] == on for row in rows)]
    titles = {"cpu": "CPUs: plain torch, embedded engine", "gpu": "one GPU: Megatron, SGLang"}
    figure, axes = pyplot.subplots(
        2, len(places), figsize=(6.2 * len(places) + 1, 7), squeeze=False, sharex="col"
    )
    for column, on in enumerate(places):
        above, below = axes[0][column], axes[1][column]
        above.set_title(titles[on], fontsize=10)
        for case, runs in by_case(rows, on).items():
            colour = COLOURS[case]
            x, low, middle, high = spread(
                [[(step, 100 * share) for step, share in run["accuracy"]] for run in runs]
            )
            above.plot(
                x, middle, color=colour, label=f"{case} ({len(runs)} seeds)" if len(runs) > 1 else case
            )
            above.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            lines = [smooth([(point[0], max(point[2], 1e-16)) for point in run["by_step"]]) for run in runs]
            x, low, middle, high = spread(lines)
            below.plot(x, middle, color=colour, linewidth=1)
            below.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        above.axhline(95, color="#999999", linewidth=0.7, linestyle=":")
        above.set_ylim(0, 100)
        above.set_ylabel("held-out problems right, %")
        above.legend(loc="lower right", fontsize=8, frameon=False)
        below.set_yscale("log")
        below.set_ylabel("engine to trainer, KL per token")
        below.set_xlabel("optimizer step")
        for panel in (above, below):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "learning"  # the same drawing has the same bytes
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    *files, drawing = (Path(name) for name in sys.argv[1:])
    main(files, drawing)
