"""What it is worth to compute a prompt once for its group: tokens/s of actors beside a bare loop, on one GPU.

    python bench/prompts_once_gpu.py [--json FILE] [--backend megatron fsdp] [--shape 0.6B] [--prompt-tokens 48 1024]
        [--steps 5] [--within 140] [--dry-run]

All rows of a case are of one process and the same batches, in turn batch by batch. Answers have up to 256 tokens, 211
in the mean; groups have 8 samples:

    bare    a bare loop of the back end's library over the same batches, each sample with its prompt, packed as densely
            as they go and on the device beforehand, with any kernels: Megatron's schedule, cross-entropy and optimizer,
            or transformers' model under `fully_shard` with cross-entropy and fused AdamW
    each    the job's actor called directly, with kernels that give the same bits each time, micro-batches, metrics and
            log-probs, each sample with its prompt (`prompts_once: false`)
    once    the same actor, which computes a prompt once for its group

`tokens/s` counts the samples' tokens, the prompt in each; `by bare` is the median of the batches' ratios, each to the
bare loop's time for the same batch, a moment before, and `least` the least of them; `computed` is the tokens that went
through the model for each that is counted; `GiB` is the most that torch's allocator had during such a step. Activations
are kept. The first batch of a case is not counted. Results are written after each back end. With `--dry-run` everything
is tiny and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from fsdp_gpu import Bare  # noqa: E402
from job_plane.case import SHAPES, Case, Row  # noqa: E402

WARM = 1
PASS_TOKENS = 16384
ROWS = ("bare", "each", "once")
BACKENDS = ("megatron", "fsdp")

Batch = list[list[Any]]


def case_of(given: Row, prompt_tokens: int) -> Case:
    if given["dry"]:
        return Case(shape="tiny", groups=4, prompt_tokens=min(prompt_tokens, 160), dry=True)
    return Case(shape=given["shape"], groups=32 if prompt_tokens < 512 else 16, prompt_tokens=prompt_tokens)


def samples_tokens(batch: Batch) -> int:
    return sum(
        len(group.prompt_ids) + len(sample.token_ids)
        for groups in batch
        for group in groups
        for sample in group.samples
    )


class Side:
    """An actor and a bare loop in this process."""

    def __init__(self, backend: str, case: Case, place: Path) -> None:
        import torch

        self.torch, self.cuda, self.step = torch, not case.dry, 0
        torch.set_num_threads(8 if self.cuda else 1)
        folder = case.model()
        config = case.spec(folder)["config"] | {
            "collective_timeout_s": 300.0,
            "threads": 8 if self.cuda else 1,
        }
        config.pop("megatron", None)
        config[backend] = {
            "device": "cuda" if self.cuda else "cpu",
            "pass_tokens": PASS_TOKENS if self.cuda else 2048,
            "recompute": False,  # as the bare loop
            "memory_checkpoint_share": 0.0,
        }
        self.bare: Callable[[Batch], float]
        options = {"config": config, "cuda": self.cuda, "threads": config["threads"], "directory": str(place)}
        (self._megatron if backend == "megatron" else self._fsdp)(options, folder)
        self.computed = 0
        backward = self.actor.backend.backward

        def noted(passes: list[Any], loss: Any) -> Any:
            self.computed += sum(len(one.tokens) for one in passes)
            return backward(passes, loss)

        self.actor.backend.backward = noted

    def _megatron(self, options: Row, folder: Path) -> None:
        from job_plane.actor import Work

        work = Work(options)
        work.setup()
        self.actor = work.actor

        def bare(batch: Batch) -> float:
            whole = [[group for groups in batch for group in groups]]
            (seconds,) = work.bare(whole, 1)["steps_s"]
            return float(seconds)

        self.bare = bare

    def _fsdp(self, options: Row, folder: Path) -> None:
        from gyre.workloads.base import WorkloadContext
        from gyre.workloads.fsdp.actor import FsdpActor

        self.actor: Any = FsdpActor()
        self.actor.context = WorkloadContext(
            "bench", "actor", 0, 1, config=options["config"], directory=Path(options["directory"])
        )
        self.actor.setup()
        made = Bare(folder, self.actor)

        def bare(batch: Batch) -> float:
            passes = made.passes(batch)
            began = self._now()
            made.step(passes, own=True)
            return self._now() - began

        self.bare = bare

    def _now(self) -> float:
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.monotonic()

    def timed(self, row: str, batch: Batch) -> Row:
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
        if row == "bare":
            self.torch.use_deterministic_algorithms(False)
            found: Row = {"seconds": self.bare(batch), "computed": samples_tokens(batch)}
        else:
            from gyre.workloads.learner.devices import make_deterministic

            make_deterministic()
            self.actor.backend.prompts_once = row == "once"
            found = self._own(batch)
        if self.cuda:
            found["gib"] = self.torch.cuda.max_memory_allocated() / 2**30
        return found

    def _own(self, batch: Batch) -> Row:
        """A step of the actor, whose groups are new each time: it refuses those that it has trained."""
        self.step += 1
        self.computed, ids = 0, []
        began = self._now()
        self.actor.begin(self.step)
        for index, groups in enumerate(batch):
            fresh = [
                replace(group, id=self.step * 100_000 + len(ids) + at) for at, group in enumerate(groups)
            ]
            ids += [group.id for group in fresh]
            self.actor.accumulate(fresh, step=self.step, index=index)
        self.actor.apply(step=self.step, indices=len(batch), group_ids=ids)
        return {"seconds": self._now() - began, "computed": self.computed}


def side_main(given: Row) -> None:
    """Print a row for each case, as one line of JSON."""
    backend, until = given["backend"], given["until"]
    with tempfile.TemporaryDirectory(prefix="prompts_once_") as place:
        side: Side | None = None
        for number, prompt_tokens in enumerate(given["prompt_tokens"]):
            case = case_of(given, prompt_tokens)
            side = side or Side(backend, case, Path(place))
            left = len(given["prompt_tokens"]) - number
            share = time.monotonic() + (until - time.monotonic()) / left
            took: dict[str, list[Row]] = {row: [] for row in ROWS}
            for at in range(given["steps"]):
                if at > WARM and time.monotonic() + slowest(took) > share:
                    break
                batch = case.batch(at)
                for row in ROWS:
                    took[row].append({**side.timed(row, batch), "tokens": samples_tokens(batch)})
            print("ROW " + json.dumps(summary(backend, case, took)), flush=True)
    sys.stdout.flush()
    os._exit(0)  # nothing here is worth an orderly end


def slowest(took: dict[str, list[Row]]) -> float:
    """Seconds of a batch in all rows."""
    return max(map(sum, zip(*([one["seconds"] for one in rows] for rows in took.values()), strict=True)))


def summary(backend: str, case: Case, took: dict[str, list[Row]]) -> Row:
    import torch

    kept = {row: found[WARM:] for row, found in took.items()}
    rows = {}
    for row, found in kept.items():
        ratios = [bare["seconds"] / own["seconds"] for bare, own in zip(kept["bare"], found, strict=True)]
        tokens = sum(one["tokens"] for one in found)
        rows[row] = {
            "tokens_s": statistics.median(one["tokens"] / one["seconds"] for one in found),
            "by_bare": statistics.median(ratios),
            "by_bare_least": min(ratios),
            "computed": sum(one["computed"] for one in found) / tokens,
            "gib": max(one.get("gib", 0.0) for one in found),
            "steps_s": [round(one["seconds"], 4) for one in found],
        }
    return {
        "backend": backend,
        "case": case.name,
        "steps": len(kept["bare"]),
        "device": torch.cuda.get_device_name() if not case.dry else platform.processor(),
        "torch": torch.__version__,
        "rows": rows,
    }


def measured(given: Row, until: float) -> list[Row]:
    """The rows of a back end's process; the last one says what went wrong, if something did."""
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    try:
        told = subprocess.run(
            [sys.executable, __file__, "--side", json.dumps(given | {"until": until})],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=max(30.0, until + 30.0 - time.monotonic()),
        ).stdout
    except subprocess.TimeoutExpired as error:
        told = (error.stdout or b"").decode()
    rows = [json.loads(line[4:]) for line in told.splitlines() if line.startswith("ROW ")]
    if len(rows) < len(given["prompt_tokens"]):
        rows.append({"backend": given["backend"], "case": "", "error": told[-3000:], "rows": {}})
    return rows


