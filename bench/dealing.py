"""Whether a step's samples are dealt so that several engines make what they make alone, though each loads at its own time.

    python bench/dealing.py [--part simulated] [--part real] [--json FILE]

simulated   Virtual time. Placement, router, dealing and rebalancing are the product's, called as the manager calls them;
            engines, agents and wires are SIMULATED (`bench/dealing_fleet.py`, with the speeds it takes and from where).
            A step asks for its samples with a new policy version; each engine has loaded it at its own moment. Columns:
              alone     the same engines without a manager, each begins its part when it has loaded; the parts are the
                        best that were found with the lengths known (a search over how many samples each gets)
              before    first come, first served, and evened out once a second: the product before it dealt again
              now       the product
            `wait` is the longest time that a sample waited, at the manager or in an engine, beside a free slot of an
            instance that may have it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from dealing_fleet import Case, alone_s, run  # noqa: E402

NEVER = float("inf")

LOADS: dict[str, dict[int, tuple[float, ...]]] = {
    "at once": {2: (0.3, 0.3), 4: (0.3, 0.3, 0.3, 0.3)},
    "0.2 s apart": {2: (0.3, 0.5), 4: (0.3, 0.5, 0.7, 0.9)},
    "0.7 s apart": {2: (0.3, 1.0), 4: (0.3, 1.0, 1.7, 2.4)},
    "2 s apart": {2: (0.3, 2.3), 4: (0.3, 2.3, 4.3, 6.3)},
    "one comes back after 10 s": {2: (0.3, 10.0), 4: (0.3, 0.3, 0.3, 10.0)},
    "one 60 s late": {2: (0.3, 60.0), 4: (0.3, 0.4, 0.5, 60.0)},
    "one dies while loading": {2: (0.3, NEVER), 4: (0.3, 0.4, 0.5, NEVER)},
}
"""When each engine has loaded the step's version, in seconds after the samples are asked for."""

SHAPES = {"short": (64, 8, 48, 256), "long": (64, 8, 512, 4096)}
"""Groups, samples of each, tokens of a prompt, the limit of tokens. With lognormal lengths half of the limit is the
longest of most: the median is a fifth of it, sigma 0.6."""


def cases() -> list[Case]:
    found = []
    for engines in (2, 4):
        for shape, (groups, samples, prompt, limit) in SHAPES.items():
            for lengths in ("equal", "lognormal"):
                for name, loads in LOADS.items():
                    slow = (1.0,) * engines
                    found.append(Case(name, shape, lengths, groups, samples, prompt, limit, loads[engines], slow))
                slow = (1.0,) * (engines - 1) + (2.0,)
                loads_s = LOADS["0.2 s apart"][engines]
                found.append(
                    Case("one twice as slow", shape, lengths, groups, samples, prompt, limit, loads_s, slow)
                )
    return found


def simulated(steps: int) -> list[dict[str, Any]]:
    rows = []
    for case in cases():
        best = [alone_s(case, step) for step in range(steps)]
        row: dict[str, Any] = {
            "engines": len(case.loads_s),
            "lengths": f"{case.shape}, {case.lengths}",
            "loads": case.name,
            "tokens": sum(best_tokens for best_tokens, _ in best),
            "alone_tokens_s": sum(t for t, _ in best) / sum(s for _, s in best),
        }
        for name, dealing in (("before", False), ("now", True)):
            outcome = run(case, steps, dealing=dealing)
            row[f"{name}_tokens_s"] = outcome.tokens / outcome.seconds
            row[f"{name}_of_alone"] = row[f"{name}_tokens_s"] / row["alone_tokens_s"]
            row[f"{name}_moved"] = outcome.moved / steps
            row[f"{name}_most_moves"] = outcome.most_moves
            row[f"{name}_again"] = outcome.again_tokens / steps
            row[f"{name}_wait_s"] = outcome.longest_wait_s
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| engines | lengths | loads | alone, tokens/s | before | now | moved a step, before; now | wait s, before; now |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['engines']} | {row['lengths']} | {row['loads']} | {row['alone_tokens_s']:,.0f} "
            f"| {row['before_of_alone']:.2f} | {row['now_of_alone']:.2f} "
            f"| {row['before_moved']:.0f}; {row['now_moved']:.0f} "
            f"| {row['before_wait_s']:.3f}; {row['now_wait_s']:.3f} |"
        )
    for name in ("before", "now"):
        shares = [row[f"{name}_of_alone"] for row in rows]
        lines.append(f"\n{name}: median {statistics.median(shares):.3f}, worst {min(shares):.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=("simulated", "real"))
    parser.add_argument("--steps", type=int, default=4, help="of each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.part or ["simulated"]
    data: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    }
    if "simulated" in parts:
        data["simulated"] = simulated(options.steps)
        print(table(data["simulated"]))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
