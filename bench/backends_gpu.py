"""What a step of Megatron and of FSDP2 is made of, on the same passes: tokens/s, and the time by kind of kernel.

    python bench/backends_gpu.py [--json FILE] [--only TEXT] [--gpus N] [--dry-run]

A case is a back end, a shape, activations kept, computed again or either by `auto`, on one or two GPUs; each rank is a
process, and as many cases run at once as there are GPUs. A step is eight passes of other widths, up to 8,192 tokens a
rank (Megatron's ranks share one model, and a pass of twice the width), and an optimizer step. What `auto` chose is
printed. `tok/s` counts the tokens of all ranks in
the fastest of the steps; another one is profiled on the first rank: milliseconds of its kernels by kind, the rest as
`idle`. With `--dry-run` everything is tiny and on CPUs, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import numpy as np  # noqa: E402
from backend_steps import WIDEST, WIDEST_DRY, passes_of, step  # noqa: E402
from job_plane.case import Row  # noqa: E402
from memory_gpu import SMALL, Case, _backend  # noqa: E402

STEPS = 4
TOGETHER = 2
"""Passes of a micro-batch."""
WITHIN_S = 100.0
"""For a case, its processes' start included."""

KINDS = {
    "product": ("gemm", "cutlass", "nvjet", "cublas", "splitk"),
    "attention": ("flash", "attn", "attention"),
    "communication": ("nccl",),
    "copy": ("memcpy", "memset", "copy_", "copy", "cat"),
    "norm": ("norm",),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "reduction": ("reduce", "softmax"),
    "elementwise": ("elementwise", "vectorized", "swiglu", "triton"),
}


def cases(dry: bool) -> list[Case]:
    big, one = ("tiny", "tiny") if dry else ("4B", "1.7B")
    found = [Case("megatron", big, vocab=SMALL, ranks=2)]
    found += [Case("fsdp", big, vocab=SMALL, ranks=2, recompute=again) for again in (True, False, "auto")]
    return found + [Case(backend, one, vocab=SMALL) for backend in ("megatron", "fsdp")]


def rank_main(given: Row) -> None:
    import torch

    case, rank, dry = Case(**given["case"]), given["rank"], given["dry"]
    torch.set_num_threads(1 if dry else 8)
    of_a_pass = case.ranks if case.backend == "megatron" else 1  # ranks that work on the same pass
    widest = (WIDEST_DRY if dry else WIDEST) * of_a_pass
    backend = _backend(case, rank, given["port"], dry, pass_tokens=widest)
    drawn = np.random.default_rng(0 if of_a_pass > 1 else rank)
    parts = passes_of(drawn, widest=widest, multiple=backend.width_multiple)
    tokens = sum(len(part.tokens) for part in parts) * case.ranks // of_a_pass
    row: Row = asdict(case) | {"tokens": tokens, "steps": [], "chose": backend.status().get("passes", "")}
    for _ in range(STEPS):
        row["steps"].append(step(backend, parts, together=TOGETHER))
    if not dry:
        row["memory"] = torch.cuda.max_memory_allocated()
        row |= profiled(torch, lambda: step(backend, parts, together=TOGETHER))
    if rank == 0:
        print("ROW " + json.dumps(row), flush=True)
    backend.close(keep=False)
    os._exit(0)


def profiled(torch: Any, work: Any) -> Row:
    """Milliseconds of kernels by kind, and the 25 kernels that take most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        began = time.monotonic()
        work()
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in found.key_averages():
        ms = event.self_device_time_total / 1e3
        if ms > 0:
            kernels[event.key] += ms
            kinds[kind_of(event.key)] += ms
    kinds["idle"] = seconds * 1e3 - sum(kinds.values())
    return {
        "profiled_s": seconds,
        "kinds": {name: round(ms, 1) for name, ms in kinds.most_common()},
        "kernels": {name[:160]: round(ms, 1) for name, ms in kernels.most_common(25)},
    }


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def started(case: Case, gpus: list[int], place: Path, dry: bool) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(case.ranks):
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment["CUDA_VISIBLE_DEVICES"] = "" if dry else str(gpus[rank])
        environment.pop("GYRE_DEVICES", None)
        given = {"case": asdict(case), "rank": rank, "port": port, "dry": dry}
        with (place / f"rank_{rank}.txt").open("w") as file:
            command = [sys.executable, __file__, "--rank", json.dumps(given)]
            processes.append(
                subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            )
    return processes


def run(wanted: list[Case], gpus: int, dry: bool) -> list[Row]:
    free, waiting, rows = list(range(gpus)), list(wanted), []
    running: list[tuple[Case, list[int], Path, list[subprocess.Popen[bytes]], float]] = []
    with tempfile.TemporaryDirectory() as root:
        while waiting or running:
            while waiting and len(free) >= waiting[0].ranks:
                case = waiting.pop(0)
                mine, free = free[: case.ranks], free[case.ranks :]
                place = Path(tempfile.mkdtemp(dir=root))
                running.append(
                    (case, mine, place, started(case, mine, place, dry), time.monotonic() + WITHIN_S)
                )
            time.sleep(0.2)
            for one in list(running):
                case, mine, place, processes, until = one
                codes = [process.poll() for process in processes]
                if None in codes and time.monotonic() < until and not any(codes):
                    continue
                for process in processes:
                    process.kill()
                    process.wait()
                running.remove(one)
                free += mine
                text = (place / "rank_0.txt").read_text()
                found = [line[4:] for line in text.splitlines() if line.startswith("ROW ")]
                rows.append(json.loads(found[-1]) if found else asdict(case) | {"error": text[-1500:]})
    return rows


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        name = Case(**{key: row[key] for key in Case.__dataclass_fields__}).name
        if "error" in row:
            lines.append(f"{name}: {row['error']}")
            continue
        lines.append(
            f"{name}: {row['tokens'] / min(row['steps']):,.0f} tok/s; steps "
            + " ".join(f"{s:.2f}" for s in row["steps"])
        )
        if row["chose"]:
            lines.append(f"    {row['chose']}")
        for key in ("kinds", "kernels"):
            lines += [f"    {ms:9.1f} ms  {what[:120]}" for what, ms in row.get(key, {}).items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPUs, and nothing is measured")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    wanted = [case for case in cases(given.dry_run) if given.only in case.name]
    rows = run(wanted, 2 if given.dry_run else given.gpus, given.dry_run)
    if given.json:
        machine = {"cpus": os.cpu_count(), "kernel": platform.release()}
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