def table(cases: list[Row]) -> str:
    lines = ["| case | what | tokens/s | by bare | least | computed | GiB |", "| --- |" + " --- |" * 6]
    for case in cases:
        if "error" in case:
            lines.append(f"| {case['backend']} | failed | | | | | |\n\n{case['error']}\n")
        for name, row in case["rows"].items():
            numbers = [f"{row['tokens_s']:,.0f}", f"{row['by_bare']:.2f}", f"{row['by_bare_least']:.2f}"]
            numbers += [f"{row['computed']:.2f}", f"{row['gib']:.1f}"]
            lines.append(f"| {case['backend']} {case['case']} | {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6B")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 1024])
    parser.add_argument("--steps", type=int, default=5, help="of a case, the first of which is not counted")
    parser.add_argument("--within", type=float, default=140.0, help="seconds for all")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side_main(json.loads(given.side))
    began, found = time.monotonic(), []
    for number, backend in enumerate(given.backend):
        left = given.within - (time.monotonic() - began)
        until = time.monotonic() + left / (len(given.backend) - number)
        asked = {
            "backend": backend,
            "shape": given.shape,
            "prompt_tokens": given.prompt_tokens,
            "steps": given.steps,
            "dry": given.dry_run,
        }
        found += measured(asked, until)
        if given.json:
            told = {"cases": found, "seconds": round(time.monotonic() - began, 1)}
            given.json.write_text(json.dumps(told, indent=1))
    print(table(found))
    return int(any("error" in case for case in found))


if __name__ == "__main__":
    sys.exit(main())
