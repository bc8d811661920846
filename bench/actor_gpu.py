"""What a step of the job's Megatron actor costs beyond a bare Megatron loop, part by part, on one GPU.

    python bench/actor_gpu.py --out DIR [--shape 0.6B] [--prompt-tokens 48 1024] [--json] [--dry-run]

All rows of a case are of one process, one model and the same batches, in turn batch by batch, so that a machine that is
busy for a while is so for all of them:

    bare            Megatron's schedule, cross-entropy and optimizer; passes packed as densely as they go, on the device
                    beforehand, any kernels
    bare, same bits the same with kernels that give the same bits each time
    actor           the job's actor, called directly: same bits, micro-batches as the trainer deals them out, metrics,
                    log-probs kept for people to look at, and a copy of the weights for the engines
    …, any kernels; …, one micro-batch; …, no copy      the same without one of these

A row has the median over its steps, and the best of them. `profile_<row>_<case>.txt` has the kernels of one step by
their time: a GPU that was busy for less waited for this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from job_plane.case import SHAPES, Case, Row, tokens_of  # noqa: E402

STEPS, WARM = 9, 2
ROWS = ["bare", "bare, same bits", "actor", "one micro-batch", "no copy", "any kernels"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the table, results.json and the profiles"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6B")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 1024])
    parser.add_argument(
        "--groups", type=int, default=0, help="a step's groups of 8; 64, or 32 of long prompts"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    parser.add_argument("--dry-run", action="store_true", help="small, on CPUs: numbers without meaning")
    return parser


def main() -> int:
    given = arguments().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="actor_gpu_") as place:
        bench = None
        for prompt_tokens in given.prompt_tokens:
            case = case_of(given, prompt_tokens)
            bench = bench or Bench(case, Path(place))
            results[case.name] = bench.rows(case, given.out, given.rows)
            (given.out / "results.json").write_text(json.dumps(results, indent=1))
    text = table(results)
    (given.out / "table.md").write_text(text)
    print(json.dumps(results) if given.json else text)
    return 0


def case_of(given: argparse.Namespace, prompt_tokens: int) -> Case:
    groups = given.groups or (64 if prompt_tokens < 512 else 32)
    if given.dry_run:
        return Case(shape="tiny", groups=8, samples=4, prompt_tokens=min(prompt_tokens, 64), dry=True)
    return Case(shape=given.shape, groups=groups, prompt_tokens=prompt_tokens)


class Bench:
    """One actor in this process."""

    def __init__(self, case: Case, place: Path) -> None:
        import torch
        from job_plane.actor import Work

        self.torch = torch
        config = case.spec(case.model())["config"]
        config |= {"threads": 1 if case.dry else 8, "collective_timeout_s": 300.0}
        config["megatron"] |= {"device": "cpu" if case.dry else "cuda", "deterministic": False}
        self.work = Work(
            {"config": config, "cuda": not case.dry, "threads": config["threads"], "directory": str(place)}
        )
        self.work.setup()
        self.actor = self.work.actor
        self.step = 0

    def rows(self, case: Case, out: Path, wanted: list[str]) -> dict[str, Row]:
        batches = [case.batch(number) for number in range(STEPS)]
        self._warm(case)
        took: dict[str, list[Row]] = {name: [] for name in wanted}
        for batch in batches:
            for name in wanted:
                took[name].append(self._timed(name, batch))
        for name in {"bare", "actor"} & set(wanted):
            path = out / f"profile_{name}_{case.prompt_tokens}.txt"
            self._profiled(path, lambda name=name: self._timed(name, batches[0]))
        found = {name: summary(rows[WARM:]) for name, rows in took.items()}
        for name, row in found.items():
            row["of_bare"] = found["bare"]["seconds"] / row["seconds"] if "bare" in found else None
            print(case.name, name, json.dumps(row), file=sys.stderr, flush=True)
        return found

    def _timed(self, name: str, batch: list[list[Any]]) -> Row:
        whole = [[group for micro in batch for group in micro]]
        self.work.deterministic(on=name not in ("bare", "any kernels"))
        if name.startswith("bare"):
            return {"seconds": self.work.bare(whole, 1)["steps_s"][0], "tokens": tokens_of(batch)}
        self.actor.takes_snapshots = name != "no copy"
        return self._one(whole if name == "one micro-batch" else batch)

    def _warm(self, case: Case) -> None:
        self.work.deterministic(on=True)
        self._one(case.batch(STEPS))

    def _one(self, batch: list[list[Any]]) -> Row:
        """One optimizer step, and the seconds of its parts: `accumulate`, `apply`, and of that `update` and `copy`."""
        self.step += 1
        began = self.work._now()
        self.actor.begin(self.step)
        begun = self.work._now()
        # Each step is of new groups, as the actor refuses those that it has trained.
        ids = []
        for index, groups in enumerate(batch):
            fresh = [self._fresh(group, len(ids) + at) for at, group in enumerate(groups)]
            ids += [group.id for group in fresh]
            self.actor.accumulate(fresh, step=self.step, index=index)
        accumulated = self.work._now()
        self.actor.apply(step=self.step, indices=len(batch), group_ids=ids)
        ended = self.work._now()
        return {
            "seconds": ended - began,
            "begin": begun - began,
            "accumulate": accumulated - begun,
            "apply": ended - accumulated,
            "update": self.actor.timings["update"],
            "copy": self.actor.timings["snapshot"],
            "tokens": tokens_of(batch),
        }

    def _fresh(self, group: Any, at: int) -> Any:
        from dataclasses import replace

        return replace(group, id=self.step * 100_000 + at)

    def _profiled(self, path: Path, work: Any) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA if self.work.cuda else ProfilerActivity.CPU]
        with profile(activities=kinds) as found:
            began = self.work._now()
            work()
            seconds = self.work._now() - began
        busy = sum(event.self_device_time_total for event in found.key_averages()) / 1e6
        head = f"{seconds:.3f} s under the profiler, {busy:.3f} s of kernels\n"
        by = "self_cuda_time_total" if self.work.cuda else "self_cpu_time_total"
        path.write_text(head + found.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90))


def summary(rows: list[Row]) -> Row:
    row = {part: statistics.median(one[part] for one in rows) for part in rows[0] if part != "tokens"}
    tokens = sum(one["tokens"] for one in rows) / len(rows)
    return {
        **row,
        "tokens_s": tokens / row["seconds"],
        "best_s": min(one["seconds"] for one in rows),
        "steps_s": [round(one["seconds"], 4) for one in rows],
    }


def table(results: dict[str, dict[str, Row]]) -> str:
    lines = []
    for case, rows in results.items():
        lines += [
            f"## {case}",
            "",
            "| what | tokens/s | by bare | a step, s | best | accumulate | apply | copy |",
        ]
        lines += ["| --- |" + " --- |" * 7]
        for name, row in rows.items():
            by_bare = f"{row['of_bare']:.3f}" if row["of_bare"] else ""
            parts = [f"{row[part]:.3f}" if part in row else "" for part in ("accumulate", "apply", "copy")]
            numbers = [f"{row['tokens_s']:,.0f}", by_bare, f"{row['seconds']:.3f}", f"{row['best_s']:.3f}"]
            label = name if name.startswith(("bare", "actor")) else f"actor, {name}"
            lines.append(f"| {' | '.join([label, *numbers, *parts])} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
