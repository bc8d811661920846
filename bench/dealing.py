"""Whether a step's samples are dealt so that several engines make what they make alone, though each loads when it does.

    python bench/dealing.py [--part simulated] [--part real] [--json FILE]

simulated   Virtual time. Placement, router and rebalancing are the product's, called as the manager calls them;
            engines, agents and wires are SIMULATED (`bench/dealing_fleet.py`, with the speeds it takes and from where).
            A step asks for its samples with a new policy version; each engine has loaded it at its own moment. Columns:
              alone     the same engines without a manager, each begins its part when it has loaded; the parts are the
                        best that were found with the lengths known (a search over how many samples each gets)
              before    first come, first served, and evened out once a second: the product before it dealt again
              now       the product
            Each share is of the first step, in which nothing is known of lengths and speeds, and of the steps after it.
            `wait` is the longest time that a sample waited, at the manager or in an engine, beside a free slot of an
            instance that may have it.
real        The product's manager in a process of its own, over real sockets, in real time; agents and engines SIMULATED
            (`bench/dealing_real.py`). The columns are the same; `alone` is measured in real time too, before.
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
                    found.append(
                        Case(name, shape, lengths, groups, samples, prompt, limit, loads[engines], slow)
                    )
                slow = (1.0,) * (engines - 1) + (2.0,)
                loads_s = LOADS["0.2 s apart"][engines]
                found.append(
                    Case("one twice as slow", shape, lengths, groups, samples, prompt, limit, loads_s, slow)
                )
    return found


def simulated(steps: int) -> list[dict[str, Any]]:
    rows = []
    for case in cases():
        tokens = [sum(case.drawn(step)) for step in range(steps)]
        alone = [alone_s(case, step) for step in range(steps)]
        row: dict[str, Any] = {
            "engines": len(case.loads_s),
            "lengths": f"{case.shape}, {case.lengths}",
            "loads": case.name,
            "alone_tokens_s": sum(tokens[1:]) / sum(alone[1:]),
        }
        for name, dealing in (("before", False), ("now", True)):
            outcome = run(case, steps, dealing=dealing)
            row[f"{name}_first"] = alone[0] / outcome.seconds[0]
            row[f"{name}_later"] = sum(alone[1:]) / sum(outcome.seconds[1:])
            row[f"{name}_moved"] = outcome.moved / steps
            row[f"{name}_most_moves"] = outcome.most_moves
            row[f"{name}_again"] = outcome.again_tokens / steps
            row[f"{name}_wait_s"] = outcome.longest_wait_s
        rows.append(row)
    return rows


def real(steps: int) -> list[dict[str, Any]]:
    import asyncio
    import tempfile

    from dealing_real import Fleet
    from dealing_real import alone_s as really_alone_s
    from rollout_plane.child import Child

    rows = []
    for case, killed_s, back_s in real_cases():
        row: dict[str, Any] = {
            "engines": len(case.loads_s),
            "lengths": f"{case.shape}, {case.lengths}",
            "loads": case.name,
        }
        tokens = [sum(case.drawn(step)) for step in range(steps)]
        alone = [asyncio.run(really_alone_s(case, step)) for step in range(steps)]
        row["alone_tokens_s"] = sum(tokens[1:]) / sum(alone[1:])
        for name in ("before", "now"):
            with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
                settings = {"reconnect_grace_s": 0.2}
                options = {"core": 0, "folder": folder, "events": True, "settings": settings}
                manager = Child(
                    Path(__file__).parent / "rollout_plane/plane.py",
                    options | {"first_takes_all": name == "before"},
                )
                try:
                    fleet = Fleet(case, Path(folder), killed_s=killed_s, back_s=back_s)
                    took = asyncio.run(fleet.run(manager.hear()["port"], steps))
                    stats = manager.ask("stats")
                    if missing := manager.ask("stop")["missing_tokens"]:
                        raise SystemExit(f"{missing} tokens are missing")
                finally:
                    manager.end()
            moved = sum(told["count"] for _, kind, told in stats["events"] if kind == "SamplesMoved")
            row[f"{name}_first"] = alone[0] / took[0]
            row[f"{name}_later"] = sum(alone[1:]) / sum(took[1:])
            row[f"{name}_moved"] = moved / steps
            row[f"{name}_wait_s"] = max(fleet.waits, default=0.0)
            row[f"{name}_manager_cpu"] = stats["cpu_share"]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def real_cases() -> list[tuple[Case, float, float]]:
    """Each with the moment of a step in which the last engine is killed, and after how long it is back; 0 for never."""
    found = []
    for case in cases():
        if case.shape == "short" and case.name in ("0.2 s apart", "0.7 s apart"):
            found.append((case, 0.0, 0.0))
    for engines in (2, 4):
        loads_s = LOADS["0.2 s apart"][engines]
        slow = (1.0,) * engines
        case = Case(
            "one is killed after 1.5 s, back after 1 s", "middle", "equal", 64, 8, 128, 1024, loads_s, slow
        )
        found.append((case, 1.5, 1.0))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| engines | lengths | loads | alone, tokens/s | before: first; later | now: first; later "
        "| moved a step, before; now | wait, ms, before; now |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['engines']} | {row['lengths']} | {row['loads']} | {row['alone_tokens_s']:,.0f} "
            f"| {row['before_first']:.2f}; {row['before_later']:.2f} "
            f"| {row['now_first']:.2f}; {row['now_later']:.2f} "
            f"| {row['before_moved']:.0f}; {row['now_moved']:.0f} "
            f"| {row['before_wait_s'] * 1e3:.0f}; {row['now_wait_s'] * 1e3:.0f} |"
        )
    for name in ("before", "now"):
        shares = [row[f"{name}_later"] for row in rows]
        below = sum(share < 0.93 for share in shares)
        lines.append(
            f"\n{name}, later steps: median {statistics.median(shares):.3f}, worst {min(shares):.3f}, "
            f"{below} of {len(shares)} below 0.93"
        )
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
    if "real" in parts:
        data["real"] = real(options.steps)
        print(table(data["real"]))
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
