"""`python -m tests.fuzz --n 1000000 --seed 1 [--target frames]`: a table, and each failure with how to repeat it."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.target import Result, every_target, run

HEAD = (
    "| target | cases | refused | accepted | failures | cases per second | peak memory |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def row_of(result: Result) -> str:
    """A line of the table."""
    rate = result.cases / max(result.seconds, 1e-9)
    return (
        f"| {result.target} | {result.cases:,} | {result.refused:,} | {result.accepted:,} | {len(result.failures)} "
        f"| {rate:,.0f} | {result.peak_bytes >> 20} MiB |"
    )


def main(given: list[str] | None = None) -> int:
    targets = every_target()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=10_000, help="cases; slow targets get a share of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=sorted(targets), help="these alone")
    parser.add_argument("--only", type=int, help="the case of this index alone")
    asked = parser.parse_args(given)
    print(HEAD, flush=True)
    failures = []
    for name in asked.target or targets:
        kind = targets[name]
        count = max(1, round(asked.n * kind.share))
        indices = range(count) if asked.only is None else range(asked.only, asked.only + 1)
        result = run(
            kind, indices, asked.seed, told=lambda one: print(row_of(one), file=sys.stderr, flush=True)
        )
        print(row_of(result), flush=True)
        failures += result.failures
    for failure in failures:
        print(f"\n{failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
